"""Low-latency dispatch, sending: one kernel routes every token, casts it once, writes it into the message of each of
its ranks and publishes each message as soon as its last row is written.

The first R programs serve one destination each: they count its rows, place its message and its answer, wait until its
space is free and write its header. Each of the others has some values of some tokens. It counts, over the ids of all
tokens, how many earlier ones go to each of its destinations and experts: the same input always gives the same messages.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.layout import MAX_LOW_LATENCY_TOKENS
from ...protocol.message import (
    DTYPE_F32,
    DTYPE_FP8,
    DTYPE_FP8_UE8M0,
    PAIRS_SHIFT,
    PLACE_SHIFT,
    SCALE_BLOCK,
    LowLatencyHeader,
)
from ...protocol.streams import LL_DISPATCH
from ..blocks.low_latency_device import ROUTE_WORDS
from .blocks import (
    P_EXPERTS,
    P_FIRST_ROW,
    P_META,
    P_ROUTE_FILLED,
    P_ROUTE_RETURNS,
    P_ROW,
    R_COUNTS,
    R_PAIRS,
    R_RETURN_BASE,
    S_DISPATCH_NUMBER,
    S_DISPATCH_RECV,
    S_DISPATCH_SEND,
    S_DISPATCH_SEND_STEP,
    S_DISPATCH_SLOT,
    T_MESSAGE_AT,
    route_table,
    state_table,
)
from .context import has_failed_now, is_live, own_rank, rank_count, stream_of
from .kernel import kernel
from .ll_counts import tell_dispatches_read, wait_space
from .ll_message import HEADER, offset_among, place_message, publish_message, write_header
from .programs import DISPATCH_SEND, await_ready, finish, finish_one, last_peer, program_number, stamp_of, tell_ready
from .quant import load_floats, quantise_blocks
from .wait import report_id
from .words import aligned, clock_ns, floats, int32s, int64s, peek, poke, settle, uint8s

_DISPATCH, _TAG = tl.constexpr(LL_DISPATCH), tl.constexpr(LowLatencyHeader.DISPATCH_TAG)
_WEIGHTED = tl.constexpr(LowLatencyHeader.WEIGHTED)
_F32, _FP8, _UE8M0 = tl.constexpr(DTYPE_F32), tl.constexpr(DTYPE_FP8), tl.constexpr(DTYPE_FP8_UE8M0)
_GROUP, _ROUTE_WORDS = tl.constexpr(SCALE_BLOCK), tl.constexpr(ROUTE_WORDS)
_PLACE_SHIFT, _PAIRS_SHIFT = tl.constexpr(PLACE_SHIFT), tl.constexpr(PAIRS_SHIFT)
_NOBODY = tl.constexpr(1 << 30)
#: Fields of a count of what precedes a slot: rows of its rank, rows of its expert, rows of its expert in all, and above
#: these the (token, slot) pairs of its rank.
_FIELD, _IN_FIELD = tl.constexpr(14), tl.constexpr((1 << 14) - 1)
assert MAX_LOW_LATENCY_TOKENS < 1 << 14


@triton.jit
def _expert_ids(
    topk_idx: tl.tensor,
    token: tl.tensor,
    slot: tl.tensor,
    tokens: tl.tensor,
    experts: tl.tensor,
    TOPK: tl.constexpr,
) -> tl.tensor:
    """(Expert of each slot as int32, -1 for none; whether the id is one that cannot be.)"""
    given = (token < tokens) & (slot < TOPK)
    ids = tl.load(int64s(topk_idx + 8 * (token * TOPK + slot)), mask=given, other=-1)
    # rule: low latency: an expert id is compared before it is cut to 32 bits
    right = (ids >= 0) & (ids < experts)
    return tl.where(right, ids, -1).to(tl.int32), (right == 0) & (ids != -1)


@triton.jit
def _ranks_of(context: tl.tensor, ids: tl.tensor, experts: tl.tensor) -> tl.tensor:
    """Rank of each expert, int32, -1 for none and for a masked one."""
    local = (experts // rank_count(context)).to(tl.int32)
    rank = tl.where(ids >= 0, ids // local, -1)
    return tl.where((rank >= 0) & is_live(context, tl.where(rank >= 0, rank, 0).to(tl.int64)), rank, -1)


@triton.jit
def _earlier_equal(values: tl.tensor, SLOTS: tl.constexpr) -> tl.tensor:
    """Of each element of ``values`` [rows, SLOTS], how many before it in its row are the same."""
    slot = tl.arange(0, SLOTS)
    before = slot[None, None, :] < slot[None, :, None]
    return tl.sum(((values[:, :, None] == values[:, None, :]) & before).to(tl.int32), axis=2)


@triton.jit
def _count_rows(
    context: tl.tensor,
    topk_idx: tl.tensor,
    tokens: tl.tensor,
    experts: tl.tensor,
    peer: tl.tensor,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """(Rows for ``peer``, its (token, slot) pairs, the same of all lower ranks, smallest position of a wrong id.)"""
    mine = tl.zeros([BLOCK, SLOTS], tl.int64)
    lower = tl.zeros([BLOCK, SLOTS], tl.int64)
    wrong = tl.full([BLOCK, SLOTS], 1 << 60, tl.int64)
    slot = tl.arange(0, SLOTS)[None, :]
    for first in range(0, tokens, BLOCK):
        token = first + tl.arange(0, BLOCK)[:, None].to(tl.int64)
        ids, bad = _expert_ids(topk_idx, token, slot, tokens, experts, TOPK)
        rank = _ranks_of(context, ids, experts)
        row = (_earlier_equal(rank, SLOTS) == 0).to(tl.int64) << 32
        mine += tl.where(rank == peer.to(tl.int32), row | 1, 0)
        lower += tl.where((rank >= 0) & (rank < peer.to(tl.int32)), row | 1, 0)
        wrong = tl.minimum(wrong, tl.where(bad, token * TOPK + slot, 1 << 60))
    of_peer, below = tl.sum(tl.ravel(mine), axis=0), tl.sum(tl.ravel(lower), axis=0)
    low: tl.constexpr = (1 << 32) - 1
    return of_peer >> 32, of_peer & low, below >> 32, below & low, tl.min(tl.ravel(wrong), axis=0)


@triton.jit
def _serve(
    context: tl.tensor,
    state: tl.tensor,
    plan: tl.tensor,
    route: tl.tensor,
    topk_idx: tl.tensor,
    tokens: tl.tensor,
    columns: tl.tensor,
    peer: tl.tensor,
    start: tl.tensor,
    ROW_BYTES: tl.constexpr,
    CODING: tl.constexpr,
    REDUCED: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """What one of the first programs does for its destination. True when it is the last to do something for that. Its
    arguments are those of the kernel."""
    ranks, number = rank_count(context), peek(state + S_DISPATCH_NUMBER)
    stamp, experts = stamp_of(DISPATCH_SEND, number), peek(plan + P_EXPERTS)
    local, live = experts // ranks, is_live(context, peer)
    rows, pairs, rows_below, pairs_below, wrong = _count_rows(
        context, topk_idx, tokens, experts, peer, TOPK, SLOTS, BLOCK
    )
    good = has_failed_now(context, BACKEND) == 0
    if peer == 0:
        _begin_route(context, state, plan, route, number, local, wrong, experts, LANES, BACKEND)
    # the experts' output may have another dtype than the tokens: space for the widest that was planned
    back = rows_below if REDUCED else pairs_below
    base = offset_among(peer, peer * HEADER + back * peek(plan + P_ROW))
    poke(route_table(context, route, R_COUNTS, peer), rows)
    poke(route_table(context, route, R_PAIRS, peer), pairs)
    poke(route_table(context, route, R_RETURN_BASE, peer), base)
    if good & live:
        free, good = tell_dispatches_read(context, state, peer, start, LANES, BACKEND)
        if good:
            good = wait_space(context, state, peer, _DISPATCH, start, LANES, BACKEND)
        if good:
            parity, token = number & 1, peek(plan + P_META) + ROW_BYTES
            first_row = peek(plan + P_FIRST_ROW)
            source = peek(state + S_DISPATCH_SEND) + parity * peek(state + S_DISPATCH_SEND_STEP)
            source += offset_among(peer, peer * first_row + rows_below * token)
            slot = parity * ranks + own_rank(context)
            target = peek(state + S_DISPATCH_RECV) + slot * peek(state + S_DISPATCH_SLOT)
            message = place_message(context, state, peer, source, target, first_row + rows * token)
            coding = tl.full((), (_WEIGHTED if REDUCED else 0) | CODING, tl.int64)
            told = (pairs << _PAIRS_SHIFT) | rows
            write_header(context, state, plan, peer, message, number, told, coding, base, free, _TAG, BACKEND)
            # of experts that no token names; the others' are written with their last rows
            for first in range(0, local, LANES):
                expert = first + tl.arange(0, LANES).to(tl.int64)
                tl.store(int32s(message + HEADER + 4 * expert), tl.zeros([LANES], tl.int32), mask=expert < local)
    tell_ready(context, state, peer, stamp, good & live, BACKEND)
    last = tl.full((), 0, tl.int1)
    if good:
        if live:
            last = finish_one(context, state, peer) == rows * columns
        else:
            _done(context, state, peer, number, BACKEND)
    return last


@triton.jit
def _begin_route(
    context: tl.tensor,
    state: tl.tensor,
    plan: tl.tensor,
    route: tl.tensor,
    number: tl.tensor,
    local: tl.tensor,
    wrong: tl.tensor,
    experts: tl.tensor,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """The head of the route block, for later kernels, and what the host is told. Ten arguments, those of the kernel
    that it is a part of."""
    word = tl.arange(0, _ROUTE_WORDS).to(tl.int64)
    sizes = tl.load(int64s(plan + 8 * word))
    tl.store(int64s(route + 8 * word), tl.where(word == 0, number, sizes))
    filled = route + peek(plan + P_ROUTE_FILLED)
    for first in range(0, local, LANES):
        expert = first + tl.arange(0, LANES).to(tl.int64)
        tl.store(int32s(filled + 4 * expert), tl.zeros([LANES], tl.int32), mask=expert < local)
    # rule: low latency: the host is told of an expert id out of range
    if wrong < (1 << 60):
        report_id(context, state, wrong, experts, BACKEND)


@triton.jit
def _done(context: tl.tensor, state: tl.tensor, peer: tl.tensor, number: tl.tensor, BACKEND: tl.constexpr) -> None:
    if last_peer(context, state, peer, rank_count(context), BACKEND):
        # rule: low latency: the send kernel counts its message
        poke(state + S_DISPATCH_NUMBER, number + 1)


@triton.jit
def _count_before(
    context: tl.tensor,
    topk_idx: tl.tensor,
    tokens: tl.tensor,
    experts: tl.tensor,
    token: tl.tensor,
    ids: tl.tensor,
    rank: tl.tensor,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    OTHERS: tl.constexpr,
) -> tl.tensor:
    """Of each own slot [ROWS, SLOTS]: what other tokens have of its rank and expert, as fields of one int64. Its
    arguments are those of the kernel and what that knows of its own slots."""
    seen = tl.zeros([ROWS, SLOTS, OTHERS], tl.int64)
    slot = tl.arange(0, SLOTS)[None, :]
    own_rank_ = tl.expand_dims(tl.expand_dims(rank, 2), 3)
    own_id = tl.expand_dims(tl.expand_dims(ids, 2), 3)
    local = (experts // rank_count(context)).to(tl.int32)
    for first in range(0, tokens, OTHERS):
        other = first + tl.arange(0, OTHERS).to(tl.int64)
        named, _ = _expert_ids(topk_idx, other[:, None], slot, tokens, experts, TOPK)
        named = tl.expand_dims(tl.expand_dims(named, 0), 0)
        same = (tl.where(named >= 0, named // local, -1) == own_rank_).to(tl.int32)
        same += (named == own_id).to(tl.int32) << 16
        same = tl.sum(same, axis=3)
        pairs, expert = (same & 0xFFFF).to(tl.int64), (same >= 1 << 16).to(tl.int64)
        earlier = other[None, None, :] < token[:, None, None]
        before = (pairs > 0).to(tl.int64) | (expert << _FIELD) | (pairs << (3 * _FIELD))
        seen += tl.where(earlier, before, 0) + (expert << (2 * _FIELD))
    return tl.sum(seen, axis=2)


@triton.jit
def _of_slot(values: tl.tensor, index: tl.tensor, SLOTS: tl.constexpr) -> tl.tensor:
    """Column ``index`` of ``values`` [rows, SLOTS]."""
    return tl.sum(tl.where(tl.arange(0, SLOTS)[None, :] == index, values, 0), axis=1)


# what the caller may pass with any alignment or length has one compiled code: none is compiled amid an operation
@kernel(do_not_specialize=["topk_idx", "weights", "tokens"])
def dispatch_send(
    context: tl.int64,
    state: tl.int64,
    plan: tl.int64,
    route: tl.int64,
    x: tl.int64,
    topk_idx: tl.int64,
    weights: tl.int64,
    tokens: tl.int64,
    HIDDEN: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    SOURCE: tl.constexpr,
    CODING: tl.constexpr,
    ROUND: tl.constexpr,
    FNUZ: tl.constexpr,
    REDUCED: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTED: tl.constexpr,
    OTHERS: tl.constexpr,
    IN_ORDER: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Send the next dispatch message to every rank and fill a route block; grid (R + ceil(tokens / ROWS) * columns,),
    any number of columns. Eight arguments of a launch, sixteen constants.

    Args:
        plan: sizes of the operation, which later kernels find in the route block.
        x: [tokens, HIDDEN] of dtype SOURCE, contiguous, on a multiple of 16 bytes. topk_idx: int64[tokens, TOPK].
        weights: float32[tokens, TOPK], or 0 when not REDUCED: destinations return one row per token when they are
            there.
        CODING: DTYPE_* of the rows, of ROW_BYTES each. ROUND: scales are powers of two. FNUZ: gfx942's FP8.
        SLOTS: TOPK rounded up to a power of two. ROWS: tokens of a program. BLOCK: values cast at a time, a power of
            two, at least 128. COUNTED, OTHERS: tokens whose ids are read together, for a destination and for own slots.
        IN_ORDER: programs start in the order of their numbers. LANES: threads, except in the interpreter.
    """
    tokens = tokens.to(tl.int64)
    ranks = rank_count(context)
    mine = program_number(state, IN_ORDER)
    program = mine - ranks
    blocks = (tokens + ROWS - 1) // ROWS
    columns = (tl.num_programs(0) - ranks) // tl.maximum(blocks, 1)
    start = clock_ns(BACKEND)
    rank = tl.full([ROWS, SLOTS], -1, tl.int32)
    last = tl.zeros([ROWS, SLOTS], tl.int1)
    if program < 0:
        done = _serve(
            context,
            state,
            plan,
            route,
            topk_idx,
            tokens,
            columns,
            mine,
            start,
            ROW_BYTES,
            CODING,
            REDUCED,
            TOPK,
            SLOTS,
            COUNTED,
            LANES,
            BACKEND,
        )
        rank += mine.to(tl.int32) + 1
        last |= done
    else:
        experts = peek(plan + P_EXPERTS)
        local = experts // ranks
        column = program % columns
        token = program // columns * ROWS + tl.arange(0, ROWS).to(tl.int64)
        slot = tl.arange(0, SLOTS)[None, :]
        inside = (token[:, None] < tokens) & (slot < TOPK)
        ids, _ = _expert_ids(topk_idx, token[:, None], slot, tokens, experts, TOPK)
        rank = _ranks_of(context, ids, experts)
        seen = _count_before(context, topk_idx, tokens, experts, token, ids, rank, TOPK, SLOTS, ROWS, OTHERS)
        row, pairs = seen & _IN_FIELD, seen >> (3 * _FIELD)
        position, named = (seen >> _FIELD) & _IN_FIELD, (seen >> (2 * _FIELD)) & _IN_FIELD
        within = _earlier_equal(rank, SLOTS)
        goes = rank >= 0
        # a token goes to a rank once
        first = goes & (within == 0)
        if column == 0:
            returns = int64s(route + peek(plan + P_ROUTE_RETURNS) + 8 * (token[:, None] * TOPK + slot))
            there = rank.to(tl.int64) << 32
            if REDUCED:
                # by rank, whatever the order of the slots: those before it, then -1
                below = (first[:, None, :] & (rank[:, None, :] < rank[:, :, None])).to(tl.int32)
                place = tl.sum(below, axis=2)
                many = tl.sum(first.to(tl.int32), axis=1)[:, None]
                tl.store(returns - slot + place, there | row, mask=first)
                tl.store(returns, tl.full([ROWS, SLOTS], -1, tl.int64), mask=inside & (slot >= many))
            else:
                tl.store(returns, tl.where(goes, there | (pairs + within), -1), mask=inside)
        if tl.max(tl.ravel(goes.to(tl.int32)), axis=0) != 0:
            number, peers = peek(state + S_DISPATCH_NUMBER), tl.where(goes, rank, 0).to(tl.int64)
            stamp, stream = stamp_of(DISPATCH_SEND, number), stream_of(_DISPATCH, number)
            ready = await_ready(context, state, peers, goes, stamp, stream, BACKEND)
            first &= ready
            message = tl.load(int64s(state_table(context, state, T_MESSAGE_AT, peers)), mask=ready, other=0)
            meta = message + peek(plan + P_FIRST_ROW) + row * (peek(plan + P_META) + ROW_BYTES)
            if column == 0:
                tl.store(int32s(meta), (token[:, None] + tl.zeros_like(meta)).to(tl.int32), mask=first)
                tl.store(int32s(meta + 4), pairs.to(tl.int32), mask=first)
                at_home = (ids.to(tl.int64) - peers * local).to(tl.int32)
                place = (at_home << _PLACE_SHIFT) | position.to(tl.int32)
                # of the destinations along axis 1, the places along axis 2
                here = rank[:, :, None] == rank[:, None, :]
                to = meta[:, :, None] + 8 + 4 * slot[:, None, :]
                wanted = first[:, :, None] & (slot[:, None, :] < TOPK)
                tl.store(int32s(to), tl.where(here, place[:, None, :], -1), mask=wanted)
                if REDUCED:
                    factors = tl.load(floats(weights + 4 * (token[:, None] * TOPK + slot)), mask=inside, other=0.0)
                    some = tl.zeros([ROWS, SLOTS, SLOTS], tl.float32) + factors[:, None, :]
                    tl.store(floats(to + 4 * TOPK), some, mask=wanted)
                # the last token that an expert has, by one of the slots that name it
                closing = ready & (named == position + 1) & (_earlier_equal(ids, SLOTS) == 0)
                tl.store(int32s(message + HEADER + 4 * at_home), named.to(tl.int32), mask=closing)
            _write_rows(
                x,
                token,
                tokens,
                meta + peek(plan + P_META),
                first,
                column,
                columns,
                HIDDEN,
                SOURCE,
                CODING,
                ROUND,
                FNUZ,
                TOPK,
                SLOTS,
                ROWS,
                BLOCK,
                BACKEND,
            )
            settle(BACKEND)
            many = tl.load(int64s(route_table(context, route, R_COUNTS, peers)), mask=first, other=0)
            last = first & (finish(context, state, peers, first) == many * columns)
    peer = tl.min(tl.ravel(tl.where(last, rank, _NOBODY)), axis=0)
    while peer != _NOBODY:
        number = peek(state + S_DISPATCH_NUMBER)
        publish_message(context, state, peer.to(tl.int64), _DISPATCH, number, start, LANES, BACKEND)
        rest = last & (rank > peer)
        _done(context, state, peer.to(tl.int64), number, BACKEND)
        peer = tl.min(tl.ravel(tl.where(rest, rank, _NOBODY)), axis=0)


