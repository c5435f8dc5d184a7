"""Low-latency dispatch. Sending: one message per destination rank, packed and published as each becomes possible.
Receiving: check what the sources claim, then unpack into DeepEP's layout.

The rows of a local expert are contiguous, and those of one source follow each other in its token order: a source's rows
stand behind those of the sources that came before it or, where the caller asks for it, that have a lower rank.
"""

from __future__ import annotations

from ...native.atomics import copy, peek, peek32, poke, poke32, zero
from ...native.calls import monotonic_ns
from ...native.jit import compiled
from ...protocol.context import STATUS_OK, STATUS_PENDING
from ...protocol.message import (
    DTYPE_FP8,
    DTYPE_FP8_UE8M0,
    FORM_EXPANDED,
    FORM_REDUCED,
    HEADER_BYTES,
    PAIRS_SHIFT,
    PLACE_SHIFT,
    SCALE_BLOCK,
    LowLatencyHeader,
)
from ...protocol.streams import LL_DISPATCH, NOTICE
from ..blocks import low_latency as block
from . import ll_message as ll
from .context import channel_count, is_masked, own_rank, peer_window, rank_count, window_address
from .publish import message_address
from .wait import end_spin, note_progress
from .words import get, put

_DISPATCH_TAG = LowLatencyHeader.DISPATCH_TAG
_WEIGHTED = LowLatencyHeader.WEIGHTED
_ROWS = (1 << PAIRS_SHIFT) - 1
_POSITION = (1 << PLACE_SHIFT) - 1
_NO_EXPERT = 0xFFFFFFFF  # -1 as read by peek32


@compiled
def _place_messages(context: int, route: int, row_bytes: int) -> None:
    """Prefix sums over destinations: where messages are packed here, and where their answers will come back to. No
    source is unpacked yet."""
    send, back = 0, 0
    per_token = get(route, block.META) + row_bytes
    widest = get(route, block.ROW)
    rows_table = block.COUNTS if get(route, block.FORM) == FORM_REDUCED else block.PAIRS
    for rank in range(rank_count(context)):
        poke(ll.route_word(context, route, block.SEND_BASE, rank), send)
        poke(ll.route_word(context, route, block.RETURN_BASE, rank), back)
        poke(ll.route_word(context, route, block.TAKEN, rank), 0)
        nbytes = get(route, block.FIRST_ROW) + peek(ll.route_word(context, route, block.COUNTS, rank)) * per_token
        send += (nbytes + ll.MESSAGE_ALIGNMENT - 1) // ll.MESSAGE_ALIGNMENT * ll.MESSAGE_ALIGNMENT
        # the experts' output may have another dtype than the tokens: space for the widest that was planned
        nbytes = HEADER_BYTES + peek(ll.route_word(context, route, rows_table, rank)) * widest
        back += (nbytes + ll.MESSAGE_ALIGNMENT - 1) // ll.MESSAGE_ALIGNMENT * ll.MESSAGE_ALIGNMENT


@compiled
def _pack_header(context: int, route: int, peer: int, message: int, coding: int) -> None:
    """The header of the message to ``peer``, except for its number and counts."""
    poke(message + ll.AT_TAG, _DISPATCH_TAG)
    rows, pairs = ll.route_word(context, route, block.COUNTS, peer), ll.route_word(context, route, block.PAIRS, peer)
    poke(message + ll.AT_ROWS, peek(pairs) << PAIRS_SHIFT | peek(rows))
    poke(message + ll.AT_CODING, coding | (_WEIGHTED if get(route, block.FORM) == FORM_REDUCED else 0))
    poke(message + ll.AT_PLAN, get(route, block.PLAN))
    poke(message + ll.AT_RETURN_OFFSET, peek(ll.route_word(context, route, block.RETURN_BASE, peer)))


