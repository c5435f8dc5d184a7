"""Low-latency dispatch, sending: one kernel routes every token, casts it once, writes it into the message of each of
its ranks and publishes each message as soon as its last row is written.

The first R programs serve one destination each: they list its rows, place its message and its answer, wait until its
space is free and write its header. Each of the others has some values of some tokens, and writes those into their rows
once they are listed. Among an expert's rows of this source, a token's place is the next one free or, where order is
asked for, that of its number.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from .blocks import P, R, S, T, expert_count, route_table, state_table
from .context import channel_count, has_failed_now, is_live, own_rank, peer_window, rank_count, sticky_code, stream_of
from .kernel import kernel
from .ll_counts import tell_dispatches_read, wait_space
from .ll_message import HEADER, LOW, offset_among, place_message, put_message, write_header
from .ll_routing import NOWHERE, earlier_equal, expert_ids, list_rows, named_before, pairs_before, ranks_of
from .programs import (
    DISPATCH_SEND,
    Message,
    MessageShape,
    await_ready,
    finish,
    finish_one,
    last_peers,
    stamp_of,
    tell_ready,
)
from .publish import store_flags
from .quant import load_floats, quantise_blocks
from .target import lanes
from .wait import NOBODY, first_of, report_id
from .words import (
    aligned,
    any_of,
    clock_ns,
    column_of,
    divide,
    floats,
    int32s,
    int64s,
    peek,
    poke,
    program_number,
    settle,
    uint8s,
    uniform,
)

_DISPATCH, _TAG = tl.constexpr(LL_DISPATCH), tl.constexpr(LowLatencyHeader.DISPATCH_TAG)
_WEIGHTED = tl.constexpr(LowLatencyHeader.WEIGHTED)
_F32, _FP8, _UE8M0 = tl.constexpr(DTYPE_F32), tl.constexpr(DTYPE_FP8), tl.constexpr(DTYPE_FP8_UE8M0)
_GROUP, _ROUTE_WORDS = tl.constexpr(SCALE_BLOCK), tl.constexpr(ROUTE_WORDS)
_PLACE_SHIFT, _PAIRS_SHIFT = tl.constexpr(PLACE_SHIFT), tl.constexpr(PAIRS_SHIFT)
#: Fields of PLACED: rows, (token, slot) pairs, destinations. A token has at most 64 slots.
_FIELD, _IN_FIELD = tl.constexpr(20), tl.constexpr((1 << 20) - 1)
assert 64 * MAX_LOW_LATENCY_TOKENS < 1 << 20


@dataclass(frozen=True, kw_only=True, repr=False)
class DispatchSendShape(MessageShape):
    """What :func:`dispatch_send` is compiled for.

    Attributes:
        HIDDEN, SOURCE: values of a token, and their DTYPE_*. BLOCK: cast at a time, at least 128.
        CODING: DTYPE_* of the rows. ROUND: scales are powers of two. FNUZ: gfx942's FP8.
        REDUCED: destinations return one row per token, and get the weights.
    """

    HIDDEN: int
    SOURCE: int
    CODING: int
    ROUND: bool
    FNUZ: bool
    REDUCED: bool


@triton.jit
def _serve(
    one: Message,
    plan: tl.tensor,
    topk_idx: tl.tensor,
    tokens: tl.tensor,
    columns: tl.tensor,
    start: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """What one of the first programs does for its destination. True when it is the last to do something for that."""
    context, state, route, peer, number = one.context, one.state, one.route, one.peer, one.number
    live = is_live(context, peer)
    stamp, experts = stamp_of(DISPATCH_SEND, number), peek(plan + P.EXPERTS)
    local = peek(plan + P.LOCAL)
    earlier = route + peek(plan + P.ROUTE_EARLIER) + 8 * peer * peek(plan + P.TOKENS)
    listed, wrong = list_rows(topk_idx, tokens, peer * local, local, experts, earlier, shape.TOPK, shape.ONCE)
    good = has_failed_now(context) == 0
    if peer == 0:
        _begin_route(one, plan, local, wrong, experts)
    # to a lost rank nothing goes
    _place(one, plan, tl.where(live, listed, 0), shape)
    # read again, so that nothing of it is kept while waiting
    settle()
    rows = int64s(route_table(route, R.COUNTS, peer))
    free = tl.full((), 0, tl.int64)
    if good & live:
        free, good = tell_dispatches_read(context, state, peer, start)
        if good:
            good = wait_space(context, state, peer, _DISPATCH, start)
    # rows are written beside the header
    tell_ready(state, peer, stamp, good & live)
    if good & live:
        message = peek(state_table(state, T.MESSAGE_AT, peer))
        told = (peek(route_table(route, R.PAIRS, peer)) << _PAIRS_SHIFT) | tl.load(rows)
        coding = tl.full((), (_WEIGHTED if shape.REDUCED else 0) | shape.CODING, tl.int64)
        back = peek(route_table(route, R.RETURN_BASE, peer))
        write_header(one, plan, message, told, coding, back, free, _TAG)
        settle()
    return finish_one(state, peer) == tl.load(rows) * columns


@triton.jit
def _place(one: Message, plan: tl.tensor, listed: tl.tensor, shape: tl.constexpr) -> None:
    """Where the message with its ``listed`` rows and pairs is packed, and where its answer comes: close to those of
    other peers, in whatever order."""
    context, state, route, peer, parity = one.context, one.state, one.route, one.peer, one.number & 1
    rows, pairs = listed & LOW, listed >> 32
    placed = rows | (pairs << _FIELD) | (tl.full((), 1, tl.int64) << (2 * _FIELD))
    placed = tl.atomic_add(int64s(state + S.PLACED), placed, sem="relaxed", scope="gpu")
    peers, rows_before = placed >> (2 * _FIELD), placed & _IN_FIELD
    back = rows_before if shape.REDUCED else (placed >> _FIELD) & _IN_FIELD
    # the experts' output may have another dtype than the tokens: space for the widest that was planned
    base = offset_among(peers, peers * HEADER + back * peek(plan + P.ROW))
    poke(route_table(route, R.COUNTS, peer), rows)
    poke(route_table(route, R.PAIRS, peer), pairs)
    poke(route_table(route, R.RETURN_BASE, peer), base)
    row, first_row = peek(plan + P.META) + shape.ROW_BYTES, peek(plan + P.FIRST_ROW)
    source = peek(state + S.DISPATCH_SEND) + parity * peek(state + S.DISPATCH_SEND_STEP)
    source += offset_among(peers, peers * first_row + rows_before * row)
    slot = parity * rank_count(context) + own_rank(context)
    target = peek(state + S.DISPATCH_RECV) + slot * peek(state + S.DISPATCH_SLOT)
    place_message(one, source, target, first_row + rows * row)


@triton.jit
def _begin_route(one: Message, plan: tl.tensor, local: tl.tensor, wrong: tl.tensor, experts: tl.tensor) -> None:
    """The head of the route block, for later kernels, and what the host is told."""
    word = tl.arange(0, _ROUTE_WORDS).to(tl.int64)
    sizes = tl.load(int64s(plan + 8 * word))
    tl.store(int64s(one.route + 8 * word), tl.where(word == 0, one.number, sizes))
    filled = one.route + peek(plan + P.ROUTE_FILLED)
    for first in range(0, local, lanes()):
        expert = first + tl.arange(0, lanes()).to(tl.int64)
        tl.store(int32s(filled + 4 * expert), tl.zeros([lanes()], tl.int32), mask=expert < local)
    # rule: low latency: the host is told of an expert id out of range
    if wrong < NOWHERE:
        report_id(one.context, one.state, wrong.to(tl.int64), experts)


@triton.jit
def _close(
    context: tl.tensor,
    state: tl.tensor,
    plan: tl.tensor,
    route: tl.tensor,
    rank: tl.tensor,
    last: tl.tensor,
    start: tl.tensor,
) -> None:
    """Nothing is left to do for each ``rank`` [rows, slots] where this program was the ``last``: their messages are
    published, as far as they may be."""
    # what this program has acquired with its last piece of work: for all threads
    settle()
    number, local, ranks = peek(state + S.DISPATCH_NUMBER), peek(plan + P.LOCAL), rank_count(context)
    first, channels = stream_of(_DISPATCH, number), channel_count(context)
    rank, last = tl.ravel(rank)[:, None], tl.ravel(last)[:, None]
    for lowest in range(0, ranks, lanes()):
        peers = lowest + tl.arange(0, lanes()).to(tl.int64)
        closed = tl.max((last & (rank == peers[None, :])).to(tl.int32), axis=0) != 0
        if any_of(closed) != 0:
            ready_at = int64s(state_table(state, T.READY, tl.where(closed, peers, 0)))
            may = closed & (tl.load(ready_at, mask=closed, other=0) == stamp_of(DISPATCH_SEND, number))
            peer = first_of(peers, may)
            while peer != NOBODY:
                _write_counts(state, peer, local)
                peer = first_of(peers, may & (peers > peer))
            settle()
            mapped = may & (peer_window(context, tl.where(may, peers, 0)) != 0)
            for channel in range(channels):
                store_flags(context, state, peers, mapped, first + channel, number // 2 + 1)
            proxied = may & (mapped == 0)
            peer = first_of(peers, proxied)
            # nothing is published once a proxy or the host has set the sticky error, which is read over PCIe
            if peer != NOBODY:
                if sticky_code(context) != 0:
                    peer = tl.full((), NOBODY, tl.int64)
            while peer != NOBODY:
                put_message(Message(context, state, route, peer, number), _DISPATCH, start)
                peer = first_of(peers, proxied & (peers > peer))
            if last_peers(state, peers, closed, ranks):
                # rule: low latency: the send kernel counts its message
                poke(state + S.DISPATCH_NUMBER, number + 1)
                poke(state + S.PLACED, 0)


@triton.jit
def _write_counts(state: tl.tensor, peer: tl.tensor, local: tl.tensor) -> None:
    """How many rows each expert of ``peer`` gets: into the message to it."""
    counts = peek(state_table(state, T.MESSAGE_AT, peer)) + HEADER
    for first in range(0, local, lanes()):
        expert = first + tl.arange(0, lanes()).to(tl.int64)
        named = int32s(expert_count(state, peer * local + expert))
        tl.store(int32s(counts + 4 * expert), tl.load(named, mask=expert < local, other=0), mask=expert < local)
        tl.store(named, tl.zeros([lanes()], tl.int32), mask=expert < local)


@kernel(aligned=["context", "state", "plan", "route", "x"])
def dispatch_send(
    context: tl.int64,
    state: tl.int64,
    plan: tl.int64,
    route: tl.int64,
    x: tl.int64,
    topk_idx: tl.int64,
    weights: tl.int64,
    tokens: tl.int64,
    deterministic: tl.int64,
    SHAPE: tl.constexpr,
) -> None:
    """Send the next dispatch message to every rank and fill a route block; grid (R + ceil(tokens / ROWS) * columns,),
    any number of columns.

    Args:
        plan: sizes of the operation, which later kernels find in the route block.
        x: [tokens, HIDDEN] of dtype SOURCE, contiguous, on a multiple of 16 bytes. topk_idx: int64[tokens, TOPK].
        weights: float32[tokens, TOPK], or 0 when not REDUCED: destinations return one row per token when they are
            there.
        deterministic: 1 = the rows of an expert stand by token, 0 = as they come.
        SHAPE: a :class:`DispatchSendShape`.
    """
    tokens = tokens.to(tl.int64)
    ranks = rank_count(context)
    mine = program_number(state + S.TICKETS, SHAPE.STARTS_IN_ORDER)
    program = mine - ranks
    blocks = (tokens + SHAPE.ROWS - 1) // SHAPE.ROWS
    columns = divide(tl.num_programs(0) - ranks, tl.maximum(blocks, 1))[0]
    start = clock_ns()
    rank = tl.full([SHAPE.ROWS, SHAPE.SLOTS], -1, tl.int32)
    last = tl.zeros([SHAPE.ROWS, SHAPE.SLOTS], tl.int1)
    if program < 0:
        number = peek(state + S.DISPATCH_NUMBER)
        one = Message(context, state, route, mine, number)
        done = _serve(one, plan, topk_idx, tokens, columns, start, SHAPE)
        rank += mine.to(tl.int32) + 1
        last |= done
    else:
        experts, local = peek(plan + P.EXPERTS), peek(plan + P.LOCAL)
        block, column = divide(program, columns)
        token = block * SHAPE.ROWS + tl.arange(0, SHAPE.ROWS).to(tl.int64)
        slot = tl.arange(0, SHAPE.SLOTS)[None, :]
        inside = (token[:, None] < tokens) & (slot < SHAPE.TOPK)
        ids, _ = expert_ids(topk_idx, token[:, None], slot, tokens, experts, SHAPE.TOPK)
        rank = ranks_of(context, ids, local)
        goes, peers = rank >= 0, tl.where(rank >= 0, rank, 0).to(tl.int64)
        told, ready = goes, goes
        # nobody waits for a program that has no row: the others may have ended the operation
        if uniform(any_of(tl.ravel(goes))) != 0:
            number = peek(state + S.DISPATCH_NUMBER)
            stamp, stream = stamp_of(DISPATCH_SEND, number), stream_of(_DISPATCH, number)
            told, ready = await_ready(context, state, peers, goes, stamp, stream)
        within = earlier_equal(rank, SHAPE.SLOTS)
        # a token goes to a rank once
        once = told & (within == 0)
        first = once & ready
        earlier = route + peek(plan + P.ROUTE_EARLIER) + 8 * (peers * peek(plan + P.TOKENS) + token[:, None])
        listed = tl.load(int64s(earlier), mask=ready, other=0)
        row, pairs = listed & LOW, listed >> 32
        message = tl.load(int64s(state_table(state, T.MESSAGE_AT, peers)), mask=ready, other=0)
        meta = message + peek(plan + P.FIRST_ROW) + row * (peek(plan + P.META) + SHAPE.ROW_BYTES)
        if column == 0:
            returns = int64s(route + peek(plan + P.ROUTE_RETURNS) + 8 * (token[:, None] * SHAPE.TOPK + slot))
            there = rank.to(tl.int64) << 32
            if SHAPE.REDUCED:
                # by rank, whatever the order of the slots: those before it, then -1
                below = (first[:, None, :] & (rank[:, None, :] < rank[:, :, None])).to(tl.int32)
                many = tl.sum(first.to(tl.int32), axis=1)[:, None]
                tl.store(returns - slot + tl.sum(below, axis=2), there | row, mask=first)
                tl.store(returns, tl.full([SHAPE.ROWS, SHAPE.SLOTS], -1, tl.int64), mask=inside & (slot >= many))
            elif SHAPE.ONCE:
                pair = pairs + pairs_before(rank, ids, SHAPE.SLOTS)
                tl.store(returns, tl.where(ready, there | pair, -1), mask=inside)
            else:
                tl.store(returns, tl.where(ready, there | (pairs + within), -1), mask=inside)
            tl.store(int32s(meta), (token[:, None] + tl.zeros_like(meta)).to(tl.int32), mask=first)
            tl.store(int32s(meta + 4), pairs.to(tl.int32), mask=first)
            # an expert has a token once
            new, same = ready & (earlier_equal(ids, SHAPE.SLOTS) == 0), ids[:, :, None] == ids[:, None, :]
            named = int32s(expert_count(state, tl.where(new, ids, 0).to(tl.int64)))
            position = tl.atomic_add(
                named, tl.full([SHAPE.ROWS, SHAPE.SLOTS], 1, tl.int32), mask=new, sem="relaxed", scope="gpu"
            )
            if deterministic != 0:
                position = named_before(topk_idx, tokens, experts, token, ids, SHAPE.TOPK, SHAPE.SLOTS, SHAPE.ROWS)
            position = tl.sum(tl.where(same & new[:, None, :], position[:, None, :], 0), axis=2)
            place = ((ids.to(tl.int64) - peers * local).to(tl.int32) << _PLACE_SHIFT) | position
            # of the destinations along axis 1, the places along axis 2
            here = rank[:, :, None] == rank[:, None, :]
            to = meta[:, :, None] + 8 + 4 * slot[:, None, :]
            wanted = first[:, :, None] & (slot[:, None, :] < SHAPE.TOPK)
            tl.store(int32s(to), tl.where(here, place[:, None, :], -1), mask=wanted)
            if SHAPE.REDUCED:
                factors = tl.load(floats(weights + 4 * (token[:, None] * SHAPE.TOPK + slot)), mask=inside, other=0.0)
                some = tl.zeros([SHAPE.ROWS, SHAPE.SLOTS, SHAPE.SLOTS], tl.float32) + factors[:, None, :]
                tl.store(floats(to + 4 * SHAPE.TOPK), some, mask=wanted)
        _write_rows(x, token, tokens, meta + peek(plan + P.META), first, column, columns, SHAPE)
        settle()
        many = tl.load(int64s(route_table(route, R.COUNTS, peers)), mask=once, other=0)
        # also for those to whom nothing may be said any more: an operation ends in every case
        last = once & (finish(state, peers, once) == many * columns)
    if uniform(any_of(tl.ravel(last))) != 0:
        _close(context, state, plan, route, rank, last, start)


@triton.jit
def _write_rows(
    x: tl.tensor,
    token: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    first: tl.tensor,
    column: tl.tensor,
    columns: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Cast some values of each token once and store them at each of its ``rows`` [ROWS, SLOTS], where it is the
    ``first`` slot of a rank."""
    targets = tl.where(first, rows, 0)
    if (shape.CODING == _FP8) | (shape.CODING == _UE8M0):
        width: tl.constexpr = 4 if shape.SOURCE == _F32 else 2
        groups: tl.constexpr = shape.BLOCK // _GROUP
        value = tl.arange(0, shape.BLOCK)[None, :]
        for lowest in range(column * shape.BLOCK, shape.HIDDEN, columns * shape.BLOCK):
            inside = (token[:, None] < tokens) & (lowest + value < shape.HIDDEN)
            given = load_floats(x + token * (shape.HIDDEN * width), lowest + value, inside, shape.SOURCE)
            given = tl.reshape(given, [shape.ROWS, groups, _GROUP])
            codes, scales = quantise_blocks(given, shape.ROUND, shape.FNUZ)
            codes = tl.reshape(codes, [shape.ROWS, shape.BLOCK])
            group = lowest // _GROUP + tl.arange(0, groups)[None, :]
            for index in range(shape.TOPK):
                row = column_of(targets, index)
                # several slots of a token may have one rank
                if uniform((tl.max(row, axis=0) != 0).to(tl.int32)) != 0:
                    chosen = (row != 0)[:, None]
                    tl.store(aligned(row, tl.uint8)[:, None] + (lowest + value), codes, mask=chosen & inside)
                    wanted = chosen & (group < shape.HIDDEN // _GROUP)
                    if shape.CODING == _FP8:
                        tl.store(int32s(row[:, None] + shape.HIDDEN) + group, scales, mask=wanted)
                    else:
                        exponents = (scales >> 23).to(tl.uint8)
                        tl.store(uint8s(row[:, None] + shape.HIDDEN + group), exponents, mask=wanted)
    else:
        words: tl.constexpr = shape.HIDDEN * (4 if shape.SOURCE == _F32 else 2) // 4
        for lowest in range(column * shape.BLOCK, words, columns * shape.BLOCK):
            word = lowest + tl.arange(0, shape.BLOCK)[None, :]
            inside = (token[:, None] < tokens) & (word < words)
            given = tl.load(aligned(x + token * (4 * words), tl.int32)[:, None] + word, mask=inside, other=0)
            for index in range(shape.TOPK):
                row = column_of(targets, index)
                if uniform((tl.max(row, axis=0) != 0).to(tl.int32)) != 0:
                    tl.store(aligned(row, tl.int32)[:, None] + word, given, mask=(row != 0)[:, None] & inside)
