"""Opening a normal-mode operation: every rank tells every rank what it is about to do and how many rows it has.

The same messages and rules as :mod:`..cpu.normal_notify`. Nothing else moves before the notifies of all peers have
arrived; ranks that were given different shapes all see so and part without damage. One program of one warp does it,
decides where the rows of every peer land, and tells the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import HEADER_BYTES, MOST_ROWS, NormalNotify
from ...protocol.streams import NORMAL_NOTIFY
from .context import (
    S_SINK,
    has_failed,
    is_live,
    own_rank,
    rank_count,
    window_address,
)
from .normal_blocks import (
    I_DIFFERENT,
    I_LATE0,
    I_LATE1,
    I_PARTED,
    I_TICKET,
    INFO_WORDS,
    N_PASS_RECV,
    N_PASS_SEND,
    N_RECV_ROWS,
    N_SEND_ROWS,
    TOLD_WORDS,
    W_LATE0,
    W_LATE1,
    W_NODE_RANKS,
    W_NOTICES,
    W_NOTIFY_RECV,
    W_NOTIFY_SEND,
    W_NOTIFY_STRIDE,
    W_NUMBER,
    W_OPEN,
    get_each,
    set_each,
)
from .normal_nodes import is_far, is_rail
from .normal_place import begin, begin_nodes, place, place_nodes
from .normal_wait import message_at, released, send_message, wait_counts
from .wait import refuse
from .words import clock_ns, int32s, int64s, peek, poke, release_each, settle

_NOTIFY = tl.constexpr(NORMAL_NOTIFY)
DISPATCH = tl.constexpr(NormalNotify.OPERATION_DISPATCH)
COMBINE = tl.constexpr(NormalNotify.OPERATION_COMBINE)
_TAG_VALUE, _HEADER = tl.constexpr(NormalNotify.TAG_VALUE), tl.constexpr(HEADER_BYTES)
_AT_TAG, _AT_NUMBER, _AT_ROWS = (
    tl.constexpr(8 * NormalNotify.TAG),
    tl.constexpr(8 * NormalNotify.NUMBER),
    tl.constexpr(8 * NormalNotify.ROWS),
)
_AT_CODING, _AT_SHAPE = tl.constexpr(8 * NormalNotify.CODING), tl.constexpr(8 * NormalNotify.SHAPE)
_AT_ROW_BYTES, _AT_META_BYTES = tl.constexpr(8 * NormalNotify.ROW_BYTES), tl.constexpr(8 * NormalNotify.META_BYTES)
_AT_RAIL_ROWS = tl.constexpr(8 * NormalNotify.RAIL_ROWS)
#: More rows than any operation can have: indices are int32.
_MOST_ROWS = tl.constexpr(MOST_ROWS)
_INFO_DIFFERENT = tl.constexpr(8 * I_DIFFERENT)
_INFO_TICKET, _INFO_PARTED = tl.constexpr(8 * I_TICKET), tl.constexpr(8 * I_PARTED)
_INFO_LATE0, _INFO_LATE1 = tl.constexpr(8 * I_LATE0), tl.constexpr(8 * I_LATE1)
_INFO_TOLD, _TOLD = tl.constexpr(8 * INFO_WORDS), tl.constexpr(8 * TOLD_WORDS)


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
    NODES: tl.constexpr,
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
        rows, rail_rows = get_each(context, state, N_SEND_ROWS, peers, live), zero
        if NODES:
            rail_rows = tl.where(is_rail(context, state, peers), rows, 0)
            far = is_far(context, state, peers)
            rows = tl.where(far, get_each(context, state, N_PASS_SEND, peers, live), rows)
        tl.store(int64s(at), zero + _TAG_VALUE, mask=live)
        tl.store(int64s(at + _AT_NUMBER), zero + number, mask=live)
        tl.store(int64s(at + _AT_ROWS), rows, mask=live)
        tl.store(int64s(at + _AT_CODING), zero + coding, mask=live)
        tl.store(int64s(at + _AT_SHAPE), zero + shape, mask=live)
        tl.store(int64s(at + _AT_ROW_BYTES), zero + row_bytes, mask=live)
        tl.store(int64s(at + _AT_META_BYTES), zero + meta_bytes, mask=live)
        tl.store(int64s(at + _AT_RAIL_ROWS), rail_rows, mask=live)
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
    NODES: tl.constexpr,
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
        # rule: normal mode: ranks that were given other operations part before anything is sent
        other = live & (told_shape != shape)
        # for the error that the host raises
        told = info + _INFO_TOLD + peers * _TOLD
        tl.store(int64s(told), told_shape, mask=other)
        tl.store(int64s(told + 8), tl.load(int64s(at + _AT_CODING), mask=other, other=0), mask=other)
        tl.store(int64s(told + 16), tl.load(int64s(at + _AT_ROW_BYTES), mask=other, other=0), mask=other)
        tl.store(int64s(told + 24), tl.load(int64s(at + _AT_META_BYTES), mask=other, other=0), mask=other)
        same = live & (other == 0)
        if broken == 0:
            rail_rows = tl.load(int64s(at + _AT_RAIL_ROWS), mask=live, other=0)
            broken = _take_rows(context, state, peers, same, rows, rail_rows, KIND, NODES, BACKEND)
        if broken == 0:
            different = tl.sum(other.to(tl.int32), axis=0)
    return different


@triton.jit
def _take_rows(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    same: tl.tensor,
    rows: tl.tensor,
    rail_rows: tl.tensor,
    KIND: tl.constexpr,
    NODES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Take over how many rows the ``same`` peers have, or hold it against what is known; 1 when it is refused."""
    far, rail = tl.zeros_like(same), tl.zeros_like(same)
    if NODES:
        far, rail = is_far(context, state, peers), is_rail(context, state, peers)
    if KIND == DISPATCH:
        bad = same & ((rows < 0) | (rows > _MOST_ROWS))
        broken = refuse(context, state, peers, bad, _NOTIFY, rows, _MOST_ROWS, BACKEND)
        most = tl.where(rail, _MOST_ROWS, 0)
        # rule: only rail peers tell of rows to be handed on
        bad = same & ((rail_rows < 0) | (rail_rows > most))
        broken |= refuse(context, state, peers, bad, _NOTIFY, rail_rows, most, BACKEND)
        set_each(context, state, N_RECV_ROWS, peers, same, tl.where(far, rail_rows, rows))
        if NODES:
            set_each(context, state, N_PASS_RECV, peers, same & far, rows)
    else:
        known = get_each(context, state, N_RECV_ROWS, peers, same)
        expected = known
        if NODES:
            expected = tl.where(far, get_each(context, state, N_PASS_RECV, peers, same), known)
        broken = refuse(context, state, peers, same & (rows != expected), _NOTIFY, rows, expected, BACKEND)
        expected = tl.where(rail, known, 0)
        # rule: rows over a rail are those of the handle
        bad = same & (rail_rows != expected)
        broken |= refuse(context, state, peers, bad, _NOTIFY, rail_rows, expected, BACKEND)
    return broken


