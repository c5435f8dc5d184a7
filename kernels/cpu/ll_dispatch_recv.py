"""Low-latency dispatch, receiving side: check what the sources claim, then unpack into DeepEP's layout.

The rows of a local expert are contiguous: those of source 0 in its token order, then those of source 1, and so on,
whatever order messages arrive in.
"""

from __future__ import annotations

from ...native.atomics import copy, peek, peek32, poke, poke32
from ...native.jit import compiled
from ...protocol.context import STATUS_OK
from ...protocol.message import (
    DTYPE_FP8,
    DTYPE_FP8_UE8M0,
    FORM_EXPANDED,
    FORM_REDUCED,
    HEADER_BYTES,
    SCALE_BLOCK,
    LowLatencyHeader,
)
from ...protocol.streams import LL_DISPATCH
from ..blocks.low_latency import (
    COMBINE_RECV_STEP,
    DISPATCH_AHEAD,
    DISPATCH_READ,
    DISPATCH_RECV,
    DISPATCH_SLOT,
    EXPERTS,
    HIDDEN,
    META,
    NUMBER,
    PLACES,
    RECEIVED,
    RETURN_FORM,
    RETURN_ROWS,
    RETURN_TO,
    ROW,
    TOKENS,
    TOPK,
    UNPACKED,
    WEIGHTS,
)
from .context import is_masked, own_rank, rank_count, window_address
from .ll_counts import mark_read, take_counts
from .ll_message import (
    AT_CODING,
    AT_CONSUMED_COMBINE,
    AT_CONSUMED_DISPATCH,
    AT_RETURN_OFFSET,
    AT_ROWS,
    check_origin,
    refuse,
    route_word,
    streams_of,
    wait_message,
)

__all__ = ["dispatch_recv"]

_DISPATCH_TAG = LowLatencyHeader.DISPATCH_TAG
_WEIGHTED = LowLatencyHeader.WEIGHTED
_NO_EXPERT = 0xFFFFFFFF  # -1 as read by peek32
_NOWHERE = -1


@compiled
def _take_header(context: int, state: int, route: int, source: int, number: int, header: int, coding: int) -> int:
    """Check a source's header and note what it says in the route block. Each word is read once: the peer could change
    it."""
    stream = streams_of(LL_DISPATCH, number)
    status = check_origin(context, state, source, stream, header, _DISPATCH_TAG, number)
    if status != STATUS_OK:
        return status
    word = peek(header + AT_CODING)
    if word & ~_WEIGHTED != coding:
        return refuse(context, source, stream, word, coding)
    poke(
        route_word(context, route, RETURN_FORM, source),
        FORM_REDUCED if word & _WEIGHTED else FORM_EXPANDED,
    )
    word = peek(header + AT_ROWS)
    if word < 0 or word > peek(state + 8 * TOKENS):
        return refuse(context, source, stream, word, peek(state + 8 * TOKENS))
    poke(route_word(context, route, RECEIVED, source), word)
    word = peek(header + AT_RETURN_OFFSET)
    if word < 0 or word & 15 or word > peek(state + 8 * COMBINE_RECV_STEP) - HEADER_BYTES:
        return refuse(context, source, stream, word, 0)
    poke(route_word(context, route, RETURN_TO, source), word)
    dispatched, combined = peek(header + AT_CONSUMED_DISPATCH), peek(header + AT_CONSUMED_COMBINE)
    return take_counts(context, state, source, stream, dispatched, combined)


@compiled
def _unpack_row(
    row: int, place: int, recv_x: int, payload: int, scales: int, coding: int, hidden: int, capacity: int
) -> None:
    """Copy one wire row to row ``place`` of recv_x, and its scales into their column.

    ``place`` = local expert * capacity + position; scale columns are [expert, group, position] in memory.
    """
    copy(recv_x + place * payload, row, payload)
    if coding == DTYPE_FP8:
        groups = hidden // SCALE_BLOCK
    elif coding == DTYPE_FP8_UE8M0:
        # four exponent bytes at a time are one int32 of the packed layout
        groups = hidden // (4 * SCALE_BLOCK)
    else:
        return
    expert, position = place // capacity, place % capacity
    for group in range(groups):
        poke32(
            scales + 4 * ((expert * groups + group) * capacity + position),
            peek32(row + payload + 4 * group),
        )


