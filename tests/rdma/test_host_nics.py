"""The NICs of a host as one rank uses them: what is offered and why not, who shares a NIC, and the cores near it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from nic_ranks import efa_nics, roce_nics
from provider_library import MemoryNetwork
from provider_srd_library import SrdNetwork
from sysfs_tree import machine

from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import TransportError
from uccl_ep_serving.nic_endpoints import HostNics
from uccl_ep_serving.proxy.transport import verbs_codes as codes
from uccl_ep_serving.proxy.transport.select import Offer
from uccl_ep_serving.proxy.transport.verbs_library import VerbsLibrary
from uccl_ep_serving.topology import Nic, Topology


def no_library() -> VerbsLibrary:
    raise TransportError("libefa.so.1 cannot be loaded")


def test_nothing_is_opened_where_there_is_nothing() -> None:
    nics = HostNics(Settings(), topology=Topology(), libraries={})
    assert nics.offers == {"efa": Offer(), "roce": Offer()}
    assert nics.near_cpus(["efa", "tcp"], 0) == frozenset()


def test_an_offer_names_its_rails_and_what_they_are() -> None:
    network = SrdNetwork(1, rails=3)
    nics = HostNics(Settings(), topology=efa_nics(3), libraries={"efa": lambda: network.library(0)})
    offer = nics.offers["efa"]
    assert (offer.nics, offer.fabric, offer.present) == (("efa0", "efa1", "efa2"), "EFA", True)
    assert offer.reason.startswith("RDMA write up to 1024 MiB")
    assert not +network.objects


def test_devices_without_a_library() -> None:
    nics = HostNics(Settings(), topology=efa_nics(1), libraries={"efa": no_library})
    assert nics.offers["efa"] == Offer(reason="libefa.so.1 cannot be loaded", present=True)


def test_every_nic_that_cannot_be_used_is_named_with_its_reason() -> None:
    network = MemoryNetwork(1, rails=3)
    network.traits[0].state = codes.PORT_DOWN
    network.traits[2].gids = []
    libraries = {"roce": lambda: network.library(0)}
    offer = HostNics(Settings(), topology=roce_nics(network, 0), libraries=libraries).offers["roce"]
    assert (offer.nics, offer.present) == ((), True)
    assert "mem0r0: port 1 is not active (state 1)" in offer.reason
    assert "mem0r2: no RoCE v2 GID" in offer.reason
    assert "mem0r1" not in offer.reason


def test_an_offer_says_which_address_each_nic_uses() -> None:
    network = MemoryNetwork(1, rails=2)
    libraries = {"roce": lambda: network.library(0)}
    offer = HostNics(Settings(), topology=roce_nics(network, 0), libraries=libraries).offers["roce"]
    assert offer.nics == ("mem0r0", "mem0r1")
    for name, address in (("mem0r0", "10.0.0.1"), ("mem0r1", "10.0.0.2")):
        assert f"{name}: soft-RoCE (0xffffff:0), firmware 1.0, GID 1 (RoCE v2, {address}): the first" in offer.reason
    chosen = Settings(nic_gid_index=7)
    refused = HostNics(chosen, topology=roce_nics(network, 0), libraries=libraries).offers["roce"]
    assert "mem0r0: the GID index that was set, 7, has no valid entry" in refused.reason
    assert not +network.objects


def test_devices_that_are_left_out_are_named(tmp_path: Path) -> None:
    nics = HostNics(Settings(nics="=bnxt_re9"), topology=machine("mi300x-thor2", tmp_path), libraries={})
    assert nics.offers["roce"].nics == ()
    assert "bnxt_re0: UCCL_EP_NICS==bnxt_re9 leaves it out" in nics.offers["roce"].reason
    assert nics.offers["efa"] == Offer()


def test_soft_roce_by_name(tmp_path: Path) -> None:
    network = MemoryNetwork(1)
    topology = Topology(nics=(Nic("mem0", "", "Ethernet", True, 10.0, -1, ports=(1,)),))
    libraries = {"roce": lambda: network.library(0)}
    assert HostNics(Settings(), topology=topology, libraries=libraries).offers["roce"].nics == ()
    offer = HostNics(Settings(nccl_ib_hca="mem0"), topology=topology, libraries=libraries).offers["roce"]
    assert (offer.nics, offer.fabric) == (("mem0",), "Ethernet")


@pytest.mark.parametrize(("local_ranks", "each"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_ranks_of_a_host_share_its_nics(local_ranks: int, each: int) -> None:
    for place in range(local_ranks):
        nics = HostNics(Settings(), place=place, local_ranks=local_ranks, topology=efa_nics(4), libraries={})
        assert len(nics.of_proxy("efa", 0)) == each


def test_proxies_run_near_their_nic() -> None:
    mine = sorted(os.sched_getaffinity(0))
    topology = replace(efa_nics(2, numa=1), cpus={0: frozenset({5000}), 1: frozenset({mine[-1], 5001})})
    nics = HostNics(Settings(), topology=topology, libraries={})
    assert nics.near_cpus(["efa", "shm"], 0) == {mine[-1]}
    assert nics.near_cpus(["shm", "tcp"], 0) == frozenset()
