"""What an operation needs before rows move: who has how many rows for whom, and where they land.

The same places as :mod:`..cpu.normal_prepare`. Between nodes rows of a dispatch that are handed on land in rounds,
whatever room there is: that memory is bounded, and every rank of the node reads it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import META_LINE, NormalNotify
from ...protocol.streams import NORMAL_COMBINE, NORMAL_DISPATCH
from .context import channel_count, is_live, own_rank, rank_count
from .normal_blocks import (
    I_AWAY,
    I_BEYOND,
    I_IN_HEAP,
    I_MOST,
    I_RELAYED,
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
    W_BAD_PEER,
    W_CHUNK_BYTES,
    W_HEAP,
    W_HEAP_BYTES,
    W_IN_HEAP,
    W_LEAST_CHUNK,
    W_META_BYTES,
    W_NODE_RANKS,
    W_RAN,
    W_ROUND_SLOT,
    W_ROUNDS,
    W_ROW_BYTES,
    W_STREAM,
    W_TURN,
    get_each,
    set_each,
)
from .normal_nodes import is_far, is_rail, slot_bytes
from .words import int64s, peek, poke

_DISPATCH = tl.constexpr(NormalNotify.OPERATION_DISPATCH)
_COMBINE = tl.constexpr(NormalNotify.OPERATION_COMBINE)
_DISPATCH_STREAM, _COMBINE_STREAM = tl.constexpr(NORMAL_DISPATCH), tl.constexpr(NORMAL_COMBINE)
_META_LINE = tl.constexpr(META_LINE)
_AT_TOTAL, _AT_MOST, _AT_AWAY = tl.constexpr(8 * I_TOTAL), tl.constexpr(8 * I_MOST), tl.constexpr(8 * I_AWAY)
_AT_IN_HEAP, _AT_BEYOND = tl.constexpr(8 * I_IN_HEAP), tl.constexpr(8 * I_BEYOND)
_AT_RELAYED = tl.constexpr(8 * I_RELAYED)


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
        # own rows are packed in the first turn, straight to the outputs; in a combine they are summed where they are
        set_each(context, state, N_PACK_ROWS, peers, inside & (peers == me), send)
    poke(state + W_TURN, 0)
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
    info: tl.tensor,
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
    poke(info + _AT_IN_HEAP, fits.to(tl.int64))
    return before


@triton.jit
def _tell(
    total: tl.tensor, most: tl.tensor, away: tl.tensor, capacity: tl.tensor, info: tl.tensor, KIND: tl.constexpr
) -> None:
    """Tell the host how many rows the outputs hold, the most of one other rank, and how many leave this one."""
    poke(info + _AT_TOTAL, total)
    poke(info + _AT_MOST, most)
    poke(info + _AT_AWAY, tl.sum(away, axis=0))
    # rule: normal mode: the host is told that more rows came than num_worst_tokens promised
    if (KIND == _DISPATCH) & (capacity > 0):
        if total > capacity:
            poke(info + _AT_BEYOND, total)


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
    """Say where the rows of every peer land: all of them in the heap, or in rounds; see :mod:`..cpu.normal_prepare`."""
    me, ranks = own_rank(context), rank_count(context)
    peers = tl.arange(0, RANKS).to(tl.int64)
    inside = peers < ranks
    rows = get_each(context, state, N_RECV_ROWS, peers, inside)
    away = tl.where(peers == me, 0, get_each(context, state, N_SEND_ROWS, peers, inside))
    remote = tl.where(peers == me, 0, rows)
    slot = peek(state + W_ROUND_SLOT)
    before = _land(context, state, row, meta, peers, inside, remote, tl.zeros_like(inside), peers, slot, info)
    if KIND == _DISPATCH:
        set_each(context, state, N_RECV_FIRST, peers, inside, tl.cumsum(rows, axis=0) - rows)
    elif KIND == _COMBINE:
        set_each(context, state, N_RECV_FIRST, peers, inside, before)
    most = tl.maximum(tl.max(remote, axis=0), tl.max(away, axis=0))
    _tell(tl.sum(rows, axis=0), most, away, capacity, info, KIND)


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
    """Say where the rows of every near rank and rail peer land, when all have spoken."""
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
    before = _land(context, state, row, meta, peers, inside, remote, handed_on, lane, slot, info)
    if KIND == _DISPATCH:
        set_each(context, state, N_RECV_FIRST, peers, inside, tl.cumsum(every, axis=0) - every)
    elif KIND == _COMBINE:
        set_each(context, state, N_RECV_FIRST, peers, inside, before)
    # a rank whose rails are idle takes part in the turns of its forwarders all the same
    away = tl.where(peers == me, 0, sends)
    taken = tl.maximum(tl.max(remote, axis=0), tl.max(tl.where(far, every, 0), axis=0))
    _tell(tl.sum(every, axis=0), tl.maximum(taken, tl.max(away, axis=0)), away, capacity, info, KIND)
    poke(info + _AT_RELAYED, tl.sum(relayed, axis=0))
