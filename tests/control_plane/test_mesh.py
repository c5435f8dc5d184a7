"""Ranks as threads: agreement, liveness, who is lost and why, errors in callbacks and in the middle of a frame."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.control_threads import ThreadExchange, in_threads, joined
from uccl_ep_serving.control_plane import steps
from uccl_ep_serving.control_plane.failures import Liveness
from uccl_ep_serving.control_plane.frames import GATHER, Frame
from uccl_ep_serving.control_plane.mesh import ControlMesh
from uccl_ep_serving.control_plane.steps import CLOSE, Steps
from uccl_ep_serving.errors import PeerError, PeerLost, PeerTimeout, ProtocolError, UcclEpError

#: Bounds what comes at once on an idle machine. Only a test that fails waits as long.
_LONG = 25.0


def _wait_until(condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` holds, at most _LONG seconds: what is expected is asserted afterwards."""
    deadline = time.monotonic() + _LONG
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)


def _two_steps(mesh: ControlMesh) -> None:
    for name in ("next", "after it"):
        mesh.steps.gather(name, timeout=_LONG)


@pytest.mark.parametrize("tcp", [False, True])
def test_gather_returns_everybodys_payload_in_rank_order(tcp: bool) -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange, tcp=tcp)
        rounds = [[data for data, _ in mesh.steps.gather(f"step {i}", b"%d.%d" % (i, exchange.rank))] for i in range(5)]
        local = mesh.local_peers
        mesh.steps.gather("end")
        mesh.goodbye()
        mesh.close()
        return rounds, local

    for rank, (rounds, local) in enumerate(in_threads(4, body)):
        assert rounds == [[b"%d.%d" % (i, peer) for peer in range(4)] for i in range(5)]
        assert local == (frozenset() if tcp else frozenset(range(4)) - {rank})


def test_who_is_in_the_next_step_already_is_known_by_its_name() -> None:
    """A rank looks between operations whether a peer asks for something, and joins it then."""

    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange)
        mesh.steps.gather("all here")
        seen = [mesh.steps.requested("rebuild")]
        exchange.all_gather(b"")
        if exchange.rank == 0:
            _wait_until(lambda: bool(mesh.steps.requested("rebuild")))
            seen += [mesh.steps.requested("rebuild"), mesh.steps.requested("build")]
        mesh.steps.gather("rebuild", b"to 4 MiB" if exchange.rank == 1 else b"")
        seen.append(mesh.steps.requested("rebuild"))
        mesh.goodbye()
        mesh.close()
        return seen

    asked, _ = in_threads(2, body)
    assert asked == [{}, {1: b"to 4 MiB"}, {}, {}]


def test_connections_to_other_hosts_are_probed_while_idle() -> None:
    """A host that loses its power says nothing: without probes of ours Linux would wait for two hours."""

    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange, tcp=True)
        options = [
            [link.socket.getsockopt(level, option) for level, option in _PROBES] for link in mesh._links.values()
        ]
        mesh.steps.gather("end")
        mesh.goodbye()
        mesh.close()
        return options

    assert in_threads(2, body) == [[[1, 10, 5, 3]], [[1, 10, 5, 3]]]


_PROBES = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
)


def test_a_rank_that_may_open_no_more_files_blames_itself() -> None:
    """It loses what its peers hand it: nobody masks a healthy one for that."""

    def body(exchange: ThreadExchange) -> UcclEpError | None:
        mesh = joined(exchange)
        mesh.steps.gather("all here")
        shortages: list[str] = []
        mesh.on_shortage = shortages.append
        try:
            if exchange.rank == 0:
                mesh._read_link = lost_descriptors  # type: ignore[method-assign]
            exchange.all_gather(b"")  # from now on what others send to rank 0 is read so
            try:
                # the reader may be in its own method still when the first comes
                _two_steps(mesh)
            except UcclEpError as error:
                assert bool(shortages) == (exchange.rank == 0)
                with pytest.raises(UcclEpError):
                    mesh.steps.gather("later")
                return error
            return None
        finally:
            exchange.all_gather(b"")
            mesh.close()

    def lost_descriptors(link: object) -> None:
        raise OSError(errno.EMFILE, "descriptors were lost on the way")

    short, *others = in_threads(3, body)
    assert isinstance(short, UcclEpError)
    assert not isinstance(short, PeerError)
    assert "rank 0 has no room for what rank" in str(short)
    assert "ulimit -n" in str(short)
    for error in others:
        assert isinstance(error, PeerLost)
        assert error.peer == 0
        assert "it failed (rank 0 has no room for what rank" in str(error)


