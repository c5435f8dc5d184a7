"""Routing of normal mode: from expert ids to counts, and to the lists of tokens of each rank.

Counts are sums of integers and lists are made by one program per rank, so that nothing depends on the order in which
programs run. Expert ``e`` lives on rank ``e // (E / R)``; -1 means "no expert".
"""

from __future__ import annotations

import triton.language as tl

from .kernel import kernel
from .wait import report_id
from .words import int32s, int64s, poke, uint8s


# any number of tokens with the same compiled code
@kernel(do_not_specialize=["topk_idx", "tokens", "experts", "ranks"])
def mark_tokens(
    topk_idx: tl.int64,
    tokens: tl.int64,
    experts: tl.int64,
    ranks: tl.int64,
    rank_counts: tl.int64,
    expert_counts: tl.int64,
    in_rank: tl.int64,
    bad: tl.int64,
    TOPK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Count tokens per rank and expert and mark the ranks of each token; grid (ceil(tokens / BLOCK),). Eight
    arguments of a launch, three constants.

    Args:
        topk_idx: int64[tokens, TOPK].
        rank_counts, expert_counts: int32[ranks] and int32[experts], zero before.
        in_rank: uint8[tokens, ranks], written.
        bad: int64[1], its largest value before: becomes the smallest position of an id out of range.
    """
    tokens, experts, ranks = tokens.to(tl.int64), experts.to(tl.int64), ranks.to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    inside = token < tokens
    rank = tl.arange(0, RANKS).to(tl.int64)[None, :]
    local = experts // ranks
    marks = tl.zeros([BLOCK, RANKS], tl.int32)
    for slot in range(TOPK):
        at = token * TOPK + slot
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
    each = tl.arange(0, RANKS).to(tl.int64)
    tl.atomic_add(int32s(rank_counts + 4 * each), counts, mask=(each < ranks) & (counts > 0))


@kernel(do_not_specialize=["in_rank", "tokens", "ranks", "me", "node_ranks", "passing"])
def list_tokens(
    in_rank: tl.int64,
    tokens: tl.int64,
    ranks: tl.int64,
    me: tl.int64,
    node_ranks: tl.int64,
    rows: tl.int64,
    passing: tl.int64,
    lists: tl.int64,
    places: tl.int64,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """List the tokens of each rank in ascending order; grid (ranks,). Nine arguments of a launch, two constants.

    With ``NODES``, nodes of ``node_ranks`` ranks: tokens of a rank of another node pass through the one of them that
    has the place of rank ``me`` in its node, which gets each token of its node once.

    Args:
        in_rank: uint8[tokens, ranks].
        rows: int64[ranks], written: tokens of each rank.
        passing: int64[ranks], written with ``NODES``: tokens that have an expert on each rank, whoever gets them.
        lists: int32[ranks, tokens], written.
        places: int32[tokens, ranks], written: the token's place in the list of the rank, or -1.
    """
    tokens, ranks = tokens.to(tl.int64), ranks.to(tl.int64)
    me, node_ranks = me.to(tl.int64), node_ranks.to(tl.int64)
    rank = tl.program_id(0).to(tl.int64)
    count = tl.full((), 0, tl.int64)
    plain = tl.full((), 0, tl.int64)
    for first in range(0, tokens, BLOCK):
        token = first + tl.arange(0, BLOCK).to(tl.int64)
        inside = token < tokens
        marked = tl.load(uint8s(in_rank + token * ranks + rank), mask=inside, other=0) != 0
        if NODES:
            plain += tl.sum(marked.to(tl.int64), axis=0)
            if rank // node_ranks != me // node_ranks:
                begin = rank // node_ranks * node_ranks
                found = tl.zeros([BLOCK], tl.int32)
                # rule: a token crosses once to a node
                if rank % node_ranks == me % node_ranks:
                    for place in range(node_ranks):
                        mark = tl.load(uint8s(in_rank + token * ranks + begin + place), mask=inside, other=0)
                        found = found | mark.to(tl.int32)
                marked = found != 0
        one = marked.to(tl.int64)
        place = count + tl.cumsum(one, axis=0) - one
        tl.store(int32s(lists + 4 * (rank * tokens + place)), token.to(tl.int32), mask=marked)
        tl.store(int32s(places + 4 * (token * ranks + rank)), tl.where(marked, place, -1).to(tl.int32), mask=inside)
        count += tl.sum(one, axis=0)
    poke(rows + 8 * rank, count)
    if NODES:
        poke(passing + 8 * rank, plain)


@kernel(do_not_specialize=["experts"])
def report_ids(context: tl.int64, state: tl.int64, bad: tl.int64, experts: tl.int64, BACKEND: tl.constexpr) -> None:
    """Tell the host when :func:`mark_tokens` has found an id out of range, which it has counted nowhere; grid (1,)."""
    experts = experts.to(tl.int64)
    position = tl.load(int64s(bad))
    if position < (1 << 62):
        report_id(context, state, position, experts, BACKEND)
