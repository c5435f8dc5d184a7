"""Ranks as threads: introductions, agreement, descriptors, liveness, and strangers."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from uccl_ep_serving.bootstrap import Introduction, introduce
from uccl_ep_serving.config import Settings
from uccl_ep_serving.control import CLOSE, ControlMesh
from uccl_ep_serving.control_frames import GATHER, GAVE_UP, send_frame
from uccl_ep_serving.errors import BootstrapError, ConfigError, PeerLost, PeerTimeout, ProtocolError
from uccl_ep_serving.live import LiveServer, query
from uccl_ep_serving.operation_log import OperationLog


class ThreadExchange:
    """All-gather among threads."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: list[bytes]) -> None:
        self.rank = rank
        self.size = len(board)
        self._barrier = barrier
        self._board = board

    def all_gather(self, payload: bytes) -> list[bytes]:
        self._board[self.rank] = payload
        self._barrier.wait(30)
        result = list(self._board)
        self._barrier.wait(30)
        return result


def in_threads(size: int, body: Callable[[ThreadExchange], Any]) -> list[Any]:
    """Results by rank; an exception is a result."""
    barrier, board = threading.Barrier(size), [b""] * size
    results: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            results[rank] = body(ThreadExchange(rank, barrier, board))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def joined(exchange: ThreadExchange, *, tcp: bool = False, **overrides: Any) -> ControlMesh:
    """A connected mesh; ``tcp`` pretends that every rank is on a host of its own."""
    settings = Settings.from_environment({}, **{"connect_timeout": 10.0, **overrides})
    mesh = ControlMesh(exchange.rank, exchange.size, settings)
    known = introduce(exchange, settings, socket_name=mesh.socket_name, address=mesh.address, port=mesh.port, sizes={})
    if tcp:
        import msgspec

        cards = tuple(msgspec.structs.replace(card, host=str(card.rank)) for card in known.cards)
        known = Introduction(cards, known.secret)
    mesh.connect(known)
    return mesh


@pytest.mark.parametrize("tcp", [False, True])
def test_gather_returns_everybodys_payload_in_rank_order(tcp: bool) -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange, tcp=tcp)
        rounds = [[data for data, _ in mesh.gather(f"step {i}", b"%d.%d" % (i, exchange.rank))] for i in range(5)]
        local = mesh.local_peers
        mesh.gather("end")
        mesh.goodbye()
        mesh.close()
        return rounds, local

    for rank, (rounds, local) in enumerate(in_threads(4, body)):
        assert rounds == [[b"%d.%d" % (i, peer) for peer in range(4)] for i in range(5)]
        assert local == (frozenset() if tcp else frozenset(range(4)) - {rank})


def test_descriptors_reach_peers_on_this_host() -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange)
        mine = os.memfd_create("test")
        os.write(mine, b"rank %d" % exchange.rank)
        got = mesh.gather("share", descriptors=[mine])
        texts = [os.pread(taken[0], 100, 0) if taken else b"" for _, taken in got]
        for _, taken in got:
            for descriptor in taken:
                os.close(descriptor)
        mesh.gather("end")
        os.close(mine)
        mesh.goodbye()
        mesh.close()
        return texts

    for rank, texts in enumerate(in_threads(3, body)):
        assert texts == [b"" if peer == rank else b"rank %d" % peer for peer in range(3)]


def test_connections_to_other_hosts_are_probed_while_idle() -> None:
    """A host that loses its power says nothing: without probes of ours Linux would wait for two hours."""

    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange, tcp=True)
        options = [
            [link.socket.getsockopt(level, option) for level, option in _PROBES] for link in mesh._links.values()
        ]
        mesh.gather("end")
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


