"""A group of real processes: both modes work over every path, and nothing is left behind."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.support import bodies
from tests.support.combinations import diagonal
from tests.support.ranks import Ranks
from tests.support.remains import left

PATHS: dict[str, dict[str, Any]] = {
    "direct": {},
    "shm": {"direct": False, "transport": "shm"},
    "tcp": {"direct": False, "transport": "tcp"},
    "shm-2-proxies": {"direct": False, "transport": "shm", "proxies": 2, "channels": 4},
    "tcp-2-proxies": {"direct": False, "transport": "tcp", "proxies": 2, "channels": 3, "tcp_connections": 2},
}


@pytest.mark.parametrize(("path", "size"), diagonal(PATHS, [1, 2, 3, 4, 8]))
def test_both_modes_on_every_path(ranks: Ranks, path: str, size: int) -> None:
    stats = ranks.run(size, bodies.both_modes, PATHS[path])
    for rank, one in enumerate(stats):
        kinds = set(one["transport_by_peer"].values())
        assert kinds == ({path.split("-")[0]} if size > 1 else set())
        assert one["rank"] == rank
        assert one["ops"]["ll_dispatch"]["count"] == 5
        if path != "direct" and size > 1:
            assert one["bytes_sent"] > 0
    assert left([ranks.pid(rank) for rank in range(size)]) == {}


@pytest.mark.parametrize("path", ["direct", "shm", "tcp"])
def test_closing_gives_back_threads_and_descriptors(ranks: Ranks, path: str) -> None:
    for threads, descriptors in ranks.run(2, bodies.leftovers, PATHS[path]):
        assert (threads, descriptors) == (0, 0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_of_a_host_share_the_cores_named_for_proxies(ranks: Ranks) -> None:
    one, two = sorted(os.sched_getaffinity(0))[:2]
    assert ranks.run(2, bodies.pinned, {**PATHS["shm"], "proxy_cpus": (one, two)}) == [[[one]], [[two]]]
