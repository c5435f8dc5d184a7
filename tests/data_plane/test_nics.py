"""Which NIC a proxy drives, on sysfs trees of hosts with RoCE NICs."""

from __future__ import annotations

import dataclasses

import pytest

from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.nics import HostNics, nic_transports
from uccl_ep_serving.data_plane.topology import Nic, Topology
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.proxy.transport.nic import roce
from uccl_ep_serving.proxy.transport.select import Offer


def nic(name: str, active: bool = True) -> Nic:
    return Nic(name, "bnxt_en", "Ethernet", active, 400.0, 0, address=f"0000:{ord(name):02x}:00.0", ports=(1,) * active)


class Recorded:
    """Stands in for the endpoint: what it was asked for."""

    def __init__(self, *arguments: int, **options: object) -> None:
        self.arguments, self.options = arguments, options


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch):
    """asked(nics, local ranks, proxies, **settings) -> {(rank, proxy): [(device, port, sharers) of each rail]}."""

    def ask(present: list[Nic], ranks: int, proxies: int, **settings: object) -> dict[tuple[int, int], list]:
        monkeypatch.setattr(roce, "RoceEndpoint", Recorded)
        in_force = Settings(proxies=proxies, channels=proxies, **settings)
        topology = Topology(nics=tuple(present))
        hosts = [HostNics(in_force, place=rank, local_ranks=ranks, topology=topology) for rank in range(ranks)]
        offers = [Offer(tuple(nic.name for nic in host.rails["roce"].nics)) for host in hosts]
        found = {}
        for rank, host in enumerate(hosts):
            for proxy in range(proxies):
                one = host.endpoint("roce", rank, ranks, proxy, window=0, window_bytes=0, peers=[], local_offers=offers)
                found[rank, proxy] = [(nic.device, nic.port, nic.sharers) for nic in one.options["nics"]]
        return found

    return ask


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_who_uses_no_nic_is_not_held_up_by_a_malformed_list_of_them(transport: str) -> None:
    malformed = Settings(nics="^", transport=transport)
    assert nic_transports(malformed) == ()
    for one in ("auto", "efa", "roce"):
        with pytest.raises(ConfigError, match="UCCL_EP_NICS"):
            nic_transports(dataclasses.replace(malformed, transport=one))


@pytest.mark.parametrize(
    ("wanted", "ports", "alone"),
    [("", (1, 2), "=a:1"), ("=a:2", (1, 2), "=a:2"), ("^a:1", (1, 2), "=a:2"), ("a", (2,), "=a:2"), ("a", (), "=a")],
)
def test_a_nic_is_asked_for_alone_at_the_port_in_use(wanted: str, ports: tuple[int, ...], alone: str) -> None:
    two_ports, other = dataclasses.replace(nic("a"), ports=ports), dataclasses.replace(nic("b"), name="ab")
    host = HostNics(Settings(nics=wanted), topology=Topology(nics=(two_ports, other)))
    assert host.alone(two_ports) == alone
    again = HostNics(Settings(nics=alone), topology=Topology(nics=(two_ports, other)))
    assert [one.name for one in again.rails["roce"].nics] == ["a"]
    assert again.alone(two_ports) == alone


def test_each_rank_has_a_nic_of_its_own(asked) -> None:
    assert asked([nic("a"), nic("b")], 2, 1) == {(0, 0): [("a", 1, 1)], (1, 0): [("b", 1, 1)]}


def test_ranks_and_proxies_that_share_a_nic_share_what_may_be_in_flight(asked) -> None:
    assert set(map(tuple, asked([nic("a")], 2, 2).values())) == {(("a", 1, 4),)}


def test_proxies_of_a_rank_drive_different_nics(asked) -> None:
    assert asked([nic("a"), nic("b")], 1, 2) == {(0, 0): [("a", 1, 1)], (0, 1): [("b", 1, 1)]}


def test_one_proxy_drives_all_nics_of_its_rank(asked) -> None:
    assert asked([nic("a"), nic("b")], 1, 1) == {(0, 0): [("a", 1, 1), ("b", 1, 1)]}
    three = asked([nic("a"), nic("b"), nic("c")], 1, 2)
    assert three == {(0, 0): [("a", 1, 1), ("c", 1, 1)], (0, 1): [("b", 1, 1)]}


def test_without_a_nic_every_device_is_named_with_its_reason() -> None:
    present = Topology(nics=(nic("a", active=False), nic("b")))
    offer = HostNics(Settings(nccl_ib_hca="^b"), topology=present).offers["roce"]
    assert offer == Offer(reason="a: no active port; b: NCCL_IB_HCA=^b leaves it out", present=True, unused=True)
    assert HostNics(Settings(), topology=Topology()).offers["roce"] == Offer()
