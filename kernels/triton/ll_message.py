"""Headers of low-latency messages: published by the last program of a send, checked by the first kernel of a receive.

That kernel is one program of one warp, which waits for every peer's message. What a header claims is read once and
checked, and the copy is what later kernels use: the peer could change it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import CODING_MARK, FORM_EXPANDED, FORM_REDUCED, LowLatencyHeader
from ...protocol.streams import LL_COMBINE, LL_DISPATCH
from .blocks import (
    P_PLAN,
    P_TOKENS,
    R_COUNTS,
    R_PAIRS,
    R_RECEIVED,
    R_RETURN_BASE,
    R_RETURN_FORM,
    R_RETURN_ROWS,
    R_RETURN_TO,
    S_COMBINE_RECV,
    S_COMBINE_RECV_STEP,
    S_DISPATCH_READ,
    S_DISPATCH_RECV,
    S_DISPATCH_SLOT,
    S_FREE,
    S_PARTS,
    S_SINK,
    T_COMBINE_COME,
    T_MESSAGE_AT,
    T_MESSAGE_BYTES,
    T_MESSAGE_FROM,
    T_MESSAGE_TO,
    T_RECV_ACK_COMBINE,
    T_RECV_ACK_DISPATCH,
    T_SENT_ACK_COMBINE,
    T_SENT_ACK_DISPATCH,
    route_table,
    state_table,
)
from .context import has_failed, is_live, landing_window, peer_window, rank_count, sticky_code_once, stream_of
from .kernel import kernel
from .ll_counts import take_acks
from .publish import put_messages
from .routing import HEADER
from .wait import refuse, wait_messages
from .words import clock_ns, int64s, peek, settle

AT_TAG, AT_NUMBER = tl.constexpr(8 * LowLatencyHeader.TAG), tl.constexpr(8 * LowLatencyHeader.NUMBER)
AT_ROWS, AT_CODING = tl.constexpr(8 * LowLatencyHeader.ROWS), tl.constexpr(8 * LowLatencyHeader.CODING)
AT_PLAN = tl.constexpr(8 * LowLatencyHeader.PLAN)
AT_RETURN_OFFSET = tl.constexpr(8 * LowLatencyHeader.RETURN_OFFSET)
AT_CONSUMED_DISPATCH = tl.constexpr(8 * LowLatencyHeader.CONSUMED_DISPATCH)
AT_CONSUMED_COMBINE = tl.constexpr(8 * LowLatencyHeader.CONSUMED_COMBINE)
DISPATCH_TAG = tl.constexpr(LowLatencyHeader.DISPATCH_TAG)
COMBINE_TAG = tl.constexpr(LowLatencyHeader.COMBINE_TAG)
WEIGHTED = tl.constexpr(LowLatencyHeader.WEIGHTED)
_MARK, _LOW = tl.constexpr(CODING_MARK), tl.constexpr(0xFFFFFFFF)


@triton.jit
def send_messages(
    context: tl.tensor,
    state: tl.tensor,
    route: tl.tensor,
    peers: tl.tensor,
    phase: tl.tensor,
    number: tl.tensor,
    tag: tl.tensor,
    rows: tl.tensor,
    coding: tl.tensor,
    return_offset: tl.tensor,
    BACKEND: tl.constexpr,
) -> None:
    """Complete the packed messages of the ``peers`` that are there with their headers, and publish them.

    ``rows``, ``coding`` and ``return_offset`` are tensors like ``peers``. Nothing is published once a proxy or the host
    has set the sticky error. Its arguments are blocks and the words of the headers.
    """
    zero = tl.zeros_like(peers)
    # as a tensor: the interpreter has no mask of a tensor and a scalar
    live = is_live(context, peers) & (zero + sticky_code_once(context) == 0)
    message = tl.load(int64s(state_table(context, state, T_MESSAGE_AT, peers)), mask=live, other=0)
    source = tl.load(int64s(state_table(context, state, T_MESSAGE_FROM, peers)), mask=live, other=0)
    target = tl.load(int64s(state_table(context, state, T_MESSAGE_TO, peers)), mask=live, other=0)
    nbytes = tl.load(int64s(state_table(context, state, T_MESSAGE_BYTES, peers)), mask=live, other=0)
    mapped = peer_window(context, tl.where(live, peers, 0)) != 0
    read, free = peek(state + S_DISPATCH_READ), peek(state + S_FREE)
    tl.store(int64s(message + AT_TAG), zero + tag, mask=live)
    tl.store(int64s(message + AT_NUMBER), zero + number, mask=live)
    tl.store(int64s(message + AT_ROWS), zero + rows, mask=live)
    tl.store(int64s(message + AT_CODING), zero + coding, mask=live)
    tl.store(int64s(message + AT_PLAN), zero + peek(route + P_PLAN), mask=live)
    tl.store(int64s(message + AT_RETURN_OFFSET), zero + return_offset, mask=live)
    tl.store(int64s(message + AT_CONSUMED_DISPATCH), zero + read, mask=live)
    tl.store(int64s(message + AT_CONSUMED_COMBINE), zero + free, mask=live)
    tl.store(int64s(state_table(context, state, T_SENT_ACK_DISPATCH, peers)), zero + read, mask=live)
    tl.store(int64s(state_table(context, state, T_SENT_ACK_COMBINE, peers)), zero + free, mask=live)
    settle(BACKEND)
    parts = peek(state + S_PARTS)
    put_messages(context, state, peers, live, mapped, phase, number, source, target, nbytes, parts, BACKEND)


_DISPATCH, _COMBINE = tl.constexpr(LL_DISPATCH), tl.constexpr(LL_COMBINE)
_EXPANDED, _REDUCED = tl.constexpr(FORM_EXPANDED), tl.constexpr(FORM_REDUCED)


@triton.jit
def _check_origin(
    context: tl.tensor,
    state: tl.tensor,
    route: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    stream: tl.tensor,
    header: tl.tensor,
    tag: tl.tensor,
    number: tl.tensor,
    BACKEND: tl.constexpr,
) -> None:
    """The message is of this kind, plan and number; and what it says of the receiver's own messages."""
    # before any of them is checked: a window in host memory is waited for once
    got_tag = tl.load(int64s(header + AT_TAG), mask=live, other=0)
    got_plan = tl.load(int64s(header + AT_PLAN), mask=live, other=0)
    got_number = tl.load(int64s(header + AT_NUMBER), mask=live, other=0)
    plan = peek(route + P_PLAN)
    refuse(context, state, peers, live & (got_tag != tag), stream, got_tag, tag, BACKEND)
    # rule: low latency: a message of another shape is refused
    refuse(context, state, peers, live & (got_plan != plan), stream, got_plan, plan, BACKEND)
    refuse(context, state, peers, live & (got_number != number), stream, got_number, number, BACKEND)
    dispatched_at = int64s(state_table(context, state, T_RECV_ACK_DISPATCH, peers))
    combined_at = int64s(state_table(context, state, T_RECV_ACK_COMBINE, peers))
    dispatched = tl.load(dispatched_at, mask=live, other=0)
    combined = tl.load(combined_at, mask=live, other=0)
    dispatched, combined, _ = take_acks(context, state, peers, live, header, stream, dispatched, combined, BACKEND)
    tl.store(dispatched_at, dispatched, mask=live)
    tl.store(combined_at, combined, mask=live)