@triton.jit
def _write_rows(
    x: tl.tensor,
    token: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    first: tl.tensor,
    column: tl.tensor,
    columns: tl.tensor,
    HIDDEN: tl.constexpr,
    SOURCE: tl.constexpr,
    CODING: tl.constexpr,
    ROUND: tl.constexpr,
    FNUZ: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Cast some values of each token once and store them at each of its ``rows`` [ROWS, SLOTS], where it is the
    ``first`` slot of a rank. Its arguments are those of the kernel that it is a part of."""
    if (CODING == _FP8) | (CODING == _UE8M0):
        width: tl.constexpr = 4 if SOURCE == _F32 else 2
        groups: tl.constexpr = BLOCK // _GROUP
        value = tl.arange(0, BLOCK)[None, :]
        for lowest in range(column * BLOCK, HIDDEN, columns * BLOCK):
            inside = (token[:, None] < tokens) & (lowest + value < HIDDEN)
            given = load_floats(x + token * (HIDDEN * width), lowest + value, inside, SOURCE)
            given = tl.reshape(given, [ROWS, groups, _GROUP])
            codes, scales = quantise_blocks(given, ROUND, FNUZ, BACKEND)
            codes = tl.reshape(codes, [ROWS, BLOCK])
            group = lowest // _GROUP + tl.arange(0, groups)[None, :]
            for index in range(TOPK):
                row = _of_slot(tl.where(first, rows, 0), index, SLOTS)
                # several slots of a token may have one rank
                if tl.max(row, axis=0) != 0:
                    chosen = (row != 0)[:, None]
                    tl.store(aligned(row, tl.uint8)[:, None] + (lowest + value), codes, mask=chosen & inside)
                    wanted = chosen & (group < HIDDEN // _GROUP)
                    if CODING == _FP8:
                        tl.store(int32s(row[:, None] + HIDDEN) + group, scales, mask=wanted)
                    else:
                        exponents = (scales >> 23).to(tl.uint8)
                        tl.store(uint8s(row[:, None] + HIDDEN + group), exponents, mask=wanted)
    else:
        words: tl.constexpr = HIDDEN * (4 if SOURCE == _F32 else 2) // 4
        for lowest in range(column * BLOCK, words, columns * BLOCK):
            word = lowest + tl.arange(0, BLOCK)[None, :]
            inside = (token[:, None] < tokens) & (word < words)
            given = tl.load(aligned(x + token * (4 * words), tl.int32)[:, None] + word, mask=inside, other=0)
            for index in range(TOPK):
                row = _of_slot(tl.where(first, rows, 0), index, SLOTS)
                if tl.max(row, axis=0) != 0:
                    tl.store(aligned(row, tl.int32)[:, None] + word, given, mask=(row != 0)[:, None] & inside)
