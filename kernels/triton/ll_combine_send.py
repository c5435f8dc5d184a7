"""Low-latency combine, sending: one kernel returns the experts' rows to each source, summed here when the weights are
known, and publishes each message as soon as its last row is written.

The first R programs serve one source each: they place its message, wait until its space is free and write its header.
Then they and all others of the source pack its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from ...protocol.message import DTYPE_F32, FORM_REDUCED, LowLatencyHeader
from ...protocol.streams import LL_COMBINE
from .blocks import P, R, S, T, route_table, state_table
from .context import has_failed_now, is_live, rank_count, stream_of
from .kernel import kernel
from .ll_counts import tell_combines_free, wait_space
from .ll_dispatch_recv import PLACE_EXPERT, PLACE_POSITION
from .ll_message import HEADER, offset_among, place_message, publish_message, write_header
from .programs import (
    COMBINE_SEND,
    Message,
    MessageShape,
    await_ready,
    finish_one,
    last_peer,
    may_publish,
    stamp_of,
    tell_ready,
)
from .quant import load_together, store_floats
from .target import lanes
from .words import aligned, clock_ns, divide, floats, int32s, int64s, peek, poke, program_number, settle, uniform

_COMBINE, _TAG = tl.constexpr(LL_COMBINE), tl.constexpr(LowLatencyHeader.COMBINE_TAG)
_REDUCED, _F32 = tl.constexpr(FORM_REDUCED), tl.constexpr(DTYPE_F32)


@dataclass(frozen=True, kw_only=True, repr=False)
class CombineSendShape(MessageShape):
    """What :func:`combine_send` is compiled for.

    Attributes:
        HIDDEN, DTYPE: of a row of the experts. BLOCK: values summed at a time, half as many as words moved.
        TOGETHER: slots whose rows are loaded together.
    """

    HIDDEN: int
    DTYPE: int
    TOGETHER: int


@triton.jit
def _serve(one: Message, ticket: tl.tensor, start: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """What one of the first programs does for its source. True when there is something to pack."""
    context, state, route, source, number = one.context, one.state, one.route, one.peer, one.number
    ranks = rank_count(context)
    parity = number & 1
    if source == 0:
        poke(ticket, number)
    base = peek(route_table(route, R.RETURN_BASE, source))
    poke(state_table(state, T.COMBINE_BASE + parity, source), base)
    # the place is read again while waiting
    settle()
    good = has_failed_now(context) == 0
    live = is_live(context, source)
    free = tl.full((), 0, tl.int64)
    if good & live:
        before = tl.full((), 0, tl.int64)
        for first in range(0, ranks, lanes()):
            peers = first + tl.arange(0, lanes()).to(tl.int64)
            returned = int64s(route_table(route, R.RETURN_ROWS, peers))
            rows = tl.load(returned, mask=(peers < ranks) & (peers < source), other=0)
            before += tl.sum(rows.to(tl.int32), axis=0)
        staging = peek(state + S.COMBINE_SEND) + offset_among(source, source * HEADER + before * shape.ROW_BYTES)
        target = peek(state + S.COMBINE_RECV) + parity * peek(state + S.COMBINE_RECV_STEP)
        target += peek(route_table(route, R.RETURN_TO, source))
        nbytes = HEADER + peek(route_table(route, R.RETURN_ROWS, source)) * shape.ROW_BYTES
        place_message(one, staging, target, nbytes)
        free, good = tell_combines_free(context, state, source, start)
        if good:
            good = wait_space(context, state, source, _COMBINE, start)
    # rows are packed beside the header
    tell_ready(state, source, stamp_of(COMBINE_SEND, number), good & live)
    if good & live:
        message = peek(state_table(state, T.MESSAGE_AT, source))
        rows = peek(route_table(route, R.RETURN_ROWS, source))
        coding = (peek(route_table(route, R.RETURN_FORM, source)) << 8) | shape.DTYPE
        nowhere = tl.full((), 0, tl.int64)
        write_header(one, route, message, rows, coding, nowhere, free, _TAG)
    return good & live


@kernel(aligned=["context", "state", "route", "ticket", "x", "layout_range"])
def combine_send(
    context: tl.int64,
    state: tl.int64,
    route: tl.int64,
    ticket: tl.int64,
    x: tl.int64,
    layout_range: tl.int64,
    SHAPE: tl.constexpr,
) -> None:
    """Send the next combine message to every source; grid (R * any,). Compile without fused multiply-add: product and
    sum are rounded separately, as everywhere else.

    Args:
        ticket: address of the int64 where the message number is stored, for the receive.
        x: experts' output [L, R * T, HIDDEN] of DTYPE in the layout of recv_x, on a multiple of 16 bytes.
        layout_range: int64[L, R] of the dispatch.
        SHAPE: a :class:`CombineSendShape`.
    """
    start = clock_ns()
    ranks = rank_count(context)
    program = program_number(state + S.TICKETS, SHAPE.STARTS_IN_ORDER)
    part, source = divide(program, ranks)
    tokens = peek(route_table(route, R.RECEIVED, source))
    parts = divide(tl.num_programs(0), ranks)[0]
    # a program that has no row is none of those that are counted
    words: tl.constexpr = SHAPE.HIDDEN * (4 if SHAPE.DTYPE == _F32 else 2) // 4
    summed: tl.constexpr = (SHAPE.HIDDEN + SHAPE.BLOCK - 1) // SHAPE.BLOCK
    moved: tl.constexpr = (words + 2 * SHAPE.BLOCK - 1) // (2 * SHAPE.BLOCK)
    columns = tl.where(_is_reduced(route, source), summed, moved)
    working = tl.maximum(tl.minimum((tokens + SHAPE.ROWS - 1) // SHAPE.ROWS * columns, parts), 1)
    if part < working:
        number = peek(state + S.COMBINE_NUMBER)
        one = Message(context, state, route, source, number)
        if part == 0:
            told = tl.full((), 1, tl.int1)
            good = _serve(one, ticket, start, SHAPE)
        else:
            peers = source + tl.zeros([1], tl.int64)
            stamp, stream = stamp_of(COMBINE_SEND, number), stream_of(_COMBINE, number)
            known, ready = await_ready(context, state, peers, peers == peers, stamp, stream)
            told = uniform(tl.max(known.to(tl.int32), axis=0)) != 0
            good = uniform(tl.max(ready.to(tl.int32), axis=0)) != 0
        if good:
            _pack_rows(one, tokens, part, working, columns, x, layout_range, SHAPE)
            settle()
        # also where nothing may be said any more: an operation ends in every case
        if told:
            if finish_one(state, source) == working - 1:
                # what this program has acquired with its piece of work: for all threads
                settle()
                # read again, so that it is not kept meanwhile
                number = peek(state + S.COMBINE_NUMBER)
                if may_publish(state, source, stamp_of(COMBINE_SEND, number)):
                    publish_message(Message(context, state, route, source, number), _COMBINE, start)
                if last_peer(state, source, ranks):
                    poke(state + S.COMBINE_NUMBER, number + 1)


@triton.jit
def _is_reduced(route: tl.tensor, source: tl.tensor) -> tl.tensor:
    return peek(route_table(route, R.RETURN_FORM, source)) == _REDUCED


@triton.jit
def _expert_row(
    layout_range: tl.tensor, place: tl.tensor, source: tl.tensor, ranks: tl.tensor, capacity: tl.tensor
) -> tl.tensor:
    """Row of the experts' output, counted over all experts, that ``place`` names; 0 where there is none."""
    here = place >= 0
    expert = tl.where(here, place >> PLACE_EXPERT, 0).to(tl.int64)
    begin = peek(layout_range + 8 * (expert * ranks + source)) >> 32
    return tl.where(here, expert * capacity + begin + (place & PLACE_POSITION).to(tl.int64), 0)


