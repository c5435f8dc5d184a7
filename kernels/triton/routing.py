"""Routing of normal mode: from expert ids to counts and marks.

Counts are sums of integers, so that nothing depends on the order in which programs run. Expert ``e`` lives on rank
``e // (E / R)``; -1 means "no expert".
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from .kernel import Shape, kernel
from .wait import report_id
from .words import int32s, int64s, uint8s


@dataclass(frozen=True, kw_only=True, repr=False)
class MarkShape(Shape):
    """What :func:`mark_tokens` is compiled for.

    Attributes:
        TOPK: ids of a token. RANKS: rounded up to a power of two. BLOCK: tokens of a program.
    """

    TOPK: int
    RANKS: int
    BLOCK: int


@kernel(aligned=["rank_counts", "expert_counts", "in_rank", "bad"])
def mark_tokens(
    topk_idx: tl.int64,
    tokens: tl.int64,
    experts: tl.int64,
    ranks: tl.int64,
    rank_counts: tl.int64,
    expert_counts: tl.int64,
    in_rank: tl.int64,
    bad: tl.int64,
    SHAPE: tl.constexpr,
) -> None:
    """Count tokens per rank and expert and mark the ranks of each token; grid (ceil(tokens / BLOCK),).

    Args:
        topk_idx: int64[tokens, TOPK].
        rank_counts, expert_counts: int32[ranks] and int32[experts], zero before.
        in_rank: uint8[tokens, ranks], written.
        bad: int64[1], its largest value before: becomes the smallest position of an id out of range.
    """
    tokens, experts, ranks = tokens.to(tl.int64), experts.to(tl.int64), ranks.to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * SHAPE.BLOCK + tl.arange(0, SHAPE.BLOCK).to(tl.int64)
    inside = token < tokens
    rank = tl.arange(0, SHAPE.RANKS).to(tl.int64)[None, :]
    local = experts // ranks
    marks = tl.zeros([SHAPE.BLOCK, SHAPE.RANKS], tl.int32)
    for slot in range(SHAPE.TOPK):
        at = token * SHAPE.TOPK + slot
        expert = tl.load(int64s(topk_idx + 8 * at), mask=inside, other=-1)
        # rule: normal mode: an expert id out of range counts nowhere
        right = (expert >= 0) & (expert < experts)
        tl.atomic_add(int32s(expert_counts + 4 * tl.where(right, expert, 0)), right.to(tl.int32), mask=right)
        wrong = inside & ((expert < -1) | (expert >= experts))
        tl.atomic_min(int64s(bad + tl.zeros_like(at)), at, mask=wrong)
        mine = tl.where(right, expert // local, -1)
        marks = marks | (mine[:, None] == rank).to(tl.int32)
    tl.store(uint8s(in_rank + token[:, None] * ranks + rank), marks.to(tl.uint8), mask=inside[:, None] & (rank < ranks))
    counts = tl.sum(marks, axis=0)
    each = tl.arange(0, SHAPE.RANKS).to(tl.int64)
    tl.atomic_add(int32s(rank_counts + 4 * each), counts, mask=(each < ranks) & (counts > 0))


@kernel(aligned=["context", "state", "bad"])
def report_ids(context: tl.int64, state: tl.int64, bad: tl.int64, experts: tl.int64) -> None:
    """Tell the host when :func:`mark_tokens` has found an id out of range, which it has counted nowhere; grid (1,)."""
    experts = experts.to(tl.int64)
    position = tl.load(int64s(bad))
    if position < (1 << 62):
        report_id(context, state, position, experts)