def test_an_error_that_nobody_foresaw_outside_of_frames_is_told_to_all() -> None:
    """The thread that reads goes on: who waits for this rank learns that it cannot."""

    def body(exchange: ThreadExchange) -> UcclEpError:
        mesh = joined(exchange)
        mesh.steps.gather("all here")
        exchange.all_gather(b"")  # nobody waits in that step any more
        try:
            if exchange.rank == 0:
                assert mesh._mending is not None
                mesh._mending.let_in = unforeseen  # type: ignore[method-assign]
                found = threading.Event()
                mesh.on_shortage = lambda why: found.set()
                with socket.create_connection((mesh.address, mesh.port)):
                    assert found.wait(_LONG)
            with pytest.raises(UcclEpError) as caught:
                _two_steps(mesh)
            return caught.value
        finally:
            exchange.all_gather(b"")
            mesh.close()

    def unforeseen() -> None:
        raise KeyError(17)

    own, *others = in_threads(3, body)
    assert not isinstance(own, PeerError)
    assert "rank 0 could not serve a control connection: KeyError: 17. Next step" in str(own)
    for error in others:
        assert isinstance(error, PeerLost)
        assert error.peer == 0
        assert "it failed (rank 0 could not serve a control connection" in str(error)


def test_an_error_that_nobody_foresaw_loses_its_peer_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """It must not end the thread that reads all connections: every later step would wait for its deadline."""

    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange)
        reading, failing = threading.Lock(), threading.Event()
        if exchange.rank == 0:
            read = mesh._read_link

            def fail_for_one(link: Any) -> None:
                with reading:
                    if link.peer == 1 and failing.is_set():
                        raise KeyError(17)
                    read(link)

            mesh._read_link = fail_for_one  # type: ignore[method-assign]
        mesh.steps.gather("all here")
        exchange.all_gather(b"")
        try:
            # what reads the last frame would read the next one as well
            with reading:
                failing.set()
            exchange.all_gather(b"")
            if exchange.rank == 0:
                with pytest.raises(PeerLost, match="KeyError: 17") as caught:
                    mesh.steps.gather("next", timeout=_LONG)
                assert caught.value.peer == 1
            elif exchange.rank == 1:
                mesh.tell_doing(0, b"")  # a frame for rank 0 to read
            exchange.all_gather(b"")  # rank 0 has found out by itself before rank 2 tells it
            if exchange.rank != 1:
                mesh.mask_out(1)
                return mesh.steps.gather("further", b"%d" % exchange.rank, timeout=_LONG)
            return None
        finally:
            exchange.all_gather(b"")
            mesh.goodbye()
            mesh.close()

    others = [(b"0", []), (b"", []), (b"2", [])]
    assert in_threads(3, body) == [others, None, others]
    assert "rank 0 lost rank 1: its control connection ended (KeyError: 17: down)" in caplog.text
    assert "rank 0: the group goes on without rank 1: " in caplog.text


@pytest.mark.parametrize("tcp", [False, True])
def test_a_closed_connection_is_a_lost_peer_and_a_goodbye_is_not(tcp: bool) -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange, tcp=tcp)
        mesh.steps.gather("all here")
        exchange.all_gather(b"")  # nobody waits in that step any more: whom it lacks it would not get
        if exchange.rank == 1:
            mesh.goodbye()
            mesh.close()
            return None
        if exchange.rank == 2:
            mesh.abandon()  # what the kernel does for a killed process
            return None
        try:
            mesh.mask_out(1)
            # a loss that is not seen ends in PeerTimeout
            with pytest.raises(PeerLost, match="rank 2 is gone") as caught:
                mesh.steps.gather("next", timeout=_LONG)
            assert caught.value.peer == 2
            return mesh.liveness.lost_unmasked
        finally:
            mesh.close()

    assert in_threads(3, body)[0] == [2]


