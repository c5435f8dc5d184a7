"""Low-latency combine, receiving side: each token is the sum of the rows that came back for it."""

from __future__ import annotations

import numpy as np

from ...native.atomics import copy, peek, zero
from ...native.jit import compiled
from ...protocol.context import STATUS_OK
from ...protocol.message import FORM_REDUCED, HEADER_BYTES, LowLatencyHeader
from ...protocol.streams import LL_COMBINE
from ..blocks.low_latency import (
    COMBINE_AHEAD,
    COMBINE_READ,
    COMBINE_RECV,
    COMBINE_RECV_STEP,
    COUNTS,
    FORM,
    HIDDEN,
    PAIRS,
    RETURN_BASE,
    RETURNS,
    SCRATCH,
    SENT_TOKENS,
    TOPK,
)
from .context import is_masked, rank_count, window_address
from .elements import float_view
from .ll_combine_send import SUM_BLOCK
from .ll_counts import mark_read, take_counts
from .ll_message import (
    AT_CODING,
    AT_CONSUMED_COMBINE,
    AT_CONSUMED_DISPATCH,
    AT_ROWS,
    check_origin,
    refuse,
    route_word,
    streams_of,
    wait_message,
)
from .quant import accumulate, narrow

__all__ = ["combine_recv"]

_COMBINE_TAG = LowLatencyHeader.COMBINE_TAG


@compiled
def _check_header(context: int, state: int, route: int, peer: int, number: int, header: int, coding: int) -> int:
    """Each word is read once: the peer could change it."""
    stream = streams_of(LL_COMBINE, number)
    status = check_origin(context, state, peer, stream, header, _COMBINE_TAG, number)
    if status != STATUS_OK:
        return status
    word = peek(header + AT_CODING)
    if word != coding:
        return refuse(context, peer, stream, word, coding)
    table = COUNTS if peek(route + 8 * FORM) == FORM_REDUCED else PAIRS
    rows = peek(route_word(context, route, table, peer))
    word = peek(header + AT_ROWS)
    if word != rows:
        return refuse(context, peer, stream, word, rows)
    dispatched, combined = peek(header + AT_CONSUMED_DISPATCH), peek(header + AT_CONSUMED_COMBINE)
    return take_counts(context, state, peer, stream, dispatched, combined)


@compiled
def _row_address(context: int, route: int, region: int, entry: int, row_bytes: int) -> int:
    """Address of the row that an entry of RETURNS names, 0 when there is none (no expert, or its rank is lost)."""
    if entry < 0:
        return 0
    rank = entry >> 32
    if is_masked(context, rank):
        return 0
    base = region + peek(route_word(context, route, RETURN_BASE, rank)) + HEADER_BYTES
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

    Args:
        weights: float32[tokens, K], used in the expanded form.
        out: [tokens, H], rows of ``payload`` bytes. dtype: DTYPE_* of out and of the rows on the wire.
        waited: int64[R] to which the nanoseconds spent waiting for each rank are added, or 0.

    Returns:
        STATUS_OK; STATUS_PENDING (progress block filled; call again); STATUS_POISONED; STATUS_PROTOCOL.
    """
    number = peek(ticket)
    form = peek(route + 8 * FORM)
    region = window_address(context) + peek(state + 8 * COMBINE_RECV)
    region += (number & 1) * peek(state + 8 * COMBINE_RECV_STEP)
    for peer in range(rank_count(context)):
        if is_masked(context, peer):
            continue
        status = wait_message(context, progress, peer, LL_COMBINE, number, waited, slice_end_ns)
        if status != STATUS_OK:
            return status
        header = region + peek(route_word(context, route, RETURN_BASE, peer))
        status = _check_header(context, state, route, peer, number, header, form << 8 | dtype)
        if status != STATUS_OK:
            return status
    topk, hidden, scratch = peek(state + 8 * TOPK), peek(state + 8 * HIDDEN), peek(state + 8 * SCRATCH)
    width = payload // hidden
    returns = peek(route + 8 * RETURNS)
    for token in range(peek(route + 8 * SENT_TOKENS)):
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
    mark_read(state, COMBINE_READ, COMBINE_AHEAD, number)
    return STATUS_OK
