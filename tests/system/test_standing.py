"""What is told of a rank from outside while its group works: who keeps others waiting, and counters that only grow."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support import bodies
from tests.support.ranks import Ranks
from tests.system.test_group import PATHS
from uccl_ep_serving.control_plane.bootstrap import StoreExchange

STRAGGLER = 1


def _standing(exchange: StoreExchange, overrides: dict[str, Any]) -> list[dict[str, Any]]:
    """Counters before and after windows are rebuilt, and once rank 1 has been late for a while."""
    buffer = bodies.opened(exchange, overrides)
    told = []
    for tokens in (8, 64):
        bodies.round_trip(buffer, tokens=tokens)
        told.append(buffer.stats())
    for step in range(40):
        if exchange.rank == STRAGGLER:
            time.sleep(0.1)
        bodies.round_trip(buffer, seed=step)
    told.append(buffer.stats())
    buffer.destroy()
    told.append(buffer.stats())
    return told


@pytest.mark.parametrize("path", ["tcp"])
def test_counters_grow_over_epochs_and_a_straggler_is_named(ranks: Ranks, path: str) -> None:
    for rank, (first, second, third, closed) in enumerate(ranks.run(3, _standing, PATHS[path])):
        assert second["epoch"] == first["epoch"] + 1
        for name in ("bytes_sent", "bytes_received", "messages_sent", "messages_received", "commands", "iterations"):
            assert 0 < first[name] < second[name] < third[name], name
        assert [one["state"] for one in (first, second, third, closed)] == ["ok", "ok", "ok", "closed"]
        assert first["opened"] == third["opened"] <= first["time"] < third["time"]
        waits = third["waits"]["by_peer"]
        if rank == STRAGGLER:
            assert sum(waits.values()) < third["waits"]["samples"] / 2
        else:
            assert max(waits, key=waits.__getitem__) == str(STRAGGLER)