def test_a_handler_that_closes_in_the_middle_of_a_frame_does_not_wait_for_itself() -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange, tcp=True)
        mesh.steps.gather("all here")
        if exchange.rank == 1:
            _wait_until(lambda: bool(mesh.liveness.lost or mesh.liveness.departed))
            exchange.all_gather(b"")
            mesh.close()
            return None
        outbox = mesh._links[1].outbox
        assert outbox is not None
        seal, took = outbox._seal.seal, list[float]()

        def interrupted(frame: bytes) -> bytes:
            sealed = seal(frame)
            if not took:
                took.append(time.monotonic())
                mesh.goodbye()
                mesh.close()
                took.append(time.monotonic())
            return sealed

        outbox._seal.seal = interrupted  # type: ignore[method-assign]
        mesh.goodbye()
        exchange.all_gather(b"")
        return took[1] - took[0]

    assert in_threads(2, body)[0] < 0.9


def test_what_was_said_to_a_rank_that_has_left_holds_no_close() -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange, tcp=True)
        mesh.steps.gather("all here")
        if exchange.rank == 1:
            mesh.goodbye()
            mesh.close()
            exchange.all_gather(b"")
            return None
        exchange.all_gather(b"")
        _wait_until(lambda: 1 in mesh.liveness.departed)
        outbox = mesh._links[1].outbox
        assert outbox is not None
        _wait_until(lambda: mesh.goodbye() or outbox.broken)
        started = time.monotonic()
        mesh.close()
        return time.monotonic() - started

    assert in_threads(2, body)[0] < 0.5