def test_why_a_connection_ended_is_told_where_it_says_more() -> None:
    """A rank that may open no more files loses its peers by itself: the reason must not look like theirs."""

    def body(exchange: ThreadExchange) -> str:
        mesh = joined(exchange)
        mesh.gather("all here")
        try:
            if exchange.rank == 1:
                time.sleep(0.3)
                mesh.gather("next", timeout=5.0)
                return ""
            mesh._read_link = lost_descriptors  # type: ignore[method-assign]
            with pytest.raises(PeerLost) as caught:
                mesh.gather("next", timeout=5.0)
            return str(caught.value)
        finally:
            mesh.close()

    def lost_descriptors(link: object) -> None:
        raise OSError(errno.EMFILE, "descriptors were lost on the way")

    assert "closed without a goodbye: [Errno 24] descriptors were lost on the way)" in in_threads(2, body)[0]


def test_an_error_that_nobody_foresaw_loses_its_peer_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """It must not end the thread that reads all connections: every later step would wait for its deadline."""

    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange)
        mesh.gather("all here")
        exchange.all_gather(b"")
        try:
            if exchange.rank == 0:
                read = mesh._read_link

                def fail_for_one(link: Any) -> None:
                    if link.peer == 1:
                        raise KeyError(17)
                    read(link)

                mesh._read_link = fail_for_one  # type: ignore[method-assign]
            exchange.all_gather(b"")
            if exchange.rank == 0:
                with pytest.raises(PeerLost, match="KeyError: 17") as caught:
                    mesh.gather("next", timeout=5.0)
                assert caught.value.peer == 1
            elif exchange.rank == 1:
                mesh._sequence += 1
                mesh.announce_mask(2)  # a frame for rank 0 to read
            else:
                mesh._sequence += 1
            if exchange.rank != 1:
                return mesh.gather("further", b"%d" % exchange.rank, without=frozenset({1}), timeout=5.0)
            return None
        finally:
            exchange.all_gather(b"")
            mesh.goodbye()
            mesh.close()

    others = [(b"0", []), (b"", []), (b"2", [])]
    assert in_threads(3, body) == [others, None, others]
    assert "rank 0 lost rank 1: its control connection ended (KeyError: 17)" in caplog.text


@pytest.mark.parametrize("tcp", [False, True])
def test_a_closed_connection_is_a_lost_peer_and_a_goodbye_is_not(tcp: bool) -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange, tcp=tcp)
        mesh.gather("all here")
        if exchange.rank == 1:
            mesh.goodbye()
            time.sleep(0.1)
            mesh.close()
            return None
        if exchange.rank == 2:
            time.sleep(0.3)
            mesh.abandon()  # what the kernel does for a killed process
            return None
        start = time.monotonic()
        try:
            with pytest.raises(PeerLost, match="rank 2 is gone") as caught:
                mesh.gather("next", without=frozenset({1}), timeout=20.0)
            assert caught.value.peer == 2
            return time.monotonic() - start, list(mesh.absences.lost)
        finally:
            mesh.close()

    results = in_threads(3, body)
    took, lost = results[0]
    assert took < 1.3
    assert lost == [2]


def test_a_silent_peer_and_a_peer_elsewhere_are_named() -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange)
        try:
            if exchange.rank == 0:
                with pytest.raises(PeerTimeout, match=r"ranks \[1\]") as caught:
                    mesh.gather("alone", timeout=0.2)
                assert (caught.value.peer, caught.value.arrived, caught.value.expected) == (1, 0, 1)
                mesh.gather("grow")
            else:
                time.sleep(0.5)
                with pytest.raises(ProtocolError, match=r"'wrong'.*'alone'|have not made the same calls"):
                    mesh.gather("wrong")
                mesh.gather("grow")
            return True
        finally:
            mesh.close()

    assert in_threads(2, body) == [True, True]


def test_ranks_that_disagree_are_told_who_and_what() -> None:
    def body(exchange: ThreadExchange) -> Any:
        joined(exchange, proxies=1 + (exchange.rank == 2), channels=2)

    for error in in_threads(3, body):
        assert isinstance(error, ConfigError)
        assert "UCCL_EP_PROXIES: rank 0 has 1, rank 2" in str(error)


