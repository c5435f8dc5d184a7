"""Routing: from expert ids to the lists of tokens of each destination rank, in both modes.

Low latency (:func:`route`) is one launch. Program 0 tells peers what they wait for, then waits until every peer's slot
and the own staging may be written again; programs 1 .. R count one rank each, by prefix sums in token order, so that
the same input always gives the same messages; the last to arrive places the messages. Packing starts when all of this
is over.

Normal mode needs no step of the host: counts are sums of integers and lists are made by one program per rank, so that
nothing depends on the order in which programs run. Expert ``e`` lives on rank ``e // (E / R)``; -1 means "no expert".
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import HEADER_BYTES
from ...protocol.streams import LL_DISPATCH
from ..blocks.low_latency_device import ROUTE_WORDS
from .blocks import (
    P_EXPERTS,
    P_META,
    P_ROUTE_RETURNS,
    P_ROUTE_SENDS,
    P_ROW,
    R_COUNTS,
    R_PAIRS,
    R_RETURN_BASE,
    S_ARRIVALS,
    S_DISPATCH_NUMBER,
    S_DISPATCH_RECV,
    S_DISPATCH_SEND,
    S_DISPATCH_SEND_STEP,
    S_DISPATCH_SLOT,
    T_MESSAGE_AT,
    T_MESSAGE_BYTES,
    T_MESSAGE_FROM,
    T_MESSAGE_TO,
    route_table,
    state_table,
)
from .context import has_failed_now, is_live, own_rank, peer_window, rank_count, window_address
from .kernel import kernel
from .ll_counts import ack_dispatches, wait_spaces
from .wait import report_id
from .words import arrives_last, clock_ns, int32s, int64s, peek, poke, uint8s

HEADER = tl.constexpr(HEADER_BYTES)
#: Messages packed one after the other start on cache lines.
MESSAGE_ALIGNMENT = tl.constexpr(64)
_DISPATCH = tl.constexpr(LL_DISPATCH)
_ROUTE_WORDS = tl.constexpr(ROUTE_WORDS)


@triton.jit
def _ranks_of(
    context: tl.tensor,
    plan: tl.tensor,
    topk_idx: tl.tensor,
    first: tl.tensor,
    tokens: tl.tensor,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """For BLOCK tokens from ``first``: (destination rank of each slot, -1 for none; whether an earlier slot has the
    same; ids outside -1 .. experts - 1)."""
    token = first + tl.arange(0, BLOCK)[:, None].to(tl.int64)
    slot = tl.arange(0, SLOTS)[None, :]
    given = (token < tokens) & (slot < TOPK)
    ids = tl.load(int64s(topk_idx + 8 * (token * TOPK + slot)), mask=given, other=-1)
    experts = peek(plan + P_EXPERTS)
    bad = (ids < -1) | (ids >= experts)
    local = (experts // rank_count(context)).to(tl.int32)
    rank = tl.where((ids >= 0) & (bad == 0), ids.to(tl.int32) // local, -1)
    rank = tl.where((rank >= 0) & is_live(context, tl.where(rank >= 0, rank, 0)), rank, -1)
    repeated = tl.zeros([BLOCK, SLOTS], tl.int32)
    for earlier in range(TOPK):
        other = tl.load(int64s(topk_idx + 8 * (token * TOPK + earlier)), mask=token < tokens, other=-1)
        # rule: low latency: an expert id is compared before it is cut to 32 bits
        right = (other >= 0) & (other < experts)
        same = right & (other.to(tl.int32) // local == rank) & (slot > earlier)
        repeated = repeated | same.to(tl.int32)
    return rank, repeated, bad


@triton.jit
def _fill_absent(
    context: tl.tensor,
    state: tl.tensor,
    plan: tl.tensor,
    route: tl.tensor,
    topk_idx: tl.tensor,
    tokens: tl.tensor,
    REDUCED: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Entries of sends and returns that belong to no rank; and ids that cannot be. Its arguments are those of the
    kernel that it is a part of."""
    sends, returns = route + peek(plan + P_ROUTE_SENDS), route + peek(plan + P_ROUTE_RETURNS)
    wrong = tl.full((), 1 << 60, tl.int64)
    for first in range(0, tokens, BLOCK):
        rank, repeated, bad = _ranks_of(context, plan, topk_idx, first, tokens, TOPK, SLOTS, BLOCK)
        token = first + tl.arange(0, BLOCK)[:, None].to(tl.int64)
        slot = tl.arange(0, SLOTS)[None, :]
        given = (token < tokens) & (slot < TOPK)
        at = 8 * (token * TOPK + slot)
        mine = (rank >= 0) & (repeated == 0)
        nothing = tl.full([BLOCK, SLOTS], -1, tl.int64)
        tl.store(int64s(sends + at), nothing, mask=given & (mine == 0))
        if REDUCED:
            ranks = tl.sum(mine.to(tl.int32), axis=1)[:, None]
            tl.store(int64s(returns + at), nothing, mask=given & (slot >= ranks))
        else:
            tl.store(int64s(returns + at), nothing, mask=given & (rank < 0))
        position = tl.where(given & bad, token * TOPK + slot, 1 << 60).to(tl.int64)
        wrong = tl.minimum(wrong, tl.min(tl.min(position, axis=1), axis=0))
    # rule: low latency: the host is told of an expert id out of range
    if wrong < (1 << 60):
        report_id(context, state, wrong, peek(plan + P_EXPERTS), BACKEND)


