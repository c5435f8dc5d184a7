"""Normal mode between nodes on a device, in Triton's interpreter: simulated nodes, real proxies, the same oracle."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels import triton_node_bodies as bodies
from tests.kernels import triton_normal_bodies as plain
from tests.support.normal_cases import Case
from tests.support.ranks import Ranks
from uccl_ep_serving.protocol import pipe

pytestmark = [
    pytest.mark.timeout(600),
    # not imported here: whether it is the interpreter is decided when it is imported
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

#: Nodes of two ranks, between which proxies copy; a node's ranks write each other's windows.
NODES: dict[str, Any] = {"window": "host", "transport": "shm", "node_ranks": 2, "proxies": 2, "channels": 2}
TWO_KINDS = {**NODES, "window": "auto"}
#: No heap to speak of, and landing slots, chunks and rings of a few rows: each is used many times in an operation.
ROUNDS: dict[str, Any] = {"heap_bytes": 4096, "round_bytes": 32 << 10, "chunk_bytes": 4096}
SMALL = Case(tokens=(5, 3, 0, 4), experts=4, topk=2)
FORMATS = [
    Case(tokens=(9, 6, 7, 3), experts=8, topk=2, dtype=torch.float8_e4m3fn, seed=1),
    Case(tokens=(0, 7, 0, 2), experts=8, topk=3, dtype=torch.float32, seed=2),
    Case(tokens=(20, 13, 11, 9), experts=12, topk=3, hidden=136, dtype=torch.float16, hot=0, seed=3),
    Case(tokens=(0, 0, 0, 0), experts=4, topk=2),
    Case(tokens=(0, 8, 0, 0), experts=4, topk=1, lost=0.0),
    Case(tokens=(6, 6, 6, 6), experts=8, topk=8, lost=0.0),
]
DEEP = Case(tokens=(60, 44, 0, 51), experts=8, topk=3)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Ranks]:
    """Rank processes whose Triton is the interpreter."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.mark.interpreter
def test_a_small_dispatch(interpreted: Ranks) -> None:
    assert interpreted.run(4, bodies.against_the_oracle, NODES, [SMALL], timeout=300) == [1] * 4


@pytest.mark.interpreter
def test_between_low_latency_in_two_kinds_of_window(interpreted: Ranks) -> None:
    """By default rows of ranks of a node land in device memory here; those between nodes in host memory, where the node
    reads them."""
    found = interpreted.run(4, plain.between_low_latency, TWO_KINDS, SMALL, timeout=580)
    assert found == [(2, (True, True))] * 4


@pytest.mark.interpreter
def test_every_slot_many_times_in_two_kinds_of_window(interpreted: Ranks) -> None:
    paths = {**TWO_KINDS, **ROUNDS}
    assert interpreted.run(4, bodies.against_the_oracle, paths, [DEEP, *FORMATS], timeout=580) == [7] * 4


@pytest.mark.interpreter
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_every_format(interpreted: Ranks, transport: str) -> None:
    paths = {**NODES, "transport": transport}
    assert interpreted.run(4, bodies.against_the_oracle, paths, [SMALL, *FORMATS], timeout=580) == [7] * 4


@pytest.mark.interpreter
def test_rings_of_a_few_rows(interpreted: Ranks) -> None:
    assert interpreted.run(4, bodies.against_the_oracle, {**NODES, **ROUNDS}, [DEEP], timeout=580) == [1] * 4


def test_a_node_sums_in_float32_and_rounds_once(interpreted: Ranks) -> None:
    interpreted.run(4, bodies.exact_sums, {**NODES, "timeout": 20.0}, timeout=300)


@pytest.mark.interpreter
def test_over_windows_that_all_ranks_map(interpreted: Ranks) -> None:
    """Windows in device memory, as of ranks on one host whose nodes are simulated: rail peers are written directly."""
    paths = {**NODES, **ROUNDS, "window": "device", "heap_bytes": 1 << 20}
    assert interpreted.run(4, bodies.against_the_oracle, paths, [SMALL, DEEP], timeout=580) == [2] * 4


