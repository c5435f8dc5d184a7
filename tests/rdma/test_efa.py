"""``efa`` on NICs in memory: the contract, random orders and repeats, strangers, failures, and what it may never do."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.rdma.conftest import BOTH_WAYS, UNSOLICITED
from tests.support.contract import Group, OpenGroup, Port, Traffic, TransportContract
from tests.support.efa_endpoints import open_endpoints, open_network, some_writes
from tests.support.provider import provider_srd as nic
from tests.support.provider.provider_srd_library import SrdNetwork
from uccl_ep_serving.errors import TransportError
from uccl_ep_serving.protocol.streams import TRANSPORT
from uccl_ep_serving.proxy.transport.base import ACCEPTED, ARRIVED, DOWN, SENT
from uccl_ep_serving.proxy.transport.nic import efa_words as srd
from uccl_ep_serving.proxy.transport.verbs import codes

pytestmark = pytest.mark.usefixtures("receiving")


@BOTH_WAYS
class TestEfaContract(TransportContract):
    """The contract on one rail."""

    rails = 1
    max_write = 1 << 30

    @pytest.fixture
    def open_group(self) -> OpenGroup:
        @contextlib.contextmanager
        def open_group(ranks: int, window_bytes: int) -> Iterator[Group]:
            network = SrdNetwork(ranks, self.rails, seed=7)
            network.efa.max_write = self.max_write
            with open_network(network, window_bytes) as group:
                yield group

        return open_group


class TestEfaContractOnFourRails(TestEfaContract):
    rails = 4
    max_write = 1 << 20


class TestOrder:
    def test_writes_arrive_and_complete_in_any_order(self) -> None:
        with open_network(SrdNetwork(2, seed=3), 1 << 16) as group:
            traffic = some_writes(group, 200)
            traffic.run()
            order = [number for _, number in traffic.order]
            assert order != sorted(order)
            # all of one stream
            offered = group.endpoints[0].capabilities
            assert not offered.in_sequence
            assert offered.reads_after_drop

    def test_the_same_seed_gives_the_same_run(self) -> None:
        def history(seed: int) -> list[tuple[int, int]]:
            with open_network(SrdNetwork(2, seed=seed), 1 << 16) as group:
                traffic = some_writes(group, 100)
                traffic.run()
                return traffic.order

        assert history(5) == history(5)
        assert history(5) != history(6)

    def test_a_payload_lands_again_with_the_bytes_of_its_time_until_sent_and_never_after(self) -> None:
        """The danger that local completion guards against; not seen here, nothing would have been tested."""
        repeated = 0
        for seed in range(20):
            network = SrdNetwork(2, seed=seed, repeat=0.8, pace=1)
            with open_network(network, 4096) as group:
                traffic = some_writes(group, 1)
                assert traffic.try_post(0)
                traffic.ports[0].flush()
                while not any(event.kind == ARRIVED for event in traffic.ports[1].poll()):
                    pass
                group.windows[0][:64] = 99
                sent = [event for event in traffic.ports[0].poll() if event.kind == SENT]
                while not sent:
                    sent = [event for event in traffic.ports[0].poll() if event.kind == SENT]
                repeated += (group.windows[1][:64] == 99).all()
                group.windows[0][:64] = 55
                for _ in range(50):
                    traffic.ports[0].poll()
                assert not (group.windows[1][:64] == 55).any()
        assert repeated


def finish(traffic: Traffic, left: list[int]) -> None:
    """Post those that are ``left``, and poll until all that was posted has arrived."""
    for _ in range(3000):
        left = [number for number in left if not traffic.try_post(number)]
        for port in traffic.ports:
            port.flush()
            traffic.poll(port)
    assert traffic.summary() == {key: len(traffic.writes) for key in ("writes", "sent", "arrived")}


class TestQueues:
    def test_a_burst_never_overfills_the_send_queue(self) -> None:
        network = SrdNetwork(2, seed=2, pace=2)
        network.efa.sends = 8
        with open_network(network, 1 << 16) as group:
            traffic = some_writes(group, 300)
            traffic.run()
            assert traffic.busy

    def test_receives_are_posted_again_before_they_run_out(self) -> None:
        network = SrdNetwork(2, seed=2)
        network.efa.capabilities &= ~codes.EFA_CAP_UNSOLICITED_WRITE_RECV
        with open_network(network, 1 << 16) as group:
            some_writes(group, 1000).run()

    def test_a_receiver_that_sleeps_delays_its_senders_only(self) -> None:
        """Without unsolicited writes the NIC retries; nothing is lost, and the third rank is not held up."""
        network = SrdNetwork(3, seed=2)
        network.efa.capabilities &= ~codes.EFA_CAP_UNSOLICITED_WRITE_RECV
        network.efa.receives = 64
        with open_network(network, 1 << 16) as group:
            traffic = some_writes(group, 400, peer=1)
            left = [number for number in range(400) if not traffic.try_post(number)]
            traffic.ports[0].flush()
            while not network.fabric[nic.RETRIES]:
                traffic.poll(traffic.ports[0])
            other = traffic.add(0, 2, source=400 * 64, target=0, nbytes=64)
            assert traffic.try_post(400)
            traffic.ports[0].flush()
            for _ in range(200):
                for rank in (0, 2):
                    traffic.poll(traffic.ports[rank])
            assert other.arrivals == other.sent == 1
            assert traffic.summary()["sent"] < 401
            finish(traffic, left)
            assert not traffic.down

    def test_a_device_whose_receive_queue_is_too_short_is_refused(self) -> None:
        network = SrdNetwork(2)
        network.efa.capabilities &= ~codes.EFA_CAP_UNSOLICITED_WRITE_RECV
        network.efa.receives = 32
        with pytest.raises(TransportError, match="receive queue of 32"):
            open_endpoints(network, [np.zeros(4096, np.uint8)] * 2)
        assert not +network.objects


@UNSOLICITED
class TestCompletionQueue:
    """EFA tells nobody when it overflows; the NIC in memory does."""

    def network(self, ranks: int) -> SrdNetwork:
        """Queues of 64 sends and, for each peer, 8 writes and 4 words of what was taken."""
        network = SrdNetwork(ranks, seed=4, pace=64)
        network.efa.sends = 64
        for traits in network.traits:
            traits.max_cqe = 64 + (ranks - 1) * (8 + 4)
        return network

    def test_a_receiver_that_sleeps_makes_its_senders_busy(self) -> None:
        ranks, writes = 5, 40
        with open_network(self.network(ranks), 1 << 16) as group:
            traffic = Traffic(group)
            for sender in range(1, ranks):
                for number in range(writes):
                    target = (sender * writes + number) * 64
                    traffic.add(sender, 0, source=number * 64, target=target, nbytes=64)
            left = [number for number in range(len(traffic.writes)) if not traffic.try_post(number)]
            assert len(traffic.writes) - len(left) == 8 * (ranks - 1)
            for port in traffic.ports[1:]:
                port.flush()
            # all of it comes to lie in the queue of rank 0, which looks at nothing
            for _ in range(300):
                for port in traffic.ports[1:]:
                    traffic.poll(port)
            assert not any(map(traffic.try_post, left))
            finish(traffic, left)

    def test_traffic_both_ways_goes_on_however_little_room_there_is(self) -> None:
        network = self.network(3)
        network.efa.sends = 2
        with open_network(network, 1 << 16) as group:
            traffic = Traffic(group)
            for number in range(800):
                sender, peer = ((0, 1), (1, 0), (2, 0), (1, 2))[number % 4]
                traffic.add(sender, peer, source=number * 16, target=(number + 1000) * 16, nbytes=16)
            traffic.run()

    def test_a_peer_that_tells_too_much_gains_nothing(self) -> None:
        network = self.network(2)
        with open_network(network, 4096) as group:
            traffic = some_writes(group, 3)
            assert all(traffic.try_post(number) for number in range(3))
            assert group.endpoints[0].state.links[1, srd.UNTOLD] == 3
            address = network.address_of(0, 0, 1, 0)
            network.forge(0, 0, 1 << 20 | TRANSPORT << 12 | 2047, 5, address)
            assert not [event for event in traffic.ports[0].poll() if event.kind != SENT]
            assert group.endpoints[0].state.links[1, srd.UNTOLD] == 0


class TestStrangers:
    """Completions of QPs that are no peer's: a rank that was replaced, or whoever guessed a QKEY."""

    @pytest.mark.parametrize(
        ("source", "qpn", "address"),
        [
            (1, 6, None),  # right address, another QP of that host
            (1, 5, 999),  # the QP number of a peer, from somewhere else
            (2, 5, None),  # the immediate of rank 2, from rank 1
            (0, 5, None),  # this rank itself
            (3, 5, None),  # no such rank
            (4095, 5, None),
        ],
    )
    def test_they_are_counted_and_dropped(self, source: int, qpn: int, address: int | None) -> None:
        network = SrdNetwork(3)
        with open_network(network, 4096) as group:
            traffic = Traffic(group)
            known = network.address_of(0, 0, 1, 0)
            network.forge(0, 0, source << 20, qpn, known if address is None else address)
            assert traffic.ports[0].poll() == []
            assert group.endpoints[0].strangers == 1
            some_writes(group, 3, sender=1, peer=0).run()

    def test_the_forgery_would_have_been_believed_with_the_right_names(self) -> None:
        network = SrdNetwork(3)
        with open_network(network, 4096) as group:
            network.forge(0, 0, 1 << 20, 5, network.address_of(0, 0, 1, 0))
            assert [event.peer for event in Traffic(group).ports[0].poll()] == [1]
            assert group.endpoints[0].strangers == 0

    def test_a_library_that_tells_no_address_numbers(self) -> None:
        network = SrdNetwork(2)
        network.efa.tells_ah_numbers = False
        with open_network(network, 1 << 16) as group:
            some_writes(group, 10).run()