@kernel(do_not_specialize=["waited"])
def dispatch_arrival(
    context: tl.int64,
    state: tl.int64,
    route: tl.int64,
    waited: tl.int64,
    CODING: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Wait for the dispatch message of every rank; grid (1,), one warp.

    ``waited``: address of int64[ranks] to which the nanoseconds waited for each source are added, or 0.
    """
    if has_failed(context) == 0:
        start = clock_ns(BACKEND)
        number, ranks = peek(route), rank_count(context)
        stream = stream_of(_DISPATCH, number)
        most, room = peek(route + P_TOKENS), peek(state + S_COMBINE_RECV_STEP)
        for first in range(0, ranks, LANES):
            peers = first + tl.arange(0, LANES).to(tl.int64)
            live = is_live(context, peers)
            if wait_messages(context, state, peers, live, _DISPATCH, number, waited, start, True, BACKEND):
                slot = (number & 1) * ranks + peers
                header = landing_window(context, tl.where(live, peers, 0))
                header += peek(state + S_DISPATCH_RECV) + slot * peek(state + S_DISPATCH_SLOT)
                header = tl.where(live, header, state + S_SINK)
                coding = tl.load(int64s(header + AT_CODING), mask=live, other=CODING)
                rows = tl.load(int64s(header + AT_ROWS), mask=live, other=0)
                back = tl.load(int64s(header + AT_RETURN_OFFSET), mask=live, other=0)
                _check_origin(context, state, route, peers, live, stream, header, DISPATCH_TAG, number, BACKEND)
                wrong = (coding & ~WEIGHTED) != CODING
                refuse(context, state, peers, wrong, stream, _MARK | coding & _LOW, _MARK | CODING, BACKEND)
                form = tl.where((coding & WEIGHTED) != 0, _REDUCED, _EXPANDED)
                refuse(context, state, peers, (rows < 0) | (rows > most), stream, rows, most, BACKEND)
                wrong = (back < 0) | ((back & 15) != 0) | (back > room - HEADER)
                refuse(context, state, peers, wrong, stream, back, 0, BACKEND)
                inside = peers < ranks
                # a lost source has sent nothing, and nothing returns to it
                zero = tl.zeros_like(peers)
                tl.store(int64s(route_table(context, route, R_RECEIVED, peers)), rows, mask=inside)
                tl.store(int64s(route_table(context, route, R_RETURN_TO, peers)), back, mask=inside)
                tl.store(int64s(route_table(context, route, R_RETURN_FORM, peers)), zero + form, mask=inside)
                tl.store(int64s(route_table(context, route, R_RETURN_ROWS, peers)), zero, mask=inside)


@kernel(do_not_specialize=["waited"])
def combine_arrival(
    context: tl.int64,
    state: tl.int64,
    route: tl.int64,
    ticket: tl.int64,
    waited: tl.int64,
    REDUCED: tl.constexpr,
    DTYPE: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """The same for the combine message whose number is at ``ticket``; its rows must be those that were sent."""
    if has_failed(context) == 0:
        start = clock_ns(BACKEND)
        number, ranks = peek(ticket), rank_count(context)
        stream = stream_of(_COMBINE, number)
        region = peek(state + S_COMBINE_RECV) + (number & 1) * peek(state + S_COMBINE_RECV_STEP)
        coding: tl.constexpr = ((_REDUCED if REDUCED else _EXPANDED) << 8) | DTYPE
        for first in range(0, ranks, LANES):
            peers = first + tl.arange(0, LANES).to(tl.int64)
            live = is_live(context, peers)
            if wait_messages(context, state, peers, live, _COMBINE, number, waited, start, True, BACKEND):
                come_at = int64s(state_table(context, state, T_COMBINE_COME + (number & 1), peers))
                come = tl.load(come_at, mask=live, other=0)
                tl.store(come_at, tl.maximum(come, number // 2 + 1), mask=live)
                base = tl.load(int64s(route_table(context, route, R_RETURN_BASE, peers)), mask=live, other=0)
                landing = landing_window(context, tl.where(live, peers, 0))
                header = tl.where(live, landing + region + base, state + S_SINK)
                got = tl.load(int64s(header + AT_CODING), mask=live, other=coding)
                rows = tl.load(int64s(header + AT_ROWS), mask=live, other=0)
                _check_origin(context, state, route, peers, live, stream, header, COMBINE_TAG, number, BACKEND)
                refuse(context, state, peers, got != coding, stream, _MARK | got & _LOW, _MARK | coding, BACKEND)
                table = R_COUNTS if REDUCED else R_PAIRS
                expected = tl.load(int64s(route_table(context, route, table, peers)), mask=live, other=0)
                refuse(context, state, peers, rows != expected, stream, rows, expected, BACKEND)
