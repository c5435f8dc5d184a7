"""Both modes against the torch oracle, in real processes over shm and tcp, with DeepEP's own tolerances.

The matrix is mode x dtype x form x cached x async x alignment x uneven; a process opens one Buffer per path and runs
all cases of its group size on it, so that overlapping shapes, epochs and leases are met as in a server.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support import bodies, ll_cases, normal_cases
from tests.support.bits import same_bits
from tests.support.combinations import diagonal
from tests.support.ranks import Ranks
from tests.system.test_group import PATHS
from uccl_ep_serving.control_plane.bootstrap import StoreExchange

UNEVEN = {2: (7, 0), 3: (0, 8, 3), 4: (1, 8, 0, 5), 8: (8, 1, 0, 7, 3, 8, 0, 2)}


def low_latency_cases(ranks: int) -> Iterator[ll_cases.Case]:
    """Formats x forms x counts x routings; plans change on the way, which rebuilds the windows."""
    formats: list[dict[str, Any]] = [
        {},
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"fp8": True, "hidden": 256},
        {"fp8": True, "hidden": 512, "round_scale": True, "ue8m0": True},
    ]
    spreads = [((8,), "random"), (UNEVEN[ranks], "holes"), ((8,), "one"), ((8,), "none"), (UNEVEN[ranks], "far")]
    for number, (form, reduced) in enumerate(itertools.product(formats, (True, False))):
        for counts, routing in spreads[number % 2 :: 2] if ranks == 8 else spreads:
            yield ll_cases.Case(
                ranks=ranks, experts=4 * ranks, counts=counts, routing=routing, reduced=reduced, seed=number, **form
            )


def run_low_latency(exchange: StoreExchange, overrides: dict[str, Any]) -> int:
    buffer = bodies.opened(exchange, overrides)
    low_latency = ll_cases.mode_of(buffer)
    number = 0
    for case in low_latency_cases(exchange.size):
        inputs = case.inputs()
        combined = ll_cases.run_rank(case, low_latency, exchange.rank, inputs)
        ll_cases.check_combined(case, inputs, exchange.rank, combined)
        number += 1
    buffer.destroy()
    return number


def run_normal(exchange: StoreExchange, overrides: dict[str, Any]) -> int:
    buffer = bodies.opened(exchange, overrides)
    rank, size = exchange.rank, exchange.size
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
    number = 0
    kept = []
    for dtype, finish_async, alignment, uneven in itertools.product(dtypes, (False, True), (1, 128), (False, True)):
        tokens = tuple(9 * count for count in UNEVEN[size]) if uneven else (40,) * size
        case = normal_cases.Case(tokens, experts=4 * size, dtype=dtype, hidden=384, seed=number)
        inputs = case.inputs()
        outcome = normal_cases.round_trip(buffer, inputs, rank, async_finish=finish_async, expert_alignment=alignment)
        normal_cases.check_rank(inputs, rank, outcome, alignment)
        again, *_, event = buffer.dispatch(inputs.rows(rank), handle=outcome.handle, async_finish=finish_async)
        event.current_stream_wait()
        rows = again[0] if isinstance(again, tuple) else again
        assert same_bits(rows, outcome.rows)
        kept.append((outcome.rows, outcome.rows.clone()))
        number += 1
    # what was returned stays what it was, whatever came after it
    assert all(same_bits(rows, copy) for rows, copy in kept)
    buffer.destroy()
    return number


SIZES = [2, 3, 4, 8]
#: Nodes of ranks: all ranks, and how many of them play a node.
NODES = {"two of two": (4, 2), "two of four": (8, 4), "four of two": (8, 2)}


@pytest.mark.parametrize(("size", "path"), diagonal(SIZES, ["shm-2-proxies", "tcp-2-proxies", "direct"]))
def test_low_latency_equals_the_oracle(ranks: Ranks, path: str, size: int) -> None:
    assert min(ranks.run(size, run_low_latency, PATHS[path])) >= 25


@pytest.mark.parametrize(("size", "path"), diagonal(SIZES, ["tcp-2-proxies", "direct", "shm-2-proxies"]))
def test_normal_mode_equals_the_oracle(ranks: Ranks, path: str, size: int) -> None:
    assert ranks.run(size, run_normal, PATHS[path]) == [32] * size


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_normal_mode_in_rounds_equals_the_oracle(ranks: Ranks, path: str) -> None:
    """A heap that holds nothing: every operation is received in rounds."""
    tiny = {**PATHS[path], "heap_bytes": 4096, "round_bytes": 64 << 10, "chunk_bytes": 8192}
    assert ranks.run(3, run_normal, tiny) == [32] * 3


@pytest.mark.parametrize(("nodes", "path"), diagonal(NODES, ["shm", "tcp-2-proxies"]))
def test_normal_mode_between_nodes_equals_the_oracle(ranks: Ranks, nodes: str, path: str) -> None:
    """Rows cross once to a node, and are forwarded, and summed, inside it."""
    size, node_ranks = NODES[nodes]
    between = {**PATHS[path], "direct": True, "node_ranks": node_ranks}
    assert ranks.run(size, run_normal_between_nodes, between) == [(32, size // node_ranks)] * size


def test_normal_mode_between_nodes_in_rounds_equals_the_oracle(ranks: Ranks) -> None:
    tiny = {"transport": "tcp", "node_ranks": 2, "heap_bytes": 4096, "round_bytes": 64 << 10, "chunk_bytes": 8192}
    assert ranks.run(4, run_normal_between_nodes, tiny) == [(32, 2)] * 4


def run_normal_between_nodes(exchange: StoreExchange, overrides: dict[str, Any]) -> tuple[int, int]:
    """:func:`run_normal`, and how many nodes a dispatch of these settings crosses to."""
    number = run_normal(exchange, overrides)
    again = StoreExchange(exchange._store, exchange.rank, exchange.size, "nodes")
    buffer = bodies.opened(again, overrides)
    inputs = normal_cases.Case((9,) * exchange.size, experts=exchange.size).inputs()
    nodes = normal_cases.dispatch(buffer, inputs, exchange.rank)[4].nodes
    buffer.destroy()
    return number, 1 if nodes is None else len(nodes.node_rows)
