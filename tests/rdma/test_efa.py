"""``efa`` on NICs in memory: the contract, random orders and repeats, failures, and what it may never do."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import provider_srd as nic
import pytest
from contract import Group, OpenGroup, Port, Traffic, TransportContract
from provider_srd_library import SrdNetwork

from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import BootstrapError, ConfigError, PeerLost, TransportError
from uccl_ep_serving.proxy.transport import verbs_codes as codes
from uccl_ep_serving.proxy.transport.base import ACCEPTED, ARRIVED, DOWN, LOOK_SECONDS, SENT
from uccl_ep_serving.proxy.transport.efa import EfaEndpoint, usable
from uccl_ep_serving.proxy.transport.striping import rail_of, stripe_table
from uccl_ep_serving.proxy.transport.verbs_memory import DmaBuf
from uccl_ep_serving.proxy.transport.verbs_qp import AddressHandle


def connect(endpoints: Sequence[EfaEndpoint]) -> None:
    addresses: list[bytes | None] = [endpoint.address() for endpoint in endpoints]
    for rank, endpoint in enumerate(endpoints):
        others = [None if peer == rank else address for peer, address in enumerate(addresses)]
        endpoint.connect(others, time.monotonic() + 1)


def open_endpoints(
    network: SrdNetwork, windows: Sequence[np.ndarray], rails: Sequence[int] | None = None, **options: Any
) -> list[EfaEndpoint]:
    """One endpoint per rank, not connected; ``rails`` is how many each uses."""
    return [
        EfaEndpoint(
            rank,
            len(windows),
            0,
            window=window.ctypes.data,
            window_bytes=window.nbytes,
            settings=Settings(),
            library=network.library(rank),
            **{"devices": [f"efa{rail}" for rail in range(rails[rank] if rails else network.rails)], **options},
        )
        for rank, window in enumerate(windows)
    ]


@contextlib.contextmanager
def open_network(network: SrdNetwork, window_bytes: int, **options: Any) -> Iterator[Group]:
    """Connected endpoints on ``network``; afterwards nothing may be left, and nothing may have been violated."""
    windows = [np.zeros(window_bytes, np.uint8) for _ in range(network.ranks)]
    endpoints = open_endpoints(network, windows, **options)
    connect(endpoints)
    yield Group(endpoints, windows, network.kill)
    for endpoint in endpoints:
        endpoint.close()
        endpoint.close()
    assert network.violation == 0
    assert not +network.objects, "left open"


class TestEfaContract(TransportContract):
    """The contract on one rail."""

    rails = 1
    unsolicited = True
    max_write = 1 << 30

    @pytest.fixture
    def open_group(self) -> OpenGroup:
        @contextlib.contextmanager
        def open_group(ranks: int, window_bytes: int) -> Iterator[Group]:
            network = SrdNetwork(ranks, self.rails, seed=7)
            network.efa.max_write = self.max_write
            if not self.unsolicited:
                network.efa.capabilities &= ~codes.EFA_CAP_UNSOLICITED_WRITE_RECV
            with open_network(network, window_bytes) as group:
                yield group

        return open_group


class TestEfaContractOnFourRails(TestEfaContract):
    rails = 4
    max_write = 1 << 20


class TestEfaContractWithReceives(TestEfaContract):
    """A device without unsolicited write receive: every immediate takes a receive that was posted for it."""

    unsolicited = False
    max_write = 1 << 20


def some_writes(group: Group, count: int, sender: int = 0, peer: int = 1) -> Traffic:
    traffic = Traffic(group)
    for number in range(count):
        traffic.add(sender, peer, source=number * 64, target=number * 64, nbytes=64)
    return traffic


class TestOrder:
    def test_writes_arrive_and_complete_in_any_order(self) -> None:
        with open_network(SrdNetwork(2, seed=3), 1 << 16) as group:
            traffic = some_writes(group, 200)
            traffic.run()
            order = [number for _, number in traffic.order]
            assert order != sorted(order)
            # all of one stream
            offered = group.endpoints[0].capabilities
            assert (offered.ordered, offered.in_sequence) == (False, False)

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
        with open_network(network, 1 << 16) as group:
            traffic = some_writes(group, 400, peer=1)
            number = len(traffic.writes)
            while number and traffic.try_post(len(traffic.writes) - number):
                number -= 1
            traffic.ports[0].flush()
            for _ in range(200):
                traffic.poll(traffic.ports[0])
            assert network.fabric[nic.RETRIES] > 0
            assert not [event for event in traffic.ports[2].poll() if event.kind == DOWN]

    def test_a_device_whose_receive_queue_is_too_short_is_refused(self) -> None:
        network = SrdNetwork(2)
        network.efa.capabilities &= ~codes.EFA_CAP_UNSOLICITED_WRITE_RECV
        network.efa.receives = 32
        with pytest.raises(TransportError, match="receive queue of 32"):
            open_endpoints(network, [np.zeros(4096, np.uint8)] * 2)
        assert not +network.objects


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


class TestDevices:
    def test_no_rdma_write_is_explained(self) -> None:
        network = SrdNetwork(1)
        network.efa.capabilities = codes.EFA_CAP_RDMA_READ
        with pytest.raises(TransportError, match=r"efa0 offers no RDMA write.*rdma-core 44.*EFA installer"):
            open_endpoints(network, [np.zeros(4096, np.uint8)])
        with pytest.raises(TransportError, match="no RDMA write"):
            usable("efa0", network.library(0))
        assert not +network.objects

    def test_what_a_device_offers_in_words(self) -> None:
        network = SrdNetwork(1)
        assert usable("efa0", network.library(0)) == (
            "RDMA write up to 1024 MiB, unsolicited write receive, send queue 256, receive queue 256"
        )

    def test_a_library_without_service_levels_is_asked_again_without(self) -> None:
        network = SrdNetwork(2)
        network.efa.old = True
        network.efa.capabilities &= ~codes.EFA_CAP_UNSOLICITED_WRITE_RECV
        with open_network(network, 1 << 16) as group:
            assert network.calls["efadv_create_qp_ex"] == 4
            some_writes(group, 10).run()

    def test_an_unknown_device_is_named_with_those_that_exist(self) -> None:
        network = SrdNetwork(1)
        with pytest.raises(ConfigError, match=r"no RDMA device 'efa7'.*efa0"):
            EfaEndpoint(
                0,
                2,
                0,
                window=4096,
                window_bytes=4096,
                devices=["efa7"],
                settings=Settings(),
                library=network.library(0),
            )

    @pytest.mark.parametrize(
        "call",
        [
            "ibv_open_device",
            "ibv_query_port",
            "efadv_query_device",
            "ibv_alloc_pd",
            "ibv_reg_mr",
            "ibv_create_cq",
            "ibv_modify_qp",
        ],
    )
    def test_whatever_is_refused_nothing_stays_open(self, call: str) -> None:
        network = SrdNetwork(1, rails=2)
        network.refuse[call] = errno.ENOMEM
        with pytest.raises(TransportError, match=f"efa0.*{call}.*locked memory"):
            open_endpoints(network, [np.zeros(4096, np.uint8)])
        assert not +network.objects

    @pytest.mark.parametrize("lacking", [0, 1])
    def test_ranks_that_differ_in_unsolicited_writes_are_told_who_lacks_them(self, lacking: int) -> None:
        """A write is marked by its sender, and a queue pair of the other kind takes it in no way."""
        network = SrdNetwork(2)
        endpoints = []
        for rank in range(2):
            network.efa.capabilities |= codes.EFA_CAP_UNSOLICITED_WRITE_RECV
            if rank == lacking:
                network.efa.capabilities &= ~codes.EFA_CAP_UNSOLICITED_WRITE_RECV
            endpoints.append(
                EfaEndpoint(
                    rank,
                    2,
                    0,
                    window=4096,
                    window_bytes=4096,
                    devices=["efa0"],
                    settings=Settings(),
                    library=network.library(rank),
                )
            )
        addresses = [one.address() for one in endpoints]
        for rank, one in enumerate(endpoints):
            peers = [None if peer == rank else address for peer, address in enumerate(addresses)]
            with pytest.raises(BootstrapError, match=rf"efa0 .* rank {lacking}'s EFA driver .* the same versions"):
                one.connect(peers, time.monotonic() + 1)
        assert not +network.objects

    def test_a_refused_handle_closes_the_endpoint(self) -> None:
        network = SrdNetwork(2)
        endpoints = open_endpoints(network, [np.zeros(4096, np.uint8) for _ in range(2)])
        network.refuse["ibv_create_ah"] = errno.EHOSTUNREACH
        with pytest.raises(TransportError, match="address handle"):
            connect(endpoints)
        endpoints[1].close()
        assert not +network.objects


class TestConnecting:
    def test_a_peer_that_dies_meanwhile_is_named_and_nothing_stays_open(self) -> None:
        network = SrdNetwork(3)
        asked: list[int] = []

        def watch() -> None:
            asked.append(network.objects["ah"])
            if network.objects["ah"]:
                raise PeerLost("rank 2 is gone", peer=2)

        windows = [np.zeros(4096, np.uint8) for _ in range(3)]
        endpoints = open_endpoints(network, windows, watch=watch)
        for endpoint in endpoints:
            endpoint._lookout._next = 0.0
        addresses = [one.address() for one in endpoints]
        real = AddressHandle.__init__

        def slow(self: AddressHandle, *arguments: Any) -> None:
            real(self, *arguments)
            time.sleep(LOOK_SECONDS)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AddressHandle, "__init__", slow)
            with pytest.raises(PeerLost, match="rank 2 is gone"):
                endpoints[0].connect([None, *addresses[1:]], time.monotonic() + 5)
        assert asked[-2:] == [0, 1], "not looked for between two peers"
        for endpoint in endpoints:
            endpoint.close()
        assert not +network.objects

    def test_the_time_for_connecting_is_bounded(self) -> None:
        network = SrdNetwork(2)
        endpoints = open_endpoints(network, [np.zeros(4096, np.uint8) for _ in range(2)])
        with pytest.raises(BootstrapError, match=r"rank 0 connects to rank 1 over efa.*time .* is over"):
            endpoints[0].connect([None, endpoints[1].address()], time.monotonic())
        endpoints[1].close()
        assert not +network.objects


class TestAddresses:
    @pytest.mark.parametrize("cut", [0, 3, 20, -1])
    def test_a_malformed_address_is_refused(self, cut: int) -> None:
        network = SrdNetwork(2)
        first, second = open_endpoints(network, [np.zeros(4096, np.uint8) for _ in range(2)])
        with pytest.raises(BootstrapError, match="rank 0 connects to rank 1 over efa"):
            first.connect([None, second.address()[:cut]], time.monotonic() + 1)
        second.close()
        assert not +network.objects

    def test_another_group_is_refused(self) -> None:
        network = SrdNetwork(2)
        (first, _), (_, other) = (
            open_endpoints(network, [np.zeros(size, np.uint8) for _ in range(2)]) for size in (4096, 8192)
        )
        with pytest.raises(BootstrapError, match=r"window bytes.* 8192.* 4096"):
            first.connect([None, other.address()], time.monotonic() + 1)


class TestRails:
    def test_ranks_with_different_numbers_of_rails_use_what_both_have(self) -> None:
        network = SrdNetwork(2, rails=4)
        with open_network(network, 1 << 16, rails=[4, 2]) as group:
            assert group.endpoints[0].describe(1).startswith("efa, 2 rails, efa0 -> fe80::5 QP 5, efa1 -> fe80::6 QP 5")
            some_writes(group, 64).run()
            some_writes(group, 64, sender=1, peer=0).run()

    def test_channels_and_peers_are_spread_over_all_rails(self) -> None:
        stripes = stripe_table(1)
        for channels, peers in ((1, 8), (4, 1)):
            rails = {
                rail_of(int(stripes[8 + channel]), 0, 16 + peer, 4)
                for channel in range(channels)
                for peer in range(peers)
            }
            assert rails == {0, 1, 2, 3}

    def test_both_ends_and_the_credits_agree(self) -> None:
        stripes = stripe_table(2)
        for stream in range(128):
            assert stripes[stream] == stripes[stream | 128]
            assert rail_of(int(stripes[stream]), 3, 9, 4) == rail_of(int(stripes[stream]), 9, 3, 4)

    def test_device_memory_goes_by_dmabuf_in_chunks_that_overlap(self) -> None:
        """A write across 1 GiB lies in the chunk in which it starts, at both ends."""
        network = SrdNetwork(2)
        network.efa.max_write, network.peer_memory = 1 << 20, False
        gib = 1 << 30
        with open_network(network, gib + (8 << 20), kind="device", export=export) as group:
            assert network.objects["mr"] == 4
            traffic = Traffic(group)
            traffic.add(0, 1, source=gib - 4096, target=gib - 64, nbytes=1 << 16)
            traffic.add(0, 1, source=gib + (1 << 20), target=gib + (1 << 20), nbytes=4096)
            traffic.add(0, 1, source=0, target=0, nbytes=64)
            traffic.run()


def export(start: int, nbytes: int) -> DmaBuf:
    """Any descriptor will do."""
    return DmaBuf(os.open(os.devnull, os.O_RDONLY), 0)
