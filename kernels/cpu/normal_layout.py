"""Who sends how many rows to whom: the counts, masks and row lists of normal mode.

A token is sent once to every rank that owns at least one of its experts, whatever the number of experts there. Expert
``e`` lives on rank ``e // (E / R)``; -1 means "no expert".
"""

from __future__ import annotations

from ...native.atomics import peek, peek8, peek32, poke, poke8, poke32, zero
from ...native.jit import compiled

__all__ = ["layout", "row_lists"]


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
def row_lists(in_rank: int, tokens: int, ranks: int, rows: int, lists: int) -> None:
    """List the tokens of each rank in ascending order, rank after rank.

    Args:
        in_rank: address of bool [tokens, ranks].
        rows: address of int64 [ranks], written: tokens of each rank.
        lists: address of int32 with room for every mark, written: token indices of rank 0, then of rank 1, …
    """
    zero(rows, 8 * ranks)
    for token in range(tokens):
        for rank in range(ranks):
            if peek8(in_rank + token * ranks + rank) != 0:
                poke(rows + 8 * rank, peek(rows + 8 * rank) + 1)
    # counts become the start of each rank's list, each start moves to its list's end, ends become counts again
    start = 0
    for rank in range(ranks):
        count = peek(rows + 8 * rank)
        poke(rows + 8 * rank, start)
        start += count
    for token in range(tokens):
        for rank in range(ranks):
            if peek8(in_rank + token * ranks + rank) != 0:
                at = peek(rows + 8 * rank)
                poke32(lists + 4 * at, token)
                poke(rows + 8 * rank, at + 1)
    for rank in range(ranks - 1, 0, -1):
        poke(rows + 8 * rank, peek(rows + 8 * rank) - peek(rows + 8 * (rank - 1)))