def test_a_wrong_secret_is_refused_and_strangers_do_not_disturb() -> None:
    def body(exchange: ThreadExchange) -> Any:
        settings = Settings.from_environment({}, connect_timeout=3.0)
        mesh = ControlMesh(exchange.rank, 2, settings)
        known = introduce(
            exchange, settings, socket_name=mesh.socket_name, address=mesh.address, port=mesh.port, sizes={}
        )
        if exchange.rank == 1:
            for noise in (b"GET / HTTP/1.1\r\n\r\n" * 10, b""):
                with socket.create_connection((known.cards[0].address, known.cards[0].port)) as stranger:
                    stranger.sendall(noise)
            known = Introduction(known.cards, b"x" * 32)
        mesh.connect(known)

    zero, one = in_threads(2, body)
    assert isinstance(one, BootstrapError)
    assert "the two sides do not have the same job secret" in str(one)
    assert isinstance(zero, BootstrapError)
    assert "ranks [1] have not connected" in str(zero)


def test_silent_strangers_never_push_out_a_rank() -> None:
    """More of them than are kept, on both listeners, before and while the ranks connect."""

    def body(exchange: ThreadExchange) -> Any:
        settings = Settings.from_environment({}, connect_timeout=10.0)
        mesh = ControlMesh(exchange.rank, 3, settings)
        known = introduce(
            exchange, settings, socket_name=mesh.socket_name, address=mesh.address, port=mesh.port, sizes={}
        )
        strangers = []
        for card in known.cards:
            for _ in range(30):
                strangers.append(socket.create_connection((card.address, card.port)))
                strangers.append(socket.socket(socket.AF_UNIX))
                strangers[-1].connect("\0" + card.socket_name)
        try:
            mesh.connect(known)
            return [data for data, _ in mesh.gather("all here", b"%d" % exchange.rank)]
        finally:
            for stranger in strangers:
                stranger.close()
            mesh.close()

    assert in_threads(3, body) == [[b"0", b"1", b"2"]] * 3


def test_a_forked_child_lets_go_of_the_connections() -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange)
        mesh.gather("all here")
        return mesh

    zero, one = in_threads(2, body)
    child = os.fork()
    if child == 0:
        time.sleep(3)
        os._exit(0)
    try:
        one.abandon()
        deadline = time.monotonic() + 1.0
        while not zero.absences.lost and time.monotonic() < deadline:
            time.sleep(0.01)
        assert zero.absences.lost == [1]  # although the child still lives
    finally:
        zero.close()
        os.kill(child, 9)
        os.waitpid(child, 0)


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_an_answer_to_a_step_that_was_given_up_leaves_no_descriptor() -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange)
        mine = os.memfd_create("test")
        try:
            if exchange.rank == 0:
                mesh.gather("all here")
                before = open_descriptors()
                with pytest.raises(PeerTimeout, match=r"ranks \[1\]"):
                    mesh.gather("share", timeout=0.2)
                time.sleep(0.6)  # rank 1's answer comes in now
                return open_descriptors() - before, dict(mesh._inbox)
            mesh.gather("all here")
            time.sleep(0.4)
            for _, taken in mesh.gather("share", descriptors=[mine]):
                assert not taken
            time.sleep(0.6)
            return None
        finally:
            os.close(mine)
            mesh.close()

    assert in_threads(2, body) == [(set(), {}), None]


@pytest.mark.parametrize("how", ["malformed", "twice", "no frame"])
def test_descriptors_of_what_cannot_be_handled_are_closed(how: str) -> None:
    """Rank 1 gets the reading end of a pipe with it; once nobody has that end open, writing fails."""

    def body(exchange: ThreadExchange) -> bool:
        mesh = joined(exchange)
        closed = False
        if mesh.rank == 0:
            reading, writing = os.pipe()
            link = mesh.blame.links[1]
            if how == "malformed":
                send_frame(link, GAVE_UP, body=b"x", descriptors=[reading])
            elif how == "twice":
                send_frame(link, GATHER, 7, b"\1\0x")
                send_frame(link, GATHER, 7, b"\1\0x", [reading])
            else:
                socket.send_fds(link.socket, [b"no frame" * 10], [reading])
            os.close(reading)
            deadline = time.monotonic() + 5
            while not closed and time.monotonic() < deadline:
                time.sleep(0.01)
                try:
                    os.write(writing, b"x")
                except BrokenPipeError:
                    closed = True
            os.close(writing)
        exchange.all_gather(b"")
        mesh.close()
        return closed

    assert in_threads(2, body)[0] is True