def test_a_step_does_not_end_while_its_rank_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it runs again the parts of the others are there, and not read yet."""
    mesh_steps = Steps(0, 2, Liveness(0, 2), 1.0)
    mesh_steps.links = {1: SimpleNamespace(local=False, outbox=SimpleNamespace(post=lambda frame: True))}  # type: ignore[dict-item]
    clock, waits = [100.0], list[float]()
    monkeypatch.setattr(steps, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def wait_for(done: Callable[[], bool], seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 1:
            clock[0] += seconds + 3.0  # stopped meanwhile
        else:
            part = Frame(GATHER, 0, steps._prefix("here") + b"theirs", [])
            mesh_steps.keep(1, part)
        return done()

    monkeypatch.setattr(mesh_steps._changed, "wait_for", wait_for)
    assert mesh_steps.gather("here", b"mine") == [(b"mine", []), (b"theirs", [])]
    assert waits == [1.0, 0.5]


def test_a_silent_peer_and_a_peer_elsewhere_are_named() -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange)
        try:
            if exchange.rank == 0:
                with pytest.raises(PeerTimeout, match=r"ranks \[1\]") as caught:
                    mesh.steps.gather("alone", timeout=0.2)
                assert (caught.value.peer, caught.value.arrived, caught.value.expected) == (1, 0, 1)
                exchange.all_gather(b"")
                mesh.steps.gather("grow")
            else:
                exchange.all_gather(b"")
                with pytest.raises(ProtocolError, match=r"'wrong'.*'alone'|have not made the same calls"):
                    mesh.steps.gather("wrong")
                mesh.steps.gather("grow")
            return True
        finally:
            mesh.close()

    assert in_threads(2, body) == [True, True]


def test_a_forked_child_lets_go_of_the_connections() -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange)
        mesh.steps.gather("all here")
        return mesh

    zero, one = in_threads(2, body)
    child = os.fork()
    if child == 0:
        time.sleep(2 * _LONG)
        os._exit(0)
    try:
        one.abandon()
        _wait_until(lambda: bool(zero.liveness.lost))
        assert list(zero.liveness.lost) == [1]
        assert os.waitpid(child, os.WNOHANG) == (0, 0)  # although the child still lives
    finally:
        zero.close()
        os.kill(child, 9)
        os.waitpid(child, 0)


@pytest.mark.parametrize("closing", [0, 1])
def test_a_peer_that_closes_instead_is_named_with_what_it_did(closing: int) -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange)
        with pytest.raises(PeerLost) as caught:
            mesh.steps.gather(CLOSE if mesh.rank == closing else "window layout")
        exchange.all_gather(b"")
        mesh.close()
        return caught.value.peer, str(caught.value)

    told = in_threads(2, body)
    assert [peer for peer, _ in told] == [1, 0]
    assert told[closing][1].startswith(f"rank {1 - closing} has begun another step (window layout): ")
    assert told[1 - closing][1].startswith(
        f"window layout, rank {1 - closing}: rank {closing} has closed its Buffer. Likely cause: "
    )


def test_a_callback_that_raises_does_not_stop_the_reading() -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange)

        def fail(peer: int) -> None:
            raise RuntimeError("from a callback")

        mesh.on_lost = mesh.on_goodbye = fail
        mesh.steps.gather("all here")
        exchange.all_gather(b"")  # nobody waits in that step any more
        if exchange.rank == 1:
            mesh.abandon()
        else:
            mesh.mask_out(1)
            _wait_until(lambda: 1 in mesh.liveness.lost)
        exchange.all_gather(b"")  # what comes from now on is read after the callback raised
        if exchange.rank == 1:
            return None
        try:
            return mesh.steps.gather("next", b"%d" % exchange.rank)[2 - exchange.rank][0]
        finally:
            mesh.goodbye()
            mesh.close()

    assert in_threads(3, body) == [b"2", None, b"0"]


def test_a_limit_acts_once_and_what_arrives_is_read_on() -> None:
    """Its thread reads the control connections meanwhile; a block that ends in time is not acted on."""

    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange)
        acted: list[float] = []
        try:
            with mesh.limit(time.monotonic() + _LONG, lambda: acted.append(-1.0)):
                mesh.steps.gather("in time")
            deadline = time.monotonic() + 0.05
            with mesh.limit(deadline, lambda: acted.append(time.monotonic() - deadline)):
                _wait_until(lambda: bool(acted))
                for turn in range(5):  # each wakes the thread
                    mesh.steps.gather(f"after it {turn}", timeout=_LONG)
            return acted
        finally:
            exchange.all_gather(b"")
            mesh.close()

    for acted in in_threads(2, body):
        (late,) = acted
        assert 0 <= late < 5


def test_an_interrupted_send_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a frame may be out: a second one behind it would be read as its rest."""

    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange)
        mesh.steps.gather("all here")
        exchange.all_gather(b"")
        try:
            if exchange.rank == 1:

                def interrupted(connection: socket.socket, data: list[bytes], fds: list[int]) -> int:
                    connection.send(data[0][:10])
                    raise KeyboardInterrupt

                monkeypatch.setattr(socket, "send_fds", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    mesh.steps.gather("next", descriptors=[0])
            else:
                with pytest.raises(PeerLost, match="rank 1 is gone"):
                    mesh.steps.gather("next", timeout=_LONG)
            exchange.all_gather(b"")  # rank 1 lives on till then: only the end of its connection can tell
            return None
        finally:
            mesh.close()

    assert in_threads(2, body) == [None, None]


def test_a_process_that_does_not_run_notices_it(caplog: pytest.LogCaptureFixture) -> None:
    """Here the thread that reads does not; it says so of its process for as long as a deadline."""

    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange, timeout=1.0)
        try:
            mesh.steps.gather("all here")
            before = mesh.stood_still
            if exchange.rank == 1:
                select = mesh._selector.select
                stopped: Any = [lambda patience: time.sleep(1.2) or select(patience)]
                mesh._selector.select = lambda patience: (stopped.pop() if stopped else select)(patience)  # type: ignore[assignment, method-assign]
                _wait_until(lambda: mesh.stood_still)
                _, still = mesh.liveness.waits_for()
                _wait_until(lambda: not mesh.stood_still)
                return before, still
            time.sleep(2.0)
            return before, mesh.stood_still
        finally:
            exchange.all_gather(b"")
            mesh.close()

    assert in_threads(2, body) == [(False, False), (False, True)]
    assert "rank 1 did not run for" in caplog.text
