"""Who sends how many rows to whom: the counts, masks and row lists of normal mode.

A token is sent once to every rank that owns at least one of its experts, whatever the number of experts there. Expert
``e`` lives on rank ``e // (E / R)``; -1 means "no expert".
"""

from __future__ import annotations

from ...native.atomics import peek, peek8, peek32, poke, poke8, poke32, zero
from ...native.jit import compiled
from ..blocks.normal import LAYOUT_BAD_ID, LAYOUT_EXPERT_COUNTS, LAYOUT_MARKS, LAYOUT_RANK_COUNTS, LAYOUT_RIGHT

__all__ = ["layout", "route_rows"]


@compiled
def layout(
    topk_idx: int,
    tokens: int,
    topk: int,
    experts: int,
    ranks: int,
    rank_counts: int,
    expert_counts: int,
    in_rank: int,
) -> int:
    """Count tokens per rank and expert and mark the ranks of each token.

    Args:
        topk_idx: address of int64 [tokens, topk], global expert ids or -1.
        rank_counts: address of int32 [ranks], written: tokens with at least one expert on the rank.
        expert_counts: address of int32 [experts], written: tokens that chose the expert.
        in_rank: address of bool [tokens, ranks], written.

    Returns:
        -1, or the flat index of the first id outside -1 .. experts - 1 (the outputs are then incomplete).
    """
    local = experts // ranks
    zero(rank_counts, 4 * ranks)
    zero(expert_counts, 4 * experts)
    zero(in_rank, tokens * ranks)
    for token in range(tokens):
        for slot in range(topk):
            expert = peek(topk_idx + 8 * (token * topk + slot))
            if expert == -1:
                continue
            if expert < 0 or expert >= experts:
                return token * topk + slot
            count = expert_counts + 4 * expert
            poke32(count, peek32(count) + 1)
            rank = expert // local
            mark = in_rank + token * ranks + rank
            if peek8(mark) == 0:
                poke8(mark, 1)
                count = rank_counts + 4 * rank
                poke32(count, peek32(count) + 1)
    return -1


@compiled
def route_rows(
    topk_idx: int,
    tokens: int,
    topk: int,
    experts: int,
    ranks: int,
    in_rank: int,
    rank_counts: int,
    expert_counts: int,
    tally: int,
    rows: int,
    lists: int,
) -> int:
    """List the tokens of each rank in ascending order, rank after rank, and hold a layout against its ids.

    A token that misses a rank would silently lose an expert, and a count that is too small would let a peer write
    beyond the rows it was told of: a layout that contradicts itself or the ids is refused before anything moves.

    Args:
        topk_idx: address of int64 [tokens, topk], global expert ids or -1; not read when ``topk`` is 0.
        in_rank, rank_counts, expert_counts: the layout, as :func:`layout` writes it.
        tally: address of int64 [2 * ranks + experts], for working.
        rows: address of int64 [ranks], written: tokens of each rank.
        lists: address of int32 with room for ``tokens * ranks``, or ``tokens * min(topk, ranks)``, indices, written.

    Returns:
        One of ``normal_block.LAYOUT_*``. ``rows`` and ``lists`` are complete only when it is LAYOUT_RIGHT.
    """
    ends, seen, chosen = tally, tally + 8 * ranks, tally + 16 * ranks
    zero(tally, 8 * (2 * ranks + experts))
    start = 0
    for rank in range(ranks):
        count = peek32(rank_counts + 4 * rank)
        poke(rows + 8 * rank, count)
        poke(ends + 8 * rank, start)
        if count > tokens:
            return LAYOUT_RANK_COUNTS
        start += count
    local = experts // ranks
    most = min(topk, ranks) if topk > 0 else ranks
    if start > tokens * most:
        return LAYOUT_RANK_COUNTS
    for token in range(tokens):
        wanted = 0
        for slot in range(topk):
            expert = peek(topk_idx + 8 * (token * topk + slot))
            if expert == -1:
                continue
            if expert < 0 or expert >= experts:
                return LAYOUT_BAD_ID
            poke(chosen + 8 * expert, peek(chosen + 8 * expert) + 1)
            rank = expert // local
            if peek(seen + 8 * rank) != token + 1:
                poke(seen + 8 * rank, token + 1)
                wanted += 1
                if peek8(in_rank + token * ranks + rank) == 0:
                    return LAYOUT_MARKS
        marked, before = 0, 0
        for rank in range(ranks):
            before += peek(rows + 8 * rank)
            if peek8(in_rank + token * ranks + rank) == 0:
                continue
            marked += 1
            at = peek(ends + 8 * rank)
            if at == before:
                return LAYOUT_RANK_COUNTS
            poke32(lists + 4 * at, token)
            poke(ends + 8 * rank, at + 1)
        if topk > 0 and marked != wanted:
            return LAYOUT_MARKS
    start = 0
    for rank in range(ranks):
        start += peek(rows + 8 * rank)
        if peek(ends + 8 * rank) != start:
            return LAYOUT_RANK_COUNTS
    if topk > 0:
        for expert in range(experts):
            if peek(chosen + 8 * expert) != peek32(expert_counts + 4 * expert):
                return LAYOUT_EXPERT_COUNTS
    return LAYOUT_RIGHT
