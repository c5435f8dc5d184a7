"""Ranks as threads of one process that reach each other through production proxies on the fake transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from tests.support.direct_ranks import DirectGroup
from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.kernel_space import KernelSpace
from uccl_ep_serving.data_plane.segments import Segment
from uccl_ep_serving.protocol.layout import LowLatencyRoom, NormalPlan, WindowLayout
from uccl_ep_serving.protocol.streams import CREDIT
from uccl_ep_serving.proxy.service import ProxyService
from uccl_ep_serving.proxy.transport.base import Endpoint
from uccl_ep_serving.proxy.transport.fake import Adversary, FakeFabric

#: Everything that a reliable, unordered wire may do.
HOSTILE = Adversary(reorder=0.3, delay=0.1, duplicate=0.3, linger=0.5, busy=0.1)


class FakeGroup(DirectGroup):
    """A group whose peers are proxied; a context manager, because proxies must be stopped.

    ``mapped(rank, peer)`` tells which peers map each other's window all the same (it must be symmetric);
    ``node_ranks`` > 1: those of the same group of as many ranks, which are nodes then.
    """

    def __init__(
        self,
        ranks: int,
        *,
        adversary: Adversary | None = None,
        seed: int = 0,
        normal: NormalPlan | None = None,
        settings: Settings | None = None,
        mapped: Callable[[int, int], bool] = lambda rank, peer: False,
        node_ranks: int = 1,
    ) -> None:
        self.adversary = adversary or Adversary()
        self.seed = seed
        self.mapped = mapped if node_ranks == 1 else lambda rank, peer: rank // node_ranks == peer // node_ranks
        self.services: list[ProxyService] = []
        super().__init__(ranks, normal, settings)
        self.node_ranks = node_ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop all proxies."""
        for service in self.services:
            service.stop(time.monotonic() + 10)
        self.services = []

    def build(self, room: LowLatencyRoom | None) -> None:
        self.close()
        layout = WindowLayout(self.ranks, room, self.normal)
        segments = [Segment.create(f"test{rank}", layout.nbytes) for rank in range(self.ranks)]
        self.fabric = FakeFabric(self.ranks, layout.nbytes, self.seed, self.adversary, proxies=self.settings.proxies)
        for rank, segment in enumerate(segments):
            self.fabric.register_window(rank, segment.address)
        self.spaces = [self._connect(rank, segments, layout) for rank in range(self.ranks)]
        for segment in segments:
            segment.close_descriptor()
        self.start()

    def start(self) -> None:
        """Start all proxies."""
        for service in self.services:
            service.start()

    def _connect(self, rank: int, segments: list[Segment], layout: WindowLayout) -> KernelSpace:
        direct = self.written(rank)
        endpoints = [self.fabric.endpoint(rank, proxy) for proxy in range(self.settings.proxies)]
        for proxy, endpoint in enumerate(endpoints):
            addresses = [None if direct[p] else f"fake:{p}.{proxy}".encode() for p in range(self.ranks)]
            endpoint.connect(addresses, time.monotonic() + 5)
        return self.join(rank, segments, layout, endpoints)

    def written(self, rank: int) -> list[bool]:
        """By peer: whether the kernels of ``rank`` write its window themselves."""
        return [peer == rank or self.mapped(rank, peer) for peer in range(self.ranks)]

    def join(
        self, rank: int, segments: list[Segment], layout: WindowLayout, endpoints: Sequence[Endpoint]
    ) -> KernelSpace:
        """The kernel space of ``rank``, with a proxy on each of ``endpoints``, which are connected; none is started."""
        settings, direct = self.settings, self.written(rank)
        space = KernelSpace(rank, self.ranks, settings.least_channels, segments[rank], layout, settings.timeout)
        service = ProxyService(
            rank=rank,
            ranks=self.ranks,
            window=segments[rank].address,
            window_bytes=layout.nbytes,
            settings=settings,
            error=space.error,
            endpoints=[[endpoint] for endpoint in endpoints],
            route=[-1 if direct[peer] else 0 for peer in range(self.ranks)],
        )
        self.services.append(service)
        for stream in range(CREDIT):
            space.set_ring(stream, service.ring(stream))
        for peer in range(self.ranks):
            if direct[peer]:
                space.connect_direct(peer, segments[peer].address)
            else:
                space.connect_proxied(peer, service.arrived, service.completed)
        space.watch = service.check
        return space


def nodes(ranks: int, node_ranks: int, **options: Any) -> FakeGroup:
    """``ranks`` ranks in nodes of ``node_ranks``."""
    options.setdefault("settings", Settings(timeout=60.0, channels=2))
    return FakeGroup(ranks, node_ranks=node_ranks, **options)
