"""Low-latency dispatch and combine over mapped windows, against the oracle: sizes, dtypes, forms, awkward routings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.direct_ranks import DirectGroup
from tests.support.ll_cases import Case, check_combined, run_rank
from uccl_ep_serving.config import Settings
from uccl_ep_serving.modes.low_latency_cpu import LowLatency


def run(case: Case, repeats: int = 3, settings: Settings | None = None) -> list[torch.Tensor]:
    """``repeats`` rounds of ``case`` on a fresh group, all checked; the last round's combined tokens by rank."""
    rounds = [replace(case, seed=case.seed + index) for index in range(repeats)]
    inputs = [one.inputs() for one in rounds]

    def body(runtime: Any) -> torch.Tensor:
        low_latency = LowLatency(runtime)
        for one, given in zip(rounds, inputs, strict=True):
            combined = run_rank(one, low_latency, runtime.rank, given)
            check_combined(one, given, runtime.rank, combined)
        return combined

    return DirectGroup(case.ranks, settings=settings).run(body)


@pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "expanded"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_ranks(ranks: int, reduced: bool) -> None:
    run(Case(ranks=ranks, experts=24, topk=6, reduced=reduced))


@pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "expanded"])
@pytest.mark.parametrize(
    "case",
    [
        Case(dtype=torch.bfloat16),
        Case(dtype=torch.float16),
        Case(dtype=torch.float32),
        Case(fp8=True),
        Case(fp8=True, dtype=torch.float16),
        Case(fp8=True, dtype=torch.float32),
        Case(fp8=True, round_scale=True),
        Case(fp8=True, ue8m0=True, hidden=512),
        Case(fp8=True, ue8m0=True, hidden=1024, dtype=torch.float32),
    ],
    ids=lambda case: f"{case.dtype}-{'ue8m0' if case.ue8m0 else 'fp8' if case.fp8 else 'plain'}-{case.round_scale}",
)
def test_formats(case: Case, reduced: bool) -> None:
    run(replace(case, reduced=reduced))


@pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "expanded"])
@pytest.mark.parametrize("routing", ["none", "holes", "one", "far", "twice", "same"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_routing(ranks: int, routing: str, reduced: bool) -> None:
    run(Case(ranks=ranks, routing=routing, reduced=reduced))


@pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "expanded"])
@pytest.mark.parametrize("counts", [(0,), (0, 8), (8, 0, 3), (1,), (8,), (5, 1)])
def test_token_counts(counts: tuple[int, ...], reduced: bool) -> None:
    run(Case(ranks=3, experts=9, counts=counts, reduced=reduced))


def test_one_token_a_rank() -> None:
    run(Case(tokens=1, counts=(1,)))


@pytest.mark.parametrize("hidden", [8, 24, 128, 136, 384, 1032, 2560, 7168])
def test_hidden(hidden: int) -> None:
    run(Case(hidden=hidden))
    run(Case(hidden=hidden, reduced=False))


@pytest.mark.parametrize("hidden", [128, 384, 7168])
def test_hidden_fp8(hidden: int) -> None:
    run(Case(hidden=hidden, fp8=True))


@pytest.mark.parametrize("topk", range(1, 9))
def test_topk(topk: int) -> None:
    run(Case(ranks=4, experts=8, topk=topk))
    run(Case(ranks=4, experts=8, topk=topk, reduced=False))


def test_more_experts_than_choices() -> None:
    run(Case(ranks=2, experts=256, topk=8, tokens=32, counts=(32, 17)))


def test_full_slots() -> None:
    """Every token of every rank at one rank: receive slots, staging and combine space are used to the last byte."""
    run(Case(ranks=4, experts=16, topk=4, tokens=64, counts=(64,), routing="far", hidden=8))
    run(Case(ranks=4, experts=16, topk=4, tokens=64, counts=(64,), routing="far", hidden=8, reduced=False))


@pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "expanded"])
def test_channels_do_not_change_the_result(reduced: bool) -> None:
    case = Case(ranks=2, hidden=256, reduced=reduced)
    single = run(case)
    for channels in (2, 5, 16):
        striped = run(case, settings=Settings(channels=channels, timeout=20.0))
        for one, other in zip(single, striped, strict=True):
            assert torch.equal(one, other)


def test_ranks_may_choose_different_forms() -> None:
    """The form is each source's own choice: its destinations answer as its header says."""
    case = Case(ranks=3, experts=12)
    inputs = case.inputs()

    def body(runtime: Any) -> None:
        mine = replace(case, reduced=runtime.rank != 1)
        low_latency = LowLatency(runtime)
        for _ in range(3):
            combined = run_rank(mine, low_latency, runtime.rank, inputs)
            check_combined(mine, inputs, runtime.rank, combined)

    DirectGroup(3).run(body)


def test_sizes_that_do_not_fit_rebuild_the_windows() -> None:
    cases = [Case(tokens=8), Case(tokens=16, counts=(16,)), Case(dtype=torch.float32), Case(hidden=512), Case(tokens=8)]

    def body(runtime: Any) -> list[int]:
        low_latency = LowLatency(runtime)
        epochs = []
        for case in cases:
            inputs = case.inputs()
            check_combined(case, inputs, runtime.rank, run_rank(case, low_latency, runtime.rank, inputs))
            epochs.append(runtime.epoch)
        return epochs

    # half as many tokens of twice the width fit
    assert DirectGroup(2).run(body) == [[1, 2, 2, 3, 3]] * 2
