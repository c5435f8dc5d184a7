"""Groups of ``roce`` endpoints on in-memory NICs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.support.contract import Group
from tests.support.provider.provider_library import MemoryNetwork
from uccl_ep_serving.config import Settings
from uccl_ep_serving.proxy.transport.nic.roce import NicPort, RoceEndpoint


def endpoint(
    network: MemoryNetwork, rank: int, window: np.ndarray, *, ranks: int, proxy: int = 0, **options: Any
) -> RoceEndpoint:
    """The endpoint of ``rank`` for all other ranks on its NICs (or the first ``rails`` of them), not connected.

    ``port`` and ``sharers`` are those of every NIC.
    """
    place = {name: options.pop(name) for name in ("port", "sharers") if name in options}
    rails = options.pop("rails", network.rails)
    return RoceEndpoint(
        rank,
        ranks,
        proxy,
        window=window.ctypes.data,
        window_bytes=window.nbytes,
        peers=options.pop("peers", [peer for peer in range(ranks) if peer != rank]),
        settings=options.pop("settings", Settings()),
        nics=[NicPort(network.device_name(rank, rail), **place) for rail in range(rails)],
        library=network.library(rank),
        **options,
    )


def connect(endpoints: list[RoceEndpoint]) -> None:
    """All to all, as the runtime does it: addresses, connect, then the word that everybody has."""
    addresses = [one.address() for one in endpoints]
    for rank, one in enumerate(endpoints):
        one.connect([None if peer == rank else a for peer, a in enumerate(addresses)], time.monotonic() + 30)
    for one in endpoints:
        one.established()


@contextlib.contextmanager
def open_endpoints(
    network: MemoryNetwork, ranks: int, window_bytes: int, **options: Any
) -> Iterator[tuple[Group, list[RoceEndpoint]]]:
    """A connected group; afterwards no C object may be left."""
    windows = [np.zeros(window_bytes, np.uint8) for _ in range(ranks)]
    endpoints: list[RoceEndpoint] = []
    try:
        for rank in range(ranks):
            endpoints.append(endpoint(network, rank, windows[rank], ranks=ranks, **options))
        connect(endpoints)
        yield Group(endpoints, windows, network.kill), endpoints
    finally:
        for one in endpoints:
            one.close()
            one.close()
    assert not +network.objects, "C objects outlive their endpoint"
