"""The window's layout: regions do not overlap, sizes hold what they must, impossible plans are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uccl_ep_serving.protocol.layout import (
    PAGE,
    LowLatencyPlan,
    NormalPlan,
    WindowLayout,
    is_plan,
    plan_in_words,
)
from uccl_ep_serving.protocol.message import DTYPE_FP8, HEADER_BYTES, row_bytes
from uccl_ep_serving.protocol.streams import STREAMS


@st.composite
def _plans(draw: st.DrawFn) -> LowLatencyPlan:
    ranks = draw(st.sampled_from([1, 2, 3, 8, 32]))
    experts = ranks * draw(st.integers(1, 16))
    return LowLatencyPlan(
        ranks=ranks,
        tokens=draw(st.integers(1, 256)),
        hidden=draw(st.integers(1, 64)) * 8,
        experts=experts,
        topk=draw(st.integers(1, min(8, experts))),
        element=draw(st.sampled_from([2, 4])),
    )


@given(_plans())
def test_regions_are_aligned_disjoint_and_hold_the_worst_case(plan: LowLatencyPlan) -> None:
    window = WindowLayout(plan.ranks, plan, NormalPlan(plan.ranks, heap=0, rounds=1 << 20, chunk=1 << 16))
    end = 0
    for region in window:
        assert region.offset % PAGE == 0
        assert region.offset >= end
        end = region.offset + region.nbytes
    assert end <= window.nbytes
    # One slot per (source, token), whatever the experts; a header fits in front of it.
    assert plan.room.dispatch_slot >= HEADER_BYTES + plan.tokens * (plan.meta + plan.row)
    # A token goes to at most topk ranks and returns at most topk rows.
    assert plan.room.combine_recv >= plan.tokens * plan.topk * plan.row + plan.ranks * HEADER_BYTES
    assert window["direct_flags"].nbytes == plan.ranks * STREAMS * 8


@given(_plans(), _plans())
def test_words_tell_plans_of_a_group_apart(a: LowLatencyPlan, b: LowLatencyPlan) -> None:
    assert (a.word == b.word) == (replace(a, ranks=1) == replace(b, ranks=1))
    assert is_plan(a.word)
    said = plan_in_words(a.word)
    assert f"T = {a.tokens}, hidden {a.hidden}, {a.experts} experts, top-{a.topk}, values of {a.element} b" in said


@given(st.integers(-(1 << 63), (1 << 62) - 1))
def test_no_other_word_is_taken_for_a_plan(word: int) -> None:
    assert not is_plan(word)
    assert plan_in_words(word) == f"{word:#x}"


@given(_plans(), _plans())
def test_a_room_for_two_is_the_larger_of_each_region(a: LowLatencyPlan, b: LowLatencyPlan) -> None:
    b = replace(b, ranks=a.ranks, experts=a.ranks * b.local_experts, topk=min(b.topk, a.ranks * b.local_experts))
    normal = NormalPlan(a.ranks, heap=0, rounds=1 << 20, chunk=1 << 16)
    both = a.room.with_room_for(b.room)
    assert both == b.room.with_room_for(a.room)
    assert both.holds(a)
    assert both.holds(b)
    assert a.room.holds(b) == (both == a.room)
    windows = [WindowLayout(a.ranks, room, normal) for room in (a, b, both)]
    for one, other, common in zip(*windows, strict=True):
        assert common.nbytes == max(one.nbytes, other.nbytes)
    # what fits changes nothing
    if a.room.holds(b):
        assert windows[2].digest == windows[0].digest


def test_a_quantized_row_never_exceeds_the_plain_one() -> None:
    for hidden in (128, 2048, 7168):
        assert row_bytes(hidden, DTYPE_FP8) <= LowLatencyPlan(2, 1, hidden, 2, 1, 2).row


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ranks": 5000, "experts": 5000}, "ranks = 5000"),
        ({"tokens": 8193}, "tokens per rank = 8193"),
        ({"experts": 9}, "multiple of 8 ranks"),
        ({"topk": 65}, "topk = 65"),
        ({"element": 3}, "element = 3"),
        ({"hidden": 7}, "hidden = 7"),
        ({"hidden": 1 << 23}, "hidden = 8388608"),
        ({"tokens": 128.0}, "tokens = 128.0 is no integer"),
        ({"experts": None}, "experts = None is no integer"),
    ],
)
def test_impossible_plans_are_refused_by_name(wrong: dict[str, int], message: str) -> None:
    fields = {"ranks": 8, "tokens": 128, "hidden": 7168, "experts": 64, "topk": 8, "element": 2}
    with pytest.raises(ValueError, match=message):
        LowLatencyPlan(**{**fields, **wrong})


def test_numpys_integers_are_plain_ones() -> None:
    """A rank that takes its sizes from NumPy means the same plan as the others."""
    plain, other = LowLatencyPlan(2, 8, 128, 4, 2, 2), LowLatencyPlan(2, np.int64(8), 128, np.int32(4), 2, 2)
    assert (plain, plain.word) == (other, other.word)
    assert type(other.tokens) is int


def test_largest_shapes_fit_a_window() -> None:
    """4,096 ranks with normal mode only; 8,192 tokens in low latency."""
    WindowLayout(4096, None, NormalPlan(4096, local_experts=1, chunk=1 << 16))
    WindowLayout(2, LowLatencyPlan(2, 8192, 7168, 256, 8, 2), NormalPlan(2))
    with pytest.raises(ValueError, match="exceeds"):
        WindowLayout(2, None, NormalPlan(2, heap=2 << 40))
