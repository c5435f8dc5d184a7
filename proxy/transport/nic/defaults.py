"""What is used of a NIC where nothing was set: the GID of its port, and the figures of its family.

GID: NCCL's rules, so that what works for NCCL on a cluster works here. InfiniBand takes the port's first entry, unless
it has one of the index that was set, which may be meant for the RoCE NICs of a cluster. On RoCE that index wins; else
it takes the first RoCE v2 entry of the wanted address family that is neither zero nor link-local, then any such entry
of the other family; only where there is none, a link-local one, which works between ports of one link. Index 0 is not
good enough there: on several NICs (Broadcom Thor-2 among them) it is link-local, cannot be routed, and writes fail with
completion status 12.

Family: the one table of figures that differ between NICs, each with its source. What a NIC *can* do is asked of the
device, never concluded from its family, which is told by the PCI vendor that ``ibv_query_device`` reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....errors import ConfigError, TransportError
from ..verbs.codes import GID_TYPE_ROCE_V2, LINK_ETHERNET
from ..verbs.device import Gid, Port

_MIB = 1 << 20
#: Bytes of a GID that hold the LID of the router to its subnet, 0 = none.
_FLID = slice(4, 6)


@dataclass(frozen=True, slots=True)
class Family:
    """Defaults for the NICs of some vendors.

    Attributes:
        name: for messages.
        vendors: PCI vendor ids.
        bytes_in_flight: most bytes posted and not completed per NIC.
        traffic_class: of the global route header: DSCP << 2 | ECN.
        service_level: 802.1p priority.
        source: where the figures come from.
        retries: of an unacknowledged packet before completion status 12.
    """

    name: str
    vendors: tuple[int, ...]
    bytes_in_flight: int
    traffic_class: int
    service_level: int
    source: str
    retries: int = 7


FAMILIES = (
    Family(
        "Broadcom",
        (0x14E4,),
        1536 << 10,
        104,
        3,
        "bytes: UCCL-EP's setting for Thor-2 (UCCL_IB_MAX_INFLIGHT_BYTES=1572864), without which throughput collapses "
        "with completion error 12; class and level: Thor-2's default lossless queue, DSCP 26 and priority 3",
    ),
    Family(
        "AMD Pensando",
        (0x1DD8,),
        4 * _MIB,
        0,
        0,
        "bytes: UCCL-EP's setting for Pollara (4194304); class and level: none is published as a default",
    ),
    Family(
        "NVIDIA Mellanox",
        (0x02C9, 0x15B3),
        2 * _MIB,
        0,
        0,
        "bytes: UCCL-EP's default for InfiniBand verbs (2097152); class and level: NCCL's defaults, 0",
    ),
    Family(
        "Intel",
        (0x8086,),
        2 * _MIB,
        0,
        0,
        "as for Mellanox; no figure of its own is published",
    ),
    Family(
        "soft-RoCE",
        (0xFFFFFF,),
        1 * _MIB,
        0,
        0,
        "bytes: a choice, as more only lengthens the queue of a software NIC; retries: Linux's rxe takes 7 for without "
        "end (rxe_comp.c), and a broken route would never be reported",
        retries=6,
    ),
)

_OTHER = Family("other", (), 2 * _MIB, 0, 0, "UCCL-EP's default for verbs, NCCL's for class and level")


def family_of(vendor: int) -> Family:
    """The family of a PCI vendor id; cautious defaults for one that the table does not know."""
    return next((family for family in FAMILIES if vendor in family.vendors), _OTHER)


def choose_gid(
    gids: Sequence[Gid], link_layer: int, *, index: int = -1, family: int = 4, device: str = ""
) -> tuple[Gid, str]:
    """The GID to use on a port, and why, in words.

    Args:
        gids: the port's valid entries.
        link_layer: ``LINK_*`` of the port.
        index: the index that was set, -1 = none.
        family: address family to prefer, 4 or 6.
        device: for messages.

    Raises:
        ConfigError: the index that was set has no valid entry on a port of Ethernet.
        TransportError: the port has no entry that could be used.
    """
    table = ", ".join(map(str, gids)) or "none"
    for gid in gids:
        if gid.index == index:
            return gid, f"{gid}: set by UCCL_EP_NIC_GID_INDEX or NCCL_IB_GID_INDEX"
    if link_layer != LINK_ETHERNET:
        # InfiniBand and EFA: the first entry is the port's own.
        if gids:
            return gids[0], f"{gids[0]}: the port's own"
        raise TransportError(f"{device}: the port has no GID; is it active?", device=device)
    if index >= 0:
        raise ConfigError(f"{device}: the GID index that was set, {index}, has no valid entry; valid are: {table}")
    second = [gid for gid in gids if gid.kind == GID_TYPE_ROCE_V2]
    for gid in second:
        if gid.usable and gid.address.version == family:
            return gid, f"{gid}: the first RoCE v2 entry with an IPv{family} address"
    for gid in second:
        if gid.usable:
            return gid, f"{gid}: the first RoCE v2 entry that can be routed; none has an IPv{family} address"
    for gid in second:
        if not gid.address.is_unspecified:
            return gid, f"{gid}: link-local, peers beyond this link cannot be reached. Give the interface an IP address"
    raise TransportError(
        f"{device}: no RoCE v2 GID (valid are: {table}). Give the NIC's interface an IP address and bring it up",
        device=device,
    )


def route(port: Port, own: bytes, gid: bytes, lid: int) -> tuple[bool, int]:
    """Whether packets from ``port``, whose GID is ``own``, need the global header to reach ``gid``, and the LID they go
    to.

    Ethernet has no other; a port of InfiniBand may ask for it (IBV_QPF_GRH_REQUIRED), and another subnet needs it. To
    that, packets go to the LID of a router, which such a GID holds (FLID, as NCCL reads it), else to ``lid``.
    """
    if port.link_layer == LINK_ETHERNET or _subnet(own) == _subnet(gid):
        return port.link_layer == LINK_ETHERNET or port.needs_route, lid
    return True, int.from_bytes(gid[_FLID], "big") or lid


def _subnet(gid: bytes) -> bytes:
    """The prefix of a GID without the LID in it."""
    return gid[: _FLID.start] + gid[_FLID.stop : 8]
