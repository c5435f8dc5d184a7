"""The NICs of a host as one rank uses them: what is offered and why not, who shares a NIC, and the cores near it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.nic_ranks import efa_nics, roce_nics
from tests.support.provider.provider_library import MemoryNetwork
from tests.support.provider.provider_srd_library import SrdNetwork
from tests.support.sysfs_tree import machine
from uccl_ep_serving.cli.doctor.findings import Status
from uccl_ep_serving.cli.doctor.transports import examine_nic_transports
from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.nics import HostNics
from uccl_ep_serving.data_plane.topology import Gpu, Nic, Topology
from uccl_ep_serving.errors import ConfigError, TransportError
from uccl_ep_serving.proxy.transport.select import Offer, choose
from uccl_ep_serving.proxy.transport.verbs import codes
from uccl_ep_serving.proxy.transport.verbs.library import VerbsLibrary


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
    assert nics.offers["efa"] == Offer(reason="libefa.so.1 cannot be loaded", present=True, unused=True)


def two_of_three(**settings: str) -> tuple[HostNics, Offer]:
    """A rank of a host with three NICs, of which only the second can be used, and its offer."""
    network = MemoryNetwork(1, rails=3)
    network.traits[0].state = codes.PORT_DOWN
    network.traits[2].gids = []
    libraries = {"roce": lambda: network.library(0)}
    nics = HostNics(Settings(**settings), topology=roce_nics(network, 0), libraries=libraries)  # type: ignore[arg-type]
    offer = nics.offers["roce"]
    assert not +network.objects
    return nics, offer


def test_a_rank_goes_on_with_the_nics_that_work(caplog: pytest.LogCaptureFixture) -> None:
    nics, offer = two_of_three()
    assert (offer.nics, offer.present) == (("mem0r1",), True)
    for words in (" ".join(offer.broken), caplog.text):
        assert "mem0r0: port 1 is not active (state 1)" in words
        assert "mem0r2: no RoCE v2 GID" in words
    assert "roce goes on over mem0r1 without NICs that fail" in caplog.text
    # the proxies drive the same ones as the offer names, and the verdicts say why the others play no part
    assert [nic.name for nic in nics.of_proxy("roce", 0)] == ["mem0r1"]
    reasons = {one.nic.name: (one.used, one.reason) for one in nics.rails["roce"].verdicts}
    assert reasons["mem0r1"] == (True, "rail 0")
    assert not reasons["mem0r0"][0]
    assert "port 1 is not active" in reasons["mem0r0"][1]
    (found,) = [one for one in examine_nic_transports(nics.offers, Settings()) if one.name == "roce"]
    assert found.status is Status.NOTE
    assert "usable over mem0r1 (Ethernet)" in found.value
    assert "Left out: mem0r0: port 1 is not active" in found.value


def test_a_nic_that_the_user_named_is_not_done_without() -> None:
    _, offer = two_of_three(nics="=mem0r0,mem0r1")
    assert (offer.nics, offer.present) == ((), True)
    assert "mem0r0: port 1 is not active (state 1)" in offer.reason
    assert offer.reason.endswith("(UCCL_EP_NICS names mem0r0)")
    assert (offer.asked, offer.unused) == ("UCCL_EP_NICS", False)
    # a prefix names none in particular
    assert two_of_three(nics="mem")[1].nics == ("mem0r1",)
    assert two_of_three(nics="^mem0r1")[1] == Offer(
        reason="mem0r0: port 1 is not active (state 1); check its cable, bring its interface up; "
        "mem0r2: no RoCE v2 GID (valid are: none). Give the NIC's interface an IP address and bring it up",
        present=True,
        unused=True,
    )


def test_the_next_nearest_nic_takes_the_place_of_a_broken_one() -> None:
    """As where a port is down: two GPUs, each with a NIC of its own behind its switch."""
    network = MemoryNetwork(1, rails=2)
    network.traits[0].state = codes.PORT_DOWN
    libraries = {"roce": lambda: network.library(0)}
    nics = roce_nics(network, 0).nics
    places = [(one.path[0], f"{one.path[0][3:]}:01.0") for one in nics]
    gpus = tuple(Gpu(path[-1], "amd", 0, path) for path in places)
    topology = Topology(nics=nics, gpus=gpus)
    offers = [
        HostNics(Settings(), place=place, local_ranks=2, gpu=gpu.address, topology=topology, libraries=libraries).offers
        for place, gpu in enumerate(gpus)
    ]
    assert [one["roce"].nics for one in offers] == [("mem0r1",), ("mem0r1",)]
    assert [len(one["roce"].broken) for one in offers] == [1, 0]


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
    for offer in nics.offers.values():
        assert (offer.nics, offer.asked) == ((), "UCCL_EP_NICS")
        assert offer.reason.startswith(
            "UCCL_EP_NICS==bnxt_re9 names bnxt_re9 (no such device or port); RDMA devices of this machine: bnxt_re0, "
        )


@pytest.mark.parametrize(
    ("settings", "asked", "unused"),
    [
        ({"nics": "mlx5"}, "UCCL_EP_NICS", False),
        ({"nics": "mlx5,bnxt_re0"}, "UCCL_EP_NICS", False),
        ({"nics": "mlx5,bnxt_re"}, "", True),
        ({"nics": "^bnxt"}, "", False),
        ({"nccl_ib_hca": "=bnxt_re0,mlx5_0"}, "", True),
        ({"nccl_ib_hca": "mlx5"}, "", True),
        ({"nccl_ib_hca": "^bnxt"}, "", False),
        ({}, "", True),
    ],
)
def test_what_was_asked_for_is_refused_and_what_is_there_is_missed(
    settings: dict[str, str], asked: str, unused: bool, tmp_path: Path
) -> None:
    """A list of NCCL's may be that of a cluster of different hosts: nothing in it need be there."""
    topology = machine("mi300x-thor2", tmp_path)
    nics = HostNics(Settings(**settings), topology=topology, libraries={"roce": no_library})  # type: ignore[arg-type]
    offer = nics.offers["roce"]
    assert (offer.nics, offer.asked, offer.unused) == ((), asked, unused)