@pytest.mark.interpreter
@pytest.mark.parametrize("node_ranks", [2, 4])
def test_eight_ranks(interpreted: Ranks, node_ranks: int) -> None:
    cases = [Case(tokens=(6, 0, 9, 2, 1, 7, 0, 5), experts=16, topk=4, seed=7)]
    paths = {**NODES, "node_ranks": node_ranks}
    assert interpreted.run(8, bodies.against_the_oracle, paths, cases, timeout=580) == [1] * 8


@pytest.mark.interpreter
def test_more_than_eight_ranks_a_node(interpreted: Ranks) -> None:
    """The marks of a row then take more than one byte."""
    cases = [Case(tokens=(3, 1) * 9, experts=36, topk=6)]
    paths = {**NODES, "node_ranks": 9, "proxies": 1}
    assert interpreted.run(18, bodies.against_the_oracle, paths, cases, timeout=580) == [1] * 18


@pytest.mark.interpreter
@pytest.mark.parametrize("rounds", [False, True])
def test_worst_case_and_cached(interpreted: Ranks, rounds: bool) -> None:
    interpreted.run(4, bodies.without_a_look, {**NODES, **(ROUNDS if rounds else {})}, timeout=580)


@pytest.mark.interpreter
@pytest.mark.parametrize("tokens", [4, 40])
def test_what_lies_behind_the_rows_of_a_broken_promise_is_not_summed(interpreted: Ranks, tokens: int) -> None:
    """Of more rows than a ring holds nobody waits for those that no sum needs."""
    interpreted.run(4, bodies.broken_promise, {**NODES, **ROUNDS, "timeout": 60.0}, tokens, timeout=580)


@pytest.mark.interpreter
def test_operations_that_nobody_waits_for_but_by_their_events(interpreted: Ranks) -> None:
    """Outputs on the stream that is asked for, counts rounded up, as between ranks that map each other."""
    interpreted.run(4, plain.asynchronous, NODES, (5, 3, 0, 4), (False, True), timeout=580)


@pytest.mark.interpreter
def test_without_ids(interpreted: Ranks) -> None:
    interpreted.run(4, bodies.without_ids, NODES, timeout=580)


@pytest.mark.interpreter
@pytest.mark.parametrize("slow", [0, 3])
def test_nobody_overtakes_a_slow_rank(interpreted: Ranks, slow: int) -> None:
    interpreted.run(4, bodies.slow_rank, {**NODES, **ROUNDS}, DEEP, slow, timeout=580)


@pytest.mark.interpreter
def test_a_handle_outlives_the_nodes_it_was_made_with(interpreted: Ranks) -> None:
    interpreted.run(4, bodies.after_a_mask, NODES, timeout=580)


@pytest.mark.interpreter
@pytest.mark.parametrize("who", [1, 2])
def test_who_falls_silent_is_named(interpreted: Ranks, who: int) -> None:
    """Of its own node, or of another. Whoever waits for a rank that itself waits may name that one, as on the CPU."""
    found = interpreted.run(4, bodies.silent, NODES, who, timeout=300)
    others = [one for rank, one in enumerate(found) if rank != who]
    assert who in {peer for _, peer, _ in others}, found
    assert all(kind in ("PeerTimeout", "PeerLost") and "normal dispatch" in text for kind, _, text in others), found


@pytest.mark.interpreter
@pytest.mark.parametrize(("word", "rows"), [(pipe.ARRIVED, 5), (pipe.ARRIVED, pipe.EVERYTHING), (pipe.FREED, 1000)])
def test_a_word_of_a_pipe_that_cannot_be_is_refused(interpreted: Ranks, word: int, rows: int) -> None:
    kind, peer, said = interpreted.run(4, bodies.forged_word, NODES, word, rows, timeout=300)[1]
    assert (kind, peer) == ("ProtocolError", 0)
    # not what was taken out instead
    assert f"got {rows:#x}, expected" in said


@pytest.mark.interpreter
def test_operations_of_random_sizes(interpreted: Ranks) -> None:
    assert interpreted.run(4, bodies.random_steps, {**NODES, **ROUNDS}, 12, 1, timeout=590) == [12] * 4
