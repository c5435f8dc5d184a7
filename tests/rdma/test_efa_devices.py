"""``efa``, connecting: what devices offer and lack, addresses, rails, and a peer that dies meanwhile."""

from __future__ import annotations

import errno
import os
import time
from typing import Any

import numpy as np
import pytest

from tests.support.contract import Port
from tests.support.efa_endpoints import connect, open_endpoints, open_network, some_writes
from tests.support.provider.provider_srd_library import SrdNetwork
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import BootstrapError, ConfigError, PeerLost, TransportError
from uccl_ep_serving.proxy.transport.base import ACCEPTED, LOOK_SECONDS, SENT
from uccl_ep_serving.proxy.transport.nic import efa_words as srd
from uccl_ep_serving.proxy.transport.nic.efa import EfaEndpoint, choose_depths, usable
from uccl_ep_serving.proxy.transport.nic.efa_device import EfaLimits
from uccl_ep_serving.proxy.transport.nic.words import rail_of, stripe_table
from uccl_ep_serving.proxy.transport.verbs import codes
from uccl_ep_serving.proxy.transport.verbs.objects import AddressHandle


class TestDevices:
    def test_no_rdma_write_is_explained(self) -> None:
        network = SrdNetwork(1)
        network.efa.capabilities = codes.EFA_CAP_RDMA_READ
        with pytest.raises(TransportError, match=r"efa0 offers no RDMA write.*rdma-core before 46.*EFA installer"):
            open_endpoints(network, [np.zeros(4096, np.uint8)])
        network.efa.release = 39
        with pytest.raises(
            TransportError, match=r"rdma-core 39, which is installed here: release 46.*in this container"
        ):
            open_endpoints(network, [np.zeros(4096, np.uint8)])
        network.efa.release = 46
        with pytest.raises(TransportError, match=r"first-generation EFA \(p4d"):
            open_endpoints(network, [np.zeros(4096, np.uint8)])
        with pytest.raises(TransportError, match="no RDMA write"):
            usable("efa0", network.library(0))
        assert not +network.objects

    def test_what_a_device_offers_in_words(self) -> None:
        network = SrdNetwork(1)
        assert usable("efa0", network.library(0)) == (
            "RDMA write up to 1024 MiB, unsolicited write receive, send queue 256, receive queue 256"
        )
        network.efa.capabilities &= ~codes.EFA_CAP_UNSOLICITED_WRITE_RECV
        assert "receives posted for writes (without: rdma-core 52)" in usable("efa0", network.library(0))
        network.efa.release = 50
        assert "receives posted for writes (without: rdma-core 52, 50 is installed)" in usable(
            "efa0", network.library(0)
        )

    def test_a_library_without_service_levels_is_asked_again_without(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", "uccl_ep_serving")
        network = SrdNetwork(2)
        network.efa.old, network.efa.release = True, 50
        network.efa.capabilities &= ~codes.EFA_CAP_UNSOLICITED_WRITE_RECV
        with open_network(network, 1 << 16) as group:
            assert network.calls["efadv_create_qp_ex"] == 4
            assert group.endpoints[0].describe(1).endswith("QP 5, SL 0")
            some_writes(group, 10).run()
        said = "efa0: the service level for low latency was refused, 0 is used. rdma-core 55 knows it, 50 is installed"
        assert said in caplog.messages

    def test_a_send_queue_that_is_refused_is_asked_for_at_half_its_length(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "uccl_ep_serving")
        network = SrdNetwork(2)
        network.efa.granted = 100
        with open_network(network, 1 << 16) as group:
            assert group.endpoints[0].state.rails[0, srd.DEPTH] == 64
            assert group.endpoints[0].describe(1).endswith("SL 8")
            some_writes(group, 200).run()
        assert "efa0: a send queue of 256 was refused, 64 is used" in caplog.messages
        network.efa.granted = 10
        with pytest.raises(TransportError, match=r"256 sends, 64 receives\).*errno 12"):
            open_endpoints(network, [np.zeros(4096, np.uint8)] * 2)

    def test_a_send_queue_is_no_longer_than_the_library_allows(self) -> None:
        network = SrdNetwork(1)
        network.traits[0].max_qp_wr = 96
        assert "send queue 96, receive queue 256" in usable("efa0", network.library(0))

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


class TestDepths:
    """Queue depths with which the completion queue cannot overflow."""

    def limits(self, sends: int = 4096, receives: int = 4096, unsolicited: bool = True) -> EfaLimits:
        return EfaLimits(sends, receives, 1 << 30, True, unsolicited, True)

    @pytest.mark.parametrize("peers", [1, 7, 31, 55, 56, 63, 127, 255, 1023, 2047])
    def test_what_may_be_under_way_fits(self, peers: int) -> None:
        depths = choose_depths(self.limits(), 1 << 15, peers, "efa0")
        # each peer: its writes, and what it tells of ours, one for every quarter of them
        assert depths.sends + peers * (depths.room + 4) == depths.completions <= 1 << 15
        assert depths.room % 4 == 0
        assert depths.room >= 4
        assert (depths.room == 512) == (peers <= 55)

    def test_the_send_queue_gives_way_before_the_peers_do(self) -> None:
        assert choose_depths(self.limits(), 1 << 15, 255, "efa0").sends == 4096
        short = choose_depths(self.limits(sends=1 << 14), 1 << 15, 800, "efa0")
        assert (short.sends, short.room) == ((1 << 15) - 800 * 36, 32)

    def test_too_many_peers_are_refused(self) -> None:
        with pytest.raises(TransportError, match=r"efa0: a completion queue has at most 1024 entries.* of 200 peers"):
            choose_depths(self.limits(), 1024, 200, "efa0")

    def test_receives_that_are_posted_bound_what_arrives(self) -> None:
        depths = choose_depths(self.limits(unsolicited=False), 1 << 15, 4095, "efa0")
        assert (depths.sends, depths.receives, depths.completions, depths.room) == (4096, 1024, 5120, 0)
        assert choose_depths(self.limits(unsolicited=False), 4096 + 200, 63, "efa0").receives == 192


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
            endpoint._monitor._next = 0.0
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
            assert group.endpoints[0].describe(1) == (
                "efa, 2 rails, efa0 -> fe80::5 QP 5, SL 8; efa1 -> fe80::6 QP 5, SL 8"
            )
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
        network.efa.max_write = 1 << 20
        gib = 1 << 30
        nbytes = gib + (8 << 20)
        with open_network(network, nbytes) as group:
            before = network.objects["mr"]
            devices = [np.zeros(nbytes, np.uint8) for _ in range(2)]
            network.device_memory = [(device.ctypes.data, nbytes) for device in devices]
            offers = [
                one.offer_device(device.ctypes.data, nbytes, export)
                for one, device in zip(group.endpoints, devices, strict=True)
            ]
            assert network.objects["mr"] - before == 4
            group.endpoints[0].accept_device([None, offers[1]])
            group.endpoints[1].accept_device([offers[0], None])
            port = Port(group, 0)
            for number, (source, target, count) in enumerate(
                ((gib - 4096, gib - 64, 1 << 16), (gib + (1 << 20), gib + (1 << 20), 4096), (0, 0, 64))
            ):
                devices[0][source : source + count] = number + 1
                assert port.post(1, source, target, count, number, number) == ACCEPTED
                port.flush()
                while not any(event.kind == SENT for event in port.poll()):
                    pass
                assert (devices[1][target : target + count] == number + 1).all()
            for one in group.endpoints:
                one.release_device()


def export(start: int, nbytes: int) -> tuple[int, int]:
    """Any descriptor will do."""
    return os.open(os.devnull, os.O_RDONLY), 0
