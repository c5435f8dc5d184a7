"""The choice of a GID on tables as NICs really have them."""

from __future__ import annotations

import ipaddress
import re

import pytest

from uccl_ep_serving.errors import ConfigError, TransportError
from uccl_ep_serving.proxy.transport.nic.defaults import FAMILIES, Family, choose_gid, family_of, route
from uccl_ep_serving.proxy.transport.verbs.codes import (
    GID_TYPE_IB,
    GID_TYPE_ROCE_V1,
    GID_TYPE_ROCE_V2,
    LINK_ETHERNET,
    LINK_INFINIBAND,
    LINK_UNSPECIFIED,
    PORT_ACTIVE,
)
from uccl_ep_serving.proxy.transport.verbs.device import Gid, Port

V1, V2 = GID_TYPE_ROCE_V1, GID_TYPE_ROCE_V2


def table(*entries: tuple[int, int, str]) -> list[Gid]:
    """(index, type, address): IPv4 addresses become v4-mapped, as the kernel makes them."""
    gids = []
    for index, kind, text in entries:
        address = ipaddress.ip_address(text)
        mapped = ipaddress.IPv6Address(f"::ffff:{address}") if address.version == 4 else address
        gids.append(Gid(index, kind, mapped.packed))
    return gids


#: mlx5 on Ethernet: every address twice, link-local first (``show_gids`` of a ConnectX with one IPv4 address).
MLX5 = table((0, V1, "fe80::1"), (1, V2, "fe80::1"), (2, V1, "10.0.0.5"), (3, V2, "10.0.0.5"))
#: bnxt_re with IPv6 only: the routable entry is the last.
BNXT_V6 = table((0, V2, "fe80::1"), (1, V1, "fe80::1"), (2, V1, "fd00::7"), (3, V2, "fd00::7"))
BOTH = table((0, V2, "fe80::1"), (1, V2, "fd00::7"), (2, V2, "10.0.0.5"))


@pytest.mark.parametrize(
    ("gids", "family", "expected"),
    [(MLX5, 4, 3), (MLX5, 6, 3), (BNXT_V6, 4, 3), (BOTH, 4, 2), (BOTH, 6, 1)],
    ids=["mlx5", "mlx5, IPv6 wanted", "IPv6 only", "both, IPv4 wanted", "both, IPv6 wanted"],
)
def test_the_first_routable_second_version_entry_wins(gids: list[Gid], family: int, expected: int) -> None:
    gid, reason = choose_gid(gids, LINK_ETHERNET, family=family)
    assert gid.index == expected
    assert str(gid) in reason


def test_an_index_that_was_set_wins_even_when_link_local() -> None:
    assert choose_gid(MLX5, LINK_ETHERNET, index=0)[0].index == 0
    with pytest.raises(ConfigError, match=r"mlx5_0: the GID index that was set, 9, .*GID 3 \(RoCE v2, 10\.0\.0\.5\)"):
        choose_gid(MLX5, LINK_ETHERNET, index=9, device="mlx5_0")


def test_link_local_is_the_last_resort_and_said_so() -> None:
    gid, reason = choose_gid(MLX5[:2], LINK_ETHERNET)
    assert gid.index == 1
    assert "beyond this link cannot be reached" in reason


@pytest.mark.parametrize("gids", [[], MLX5[:1], table((0, V2, "::"))], ids=["none", "RoCE v1 only", "zero"])
def test_without_a_second_version_entry_the_next_step_is_named(gids: list[Gid]) -> None:
    with pytest.raises(TransportError, match="Give the NIC's interface an IP address") as caught:
        choose_gid(gids, LINK_ETHERNET, device="bnxt_re0")
    assert caught.value.device == "bnxt_re0"


@pytest.mark.parametrize("link", [LINK_INFINIBAND, LINK_UNSPECIFIED], ids=["InfiniBand", "EFA"])
def test_other_links_take_the_first_entry(link: int) -> None:
    gids = table((0, GID_TYPE_IB, "fe80::ec0d:9a03:78:6d9e"))
    assert choose_gid(gids, link)[0] is gids[0]
    with pytest.raises(TransportError, match="is it active"):
        choose_gid([], link)


def test_an_index_that_is_meant_for_others_is_none_of_infiniband() -> None:
    """NCCL_IB_GID_INDEX of a cluster's RoCE NICs, which NCCL does not look at either."""
    gids = table((0, GID_TYPE_IB, "fe80::1"), (1, GID_TYPE_IB, "fec0::1"))
    assert choose_gid(gids[:1], LINK_INFINIBAND, index=3)[0] is gids[0]
    assert choose_gid(gids, LINK_INFINIBAND, index=1)[0] is gids[1]


def raw(text: str) -> bytes:
    return ipaddress.IPv6Address(text).packed


@pytest.mark.parametrize(
    ("link", "needs", "own", "there", "expected"),
    [
        (LINK_ETHERNET, False, "::ffff:10.0.0.1", "::ffff:10.1.0.1", (True, 9)),
        (LINK_INFINIBAND, False, "fe80::1", "fe80::2", (False, 9)),
        (LINK_INFINIBAND, True, "fe80::1", "fe80::2", (True, 9)),
        (LINK_INFINIBAND, False, "fe80:0:21:1::1", "fe80:0:22:1::2", (False, 9)),
        (LINK_INFINIBAND, False, "fe80:0:21:1::1", "fe80:0:22:2::2", (True, 0x22)),
        (LINK_INFINIBAND, False, "fe80::1", "fec0::2", (True, 9)),
    ],
    ids=["RoCE", "one subnet", "the port asks for it", "one subnet with routers", "over a router", "without its LID"],
)
def test_packets_have_the_global_header_where_they_need_it(
    link: int, needs: bool, own: str, there: str, expected: tuple[bool, int]
) -> None:
    port = Port(1, link, PORT_ACTIVE, mtu=5, lid=4, max_message=1 << 30, needs_route=needs)
    assert route(port, raw(own), raw(there), 9) == expected


def test_families_are_told_by_vendor() -> None:
    assert family_of(0x14E4).name == "Broadcom"
    assert family_of(0x02C9) is family_of(0x15B3)
    assert family_of(0x1234).name == "other"
    assert len({vendor for family in FAMILIES for vendor in family.vendors}) == sum(len(f.vendors) for f in FAMILIES)
    assert all(family.source and family.bytes_in_flight % 4096 == 0 for family in FAMILIES)


@pytest.mark.parametrize(
    "family", [one for one in FAMILIES if one.name not in ("Intel", "soft-RoCE")], ids=lambda family: family.name
)
def test_the_figure_that_a_source_quotes_is_the_one_that_is_used(family: Family) -> None:
    """For the two others none is published."""
    assert re.findall(r"\b\d{6,}\b", family.source) == [str(family.bytes_in_flight)]