@compiled
def _unpack(
    context: int,
    state: int,
    route: int,
    source: int,
    number: int,
    message: int,
    coding: int,
    recv_x: int,
    payload: int,
    row_bytes: int,
    scales: int,
    recv_count: int,
    src_info: int,
    layout_range: int,
) -> int:
    """Check the metas of a source's message and copy its rows to their experts."""
    stream = streams_of(LL_DISPATCH, number)
    ranks, me = rank_count(context), own_rank(context)
    most, topk = peek(state + 8 * TOKENS), peek(state + 8 * TOPK)
    hidden, meta_size = peek(state + 8 * HIDDEN), peek(state + 8 * META)
    local_experts = peek(state + 8 * EXPERTS) // ranks
    capacity = ranks * most
    tokens = peek(route_word(context, route, RECEIVED, source))
    weighted = peek(route_word(context, route, RETURN_FORM, source)) == FORM_REDUCED
    places = peek(route + 8 * PLACES) + 4 * source * most * topk
    weights = peek(route + 8 * WEIGHTS) + 4 * source * most * topk
    for expert in range(local_experts):
        poke(layout_range + 8 * (expert * ranks + source), peek32(recv_count + 4 * expert))
    pairs = 0
    meta = message + HEADER_BYTES
    row = meta + tokens * meta_size
    for _ in range(tokens):
        token = peek32(meta)
        if token >= most:
            return refuse(context, source, stream, token, most)
        for slot in range(topk):
            expert = peek32(meta + 4 + 4 * slot)
            if expert == _NO_EXPERT:
                poke32(places + 4 * slot, _NOWHERE)
                continue
            expert -= me * local_experts
            if expert < 0 or expert >= local_experts:
                return refuse(context, source, stream, expert + me * local_experts, local_experts)
            pairs += 1
            place = -1
            # an expert that was named twice gets the row once, and both slots find it there
            for earlier in range(slot):
                other = peek32(places + 4 * earlier)
                if other != _NO_EXPERT and other // capacity == expert:
                    place = other
            if place < 0:
                position = peek32(recv_count + 4 * expert)
                poke32(recv_count + 4 * expert, position + 1)
                place = expert * capacity + position
                poke32(src_info + 4 * place, token)
                _unpack_row(row, place, recv_x, payload, scales, coding, hidden, capacity)
            poke32(places + 4 * slot, place)
        if weighted:
            copy(weights, meta + 4 + 4 * topk, 4 * topk)
        places += 4 * topk
        weights += 4 * topk
        meta += meta_size
        row += row_bytes
    for expert in range(local_experts):
        entry = layout_range + 8 * (expert * ranks + source)
        begin = peek(entry)
        poke(entry, begin << 32 | (peek32(recv_count + 4 * expert) - begin))
    back = tokens if weighted else pairs
    poke(route_word(context, route, RETURN_ROWS, source), back)
    room = peek(state + 8 * COMBINE_RECV_STEP) - peek(route_word(context, route, RETURN_TO, source))
    if HEADER_BYTES + back * peek(state + 8 * ROW) > room:
        return refuse(context, source, stream, HEADER_BYTES + back * peek(state + 8 * ROW), room)
    return STATUS_OK


@compiled
def _skip_masked(context: int, state: int, route: int, source: int, recv_count: int, layout_range: int) -> None:
    """A lost source has sent nothing, and nothing returns to it: every word that combine reads says so."""
    ranks = rank_count(context)
    for table in (RECEIVED, RETURN_ROWS, RETURN_TO, RETURN_FORM):
        poke(route_word(context, route, table, source), 0)
    for expert in range(peek(state + 8 * EXPERTS) // ranks):
        poke(layout_range + 8 * (expert * ranks + source), peek32(recv_count + 4 * expert) << 32)


@compiled
def dispatch_recv(
    context: int,
    state: int,
    route: int,
    progress: int,
    coding: int,
    recv_x: int,
    payload: int,
    row_bytes: int,
    scales: int,
    recv_count: int,
    src_info: int,
    layout_range: int,
    stats: int,
    waited: int,
    slice_end_ns: int,
) -> int:
    """Receive the dispatch message of every rank, for the dispatch that ``route`` belongs to.

    Args:
        coding: DTYPE_* that the rows must have.
        recv_x: [L, R * T, H], rows of ``payload`` bytes without gaps.
        scales: FP8: float32 [L, H / 128, R * T]; UE8M0: int32 [L, H / 512, R * T], four exponents a word; else 0.
        recv_count: int32[L], zero at first; src_info: int32[L, R * T], token index at the source;
            layout_range: int64[L, R], begin << 32 | count of a source's rows within an expert's.
        stats: int32[L] to which the counts are added, or 0.
        waited: int64[R] to which the nanoseconds spent waiting for each source are added, or 0.

    Returns:
        STATUS_OK; STATUS_PENDING (progress block filled; call again); STATUS_POISONED; STATUS_PROTOCOL.
    """
    ranks = rank_count(context)
    number = peek(route + 8 * NUMBER)
    slots = window_address(context) + peek(state + 8 * DISPATCH_RECV)
    while peek(route + 8 * UNPACKED) < ranks:
        source = peek(route + 8 * UNPACKED)
        if is_masked(context, source):
            _skip_masked(context, state, route, source, recv_count, layout_range)
        else:
            status = wait_message(context, progress, source, LL_DISPATCH, number, waited, slice_end_ns)
            if status != STATUS_OK:
                return status
            message = slots + ((number & 1) * ranks + source) * peek(state + 8 * DISPATCH_SLOT)
            status = _take_header(context, state, route, source, number, message, coding)
            if status != STATUS_OK:
                return status
            status = _unpack(
                context,
                state,
                route,
                source,
                number,
                message,
                coding,
                recv_x,
                payload,
                row_bytes,
                scales,
                recv_count,
                src_info,
                layout_range,
            )
            if status != STATUS_OK:
                return status
        poke(route + 8 * UNPACKED, source + 1)
    mark_read(state, DISPATCH_READ, DISPATCH_AHEAD, number)
    if stats != 0:
        for expert in range(peek(state + 8 * EXPERTS) // ranks):
            poke32(stats + 4 * expert, peek32(stats + 4 * expert) + peek32(recv_count + 4 * expert))
    return STATUS_OK
