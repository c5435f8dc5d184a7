"""``roce`` over several NICs of a rank in memory: which one a stream takes, what each may have in flight."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tests.support.contract import Group, Port
from tests.support.memory_endpoints import connect, endpoint, open_endpoints
from tests.support.provider.provider_library import MemoryNetwork
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import BootstrapError, PeerLost
from uccl_ep_serving.proxy.transport.base import ACCEPTED, ARRIVED, BUSY, DOWN, LOOK_SECONDS, SENT
from uccl_ep_serving.proxy.transport.nic import roce_words as rc
from uccl_ep_serving.proxy.transport.nic import words
from uccl_ep_serving.proxy.transport.verbs import codes
from uccl_ep_serving.proxy.transport.verbs.objects import QueuePair

#: Streams of channels 0 and 1: between ranks 0 and 1 they take rail 1 and rail 0 of two.
FIRST, SECOND = 8, 9


def imm(source: int, stream: int, number: int) -> int:
    return source << 20 | stream << 12 | number & 0x7FF


_LOOKS = 300


def poll_all(ports: list[Port], seconds: float = 0.05) -> list[Any]:
    """For so long, and often: the network in memory moves with each look, and a busy machine leaves few."""
    found: list[Any] = []
    until, looks = time.monotonic() + seconds, 0
    while time.monotonic() < until or looks < _LOOKS:
        looks += 1
        for port in ports:
            found += port.poll()
    return found


def test_streams_are_spread_over_the_nics_and_keep_to_theirs() -> None:
    network = MemoryNetwork(2, rails=2)
    with open_endpoints(network, 2, 1 << 16) as (group, endpoints):
        offered = endpoints[0].capabilities
        assert offered.in_sequence
        ports = [Port(group, rank) for rank in range(2)]
        for number, stream in enumerate([FIRST] * 3 + [SECOND] * 5):
            assert ports[0].post(1, 0, 0, 64, imm(0, stream, number), number, stream) == ACCEPTED
        ports[0].flush()
        events = poll_all(ports)
        assert sum(event.kind == ARRIVED for event in events) == sum(event.kind == SENT for event in events) == 8
        assert list(endpoints[0].state.links[2:4, rc.IMMEDIATES]) == [5, 3]
        # what comes back on the other rank's streams is on the same rails, and so are credits
        for stream in (FIRST, SECOND | 128):
            assert ports[1].post(0, 0, 0, 0, imm(1, stream, 0), 0, stream) == ACCEPTED
        ports[1].flush()
        poll_all(ports)
        assert list(endpoints[1].state.links[0:2, rc.IMMEDIATES]) == [1, 1]
        assert endpoints[0].describe(1).startswith("roce, 2 rails, mem0r0 port 1, GID 1")


def test_queue_pairs_of_a_rail_take_turns_whatever_goes_to_the_other_rail() -> None:
    network = MemoryNetwork(2, rails=2)
    with open_endpoints(network, 2, 1 << 16, settings=Settings(nic_qps=2)) as (group, endpoints):
        port = Port(group, 0)
        for number in range(8):
            assert port.post(1, 0, 0, 64, imm(0, SECOND, number), 2 * number, SECOND) == ACCEPTED
            assert port.post(1, 0, 0, 64, imm(0, FIRST, number), 2 * number + 1, FIRST) == ACCEPTED
        port.flush()
        assert list(endpoints[0].state.links[4:8, rc.IMMEDIATES]) == [4, 4, 4, 4]


@pytest.mark.parametrize("rails", [(3, 1), (1, 3), (2, 3)])
def test_ranks_with_different_numbers_of_nics_use_what_both_have(rails: tuple[int, int]) -> None:
    network = MemoryNetwork(2, rails=3, delay=0.2)
    windows = [np.zeros(1 << 16, np.uint8) for _ in range(2)]
    ends = [endpoint(network, rank, windows[rank], ranks=2, rails=rails[rank]) for rank in range(2)]
    connect(ends)
    assert network.objects["qp"] == 2 * min(rails), "queue pairs that nobody will use stay open"
    ports = [Port(Group(ends, windows, network.kill), rank) for rank in range(2)]
    for rank, port in enumerate(ports):
        for number in range(40):
            stream = 8 + number % 16
            assert port.post(1 - rank, 0, 0, 64, imm(rank, stream, number), number, stream) == ACCEPTED
        port.flush()
    events = poll_all(ports, 0.3)
    assert sum(event.kind == ARRIVED for event in events) == 80
    assert not [event for event in events if event.kind == DOWN]
    for one in ends:
        one.close()
    assert not +network.objects


class TestBytesInFlight:
    """Flow control is a limit of each NIC: what the endpoint may have in flight is not all on one of them."""

    share = 64 << 10
    settings = Settings(nic_bytes_in_flight=share)

    def test_a_nic_takes_no_more_than_its_share(self) -> None:
        network = MemoryNetwork(2, rails=2)
        with open_endpoints(network, 2, 1 << 20, settings=self.settings) as (group, endpoints):
            offered = endpoints[0].capabilities
            assert (offered.bytes_in_flight, offered.max_write) == (2 * self.share, self.share // 4)
            sender, receiver = Port(group, 0), Port(group, 1)
            size = self.share // 4
            answers = [sender.post(1, 0, 0, size, imm(0, FIRST, n), n, FIRST) for n in range(5)]
            assert answers == [ACCEPTED] * 4 + [BUSY]
            # the other NIC has room, and a write without payload always has
            assert sender.post(1, 0, 0, size, imm(0, SECOND, 0), 5, SECOND) == ACCEPTED
            assert sender.post(1, 0, 0, 0, imm(0, FIRST, 4), 6, FIRST) == ACCEPTED
            sender.flush()
            poll_all([sender, receiver])
            assert not endpoints[0].state.rails[:, rc.LOAD].any()
            assert sender.post(1, 0, 0, size, imm(0, FIRST, 5), 7, FIRST) == ACCEPTED

    def test_one_write_always_goes(self) -> None:
        network = MemoryNetwork(2, rails=2)
        with open_endpoints(network, 2, 1 << 20, settings=self.settings) as (group, _):
            sender = Port(group, 0)
            assert sender.post(1, 0, 0, 2 * self.share, imm(0, FIRST, 0), 0, FIRST) == ACCEPTED
            assert sender.post(1, 0, 0, 16, imm(0, FIRST, 1), 1, FIRST) == BUSY

    @pytest.mark.parametrize("how", ["lost", "dropped"])
    def test_what_was_under_way_to_a_peer_that_is_gone_weighs_no_more(self, how: str) -> None:
        network = MemoryNetwork(3, rails=2, retry_ms=10)
        with open_endpoints(network, 3, 1 << 20, settings=self.settings) as (group, endpoints):
            sender, other = Port(group, 0), Port(group, 2)
            rail = 1  # of channel 0 to rank 1; to rank 2 channel 1 takes it
            for number in range(4):
                assert sender.post(1, 0, 0, self.share // 4, imm(0, FIRST, number), number, FIRST) == ACCEPTED
            assert sender.post(2, 0, 0, 64, imm(0, SECOND, 0), 9, SECOND) == BUSY
            if how == "lost":
                network.kill(1)
                sender.flush()
                assert [e.peer for e in poll_all([sender, other], 0.4) if e.kind == DOWN] == [1, 1]
            else:
                sender.drop(1)
            assert endpoints[0].state.rails[rail, rc.LOAD] == 0
            assert sender.post(2, 0, 0, self.share, imm(0, SECOND, 0), 9, SECOND) == ACCEPTED
            sender.flush()
            assert [e.value for e in poll_all([sender, other]) if e.kind == SENT] == [9]
            assert endpoints[0].state.rails[rail, rc.LOAD] == 0


def test_the_nic_that_failed_is_named() -> None:
    network = MemoryNetwork(2, rails=2)
    with open_endpoints(network, 2, 1 << 16) as (group, endpoints):
        sender = Port(group, 0)
        network.fail(network.queue_pairs(0)[1], 0, codes.RETRY_EXC_ERR)
        assert sender.post(1, 0, 0, 64, imm(0, FIRST, 0), 0, FIRST) == ACCEPTED
        sender.flush()
        assert [event.peer for event in poll_all([sender], 0.3) if event.kind == DOWN] == [1]
        assert "; on mem0r1: work completion status 12" in endpoints[0].describe(1)
        assert "reported" not in endpoints[0].describe(1)
        network.events += [4, 10, 8]
        for _ in range(2):
            assert endpoints[0].describe(1).endswith("; the device has reported: port error, device fatal error")
        assert network.acknowledged == [4, 10, 8]


def test_what_arrived_on_other_nics_is_delivered_before_down() -> None:
    """More than one poll takes: the failure is seen first, on one NIC, what arrived waits on the other."""
    network = MemoryNetwork(2, rails=2)
    with open_endpoints(network, 2, 1 << 16) as (group, endpoints):
        ours, theirs = Port(group, 0), Port(group, 1)
        for number in range(200):
            assert theirs.post(0, 0, 0, 16, imm(1, FIRST, number), number, FIRST) == ACCEPTED
        theirs.flush()
        poll_all([theirs])
        network.fail(network.queue_pairs(0)[0], 0, codes.REM_ACCESS_ERR)
        assert ours.post(1, 0, 0, 16, imm(0, SECOND, 0), 0, SECOND) == ACCEPTED
        ours.flush()
        poll_all([theirs])
        endpoints[0].state.context[words.CURSOR] = 0
        events = poll_all([ours], 0.3)
        assert [event.kind for event in events] == [ARRIVED] * 200 + [DOWN]


def test_what_arrived_behind_another_peers_flushed_receives_is_delivered_before_down() -> None:
    """A poll that stores no event does not mean that nothing is left: it may have taken flushed receives only."""
    network = MemoryNetwork(3, rails=2)
    with open_endpoints(network, 3, 1 << 16) as (group, endpoints):
        ours, theirs = Port(group, 0), Port(group, 1)
        # They write nothing of their own accord, and so do not notice the failure.
        endpoints[1].state.context[rc.WATCHING] = 0
        network.fail(network.queue_pairs(0)[0], 0, codes.REM_ACCESS_ERR)
        assert ours.post(1, 0, 0, 16, imm(0, SECOND, 0), 0, SECOND) == ACCEPTED
        ours.flush()
        poll_all([theirs])
        # The failure is the first thing on one NIC; on the other, more than one poll takes comes before what arrived.
        ours.drop(2)
        for number in range(10):
            assert theirs.post(0, 0, 0, 16, imm(1, FIRST, number), number, FIRST) == ACCEPTED
        theirs.flush()
        poll_all([theirs])
        assert ours.poll() == []
        assert "work completion status 10" in endpoints[0].describe(1), "the failure has not been seen yet"
        # The time for delivery starts again: a machine that stands still here does not end it.
        endpoints[0].state.peers[1, rc.ENDED_AT] = time.monotonic_ns() + 10**9
        events = poll_all([ours], 0.3)
        assert [event.kind for event in events] == [ARRIVED] * 10 + [DOWN]


class TestConnecting:
    def test_a_peer_that_dies_meanwhile_is_named_and_nothing_stays_open(self, monkeypatch: pytest.MonkeyPatch) -> None:
        network, dead = MemoryNetwork(2, rails=2), False

        def watch() -> None:
            if dead:
                raise PeerLost("rank 1 is gone", peer=1)

        windows = [np.zeros(4096, np.uint8) for _ in range(2)]
        ends = [endpoint(network, rank, windows[rank], ranks=2, watch=watch) for rank in range(2)]
        addresses = [one.address() for one in ends]
        real, connected = QueuePair.connect, []

        def slow(self: QueuePair, *arguments: Any, **named: int) -> None:
            nonlocal dead
            real(self, *arguments, **named)
            connected.append(self.number)
            dead = True
            time.sleep(LOOK_SECONDS)

        monkeypatch.setattr(QueuePair, "connect", slow)
        with pytest.raises(PeerLost, match="rank 1 is gone"):
            ends[0].connect([None, addresses[1]], time.monotonic() + 5)
        assert len(connected) == 1, "not looked for between two queue pairs"
        ends[1].close()
        assert not +network.objects

    def test_a_peer_that_dies_while_queue_pairs_are_made(self) -> None:
        network = MemoryNetwork(2)

        def watch() -> None:
            raise PeerLost("rank 1 is gone", peer=1)

        with pytest.raises(PeerLost):
            endpoint(network, 0, np.zeros(4096, np.uint8), ranks=2, watch=watch)
        assert not +network.objects

    def test_the_time_for_connecting_is_bounded(self) -> None:
        network = MemoryNetwork(2)
        ends = [endpoint(network, rank, np.zeros(4096, np.uint8), ranks=2) for rank in range(2)]
        with pytest.raises(BootstrapError, match=r"rank 0 connects to rank 1 over roce.*time .* is over"):
            ends[0].connect([None, ends[1].address()], time.monotonic())
        ends[1].close()
        assert not +network.objects
