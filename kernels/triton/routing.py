"""Routing of normal mode: from expert ids to counts and marks.

Counts are sums of integers, so that nothing depends on the order in which programs run. Expert ``e`` lives on rank
``e // (E / R)``; -1 means "no expert".
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from .kernel import Shape, kernel
from .words import int32s, int64s, uint8s

#: More than every position: what stands for one is negative, and 0 for none.
POSITIONS = tl.constexpr(1 << 62)


@dataclass(frozen=True, kw_only=True, repr=False)
class MarkShape(Shape):
    """What :func:`mark_tokens` is compiled for.

    Attributes:
        TOPK: ids of a token. RANKS: rounded up to a power of two. BLOCK: tokens of a program.
    """

    TOPK: int
    RANKS: int
    BLOCK: int


@triton.jit
def mark_block(
    topk_idx: tl.tensor,
    tokens: tl.tensor,
    experts: tl.tensor,
    ranks: tl.tensor,
    rank_counts: tl.tensor,
    expert_counts: tl.tensor,
    in_rank: tl.tensor,
    wrong: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """This program's part of :func:`mark_tokens`, with all its arguments; ``shape`` has the fields of a
    :class:`MarkShape`."""
    token = tl.program_id(0).to(tl.int64) * shape.BLOCK + tl.arange(0, shape.BLOCK).to(tl.int64)
    inside = token < tokens
    rank = tl.arange(0, shape.RANKS).to(tl.int64)[None, :]
    local = experts // ranks
    marks = tl.zeros([shape.BLOCK, shape.RANKS], tl.int32)
    for slot in range(shape.TOPK):
        at = token * shape.TOPK + slot
        expert = tl.load(int64s(topk_idx + 8 * at), mask=inside, other=-1)
        # rule: normal mode: an expert id out of range counts nowhere
        right = (expert >= 0) & (expert < experts)
        # relaxed, all three: nothing is read before the kernel's end, or the arrival of the last program, orders it
        named = int32s(expert_counts + 4 * tl.where(right, expert, 0))
        tl.atomic_add(named, right.to(tl.int32), mask=right, sem="relaxed", scope="gpu")
        refused = inside & ((expert < -1) | (expert >= experts))
        tl.atomic_min(int64s(wrong + tl.zeros_like(at)), at - POSITIONS, mask=refused, sem="relaxed", scope="gpu")
        mine = tl.where(right, expert // local, -1)
        marks = marks | (mine[:, None] == rank).to(tl.int32)
    tl.store(uint8s(in_rank + token[:, None] * ranks + rank), marks.to(tl.uint8), mask=inside[:, None] & (rank < ranks))
    counts = tl.sum(marks, axis=0)
    each = tl.arange(0, shape.RANKS).to(tl.int64)
    there = (each < ranks) & (counts > 0)
    tl.atomic_add(int32s(rank_counts + 4 * each), counts, mask=there, sem="relaxed", scope="gpu")


@kernel(aligned=["in_rank", "wrong"])
def mark_tokens(
    topk_idx: tl.int64,
    tokens: tl.int64,
    experts: tl.int64,
    ranks: tl.int64,
    rank_counts: tl.int64,
    expert_counts: tl.int64,
    in_rank: tl.int64,
    wrong: tl.int64,
    SHAPE: tl.constexpr,
) -> None:
    """Count tokens per rank and expert and mark the ranks of each token; grid (ceil(tokens / BLOCK),).

    Args:
        topk_idx: int64[tokens, TOPK].
        rank_counts, expert_counts: int32[ranks] and int32[experts], zero before.
        in_rank: uint8[tokens, ranks], written.
        wrong: int64[1], zero before: becomes the smallest position of an id out of range less POSITIONS.
    """
    tokens, experts, ranks = tokens.to(tl.int64), experts.to(tl.int64), ranks.to(tl.int64)
    mark_block(topk_idx, tokens, experts, ranks, rank_counts, expert_counts, in_rank, wrong, SHAPE)
