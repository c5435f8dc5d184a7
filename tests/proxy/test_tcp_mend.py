"""A tcp connection that breaks while both processes live is connected again: nothing lost, nothing twice, no error."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.contract import Group, Port, Traffic
from tests.support.tcp_peers import (
    CONNECTIONS,
    WINDOW,
    Played,
    drive,
    identity,
    make,
    played,
    raw,
    raw_count,
    tcp_group,
)
from tests.support.tcp_relay import Relay, garbler, relays
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import TransportError
from uccl_ep_serving.protocol import frame, handshake
from uccl_ep_serving.protocol.frame import Verdict
from uccl_ep_serving.protocol.imm import Immediate, encode
from uccl_ep_serving.proxy.transport import base, tcp_mend
from uccl_ep_serving.proxy.transport import tcp_words as tcp
from uccl_ep_serving.proxy.transport.tcp import TcpEndpoint

PLAIN, SEALED = Settings(tcp_connections=CONNECTIONS), Settings(tcp_connections=CONNECTIONS, tcp_auth=True)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection may break as often as it likes, and while it is made again."""
    monkeypatch.setattr(tcp_mend, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(tcp_mend, "RECONNECT_SECONDS", 5.0)


@contextlib.contextmanager
def wired(
    ranks: int = 2,
    window: int = WINDOW,
    settings: Settings = PLAIN,
    alter: Callable[[bytes], bytes] = lambda data: data,
) -> Iterator[tuple[Group, list[Relay]]]:
    """A group whose ranks reach each other through relays, by the rank that listens."""
    with contextlib.ExitStack() as stack:
        made: list[Relay] = []

        def through(addresses: list[bytes]) -> list[bytes]:
            made.extend(stack.enter_context(relays(addresses, alter)))
            return [relay.address for relay in made]

        yield stack.enter_context(tcp_group(ranks, window, settings=settings, through=through)), made


def plan(group: Group, count: int, largest: int, seed: int = 0) -> Traffic:
    """Writes of random sizes, between all pairs of ranks in turn."""
    dice, traffic = random.Random(seed), Traffic(group)
    pairs = [(a, b) for a in range(len(traffic.ports)) for b in range(len(traffic.ports)) if a != b]
    offset = 0
    for number in range(count):
        nbytes = dice.choice([0, 16, 4096, dice.randrange(largest)])
        traffic.add(*pairs[number % len(pairs)], offset, offset, nbytes)
        offset += nbytes
    return traffic


def in_order(traffic: Traffic) -> bool:
    """Each pair's writes have arrived once, in the order in which they were posted."""
    by_pair: dict[tuple[int, int], list[int]] = {}
    for _, number in traffic.order:
        write = traffic.writes[number]
        by_pair.setdefault((write.sender, write.peer), []).append(number)
    return all(numbers == sorted(numbers) for numbers in by_pair.values()) and all(
        write.arrivals == write.sent == 1 for write in traffic.writes
    )


def mender_of(group: Group, rank: int) -> tcp_mend.Mender:
    endpoint = group.endpoints[rank]
    assert isinstance(endpoint, TcpEndpoint)
    assert endpoint._mender is not None
    return endpoint._mender


def word(port: Group, rank: int, link: int, name: int) -> int:
    endpoint = port.endpoints[rank]
    assert isinstance(endpoint, TcpEndpoint)
    return int(endpoint._state.links[link, name])


@pytest.mark.usefixtures("often")
class TestNothingIsLost:
    @pytest.mark.parametrize("how", ["reset", "close", "near", "far"])
    def test_an_idle_wire(self, how: str) -> None:
        """Between two writes: also where only one side hears of it, whichever sends next."""
        for sender in (0, 1):
            with wired() as (group, (relay, _)):
                traffic = Traffic(group)
                traffic.add(sender, 1 - sender, 0, 0, 4096)
                traffic.run()
                assert relay.cut(how) == CONNECTIONS
                traffic.add(sender, 1 - sender, 4096, 4096, 4096)
                Traffic.run(again(traffic, 1))
                traffic.settle()
                assert in_order(traffic)

    @pytest.mark.parametrize("settings", [PLAIN, SEALED], ids=["plain", "sealed"])
    @pytest.mark.parametrize("how", ["reset", "close", "near", "far"])
    def test_a_busy_wire(self, how: str, settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
        """In the middle of whatever is under way, in both directions, again and again."""
        with wired(3, 40 << 20, settings) as (group, wires):
            traffic, stop = plan(group, 800, 64 << 10), threading.Event()

            def cutter() -> None:
                dice = random.Random(1)
                while not stop.wait(0.01):
                    dice.choice(wires).cut(how)

            thread = threading.Thread(target=cutter)
            thread.start()
            try:
                traffic.run()
            finally:
                stop.set()
                thread.join()
            traffic.settle()
            assert in_order(traffic)
            again = [record.args[-1] for record in caplog.records if "sent again" in record.msg]
            assert sum(again) > 3
            assert sum(mender_of(group, rank).reconnections for rank in range(3)) >= len(again)

    def test_a_garbled_wire_that_is_sealed(self) -> None:
        """No changed bit counts, and none costs a rank."""
        with wired(2, 16 << 20, SEALED) as (group, wires):
            for wire in wires:
                wire.alter = garbler(2, 12)
            traffic = plan(group, 400, 48 << 10)
            traffic.run()
            traffic.settle()
            assert in_order(traffic)
            assert sum(wire.connections for wire in wires) > CONNECTIONS

    @pytest.mark.parametrize("byte", [4, frame.FRAME_TARGET, frame.FRAME_LENGTH, frame.FRAME_LENGTH + 4])
    def test_a_changed_header_that_is_sealed(self, byte: int) -> None:
        """Each of its fields, so that it could be another write of the same peer."""
        changed: list[bytes] = []

        def alter(data: bytes) -> bytes:
            if changed or not data.startswith(frame.FRAME_MAGIC.to_bytes(4, "little")):
                return data
            changed.append(data)
            return data[:byte] + bytes([data[byte] ^ 1]) + data[byte + 1 :]

        with wired(2, 1 << 20, SEALED, alter) as (group, wires):
            traffic = plan(group, 20, 4 << 10)
            traffic.run()
            traffic.settle()
            assert in_order(traffic)
            assert changed
            assert sum(wire.connections for wire in wires) > CONNECTIONS


def again(traffic: Traffic, done: int) -> Traffic:
    """``traffic`` without the first ``done`` writes, which are over, as far as posting goes."""
    rest = Traffic(traffic.group, traffic.ports)
    rest.writes = traffic.writes
    rest.order = traffic.order
    posted = rest.try_post
    rest.try_post = lambda number: number < done or posted(number)  # type: ignore[method-assign]
    return rest


def test_a_write_is_complete_when_the_peer_has_it_whole() -> None:
    """Not when the kernel has it: until then its source must not change."""
    with played() as peer:
        assert peer.port.post(1, 0, 0, 4096, encode(Immediate(0, 8, 0, True)), 7) == base.ACCEPTED
        peer.port.flush()
        whole = peer.sockets[0].recv(32 + 4096, socket.MSG_WAITALL)
        assert len(whole) == 32 + 4096
        time.sleep(0.01)
        assert peer.port.poll() == []
        peer.sockets[0].sendall(raw_count(1))
        assert [(event.kind, event.value) for event in peer.events(1)] == [(base.SENT, 7)]


def test_what_has_arrived_is_said_with_the_next_write_or_after_a_moment() -> None:
    with played() as peer:
        for number in range(3):
            peer.sockets[0].sendall(raw(number=number) + bytes(16))
        peer.events(3)
        assert peer.port.post(1, 0, 0, 0, encode(Immediate(0, 8, 0, True)), 7) == base.ACCEPTED
        peer.port.flush()
        while (said := next_frame(peer)).is_ack:
            pass  # a slow host was late with the write
        assert said.arrived == 3
        assert_silent(peer)
        peer.sockets[0].sendall(raw(number=3) + bytes(16))
        peer.events(1)
        assert next_frame(peer) == frame.Frame(0, 0, 0, number=1, arrived=4, is_ack=True)
        assert_silent(peer)


@pytest.mark.parametrize(("frames", "nbytes"), [(32, 0), (4, 64 << 10)])
def test_what_has_arrived_is_said_at_once_when_much_is_owed(frames: int, nbytes: int) -> None:
    """A peer that only sends has room for so many frames until it learns."""
    with played() as peer:
        endpoint = peer.group.endpoints[0]
        assert isinstance(endpoint, TcpEndpoint)
        # the moment after which little is said as well never comes
        endpoint._state.context[tcp.OWING] = 1 << 62
        for number in range(frames):
            peer.sockets[0].sendall(raw(number=number, length=nbytes) + bytes(nbytes))
            peer.events(1)
        peer.sockets[0].settimeout(1.0)
        assert frame.decode_frame(peer.sockets[0].recv(32, socket.MSG_WAITALL)).arrived == frames


def next_frame(peer: Played) -> frame.Frame:
    """What rank 0 says next."""
    peer.sockets[0].settimeout(0.001)
    deadline = time.monotonic() + 5
    while True:
        peer.port.poll()
        with contextlib.suppress(TimeoutError):
            return frame.decode_frame(peer.sockets[0].recv(32, socket.MSG_WAITALL))
        assert time.monotonic() < deadline


def assert_silent(peer: Played) -> None:
    """Rank 0 says nothing for a while: what was told once is not told again."""
    peer.sockets[0].settimeout(0.001)
    until = time.monotonic() + 0.02
    while time.monotonic() < until:
        assert peer.port.poll() == []
        with pytest.raises(TimeoutError):
            peer.sockets[0].recv(64)


def test_only_whole_frames_are_counted() -> None:
    """The rest of a frame may never come: the peer sends it again."""
    with played() as peer:
        peer.sockets[0].sendall(raw() + bytes(15))
        time.sleep(0.01)
        assert peer.port.poll() == []
        assert peer.port.post(1, 0, 0, 0, encode(Immediate(0, 8, 0, True)), 7) == base.ACCEPTED
        peer.port.flush()
        assert next_frame(peer).arrived == 0
        peer.sockets[0].sendall(bytes(1))
        assert [event.kind for event in peer.events(1)] == [base.ARRIVED]
        assert next_frame(peer).arrived == 1


@pytest.mark.parametrize("claimed", [2, 0xFFFFFFFF])
def test_more_than_was_sent_has_not_arrived(claimed: int) -> None:
    with played() as peer:
        assert peer.port.post(1, 0, 0, 0, encode(Immediate(0, 8, 0, True)), 7) == base.ACCEPTED
        peer.port.flush()
        peer.sockets[0].sendall(raw_count(claimed))
        (event,) = peer.events(1)
        assert (event.kind, event.value, event.status) == (base.FAULT, claimed, base.FAULT_COUNT | 1 << base.FAULT_BITS)


def test_a_second_break_within_the_bound_is_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was connected again may have been an attempt that the peer had given up: that costs nobody."""
    monkeypatch.setattr(tcp_mend, "RECONNECT_SECONDS", 5.0)
    with wired() as (group, wires):
        traffic = Traffic(group)
        for _ in range(2):
            cut_and_mended(traffic, wires)
        traffic.add(0, 1, 0, 0, 64)
        traffic.add(1, 0, 64, 64, 64)
        traffic.run()


def test_a_connection_that_was_mended_long_ago_is_mended_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_mend, "RECONNECT_SECONDS", 0.5)
    monkeypatch.setattr(tcp_mend, "AGAIN_SECONDS", 0.1)
    with wired() as (group, wires):
        traffic = Traffic(group)
        for _ in range(2):
            cut_and_mended(traffic, wires)
            assert poll_for(traffic, base.DOWN, 1, 0.6) == []


def cut_and_mended(traffic: Traffic, wires: list[Relay]) -> None:
    """Cut all connections of two ranks, and poll until each of the two has all of its own again."""

    def mended() -> list[dict[tuple[int, int], float]]:
        return [dict(mender_of(traffic.group, rank)._mended) for rank in range(2)]

    before = mended()
    for wire in wires:
        wire.cut()
    deadline = time.monotonic() + 5.0
    while any(len(now.items() - then.items()) < CONNECTIONS for now, then in zip(mended(), before, strict=True)):
        assert poll_for(traffic, base.DOWN, 1, 0.001) == []
        assert time.monotonic() < deadline


def test_time_in_which_a_rank_itself_stood_still_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_mend, "RECONNECT_SECONDS", 0.5)
    clock, skipped = time.monotonic, 0.0
    monkeypatch.setattr(tcp_mend, "time", SimpleNamespace(monotonic=lambda: clock() + skipped, sleep=time.sleep))
    with wired() as (group, wires):
        mender, port = mender_of(group, 0), Port(group, 0)
        select = mender.selector.select

        def late(wait: float | None) -> Any:
            nonlocal skipped
            found = select(wait)
            if mender._breaks:
                skipped = 5.0
            return found

        monkeypatch.setattr(mender.selector, "select", late)
        for wire in wires:
            wire.accepting = False
        begun = time.monotonic()
        wires[0].cut()
        while not (events := port.poll()):
            assert time.monotonic() < begun + 5.0
        assert [event.kind for event in events] == [base.DOWN]
        assert skipped
        assert time.monotonic() - begun > 0.4


@pytest.mark.parametrize("all_started", [False, True])
def test_a_break_before_all_proxies_run_waits_for_them(all_started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that still connects its other endpoints cannot let go of its end."""
    monkeypatch.setattr(tcp_mend, "RECONNECT_SECONDS", 0.3)
    monkeypatch.setattr(tcp_mend, "_OBEY_SECONDS", 0.05)
    with wired() as (group, wires):
        for rank in range(2):
            mender_of(group, rank)._all_started = all_started
        ports = [Port(group, rank) for rank in range(2)]
        assert ports[0].poll() == []
        wires[0].cut()
        kinds, begun = set(), time.monotonic()
        # long enough to be lost, or until it is
        while not kinds and time.monotonic() < begun + (5.0 if all_started else 0.8):
            kinds |= {event.kind for event in ports[0].poll()}
        assert kinds == ({base.DOWN} if all_started else set())
        if all_started:
            return
        for endpoint in group.endpoints:
            assert isinstance(endpoint, TcpEndpoint)
            endpoint.established()
        while not all(mender_of(group, rank).reconnections for rank in range(2)):
            assert [port.poll() for port in ports] == [[], []]
            assert time.monotonic() < begun + 5.0


def test_an_order_to_go_on_keeps_its_descriptor_until_it_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late: once it is closed its number may be another file's."""
    monkeypatch.setattr(tcp_mend, "_OBEY_SECONDS", 0.05)
    with played() as peer, socket.create_connection(peer.where, timeout=2) as connection:
        asks = threading.Thread(target=drive, args=(connection, handshake.connect(identity(1), 0, 0)))
        asks.start()
        deadline = time.monotonic() + 5
        while word(peer.group, 0, CONNECTIONS, tcp.STATE) == tcp.UP:
            peer.port.poll()
            assert time.monotonic() < deadline
        asks.join()
        while word(peer.group, 0, CONNECTIONS, tcp.ORDER) != tcp.TAKE:
            assert time.monotonic() < deadline
        time.sleep(0.3)  # the proxy stands still
        with socket.socket(fileno=os.dup(word(peer.group, 0, CONNECTIONS, tcp.NEW_FD))) as taken:
            assert taken.getpeername() == connection.getsockname()


class TestItCosts:
    def test_a_second_break_soon_after_the_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The link is bad: both sides hear of it, and the ranks agree on what it costs."""
        monkeypatch.setattr(tcp_mend, "RECONNECT_SECONDS", 0.5)
        with wired() as (group, wires):
            traffic = Traffic(group)
            traffic.add(0, 1, 0, 0, 64)
            traffic.run()
            cut_and_mended(traffic, wires)
            assert poll_for(traffic, base.DOWN, 1, tcp_mend.RECONNECT_SECONDS) == []
            for wire in wires:
                # whoever connected again
                wire.cut()
            assert {event.peer for event in poll_for(traffic, base.DOWN, 2, 2.0)} == {0, 1}

    def test_a_process_that_has_ended(self) -> None:
        with played() as peer:
            for connection in peer.sockets:
                connection.close()
            begun = time.monotonic()
            (event,) = peer.events(1)
            assert (event.kind, event.peer) == (base.DOWN, 1)
            assert time.monotonic() - begun < 0.2

    def test_a_peer_that_has_done_with_this_rank_says_so(self) -> None:
        with wired() as (group, _):
            ports = [Port(group, rank) for rank in range(2)]
            ports[0].drop(1)
            deadline = time.monotonic() + 0.5
            while not (events := ports[1].poll()):
                assert time.monotonic() < deadline
            assert [(event.kind, event.peer) for event in events] == [(base.DOWN, 0)]
            assert ports[0].poll() == []

    def test_nobody_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No answer at all: the rest of the bound, and then DOWN."""
        monkeypatch.setattr(tcp_mend, "RECONNECT_SECONDS", 0.3)
        with wired() as (group, wires):
            traffic = Traffic(group)
            for wire in wires:
                wire.accepting = False
            begun = time.monotonic()
            wires[0].cut()
            down = poll_for(traffic, base.DOWN, 2, 2.0)
            assert 0.2 < time.monotonic() - begun < 1.0
            assert {event.peer for event in down} == {0, 1}


def poll_for(traffic: Traffic, kind: int, count: int, seconds: float) -> list[base.Event]:  # type: ignore[name-defined]
    """Events of ``kind`` of all ranks, until there are ``count`` or the time is over."""
    found = []
    deadline = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        for port in traffic.ports:
            found += [event for event in port.poll() if event.kind == kind]
        time.sleep(0.001)
    return found


class TestWhoConnects:
    """Rank 0 is real, and reached as its peers reach it."""

    def dial(self, where: tuple[str, int], count: int = 0, secret: bytes | None = None) -> handshake.Proven:
        with socket.create_connection(where, timeout=2) as connection:
            me = identity(1) if secret is None else identity(1, secret=secret)
            return drive(connection, handshake.connect(me, 0, 0, count))

    def test_the_peers_count_is_told(self) -> None:
        with played() as peer, polled(peer.port):
            for number in range(3):
                peer.sockets[0].sendall(raw(number=number) + bytes(16))
            peer.sockets[0].sendall(raw(number=3))  # without its payload
            time.sleep(0.05)
            assert self.dial(peer.where).count == 3

    def test_an_attempt_from_before_the_present_connection_counts_for_nothing(self) -> None:
        """Its count is an old one: it would say that the peer has less than it has acknowledged since."""
        with played() as peer, polled(peer.port), socket.create_connection(peer.where, timeout=2) as old:
            attempt = handshake.connect(identity(1), 0, 0, 0)
            old.sendall(attempt.send(None))  # type: ignore[arg-type]
            challenge = old.recv(frame.PREFIX_BYTES + frame.CHALLENGE_BYTES, socket.MSG_WAITALL)
            with socket.create_connection(peer.where, timeout=2) as new:
                drive(new, handshake.connect(identity(1), 0, 0, 0))
                deadline = time.monotonic() + 5
                while word(peer.group, 0, CONNECTIONS, tcp.STATE) != tcp.UP or not mender_of(peer.group, 0)._mended:
                    assert time.monotonic() < deadline
                attempt.send(b"")
                attempt.send(challenge[: frame.PREFIX_BYTES])
                old.sendall(attempt.send(challenge[frame.PREFIX_BYTES :]))  # type: ignore[arg-type]
                assert old.recv(100) == frame.encode_verdict(Verdict.CROSSED)
                assert word(peer.group, 0, CONNECTIONS, tcp.STATE) == tcp.UP

    def test_a_stranger_does_not_disturb_a_connection(self) -> None:
        with played() as peer, polled(peer.port):
            with pytest.raises(handshake.Refused) as caught:
                self.dial(peer.where, secret=bytes(32))
            assert caught.value.verdict is Verdict.WRONG_SECRET
            assert word(peer.group, 0, CONNECTIONS, tcp.STATE) == tcp.UP

    def test_a_count_that_cannot_be_is_a_fault(self) -> None:
        with played() as peer:
            with polled(peer.port) as events:
                self.dial(peer.where, count=1)
                time.sleep(0.05)
            assert (base.FAULT, base.FAULT_COUNT) in {(event.kind, event.status) for event in events}

    def test_the_lower_rank_is_refused_while_this_one_connects(self) -> None:
        """Each pair agrees on one connection: that of the higher rank. Rank 1 is real here."""
        window = np.zeros(WINDOW, np.uint8)
        with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.closing(make(1, 2, window)) as endpoint:
            addresses = [frame.encode_address(*listener.getsockname()), None]
            thread = threading.Thread(target=endpoint.connect, args=(addresses, time.monotonic() + 10))
            thread.start()
            sockets = []
            for _ in range(CONNECTIONS):
                connection, _ = listener.accept()
                sockets.append((drive(connection, handshake.accept(identity(0), frozenset([1]))), connection))
            thread.join()
            with polled(Port(Group([endpoint] * 2, [window] * 2, lambda rank: None), 1)):
                (first,) = (connection for proven, connection in sockets if proven.connection == 0)
                first.close()
                silent, _ = listener.accept()
                lower = socket.create_connection(frame.decode_address(endpoint.address()), timeout=2)
                with lower, pytest.raises(handshake.Refused) as caught:
                    drive(lower, handshake.connect(identity(0), 1, 0))
                assert caught.value.verdict is Verdict.CROSSED
                drive(silent, handshake.accept(identity(0), frozenset([1])))
            for connection in (silent, *(connection for _, connection in sockets)):
                connection.close()


@contextlib.contextmanager
def polled(port: Port) -> Iterator[list]:
    """``port`` is polled in the background, as its proxy would."""
    events: list = []
    stop = threading.Event()

    def poll() -> None:
        while not stop.is_set():
            events.extend(port.poll())
            time.sleep(0.0005)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield events
    finally:
        stop.set()
        thread.join()


def test_each_descriptor_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be somebody else's at once."""
    closed: list[int] = []
    close = os.close

    def noted(descriptor: int) -> None:
        closed.append(descriptor)
        close(descriptor)

    with tcp_group(2, WINDOW) as group:
        monkeypatch.setattr(os, "close", noted)
        for endpoint in group.endpoints:
            endpoint.close()
            endpoint.close()
    assert closed
    assert len(closed) == len(set(closed))


def test_that_nobody_can_be_let_in_is_told_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full() -> None:
        raise TransportError("no descriptor", device="tcp", errno=24)

    now = [0.0]
    monkeypatch.setattr(tcp_mend, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None))
    mender: Any = SimpleNamespace(answer=full, _quiet_until=0.0)
    for second in range(120):
        now[0] = float(second)
        tcp_mend.Mender._let_in(mender)
    assert [record.getMessage() for record in caplog.records] == ["no descriptor"] * 2


def test_closing_waits_for_nothing_that_broke() -> None:
    """The proxy has stopped: it obeys no more."""
    with wired() as (group, wires):
        port = Port(group, 0)
        for wire in wires:
            wire.accepting = False
        wires[0].cut()
        endpoint = group.endpoints[0]
        assert isinstance(endpoint, TcpEndpoint)
        deadline = time.monotonic() + 2.0
        while {word(group, 0, CONNECTIONS + number, tcp.STATE) for number in range(CONNECTIONS)} != {tcp.BROKEN}:
            port.poll()
            assert time.monotonic() < deadline
        for wire in wires:
            wire.close()  # nobody listens any more: each connection is given up, and nobody hears it
        time.sleep(0.05)
        begun = time.monotonic()
        endpoint.close()
        assert time.monotonic() - begun < 0.3


def test_an_endpoint_that_is_collected_in_its_own_thread_ends_quietly(caplog: pytest.LogCaptureFixture) -> None:
    with wired() as (group, _):
        mender, look = mender_of(group, 0), mender_of(group, 0)._look_at_the_time
        closed = threading.Event()

        def collect(now: float) -> None:
            look(now)
            if not closed.is_set():
                group.endpoints[0].close()
                closed.set()

        mender._look_at_the_time = collect  # type: ignore[method-assign]
        os.eventfd_write(mender._bell, 1)
        assert closed.wait(5)
        mender._thread.join(5)
        assert not mender._thread.is_alive()
    assert "mends tcp connections no more" not in caplog.text