@triton.jit
def _count_experts(
    context: tl.tensor,
    state: tl.tensor,
    expert_counts: tl.tensor,
    local_experts: tl.tensor,
    most_each: tl.tensor,
    told: tl.tensor,
    NODES: tl.constexpr,
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
            rows = get_each(context, state, N_RECV_ROWS, zero + peer, live)
            if NODES:
                passing = get_each(context, state, N_PASS_RECV, zero + peer, live)
                rows = tl.where(is_far(context, state, zero + peer), passing, rows)
            most = rows * most_each
            refuse(context, state, zero + peer, live & ((count < 0) | (count > most)), _NOTIFY, count, most, BACKEND)
            total += count
        tl.store(int64s(told + 8 * expert), total, mask=inside)


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
        "node_ranks",
        "passing",
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
    node_ranks: tl.int64,
    passing: tl.int64,
    KIND: tl.constexpr,
    NODES: tl.constexpr,
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
        node_ranks: ranks of a node when rows pass through forwarders (``NODES``), else 0. ``given``, ``taken`` and
            ``rows_out`` are then rows of near ranks and over the rails.
        passing: int64[2, ranks], rows sent to, and received from, each rank, whoever carries them (``NODES``); in a
            first dispatch the latter are written.
    """
    ticket, capacity, most_each = ticket.to(tl.int64), capacity.to(tl.int64), most_each.to(tl.int64)
    shape, shape_step, coding = shape.to(tl.int64), shape_step.to(tl.int64), coding.to(tl.int64)
    local_experts, meta_bytes = local_experts.to(tl.int64), meta_bytes.to(tl.int64)
    ranks, me = rank_count(context), own_rank(context)
    different = tl.full((), -1, tl.int32)
    if has_failed(context) == 0:
        start = clock_ns(BACKEND)
        if released(context, state, BACKEND) == 0:
            poke(state + W_NODE_RANKS, node_ranks.to(tl.int64))
            begin(context, state, given, taken, row_bytes, meta_bytes, KIND, RANKS)
            settle(BACKEND)
            if NODES:
                begin_nodes(context, state, taken, passing, KIND, RANKS)
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
                        NODES,
                        LANES,
                        BACKEND,
                    ).to(tl.int32)
            different = going - 1
            for first in range(0, ranks, LANES):
                peers = first + tl.arange(0, LANES).to(tl.int64)
                live = is_live(context, peers) & (peers != me)
                if different >= 0:
                    found = _hear(context, state, peers, live, shape, info, start, KIND, NODES, BACKEND)
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
            _count_experts(context, state, expert_counts, local_experts, most_each, told, NODES, LANES, BACKEND)
            number = peek(state + W_NUMBER)
            poke(number_out, number)
            every = tl.arange(0, RANKS).to(tl.int64)
            in_group = every < ranks
            came = get_each(context, state, N_RECV_ROWS, every, in_group)
            tl.store(int64s(rows_out + 8 * every), came, mask=in_group)
            if NODES:
                far = in_group & is_far(context, state, every)
                # of near ranks too: a handle may have to do without nodes later
                # rule: a handle keeps what came from near ranks
                came = tl.where(far, get_each(context, state, N_PASS_RECV, every, far), came)
                tl.store(int64s(passing + 8 * (ranks + every)), came, mask=in_group)
        if NODES:
            place_nodes(context, state, row_bytes, meta_bytes, capacity, info, KIND, RANKS)
        else:
            place(context, state, row_bytes, meta_bytes, capacity, info, KIND, RANKS)
        poke(info + _INFO_LATE0, peek(state + W_LATE0))
        poke(info + _INFO_LATE1, peek(state + W_LATE1))
        poke(state + W_OPEN, 1)
    poke(info + _INFO_DIFFERENT, different.to(tl.int64))
    settle(BACKEND)
    lane = tl.arange(0, 2)
    words = tl.zeros([2], tl.int64)
    release_each(words + info + _INFO_TICKET, words + ticket, lane == 0, state + S_SINK, BACKEND)
