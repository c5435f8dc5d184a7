"""Endpoints of ``efa`` on NICs in memory, one per rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tests.support.contract import Group, Traffic
from tests.support.provider.provider_srd_library import SrdNetwork
from uccl_ep_serving.config import Settings
from uccl_ep_serving.proxy.transport.nic.efa import EfaEndpoint

__all__ = ["connect", "open_endpoints", "open_network", "some_writes"]


def connect(endpoints: Sequence[EfaEndpoint]) -> None:
    addresses: list[bytes | None] = [endpoint.address() for endpoint in endpoints]
    for rank, endpoint in enumerate(endpoints):
        others = [None if peer == rank else address for peer, address in enumerate(addresses)]
        endpoint.connect(others, time.monotonic() + 30)


def open_endpoints(
    network: SrdNetwork, windows: Sequence[np.ndarray], rails: Sequence[int] | None = None, **options: Any
) -> list[EfaEndpoint]:
    """One endpoint per rank, not connected; ``rails`` is how many each uses."""
    return [
        EfaEndpoint(
            rank,
            len(windows),
            0,
            window=window.ctypes.data,
            window_bytes=window.nbytes,
            settings=Settings(),
            library=network.library(rank),
            **{"devices": [f"efa{rail}" for rail in range(rails[rank] if rails else network.rails)], **options},
        )
        for rank, window in enumerate(windows)
    ]


@contextlib.contextmanager
def open_network(network: SrdNetwork, window_bytes: int, **options: Any) -> Iterator[Group]:
    """Connected endpoints on ``network``; afterwards nothing may be left, and nothing may have been violated."""
    windows = [np.zeros(window_bytes, np.uint8) for _ in range(network.ranks)]
    endpoints = open_endpoints(network, windows, **options)
    connect(endpoints)
    yield Group(endpoints, windows, network.kill)
    for endpoint in endpoints:
        endpoint.close()
        endpoint.close()
    assert network.violation == 0
    assert not +network.objects, "left open"


def some_writes(group: Group, count: int, sender: int = 0, peer: int = 1) -> Traffic:
    traffic = Traffic(group)
    for number in range(count):
        traffic.add(sender, peer, source=number * 64, target=number * 64, nbytes=64)
    return traffic