@compiled
def _pack_rows(
    context: int,
    route: int,
    peer: int,
    message: int,
    topk_idx: int,
    weights: int,
    rows: int,
    stride: int,
    payload: int,
    row_bytes: int,
) -> None:
    """The counts, metas and rows of the message to ``peer``: it gets the tokens of its list, in their order. Ten
    arguments, those of :func:`dispatch_send` that it concerns."""
    topk, meta_size = get(route, block.TOPK), get(route, block.META)
    local_experts = get(route, block.EXPERTS) // rank_count(context)
    lowest = peer * local_experts
    once = topk > local_experts  # as routing.route() counts them
    order = get(route, block.ORDER) + 4 * peek(ll.route_word(context, route, block.STARTS, peer))
    counts = message + HEADER_BYTES
    zero(counts, 4 * local_experts)
    meta = message + get(route, block.FIRST_ROW)
    pairs = 0
    for index in range(peek(ll.route_word(context, route, block.COUNTS, peer))):
        token = peek32(order + 4 * index)
        poke32(meta, token)
        poke32(meta + 4, pairs)
        for slot in range(topk):
            expert = peek(topk_idx + 8 * (token * topk + slot)) - lowest
            place = _NO_EXPERT
            if 0 <= expert < local_experts:
                # an expert that is named twice gets the row once, and both slots find it there
                for earlier in range(slot):
                    other = peek32(meta + 8 + 4 * earlier)
                    if other != _NO_EXPERT and other >> PLACE_SHIFT == expert:
                        place = other
                if place == _NO_EXPERT or not once:
                    pairs += 1
                if place == _NO_EXPERT:
                    position = peek32(counts + 4 * expert)
                    poke32(counts + 4 * expert, position + 1)
                    place = expert << PLACE_SHIFT | position
            poke32(meta + 8 + 4 * slot, place)
        if weights != 0:
            copy(meta + 8 + 4 * topk, weights + 4 * token * topk, 4 * topk)
        copy(meta + meta_size, rows + token * stride, payload)
        meta += meta_size + row_bytes


