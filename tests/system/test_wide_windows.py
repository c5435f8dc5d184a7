"""Windows beyond 4 GiB: what lands behind them is at offsets that 32 bits do not hold. Untouched pages cost nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import bodies
from tests.support.ranks import Ranks
from uccl_ep_serving.control_plane.bootstrap import StoreExchange

# two slots for each source: those of rank 1 begin in the middle
_ROUNDS = 12 << 30
_PATHS: dict[str, dict[str, Any]] = {
    "direct": {},
    "shm": {"direct": False, "transport": "shm"},
    "tcp-2-proxies": {"direct": False, "transport": "tcp", "proxies": 2, "channels": 2},
}


def both_modes(exchange: StoreExchange, overrides: dict[str, Any]) -> int:
    """Where the heap begins, which is the last region."""
    buffer = bodies.opened(exchange, {"round_bytes": _ROUNDS, **overrides})
    for trip in (bodies.round_trip, bodies.normal_trip, bodies.normal_trip):
        trip(buffer)
    at = buffer.runtime.layout.normal_heap
    buffer.destroy()
    return at


@pytest.mark.parametrize("heap", [1 << 20, 0], ids=["in place", "in rounds"])
@pytest.mark.parametrize("path", _PATHS)
def test_rows_land_beyond_4_gib(ranks: Ranks, path: str, heap: int) -> None:
    for at in ranks.run(2, both_modes, {"heap_bytes": heap, **_PATHS[path]}):
        assert at > _ROUNDS
