"""vLLM's acceptance of an all-to-all backend: its modular kernel over ours, against torch, on 2 and 4 ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.vllm_moe import Case, engine_layers, engine_lossy, engine_two_steps_in_flight

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

InRanks = Callable[..., list[Any]]

# (tokens, intermediate, hidden) of vLLM's tests of its DeepEP backends, and 2560
SHAPES = [
    (1, 128, 128),
    (2, 128, 512),
    (3, 1024, 1024),
    (32, 128, 1024),
    (45, 512, 2048),
    (64, 256, 2560),
    (129, 128, 256),
    (222, 128, 1024),
]
TOPK = [1, 2, 6]
MATRIX = [Case(*shape, topk) for shape, topk in itertools.product(SHAPES, TOPK)]
ODD = [
    Case(33, 128, 256, 2, skew=11),  # ranks with fewer tokens
    Case(16, 128, 256, 2, idle=True),  # ranks without any
    Case(30, 128, 256, 6, padding=True),
    Case(24, 128, 256, 1, weight_input=True),
    Case(5, 128, 384, 6),
]


def eight_bit(cases: list[Case]) -> list[Case]:
    return [Case(**{**vars(case), "fp8": True}) for case in cases]


def check(results: list[list[str]]) -> None:
    problems = [problem for rank in results for problem in rank]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("form", ["standard", "batched"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(("ranks", "direct"), [(2, False), (4, True)])
@pytest.mark.slow
def test_matrix(in_engine_ranks: InRanks, form: str, dtype: str, ranks: int, direct: bool) -> None:
    cases = eight_bit(MATRIX) if dtype == "fp8" else MATRIX
    check(in_engine_ranks(ranks, engine_layers, cases, form == "batched", direct))


@pytest.mark.parametrize("form", ["standard", "batched"])
def test_uneven_padded_and_idle_ranks(in_engine_ranks: InRanks, form: str) -> None:
    check(in_engine_ranks(2, engine_layers, [*ODD, *eight_bit(ODD)], form == "batched", False))


def test_round_robin_placement(in_engine_ranks: InRanks) -> None:
    cases = [Case(32, 128, 256, 6, round_robin=True), Case(30, 128, 256, 2, round_robin=True, padding=True)]
    check(in_engine_ranks(2, engine_layers, cases, True, False))


@pytest.mark.parametrize("form", ["standard", "batched"])
def test_losing_remote_rows_is_noticed(in_engine_ranks: InRanks, form: str) -> None:
    assert in_engine_ranks(2, engine_lossy, form == "batched") == [True, True]


@pytest.mark.parametrize("form", ["standard", "batched"])
def test_two_micro_batches_in_flight(in_engine_ranks: InRanks, form: str) -> None:
    check(in_engine_ranks(2, engine_two_steps_in_flight, form == "batched"))
