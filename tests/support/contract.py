"""The transport contract: what every transport must do, whatever its wire. Each transport's tests inherit it.

A test module provides the fixture ``open_group`` and inherits the tests::

    class TestShmContract(TransportContract):
        @pytest.fixture
        def open_group(self):
            @contextlib.contextmanager
            def open_group(ranks, window_bytes):
                ...
                yield Group(endpoints=[...], windows=[...], vanish=lambda rank: ...)
            return open_group

All endpoints live in this process and are driven from one thread through the C functions that the proxy loop calls,
so a call that blocks shows up as a test that hangs (and then times out).
"""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

from uccl_ep_serving.proxy.transport import base

_EVENTS = 64
_POST = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 8)
_ONE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
_TWO = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 2)
_THREE = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)


@dataclass
class Group:
    """Connected endpoints, one per rank, each with its window.

    Attributes:
        endpoints: connected, by rank.
        windows: uint8 arrays of equal length, by rank: what the endpoints read from and write to.
        vanish: makes a rank disappear as SIGKILL would, without a goodbye; it is not polled afterwards.
    """

    endpoints: Sequence[base.Endpoint]
    windows: Sequence[np.ndarray]
    vanish: Callable[[int], None]


OpenGroup = Callable[[int, int], AbstractContextManager[Group]]


class Event(NamedTuple):
    """An event as the C function stored it."""

    kind: int
    value: int
    peer: int
    status: int


