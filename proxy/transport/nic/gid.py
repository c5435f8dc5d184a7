"""Which GID of a port to use: NCCL's rules, so that what works for NCCL on a cluster works here.

An index that was set wins. InfiniBand takes index 0. RoCE takes the first RoCE v2 entry of the wanted address family
that is neither zero nor link-local, then any such entry of the other family; only where there is none, a link-local
one, which works between ports of one link. Index 0 is not good enough there: on several NICs (Broadcom Thor-2 among
them) it is link-local, cannot be routed, and writes fail with completion status 12.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from ....errors import ConfigError, TransportError
from ..verbs.codes import GID_TYPE_IB, GID_TYPE_ROCE_V1, GID_TYPE_ROCE_V2, LINK_ETHERNET

__all__ = ["Gid", "choose_gid"]

_TYPE_WORDS = {GID_TYPE_IB: "IB", GID_TYPE_ROCE_V1: "RoCE v1", GID_TYPE_ROCE_V2: "RoCE v2"}


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's GID table.

    Attributes:
        index: place in the table.
        kind: ``GID_TYPE_*``.
        raw: its 16 bytes.
        interface: index of the network interface it belongs to, 0 = none.
    """

    index: int
    kind: int
    raw: bytes
    interface: int = 0

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """The IP address it stands for; v4-mapped GIDs are IPv4."""
        address = ipaddress.IPv6Address(self.raw)
        return address.ipv4_mapped or address

    @property
    def usable(self) -> bool:
        """Neither zero nor link-local."""
        address = self.address
        return not (address.is_unspecified or address.is_link_local)

    def __str__(self) -> str:
        return f"GID {self.index} ({_TYPE_WORDS.get(self.kind, f'type {self.kind}')}, {self.address})"


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
        ConfigError: the index that was set has no valid entry.
        TransportError: the port has no entry that could be used.
    """
    table = ", ".join(map(str, gids)) or "none"
    if index >= 0:
        for gid in gids:
            if gid.index == index:
                return gid, f"{gid}: set by UCCL_EP_NIC_GID_INDEX or NCCL_IB_GID_INDEX"
        raise ConfigError(f"{device}: the GID index that was set, {index}, has no valid entry; valid are: {table}")
    if link_layer != LINK_ETHERNET:
        # InfiniBand and EFA: the first entry is the port's own.
        if gids:
            return gids[0], f"{gids[0]}: the port's own"
        raise TransportError(f"{device}: the port has no GID; is it active?", device=device)
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
