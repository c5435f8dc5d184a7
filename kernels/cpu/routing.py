"""Routing: from expert ids to one list of tokens per destination rank, each token once however many experts it has
there.

The order is the token order, so that the same input always gives the same messages.
"""

from __future__ import annotations

from ...native.atomics import peek, poke, poke32
from ...native.jit import compiled
from .context import is_masked, rank_count

__all__ = ["first_bad_id", "route"]


@compiled
def first_bad_id(topk_idx: int, count: int, experts: int) -> int:
    """Position of the first of ``count`` int64 ids at ``topk_idx`` outside -1 .. ``experts`` - 1, or -1."""
    for position in range(count):
        expert = peek(topk_idx + 8 * position)
        if expert < -1 or expert >= experts:
            return position
    return -1


@compiled
def route(
    context: int,
    topk_idx: int,
    tokens: int,
    topk: int,
    local_experts: int,
    reduced: int,
    starts: int,
    counts: int,
    pairs: int,
    order: int,
    returns: int,
) -> None:
    """Deal ``tokens`` tokens to ranks. Ids must have passed :func:`first_bad_id`; -1 and masked ranks are skipped.

    Args:
        topk_idx: int64[tokens, topk], global expert ids; expert e lives on rank ``e // local_experts``.
        reduced: 1 = a destination returns one row per token, 0 = one row per (token, slot).
        starts: int64[ranks], out: first entry of a rank's list in ``order``.
        counts: int64[ranks], out: tokens for the rank.
        pairs: int64[ranks], out: (token, slot) pairs for the rank.
        order: int32[tokens x min(topk, ranks)], out: token indices, grouped by rank.
        returns: int64[tokens, topk], out: where a token's contributions come back, ``rank << 32 | row``. Reduced: by
            ascending rank, then -1. Not reduced: by slot, -1 where the slot has no expert.
    """
    ranks = rank_count(context)
    for rank in range(ranks):
        poke(counts + 8 * rank, 0)
        poke(pairs + 8 * rank, 0)
        # while counting, starts holds the last token counted for the rank
        poke(starts + 8 * rank, -1)
    for token in range(tokens):
        for slot in range(topk):
            expert = peek(topk_idx + 8 * (token * topk + slot))
            if expert < 0:
                continue
            rank = expert // local_experts
            if is_masked(context, rank):
                continue
            poke(pairs + 8 * rank, peek(pairs + 8 * rank) + 1)
            if peek(starts + 8 * rank) != token:
                poke(starts + 8 * rank, token)
                poke(counts + 8 * rank, peek(counts + 8 * rank) + 1)
    total = 0
    for rank in range(ranks):
        poke(starts + 8 * rank, total)
        total += peek(counts + 8 * rank)
        poke(counts + 8 * rank, 0)
        poke(pairs + 8 * rank, 0)
    for token in range(tokens):
        entries = 0
        mine = returns + 8 * token * topk
        for slot in range(topk):
            expert = peek(topk_idx + 8 * (token * topk + slot))
            rank = expert // local_experts
            if expert < 0 or is_masked(context, rank):
                if not reduced:
                    poke(mine + 8 * slot, -1)
                continue
            row = peek(counts + 8 * rank)
            known = False
            for other in range(slot):
                earlier = peek(topk_idx + 8 * (token * topk + other))
                if earlier >= 0 and earlier // local_experts == rank:
                    known = True
                    break
            if not known:
                poke32(order + 4 * (peek(starts + 8 * rank) + row), token)
                poke(counts + 8 * rank, row + 1)
            if not reduced:
                poke(mine + 8 * slot, rank << 32 | peek(pairs + 8 * rank))
            elif not known:
                # insertion into the ascending list: topk is small
                at = entries
                while at > 0 and peek(mine + 8 * (at - 1)) >> 32 > rank:
                    poke(mine + 8 * at, peek(mine + 8 * (at - 1)))
                    at -= 1
                poke(mine + 8 * at, rank << 32 | row)
                entries += 1
            poke(pairs + 8 * rank, peek(pairs + 8 * rank) + 1)
        if reduced:
            for slot in range(entries, topk):
                poke(mine + 8 * slot, -1)
