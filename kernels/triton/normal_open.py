"""Opening a normal-mode operation: every rank tells every rank what it is about to do and how many rows it has.

The same messages and rules as :mod:`..cpu.normal_open`. Nothing else moves before the notifies of all peers have
arrived; ranks that were given different shapes all see so and part without damage. One program of one warp does it,
decides where the rows of every peer land, and tells the host.

Between nodes rows of a dispatch that are forwarded land in rounds, whatever room there is: that memory is bounded, and
every rank of the node reads it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import HEADER_BYTES, META_LINE, MOST_ROWS, NormalNotify
from ...protocol.streams import NORMAL_COMBINE, NORMAL_DISPATCH, NORMAL_NOTIFY
from ..blocks import normal_device
from .blocks import (
    I_DIFFERENT,
    I_MISSED_COMBINE_STEPS,
    I_MISSED_DISPATCH_STEPS,
    I_MOST,
    I_OVERFLOW_ROWS,
    I_RELAYED,
    I_REMOTE_ROWS,
    I_SHAPE_MISMATCH,
    I_TICKET,
    I_TOTAL,
    N_ARRIVED,
    N_CHUNK_ROWS,
    N_CONSUMED,
    N_EXPECTED,
    N_GRANT_LEFT,
    N_GRANTED,
    N_GRANTS,
    N_META_LANDING,
    N_PACK_ROWS,
    N_PASS_READY,
    N_PASS_RECV,
    N_PASS_SEND,
    N_PASSED,
    N_READY,
    N_RECV_FIRST,
    N_RECV_ROWS,
    N_RELAY_FIRST,
    N_ROW_LANDING,
    N_SCAN_END,
    N_SCANNED,
    N_SEND_FIRST,
    N_SEND_ROWS,
    N_SENT,
    N_SENT_CHUNKS,
    N_SHOWN,
    N_SLOT_ROWS,
    N_SLOT_STRIDE,
    N_VIEW_SLOT_ROWS,
    S_SINK,
    W_BAD_PEER,
    W_CHUNK_BYTES,
    W_HEAP,
    W_HEAP_BYTES,
    W_IN_HEAP,
    W_LEAST_CHUNK,
    W_META_BYTES,
    W_MISSED_COMBINE_STEPS,
    W_MISSED_DISPATCH_STEPS,
    W_NODE_RANKS,
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
    W_STEP,
    W_STREAM,
    get_each,
    set_each,
)
from .context import channel_count, has_failed, is_live, landing_window, own_rank, rank_count
from .kernel import kernel
from .normal_nodes import is_far, is_rail, slot_bytes
from .normal_step import message_at, released, send_message, wait_counts
from .wait import refuse
from .words import clock_ns, int32s, int64s, peek, poke, release_each, settle

_DISPATCH = tl.constexpr(NormalNotify.OPERATION_DISPATCH)
_COMBINE = tl.constexpr(NormalNotify.OPERATION_COMBINE)
_DISPATCH_STREAM, _COMBINE_STREAM = tl.constexpr(NORMAL_DISPATCH), tl.constexpr(NORMAL_COMBINE)
_META_LINE = tl.constexpr(META_LINE)


@triton.jit
def _lines(nbytes: tl.tensor) -> tl.tensor:
    """Bytes of whole lines."""
    return (nbytes + _META_LINE - 1) // _META_LINE * _META_LINE


@triton.jit
def begin(
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
    if KIND == _DISPATCH:
        came = tl.zeros_like(sent)
    else:
        came = tl.load(int64s(taken + 8 * peers), mask=inside, other=0)
    # a combine sends back what was received, and what was sent comes back
    if KIND == _COMBINE:
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
    if KIND != _COMBINE:
        # own rows are packed in the first step, straight to the outputs; in a combine they are summed where they are
        set_each(context, state, N_PACK_ROWS, peers, inside & (peers == me), send)
    poke(state + W_STEP, 0)
    poke(state + W_RAN, 0)
    poke(state + W_BAD_PEER, 0)
    poke(state + W_ROW_BYTES, row_bytes)
    poke(state + W_META_BYTES, meta_bytes)
    if KIND == _COMBINE:
        poke(state + W_STREAM, _COMBINE_STREAM)
    else:
        poke(state + W_STREAM, _DISPATCH_STREAM)


@triton.jit
def begin_nodes(
    context: tl.tensor,
    state: tl.tensor,
    taken: tl.tensor,
    passing: tl.tensor,
    KIND: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """After the entries of an operation without nodes: those that nodes add or change.

    Args:
        taken: int64[ranks], rows that the dispatch of the handle received from near ranks and over the rails.
        passing: int64[2, ranks], rows that it sent to, and received from, each rank, whoever carried them.
    """
    ranks = rank_count(context)
    peers = tl.arange(0, RANKS).to(tl.int64)
    inside = peers < ranks
    far = inside & is_far(context, state, peers)
    gone = tl.load(int64s(passing + 8 * peers), mask=far, other=0)
    zero = tl.zeros_like(peers)
    if KIND == _DISPATCH:
        set_each(context, state, N_PASS_SEND, peers, inside, gone)
        set_each(context, state, N_PASS_RECV, peers, inside, zero)
    else:
        came = tl.load(int64s(passing + 8 * (ranks + peers)), mask=far, other=0)
        every = tl.where(far, came, tl.load(int64s(taken + 8 * peers), mask=inside, other=0))
        before = tl.cumsum(every, axis=0) - every
        if KIND == _COMBINE:
            set_each(context, state, N_PASS_SEND, peers, inside, came)
            set_each(context, state, N_PASS_RECV, peers, inside, gone)
            set_each(context, state, N_SEND_FIRST, peers, inside, before)
        else:
            set_each(context, state, N_PASS_SEND, peers, inside, gone)
            set_each(context, state, N_PASS_RECV, peers, inside, came)
            set_each(context, state, N_RECV_FIRST, peers, inside, before)
    set_each(context, state, N_PASSED, peers, inside, zero)
    set_each(context, state, N_PASS_READY, peers, inside, zero)
    set_each(context, state, N_SHOWN, peers, inside, zero)
    set_each(context, state, N_SCANNED, peers, inside, zero)
    set_each(context, state, N_SCAN_END, peers, inside, zero)
    set_each(context, state, N_VIEW_SLOT_ROWS, peers, inside, zero)


@triton.jit
def _land(
    context: tl.tensor,
    state: tl.tensor,
    row: tl.tensor,
    meta: tl.tensor,
    peers: tl.tensor,
    inside: tl.tensor,
    remote: tl.tensor,
    passing: tl.tensor,
    lane: tl.tensor,
    slot: tl.tensor,
) -> tl.tensor:
    """Set where the ``remote`` rows of every peer land, and in what chunks they come; rows before each in the heap.

    Args:
        passing: peers whose rows land in rounds in any case. Those of the others have their place in the heap when it
            has room for all of them, else they land in rounds too.
        lane: two landing slots of ``slot`` bytes each stand at this index in the area of rounds.
    """
    channels = channel_count(context)
    own = tl.where(passing, 0, remote)
    before = tl.cumsum(own, axis=0) - own
    room = _lines(own * meta)
    rows_room = _lines(tl.sum(own, axis=0) * row)
    heap = peek(state + W_HEAP)
    fits = rows_room + tl.sum(room, axis=0) <= peek(state + W_HEAP_BYTES)
    whole = fits & (passing == 0)
    most = peek(state + W_CHUNK_BYTES) // (row + meta)
    in_slot = tl.maximum(slot // (row + meta), 1)
    least = tl.maximum(peek(state + W_LEAST_CHUNK) // row, 1)
    chunk = tl.minimum(tl.maximum((remote + channels - 1) // channels, least), most)
    chunk = tl.where(whole, chunk, tl.minimum(chunk, in_slot))
    slot_rows = in_slot // chunk * chunk
    landing = peek(state + W_ROUNDS) + lane * 2 * slot
    set_each(context, state, N_CHUNK_ROWS, peers, inside, chunk)
    set_each(context, state, N_SLOT_ROWS, peers, inside, tl.where(whole, tl.maximum(remote, 1), slot_rows))
    set_each(context, state, N_SLOT_STRIDE, peers, inside, tl.where(whole, 0, slot))
    set_each(context, state, N_ROW_LANDING, peers, inside, tl.where(whole, heap + before * row, landing))
    meta_at = heap + rows_room + tl.cumsum(room, axis=0) - room
    set_each(context, state, N_META_LANDING, peers, inside, tl.where(whole, meta_at, landing + slot_rows * row))
    poke(state + W_IN_HEAP, fits.to(tl.int64))
    return before


@triton.jit
def _write_info(
    total: tl.tensor, most: tl.tensor, away: tl.tensor, capacity: tl.tensor, info: tl.tensor, KIND: tl.constexpr
) -> None:
    """Tell the host how many rows the outputs hold, the most of one other rank, and how many leave this one."""
    poke(info + I_TOTAL, total)
    poke(info + I_MOST, most)
    poke(info + I_REMOTE_ROWS, tl.sum(away, axis=0))
    # rule: normal mode: the host is told that more rows came than num_worst_tokens promised
    if (KIND == _DISPATCH) & (capacity > 0):
        if total > capacity:
            poke(info + I_OVERFLOW_ROWS, total)


@triton.jit
def place(
    context: tl.tensor,
    state: tl.tensor,
    row: tl.tensor,
    meta: tl.tensor,
    capacity: tl.tensor,
    info: tl.tensor,
    KIND: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """Say where the rows of every peer land: all of them in the heap, or in rounds; see :mod:`..cpu.normal_open`."""
    me, ranks = own_rank(context), rank_count(context)
    peers = tl.arange(0, RANKS).to(tl.int64)
    inside = peers < ranks
    rows = get_each(context, state, N_RECV_ROWS, peers, inside)
    away = tl.where(peers == me, 0, get_each(context, state, N_SEND_ROWS, peers, inside))
    remote = tl.where(peers == me, 0, rows)
    slot = peek(state + W_ROUND_SLOT)
    before = _land(context, state, row, meta, peers, inside, remote, tl.zeros_like(inside), peers, slot)
    if KIND == _DISPATCH:
        set_each(context, state, N_RECV_FIRST, peers, inside, tl.cumsum(rows, axis=0) - rows)
    elif KIND == _COMBINE:
        set_each(context, state, N_RECV_FIRST, peers, inside, before)
    most = tl.maximum(tl.max(remote, axis=0), tl.max(away, axis=0))
    _write_info(tl.sum(rows, axis=0), most, away, capacity, info, KIND)


@triton.jit
def place_nodes(
    context: tl.tensor,
    state: tl.tensor,
    row: tl.tensor,
    meta: tl.tensor,
    capacity: tl.tensor,
    info: tl.tensor,
    KIND: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """Say where the rows of every near rank and rail peer land, when all notifies are here."""
    me, ranks = own_rank(context), rank_count(context)
    size = peek(state + W_NODE_RANKS)
    peers = tl.arange(0, RANKS).to(tl.int64)
    inside = peers < ranks
    far, rail = inside & is_far(context, state, peers), inside & is_rail(context, state, peers)
    rows = get_each(context, state, N_RECV_ROWS, peers, inside)
    sends = get_each(context, state, N_SEND_ROWS, peers, inside)
    every = tl.where(far, get_each(context, state, N_PASS_RECV, peers, inside), rows)
    remote = tl.where(peers == me, 0, rows)
    if KIND == _COMBINE:
        handed_on, relayed = tl.zeros_like(rail), tl.where(rail, sends, 0)
    else:
        handed_on, relayed = rail, tl.where(rail, rows, 0)
    set_each(context, state, N_RELAY_FIRST, peers, inside, tl.cumsum(relayed, axis=0) - relayed)
    # two slots for each, as slot_bytes says
    # rule: each source has landing slots of its own
    lane = tl.where(far, size + peers // size, peers % size)
    slot = slot_bytes(context, state)
    before = _land(context, state, row, meta, peers, inside, remote, handed_on, lane, slot)
    if KIND == _DISPATCH:
        set_each(context, state, N_RECV_FIRST, peers, inside, tl.cumsum(every, axis=0) - every)
    elif KIND == _COMBINE:
        set_each(context, state, N_RECV_FIRST, peers, inside, before)
    # a rank whose rails are idle takes part in the steps of its forwarders all the same
    away = tl.where(peers == me, 0, sends)
    taken = tl.maximum(tl.max(remote, axis=0), tl.max(tl.where(far, every, 0), axis=0))
    _write_info(tl.sum(every, axis=0), tl.maximum(taken, tl.max(away, axis=0)), away, capacity, info, KIND)
    poke(info + I_RELAYED, tl.sum(relayed, axis=0))


_NOTIFY = tl.constexpr(NORMAL_NOTIFY)
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
_PEER_INFO = tl.constexpr(8 * normal_device.INFO_WORDS)
_PEER_INFO_BYTES = tl.constexpr(8 * normal_device.PEER_INFO_WORDS)


@triton.jit
def _notify(
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
        if KIND == _DISPATCH:
            for expert in range(local_experts):
                count = tl.load(int32s(expert_counts + 4 * (peers * local_experts + expert)), mask=live, other=0)
                tl.store(int32s(at + _HEADER + 4 * expert), count, mask=live)
            nbytes += (4 * local_experts + 15) // 16 * 16
        going = send_message(
            context, state, peers, live, _NOTIFY, source, target, nbytes, zero + notices + 1, start, LANES, BACKEND
        )
    return going


@triton.jit
def _take_notifies(
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
        at = landing_window(context, tl.where(live, peers, 0)) + peek(state + W_NOTIFY_RECV)
        at += ((number & 1) * ranks + peers) * stride
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
        told = info + _PEER_INFO + peers * _PEER_INFO_BYTES
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
    if KIND == _DISPATCH:
        bad = same & ((rows < 0) | (rows > _MOST_ROWS))
        broken = refuse(context, state, peers, bad, _NOTIFY, rows, _MOST_ROWS, BACKEND)
        most = tl.where(rail, _MOST_ROWS, 0)
        # rule: only rail peers tell of rows to be forwarded
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
    base = peek(state + W_NOTIFY_RECV) + (number & 1) * ranks * stride
    for first in range(0, local_experts, LANES):
        expert = first + tl.arange(0, LANES).to(tl.int64)
        inside = expert < local_experts
        total = tl.load(int32s(expert_counts + 4 * (me * local_experts + expert)), mask=inside, other=0).to(tl.int64)
        for step in range(1, ranks):
            peer = (me + step) % ranks
            zero = tl.zeros_like(expert)
            live = inside & is_live(context, zero + peer)
            at = landing_window(context, peer) + base + peer * stride
            count = tl.load(int32s(at + _HEADER + 4 * expert), mask=live, other=0).to(tl.int64)
            rows = get_each(context, state, N_RECV_ROWS, zero + peer, live)
            if NODES:
                passing = get_each(context, state, N_PASS_RECV, zero + peer, live)
                rows = tl.where(is_far(context, state, zero + peer), passing, rows)
            most = rows * most_each
            refuse(context, state, zero + peer, live & ((count < 0) | (count > most)), _NOTIFY, count, most, BACKEND)
            total += count
        tl.store(int64s(told + 8 * expert), total, mask=inside)


# one compiled kernel whatever the numbers
@kernel(
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
        info: what the host is told (``blocks.normal_device``), in its memory. ticket: of this call, stored there last.
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
            if KIND != _DISPATCH:
                # in halves: the product need not fit
                number = peek(origin) + 1
                low, high = shape_step & 0xFFFF, shape_step >> 16
                shape = (shape + number * low + (((number * high) & 0x7FFFFFFFFFFF) << 16)) & 0x7FFFFFFFFFFFFFFF
            going = tl.full((), 1, tl.int32)
            for first in range(0, ranks, LANES):
                peers = first + tl.arange(0, LANES).to(tl.int64)
                live = is_live(context, peers) & (peers != me)
                if going != 0:
                    going = _notify(
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
                    found = _take_notifies(context, state, peers, live, shape, info, start, KIND, NODES, BACKEND)
                    different = tl.where(found < 0, -1, different + found)
            settle(BACKEND)
    if different > 0:
        # nobody gets as far as saying that writes are over
        poke(state + W_NUMBER, peek(state + W_NUMBER) + 1)
        poke(state + W_NOTICES, peek(state + W_NOTICES) + 1)
        poke(info + I_SHAPE_MISMATCH, different.to(tl.int64))
    if different == 0:
        if KIND == _DISPATCH:
            told = info + _PEER_INFO + ranks * _PEER_INFO_BYTES
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
        poke(info + I_MISSED_DISPATCH_STEPS, peek(state + W_MISSED_DISPATCH_STEPS))
        poke(info + I_MISSED_COMBINE_STEPS, peek(state + W_MISSED_COMBINE_STEPS))
        poke(state + W_OPEN, 1)
    poke(info + I_DIFFERENT, different.to(tl.int64))
    settle(BACKEND)
    lane = tl.arange(0, 2)
    words = tl.zeros([2], tl.int64)
    release_each(words + info + I_TICKET, words + ticket, lane == 0, state + S_SINK, BACKEND)