def test_a_named_nic_without_a_link_is_refused(tmp_path: Path) -> None:
    topology = machine("dgx-h100", tmp_path)
    offers = HostNics(Settings(nics="mlx5_0,mlx5_8"), topology=topology, libraries={}).offers
    assert offers["roce"].asked == "UCCL_EP_NICS"
    assert offers["roce"].reason.startswith(
        "UCCL_EP_NICS=mlx5_0,mlx5_8 names mlx5_8 (no active port; check its cable, bring its interface up); RDMA "
    )
    (found,) = [one for one in examine_nic_transports(offers, Settings()) if one.name == "roce"]
    assert found.status is Status.PROBLEM
    assert found.next_step.endswith("or unset UCCL_EP_NICS")


def test_what_the_list_of_nccl_names_in_vain_is_passed_over_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    network = MemoryNetwork(1, rails=3)
    found = roce_nics(network, 0)
    dead = replace(found.nics[1], active=False, ports=())
    topology = replace(found, nics=(found.nics[0], dead, found.nics[2]))
    settings = Settings(nccl_ib_hca="=mem0r0,mem0r1,mlx5_9")
    libraries = {"roce": lambda: network.library(0)}
    offers = [
        HostNics(settings, place=place, local_ranks=2, topology=topology, libraries=libraries).offers["roce"]
        for place in range(2)
    ]
    for offer in offers:
        assert (offer.nics, offer.asked) == (("mem0r0",), "")
        assert "mlx5_9 (no such device or port)" in " ".join(offer.broken)
    (warning,) = caplog.messages
    assert "roce goes on over mem0r0" in warning
    assert "NCCL_IB_HCA==mem0r0,mem0r1,mlx5_9 names mem0r1 (no active port; check its cable" in warning
    # nothing is left: tcp with a warning, refused only where NICs were asked for
    ours, theirs = (
        HostNics(Settings(nccl_ib_hca="mlx5_9"), topology=one, libraries={}).offers for one in (topology, Topology())
    )
    for offers_of in (ours, theirs):
        choice = choose(Settings(), mapped=False, mine=offers_of, theirs=offers_of)
        assert choice.transport == "tcp"
        assert "NCCL_IB_HCA=mlx5_9 names mlx5_9 (no such device or port)" in choice.warning
        with pytest.raises(ConfigError, match="roce cannot reach a peer: this rank: NCCL_IB_HCA=mlx5_9 names mlx5_9"):
            choose(Settings(transport="roce"), mapped=False, mine=offers_of, theirs=offers_of)


def test_a_nic_that_the_list_of_nccl_names_and_that_fails_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    _, offer = two_of_three(nccl_ib_hca="=mem0r0,mem0r1")
    assert (offer.nics, offer.asked) == (("mem0r1",), "")
    (warning,) = caplog.messages
    assert "mem0r0: port 1 is not active" in warning


def test_the_list_of_nccl_says_nothing_of_efa(caplog: pytest.LogCaptureFixture) -> None:
    network = SrdNetwork(1, rails=2)
    for text in ("mlx5_0", "=mlx5_0:1", "^efa", "^", "efa0"):
        settings = Settings(nccl_ib_hca=text)
        nics = HostNics(settings, topology=efa_nics(2), libraries={"efa": lambda: network.library(0)})
        assert nics.offers["efa"].nics == ("efa0", "efa1")
        assert nics.offers["roce"] == Offer()
    assert not caplog.messages


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