class Port:
    """One endpoint driven through its C functions."""

    def __init__(self, group: Group, rank: int) -> None:
        path = group.endpoints[rank].data_path()
        self.rank = rank
        self.window = group.windows[rank]
        self._context = path.context
        self._post, self._flush = _POST(path.post), _ONE(path.flush)
        self._poll, self._drop = _THREE(path.poll), _TWO(path.drop)
        self._events = np.zeros((_EVENTS, base.EVENT_BYTES // 8), np.int64)

    def post(self, peer: int, source: int, target: int, nbytes: int, imm: int, wr_id: int, stream: int = 8) -> int:
        """Post one write from offset ``source`` of the own window."""
        assert source + nbytes <= self.window.nbytes
        local = self.window.ctypes.data + source
        return int(self._post(self._context, peer, stream, local, target, nbytes, imm, wr_id))

    def flush(self) -> None:
        assert self._flush(self._context) == 0

    def drop(self, peer: int) -> None:
        assert self._drop(self._context, peer) == 0

    def poll(self) -> list[Event]:
        """One call of poll."""
        count = int(self._poll(self._context, self._events.ctypes.data, _EVENTS))
        assert 0 <= count <= _EVENTS, f"poll returned {count}"
        return [Event(*map(int, row)) for row in self._events[:count]]


def pattern(seed: int, nbytes: int) -> np.ndarray:
    """Bytes that depend on ``seed`` and on their position."""
    if nbytes <= 1 << 16:
        return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    words = np.arange(nbytes // 8, dtype=np.uint64)
    return (words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)).view(np.uint8)


@dataclass
class Write:
    """One write of a test and what has been seen of it."""

    sender: int
    peer: int
    source: int
    target: int
    nbytes: int
    imm: int
    arrivals: int = 0
    sent: int = 0


class Traffic:
    """Posts writes, polls everybody and checks every event on the spot."""

    def __init__(self, group: Group, ports: Sequence[Port] | None = None) -> None:
        self.group = group
        self.ports = list(ports) if ports is not None else [Port(group, r) for r in range(len(group.endpoints))]
        self.writes: list[Write] = []
        self.order: list[tuple[int, int]] = []
        self.down: list[tuple[int, int]] = []
        self.busy = 0

    def add(self, sender: int, peer: int, source: int, target: int, nbytes: int) -> Write:
        """Plan a write; its bytes are put into the sender's window now."""
        number = len(self.writes)
        write = Write(sender, peer, source, target, nbytes, imm=sender << 20 | 8 << 12 | number & 0xFFF)
        self.group.windows[sender][source : source + nbytes] = pattern(number, nbytes)
        self.writes.append(write)
        return write

    def try_post(self, number: int) -> bool:
        """Post write ``number``; False when the transport was busy."""
        write = self.writes[number]
        status = self.ports[write.sender].post(write.peer, write.source, write.target, write.nbytes, write.imm, number)
        assert status in (base.ACCEPTED, base.BUSY), f"post returned {status}"
        self.busy += status == base.BUSY
        return status == base.ACCEPTED

    def poll(self, port: Port) -> None:
        """One poll of one rank, all events checked."""
        proves = self.group.endpoints[port.rank].capabilities.proves_source
        for event in port.poll():
            if event.kind == base.SENT:
                write = self.writes[event.value]
                assert write.sender == port.rank
                write.sent += 1
                assert write.sent == 1, "SENT twice"
            elif event.kind == base.ARRIVED:
                assert 0 <= event.value < 1 << 32
                source = event.value >> 20
                assert event.peer == source if proves else event.peer in (-1, source)
                matching = [
                    i
                    for i, write in enumerate(self.writes)
                    if (write.sender, write.peer, write.imm) == (source, port.rank, event.value)
                ]
                assert matching, f"rank {port.rank}: unknown immediate {event.value:#x}"
                write = self.writes[matching[0]]
                assert event.status in (0, write.nbytes), "status of ARRIVED is the payload's bytes or 0"
                # "no repeat after SENT" is about events in the order of one receiver; SENT is seen by another
                # rank, possibly before an ARRIVED that was already under way, so only the first is free.
                write.arrivals += 1
                here = self.group.windows[port.rank][write.target : write.target + write.nbytes]
                assert np.array_equal(here, pattern(matching[0], write.nbytes)), "ARRIVED before the payload"
                if write.arrivals == 1:
                    self.order.append((port.rank, matching[0]))
            elif event.kind == base.DOWN:
                self.down.append((port.rank, event.peer))
            else:
                raise AssertionError(f"rank {port.rank}: {event}")

    def run(self, seconds: float = 20.0) -> None:
        """Post everything and poll everybody until each write was sent and has arrived."""
        waiting = list(range(len(self.writes)))
        deadline = time.monotonic() + seconds
        while waiting or any(not w.sent or not w.arrivals for w in self.writes):
            blocked: set[tuple[int, int]] = set()
            left = []
            for number in waiting:
                link = (self.writes[number].sender, self.writes[number].peer)
                if link in blocked or not self.try_post(number):
                    blocked.add(link)
                    left.append(number)
            waiting = left
            for port in self.ports:
                port.flush()
                self.poll(port)
            assert not self.down, f"unexpected DOWN {self.down}"
            assert time.monotonic() < deadline, f"stuck: {self.summary()}"

    def settle(self, seconds: float = 0.05) -> None:
        """Poll on for a while, so that late duplicates would be seen."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for port in self.ports:
                self.poll(port)

    def summary(self) -> Counter[str]:
        """How many writes were sent and have arrived."""
        return Counter(
            writes=len(self.writes),
            sent=sum(w.sent for w in self.writes),
            arrived=sum(w.arrivals > 0 for w in self.writes),
        )


class TransportContract:
    """Inherit, and provide the fixture ``open_group``. Names of tests say what a transport promises."""

    @pytest.fixture
    def open_group(self) -> OpenGroup:
        raise NotImplementedError("each transport's test class provides this fixture")

    @pytest.mark.parametrize("ranks", [2, 3])
    def test_every_write_arrives_whole_and_is_sent_once(self, open_group: OpenGroup, ranks: int) -> None:
        """All to all, both directions at once, sizes from nothing to 64 KiB, bytes checked at ARRIVED."""
        rng = np.random.default_rng(ranks)
        per_link, slot = 40, 1 << 16
        links = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
        with open_group(ranks, slot * per_link * ranks * 2) as group:
            traffic = Traffic(group)
            half = slot * per_link * ranks
            for sender, peer in links:
                for i in range(per_link):
                    nbytes = int(rng.choice([0, 16, 64, 4096, slot])) if i % 3 else int(rng.integers(0, 257)) * 16
                    traffic.add(
                        sender,
                        peer,
                        source=(peer * per_link + i) * slot,
                        target=half + (sender * per_link + i) * slot,
                        nbytes=nbytes,
                    )
            traffic.run()
            traffic.settle()
            assert all(write.sent == 1 for write in traffic.writes)
            if group.endpoints[0].capabilities.in_sequence:
                for sender, peer in links:
                    arrived = [n for r, n in traffic.order if r == peer and traffic.writes[n].sender == sender]
                    assert arrived == sorted(arrived), "declared in sequence, arrived out of order"

    def test_a_write_without_payload(self, open_group: OpenGroup) -> None:
        with open_group(2, 4096) as group:
            traffic = Traffic(group)
            write = traffic.add(0, 1, source=0, target=0, nbytes=0)
            group.windows[1][:] = 7
            traffic.run()
            assert write.arrivals >= 1
            assert (group.windows[1] == 7).all()

    @pytest.mark.long
    def test_the_largest_write(self, open_group: OpenGroup) -> None:
        """``max_write`` bytes, or the 256 MiB that the command can name."""
        with open_group(2, 4096) as group:
            nbytes = min(group.endpoints[0].capabilities.max_write, 256 << 20)
        with open_group(2, nbytes) as group:
            traffic = Traffic(group)
            traffic.add(0, 1, source=0, target=0, nbytes=nbytes)
            traffic.run()

    def test_a_full_transport_says_busy_and_goes_on(self, open_group: OpenGroup) -> None:
        """Post without polling until it refuses (or 4,096 were accepted); everything accepted arrives."""
        with open_group(2, 1 << 16) as group:
            traffic = Traffic(group)
            number = 0
            # Immediates must be told apart within this test, so at most 4,096 of them.
            while number < 4096:
                traffic.add(0, 1, source=0, target=0, nbytes=0)
                if not traffic.try_post(number):
                    break
                number += 1
            traffic.ports[0].flush()
            deadline = time.monotonic() + 20
            refused = len(traffic.writes) > number
            while refused and not traffic.try_post(number):
                for port in traffic.ports:
                    port.flush()
                    traffic.poll(port)
                assert time.monotonic() < deadline, "BUSY for ever"
            while any(not w.sent or not w.arrivals for w in traffic.writes):
                for port in traffic.ports:
                    port.flush()
                    traffic.poll(port)
                assert time.monotonic() < deadline, f"stuck: {traffic.summary()}"

    def test_many_peers(self, open_group: OpenGroup) -> None:
        ranks = 8
        with open_group(ranks, 1 << 16) as group:
            traffic = Traffic(group)
            for sender in range(ranks):
                for step in range(1, ranks):
                    peer = (sender + step) % ranks
                    traffic.add(sender, peer, source=peer * 1024, target=(ranks + sender) * 1024, nbytes=1024)
            traffic.run()

    def test_a_vanished_peer_is_reported_down(self, open_group: OpenGroup) -> None:
        """Within a second, to everybody, by its rank, and nobody else is."""
        with open_group(3, 1 << 16) as group:
            traffic = Traffic(group)
            traffic.add(0, 1, source=0, target=0, nbytes=64)
            traffic.run()
            group.vanish(1)
            survivors = [traffic.ports[0], traffic.ports[2]]
            if not group.endpoints[0].capabilities.notices_silent_death:
                # Nobody would notice before it writes.
                for port in survivors:
                    assert port.post(1, 0, 0, 64, port.rank << 20, 99) == base.ACCEPTED
                    port.flush()
            deadline = time.monotonic() + 1.0
            while {(0, 1), (2, 1)} - set(traffic.down):
                for port in survivors:
                    traffic.poll(port)
                assert time.monotonic() < deadline, f"no DOWN, only {traffic.down}"
            assert {peer for _, peer in traffic.down} == {1}
            # The others are not held up by the loss.
            traffic.down.clear()
            write = traffic.add(0, 2, source=1024, target=0, nbytes=512)
            while not traffic.try_post(len(traffic.writes) - 1):
                assert time.monotonic() < deadline + 1
            while not (write.sent and write.arrivals):
                for port in survivors:
                    port.flush()
                    traffic.poll(port)
                assert time.monotonic() < deadline + 1

    def test_streams_in_sequence_keep_their_order_and_repeat_nothing(self, open_group: OpenGroup) -> None:
        """What ``in_sequence`` declares: the proxies take anything else for a fault of the peer."""
        count, streams = 60, (8, 9, 10, 40)
        with open_group(2, 1 << 16) as group:
            if not group.endpoints[0].capabilities.in_sequence:
                pytest.skip("this transport keeps no order within a stream")
            ports = [Port(group, rank) for rank in range(2)]
            waiting = [(stream, number) for number in range(count) for stream in streams]
            arrived: dict[int, list[int]] = {stream: [] for stream in streams}
            deadline = time.monotonic() + 20
            while waiting or sum(map(len, arrived.values())) < count * len(streams):
                while waiting:
                    stream, number = waiting[0]
                    if ports[0].post(1, 0, 0, 1024, stream << 12 | number, number, stream) != base.ACCEPTED:
                        break
                    waiting.pop(0)
                ports[0].flush()
                ports[0].poll()
                for event in ports[1].poll():
                    assert event.kind == base.ARRIVED
                    arrived[event.value >> 12 & 0xFF].append(event.value & 0xFFF)
                assert time.monotonic() < deadline
            assert arrived == {stream: list(range(count)) for stream in streams}

    def test_a_dropped_peer_is_told(self, open_group: OpenGroup) -> None:
        """It lives and would wait: within a second it sees DOWN of the rank that dropped it, nobody else does."""
        with open_group(3, 1 << 16) as group:
            if not group.endpoints[0].capabilities.tells_drop:
                pytest.skip("this transport does not tell a peer that it was dropped")
            traffic = Traffic(group)
            traffic.add(0, 1, source=0, target=4096, nbytes=64)
            traffic.add(1, 0, source=0, target=4096, nbytes=64)
            traffic.run()
            traffic.ports[0].drop(1)
            deadline = time.monotonic() + 1.0
            while not traffic.down:
                for port in traffic.ports:
                    traffic.poll(port)
                assert time.monotonic() < deadline, "not told"
            traffic.settle()
            assert traffic.down == [(1, 0)]
            others = Traffic(group, traffic.ports)
            others.add(1, 2, source=1024, target=8192, nbytes=512)
            others.add(2, 0, source=1024, target=8192, nbytes=512)
            others.run()

    def test_nothing_is_heard_of_a_dropped_peer(self, open_group: OpenGroup) -> None:
        """After drop(): no SENT, no ARRIVED, no DOWN of that peer; the others go on."""
        with open_group(3, 1 << 16) as group:
            traffic = Traffic(group)
            for number in range(4):
                traffic.add(0, 1, source=number * 64, target=number * 64, nbytes=64)
                traffic.add(1, 0, source=number * 64, target=8192 + number * 64, nbytes=64)
            for number in range(8):
                assert any(traffic.try_post(number) for _ in range(1000)), "always busy"
            traffic.ports[0].drop(1)
            for port in traffic.ports:
                port.flush()
            group.vanish(1)
            traffic.add(0, 2, source=1024, target=0, nbytes=512)
            deadline = time.monotonic() + 5
            while not traffic.try_post(8):
                traffic.poll(traffic.ports[0])
                assert time.monotonic() < deadline
            traffic.ports[0].flush()
            while not (traffic.writes[8].sent and traffic.writes[8].arrivals):
                traffic.poll(traffic.ports[0])
                traffic.poll(traffic.ports[2])
                assert time.monotonic() < deadline, f"stuck: {traffic.summary()}"
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                traffic.poll(traffic.ports[0])
            assert not [write for write in traffic.writes[:8:2] if write.sent], "SENT of a dropped peer"
            assert not [write for write in traffic.writes[1:8:2] if write.arrivals], "ARRIVED from a dropped peer"
            assert not [peer for rank, peer in traffic.down if rank == 0], "DOWN of a dropped peer"
