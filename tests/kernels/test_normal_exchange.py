"""Normal-mode dispatch and combine between ranks that map each other's windows, against the oracle."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.bits import same_bits
from tests.support.combinations import diagonal
from tests.support.direct_ranks import DirectGroup
from tests.support.normal_cases import (
    Case,
    CountedEvent,
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

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


def uneven(ranks: int, most: int = 90) -> tuple[int, ...]:
    """Token counts that differ, with an empty rank in the middle."""
    return tuple(0 if rank == 1 else most - 11 * rank for rank in range(ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.combinations)])
def test_every_dtype_comes_through_bit_by_bit(ranks: int):
    group = DirectGroup(ranks)
    cases = [
        Case(uneven(ranks) if ranks > 4 else (60,) * ranks, experts=ranks * 6, dtype=dtype, seed=ranks)
        for dtype in DTYPES
    ]
    inputs = [case.inputs() for case in cases]

    def body(runtime):
        normal = Normal(runtime)
        return [round_trip(normal, one, runtime.rank) for one in inputs]

    for one, outcomes in zip(inputs, zip(*group.run(body), strict=True), strict=True):
        check(one, outcomes)


@pytest.mark.parametrize(
    ("dtype", "cached", "asynchronous", "alignment"),
    diagonal(DTYPES, (False, True), (False, True), (1, 128)),
)
def test_matrix(dtype: torch.dtype, cached: bool, asynchronous: bool, alignment: int):
    inputs = Case((50, 0, 71), experts=12, dtype=dtype, seed=5).inputs()
    again = dataclasses.replace(inputs, x=[x.flip(0).contiguous() for x in inputs.x])

    def body(runtime):
        normal = Normal(runtime)
        before = CountedEvent()
        options = {"async_finish": asynchronous}
        if asynchronous:
            options |= {"previous_event": EventOverlap(before), "allocate_on_comm_stream": True}
        outcome = round_trip(normal, inputs, runtime.rank, expert_alignment=alignment, **options)
        assert before.waits == asynchronous
        if not cached:
            return outcome
        received, idx, weights, counts, handle, event = normal.dispatch(
            again.rows(runtime.rank), handle=outcome.handle, **options
        )
        event.current_stream_wait()
        assert before.waits == 2 * asynchronous
        assert idx is None
        assert weights is None
        assert counts == []
        rows = received[0] if isinstance(received, tuple) else received
        combined, back, _ = normal.combine(expert_outputs(rows, runtime.rank), handle, **options)
        assert before.waits == 3 * asynchronous
        assert back is None
        return outcome, dataclasses.replace(outcome, received=received, combined=combined)

    results = DirectGroup(3).run(body)
    if not cached:
        check(inputs, results, alignment)
        return
    check(inputs, [first for first, _ in results], alignment)
    check(again, [second for _, second in results], alignment)


UNEVEN = {
    "nobody has a token": Case((0, 0, 0), experts=6),
    "one rank has everything": Case((0, 200, 0), experts=6),
    "one token": Case((1, 0, 0), experts=6, lost=0.0),
    "all ids are -1": Case((9, 9, 9), experts=6, lost=1.1),
    "all go to one rank": Case((40, 30, 20), experts=12, hot=2),
    "one expert a token": Case((40, 30, 20), experts=3, topk=1),
    "every expert is chosen": Case((16, 16, 16), experts=6, topk=6, lost=0.0),
    "256 experts, top 8": Case((33, 34, 35, 36), experts=256, topk=8),
}


@pytest.mark.parametrize("case", UNEVEN.values(), ids=UNEVEN.keys())
def test_uneven_inputs(case: Case):
    inputs = case.inputs()
    check(inputs, DirectGroup(case.ranks).run(lambda runtime: round_trip(Normal(runtime), inputs, runtime.rank)))


@pytest.mark.parametrize(
    ("dtype", "hidden"),
    [(torch.bfloat16, 8), (torch.bfloat16, 24), (torch.bfloat16, 7168 + 8), (torch.float32, 4), (torch.float32, 1028)],
)
def test_hidden_is_any_multiple_of_16_bytes(dtype: torch.dtype, hidden: int):
    inputs = Case((30, 20), hidden=hidden, experts=8, dtype=dtype).inputs()
    check(inputs, DirectGroup(2).run(lambda runtime: round_trip(Normal(runtime), inputs, runtime.rank)))


@pytest.mark.parametrize("topk", range(1, 9))
def test_top_k(topk: int):
    inputs = Case((30, 41), experts=16, topk=topk, seed=topk).inputs()
    check(inputs, DirectGroup(2).run(lambda runtime: round_trip(Normal(runtime), inputs, runtime.rank)))


def test_worst_case_outputs_keep_unused_rows_empty():
    inputs = Case((50, 20), experts=8).inputs()
    group = DirectGroup(2)
    check(
        inputs,
        group.run(lambda runtime: round_trip(Normal(runtime), inputs, runtime.rank, num_worst_tokens=100)),
        worst=100,
    )


def test_rows_without_ids_and_weights():
    """DeepEP allows a dispatch by is_token_in_rank alone."""
    inputs = Case((50, 20, 30), experts=12).inputs()
    delivered = inputs.delivered

    def body(runtime):
        normal = Normal(runtime)
        layout = normal.get_dispatch_layout(inputs.topk_idx[runtime.rank], 12)
        received, idx, weights, counts, handle, _ = normal.dispatch(
            inputs.x[runtime.rank],
            num_tokens_per_rank=layout[0],
            num_tokens_per_expert=layout[2],
            is_token_in_rank=layout[3],
        )
        combined, _, _ = normal.combine(received, handle)
        return received, idx, weights, counts, combined

    for rank, (received, idx, weights, counts, combined) in enumerate(DirectGroup(3).run(body)):
        assert idx is None
        assert weights is None
        assert counts == delivered[rank].expert_counts
        assert same_bits(received, delivered[rank].rows(inputs.x))
        copies = oracle.in_rank(inputs.topk_idx[rank], 12, 3).sum(dim=1, keepdim=True)
        assert oracle.calc_diff(combined, inputs.x[rank].float() * copies) < 5e-6


def test_packed_exponent_scales_travel_as_they_are():
    inputs = Case((50, 20), hidden=1024, experts=8, dtype=torch.float8_e4m3fn).inputs()
    generator = torch.Generator().manual_seed(9)
    packed = [torch.randint(-(2**31), 2**31, (n, 2), generator=generator, dtype=torch.int32) for n in (50, 20)]
    # column-major, as DeepGEMM wants them
    strided = [one.t().contiguous().t() for one in packed]

    def body(runtime):
        changed = dataclasses.replace(inputs, scales=strided)
        return dispatch(Normal(runtime), changed, runtime.rank)[0]

    for (rows, scales), there in zip(DirectGroup(2).run(body), inputs.delivered, strict=True):
        assert same_bits(rows, there.rows(inputs.x))
        assert same_bits(scales, there.rows(packed))


@pytest.mark.parametrize("biases", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_bias_is_added_before_rounding(biases: int, dtype: torch.dtype):
    inputs = Case((40, 30), experts=8, dtype=dtype, lost=0.6).inputs()
    generator = torch.Generator().manual_seed(2)
    bias = [[torch.randn(n, 256, generator=generator).to(dtype) for _ in range(biases)] for n in (40, 30)]
    delivered = inputs.delivered

    def body(runtime):
        normal = Normal(runtime)
        received, *_, handle, _ = dispatch(normal, inputs, runtime.rank)
        mine = bias[runtime.rank]
        return normal.combine(received, handle, bias=tuple(mine) if biases == 2 else (None, mine[0]))[0]

    rows = [there.rows(inputs.x) for there in delivered]
    for rank, combined in enumerate(DirectGroup(2).run(body)):
        expected = oracle.normal_combine(rows, delivered, rank, inputs.case.tokens[rank], bias[rank])
        assert same_bits(combined, expected)


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        # float32 forgets a 1 beside 2**24: only ascending rank order gives 0
        ((2.0**24, 1.0, 1.0, -(2.0**24)), torch.float32, 0.0),
        # bfloat16 forgets a 1 beside 256: only rounding once gives 258
        ((256.0, 1.0, 1.0, 0.0), torch.bfloat16, 258.0),
        ((2048.0, 1.0, 1.0, 0.0), torch.float16, 2050.0),
    ],
)
def test_a_sum_is_rounded_once_and_in_rank_order(values: tuple[float, ...], dtype: torch.dtype, expected: float):
    """Values chosen so that another order, or rounding in between, gives another result."""
    topk_idx = torch.tensor([[0, 1, 2, 3]])

    def body(runtime):
        normal = Normal(runtime)
        per_rank, _, per_expert, in_rank, _ = normal.get_dispatch_layout(topk_idx, 4)
        received, *_, handle, _ = normal.dispatch(
            torch.ones(1, 8, dtype=dtype),
            num_tokens_per_rank=per_rank,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=in_rank,
        )
        return normal.combine(torch.full_like(received, values[runtime.rank]), handle)[0]

    for combined in DirectGroup(4).run(body):
        assert combined.tolist() == [[expected] * 8]


def test_dispatch_twice_then_combine_in_any_order():
    one, two = Case((30, 20), experts=8, seed=1).inputs(), Case((10, 40), experts=8, seed=2).inputs()

    def body(runtime):
        normal, rank = Normal(runtime), runtime.rank
        first = dispatch(normal, one, rank)
        second = dispatch(normal, two, rank)
        late = normal.combine(expert_outputs(second[0], rank), second[4], topk_weights=second[2])
        early = normal.combine(expert_outputs(first[0], rank), first[4], topk_weights=first[2])
        return first, early, second, late

    results = DirectGroup(2).run(body)
    for inputs, dispatched, combined in ((one, 0, 1), (two, 2, 3)):
        outcomes = []
        for result in results:
            rows, idx, weights, counts, handle, _ = result[dispatched]
            outcomes.append(Outcome(rows, idx, weights, counts, handle, *result[combined][:2]))
        check(inputs, outcomes)


@pytest.mark.parametrize("channels", [1, 2, 5, 16])
def test_result_does_not_depend_on_channels(channels: int):
    inputs = Case((300, 200, 100), hidden=1024, experts=12).inputs()
    settings = Settings(timeout=20.0, channels=channels)
    plan = NormalPlan(3, 64, heap=8 << 20, rounds=1 << 20, chunk=16 << 10)
    group = DirectGroup(3, plan, settings)
    check(inputs, group.run(lambda runtime: round_trip(Normal(runtime), inputs, runtime.rank)))


def test_records_tokens_and_remote_rows():
    inputs = Case((50, 20), experts=8).inputs()

    def body(runtime):
        round_trip(Normal(runtime), inputs, runtime.rank)
        return runtime.records

    delivered = inputs.delivered
    for rank, records in enumerate(DirectGroup(2).run(body)):
        away = sum(int((there.source == rank).sum()) for peer, there in enumerate(delivered) if peer != rank)
        back = int((delivered[rank].source != rank).sum())
        tokens = inputs.case.tokens[rank]
        assert [record[:3] for record in records] == [
            ("normal_dispatch", tokens, away),
            ("normal_combine", tokens, back),
        ]
        assert all(record[3] > 0 for record in records)