@pytest.mark.parametrize("closing", [0, 1])
def test_a_peer_that_closes_instead_is_named_with_what_it_did(closing: int) -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange)
        with pytest.raises(PeerLost) as caught:
            mesh.gather(CLOSE if mesh.rank == closing else "window layout")
        exchange.all_gather(b"")
        mesh.close()
        return caught.value.peer, str(caught.value)

    told = in_threads(2, body)
    assert [peer for peer, _ in told] == [1, 0]
    assert told[closing][1].startswith(f"rank {1 - closing} has begun another step (window layout): ")
    assert told[1 - closing][1].startswith(
        f"window layout, rank {1 - closing}: rank {closing} has closed its Buffer. Likely cause: "
    )


def test_a_step_that_fails_gives_back_the_descriptors_it_got() -> None:
    """Ranks 0 and 1 hand theirs over; rank 2 never takes the step, so it fails on both and waits unread on rank 2."""

    def body(exchange: ThreadExchange) -> None:
        mesh = joined(exchange)
        mine = os.memfd_create("test")
        try:
            mesh.gather("all here")
            if exchange.rank != 2:
                with pytest.raises(PeerTimeout, match=r"ranks \[2\]"):
                    mesh.gather("share", descriptors=[mine], timeout=0.3)
            exchange.all_gather(b"")
        finally:
            os.close(mine)
            mesh.close()

    before = open_descriptors()
    assert in_threads(3, body) == [None, None, None]
    assert open_descriptors() - before == set()


def test_a_rank_that_gives_up_while_connecting_is_named_at_once() -> None:
    def body(exchange: ThreadExchange) -> Any:
        settings = Settings.from_environment({}, connect_timeout=30.0)
        mesh = ControlMesh(exchange.rank, exchange.size, settings)
        known = introduce(
            exchange, settings, socket_name=mesh.socket_name, address=mesh.address, port=mesh.port, sizes={}
        )
        start = time.monotonic()
        try:
            if exchange.rank == 1:
                return None
            mesh.connect(known)
        except BootstrapError as error:
            return time.monotonic() - start, str(error)
        finally:
            mesh.close()

    (took0, text0), _, (took2, text2) = in_threads(3, body)
    assert max(took0, took2) < 8
    assert "nobody listens for rank 1" in text2
    assert "rank 2" in text0
    assert "left while the ranks were connecting" in text0


def test_silent_strangers_do_not_hold_up_the_group() -> None:
    strangers: list[socket.socket] = []

    def body(exchange: ThreadExchange) -> Any:
        settings = Settings.from_environment({}, connect_timeout=20.0)
        mesh = ControlMesh(exchange.rank, 2, settings)
        known = introduce(
            exchange, settings, socket_name=mesh.socket_name, address=mesh.address, port=mesh.port, sizes={}
        )
        if exchange.rank == 1:
            strangers.extend(
                socket.create_connection((known.cards[0].address, known.cards[0].port)) for _ in range(100)
            )
        exchange.all_gather(b"")
        start = time.monotonic()
        mesh.connect(known)
        took = time.monotonic() - start
        mesh.gather("all here")
        mesh.goodbye()
        mesh.close()
        return took

    try:
        assert max(in_threads(2, body)) < 3
    finally:
        for stranger in strangers:
            stranger.close()


def test_equal_host_identities_without_a_common_socket_meet_over_tcp() -> None:
    """Two machines started from one snapshot have the same boot id and the same namespace number."""
    import msgspec

    def body(exchange: ThreadExchange) -> Any:
        settings = Settings.from_environment({}, connect_timeout=10.0)
        mesh = ControlMesh(exchange.rank, 2, settings)
        known = introduce(
            exchange, settings, socket_name=mesh.socket_name, address=mesh.address, port=mesh.port, sizes={}
        )
        cards = tuple(msgspec.structs.replace(card, socket_name=card.socket_name + "x") for card in known.cards)
        mesh.connect(Introduction(cards, known.secret))
        local = mesh.local_peers
        mesh.gather("all here")
        mesh.goodbye()
        mesh.close()
        return local

    assert in_threads(2, body) == [frozenset(), frozenset()]


