"""Endpoints on the NICs of this host: which device a proxy drives, and who else drives it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .config import Settings
from .errors import ConfigError
from .proxy.transport.roce import RoceEndpoint
from .rails import HcaFilter, Rails, choose_rails
from .topology import Topology

__all__ = ["roce_endpoint"]


def _rails_of_ranks(settings: Settings, transport: str, local_ranks: int) -> list[Rails]:
    """The NICs of every rank of this host. Raises ConfigError when there is none, saying why of each device."""
    topology, wanted = Topology.read(), HcaFilter.of(settings)
    found = [
        choose_rails(topology, transport, local_rank=place, local_ranks=local_ranks, wanted=wanted)
        for place in range(local_ranks)
    ]
    if not found[0].nics:
        verdicts = "; ".join(f"{verdict.nic.name}: {verdict.reason}" for verdict in found[0].verdicts)
        raise ConfigError(
            f"UCCL_EP_TRANSPORT={transport}: no NIC of this host can be used ({verdicts or 'there is none'}). "
            "uccl-ep doctor says more"
        )
    return found


def roce_endpoint(
    rank: int,
    local_ranks: Sequence[int],
    proxy: int,
    *,
    ranks: int,
    window: int,
    window_bytes: int,
    peers: Collection[int],
    settings: Settings,
) -> RoceEndpoint:
    """The endpoint of ``proxy`` on its NIC; what that NIC may have in flight is shared with the others on it.

    Args:
        rank, ranks: of this process and in all.
        local_ranks: ranks of this host, this one among them.
        window, window_bytes, peers: see :class:`~uccl_ep_serving.proxy.transport.roce.RoceEndpoint`.

    Raises:
        ConfigError, TransportError: no NIC can be used, or the one chosen refused something.
    """
    rails = _rails_of_ranks(settings, "roce", len(local_ranks))
    (nic,) = rails[local_ranks.index(rank)].of_proxy(proxy, settings.proxies)[:1]
    in_use = [
        other.name
        for of_rank in rails
        for each in range(settings.proxies)
        for other in of_rank.of_proxy(each, settings.proxies)[:1]
    ]
    return RoceEndpoint(
        rank,
        ranks,
        proxy,
        window=window,
        window_bytes=window_bytes,
        peers=peers,
        settings=settings,
        device=nic.name,
        port=HcaFilter.of(settings).port(nic) or min(nic.ports),
        sharers=in_use.count(nic.name),
    )