@triton.jit
def _pack_rows(
    one: Message,
    tokens: tl.tensor,
    part: tl.tensor,
    parts: tl.tensor,
    columns: tl.tensor,
    x: tl.tensor,
    layout_range: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Pack each of ``parts`` parts of the rows for the source, which are cut in ``columns``. ``x`` and
    ``layout_range`` are those of the kernel."""
    route, source = one.route, one.peer
    first_row = peek(state_table(one.state, T.MESSAGE_AT, source)) + HEADER
    ranks, most = rank_count(one.context), peek(route + P.TOKENS)
    capacity = ranks * most
    width: tl.constexpr = 4 if shape.DTYPE == _F32 else 2
    places = route + peek(route + P.ROUTE_PLACES) + 4 * source * most * shape.TOPK
    reduced = _is_reduced(route, source)
    for piece in range(part, (tokens + shape.ROWS - 1) // shape.ROWS * columns, parts):
        # the interpreter counts loops in integers of Python
        block, column = divide(piece + tl.full((), 0, tl.int64), columns)
        index = block * shape.ROWS + tl.arange(0, shape.ROWS).to(tl.int64)
        inside = index < tokens
        if reduced:
            value = column * shape.BLOCK + tl.arange(0, shape.BLOCK)[None, :]
            weights = route + peek(route + P.ROUTE_WEIGHTS) + 4 * source * most * shape.TOPK
            wanted = inside[:, None] & (value < shape.HIDDEN)
            total = tl.zeros([shape.ROWS, shape.BLOCK], tl.float32)
            for first in range(0, shape.TOPK, shape.TOGETHER):
                sources, there, factors = (), (), ()
                for step in tl.static_range(shape.TOGETHER):
                    given = inside & (first + step < shape.TOPK)
                    at = 4 * (index * shape.TOPK + first + step)
                    place = tl.load(int32s(places + at), mask=given, other=-1)
                    # what is not there adds zero to a sum that is never -0
                    factor = tl.load(floats(weights + at), mask=place >= 0, other=0.0)
                    row = _expert_row(layout_range, place, source, ranks, capacity)
                    sources += (x + row * (shape.HIDDEN * width),)  # type: ignore[assignment]
                    there += (place >= 0,)  # type: ignore[assignment]
                    factors += (factor,)  # type: ignore[assignment]
                parts_ = load_together(sources, there, value, wanted, shape.DTYPE, shape.TOGETHER)
                for step in tl.static_range(shape.TOGETHER):
                    total += factors[step][:, None] * parts_[step]
            store_floats(first_row + index * shape.ROW_BYTES, value, total, wanted, shape.DTYPE)
        else:
            before = route + peek(route + P.ROUTE_BEFORE) + 4 * source * most
            pair = tl.load(int32s(before + 4 * index), mask=inside, other=0).to(tl.int64)
            # of another size than sums: the compiler would give a thread as many words as values, and would have words
            # change threads between load and store
            words: tl.constexpr = shape.HIDDEN * width // 4
            word = column * (2 * shape.BLOCK) + tl.arange(0, 2 * shape.BLOCK)[None, :]
            for slot in range(shape.TOPK):
                place = tl.load(int32s(places + 4 * (index * shape.TOPK + slot)), mask=inside, other=-1)
                begin = x + _expert_row(layout_range, place, source, ranks, capacity) * (shape.HIDDEN * width)
                new = place >= 0
                if shape.ONCE:
                    for other in range(slot):
                        at = 4 * (index * shape.TOPK + other)
                        new &= tl.load(int32s(places + at), mask=inside, other=-1) != place
                here = new[:, None] & (word < words)
                moved = tl.load(aligned(begin, tl.int32)[:, None] + word, mask=here, other=0)
                tl.store(aligned(first_row + pair * shape.ROW_BYTES, tl.int32)[:, None] + word, moved, mask=here)
                pair += new.to(tl.int64)