def test_a_callback_that_raises_does_not_stop_the_reading() -> None:
    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange)

        def fail(peer: int) -> None:
            raise RuntimeError("from a callback")

        mesh.on_lost = mesh.on_goodbye = fail
        mesh.gather("all here")
        exchange.all_gather(b"")  # nobody waits in that step any more
        try:
            if exchange.rank == 1:
                return None
            if exchange.rank == 2:
                return mesh.gather("next", b"2", without=frozenset({1}))[0][0]
            time.sleep(0.3)
            return mesh.gather("next", b"0", without=frozenset({1}))[2][0]
        finally:
            if exchange.rank == 1:
                mesh.abandon()
            else:
                mesh.goodbye()
                mesh.close()

    assert in_threads(3, body) == [b"2", None, b"0"]


def test_an_interrupted_send_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a frame may be out: a second one behind it would be read as its rest."""

    def body(exchange: ThreadExchange) -> Any:
        mesh = joined(exchange)
        mesh.gather("all here")
        exchange.all_gather(b"")
        try:
            if exchange.rank == 1:

                def interrupted(connection: socket.socket, data: list[bytes], fds: list[int]) -> int:
                    connection.send(data[0][:10])
                    raise KeyboardInterrupt

                monkeypatch.setattr(socket, "send_fds", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    mesh.gather("next", descriptors=[0])
                time.sleep(2.0)  # it lives on, so that only the end of its connection can tell
                return None
            with pytest.raises(PeerLost, match="rank 1 is gone"):
                mesh.gather("next", timeout=1.0)
            return None
        finally:
            mesh.close()

    assert in_threads(2, body) == [None, None]


def test_the_live_counters_take_another_name_and_ignore_who_holds_theirs() -> None:
    first = LiveServer(dict)
    number = int(first.name.rpartition(".")[2])
    first.close()
    taken = f"{first.name.rpartition('.')[0]}.{number + 1}"
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind('\\0' + sys.argv[1]); s.listen();"
        "print(flush=True); sys.stdin.read()"
    )
    squatter = subprocess.Popen([sys.executable, "-c", code, taken], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert squatter.stdout is not None
        squatter.stdout.readline()
        server = LiveServer(lambda: {"number": 1})
        try:
            assert server.name != taken
            assert query(os.getpid(), timeout=1.0) == [{"number": 1}]
        finally:
            server.close()
    finally:
        squatter.kill()
        squatter.communicate()


def test_the_live_counters_outlast_a_lack_of_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [OSError(errno.EMFILE, "Too many open files")]
    accept = socket.socket.accept

    def out_of_descriptors(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", out_of_descriptors)
    server = LiveServer(lambda: {"number": 3})
    try:
        assert query(os.getpid(), timeout=5.0) == [{"number": 3}]
        assert "not served for a second: [Errno 24]" in caplog.text
    finally:
        server.close()


def test_live_counters_answer_only_while_open() -> None:
    log = OperationLog()
    for duration in range(1, 101):
        log.record("ll_dispatch", 3, 2, duration * 1000, expert_rows=5)
    server = LiveServer(lambda: {"ops": log.snapshot()})
    other = LiveServer(lambda: {"number": 2})
    try:
        first, second = query(os.getpid())
        ops = first["ops"]["ll_dispatch"]
        assert (ops["count"], ops["tokens"], ops["rows"], ops["expert_rows"]) == (100, 300, 200, 500)
        assert ops["p50_us"] == pytest.approx(50.5)
        assert ops["p99_us"] == pytest.approx(99.0, abs=0.2)
        assert second == {"number": 2}
    finally:
        server.close()
        other.close()
    assert query(os.getpid()) == []
