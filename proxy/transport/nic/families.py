"""Defaults per family of NIC: the one table of figures that differ between them, each with its source.

What a NIC *can* do is asked of the device, never concluded from its family; the family only decides what is sensible
where nothing was set. It is told by the PCI vendor that ``ibv_query_device`` reports.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAMILIES", "Family", "family_of"]

_MIB = 1 << 20


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
