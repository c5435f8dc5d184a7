"""Low-latency dispatch, receiving: one kernel puts the rows of each source where DeepEP has them, as the source's
message comes.

The rows of a local expert are contiguous, and those of one source follow each other as it has placed them. The first R
programs hear one source each: they wait for its message, check what it claims, and give its rows their places with each
expert: behind those that other sources have taken or, where order is asked for, behind those of all lower ranks. Then
they and all others of the source copy its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton import next_power_of_2

from ...protocol.message import (
    DTYPE_FP8,
    DTYPE_FP8_UE8M0,
    FORM_EXPANDED,
    FORM_REDUCED,
    PAIRS_SHIFT,
    PLACE_SHIFT,
    SCALE_BLOCK,
    LowLatencyHeader,
)
from ...protocol.streams import LL_DISPATCH
from .blocks import P, R, S, route_table
from .context import has_failed_now, is_live, landing_window, rank_count, stream_of
from .kernel import kernel
from .ll_counts import mark_read
from .ll_message import AT_CODING, AT_RETURN_OFFSET, AT_ROWS, HEADER, LOW, MARK, check_header, read_header, word_of
from .ll_routing import earlier_equal
from .programs import DISPATCH_RECV, Message, MessageShape, await_ready, finish_one, last_peer, stamp_of, tell_ready
from .target import lanes
from .wait import FAILURE_PROTOCOL, fail, wait_messages
from .words import aligned, clock_ns, divide, floats, int32s, int64s, peek, poke, program_number, settle, uniform

_DISPATCH, _TAG = tl.constexpr(LL_DISPATCH), tl.constexpr(LowLatencyHeader.DISPATCH_TAG)
_WEIGHTED = tl.constexpr(LowLatencyHeader.WEIGHTED)
_FP8, _UE8M0, _GROUP = tl.constexpr(DTYPE_FP8), tl.constexpr(DTYPE_FP8_UE8M0), tl.constexpr(SCALE_BLOCK)
_EXPANDED, _REDUCED = tl.constexpr(FORM_EXPANDED), tl.constexpr(FORM_REDUCED)
PLACE_EXPERT, PLACE_POSITION = tl.constexpr(PLACE_SHIFT), tl.constexpr((1 << PLACE_SHIFT) - 1)
_PAIRS_SHIFT = tl.constexpr(PAIRS_SHIFT)


@dataclass(frozen=True, kw_only=True, repr=False)
class DispatchRecvShape(MessageShape):
    """What :func:`dispatch_recv` is compiled for.

    Attributes:
        PAYLOAD: bytes of a row of recv_x. CODING: DTYPE_* that the rows must have.
    """

    PAYLOAD: int
    CODING: int


@triton.jit
def _landed(one: Message, source: tl.tensor) -> tl.tensor:
    """Address of the message of this number that comes from ``source``."""
    slot = (one.number & 1) * rank_count(one.context) + source
    first = landing_window(one.context, source) + peek(one.state + S.DISPATCH_RECV)
    return first + slot * peek(one.state + S.DISPATCH_SLOT)


@triton.jit
def _note(one: Message, rows: tl.tensor, back: tl.tensor, form: tl.tensor, returned: tl.tensor) -> None:
    """Into the route block: what the source has sent, and where and how that returns."""
    poke(route_table(one.route, R.RECEIVED, one.peer), rows)
    poke(route_table(one.route, R.RETURN_TO, one.peer), back)
    poke(route_table(one.route, R.RETURN_FORM, one.peer), form)
    poke(route_table(one.route, R.RETURN_ROWS, one.peer), returned)


@triton.jit
def _refuse(one: Message, got: tl.tensor, expected: tl.tensor) -> None:
    """The source claims what it must not."""
    fail(one.context, one.state, FAILURE_PROTOCOL, one.peer, stream_of(_DISPATCH, one.number), got, expected)


@triton.jit
def _most_pairs(one: Message, rows: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Pairs that ``rows`` tokens can have on this rank."""
    if shape.ONCE:
        return rows * peek(one.route + P.LOCAL)
    else:
        return rows * shape.TOPK


