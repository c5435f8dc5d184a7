"""Low-latency combine. Sending: the experts' rows return to each source, summed here when the weights are known.
Receiving: each token is the sum of the rows that came back for it.
"""

from __future__ import annotations

import numpy as np

from ...native.atomics import copy, peek, peek32, poke, zero
from ...native.jit import compiled
from ...protocol.context import STATUS_OK, STATUS_PENDING
from ...protocol.message import FORM_REDUCED, HEADER_BYTES, LowLatencyHeader
from ...protocol.streams import LL_COMBINE, NOTICE
from ..blocks import low_latency as block
from . import ll_message as ll
from .context import channel_count, is_masked, own_rank, peer_window, rank_count, window_address
from .elements import float_view
from .publish import message_address
from .quant import accumulate, narrow
from .wait import end_spin, note_progress
from .words import get, put

#: Values summed at a time.
SUM_BLOCK = block.SCRATCH_BYTES // 4

_COMBINE_TAG = LowLatencyHeader.COMBINE_TAG
_NO_PLACE = 0xFFFFFFFF  # -1 as read by peek32


@compiled
def _place_messages(context: int, state: int, route: int, number: int, row_bytes: int) -> None:
    """Where messages to the sources are packed, and where those of this rank's tokens will land."""
    base = 0
    for rank in range(rank_count(context)):
        poke(ll.route_word(context, route, block.COMBINE_STAGE, rank), base)
        nbytes = HEADER_BYTES + peek(ll.route_word(context, route, block.RETURN_ROWS, rank)) * row_bytes
        base += (nbytes + ll.MESSAGE_ALIGNMENT - 1) // ll.MESSAGE_ALIGNMENT * ll.MESSAGE_ALIGNMENT
        poke(
            ll.peer_word(context, state, block.COMBINE_BASE + (number & 1), rank),
            peek(ll.route_word(context, route, block.RETURN_BASE, rank)),
        )


@compiled
def _sum_token(
    row: int, places: int, weights: int, topk: int, x: int, payload: int, dtype: int, hidden: int, scratch: int
) -> None:
    """One row: float32 sum over the slots that live here, in slot order, rounded once."""
    width = payload // hidden
    factors = float_view(weights, topk)
    for first in range(0, hidden, SUM_BLOCK):
        count = min(SUM_BLOCK, hidden - first)
        zero(scratch, 4 * count)
        for slot in range(topk):
            place = peek32(places + 4 * slot)
            if place != _NO_PLACE:
                accumulate(scratch, x + place * payload + first * width, count, dtype, np.float32(factors[slot]))
        narrow(row + first * width, scratch, count, dtype)


@compiled
def _pack(
    context: int,
    state: int,
    route: int,
    source: int,
    message: int,
    x: int,
    payload: int,
    row_bytes: int,
    dtype: int,
) -> None:
    """Rows for ``source`` at address ``message``, and the header except for its number and counts."""
    topk, most = get(route, block.TOPK), get(route, block.TOKENS)
    form = peek(ll.route_word(context, route, block.RETURN_FORM, source))
    once = topk > get(route, block.EXPERTS) // rank_count(context)  # as routing.route() counts them
    places = get(route, block.PLACES) + 4 * source * most * topk
    weights = get(route, block.WEIGHTS) + 4 * source * most * topk
    poke(message + ll.AT_TAG, _COMBINE_TAG)
    poke(message + ll.AT_ROWS, peek(ll.route_word(context, route, block.RETURN_ROWS, source)))
    poke(message + ll.AT_CODING, form << 8 | dtype)
    poke(message + ll.AT_PLAN, get(route, block.PLAN))
    poke(message + ll.AT_RETURN_OFFSET, 0)
    row = message + HEADER_BYTES
    for _ in range(peek(ll.route_word(context, route, block.RECEIVED, source))):
        if form == FORM_REDUCED:
            _sum_token(
                row, places, weights, topk, x, payload, dtype, get(route, block.HIDDEN), get(state, block.SCRATCH)
            )
            row += row_bytes
        else:
            for slot in range(topk):
                place = peek32(places + 4 * slot)
                if place != _NO_PLACE and not (once and ll.is_repeated(places, slot)):
                    copy(row, x + place * payload, payload)
                    row += row_bytes
        places += 4 * topk
        weights += 4 * topk


