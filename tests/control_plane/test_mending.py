"""A control connection over TCP that breaks while both processes live is made again: no frame lost, none twice."""

from __future__ import annotations

import contextlib
import random
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.control_threads import ThreadExchange, in_threads, introduced
from tests.support.tcp_relay import Relay, garbler
from uccl_ep_serving.control_plane import mending
from uccl_ep_serving.control_plane.bootstrap import Introduction
from uccl_ep_serving.control_plane.endings import DEAD, DOWN, GONE, Endings
from uccl_ep_serving.control_plane.frames import count_frame
from uccl_ep_serving.control_plane.links import MAGIC, Link, identity_of
from uccl_ep_serving.control_plane.mesh import ControlMesh
from uccl_ep_serving.control_plane.outbox import Outbox
from uccl_ep_serving.control_plane.seal import Seal
from uccl_ep_serving.errors import PeerError, PeerLost, UcclEpError
from uccl_ep_serving.protocol.frame import CHALLENGE_BYTES, PREFIX_BYTES, Verdict, decode_address, encode_verdict
from uccl_ep_serving.protocol.handshake import Refused, connect

#: Longest of what a test waits for; only one that fails waits as long.
_LONG = 10.0
_KEY = b"k" * 32


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection may break as often as it likes, and while it is made again."""
    monkeypatch.setattr(mending, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(mending, "RECONNECT_SECONDS", 5.0)


class Wires:
    """Relays before the listeners of all ranks."""

    def __init__(self) -> None:
        self.relays: dict[int, Relay] = {}
        self.introduction: Introduction | None = None

    def join(self, exchange: ThreadExchange) -> ControlMesh:
        """A connected mesh whose rank is reached through its relay."""
        mesh, known = introduced(exchange)
        self.relays[exchange.rank] = Relay((mesh.address, mesh.port))
        exchange.all_gather(b"")
        cards = []
        for card in known.cards:
            address, port = decode_address(self.relays[card.rank].address)
            cards.append(msgspec.structs.replace(card, host=str(card.rank), address=address, port=port))
        self.introduction = Introduction(tuple(cards), known.secret)
        mesh.connect(self.introduction)
        return mesh

    def close(self) -> None:
        for relay in self.relays.values():
            relay.close()


def leave(mesh: ControlMesh) -> None:
    mesh.steps.gather("end", timeout=_LONG)
    mesh.goodbye()
    mesh.close()


def ranks(size: int, body: Callable[[ThreadExchange, Wires], Any]) -> list[Any]:
    """Results of ``body`` by rank; each was closed."""
    wires = Wires()
    try:
        return in_threads(size, lambda exchange: body(exchange, wires))
    finally:
        wires.close()


def rounds(mesh: ControlMesh, count: int, nbytes: int = 10) -> list[list[bytes]]:
    """Gathers in which each rank says its number and the round's."""

    def said(rank: int, number: int) -> bytes:
        return b"%d.%d" % (rank, number) + bytes(nbytes)

    found = []
    for number in range(count):
        gathered = [data for data, _ in mesh.steps.gather(f"{number}", said(mesh.rank, number), timeout=_LONG)]
        assert gathered == [said(rank, number) for rank in range(mesh.ranks)]
        found.append(gathered)
    return found


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("how", ["reset", "close", "near", "far"])
def test_between_two_steps(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also where one end alone hears of it, whichever it is."""

    def body(exchange: ThreadExchange, wires: Wires) -> Any:
        mesh = wires.join(exchange)
        for _ in range(2):
            rounds(mesh, 3)
            exchange.all_gather(b"")
            if exchange.rank == 0:
                # a connection that is made again may go the other way
                assert sum(relay.cut(how) for relay in wires.relays.values()) >= 3
            exchange.all_gather(b"")
        rounds(mesh, 3)
        stopped = mesh.liveness.stopped
        leave(mesh)
        return stopped or mesh.reconnections

    found = ranks(3, body)
    assert sum(found) == caplog.text.count("was connected again") >= 3


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(("nbytes", "count"), [(10, 600), (300_000, 60)])
def test_in_the_middle_of_steps(nbytes: int, count: int, caplog: pytest.LogCaptureFixture) -> None:
    """Small frames, and those that fill the sockets' buffers, cut anywhere, again and again."""

    def body(exchange: ThreadExchange, wires: Wires) -> Any:
        mesh = wires.join(exchange)
        stop = threading.Event()

        def cutter() -> None:
            dice = random.Random(1)
            while not stop.wait(0.08):
                wires.relays[dice.randrange(3)].cut(dice.choice(["reset", "close", "near", "far"]))

        if exchange.rank == 0:
            thread = threading.Thread(target=cutter)
            thread.start()
        try:
            rounds(mesh, count, nbytes)
        finally:
            if exchange.rank == 0:
                stop.set()
                thread.join()
        leave(mesh)
        return "fine"

    assert ranks(3, body) == ["fine"] * 3
    again = [record.args[-1] for record in caplog.records if "sent again" in record.msg]
    assert sum(again) > 0


@pytest.mark.usefixtures("often")
def test_on_a_wire_that_alters_frames(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing that was altered counts, and no rank is accused of it: it was not the peer."""

    def body(exchange: ThreadExchange, wires: Wires) -> Any:
        mesh = wires.join(exchange)
        exchange.all_gather(b"")
        for seed, relay in enumerate(wires.relays.values()):
            relay.alter = garbler(seed, 50)
        rounds(mesh, 300)
        exchange.all_gather(b"")
        for relay in wires.relays.values():
            relay.alter = bytes
        leave(mesh)
        return mesh.liveness.lost

    assert ranks(3, body) == [{}] * 3
    assert "a control frame was altered on the way" in caplog.text
    assert "forbid" not in caplog.text


def test_a_wire_that_alters_everything_is_tried_a_few_times_only(caplog: pytest.LogCaptureFixture) -> None:
    """What breaks again at once waits longer each time, until the connection counts as lost."""

    def body(exchange: ThreadExchange, wires: Wires) -> Any:
        mesh = wires.join(exchange)
        exchange.all_gather(b"")
        magic = MAGIC.to_bytes(4, "little")  # of frames; handshakes have another
        for relay in wires.relays.values():  # a connection that is made again may go the other way
            relay.alter = lambda data: data.replace(magic, bytes(4))
        exchange.all_gather(b"")
        with pytest.raises(UcclEpError):
            rounds(mesh, 1)
        exchange.all_gather(b"")
        mesh.close()

    ranks(2, body)
    assert "a control frame was altered on the way" in caplog.text
    assert caplog.text.count("was connected again") < 30


def test_a_second_break_within_the_bound_is_the_same_one() -> None:
    """What was made again may have been an attempt that the peer had given up: that costs nobody."""

    def body(exchange: ThreadExchange, wires: Wires) -> Any:
        mesh = wires.join(exchange)
        rounds(mesh, 1)
        exchange.all_gather(b"")
        if exchange.rank == 0:
            assert mesh._mending is not None
            for _ in range(2):
                before = dict(mesh._mending._mended)
                wires.relays[0].cut()
                deadline = time.monotonic() + _LONG
                while mesh._mending._mended == before and time.monotonic() < deadline:
                    time.sleep(0.001)
        exchange.all_gather(b"")
        rounds(mesh, 3)
        leave(mesh)
        return "fine"

    assert ranks(2, body) == ["fine"] * 2


def test_a_connection_that_was_made_again_long_ago_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mending, "RECONNECT_SECONDS", 0.5)
    monkeypatch.setattr(mending, "AGAIN_SECONDS", 0.1)

    def body(exchange: ThreadExchange, wires: Wires) -> Any:
        mesh = wires.join(exchange)
        rounds(mesh, 1)
        for _ in range(2):
            exchange.all_gather(b"")
            if exchange.rank == 0:
                # either rank may have connected
                assert sum(relay.cut() for relay in wires.relays.values()) >= 1
            exchange.all_gather(b"")
            rounds(mesh, 1)
            time.sleep(0.6)
        leave(mesh)
        return "fine"

    assert ranks(2, body) == ["fine"] * 2


def test_a_second_break_soon_after_the_first_costs_the_higher_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mending, "RECONNECT_SECONDS", 0.5)

    def body(exchange: ThreadExchange, wires: Wires) -> Any:
        mesh = wires.join(exchange)
        rounds(mesh, 1)
        exchange.all_gather(b"")
        if exchange.rank == 0:
            wires.relays[0].cut(count=1)
            deadline = time.monotonic() + _LONG
            while not mesh._mending._mended and time.monotonic() < deadline:  # type: ignore[union-attr]
                time.sleep(0.005)
            time.sleep(mending.RECONNECT_SECONDS)
            # those who connected again are the newest
            wires.relays[0].cut(count=1)
        try:
            rounds(mesh, 3)
        except UcclEpError as error:
            return error
        finally:
            exchange.all_gather(b"")
            mesh.close()
        return None

    results = ranks(3, body)
    lost = [rank for rank, error in enumerate(results) if not isinstance(error, PeerError)]
    assert lost in ([1], [2])
    for rank, error in enumerate(results):
        if rank not in lost:
            assert error.peers == tuple(lost)


@pytest.mark.parametrize("was_mended", [False, True])
def test_a_process_that_ended_is_named_at_once(was_mended: bool) -> None:
    """Also soon after its connection was made again: only because its death is proven does rank 1 go on without it."""

    def body(exchange: ThreadExchange, wires: Wires) -> Any:
        mesh = wires.join(exchange)
        rounds(mesh, 1)
        exchange.all_gather(b"")
        if was_mended:
            if exchange.rank == 0:
                # an attempt that was given up may still be there
                assert sum(relay.cut() for relay in wires.relays.values()) >= 1
            exchange.all_gather(b"")
            rounds(mesh, 1)
            exchange.all_gather(b"")
        if exchange.rank == 0:
            wires.relays[0].close()
            mesh.close()  # without a goodbye, and nobody listens any more
            return None
        begun = time.monotonic()
        try:
            with pytest.raises(PeerLost) as caught:
                mesh.steps.gather("next", timeout=_LONG)
            return caught.value.peers, time.monotonic() - begun < 0.8
        finally:
            mesh.close()

    assert ranks(2, body) == [None, ((0,), True)]


def test_a_peer_that_cannot_be_reached_is_down_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mending, "RECONNECT_SECONDS", 0.3)

    def body(exchange: ThreadExchange, wires: Wires) -> Any:
        mesh = wires.join(exchange)
        rounds(mesh, 1)
        exchange.all_gather(b"")
        if exchange.rank == 0:
            for relay in wires.relays.values():
                relay.accepting = False
            wires.relays[1].cut()
        try:
            # rank 0 reaches both others, and learns it from them
            with pytest.raises(UcclEpError) as caught:
                rounds(mesh, 100)
            return getattr(caught.value, "peers", "stopped")
        finally:
            exchange.all_gather(b"")
            mesh.close()

    assert ranks(3, body) == [(2,), (2,), "stopped"]


@pytest.mark.usefixtures("often")
def test_an_attempt_from_before_the_present_connection_counts_for_nothing() -> None:
    """Its count is an old one: it would say that the peer has less than it has acknowledged since."""

    def body(exchange: ThreadExchange, wires: Wires) -> Any:
        mesh = wires.join(exchange)
        assert wires.introduction is not None
        attempt = connect(identity_of(1, 2, wires.introduction), 0, 0)
        with contextlib.ExitStack() as stack:
            if exchange.rank == 1:
                old = stack.enter_context(socket.create_connection(decode_address(wires.relays[0].address)))
                old.settimeout(_LONG)
                old.sendall(attempt.send(None))  # type: ignore[arg-type]
                challenge = old.recv(PREFIX_BYTES + CHALLENGE_BYTES, socket.MSG_WAITALL)
            rounds(mesh, 3)
            exchange.all_gather(b"")
            if exchange.rank == 1:
                mesh._links[0].socket.shutdown(socket.SHUT_RDWR)
            rounds(mesh, 3)
            verdict = b""
            if exchange.rank == 1:
                attempt.send(b"")
                attempt.send(challenge[:PREFIX_BYTES])
                old.sendall(attempt.send(challenge[PREFIX_BYTES:]))  # type: ignore[arg-type]
                verdict = old.recv(100)
            rounds(mesh, 3)
            leave(mesh)
            return verdict

    assert ranks(2, body) == [b"", encode_verdict(Verdict.CROSSED)]


def test_a_stranger_gets_at_no_connection() -> None:
    def body(exchange: ThreadExchange, wires: Wires) -> Any:
        mesh = wires.join(exchange)
        rounds(mesh, 1)
        exchange.all_gather(b"")
        if exchange.rank == 1:
            assert wires.introduction is not None
            false = Introduction(wires.introduction.cards, bytes(32))
            with contextlib.ExitStack() as stack:
                for _ in range(100):
                    stack.enter_context(socket.create_connection(decode_address(wires.relays[0].address)))
                with socket.create_connection(decode_address(wires.relays[0].address)) as connection:
                    from tests.support.tcp_peers import drive

                    with pytest.raises(Refused) as caught:
                        drive(connection, connect(identity_of(1, 2, false), 0, 0))
                rounds(mesh, 3)
            leave(mesh)
            return caught.value.verdict
        rounds(mesh, 3)
        leave(mesh)
        return "fine"

    assert ranks(2, body) == ["fine", Verdict.WRONG_SECRET]


def test_time_in_which_this_rank_stood_still_is_none_in_which_a_peer_could_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skipped = 0.0
    clock = time.monotonic
    monkeypatch.setattr(mending, "time", SimpleNamespace(monotonic=lambda: clock() + skipped, sleep=time.sleep))
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_server(("127.0.0.1", 0)) as silent,
        selectors.DefaultSelector() as selector,
    ):
        near, far = tcp_pair()
        link = Link(1, near, False, outbox=Outbox(near, count_frame, Seal(_KEY, _KEY)))
        cards: Any = [None, SimpleNamespace(address="127.0.0.1", port=silent.getsockname()[1])]
        me = identity_of(0, 2, Introduction((), bytes(32)))
        mended = mending.Mending(me, listener, selector, cards, {1: link}, lambda peer: False)
        assert mended.add(link, False, "reset")
        assert mended.advance() == []
        skipped = 5.0
        assert mended.advance() == []
        lost = []
        for _ in range(30):
            skipped += 0.04
            lost += mended.advance()
        assert [found[:2] for found in lost] == [(1, DOWN)], "1.2 s in which it ran, and nobody answered"
        mended.close()
        far.close()


@pytest.mark.parametrize("lived_on", [False, True])
@pytest.mark.parametrize("again", [False, True], ids=["judged", "made again"])
def test_who_lived_on_after_its_connection_may_have_said_more(lived_on: bool, again: bool) -> None:
    """Only of a process that ended with its connection it is known that all was heard."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_server(("127.0.0.1", 0)) as theirs,
        selectors.DefaultSelector() as selector,
    ):
        near, far = tcp_pair()
        card: Any = SimpleNamespace(rank=1, address="127.0.0.1", port=theirs.getsockname()[1])
        if not lived_on:
            theirs.close()
        lost: list[tuple[int, str, str]] = []
        if again:
            link = Link(1, near, False, outbox=Outbox(near, count_frame, Seal(_KEY, _KEY)))
            me = identity_of(0, 2, Introduction((), bytes(32)))
            mended = mending.Mending(me, listener, selector, [card, card], {1: link}, lambda peer: False)
            mended.add(link, True, "closed")
            look = mended.advance
        else:
            endings = Endings()
            endings.add(card, False, True, "closed")
            look = endings.judged
        begun = time.monotonic()
        while not lost and time.monotonic() < begun + _LONG:
            lost += look()
            for key, _ in selector.select(0.001):
                mended.step(key.data)
            if time.monotonic() > begun + 0.05:
                theirs.close()
        assert [found[:2] for found in lost] == [(1, GONE if lived_on else DEAD)]
        (mended if again else endings).close()
        near.close()
        far.close()


def read_to_its_end(connection: socket.socket) -> None:
    while connection.recv(1 << 20):
        pass


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def sealed(*frames: bytes, key: bytes = _KEY) -> bytes:
    """What goes over a new connection for ``frames``."""
    seal = Seal(key, key)
    return b"".join(map(seal.seal, frames))


def pair() -> tuple[Outbox, socket.socket, socket.socket]:
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    far.setblocking(False)
    return Outbox(near, count_frame, Seal(_KEY, _KEY)), near, far


class TestOutbox:
    def test_a_frame_is_kept_until_the_peer_has_it(self) -> None:
        outbox, near, far = pair()
        for text in (b"one", b"two", b"three"):
            assert outbox.post(text)
        assert far.recv(100) == sealed(b"one", b"two", b"three")
        outbox.forget(1)
        other, there = socket.socketpair()
        outbox.break_off()
        assert outbox.post(b"four")
        other_seal = Seal(b"o" * 32, _KEY)
        assert outbox.resume(other, 2, other_seal) == 1
        assert there.recv(100) == sealed(b"three", b"four", key=b"o" * 32)
        for one in (near, far, other, there):
            one.close()

    @pytest.mark.parametrize("count", [-1, 0, 4])
    def test_a_peer_has_no_more_than_was_sent_and_no_less_than_it_had(self, count: int) -> None:
        outbox, near, far = pair()
        for text in (b"one", b"two", b"three"):
            outbox.post(text)
        outbox.forget(1)
        with pytest.raises(ValueError, match=f"has {count} control frames"):
            outbox.forget(count)
        near.close()
        far.close()

    def test_nobody_waits_for_a_peer_that_does_not_read(self) -> None:
        outbox, near, far = pair()
        told: list[bool] = []
        outbox.blocked = lambda: told.append(True)
        frames = [bytes([number]) * 5000 for number in range(20)]
        for frame in frames:
            assert outbox.post(frame)
        assert told
        assert outbox.wants_room
        assert not outbox.idle
        received = b""
        wanted = sealed(*frames)
        while len(received) < len(wanted):
            with contextlib.suppress(BlockingIOError):
                received += far.recv(1 << 20)
            outbox.pump()
        assert received == wanted
        assert outbox.idle
        near.close()
        far.close()

    def test_a_peer_that_takes_nothing_fills_no_memory(self) -> None:
        outbox, near, far = pair()
        frame = bytes(1 << 20)
        taken = sum(outbox.post(frame) for _ in range(80))
        assert taken == 64
        near.close()
        far.close()

    def test_a_handler_that_interrupts_who_sends_posts_behind_it(self) -> None:
        """In the same thread, in the middle of a frame: it must not wait for itself, and frames stay whole."""
        outbox, near, far = pair()

        class Interrupted(Seal):
            def seal(self, frame: bytes) -> bytes:
                sealed = super().seal(frame)
                if frame == b"one":
                    assert outbox.post(b"goodbye")
                    assert not outbox.idle
                return sealed

        outbox._seal = Interrupted(_KEY, _KEY)
        thread = threading.Thread(target=outbox.post, args=(b"one",), daemon=True)
        thread.start()
        thread.join(5)
        assert not thread.is_alive(), "it waits for itself"
        assert outbox.idle
        assert far.recv(200) == sealed(b"one", b"goodbye")
        near.close()
        far.close()

    def test_what_a_handler_posts_behind_the_last_look_is_sent(self) -> None:
        outbox, near, far = pair()
        end_by_reset, posted = outbox._end_by_reset, list[bool]()

        def last(yes: bool) -> None:
            end_by_reset(yes)
            if not posted:
                posted.append(True)
                outbox.post(b"goodbye")

        outbox._end_by_reset = last  # type: ignore[method-assign]
        outbox.post(b"one")
        assert far.recv(200) == sealed(b"one", b"goodbye")
        assert outbox.idle
        near.close()
        far.close()

    @pytest.mark.parametrize("taken", [False, True])
    def test_it_ends_in_order_only_when_all_was_handed_over(self, taken: bool) -> None:
        """Also where this process is killed: a peer that sees that takes it for a proof that it has heard all."""
        near, far = tcp_pair()
        outbox = Outbox(near, count_frame, Seal(_KEY, _KEY))
        posted = 0
        while not outbox.wants_room:
            outbox.post(bytes(10_000))
            posted += len(sealed(bytes(10_000)))
        received = 0
        while taken and received < posted:
            received += len(far.recv(1 << 20))
            outbox.pump()
        near.close()
        if taken:
            assert far.recv(1) == b""
        else:
            with pytest.raises(ConnectionResetError):
                read_to_its_end(far)
        far.close()

    @pytest.mark.parametrize("in_order", [False, True])
    def test_a_failure_that_sending_has_met_is_remembered(self, in_order: bool) -> None:
        """The system tells it once: for who reads, either is the end of what the peer had sent."""
        near, far = tcp_pair()
        outbox = Outbox(near, count_frame, Seal(_KEY, _KEY))
        outbox.post(b"one")
        if in_order:
            far.recv(100)
        else:
            # what it has not read makes its end a reset
            while not select.select([far], [], [], 5)[0]:
                pass
        far.close()
        deadline = time.monotonic() + 5
        while not outbox.broken and time.monotonic() < deadline:
            outbox.post(b"another")
            time.sleep(0.01)
        assert outbox.broken
        assert outbox.failed is not in_order
        assert near.recv(1) == b""
        near.close()

    def test_one_that_broke_ends_by_a_reset(self) -> None:
        near, far = tcp_pair()
        outbox = Outbox(near, count_frame, Seal(_KEY, _KEY))
        outbox.break_off()
        outbox.post(b"unheard")
        near.close()
        with pytest.raises(ConnectionResetError):
            far.recv(1)
        far.close()

    def test_what_has_arrived_is_told_between_frames(self) -> None:
        outbox, near, far = pair()
        outbox.post(b"x")
        outbox.taken = 3
        outbox.pump()
        outbox.pump()
        assert far.recv(100) == sealed(b"x", count_frame(3))
        near.close()
        far.close()