@compiled
def dispatch_send(
    context: int,
    state: int,
    route: int,
    progress: int,
    rows: int,
    stride: int,
    payload: int,
    row_bytes: int,
    topk_idx: int,
    weights: int,
    coding: int,
    slice_end_ns: int,
) -> int:
    """Send the next dispatch message to every rank. The route block has been filled by ``routing.route``.

    Twelve arguments: blocks that outlive the call, then what this one is given, which the host puts into no block.

    Args:
        rows: row of token t at ``rows + t * stride``, ``payload`` bytes that go out as rows of ``row_bytes`` bytes.
        topk_idx: int64[tokens, K], global expert ids.
        weights: float32[tokens, K], or 0 when the router weights are given at combine only.
        coding: DTYPE_* of the rows.

    Returns:
        STATUS_OK; STATUS_PENDING (progress block filled; call again, nothing is sent twice); STATUS_POISONED;
        STATUS_PROTOCOL.
    """
    ranks, me, channels = rank_count(context), own_rank(context), channel_count(context)
    number = get(state, block.DISPATCH_NUMBER)
    parity = number & 1
    put(route, block.NUMBER, number)
    _place_messages(context, route, row_bytes)
    staging = get(state, block.DISPATCH_SEND) + parity * get(state, block.DISPATCH_SEND_STEP)
    target = get(state, block.DISPATCH_RECV) + (parity * ranks + me) * get(state, block.DISPATCH_SLOT)
    per_token = get(route, block.META) + row_bytes
    free = ll.spaces_free(context, state, progress)
    spin = 0
    while True:
        missing = 0
        # rule: dispatch staging is packed again only when its last writes completed
        staging_free = ll.staging_is_free(context, progress, LL_DISPATCH, number - 2)
        # Everyone starts with its right neighbour, so that not all ranks write to the same one at first.
        for step in range(1, ranks + 1):
            peer = (me + step) % ranks
            if is_masked(context, peer):
                continue
            packed = ll.peer_word(context, state, block.DISPATCH_PACKED, peer)
            posted = ll.peer_word(context, state, block.DISPATCH_POSTED, peer)
            mapped = peer_window(context, peer)
            source = staging + peek(ll.route_word(context, route, block.SEND_BASE, peer))
            if peek(packed) != number + 1:
                recv_ack = ll.peer_word(context, state, block.RECV_ACK_DISPATCH, peer)
                if peek(recv_ack) < number - 1:
                    status = ll.read_acks(context, state, progress, peer, get(state, block.COMBINE_NUMBER))
                    if status != STATUS_OK:
                        return status
                # rule: a dispatch slot is written again only when the peer has read it
                if peek(recv_ack) < number - 1 or (mapped == 0 and not staging_free):
                    missing += 1
                    if peek(ll.peer_word(context, state, block.SENT_ACK_DISPATCH, peer)) < number - 1 and peer != me:
                        status = ll.send_notice(context, state, progress, peer, free)
                        if status != STATUS_OK and status != STATUS_PENDING:
                            return status
                    if peek(recv_ack) < number - 1:
                        note_progress(progress, peer, NOTICE, peek(recv_ack), number - 1)
                    else:
                        # again, for the progress block
                        staging_free = ll.staging_is_free(context, progress, LL_DISPATCH, number - 2)
                    continue
                message = message_address(context, peer, source, target)
                _pack_header(context, route, peer, message, coding)
                _pack_rows(context, route, peer, message, topk_idx, weights, rows, stride, payload, row_bytes)
                poke(message + ll.AT_NUMBER, number)
                ll.write_acks(context, state, peer, message, free)
                poke(packed, number + 1)
                poke(posted, number * channels)
            elif peek(posted) == (number + 1) * channels:
                continue
            count = peek(ll.route_word(context, route, block.COUNTS, peer))
            nbytes = get(route, block.FIRST_ROW) + count * per_token
            status = ll.post_message(context, peer, LL_DISPATCH, number, posted, source, target, nbytes)
            if status == STATUS_PENDING:
                missing += 1
                note_progress(progress, peer, ll.streams_of(LL_DISPATCH, number), number // 2, number // 2 + 1)
            elif status != STATUS_OK:
                return status
        if missing == 0:
            # rule: the send kernel counts its message
            put(state, block.DISPATCH_NUMBER, number + 1)
            return STATUS_OK
        status = end_spin(context, spin, slice_end_ns)
        if status != STATUS_OK:
            return status
        spin += 1


@compiled
def _take_header(context: int, state: int, route: int, source: int, number: int, header: int, coding: int) -> int:
    """Check a source's header and note what it says in the route block. Each word is read once: the peer could change
    it."""
    stream = ll.streams_of(LL_DISPATCH, number)
    status = ll.check_origin(context, route, source, stream, header, _DISPATCH_TAG, number)
    if status != STATUS_OK:
        return status
    word = peek(header + ll.AT_CODING)
    if word & ~_WEIGHTED != coding:
        return ll.refuse_coding(context, source, stream, word, coding)
    poke(
        ll.route_word(context, route, block.RETURN_FORM, source),
        FORM_REDUCED if word & _WEIGHTED else FORM_EXPANDED,
    )
    reduced = word & _WEIGHTED != 0
    word = peek(header + ll.AT_ROWS)
    rows, pairs = word & _ROWS, word >> PAIRS_SHIFT
    most = get(route, block.TOKENS)
    if rows > most:
        return ll.refuse(context, source, stream, rows, most)
    # no more rows return to a source than there is room for
    each = min(get(route, block.TOPK), get(route, block.EXPERTS) // rank_count(context))
    if pairs < 0 or pairs > rows * each:
        return ll.refuse(context, source, stream, pairs, rows * each)
    back = rows if reduced else pairs
    poke(ll.route_word(context, route, block.RECEIVED, source), rows)
    poke(ll.route_word(context, route, block.RETURN_ROWS, source), back)
    word = peek(header + ll.AT_RETURN_OFFSET)
    room = get(state, block.COMBINE_RECV_STEP) - HEADER_BYTES - back * get(route, block.ROW)
    if word < 0 or word & 15 or word > room:
        return ll.refuse(context, source, stream, word, 0)
    poke(ll.route_word(context, route, block.RETURN_TO, source), word)
    dispatched, combined = peek(header + ll.AT_CONSUMED_DISPATCH), peek(header + ll.AT_CONSUMED_COMBINE)
    return ll.take_acks(context, state, source, stream, dispatched, combined)


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
def _place_rows(
    context: int,
    route: int,
    source: int,
    message: int,
    row_bytes: int,
    recv_count: int,
    src_info: int,
    layout_range: int,
) -> int:
    """Check the counts and metas of a source's message, and give each of its rows a place with each of its experts:
    behind the rows that other sources have there already."""
    stream = ll.streams_of(LL_DISPATCH, get(route, block.NUMBER))
    ranks = rank_count(context)
    most, topk, meta_size = get(route, block.TOKENS), get(route, block.TOPK), get(route, block.META)
    local_experts = get(route, block.EXPERTS) // ranks
    once = topk > local_experts  # as routing.route() counts them
    capacity = ranks * most
    tokens = peek(ll.route_word(context, route, block.RECEIVED, source))
    weighted = peek(ll.route_word(context, route, block.RETURN_FORM, source)) == FORM_REDUCED
    places = get(route, block.PLACES) + 4 * source * most * topk
    weights = get(route, block.WEIGHTS) + 4 * source * most * topk
    for expert in range(local_experts):
        count = peek32(message + HEADER_BYTES + 4 * expert)
        if count > tokens:
            return ll.refuse(context, source, stream, count, tokens)
        begin = peek32(recv_count + 4 * expert)
        poke(layout_range + 8 * (expert * ranks + source), begin << 32 | count)
    pairs = 0
    meta = message + get(route, block.FIRST_ROW)
    for _ in range(tokens):
        token = peek32(meta)
        if token >= most:
            return ll.refuse(context, source, stream, token, most)
        for slot in range(topk):
            place = peek32(meta + 8 + 4 * slot)
            if place == _NO_EXPERT:
                poke32(places + 4 * slot, _NO_EXPERT)
                continue
            expert, position = place >> PLACE_SHIFT, place & _POSITION
            if expert >= local_experts:
                return ll.refuse(context, source, stream, expert, local_experts)
            layout = peek(layout_range + 8 * (expert * ranks + source))
            if position >= layout & _ROWS:
                return ll.refuse(context, source, stream, position, layout & _ROWS)
            place = expert * capacity + (layout >> 32) + position
            poke32(src_info + 4 * place, token)
            poke32(places + 4 * slot, place)
            if not once or not ll.is_repeated(places, slot):
                pairs += 1
        if weighted:
            copy(weights, meta + 8 + 4 * topk, 4 * topk)
        places += 4 * topk
        weights += 4 * topk
        meta += meta_size + row_bytes
    back = peek(ll.route_word(context, route, block.RETURN_ROWS, source))
    if not weighted and pairs != back:
        return ll.refuse(context, source, stream, pairs, back)
    for expert in range(local_experts):
        layout = peek(layout_range + 8 * (expert * ranks + source))
        poke32(recv_count + 4 * expert, (layout >> 32) + (layout & _ROWS))
    return STATUS_OK


@compiled
def _unpack_rows(
    context: int,
    route: int,
    source: int,
    message: int,
    coding: int,
    recv_x: int,
    payload: int,
    row_bytes: int,
    scales: int,
) -> None:
    """Copy the rows of a source's message to the places that :func:`_place_rows` gave them."""
    most, topk, hidden = get(route, block.TOKENS), get(route, block.TOPK), get(route, block.HIDDEN)
    capacity = rank_count(context) * most
    places = get(route, block.PLACES) + 4 * source * most * topk
    row = message + get(route, block.FIRST_ROW) + get(route, block.META)
    for _ in range(peek(ll.route_word(context, route, block.RECEIVED, source))):
        for slot in range(topk):
            place = peek32(places + 4 * slot)
            if place != _NO_EXPERT:
                _unpack_row(row, place, recv_x, payload, scales, coding, hidden, capacity)
        places += 4 * topk
        row += get(route, block.META) + row_bytes


@compiled
def _skip_masked(context: int, route: int, source: int, recv_count: int, layout_range: int) -> None:
    """A lost source has sent nothing, and nothing returns to it: every word that combine reads says so."""
    ranks = rank_count(context)
    for table in (block.RECEIVED, block.RETURN_ROWS, block.RETURN_TO, block.RETURN_FORM):
        poke(ll.route_word(context, route, table, source), 0)
    for expert in range(get(route, block.EXPERTS) // ranks):
        poke(layout_range + 8 * (expert * ranks + source), peek32(recv_count + 4 * expert) << 32)


@compiled
def _note_wait(waited: int, source: int, since: int) -> None:
    if waited != 0:
        poke(waited + 8 * source, peek(waited + 8 * source) + monotonic_ns() - since)


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
    in_order: int,
    slice_end_ns: int,
) -> int:
    """Receive the dispatch message of every rank, for the dispatch that ``route`` belongs to: each as it comes.

    Sixteen arguments: blocks that outlive the call, then each tensor that it fills.

    Args:
        coding: DTYPE_* that the rows must have.
        recv_x: [L, R * T, H], rows of ``payload`` bytes without gaps.
        scales: FP8: float32 [L, H / 128, R * T]; UE8M0: int32 [L, H / 512, R * T], four exponents a word; else 0.
        recv_count: int32[L], zero at first; src_info: int32[L, R * T], token index at the source;
            layout_range: int64[L, R], begin << 32 | count of a source's rows within an expert's.
        stats: int32[L] to which the counts are added, or 0.
        waited: int64[R] to which the nanoseconds until each source's message was here are added, or 0.
        in_order: 1 = an expert's rows stand by source rank; else by arrival.

    Returns:
        STATUS_OK; STATUS_PENDING (progress block filled; call again); STATUS_POISONED; STATUS_PROTOCOL.
    """
    ranks = rank_count(context)
    number = get(route, block.NUMBER)
    slots = window_address(context) + get(state, block.DISPATCH_RECV)
    since = monotonic_ns() if waited != 0 else 0
    spin = 0
    while get(route, block.UNPACKED) < ranks:
        unpacked = get(route, block.UNPACKED)
        for source in range(ranks):
            taken = ll.route_word(context, route, block.TAKEN, source)
            if peek(taken) != 0:
                continue
            # rule: where order is asked for, a source is unpacked after those before it
            if in_order and source != get(route, block.UNPACKED):
                continue
            if is_masked(context, source):
                _skip_masked(context, route, source, recv_count, layout_range)
            elif ll.has_arrived(context, progress, source, LL_DISPATCH, number):
                _note_wait(waited, source, since)
                message = slots + ((number & 1) * ranks + source) * get(state, block.DISPATCH_SLOT)
                status = _take_header(context, state, route, source, number, message, coding)
                if status == STATUS_OK:
                    status = _place_rows(context, route, source, message, row_bytes, recv_count, src_info, layout_range)
                if status != STATUS_OK:
                    return status
                _unpack_rows(context, route, source, message, coding, recv_x, payload, row_bytes, scales)
            else:
                continue
            poke(taken, 1)
            put(route, block.UNPACKED, get(route, block.UNPACKED) + 1)
        if get(route, block.UNPACKED) == unpacked:
            status = end_spin(context, spin, slice_end_ns)
            spin += 1
            if status != STATUS_OK:
                for source in range(ranks):
                    if peek(ll.route_word(context, route, block.TAKEN, source)) == 0:
                        _note_wait(waited, source, since)
                return status
    ll.mark_read(state, block.DISPATCH_READ, block.DISPATCH_AHEAD, number)
    if stats != 0:
        for expert in range(get(route, block.EXPERTS) // ranks):
            poke32(stats + 4 * expert, peek32(stats + 4 * expert) + peek32(recv_count + 4 * expert))
    return STATUS_OK