@compiled
def combine_send(
    context: int,
    state: int,
    route: int,
    ticket: int,
    progress: int,
    x: int,
    payload: int,
    row_bytes: int,
    dtype: int,
    slice_end_ns: int,
) -> int:
    """Return the rows of a received dispatch to their sources, as the next combine message.

    Args:
        route: of the dispatch, received by ``dispatch_recv``.
        ticket: address of the int64 that combine_recv will get; the message number is stored there.
        x: experts' output [L, R * T, H] in the layout of recv_x, rows of ``payload`` bytes.
        row_bytes: bytes of a row on the wire. dtype: DTYPE_BF16, DTYPE_F16 or DTYPE_F32.

    Returns:
        STATUS_OK; STATUS_PENDING (progress block filled; call again, nothing is sent twice); STATUS_POISONED;
        STATUS_PROTOCOL.
    """
    ranks, me, channels = rank_count(context), own_rank(context), channel_count(context)
    number = get(state, block.COMBINE_NUMBER)
    poke(ticket, number)
    _place_messages(context, state, route, number, row_bytes)
    staging = get(state, block.COMBINE_SEND)
    region = get(state, block.COMBINE_RECV) + (number & 1) * get(state, block.COMBINE_RECV_STEP)
    spin = 0
    while True:
        missing = 0
        free = ll.spaces_free(context, state, progress)
        staging_free = ll.staging_is_free(context, progress, LL_COMBINE, number - 1)
        for step in range(1, ranks + 1):
            peer = (me + step) % ranks
            if is_masked(context, peer):
                continue
            packed = ll.peer_word(context, state, block.COMBINE_PACKED, peer)
            posted = ll.peer_word(context, state, block.COMBINE_POSTED, peer)
            sent_ack = ll.peer_word(context, state, block.SENT_ACK_COMBINE, peer)
            mapped = peer_window(context, peer) != 0
            source = staging + peek(ll.route_word(context, route, block.COMBINE_STAGE, peer))
            target = region + peek(ll.route_word(context, route, block.RETURN_TO, peer))
            if peek(packed) != number + 1:
                recv_ack = ll.peer_word(context, state, block.RECV_ACK_COMBINE, peer)
                if peek(recv_ack) < number - 1:
                    status = ll.read_acks(context, state, progress, peer, number + 1)
                    if status != STATUS_OK:
                        return status
                # Completed here: the peer may take this message as the proof that nothing of the one before is
                # repeated. Completed at all peers: the one before lies where this one is packed.
                # rule: combine space is written again only when the peer has freed it
                if peek(recv_ack) < number - 1:
                    # for this rank itself, read_acks() has noted the peer that holds back its space
                    if peer != me:
                        note_progress(progress, peer, NOTICE, peek(recv_ack), number - 1)
                # rule: a combine waits for the completion of the one before
                elif mapped or staging_free:
                    message = message_address(context, peer, source, target)
                    _pack(context, state, route, peer, message, x, payload, row_bytes, dtype)
                    poke(message + ll.AT_NUMBER, number)
                    ll.write_acks(context, state, peer, message, free)
                    poke(packed, number + 1)
                    poke(posted, number * channels)
            if peek(packed) == number + 1 and peek(posted) != (number + 1) * channels:
                nbytes = HEADER_BYTES + peek(ll.route_word(context, route, block.RETURN_ROWS, peer)) * row_bytes
                status = ll.post_message(context, peer, LL_COMBINE, number, posted, source, target, nbytes)
                if status == STATUS_PENDING:
                    note_progress(progress, peer, ll.streams_of(LL_COMBINE, number), number // 2, number // 2 + 1)
                elif status != STATUS_OK:
                    return status
            # Leaving without having told the peer would let it wait for this rank's next call.
            if peek(sent_ack) < number - 1 and peer != me and free >= number - 1:
                status = ll.send_notice(context, state, progress, peer, free)
                if status != STATUS_OK and status != STATUS_PENDING:
                    return status
            if peek(packed) != number + 1 or peek(posted) != (number + 1) * channels:
                missing += 1
            # rule: a combine send leaves only when it has told its peers what is free
            elif peek(sent_ack) < number - 1 and peer != me:
                missing += 1
                if free < number - 1:
                    ll.spaces_free(context, state, progress)
        if missing == 0:
            put(state, block.COMBINE_NUMBER, number + 1)
            return STATUS_OK
        if not staging_free:
            # again, for the progress block: a peer whose proxy or NIC takes nothing holds up the others as well
            ll.staging_is_free(context, progress, LL_COMBINE, number - 1)
        status = end_spin(context, spin, slice_end_ns)
        if status != STATUS_OK:
            return status
        spin += 1


@compiled
def _check_header(context: int, state: int, route: int, peer: int, number: int, header: int, coding: int) -> int:
    """Each word is read once: the peer could change it."""
    stream = ll.streams_of(LL_COMBINE, number)
    status = ll.check_origin(context, route, peer, stream, header, _COMBINE_TAG, number)
    if status != STATUS_OK:
        return status
    word = peek(header + ll.AT_CODING)
    if word != coding:
        return ll.refuse_coding(context, peer, stream, word, coding)
    table = block.COUNTS if get(route, block.FORM) == FORM_REDUCED else block.PAIRS
    rows = peek(ll.route_word(context, route, table, peer))
    word = peek(header + ll.AT_ROWS)
    if word != rows:
        return ll.refuse(context, peer, stream, word, rows)
    dispatched, combined = peek(header + ll.AT_CONSUMED_DISPATCH), peek(header + ll.AT_CONSUMED_COMBINE)
    return ll.take_acks(context, state, peer, stream, dispatched, combined)


@compiled
def _row_address(context: int, route: int, region: int, entry: int, row_bytes: int) -> int:
    """Address of the row that an entry of REturns names, 0 when there is none (no expert, or its rank is lost)."""
    if entry < 0:
        return 0
    rank = entry >> 32
    if is_masked(context, rank):
        return 0
    base = region + peek(ll.route_word(context, route, block.RETURN_BASE, rank)) + HEADER_BYTES
    return base + (entry & 0xFFFFFFFF) * row_bytes


@compiled
def combine_recv(
    context: int,
    state: int,
    route: int,
    ticket: int,
    progress: int,
    weights: int,
    out: int,
    payload: int,
    row_bytes: int,
    dtype: int,
    waited: int,
    slice_end_ns: int,
) -> int:
    """Receive the combine message of every rank and sum.

    Reduced form: plain float32 sum over ranks, ascending. Expanded form: weighted float32 sum over top-k slots in slot
    order. Rounded once; a token without experts is zero.

    Twelve arguments: blocks that outlive the call, then what this one is given, which the host puts into no block.

    Args:
        weights: float32[tokens, K], used in the expanded form.
        out: [tokens, H], rows of ``payload`` bytes. dtype: DTYPE_* of out and of the rows on the wire.
        waited: int64[R] to which the nanoseconds spent waiting for each rank are added, or 0.

    Returns:
        STATUS_OK; STATUS_PENDING (progress block filled; call again); STATUS_POISONED; STATUS_PROTOCOL.
    """
    number = peek(ticket)
    form = get(route, block.FORM)
    region = window_address(context) + get(state, block.COMBINE_RECV)
    region += (number & 1) * get(state, block.COMBINE_RECV_STEP)
    for peer in range(rank_count(context)):
        if is_masked(context, peer):
            continue
        status = ll.wait_message(context, progress, peer, LL_COMBINE, number, waited, slice_end_ns)
        if status != STATUS_OK:
            return status
        header = region + peek(ll.route_word(context, route, block.RETURN_BASE, peer))
        status = _check_header(context, state, route, peer, number, header, form << 8 | dtype)
        if status != STATUS_OK:
            return status
    topk, hidden, scratch = get(route, block.TOPK), get(route, block.HIDDEN), get(state, block.SCRATCH)
    width = payload // hidden
    returns = get(route, block.RETURNS)
    for token in range(get(route, block.SENT_TOKENS)):
        entries = returns + 8 * token * topk
        row = out + token * payload
        if form == FORM_REDUCED and (topk == 1 or peek(entries + 8) < 0):
            # at most one rank: the sum is the row itself
            only = _row_address(context, route, region, peek(entries), row_bytes)
            if only != 0:
                copy(row, only, payload)
            else:
                zero(row, payload)
            continue
        factors = float_view(weights + 4 * token * topk, topk)
        for first in range(0, hidden, SUM_BLOCK):
            count = min(SUM_BLOCK, hidden - first)
            zero(scratch, 4 * count)
            for index in range(topk):
                part = _row_address(context, route, region, peek(entries + 8 * index), row_bytes)
                if part != 0:
                    factor = np.float32(1.0) if form == FORM_REDUCED else factors[index]
                    accumulate(scratch, part + first * width, count, dtype, factor)
            narrow(row + first * width, scratch, count, dtype)
    ll.mark_read(state, block.COMBINE_READ, block.COMBINE_AHEAD, number)
    return STATUS_OK
