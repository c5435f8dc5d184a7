"""The end of a row exchange: what steps are left, then all writes over, then the counters move on."""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import NormalNotify
from ...protocol.streams import NORMAL_NOTIFY
from .blocks import (
    N_CHUNK_ROWS,
    N_CHUNKS_SENT,
    N_CHUNKS_TAKEN,
    N_RECV_ROWS,
    W_MISSED_COMBINE_STEPS,
    W_MISSED_DISPATCH_STEPS,
    W_NOTICES,
    W_NUMBER,
    W_OPEN,
    W_RAN,
    W_STREAM,
    get_each,
    set_each,
)
from .context import channel_count, has_failed, is_live, own_rank, rank_count
from .kernel import kernel
from .normal_rows import UNALIGNED, RowShape, RowTensors, move
from .normal_step import released, run_step, send_message, share_of, wait_counts
from .words import clock_ns, peek, poke, settle

_COMBINE = tl.constexpr(NormalNotify.OPERATION_COMBINE)
_NOTIFY = tl.constexpr(NORMAL_NOTIFY)


@triton.jit
def close(
    context: tl.tensor,
    state: tl.tensor,
    late: tl.tensor,
    KIND: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """See all own writes over and, after a dispatch, tell the peers so; then the counters move on. ``late`` steps were
    taken by the last kernel."""
    start = clock_ns(BACKEND)
    ranks, me, channels = rank_count(context), own_rank(context), channel_count(context)
    number, notices, stream = peek(state + W_NUMBER), peek(state + W_NOTICES), peek(state + W_STREAM)
    going = tl.full((), 1, tl.int32)
    if KIND == _COMBINE:
        phase, told = 1, 1
        poke(state + W_MISSED_COMBINE_STEPS, peek(state + W_MISSED_COMBINE_STEPS) + late)
    else:
        phase, told = 0, 2
        poke(state + W_MISSED_DISPATCH_STEPS, peek(state + W_MISSED_DISPATCH_STEPS) + late)
    for first in range(0, ranks, LANES):
        peers = first + tl.arange(0, LANES).to(tl.int64)
        zero = tl.zeros_like(peers)
        live = is_live(context, peers) & (peers != me)
        chunks = get_each(context, state, N_CHUNKS_SENT + phase, peers, live)
        for channel in range(channels):
            if going != 0:
                needed = share_of(chunks, channel, channels)
                done = wait_counts(context, state, peers, live, stream + channel, needed, start, False, BACKEND)
                going = done.to(tl.int32)
        if (KIND != _COMBINE) & (going != 0):
            if released(context, state, BACKEND) == 0:
                # a NIC may repeat a write until it completes; who received in place must know that it is over
                done = send_message(
                    context, state, peers, live, _NOTIFY, zero, zero, zero, zero + notices + 2, start, LANES, BACKEND
                )
                going = done.to(tl.int32)
            else:
                going = tl.full((), 0, tl.int32)
    for first in range(0, ranks, LANES):
        peers = first + tl.arange(0, LANES).to(tl.int64)
        zero = tl.zeros_like(peers)
        live = is_live(context, peers) & (peers != me)
        if going != 0:
            needed = zero + notices + told
            going = wait_counts(context, state, peers, live, _NOTIFY, needed, start, False, BACKEND).to(tl.int32)
        received = get_each(context, state, N_RECV_ROWS, peers, live)
        chunk = tl.maximum(get_each(context, state, N_CHUNK_ROWS, peers, live), 1)
        taken = get_each(context, state, N_CHUNKS_TAKEN + phase, peers, live)
        set_each(context, state, N_CHUNKS_TAKEN + phase, peers, live, taken + (received + chunk - 1) // chunk)
    poke(state + W_NUMBER, number + 1)
    poke(state + W_NOTICES, notices + told)
    poke(state + W_RAN, going.to(tl.int64))
    poke(state + W_OPEN, 0)


@kernel(do_not_specialize=UNALIGNED)
def finish(
    context: tl.int64,
    state: tl.int64,
    x: tl.int64,
    lists: tl.int64,
    tokens: tl.int64,
    topk_idx: tl.int64,
    weights: tl.int64,
    scales: tl.int64,
    out: tl.int64,
    out_idx: tl.int64,
    out_weights: tl.int64,
    out_scales: tl.int64,
    capacity: tl.int64,
    local_experts: tl.int64,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """End the exchange; grid (1,), one warp. Arguments as for :func:`move_rows`.

    The steps that the host has launched are normally enough. Where they are not (the host does not know how much room
    the peers have), this one program takes the rest of the steps, slowly.
    """
    tokens, capacity, local_experts = tokens.to(tl.int64), capacity.to(tl.int64), local_experts.to(tl.int64)
    tensors = RowTensors(
        x, lists, tokens, topk_idx, weights, scales, out, out_idx, out_weights, out_scales, capacity, local_experts
    )
    if (has_failed(context) == 0) & (peek(state + W_OPEN) != 0):
        one = tl.full((), 1, tl.int64)
        going = (peek(state + W_OPEN) == 1).to(tl.int32)
        late = tl.full((), 0, tl.int64)
        # rule: normal mode: the last kernel takes the steps that the host has not launched
        while going != 0:
            going = run_step(context, state, LANES, BACKEND)
            late += going
            if going != 0:
                move(
                    context,
                    state,
                    one - 1,
                    one,
                    tensors,
                    RowShape(KIND, WORDS, TOPK, SLOTS, SCALE_WORDS, SCALES, ROWS, BLOCK),
                )
                settle(BACKEND)
        if has_failed(context) == 0:
            close(context, state, late, KIND, LANES, BACKEND)
