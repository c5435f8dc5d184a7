"""A rank falls silent and the others fail one after the other: each names the silent rank, none the messenger."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from tests.support import bodies
from tests.support.combinations import diagonal
from tests.support.ranks import Ranks
from tests.system.test_group import PATHS
from tests.system.test_masking import case_of, combined, dispatched
from uccl_ep_serving.control_plane.bootstrap import StoreExchange
from uccl_ep_serving.errors import PeerError

SILENT = 2
_DEADLINE = 2.0


def wait_in_a_chain(
    exchange: StoreExchange, overrides: dict[str, Any], late: int, abrupt: bool
) -> tuple[str, int, str, float]:
    """Rank 2 sends its last dispatch to rank 0 only. So rank 0 waits in combine, for rank 1 in the first place, and
    rank 1 in dispatch, for rank 2. Rank ``late`` begins to wait a second after the other. With ``abrupt`` rank 1
    leaves as an uncaught exception would have it, without a goodbye.

    Returns what was raised, and after how long.
    """
    buffer = bodies.opened(exchange, {**overrides, "timeout": _DEADLINE})
    case = case_of(3)
    bodies.round_trip(buffer)
    arrived = dispatched(buffer, case)
    combined(buffer, case, arrived)
    exchange.all_gather(b"")
    if exchange.rank == SILENT:
        buffer.runtime.mask[1] = 1
        dispatched(buffer, case, hook=True)
        buffer.runtime.mask[1] = 0
        time.sleep(_DEADLINE + 2.5)
        buffer.runtime.close(0.1)
        return "", -1, "", 0.0
    arrived = dispatched(buffer, case, hook=True)
    if exchange.rank == 1 and late == 1:
        time.sleep(1.0)
    started = time.monotonic()
    try:
        arrived[4]()
        if late == 0:
            time.sleep(1.0)
        started = time.monotonic()
        combined(buffer, case, arrived)
    except PeerError as error:
        found = type(error).__name__, error.peer, str(error), time.monotonic() - started
    if exchange.rank == 1 and abrupt:
        os._exit(1)
    buffer.destroy()
    return found


#: Which rank begins to wait late, and whether rank 1 dies.
ORDERS = {
    "the end of the chain fails first": (1, False),
    "the messenger fails first": (0, False),
    "the messenger dies": (0, True),
}


@pytest.mark.parametrize(("order", "path"), diagonal(ORDERS, ["direct", "shm", "tcp"]))
def test_the_silent_rank_is_named_by_whoever_fails_first(mortal_ranks: Ranks, order: str, path: str) -> None:
    late, abrupt = ORDERS[order]
    mortal_ranks.start(3, wait_in_a_chain, PATHS[path], late, abrupt)
    results = mortal_ranks.finish([0, 1])
    for rank in (0,) if abrupt else (0, 1):
        succeeded, found = results[rank]
        assert succeeded, found
        kind, peer, text, seconds = found
        assert (kind, peer) == ("PeerTimeout", SILENT), text
        assert seconds < _DEADLINE + 1.0
    if late == 1:
        # the first to fail asked rank 1, which still waited
        text = results[0][1][2]
        assert "it is silent, and has not begun the operation in which rank 1 waits for it; " in text
        assert "rank 1 waits in low-latency dispatch" in text
        assert results[0][1][3] > _DEADLINE - 0.1