@triton.jit
def _list_tokens(
    context: tl.tensor,
    plan: tl.tensor,
    route: tl.tensor,
    topk_idx: tl.tensor,
    tokens: tl.tensor,
    rank: tl.tensor,
    REDUCED: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Count what goes to ``rank``, and number its rows."""
    sends, returns = route + peek(plan + P_ROUTE_SENDS), route + peek(plan + P_ROUTE_RETURNS)
    count = tl.full((), 0, tl.int64)
    pairs = tl.full((), 0, tl.int64)
    for first in range(0, tokens, BLOCK):
        ranks, repeated, _ = _ranks_of(context, plan, topk_idx, first, tokens, TOPK, SLOTS, BLOCK)
        token = first + tl.arange(0, BLOCK)[:, None].to(tl.int64)
        slot = tl.arange(0, SLOTS)[None, :]
        at = 8 * (token * TOPK + slot)
        here = ranks == rank.to(tl.int32)
        slots = here.to(tl.int32)
        pairs_each = tl.sum(slots, axis=1)
        chosen = (pairs_each > 0).to(tl.int32)
        row = count + (tl.cumsum(chosen, axis=0) - chosen)[:, None]
        entry = (rank << 32) | row
        tl.store(int64s(sends + at), entry + tl.zeros([BLOCK, SLOTS], tl.int64), mask=here & (repeated == 0))
        if REDUCED:
            lower = (ranks >= 0) & (ranks < rank.to(tl.int32)) & (repeated == 0)
            place = tl.sum(lower.to(tl.int32), axis=1)[:, None]
            # one entry per token, whichever lane stores it
            tl.store(
                int64s(returns + 8 * (token * TOPK + place)) + tl.zeros([BLOCK, SLOTS], tl.int64),
                entry + tl.zeros([BLOCK, SLOTS], tl.int64),
                mask=here & (repeated == 0),
            )
        else:
            before = (tl.cumsum(pairs_each, axis=0) - pairs_each)[:, None] + tl.cumsum(slots, axis=1) - slots
            tl.store(int64s(returns + at), (rank << 32) | (pairs + before), mask=here)
        count += tl.sum(chosen, axis=0)
        pairs += tl.sum(pairs_each, axis=0)
    poke(route_table(context, route, R_COUNTS, rank), count)
    poke(route_table(context, route, R_PAIRS, rank), pairs)


@triton.jit
def place_messages(
    context: tl.tensor,
    state: tl.tensor,
    ranks: tl.tensor,
    inside: tl.tensor,
    nbytes: tl.tensor,
    staging: tl.tensor,
    target: tl.tensor,
) -> None:
    """Where messages of ``nbytes`` bytes to each rank are packed: the peer's window at ``target`` when it is mapped,
    else one after the other from ``staging``."""
    space = ((nbytes + MESSAGE_ALIGNMENT - 1) // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT
    space = tl.where(inside, space, 0)
    source = staging + tl.cumsum(space, axis=0) - space
    mapped = peer_window(context, tl.where(inside, ranks, 0))
    at = tl.where(mapped != 0, mapped + target, window_address(context) + source)
    zero = tl.zeros_like(ranks)
    tl.store(int64s(state_table(context, state, T_MESSAGE_AT, ranks)), at, mask=inside)
    tl.store(int64s(state_table(context, state, T_MESSAGE_FROM, ranks)), source, mask=inside)
    tl.store(int64s(state_table(context, state, T_MESSAGE_TO, ranks)), zero + target, mask=inside)
    tl.store(int64s(state_table(context, state, T_MESSAGE_BYTES, ranks)), nbytes, mask=inside)


@triton.jit
def _place_dispatches(
    context: tl.tensor,
    state: tl.tensor,
    plan: tl.tensor,
    route: tl.tensor,
    row_bytes: tl.tensor,
    REDUCED: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    ranks = tl.arange(0, RANKS).to(tl.int64)
    group, number = rank_count(context), peek(state + S_DISPATCH_NUMBER)
    inside = ranks < group
    counts = tl.load(int64s(route_table(context, route, R_COUNTS, ranks)), mask=inside, other=0)
    pairs = tl.load(int64s(route_table(context, route, R_PAIRS, ranks)), mask=inside, other=0)
    # the experts' output may have another dtype than the tokens: space for the widest that was planned
    if REDUCED:
        back = counts * peek(plan + P_ROW) + HEADER
    else:
        back = pairs * peek(plan + P_ROW) + HEADER
    back = tl.where(inside, ((back + MESSAGE_ALIGNMENT - 1) // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT, 0)
    base = tl.cumsum(back, axis=0) - back
    tl.store(int64s(route_table(context, route, R_RETURN_BASE, ranks)), base, mask=inside)
    parity = number & 1
    staging = peek(state + S_DISPATCH_SEND) + parity * peek(state + S_DISPATCH_SEND_STEP)
    target = peek(state + S_DISPATCH_RECV) + (parity * group + own_rank(context)) * peek(state + S_DISPATCH_SLOT)
    nbytes = counts * (peek(plan + P_META) + row_bytes) + HEADER
    place_messages(context, state, ranks, inside, nbytes, staging, target)
    poke(route, number)


# what the caller may pass with any alignment or length has one compiled code: none is compiled amid an operation
@kernel(do_not_specialize=["topk_idx", "tokens"])
def route(
    context: tl.int64,
    state: tl.int64,
    plan: tl.int64,
    route: tl.int64,
    topk_idx: tl.int64,
    tokens: tl.int64,
    row_bytes: tl.int64,
    REDUCED: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Fill a route block and make the messages' space free; grid (R + 1,), one warp. Seven arguments of a launch, seven
    constants.

    Args:
        plan: sizes of the operation, which later kernels find in the route block.
        topk_idx: int64[tokens, TOPK]. row_bytes: of a row on the wire.
        REDUCED: destinations return one row per token. SLOTS, RANKS: TOPK and R rounded up to powers of two.
        BLOCK: tokens read together. LANES: peers waited for together.
    """
    tokens = tokens.to(tl.int64)
    program = tl.program_id(0).to(tl.int64)
    if has_failed_now(context, BACKEND) == 0:
        if program == 0:
            start = clock_ns(BACKEND)
            word = tl.arange(0, _ROUTE_WORDS).to(tl.int64)
            sizes = tl.load(int64s(plan + 8 * word))
            tl.store(int64s(route + 8 * word), sizes, mask=word > 0)
            _fill_absent(context, state, plan, route, topk_idx, tokens, REDUCED, TOPK, SLOTS, BLOCK, BACKEND)
            ack_dispatches(context, state, start, LANES, BACKEND)
            wait_spaces(context, state, _DISPATCH, start, LANES, BACKEND)
        else:
            _list_tokens(context, plan, route, topk_idx, tokens, program - 1, REDUCED, TOPK, SLOTS, BLOCK)
        if arrives_last(state + S_ARRIVALS, rank_count(context) + 1, BACKEND):
            _place_dispatches(context, state, plan, route, row_bytes, REDUCED, RANKS)


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