@triton.jit
def _take_header(one: Message, message: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Check what the source says, and note it in the route block. False when it is refused."""
    most = peek(one.route + P.TOKENS)
    words = read_header(message)
    coding, told, back = word_of(words, AT_CODING), word_of(words, AT_ROWS), word_of(words, AT_RETURN_OFFSET)
    got, expected = check_header(one, words, _TAG)
    rows, pairs = told & LOW, told >> _PAIRS_SHIFT
    form = tl.where((coding & _WEIGHTED) != 0, _REDUCED, _EXPANDED).to(tl.int64)
    returned = tl.where(form == _REDUCED, rows, pairs)
    room = peek(one.state + S.COMBINE_RECV_STEP) - HEADER - returned * peek(one.route + P.ROW)
    if (got == expected) & ((coding & ~_WEIGHTED) != shape.CODING):
        got, expected = MARK | coding & LOW, expected * 0 + (MARK | shape.CODING)
    if (got == expected) & (rows > most):
        got, expected = rows, most
    # no more rows return to a source than there is room for
    if (got == expected) & ((pairs < 0) | (pairs > _most_pairs(one, rows, shape))):
        got, expected = pairs, _most_pairs(one, rows, shape)
    if (got == expected) & ((back < 0) | ((back & 15) != 0) | (back > room)):
        got, expected = back, tl.where(back == 0, 1, 0).to(tl.int64)
    good = got == expected
    if good:
        _note(one, rows, back, form, returned)
    else:
        _refuse(one, got, expected)
    # all threads read them again
    settle()
    return good


@triton.jit
def _lay_out(one: Message, layout_range: tl.tensor, deterministic: tl.tensor) -> tl.tensor:
    """Where the rows of the source begin with each expert, and how many there are. False when the counts are
    refused."""
    ranks, rows = rank_count(one.context), peek(route_table(one.route, R.RECEIVED, one.peer))
    local, most = peek(one.route + P.LOCAL), peek(one.route + P.TOKENS).to(tl.int32)
    filled = one.route + peek(one.route + P.ROUTE_FILLED)
    counts = _landed(one, one.peer) + HEADER
    refused = tl.full((), 0, tl.int64)
    for first in range(0, local, lanes()):
        expert = first + tl.arange(0, lanes()).to(tl.int64)
        inside = expert < local
        count = tl.load(int32s(counts + 4 * expert), mask=inside, other=0)
        wrong = (count < 0) | (count > rows)
        worst = tl.max(tl.where(wrong, count, 0).to(tl.uint32, bitcast=True), axis=0)
        refused = tl.maximum(refused, worst.to(tl.int64))
        count = tl.where(wrong, 0, count)
        begin = tl.atomic_add(int32s(filled + 4 * expert), count, mask=inside, sem="relaxed", scope="gpu")
        if deterministic != 0:
            begin = tl.zeros([lanes()], tl.int32)
            for step in range(one.peer):
                lower = one.peer - 1 - step
                if is_live(one.context, lower):
                    theirs = _landed(one, lower) + HEADER
                    ahead = tl.load(int32s(theirs + 4 * expert), mask=inside, other=0)
                    # a rank that lies is refused by the program that hears it
                    begin += tl.minimum(tl.maximum(ahead, 0), most)
        entry = (begin.to(tl.int64) << 32) | count.to(tl.int64)
        tl.store(int64s(layout_range + 8 * (expert * ranks + one.peer)), entry, mask=inside)
    bad = uniform((refused != 0).to(tl.int32))
    if bad != 0:
        _refuse(one, refused, rows)
    return bad == 0


@triton.jit
def _hear(
    one: Message, layout_range: tl.tensor, waited: tl.tensor, deterministic: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    """What one of the first programs does for its source. True when there are rows to move. The tensors are arguments
    of the kernel."""
    start = clock_ns()
    context, state, source, number = one.context, one.state, one.peer, one.number
    good = has_failed_now(context) == 0
    live = is_live(context, source)
    if good:
        if live:
            # where order is asked for, the rows of lower ranks are counted first
            for first in range(0, source + 1, lanes()):
                peers = first + tl.arange(0, lanes()).to(tl.int64)
                mine = peers == source
                awaited = is_live(context, peers) & (mine | (peers < source * deterministic))
                if good:
                    good = wait_messages(context, state, peers, awaited, mine, _DISPATCH, number, waited, start, True)
            if good:
                message = _landed(one, source)
                good = _take_header(one, message, shape)
                if good:
                    good = _lay_out(one, layout_range, deterministic)
        else:
            # a lost source has sent nothing, and nothing returns to it
            zero = tl.full((), 0, tl.int64)
            _note(one, zero, zero, zero, zero)
            ranks = rank_count(context)
            for first in range(0, peek(one.route + P.LOCAL), lanes()):
                expert = first + tl.arange(0, lanes()).to(tl.int64)
                inside = expert < peek(one.route + P.LOCAL)
                none = tl.zeros([lanes()], tl.int64)
                tl.store(int64s(layout_range + 8 * (expert * ranks + source)), none, mask=inside)
    tell_ready(state, source, stamp_of(DISPATCH_RECV, number), good & live)
    return good & live


@triton.jit
def _close(one: Message, recv_count: tl.tensor, stats: tl.tensor) -> None:
    """The source is done with: the last one leaves the counts, which are zero after a failure."""
    route = one.route
    ranks = rank_count(one.context)
    if last_peer(one.state, one.peer, ranks):
        # what the others have stored, or have found wrong
        settle()
        good = has_failed_now(one.context) == 0
        filled, local = route + peek(route + P.ROUTE_FILLED), peek(route + P.LOCAL)
        for first in range(0, local, lanes()):
            expert = first + tl.arange(0, lanes()).to(tl.int64)
            inside = expert < local
            count = tl.where(good, tl.load(int32s(filled + 4 * expert), mask=inside, other=0), 0)
            tl.store(int32s(recv_count + 4 * expert), count, mask=inside)
            if stats != 0:
                sums = int32s(stats + 4 * expert)
                tl.store(sums, tl.load(sums, mask=inside, other=0) + count, mask=inside)
        if good:
            mark_read(one.state, S.DISPATCH_READ, S.DISPATCH_AHEAD, one.number)


@kernel(aligned=["context", "state", "route", "recv_x", "scales", "recv_count", "src_info", "layout_range"])
def dispatch_recv(
    context: tl.int64,
    state: tl.int64,
    route: tl.int64,
    recv_x: tl.int64,
    scales: tl.int64,
    recv_count: tl.int64,
    src_info: tl.int64,
    layout_range: tl.int64,
    stats: tl.int64,
    waited: tl.int64,
    deterministic: tl.int64,
    SHAPE: tl.constexpr,
) -> None:
    """Receive the dispatch message of every rank; grid (R * any,). So many arguments, because each tensor that it
    fills is one.

    Args:
        recv_x: [L, R * T, H], rows of PAYLOAD bytes without gaps.
        scales: FP8: float32 [L, H / 128, R * T]; UE8M0: int32 [L, H / 512, R * T], four exponents a word; else 0.
        recv_count: int32[L]. src_info: int32[L, R * T], token index at the source. layout_range: int64[L, R].
        stats: int32[L] to which counts are added, or 0. waited: int64[R] to which the nanoseconds waited for each
            source are added, or 0.
        deterministic: 1 = an expert's rows stand by source rank, 0 = by arrival.
        SHAPE: a :class:`DispatchRecvShape`.
    """
    stats, waited, deterministic = stats.to(tl.int64), waited.to(tl.int64), deterministic.to(tl.int64)
    ranks, number = rank_count(context), peek(route)
    program = program_number(state + S.TICKETS, SHAPE.STARTS_IN_ORDER)
    part, source = divide(program, ranks)
    one = Message(context, state, route, source, number)
    stamp, stream = stamp_of(DISPATCH_RECV, number), stream_of(_DISPATCH, number)
    if part == 0:
        good = _hear(one, layout_range, waited, deterministic, SHAPE)
    else:
        peers = source + tl.zeros([1], tl.int64)
        _, ready = await_ready(context, state, peers, peers == peers, stamp, stream)
        good = uniform(tl.max(ready.to(tl.int32), axis=0)) != 0
    # a source that was refused or lost is done with at once
    closes = (part == 0) & (good == 0)
    if good:
        tokens = peek(route_table(route, R.RECEIVED, source))
        parts = divide(tl.num_programs(0), ranks)[0]
        # a program that has no row is none of those that are counted
        working = tl.maximum(tl.minimum((tokens + SHAPE.ROWS - 1) // SHAPE.ROWS, parts), 1)
        if part < working:
            _copy_rows(one, part, working, recv_x, scales, src_info, layout_range, SHAPE)
            settle()
            closes = finish_one(state, source) == working - 1
    if closes:
        _close(one, recv_count, stats)


@triton.jit
def _copy_rows(
    one: Message,
    part: tl.tensor,
    parts: tl.tensor,
    recv_x: tl.tensor,
    scales: tl.tensor,
    src_info: tl.tensor,
    layout_range: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Copy each of ``parts`` parts of the rows of the source to their places, and keep what a combine needs of the
    metas."""
    route, source = one.route, one.peer
    ranks, most = rank_count(one.context), peek(route + P.TOKENS)
    capacity, local = ranks * most, peek(route + P.LOCAL)
    meta_size, tokens = peek(route + P.META), peek(route_table(route, R.RECEIVED, source))
    reduced = peek(route_table(route, R.RETURN_FORM, source)) == _REDUCED
    returned = peek(route_table(route, R.RETURN_ROWS, source))
    metas = _landed(one, source) + peek(route + P.FIRST_ROW)
    kept = source * most
    slot = tl.arange(0, shape.SLOTS)[None, :]
    for lowest in range(part * shape.ROWS, tokens, parts * shape.ROWS):
        index = lowest + tl.arange(0, shape.ROWS).to(tl.int64)
        inside = index < tokens
        meta = metas + index * (meta_size + shape.ROW_BYTES)
        given = inside[:, None] & (slot < shape.TOPK)
        origin = tl.load(int32s(meta), mask=inside, other=0)
        before = tl.load(int32s(meta + 4), mask=inside, other=0)
        place = tl.load(int32s(meta[:, None] + 8 + 4 * slot), mask=given, other=-1)
        expert, position = (place >> PLACE_EXPERT).to(tl.int64), (place & PLACE_POSITION).to(tl.int64)
        here = given & (place != -1)
        known = here & (place >= 0) & (expert < local)
        layout = tl.load(int64s(layout_range + 8 * (expert * ranks + source)), mask=known, other=0)
        right = known & (position < (layout & LOW))
        paired = here & (earlier_equal(place, shape.SLOTS) == 0) if shape.ONCE else here
        pairs = tl.sum(paired.to(tl.int32), axis=1)
        wrong = (origin < 0) | (origin >= most.to(tl.int32)) | (tl.sum((here & (right == 0)).to(tl.int32), axis=1) > 0)
        if reduced == 0:
            wrong |= (before < 0) | (before.to(tl.int64) + pairs > returned)
        if uniform(tl.max(wrong.to(tl.int32), axis=0)) != 0:
            _refuse(one, lowest, tokens)
        else:
            at = kept * shape.TOPK + index[:, None] * shape.TOPK + slot
            tl.store(int32s(route + peek(route + P.ROUTE_PLACES) + 4 * at), place, mask=given)
            if reduced:
                factors = tl.load(floats(meta[:, None] + 8 + 4 * shape.TOPK + 4 * slot), mask=given, other=0.0)
                tl.store(floats(route + peek(route + P.ROUTE_WEIGHTS) + 4 * at), factors, mask=given)
            else:
                tl.store(int32s(route + peek(route + P.ROUTE_BEFORE) + 4 * (kept + index)), before, mask=inside)
            row = tl.where(right, expert * capacity + (layout >> 32) + position, -1)
            tl.store(int32s(src_info + 4 * row), origin[:, None] + tl.zeros(row.shape, tl.int32), mask=right)
            _copy(meta + meta_size, row, inside, recv_x, scales, capacity, shape)


@triton.jit
def _copy(
    source: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    recv_x: tl.tensor,
    scales: tl.tensor,
    capacity: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Copy wire rows at ``source`` [rows] to rows ``row`` [rows, SLOTS] of recv_x, counted over all experts, -1 for
    none."""
    words: tl.constexpr = shape.PAYLOAD // 4
    quantised: tl.constexpr = (shape.CODING == _FP8) | (shape.CODING == _UE8M0)
    if quantised:
        # apart from the values: beside their stores, which lie elsewhere, values would change threads before each store
        groups: tl.constexpr = shape.PAYLOAD // (_GROUP if shape.CODING == _FP8 else 4 * _GROUP)
        group = tl.arange(0, next_power_of_2(groups))[None, :]
        some = inside[:, None] & (group < groups)
        scale = tl.load(aligned(source + shape.PAYLOAD, tl.int32)[:, None] + group, mask=some, other=0)
    for first in range(0, words, shape.BLOCK):
        word = first + tl.arange(0, shape.BLOCK)[None, :]
        wanted = inside[:, None] & (word < words)
        part = tl.load(aligned(source, tl.int32)[:, None] + word, mask=wanted, other=0)
        for index in range(shape.TOPK):
            place = _place_of(row, index)
            # most slots of a token live elsewhere
            if tl.max(place, axis=0) >= 0:
                target = recv_x + tl.maximum(place, 0).to(tl.int64) * shape.PAYLOAD
                tl.store(aligned(target, tl.int32)[:, None] + word, part, mask=(place >= 0)[:, None] & wanted)
    if quantised:
        for index in range(shape.TOPK):
            place = _place_of(row, index)
            if tl.max(place, axis=0) >= 0:
                expert, position = divide(tl.maximum(place, 0), capacity)
                column = scales + 4 * ((expert[:, None] * groups + group) * capacity + position[:, None])
                tl.store(int32s(column), scale, mask=(place >= 0)[:, None] & some)


@triton.jit
def _place_of(row: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Column ``index`` of ``row`` [rows, SLOTS], whose least value is -1 and which are fewer than 2^31. Not by
    :func:`.words.column_of`: for ROCm Triton 3.6 asks for less of a row at once beside that."""
    return tl.max(tl.where(tl.arange(0, row.shape[1])[None, :] == index, row.to(tl.int32), -1), axis=1)
