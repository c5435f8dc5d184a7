"""Headers of low-latency messages: written for every peer at once by the last program of a send, and published."""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import LowLatencyHeader
from .context import (
    S_DIGEST,
    S_DISPATCH_READ,
    S_FREE,
    S_PARTS,
    T_MESSAGE_AT,
    T_MESSAGE_BYTES,
    T_MESSAGE_FROM,
    T_MESSAGE_TO,
    T_TOLD_COMBINE,
    T_TOLD_DISPATCH,
    is_live,
    peer_window,
    state_table,
    sticky_code_once,
)
from .publish import put_messages
from .words import int64s, peek, settle

AT_TAG, AT_NUMBER = tl.constexpr(8 * LowLatencyHeader.TAG), tl.constexpr(8 * LowLatencyHeader.NUMBER)
AT_ROWS, AT_CODING = tl.constexpr(8 * LowLatencyHeader.ROWS), tl.constexpr(8 * LowLatencyHeader.CODING)
AT_PLAN = tl.constexpr(8 * LowLatencyHeader.PLAN)
AT_RETURN_OFFSET = tl.constexpr(8 * LowLatencyHeader.RETURN_OFFSET)
AT_CONSUMED_DISPATCH = tl.constexpr(8 * LowLatencyHeader.CONSUMED_DISPATCH)
AT_CONSUMED_COMBINE = tl.constexpr(8 * LowLatencyHeader.CONSUMED_COMBINE)
DISPATCH_TAG = tl.constexpr(LowLatencyHeader.DISPATCH_TAG)
COMBINE_TAG = tl.constexpr(LowLatencyHeader.COMBINE_TAG)
WEIGHTED = tl.constexpr(LowLatencyHeader.WEIGHTED)


@triton.jit
def send_messages(
    context: tl.tensor,
    state: tl.tensor,
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
    has set the sticky error.
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
    tl.store(int64s(message + AT_PLAN), zero + peek(state + S_DIGEST), mask=live)
    tl.store(int64s(message + AT_RETURN_OFFSET), zero + return_offset, mask=live)
    tl.store(int64s(message + AT_CONSUMED_DISPATCH), zero + read, mask=live)
    tl.store(int64s(message + AT_CONSUMED_COMBINE), zero + free, mask=live)
    tl.store(int64s(state_table(context, state, T_TOLD_DISPATCH, peers)), zero + read, mask=live)
    tl.store(int64s(state_table(context, state, T_TOLD_COMBINE, peers)), zero + free, mask=live)
    settle(BACKEND)
    parts = peek(state + S_PARTS)
    put_messages(context, state, peers, live, mapped, phase, number, source, target, nbytes, parts, BACKEND)
