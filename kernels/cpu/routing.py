"""Routing: which tokens go to which rank, in both modes; and the counts and marks that normal mode makes of expert ids.

A token goes once to every rank that owns at least one of its experts, whatever the number of experts there. Expert
``e`` lives on rank ``e // (E / R)``; -1 means "no expert". Lists are in token order, so that the same input always
gives the same messages.
"""

from __future__ import annotations

from ...native.atomics import peek, peek8, peek32, poke, poke8, poke32, zero
from ...native.groups import Group
from ...native.jit import compiled, inlined
from ...protocol.layout import MAX_EXPERTS
from ..blocks import normal as block
from .context import is_masked, rank_count


@compiled
def first_bad_id(topk_idx: int, count: int, experts: int) -> int:
    """Position of the first of ``count`` int64 ids at ``topk_idx`` outside -1 .. ``experts`` - 1, or -1."""
    for position in range(count):
        expert = peek(topk_idx + 8 * position)
        if expert < -1 or expert >= experts:
            return position
    return -1


@inlined
def named_before(ids: int, slot: int) -> int:
    """The first slot of a token before ``slot`` with the same id, of the int64 ids at ``ids``, or -1."""
    for earlier in range(slot):
        if peek(ids + 8 * earlier) == peek(ids + 8 * slot):
            return earlier
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

    Eleven arguments: ids and tables one by one, so that it knows no block of a mode.

    Args:
        topk_idx: int64[tokens, topk], global expert ids; expert e lives on rank ``e // local_experts``.
        reduced: 1 = a destination returns one row per token, 0 = one row per (token, slot) pair.
        starts: int64[ranks], out: first entry of a rank's list in ``order``.
        counts: int64[ranks], out: tokens for the rank.
        pairs: int64[ranks], out: (token, slot) pairs for the rank. Where a token has more slots than a rank has
            experts, slots that name the same expert are one: a rank has room to return a row for each of its experts.
        order: int32[tokens x min(topk, ranks)], out: token indices, grouped by rank.
        returns: int64[tokens, topk], out: where a token's contributions come back, ``rank << 32 | row``. Reduced: by
            ascending rank, then -1. Not reduced: by slot, -1 where the slot has no expert.
    """
    ranks = rank_count(context)
    for rank in range(ranks):
        poke(counts + 8 * rank, 0)
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
        ids, mine = topk_idx + 8 * token * topk, returns + 8 * token * topk
        for slot in range(topk):
            expert = peek(ids + 8 * slot)
            rank = expert // local_experts
            if expert < 0 or is_masked(context, rank):
                if not reduced:
                    poke(mine + 8 * slot, -1)
                continue
            row = peek(counts + 8 * rank)
            known = False
            for other in range(slot):
                earlier = peek(ids + 8 * other)
                if earlier >= 0 and earlier // local_experts == rank:
                    known = True
                    break
            if not known:
                poke32(order + 4 * (peek(starts + 8 * rank) + row), token)
                poke(counts + 8 * rank, row + 1)
            same = named_before(ids, slot) if topk > local_experts else -1
            if not reduced:
                poke(mine + 8 * slot, peek(mine + 8 * same) if same >= 0 else rank << 32 | peek(pairs + 8 * rank))
            elif not known:
                # insertion into the ascending list: topk is small
                at = entries
                while at > 0 and peek(mine + 8 * (at - 1)) >> 32 > rank:
                    poke(mine + 8 * at, peek(mine + 8 * (at - 1)))
                    at -= 1
                poke(mine + 8 * at, rank << 32 | row)
                entries += 1
            poke(pairs + 8 * rank, peek(pairs + 8 * rank) + (same < 0))
        if reduced:
            for slot in range(entries, topk):
                poke(mine + 8 * slot, -1)


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

    Eleven arguments: ids, layout and lists one by one, as the host has them.

    Args:
        topk_idx: address of int64 [tokens, topk], global expert ids or -1; not read when ``topk`` is 0.
        in_rank, rank_counts, expert_counts: the layout, as :func:`layout` writes it.
        tally: address of int64 [2 * ranks + experts], for working.
        rows: address of int64 [ranks], written: tokens of each rank.
        lists: address of int32 with room for ``tokens * ranks``, or ``tokens * min(topk, ranks)``, indices, written.

    Returns:
        One of ``blocks.normal.LAYOUT_*``. ``rows`` and ``lists`` are complete only when it is LAYOUT_RIGHT.
    """
    ends, counted, chosen = tally, tally + 8 * ranks, tally + 16 * ranks
    zero(tally, 8 * (2 * ranks + experts))
    start = 0
    for rank in range(ranks):
        count = peek32(rank_counts + 4 * rank)
        poke(rows + 8 * rank, count)
        poke(ends + 8 * rank, start)
        if count > tokens:
            return block.LAYOUT_RANK_COUNTS
        start += count
    local = experts // ranks
    most = min(topk, ranks) if topk > 0 else ranks
    if start > tokens * most:
        return block.LAYOUT_RANK_COUNTS
    for token in range(tokens):
        wanted = 0
        for slot in range(topk):
            expert = peek(topk_idx + 8 * (token * topk + slot))
            if expert == -1:
                continue
            if expert < 0 or expert >= experts:
                return block.LAYOUT_BAD_ID
            poke(chosen + 8 * expert, peek(chosen + 8 * expert) + 1)
            rank = expert // local
            if peek(counted + 8 * rank) != token + 1:
                poke(counted + 8 * rank, token + 1)
                wanted += 1
                if peek8(in_rank + token * ranks + rank) == 0:
                    return block.LAYOUT_MARKS
        marked, before = 0, 0
        for rank in range(ranks):
            before += peek(rows + 8 * rank)
            if peek8(in_rank + token * ranks + rank) == 0:
                continue
            marked += 1
            at = peek(ends + 8 * rank)
            if at == before:
                return block.LAYOUT_RANK_COUNTS
            poke32(lists + 4 * at, token)
            poke(ends + 8 * rank, at + 1)
        if topk > 0 and marked != wanted:
            return block.LAYOUT_MARKS
    start = 0
    for rank in range(ranks):
        start += peek(rows + 8 * rank)
        if peek(ends + 8 * rank) != start:
            return block.LAYOUT_RANK_COUNTS
    for expert in range(experts):
        count = peek32(expert_counts + 4 * expert)
        if topk > 0 and peek(chosen + 8 * expert) != count:
            return block.LAYOUT_EXPERT_COUNTS
        if topk == 0 and count > peek(rows + 8 * (expert // local)) * MAX_EXPERTS:
            return block.LAYOUT_EXPERT_COUNTS  # a negative one as well
    return block.LAYOUT_RIGHT


@compiled
def route_nodes(in_rank: int, tokens: int, ranks: int, node_ranks: int, me: int, rows: int, lists: int) -> None:
    """List the tokens that have an expert on each other node, in ascending order.

    Args:
        in_rank: address of bool [tokens, ranks]: the token has an expert on the rank.
        rows: address of int64 [nodes], written: tokens of each node, 0 for that of rank ``me``.
        lists: address of int32 [nodes, tokens], written.
    """
    for node in range(ranks // node_ranks):
        count = 0
        if node != me // node_ranks:
            for token in range(tokens):
                marks = in_rank + token * ranks + node * node_ranks
                for index in range(node_ranks):
                    if peek8(marks + index) != 0:
                        poke32(lists + 4 * (node * tokens + count), token)
                        count += 1
                        break
        poke(rows + 8 * node, count)


#: What looks at a caller's ids, on this rank alone: it is there before the kernels of a mode.
IDS = Group("ids", first_bad_id, layout)
