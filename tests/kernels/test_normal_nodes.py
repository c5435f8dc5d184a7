"""Normal mode between nodes: each row crosses once to a node and comes back once, over a wire that may do anything."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.bits import same_bits
from tests.support.direct_ranks import DirectGroup
from tests.support.fake_ranks import HOSTILE, FakeGroup, nodes
from tests.support.normal_cases import (
    Case,
    CountedEvent,
    Inputs,
    Outcome,
    check,
    dispatch,
    expert_outputs,
    round_trip,
)
from uccl_ep_serving import oracle
from uccl_ep_serving.config import Settings
from uccl_ep_serving.handles import EventOverlap
from uccl_ep_serving.modes.normal_cpu import Normal
from uccl_ep_serving.protocol.layout import NormalPlan
from uccl_ep_serving.protocol.message import HEADER_BYTES, notify_bytes, round_up

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
#: Ranks, and how many of them are a node.
SHAPES = [(4, 2), (8, 2), (8, 4), (6, 3), (6, 2)]
TOKENS = (70, 0, 40, 55, 33, 1, 90, 12)


def small(ranks: int, heap: int = 0, depth: int = 2) -> NormalPlan:
    """Landing slots of a few rows, so that every slot is used many times in an operation."""
    return NormalPlan(ranks, 64, heap=heap, rounds=ranks * (16 << 10), chunk=4096, depth=depth)


def run(group: DirectGroup, *cases: Case, **options: Any) -> list[list[Outcome]]:
    """A round trip of each case on one Buffer, all checked; outcomes by case and rank."""
    inputs = [case.inputs() for case in cases]

    def body(runtime: Any) -> list[Outcome]:
        normal = Normal(runtime)
        return [round_trip(normal, one, runtime.rank, **options) for one in inputs]

    results = [list(outcomes) for outcomes in zip(*group.run(body), strict=True)]
    for one, outcomes in zip(inputs, results, strict=True):
        check(one, outcomes, options.get("expert_alignment", 1), options.get("num_worst_tokens", 0))
        assert all(outcome.handle.nodes is not None for outcome in outcomes)
    return results


@pytest.mark.parametrize("operations", [(1 << 31) - 4, (1 << 32) - 4])
def test_after_months_of_operations(operations: int) -> None:
    """The number of an operation stands above the rows in one word of boards and lines."""
    inputs, over = Case((5, 9, 0, 7), experts=8).inputs(), threading.Barrier(4)

    def body(runtime: Any) -> list[Outcome]:
        normal = Normal(runtime)
        first = [round_trip(normal, inputs, runtime.rank)]
        over.wait(30)
        normal._exchange._number += operations
        return first + [round_trip(normal, inputs, runtime.rank) for _ in range(4)]

    with nodes(4, 2) as group:
        for outcomes in zip(*group.run(body), strict=True):
            check(inputs, list(outcomes))


@pytest.mark.parametrize(("ranks", "node_ranks"), SHAPES)
def test_every_dtype_over_a_quiet_wire(ranks: int, node_ranks: int) -> None:
    with nodes(ranks, node_ranks) as group:
        run(group, *(Case(TOKENS[:ranks], experts=6 * ranks, dtype=dtype, seed=ranks) for dtype in DTYPES))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heap", [8 << 20, 0], ids=["in place", "rounds"])
@pytest.mark.parametrize(("ranks", "node_ranks"), [(4, 2), (8, 4)])
def test_every_slot_many_times_over_a_hostile_wire(dtype: torch.dtype, heap: int, ranks: int, node_ranks: int) -> None:
    """Reordered, delayed and repeated writes, ring slots and landing slots that hold a few rows."""
    settings = Settings(timeout=60.0, channels=3, proxies=2, ring_slots=8)
    with nodes(ranks, node_ranks, adversary=HOSTILE, seed=ranks, normal=small(ranks, heap), settings=settings) as group:
        run(group, *(Case(TOKENS[:ranks], experts=4 * ranks, dtype=dtype, seed=seed) for seed in range(2)))


UNEVEN = {
    "nobody has a token": Case((0, 0, 0, 0), experts=8),
    "one rank has everything": Case((0, 200, 0, 0), experts=8),
    "one token": Case((0, 0, 0, 1), experts=8, lost=0.0),
    "all ids are -1": Case((9, 9, 9, 9), experts=8, lost=1.1),
    "all go to one rank": Case((40, 30, 20, 50), experts=16, hot=2),
    "one expert a token": Case((40, 30, 20, 50), experts=4, topk=1),
    "every expert is chosen": Case((16, 16, 16, 16), experts=8, topk=8, lost=0.0),
}


def test_uneven_inputs() -> None:
    with nodes(4, 2) as group:
        run(group, *UNEVEN.values())


def test_more_than_eight_ranks_a_node() -> None:
    """The marks of a row then take more than one byte."""
    with nodes(18, 9, settings=Settings(timeout=60.0)) as group:
        run(group, Case((11, 3) * 9, experts=36, topk=6))


@pytest.mark.parametrize("dtype", [DTYPES[0], DTYPES[3]])
def test_events_and_alignment_are_as_inside_a_node(dtype: torch.dtype) -> None:
    """Every operation waits for the event that it is given; a cached dispatch and its combine too."""
    inputs = Case((50, 20, 0, 31), experts=8, dtype=dtype).inputs()

    def body(runtime: Any) -> Outcome:
        normal, rank, before = Normal(runtime), runtime.rank, CountedEvent()
        options = {"previous_event": EventOverlap(before), "async_finish": True, "allocate_on_comm_stream": True}
        outcome = round_trip(normal, inputs, rank, expert_alignment=128, **options)
        assert outcome.handle.nodes is not None
        received, idx, weights, counts, handle, event = normal.dispatch(
            inputs.rows(rank), handle=outcome.handle, **options
        )
        event.current_stream_wait()
        rows = received[0] if isinstance(received, tuple) else received
        combined, back, _ = normal.combine(expert_outputs(rows, rank), handle, **options)
        assert (idx, weights, counts, back, before.waits) == (None, None, [], None, 3)
        assert same_bits(rows, outcome.rows)
        assert same_bits(combined, outcome.combined)
        return outcome

    with nodes(4, 2) as group:
        check(inputs, group.run(body), 128)


def test_alignment_and_worst_case_outputs() -> None:
    case = Case((50, 20, 0, 31), experts=8)
    with nodes(4, 2) as group:
        run(group, case, expert_alignment=128)
    with nodes(4, 2) as group:
        run(group, case, num_worst_tokens=101)


@pytest.mark.parametrize("heap", [8 << 20, 0], ids=["in place", "rounds"])
def test_a_handle_repeats_its_routing(heap: int) -> None:
    """Cached dispatches of other rows, FP8 and its scales included, and combines of each, in any order."""
    inputs = [Case((50, 0, 71, 30), experts=16, dtype=dtype, seed=5).inputs() for dtype in (DTYPES[0], DTYPES[3])]
    others = [dataclasses.replace(one, x=[x.flip(0).contiguous() for x in one.x]) for one in inputs]

    def body(runtime: Any) -> list[tuple[Outcome, Outcome]]:
        normal, rank = Normal(runtime), runtime.rank
        firsts = [round_trip(normal, one, rank) for one in inputs]
        seconds = []
        for other, first in zip(reversed(others), reversed(firsts), strict=True):
            received, idx, weights, counts, handle, _ = normal.dispatch(other.rows(rank), handle=first.handle)
            assert (idx, weights, counts) == (None, None, [])
            rows = received[0] if isinstance(received, tuple) else received
            combined = normal.combine(expert_outputs(rows, rank), handle)[0]
            seconds.append(dataclasses.replace(first, received=received, combined=combined))
        return list(zip(firsts, reversed(seconds), strict=True))

    with nodes(4, 2, adversary=HOSTILE, normal=small(4, heap)) as group:
        for one, other, results in zip(inputs, others, zip(*group.run(body), strict=True), strict=True):
            check(one, [first for first, _ in results])
            check(other, [second for _, second in results])


def test_a_handle_keeps_its_routing_whatever_becomes_of_the_layout() -> None:
    """A caller may count every batch into the same tensors."""
    inputs = Case((50, 20, 30, 10), experts=12, topk=2).inputs()

    def body(runtime: Any) -> tuple[torch.Tensor, torch.Tensor]:
        normal, rank = Normal(runtime), runtime.rank
        per_rank, _, per_expert, in_rank, _ = normal.get_dispatch_layout(inputs.topk_idx[rank], 12)
        counted = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
        ids = {"topk_idx": inputs.topk_idx[rank], "topk_weights": inputs.topk_weights[rank]}
        received, _, _, _, handle, _ = normal.dispatch(inputs.x[rank], **counted, **ids)
        in_rank.copy_(in_rank.flip(0))
        again = normal.dispatch(inputs.x[rank], handle=handle)[0]
        return received, again

    with nodes(4, 2) as group:
        for received, again in group.run(body):
            assert same_bits(received, again)


@pytest.mark.parametrize("named_twice", [False, True])
def test_rows_without_ids_and_weights(named_twice: bool) -> None:
    inputs = Case((50, 20, 30, 10), experts=12).inputs()
    if named_twice:
        ids = [torch.cat([ids, ids], dim=1) for ids in inputs.topk_idx]
        inputs = dataclasses.replace(inputs, topk_idx=ids, topk_weights=[torch.ones(one.shape) for one in ids])
    delivered = inputs.delivered

    def body(runtime: Any) -> Any:
        normal = Normal(runtime)
        per_rank, per_node, per_expert, in_rank, _ = normal.get_dispatch_layout(inputs.topk_idx[runtime.rank], 12)
        assert per_node is not None
        assert per_node.tolist() == in_rank.unflatten(1, (2, 2)).any(dim=2).sum(dim=0).tolist()
        received, idx, weights, counts, handle, _ = normal.dispatch(
            inputs.x[runtime.rank],
            num_tokens_per_rank=per_rank,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=in_rank,
        )
        assert idx is None
        assert weights is None
        assert counts == delivered[runtime.rank].expert_counts
        return received, normal.combine(received, handle)[0]

    with nodes(4, 2) as group:
        for rank, (received, combined) in enumerate(group.run(body)):
            assert same_bits(received, delivered[rank].rows(inputs.x))
            copies = oracle.in_rank(inputs.topk_idx[rank], 12, 4).sum(dim=1, keepdim=True)
            assert oracle.calc_diff(combined, inputs.x[rank].float() * copies) < 5e-6


def test_bias_is_added_once() -> None:
    inputs = Case((40, 30, 20, 10), experts=8, dtype=torch.float32, lost=0.6).inputs()
    bias = [torch.randn(n, 256, generator=torch.Generator().manual_seed(n)) for n in (40, 30, 20, 10)]
    delivered = inputs.delivered
    rows = [there.rows(inputs.x) for there in delivered]

    def body(runtime: Any) -> torch.Tensor:
        normal = Normal(runtime)
        received, *_, handle, _ = dispatch(normal, inputs, runtime.rank)
        return normal.combine(received, handle, bias=bias[runtime.rank])[0]

    with nodes(4, 2) as group:
        for rank, combined in enumerate(group.run(body)):
            expected = oracle.normal_combine(rows, delivered, rank, inputs.case.tokens[rank], [bias[rank]])
            assert oracle.calc_diff(combined, expected) < 1e-9


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # bfloat16 forgets a 1 beside 256. In float32, rounded once, a node gives 258 of these three ...
        ((0.0, 0.0, 0.0, 256.0, 1.0, 1.0), 258.0),
        # ... and of two of them 256, which travels back in bfloat16
        ((0.0, 0.0, 1.0, 256.0, 1.0, 0.0), 256.0),
    ],
)
def test_a_node_sums_in_float32_and_rounds_once(values: tuple[float, ...], expected: float) -> None:
    topk_idx = torch.tensor([[0, 1, 2, 3, 4, 5]])

    def body(runtime: Any) -> torch.Tensor:
        normal = Normal(runtime)
        per_rank, _, per_expert, in_rank, _ = normal.get_dispatch_layout(topk_idx, 6)
        received, *_, handle, _ = normal.dispatch(
            torch.ones(1, 8, dtype=torch.bfloat16),
            num_tokens_per_rank=per_rank,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=in_rank,
        )
        return normal.combine(torch.full_like(received, values[runtime.rank]), handle)[0]

    with nodes(6, 3) as group:
        assert group.run(body)[0].tolist() == [[expected] * 8]


def test_nothing_but_the_nodes_shows_in_the_results() -> None:
    """Chunks, channels, rounds and the wire do not; nodes round their sums, and show in nothing else."""
    case = Case((80, 31, 0, 44), hidden=384, experts=16, topk=6, seed=3)
    with FakeGroup(4, settings=Settings(timeout=60.0)) as group:
        inputs = case.inputs()
        direct = group.run(lambda runtime: round_trip(Normal(runtime), inputs, runtime.rank))
    seen = []
    for plan, channels, adversary in (
        (None, 1, None),
        (small(4), 2, HOSTILE),
        (small(4, depth=1), 5, None),
        (NormalPlan(4, 64, heap=8 << 20, rounds=128 << 10, chunk=8192), 3, HOSTILE),
    ):
        settings = Settings(timeout=60.0, channels=channels)
        with nodes(4, 2, normal=plan, adversary=adversary, settings=settings) as group:
            seen.append(run(group, case)[0])
    for rank, expected in enumerate(direct):
        for outcomes in seen:
            assert same_bits(outcomes[rank].rows, expected.rows)
            assert same_bits(outcomes[rank].topk_idx, expected.topk_idx)
            assert same_bits(outcomes[rank].topk_weights, expected.topk_weights)
            assert same_bits(outcomes[rank].combined, seen[0][rank].combined)
            assert same_bits(outcomes[rank].combined_weights, seen[0][rank].combined_weights)


def test_without_equal_nodes_rows_go_to_each_rank() -> None:
    """So they do where the setting says so, with one node, and with nodes that are no equal groups."""
    inputs = Case((40, 30, 20, 10), experts=8).inputs()

    def body(runtime: Any) -> Outcome:
        return round_trip(Normal(runtime), inputs, runtime.rank)

    groups: list[Callable[[], FakeGroup]] = [
        lambda: FakeGroup(4, mapped=lambda rank, peer: {rank, peer} <= {0, 1, 2}),
        lambda: nodes(4, 2, settings=Settings(timeout=20.0, hierarchy="off")),
        lambda: nodes(4, 4),
    ]
    for build in groups:
        with build() as group:
            outcomes = group.run(body)
            check(inputs, outcomes)
            assert all(outcome.handle.nodes is None for outcome in outcomes)


def test_after_a_rank_was_masked_rows_go_to_each_rank() -> None:
    """Those of earlier handles too."""
    inputs = Case((40, 30, 20, 10), experts=8).inputs()

    def body(runtime: Any) -> tuple[torch.Tensor, torch.Tensor]:
        normal, rank = Normal(runtime), runtime.rank
        first = round_trip(normal, inputs, rank)
        assert first.handle.nodes is not None
        if rank == 3:
            return first.rows, first.combined
        runtime.mask[3] = 1
        second = round_trip(normal, inputs, rank)
        assert second.handle.nodes is None
        rows, *_, handle, _ = normal.dispatch(inputs.rows(rank), handle=first.handle)
        kept = inputs.delivered[rank].source != 3
        assert same_bits(second.rows, rows[kept])
        return rows, normal.combine(rows, handle)[0]

    with nodes(4, 2) as group:
        results = group.run(body)
    delivered = inputs.delivered
    for rank in range(3):
        there = delivered[rank]
        kept = there.source != 3
        assert same_bits(results[rank][0][kept], there.rows(inputs.x)[kept])
        copies = oracle.in_rank(inputs.topk_idx[rank], 8, 4)[:, :3].sum(dim=1, keepdim=True)
        assert oracle.calc_diff(results[rank][1], inputs.x[rank].float() * copies) < 5e-6


def crossings(inputs: Inputs, node_ranks: int) -> list[list[int]]:
    """[rank][node]: tokens of a rank with an expert on a node."""
    case = inputs.case
    found = []
    for ids in inputs.topk_idx:
        marks = oracle.in_rank(ids, case.experts, case.ranks).unflatten(1, (-1, node_ranks))
        found.append(marks.any(dim=2).sum(dim=0).tolist())
    return found


@pytest.mark.parametrize(("ranks", "node_ranks"), [(4, 2), (8, 4), (8, 2)])
def test_a_row_crosses_once_to_a_node_and_back(ranks: int, node_ranks: int) -> None:
    """What proxies sent, to the byte: notifies, one grant per source, and the rows."""
    case = Case(TOKENS[:ranks], experts=4 * ranks, topk=6)
    inputs = case.inputs()
    plan = NormalPlan(ranks, 64, heap=4 << 20, rounds=4 << 20, chunk=64 << 10)
    settings = Settings(timeout=60.0)
    sent = np.zeros((ranks, 2), dtype=np.int64)

    with nodes(ranks, node_ranks, normal=plan, settings=settings) as group:

        def body(runtime: Any) -> None:
            normal, rank = Normal(runtime), runtime.rank

            def bytes_sent() -> int:
                # a rank reads its own counters only when all its writes are over
                return int(group.services[rank].counters()["total"]["bytes_sent"])

            received, _, weights, _, handle, _ = dispatch(normal, inputs, rank)
            group.barrier.wait(20)
            sent[rank, 0] = bytes_sent()
            group.barrier.wait(20)
            normal.combine(received, handle, topk_weights=weights)
            sent[rank, 1] = bytes_sent() - sent[rank, 0]

        group.run(body)
    table, far = crossings(inputs, node_ranks), ranks - node_ranks
    for rank in range(ranks):
        node, place = rank // node_ranks, rank % node_ranks
        rails = [other * node_ranks + place for other in range(ranks // node_ranks) if other != node]
        out = [table[rank][peer // node_ranks] for peer in rails]
        back = [table[peer][node] for peer in rails]
        row, meta = 2 * case.hidden, round_up(8 * case.topk + 1, 16)
        dispatched = far * notify_bytes(4) + HEADER_BYTES * sum(n > 0 for n in back) + sum(out) * (row + meta)
        assert sent[rank, 0] == dispatched
        meta = round_up(4 * case.topk, 16)
        assert sent[rank, 1] == far * HEADER_BYTES + HEADER_BYTES * sum(n > 0 for n in out) + sum(back) * (row + meta)


class SlowExchange:
    """Kernels of which ``exchange_nodes`` makes one step at a time and naps before it."""

    def __init__(self, kernels: Any, seconds: float) -> None:
        self._kernels, self._seconds = kernels, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def exchange_nodes(self, *arguments: int) -> int:
        time.sleep(self._seconds)
        return int(self._kernels.exchange_nodes(*arguments[:-1], 0))


@pytest.mark.parametrize("slow", range(4))
def test_nobody_overtakes_a_slow_rank(slow: int) -> None:
    """Whoever forwards rows waits for a rank of its node, and it for them, however slow one of them is."""
    cases = [Case((150, 140, 130, 120), experts=8, lost=0.0, seed=seed, topk=4) for seed in range(2)]
    inputs = [case.inputs() for case in cases]

    def body(runtime: Any) -> list[Outcome]:
        normal = Normal(runtime)
        if runtime.rank == slow:
            normal._exchange.kernels = SlowExchange(normal._exchange.kernels, 0.005)
        return [round_trip(normal, one, runtime.rank) for one in inputs]

    with nodes(4, 2, normal=small(4)) as group:
        for one, outcomes in zip(inputs, zip(*group.run(body), strict=True), strict=True):
            check(one, outcomes)


def test_twenty_operations_of_random_sizes() -> None:
    """Boards and lines of one operation never speak for another."""
    generator = torch.Generator().manual_seed(1)
    cases = [
        Case(
            tuple(torch.randint(0, 60, (4,), generator=generator).tolist()),
            experts=16,
            topk=int(torch.randint(1, 5, (1,), generator=generator)),
            dtype=DTYPES[step % 4],
            lost=0.4,
            seed=step,
        )
        for step in range(20)
    ]
    with nodes(4, 2, adversary=HOSTILE, seed=3, normal=small(4, 256 << 10)) as group:
        run(group, *cases)