class TestFailures:
    def test_nothing_is_heard_of_a_dropped_peer_that_is_alive(self) -> None:
        """Its writes go on arriving and ours go on completing: neither is told, and the slots come back."""
        network = SrdNetwork(3, seed=4)
        network.efa.sends = 8
        with open_network(network, 1 << 16) as group:
            traffic = some_writes(group, 4)
            traffic.add(1, 0, source=0, target=8192, nbytes=64)
            for number in range(5):
                assert traffic.try_post(number)
            for port in traffic.ports:
                port.flush()
            traffic.ports[0].drop(1)
            assert [event for _ in range(200) for event in traffic.ports[0].poll()] == []
            assert network.in_flight == 0
            # nor is it told: there is no connection that could break
            told = [event for _ in range(200) for event in traffic.ports[1].poll() if event.kind == DOWN]
            assert bool(told) == group.endpoints[0].capabilities.tells_drop
            some_writes(group, 40, peer=2).run()

    @pytest.mark.parametrize(
        ("vendor", "number", "words"),
        [
            (7, errno.EACCES, "the peer's window is not where it was"),
            (9, errno.ECONNRESET, "no such queue pair"),
            (13, errno.ETIMEDOUT, "stopped answering"),
            (14, errno.ECONNRESET, "no address handle"),
            (15, errno.EIO, "security group"),
            (18, errno.EPROTO, "EFA code 18: feature mismatch"),
        ],
    )
    def test_a_failed_write_parts_from_its_peer_only(self, vendor: int, number: int, words: str) -> None:
        network = SrdNetwork(3, seed=4)
        with open_network(network, 1 << 16) as group:
            traffic = some_writes(group, 6)
            network.fail(2, vendor)
            for write in range(6):
                assert traffic.try_post(write)
            traffic.ports[0].flush()
            events = [event for _ in range(100) for port in traffic.ports for event in port.poll() if port.rank == 0]
            assert [(e.peer, e.status) for e in events if e.kind == DOWN] == [(1, number)]
            network.events.append(8)
            for _ in range(2):
                described = group.endpoints[0].describe(1)
                assert words in described
                assert described.endswith("; the devices have reported: efa0: device fatal error")
            assert traffic.ports[0].post(1, 0, 0, 0, 0, 7) == -errno.ENOTCONN
            others = some_writes(group, 4, peer=2)
            others.run()

    @pytest.mark.parametrize(
        ("vendor", "words"),
        [
            (1, "completion status 5, EFA code 1: flushed"),
            (2, "completion status 2, EFA code 2: internal error of the queue pair"),
            (5, "completion status 4, EFA code 5: source bytes outside registered memory"),
            (6, "completion status 1, EFA code 6: longer than the device's max_rdma_size"),
        ],
    )
    def test_a_fault_of_the_nic_itself_is_blamed_on_no_peer(self, vendor: int, words: str) -> None:
        network = SrdNetwork(3, rails=2, seed=4)
        with open_network(network, 1 << 16) as group:
            traffic = some_writes(group, 6)
            assert group.endpoints[0].diagnosis() == ""
            network.fail(2, vendor)
            for write in range(6):
                assert traffic.try_post(write)
            traffic.ports[0].flush()

            def poll_until_it_fails() -> None:
                for _ in range(200):
                    assert not [event for event in traffic.ports[0].poll() if event.kind == DOWN]

            with pytest.raises(AssertionError, match=f"poll returned -{errno.EIO}"):
                poll_until_it_fails()
            said = group.endpoints[0].diagnosis()
            assert said.startswith("efa")
            assert f": a work request failed: {words}" in said

    def test_failures_of_one_peer_are_one_loss(self) -> None:
        network = SrdNetwork(3, seed=4)
        with open_network(network, 1 << 16) as group:
            traffic = some_writes(group, 6)
            network.kill(1)
            for write in range(6):
                assert traffic.try_post(write)
            traffic.ports[0].flush()
            events = [event for _ in range(200) for event in traffic.ports[0].poll()]
            assert [(event.kind, event.peer) for event in events] == [(DOWN, 1)]
            assert network.in_flight == 0

    def test_a_peer_that_has_no_handle_for_us_refuses_our_writes(self) -> None:
        network = SrdNetwork(2, seed=4)
        windows = [np.zeros(4096, np.uint8) for _ in range(2)]
        endpoints = open_endpoints(network, windows)
        endpoints[0].connect([None, endpoints[1].address()], time.monotonic() + 1)
        port = Port(Group(endpoints, windows, network.kill), 0)
        assert port.post(1, 0, 0, 64, 0, 1) == ACCEPTED
        events = [event for _ in range(50) for event in port.poll()]
        assert [event.kind for event in events] == [DOWN]
        assert "EFA code 14: the peer has no address handle" in endpoints[0].describe(1)
        for endpoint in endpoints:
            endpoint.close()
        assert not +network.objects

    def test_a_write_without_payload_at_the_very_end_of_the_window(self) -> None:
        """The end is no address that a key covers: the NIC would refuse it."""
        with open_network(SrdNetwork(2), 4096) as group:
            port, peer = Port(group, 0), Port(group, 1)
            assert port.post(1, 4096, 4096, 0, 0, 1) == ACCEPTED
            assert {event.kind for _ in range(50) for event in (*port.poll(), *peer.poll())} == {ARRIVED, SENT}

    def test_impossible_writes_are_refused_before_anything_moves(self) -> None:
        network = SrdNetwork(2)
        network.efa.max_write = 1 << 12
        with open_network(network, 1 << 14) as group:
            port = Port(group, 0)
            for nbytes, target in ((8192, 0), (64, (1 << 14) - 48), (64, -16)):
                assert port.post(1, 0, target, nbytes, 0, 1) == -errno.EINVAL
            assert port.post(0, 0, 0, 0, 0, 1) == -errno.ENOTCONN
            assert group.endpoints[0].writes == 0
