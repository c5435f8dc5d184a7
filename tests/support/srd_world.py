"""The world of ``tests/proxy`` on EFA devices in memory: production's proxies over production's EFA data path."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.provider.provider_srd_library import SrdNetwork
from tests.support.world import RingProducer, World
from uccl_ep_serving.config import Settings
from uccl_ep_serving.protocol.context import ERROR_WORDS
from uccl_ep_serving.proxy import loop
from uccl_ep_serving.proxy.service import ProxyService
from uccl_ep_serving.proxy.transport.nic.efa import EfaEndpoint

__all__ = ["SrdWorld"]


class SrdWorld(World):
    """A :class:`World` whose ranks reach each other over ``network``, which has been told how to behave."""

    def __init__(self, network: SrdNetwork, window_bytes: int, *, proxies: int = 1, **settings: Any) -> None:
        self.network = network
        self.ranks = network.ranks
        self.asleep: set[int] = set()
        self.settings = Settings(proxies=proxies, channels=max(proxies, settings.pop("channels", 1)), **settings)
        self._step = loop.step
        self._dead: set[int] = set()
        self.fabric: Any = SimpleNamespace(alive=lambda rank: rank not in self._dead)
        self.windows = [np.zeros(window_bytes, np.uint8) for _ in range(self.ranks)]
        self.errors = [np.zeros(ERROR_WORDS, np.int64) for _ in range(self.ranks)]
        self.endpoints = [[self._endpoint(rank, proxy) for proxy in range(proxies)] for rank in range(self.ranks)]
        for rank, row in enumerate(self.endpoints):
            for proxy, endpoint in enumerate(row):
                addresses = [
                    None if peer == rank else self.endpoints[peer][proxy].address() for peer in range(self.ranks)
                ]
                endpoint.connect(addresses, time.monotonic() + 30)
        self.services = [self._service_of(rank) for rank in range(self.ranks)]
        self._producers: dict[tuple[int, int], RingProducer] = {}
        self.watchers = []

    def _endpoint(self, rank: int, proxy: int) -> EfaEndpoint:
        window = self.windows[rank]
        return EfaEndpoint(
            rank,
            self.ranks,
            proxy,
            window=window.ctypes.data,
            window_bytes=window.nbytes,
            devices=[f"efa{rail}" for rail in range(self.network.rails)],
            settings=self.settings,
            library=self.network.library(rank),
        )

    def _service_of(self, rank: int) -> ProxyService:
        return ProxyService(
            rank=rank,
            ranks=self.ranks,
            window=self.windows[rank].ctypes.data,
            window_bytes=self.windows[rank].nbytes,
            settings=self.settings,
            error=self.errors[rank].ctypes.data,
            endpoints=[[endpoint] for endpoint in self.endpoints[rank]],
            route=[-1 if peer == rank else 0 for peer in range(self.ranks)],
        )

    def kill(self, rank: int) -> None:
        """The host of ``rank`` is gone."""
        self._dead.add(rank)
        self.network.kill(rank)

    def close(self) -> None:
        """Close all endpoints; nothing may be left of them."""
        for endpoint in (endpoint for row in self.endpoints for endpoint in row):
            endpoint.close()
        assert self.network.violation == 0
        assert not +self.network.objects
