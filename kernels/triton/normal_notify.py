"""Opening a normal-mode operation: every rank tells every rank what it is about to do and how many rows it has.

The same messages and rules as :mod:`..cpu.normal_notify`. Nothing else moves before the notifies of all peers have
arrived; ranks that were given different shapes all see so and part without damage. One program of one warp does it,
decides where the rows of every peer land, and tells the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import HEADER_BYTES, NormalNotify
from ...protocol.streams import NORMAL_COMBINE, NORMAL_DISPATCH, NORMAL_NOTIFY
from .block_access import (
    S_SINK,
    channel_count,
    has_failed,
    is_live,
    own_rank,
    rank_count,
    window_address,
)
from .normal_blocks import (
    I_AWAY,
    I_BEYOND,
    I_DIFFERENT,
    I_IN_HEAP,
    I_MOST,
    I_PARTED,
    I_TICKET,
    I_TOTAL,
    INFO_WORDS,
    N_ARRIVED,
    N_CHUNK_ROWS,
    N_CONSUMED,
    N_EXPECTED,
    N_GRANT_LEFT,
    N_GRANTED,
    N_GRANTS,
    N_META_LANDING,
    N_PACK_ROWS,
    N_READY,
    N_RECV_FIRST,
    N_RECV_ROWS,
    N_ROW_LANDING,
    N_SEND_FIRST,
    N_SEND_ROWS,
    N_SENT,
    N_SENT_CHUNKS,
    N_SLOT_ROWS,
    N_SLOT_STRIDE,
    TOLD_WORDS,
    W_BAD_PEER,
    W_CHUNK_BYTES,
    W_HEAP,
    W_HEAP_BYTES,
    W_IN_HEAP,
    W_LEAST_CHUNK,
    W_META_BYTES,
    W_NOTICES,
    W_NOTIFY_RECV,
    W_NOTIFY_SEND,
    W_NOTIFY_STRIDE,
    W_NUMBER,
    W_OPEN,
    W_RAN,
    W_ROUND_SLOT,
    W_ROUNDS,
    W_ROW_BYTES,
    W_STREAM,
    W_TURN,
    get_each,
    set_each,
)
from .normal_wait import message_at, released, send_message, wait_counts
from .wait import refuse
from .words import clock_ns, int32s, int64s, peek, poke, release_each, settle

__all__ = ["open_operation"]

_NOTIFY = tl.constexpr(NORMAL_NOTIFY)
_DISPATCH_STREAM, _COMBINE_STREAM = tl.constexpr(NORMAL_DISPATCH), tl.constexpr(NORMAL_COMBINE)
DISPATCH = tl.constexpr(NormalNotify.OPERATION_DISPATCH)
CACHED = tl.constexpr(NormalNotify.OPERATION_CACHED_DISPATCH)
COMBINE = tl.constexpr(NormalNotify.OPERATION_COMBINE)
_TAG_VALUE, _HEADER = tl.constexpr(NormalNotify.TAG_VALUE), tl.constexpr(HEADER_BYTES)
_AT_TAG, _AT_NUMBER, _AT_ROWS = (
    tl.constexpr(8 * NormalNotify.TAG),
    tl.constexpr(8 * NormalNotify.NUMBER),
    tl.constexpr(8 * NormalNotify.ROWS),
)
_AT_CODING, _AT_SHAPE = tl.constexpr(8 * NormalNotify.CODING), tl.constexpr(8 * NormalNotify.SHAPE)
_AT_ROW_BYTES, _AT_META_BYTES = tl.constexpr(8 * NormalNotify.ROW_BYTES), tl.constexpr(8 * NormalNotify.META_BYTES)
_AT_REST = tl.constexpr(8 * 7)
#: More rows than any operation can have: indices are int32.
_MOST_ROWS = tl.constexpr((1 << 31) - 1)
#: Each rank's meta starts on a line of its own: no two ranks write the same one.
_LINE = tl.constexpr(128)
_INFO_DIFFERENT, _INFO_TOTAL, _INFO_MOST = (
    tl.constexpr(8 * I_DIFFERENT),
    tl.constexpr(8 * I_TOTAL),
    tl.constexpr(8 * I_MOST),
)
_INFO_AWAY, _INFO_IN_HEAP = tl.constexpr(8 * I_AWAY), tl.constexpr(8 * I_IN_HEAP)
_INFO_BEYOND, _INFO_TICKET, _INFO_PARTED = (
    tl.constexpr(8 * I_BEYOND),
    tl.constexpr(8 * I_TICKET),
    tl.constexpr(8 * I_PARTED),
)
_INFO_TOLD, _TOLD = tl.constexpr(8 * INFO_WORDS), tl.constexpr(8 * TOLD_WORDS)


@triton.jit
def _lines(nbytes: tl.tensor) -> tl.tensor:
    return (nbytes + _LINE - 1) // _LINE * _LINE


@triton.jit
def _begin(
    context: tl.tensor,
    state: tl.tensor,
    given: tl.tensor,
    taken: tl.tensor,
    row_bytes: tl.tensor,
    meta_bytes: tl.tensor,
    KIND: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """Set every entry of the operation that no peer has a say in."""
    me, ranks = own_rank(context), rank_count(context)
    peers = tl.arange(0, RANKS).to(tl.int64)
    inside = peers < ranks
    live = is_live(context, peers)
    sent = tl.load(int64s(given + 8 * peers), mask=inside, other=0)
    if KIND == DISPATCH:
        came = tl.zeros_like(sent)
    else:
        came = tl.load(int64s(taken + 8 * peers), mask=inside, other=0)
    # a combine sends back what was received, and what was sent comes back
    if KIND == COMBINE:
        send, receive = tl.where(live, came, 0), tl.where(live, sent, 0)
        set_each(context, state, N_SEND_FIRST, peers, inside, tl.cumsum(came, axis=0) - came)
    else:
        send, receive = tl.where(live, sent, 0), tl.where(live, came, 0)
        set_each(context, state, N_SEND_FIRST, peers, inside, tl.zeros_like(sent))
        # a cached dispatch keeps the places of its handle
        set_each(context, state, N_RECV_FIRST, peers, inside, tl.cumsum(came, axis=0) - came)
        receive = tl.where(peers == me, send, receive)
    set_each(context, state, N_SEND_ROWS, peers, inside, send)
    set_each(context, state, N_RECV_ROWS, peers, inside, receive)
    zero = tl.zeros_like(sent)
    set_each(context, state, N_GRANTED, peers, inside, zero)
    set_each(context, state, N_GRANTS, peers, inside, zero)
    set_each(context, state, N_GRANT_LEFT, peers, inside, zero)
    set_each(context, state, N_SENT, peers, inside, zero)
    set_each(context, state, N_SENT_CHUNKS, peers, inside, zero)
    set_each(context, state, N_PACK_ROWS, peers, inside, zero)
    set_each(context, state, N_ARRIVED, peers, inside, zero)
    set_each(context, state, N_EXPECTED, peers, inside, zero)
    set_each(context, state, N_CONSUMED, peers, inside, zero)
    set_each(context, state, N_READY, peers, inside, zero)
    if KIND != COMBINE:
        # own rows are packed in the first turn, straight to the outputs; in a combine they are summed where they are
        set_each(context, state, N_PACK_ROWS, peers, inside & (peers == me), send)
    poke(state + W_TURN, 0)
    poke(state + W_RAN, 0)
    poke(state + W_BAD_PEER, 0)
    poke(state + W_ROW_BYTES, row_bytes)
    poke(state + W_META_BYTES, meta_bytes)
    if KIND == COMBINE:
        poke(state + W_STREAM, _COMBINE_STREAM)
    else:
        poke(state + W_STREAM, _DISPATCH_STREAM)


@triton.jit
def _tell(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    shape: tl.tensor,
    coding: tl.tensor,
    row_bytes: tl.tensor,
    meta_bytes: tl.tensor,
    expert_counts: tl.tensor,
    local_experts: tl.tensor,
    start: tl.tensor,
    KIND: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Write and publish the notify to the ``live`` peers. The peers have read the slot: they have opened the last
    operation since. A NIC may still repeat the slot's last write, which is waited for. True; False after a failure."""
    number, notices, me, ranks = peek(state + W_NUMBER), peek(state + W_NOTICES), own_rank(context), rank_count(context)
    zero = tl.zeros_like(peers)
    going = wait_counts(context, state, peers, live, _NOTIFY, zero + notices - 1, start, False, BACKEND)
    if going:
        stride = peek(state + W_NOTIFY_STRIDE)
        parity = (number & 1) * ranks * stride
        source = peek(state + W_NOTIFY_SEND) + parity + peers * stride
        target = peek(state + W_NOTIFY_RECV) + parity + me * stride + zero
        at = message_at(context, peers, live, source, target)
        rows = get_each(context, state, N_SEND_ROWS, peers, live)
        tl.store(int64s(at), zero + _TAG_VALUE, mask=live)
        tl.store(int64s(at + _AT_NUMBER), zero + number, mask=live)
        tl.store(int64s(at + _AT_ROWS), rows, mask=live)
        tl.store(int64s(at + _AT_CODING), zero + coding, mask=live)
        tl.store(int64s(at + _AT_SHAPE), zero + shape, mask=live)
        tl.store(int64s(at + _AT_ROW_BYTES), zero + row_bytes, mask=live)
        tl.store(int64s(at + _AT_META_BYTES), zero + meta_bytes, mask=live)
        tl.store(int64s(at + _AT_REST), zero, mask=live)
        nbytes = zero + _HEADER
        if KIND == DISPATCH:
            for expert in range(local_experts):
                count = tl.load(int32s(expert_counts + 4 * (peers * local_experts + expert)), mask=live, other=0)
                tl.store(int32s(at + _HEADER + 4 * expert), count, mask=live)
            nbytes += (4 * local_experts + 15) // 16 * 16
        going = send_message(
            context, state, peers, live, _NOTIFY, source, target, nbytes, zero + notices + 1, start, LANES, BACKEND
        )
    return going


