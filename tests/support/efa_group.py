"""Ranks as threads whose proxies reach other hosts' ranks through EFA devices in memory."""

from __future__ import annotations

import time

from tests.support.fake_ranks import FakeGroup
from tests.support.provider.provider_srd_library import SrdNetwork
from uccl_ep_serving.data_plane.kernel_space import KernelSpace
from uccl_ep_serving.data_plane.segments import Segment
from uccl_ep_serving.protocol.layout import LowLatencyRoom, WindowLayout
from uccl_ep_serving.proxy.transport.nic.efa import EfaEndpoint

__all__ = ["EfaGroup"]


class EfaGroup(FakeGroup):
    """A :class:`FakeGroup` on one EFA device per rank."""

    def build(self, room: LowLatencyRoom | None) -> None:
        self.close()
        layout = WindowLayout(self.ranks, room, self.normal)
        segments = [Segment.create(f"test{rank}", layout.nbytes) for rank in range(self.ranks)]
        self.network = SrdNetwork(self.ranks, seed=self.seed, repeat=0.0, pace=64)
        self.endpoints = [
            EfaEndpoint(
                rank,
                self.ranks,
                0,
                window=segment.address,
                window_bytes=layout.nbytes,
                devices=["efa0"],
                settings=self.settings,
                library=self.network.library(rank),
            )
            for rank, segment in enumerate(segments)
        ]
        self.spaces = [self._join(rank, segments, layout) for rank in range(self.ranks)]
        for segment in segments:
            segment.close_descriptor()
        for service in self.services:
            service.start()

    def _join(self, rank: int, segments: list[Segment], layout: WindowLayout) -> KernelSpace:
        direct, endpoint = self.written(rank), self.endpoints[rank]
        addresses = [None if direct[peer] else self.endpoints[peer].address() for peer in range(self.ranks)]
        endpoint.connect(addresses, time.monotonic() + 5)
        return self.join(rank, segments, layout, [endpoint])

    def close(self) -> None:
        """Stop all proxies and close their devices."""
        super().close()
        for endpoint in getattr(self, "endpoints", []):
            endpoint.close()
