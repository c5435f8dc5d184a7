"""Random steps of normal mode on Triton's kernels, interpreted: shapes, dtypes, empties, rounds, held to the oracle."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kernels import triton_normal_bodies as bodies
from tests.kernels.triton_bodies import PATHS
from tests.support.ranks import Ranks

pytestmark = [
    pytest.mark.timeout(3600),
    # not imported here: whether it is the interpreter is decided when it is imported
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

#: No heap to speak of, and landing slots of a few rows: everything goes in rounds.
ROUNDS = {"heap_bytes": 4096, "round_bytes": 32768, "chunk_bytes": 8192}
#: Nodes of two ranks, between which proxies copy.
NODES: dict[str, Any] = {"window": "host", "transport": "shm", "node_ranks": 2, "proxies": 2, "channels": 2}
_STEPS = 25
#: How many ranks, and their settings.
WINDOWS: dict[str, tuple[int, dict[str, Any]]] = {
    "mapped": (2, PATHS["mapped"]),
    "mapped, in rounds": (2, {**PATHS["mapped"], **ROUNDS}),
    "shm": (2, PATHS["shm"]),
    "shm, in rounds": (2, {**PATHS["shm"], **ROUNDS}),
    "ipc": (2, PATHS["ipc"]),
    "between nodes": (4, NODES),
    "between nodes, in rounds": (4, {**NODES, **ROUNDS}),
}


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Ranks]:
    """Rank processes whose Triton is the interpreter."""
    pool = Ranks()
    yield pool
    pool.close()


def _soak(interpreted: Ranks, window: str, seed: int) -> None:
    ranks, overrides = WINDOWS[window]
    assert interpreted.run(ranks, bodies.soak, overrides, _STEPS, seed, 40, timeout=1500) == [_STEPS] * ranks


@pytest.mark.interpreter
def test_a_few_steps(interpreted: Ranks) -> None:
    ranks, window = WINDOWS["shm, in rounds"]
    assert interpreted.run(ranks, bodies.soak, window, 4, 21, 8, timeout=500) == [4, 4]


@pytest.mark.interpreter
@pytest.mark.parametrize("window", WINDOWS)
def test_random_steps(interpreted: Ranks, window: str) -> None:
    _soak(interpreted, window, list(WINDOWS).index(window))


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
@pytest.mark.parametrize("window", ["mapped", "mapped, in rounds", "between nodes"])
def test_five_hundred_random_steps(interpreted: Ranks, window: str, part: int) -> None:
    """In parts, since the interpreter takes seconds for a step: a run goes on where it was interrupted."""
    _soak(interpreted, window, 100 * (1 + part) + list(WINDOWS).index(window))


@pytest.mark.interpreter
def test_nothing_waits_for_the_device_where_the_host_need_not_look(interpreted: Ranks) -> None:
    """``num_worst_tokens``, a cached dispatch and a combine: no tensor is read on the host, nothing is synchronised."""
    looks = interpreted.run(2, bodies.looks, PATHS["mapped"], timeout=300)
    for one in looks:
        # the same watch sees an ordinary dispatch look
        assert one["ordinary"] != []
        assert {name: seen for name, seen in one.items() if name != "ordinary"} == {
            "layout": [],
            "worst": [],
            "cached": [],
            "combine": [],
        }