@triton.jit
def _hear(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    shape: tl.tensor,
    info: tl.tensor,
    start: tl.tensor,
    KIND: tl.constexpr,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Wait for the notify of the ``live`` peers, read and check it. Peers of another shape; -1 after a failure."""
    number, notices, ranks = peek(state + W_NUMBER), peek(state + W_NOTICES), rank_count(context)
    different = tl.full((), -1, tl.int32)
    zero = tl.zeros_like(peers)
    if wait_counts(context, state, peers, live, _NOTIFY, zero + notices + 1, start, True, BACKEND):
        stride = peek(state + W_NOTIFY_STRIDE)
        at = window_address(context) + peek(state + W_NOTIFY_RECV) + ((number & 1) * ranks + peers) * stride
        tag = tl.load(int64s(at), mask=live, other=0)
        told_number = tl.load(int64s(at + _AT_NUMBER), mask=live, other=0)
        told_shape = tl.load(int64s(at + _AT_SHAPE), mask=live, other=0)
        rows = tl.load(int64s(at + _AT_ROWS), mask=live, other=0)
        broken = refuse(context, state, peers, live & (tag != _TAG_VALUE), _NOTIFY, tag, _TAG_VALUE, BACKEND)
        if broken == 0:
            bad = live & (told_number != number)
            broken = refuse(context, state, peers, bad, _NOTIFY, told_number, number, BACKEND)
        other = live & (told_shape != shape)
        # for the error that the host raises
        told = info + _INFO_TOLD + peers * _TOLD
        tl.store(int64s(told), told_shape, mask=other)
        tl.store(int64s(told + 8), tl.load(int64s(at + _AT_CODING), mask=other, other=0), mask=other)
        tl.store(int64s(told + 16), tl.load(int64s(at + _AT_ROW_BYTES), mask=other, other=0), mask=other)
        tl.store(int64s(told + 24), tl.load(int64s(at + _AT_META_BYTES), mask=other, other=0), mask=other)
        same = live & (other == 0)
        if broken == 0:
            if KIND == DISPATCH:
                bad = same & ((rows < 0) | (rows > _MOST_ROWS))
                broken = refuse(context, state, peers, bad, _NOTIFY, rows, _MOST_ROWS, BACKEND)
                set_each(context, state, N_RECV_ROWS, peers, same, rows)
            else:
                expected = get_each(context, state, N_RECV_ROWS, peers, same)
                broken = refuse(context, state, peers, same & (rows != expected), _NOTIFY, rows, expected, BACKEND)
        if broken == 0:
            different = tl.sum(other.to(tl.int32), axis=0)
    return different


@triton.jit
def _count_experts(
    context: tl.tensor,
    state: tl.tensor,
    expert_counts: tl.tensor,
    local_experts: tl.tensor,
    most_each: tl.tensor,
    told: tl.tensor,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Add up what the peers have for each local expert, LANES experts at a time, into int64s at ``told``."""
    me, ranks, number = own_rank(context), rank_count(context), peek(state + W_NUMBER)
    stride = peek(state + W_NOTIFY_STRIDE)
    base = window_address(context) + peek(state + W_NOTIFY_RECV) + (number & 1) * ranks * stride
    for first in range(0, local_experts, LANES):
        expert = first + tl.arange(0, LANES).to(tl.int64)
        inside = expert < local_experts
        total = tl.load(int32s(expert_counts + 4 * (me * local_experts + expert)), mask=inside, other=0).to(tl.int64)
        for step in range(1, ranks):
            peer = (me + step) % ranks
            zero = tl.zeros_like(expert)
            live = inside & is_live(context, zero + peer)
            count = tl.load(int32s(base + peer * stride + _HEADER + 4 * expert), mask=live, other=0).to(tl.int64)
            most = get_each(context, state, N_RECV_ROWS, zero + peer, live) * most_each
            refuse(context, state, zero + peer, live & ((count < 0) | (count > most)), _NOTIFY, count, most, BACKEND)
            total += count
        tl.store(int64s(told + 8 * expert), total, mask=inside)


@triton.jit
def _place(
    context: tl.tensor,
    state: tl.tensor,
    row: tl.tensor,
    meta: tl.tensor,
    capacity: tl.tensor,
    info: tl.tensor,
    KIND: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """Say where the rows of every peer land: all of them in the heap, or in rounds; see :mod:`..cpu.normal_prepare`."""
    me, ranks, channels = own_rank(context), rank_count(context), channel_count(context)
    peers = tl.arange(0, RANKS).to(tl.int64)
    inside = peers < ranks
    rows = get_each(context, state, N_RECV_ROWS, peers, inside)
    away = tl.where(peers == me, 0, get_each(context, state, N_SEND_ROWS, peers, inside))
    remote = tl.where(peers == me, 0, rows)
    before = tl.cumsum(remote, axis=0) - remote
    total = tl.sum(rows, axis=0)
    if KIND == DISPATCH:
        set_each(context, state, N_RECV_FIRST, peers, inside, tl.cumsum(rows, axis=0) - rows)
    elif KIND == COMBINE:
        set_each(context, state, N_RECV_FIRST, peers, inside, before)
    room = _lines(remote * meta)
    rows_room = _lines(tl.sum(remote, axis=0) * row)
    heap = peek(state + W_HEAP)
    fits = rows_room + tl.sum(room, axis=0) <= peek(state + W_HEAP_BYTES)
    slot = peek(state + W_ROUND_SLOT)
    most = peek(state + W_CHUNK_BYTES) // (row + meta)
    in_slot = tl.maximum(slot // (row + meta), 1)
    least = tl.maximum(peek(state + W_LEAST_CHUNK) // row, 1)
    chunk = tl.minimum(tl.maximum((remote + channels - 1) // channels, least), most)
    chunk = tl.where(fits, chunk, tl.minimum(chunk, in_slot))
    slot_rows = in_slot // chunk * chunk
    landing = peek(state + W_ROUNDS) + peers * 2 * slot
    set_each(context, state, N_CHUNK_ROWS, peers, inside, chunk)
    set_each(context, state, N_SLOT_ROWS, peers, inside, tl.where(fits, tl.maximum(remote, 1), slot_rows))
    set_each(context, state, N_SLOT_STRIDE, peers, inside, tl.where(fits, 0, slot))
    set_each(context, state, N_ROW_LANDING, peers, inside, tl.where(fits, heap + before * row, landing))
    meta_at = heap + rows_room + tl.cumsum(room, axis=0) - room
    set_each(context, state, N_META_LANDING, peers, inside, tl.where(fits, meta_at, landing + slot_rows * row))
    poke(state + W_IN_HEAP, fits.to(tl.int64))
    poke(info + _INFO_TOTAL, total)
    poke(info + _INFO_MOST, tl.maximum(tl.max(remote, axis=0), tl.max(away, axis=0)))
    poke(info + _INFO_AWAY, tl.sum(away, axis=0))
    poke(info + _INFO_IN_HEAP, fits.to(tl.int64))
    if (KIND == DISPATCH) & (capacity > 0):
        if total > capacity:
            poke(info + _INFO_BEYOND, total)


# one compiled kernel whatever the numbers
@triton.jit(
    do_not_specialize=[
        "taken",
        "expert_counts",
        "origin",
        "number_out",
        "rows_out",
        "ticket",
        "capacity",
        "shape",
        "shape_step",
        "coding",
        "local_experts",
        "meta_bytes",
        "most_each",
    ]
)
def open_operation(
    context: tl.int64,
    state: tl.int64,
    given: tl.int64,
    taken: tl.int64,
    expert_counts: tl.int64,
    origin: tl.int64,
    number_out: tl.int64,
    rows_out: tl.int64,
    info: tl.int64,
    ticket: tl.int64,
    capacity: tl.int64,
    shape: tl.int64,
    shape_step: tl.int64,
    coding: tl.int64,
    row_bytes: tl.int64,
    meta_bytes: tl.int64,
    local_experts: tl.int64,
    most_each: tl.int64,
    KIND: tl.constexpr,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Tell all peers, then wait for what all peers tell; grid (1,), one warp.

    Args:
        given: int64[ranks], rows that the dispatch of the handle sends to each rank.
        taken: int64[ranks], rows that it received from each rank; 0 in a first dispatch.
        expert_counts: int32[experts] to tell and to add up, in a first dispatch.
        origin: int64[1], number of the dispatch whose handle is used; 0 in a first dispatch.
        number_out, rows_out: int64[1] and int64[ranks], written in a first dispatch: its number, rows from each rank.
        info: what the host is told (:mod:`.normal_blocks`), in its memory. ticket: of this call, stored there last.
        capacity: rows that were promised to be enough, 0 = no promise.
        shape, shape_step: the digest that all ranks must share, and what it grows by with the number of ``origin``.
        most_each: most experts of a rank that a token can choose.
    """
    ticket, capacity, most_each = ticket.to(tl.int64), capacity.to(tl.int64), most_each.to(tl.int64)
    shape, shape_step, coding = shape.to(tl.int64), shape_step.to(tl.int64), coding.to(tl.int64)
    local_experts, meta_bytes = local_experts.to(tl.int64), meta_bytes.to(tl.int64)
    ranks, me = rank_count(context), own_rank(context)
    different = tl.full((), -1, tl.int32)
    if has_failed(context) == 0:
        start = clock_ns(BACKEND)
        if released(context, state, BACKEND) == 0:
            _begin(context, state, given, taken, row_bytes, meta_bytes, KIND, RANKS)
            settle(BACKEND)
            if KIND != DISPATCH:
                # in halves: the product need not fit
                number = peek(origin) + 1
                low, high = shape_step & 0xFFFF, shape_step >> 16
                shape = (shape + number * low + (((number * high) & 0x7FFFFFFFFFFF) << 16)) & 0x7FFFFFFFFFFFFFFF
            going = tl.full((), 1, tl.int32)
            for first in range(0, ranks, LANES):
                peers = first + tl.arange(0, LANES).to(tl.int64)
                live = is_live(context, peers) & (peers != me)
                if going != 0:
                    going = _tell(
                        context,
                        state,
                        peers,
                        live,
                        shape,
                        coding,
                        row_bytes,
                        meta_bytes,
                        expert_counts,
                        local_experts,
                        start,
                        KIND,
                        LANES,
                        BACKEND,
                    ).to(tl.int32)
            different = going - 1
            for first in range(0, ranks, LANES):
                peers = first + tl.arange(0, LANES).to(tl.int64)
                live = is_live(context, peers) & (peers != me)
                if different >= 0:
                    found = _hear(context, state, peers, live, shape, info, start, KIND, BACKEND)
                    different = tl.where(found < 0, -1, different + found)
            settle(BACKEND)
    if different > 0:
        # nobody gets as far as saying that writes are over
        poke(state + W_NUMBER, peek(state + W_NUMBER) + 1)
        poke(state + W_NOTICES, peek(state + W_NOTICES) + 1)
        poke(info + _INFO_PARTED, different.to(tl.int64))
    if different == 0:
        if KIND == DISPATCH:
            told = info + _INFO_TOLD + ranks * _TOLD
            _count_experts(context, state, expert_counts, local_experts, most_each, told, LANES, BACKEND)
            number = peek(state + W_NUMBER)
            poke(number_out, number)
            every = tl.arange(0, RANKS).to(tl.int64)
            in_group = every < ranks
            tl.store(
                int64s(rows_out + 8 * every), get_each(context, state, N_RECV_ROWS, every, in_group), mask=in_group
            )
        _place(context, state, row_bytes, meta_bytes, capacity, info, KIND, RANKS)
        poke(state + W_OPEN, 1)
    poke(info + _INFO_DIFFERENT, different.to(tl.int64))
    settle(BACKEND)
    lane = tl.arange(0, 2)
    words = tl.zeros([2], tl.int64)
    release_each(words + info + _INFO_TICKET, words + ticket, lane == 0, state + S_SINK, BACKEND)
