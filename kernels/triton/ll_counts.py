"""Which messages have been read: the acknowledgements that this rank sends and receives.

The same rules as :mod:`..cpu.ll_message`; all of this runs in one program of one warp, LANES peers at a time. A rank
first tells every peer what that peer may be waiting for, then waits itself: two ranks that wait for each other's word
have both spoken. Normally every header has said all in time, and nothing here touches memory of the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import HEADER_BYTES, NOTICE_SLOTS, LowLatencyHeader, Notice
from ...protocol.streams import LL_COMBINE, LL_DISPATCH
from ...protocol.streams import NOTICE as NOTICE_STREAM
from .blocks import (
    S_COMBINE_AHEAD,
    S_COMBINE_NUMBER,
    S_COMBINE_READ,
    S_COMBINE_RECV,
    S_COMBINE_RECV_STEP,
    S_DISPATCH_AHEAD,
    S_DISPATCH_NUMBER,
    S_DISPATCH_READ,
    S_DISPATCH_RECV,
    S_DISPATCH_SLOT,
    S_FREE,
    S_NOTICE_RECV,
    S_NOTICE_SEND,
    S_PARTS,
    S_SINK,
    T_COMBINE_BASE,
    T_COMBINE_COME,
    T_NOTICES_READ,
    T_NOTICES_SENT,
    T_RECV_ACK_COMBINE,
    T_RECV_ACK_DISPATCH,
    T_SENT_ACK_COMBINE,
    T_SENT_ACK_DISPATCH,
    state_table,
)
from .context import (
    arrived_address,
    channel_count,
    completed_address,
    is_live,
    landing_window,
    own_rank,
    peer_window,
    rank_count,
    stream_of,
    window_address,
)
from .publish import put_writes, store_flags, wait_room
from .wait import (
    FAILURE_PEER_TIMEOUT,
    FAILURE_PROTOCOL,
    GO_ON,
    TOO_LATE,
    end_spin,
    fail_at,
    messages_arrived,
    refuse,
    wait_messages,
)
from .words import acquire_each, any_of, int64s, peek, poke, settle

_DISPATCH, _COMBINE = tl.constexpr(LL_DISPATCH), tl.constexpr(LL_COMBINE)
_NOTICE, _NOTICE_SLOTS = tl.constexpr(NOTICE_STREAM), tl.constexpr(NOTICE_SLOTS)
_HEADER = tl.constexpr(HEADER_BYTES)
_TAG, _NUMBER = tl.constexpr(8 * LowLatencyHeader.TAG), tl.constexpr(8 * LowLatencyHeader.NUMBER)
_DISPATCH_TAG = tl.constexpr(LowLatencyHeader.DISPATCH_TAG)
_COMBINE_TAG = tl.constexpr(LowLatencyHeader.COMBINE_TAG)
_NOTICE_TAG = tl.constexpr(Notice.TAG_VALUE)
_CONSUMED_DISPATCH = tl.constexpr(8 * LowLatencyHeader.CONSUMED_DISPATCH)
_CONSUMED_COMBINE = tl.constexpr(8 * LowLatencyHeader.CONSUMED_COMBINE)
assert (Notice.TAG, Notice.NUMBER) == (LowLatencyHeader.TAG, LowLatencyHeader.NUMBER)
assert Notice.CONSUMED_DISPATCH == LowLatencyHeader.CONSUMED_DISPATCH
assert Notice.CONSUMED_COMBINE == LowLatencyHeader.CONSUMED_COMBINE
#: Besides GO_ON, TOO_LATE and RELEASED: a peer's claim was refused, and the failure is reported already.
_REFUSED = tl.constexpr(3)


@triton.jit
def mark_read(state: tl.tensor, READ: tl.constexpr, AHEAD: tl.constexpr, number: tl.tensor) -> None:
    """Message ``number`` is unpacked. The hooks of two may come swapped."""
    count, ahead = peek(state + READ), peek(state + AHEAD)
    # every thread has read what one of them is about to overwrite
    tl.debug_barrier()
    if number == count:
        poke(state + READ, count + 1 + ahead)
        poke(state + AHEAD, 0)
    elif number == count + 1:
        poke(state + AHEAD, 1)


@triton.jit
def free_spaces(context: tl.tensor, state: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """Combine messages whose space here is free again, by the arrivals that kernels have seen; see
    :func:`..cpu.ll_message.spaces_free`."""
    free = peek(state + S_COMBINE_READ)
    ranks = rank_count(context)
    for first in range(0, ranks, LANES):
        peers = first + tl.arange(0, LANES).to(tl.int64)
        live = is_live(context, peers)
        even = tl.load(int64s(state_table(context, state, T_COMBINE_COME, peers)), mask=live, other=1 << 60)
        odd = tl.load(int64s(state_table(context, state, T_COMBINE_COME + 1, peers)), mask=live, other=1 << 60)
        free = tl.minimum(free, tl.min(tl.minimum(2 * even - 1, 2 * odd), axis=0))
    return tl.maximum(free, 0)


@triton.jit
def take_acks(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    chosen: tl.tensor,
    header: tl.tensor,
    stream: tl.tensor,
    dispatched: tl.tensor,
    combined: tl.tensor,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Larger of the counts known and those in the headers of ``chosen`` peers, and 1 when a claim cannot be."""
    sent = peek(state + S_DISPATCH_NUMBER)
    returned = peek(state + S_COMBINE_NUMBER)
    where = tl.where(chosen, header, state + S_SINK)
    # acquire: a newer notice may be landing on this one, and its count allows its space to be written as well
    claim = acquire_each(where + tl.where(chosen, _CONSUMED_DISPATCH, 0), BACKEND)
    claim_combine = acquire_each(where + tl.where(chosen, _CONSUMED_COMBINE, 0), BACKEND)
    bad = chosen & ((claim < 0) | (claim > sent) | (claim_combine < 0) | (claim_combine > returned))
    broken = any_of(bad)
    if broken != 0:
        wrong = (claim < 0) | (claim > sent)
        fail_at(
            context,
            state,
            FAILURE_PROTOCOL,
            peers,
            bad,
            stream,
            tl.where(wrong, claim, claim_combine),
            tl.where(wrong, sent, returned),
            BACKEND,
        )
    good = chosen & (bad == 0)
    return (
        tl.where(good, tl.maximum(dispatched, claim), dispatched),
        tl.where(good, tl.maximum(combined, claim_combine), combined),
        broken,
    )


@triton.jit
def _listen(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    PHASE: tl.constexpr,
    number: tl.tensor,
    wanted: tl.tensor,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Note the counts in the headers of message ``number``, where it has arrived although it is not received yet; 1
    when a claim was refused."""
    listen = live & (tl.zeros_like(peers) + wanted.to(tl.int64) != 0)
    count, _ = messages_arrived(context, state, peers, listen, PHASE, number, BACKEND)
    here = listen & (count >= number // 2 + 1)
    settle(BACKEND)
    inside = tl.where(live, peers, 0)
    if PHASE == _DISPATCH:
        slot = (number & 1) * rank_count(context) + inside
        header = landing_window(context, inside) + peek(state + S_DISPATCH_RECV) + slot * peek(state + S_DISPATCH_SLOT)
        tag = _DISPATCH_TAG
    else:
        region = peek(state + S_COMBINE_RECV) + (number & 1) * peek(state + S_COMBINE_RECV_STEP)
        base = peek(state_table(context, state, T_COMBINE_BASE + (number & 1), inside))
        header = landing_window(context, inside) + region + base
        tag = _COMBINE_TAG
    # a header that is not the expected one is refused when its message is received
    here = here & (tl.load(int64s(header + _TAG), mask=here, other=0) == tag)
    here = here & (tl.load(int64s(header + _NUMBER), mask=here, other=-1) == number)
    dispatched_at = int64s(state_table(context, state, T_RECV_ACK_DISPATCH, peers))
    combined_at = int64s(state_table(context, state, T_RECV_ACK_COMBINE, peers))
    settle(BACKEND)
    dispatched = tl.load(dispatched_at, mask=live, other=0)
    combined = tl.load(combined_at, mask=live, other=0)
    stream = stream_of(PHASE, number)
    dispatched, combined, broken = take_acks(context, state, peers, here, header, stream, dispatched, combined, BACKEND)
    tl.store(dispatched_at, dispatched, mask=live)
    tl.store(combined_at, combined, mask=live)
    return broken


@triton.jit
def _read_acks(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    placed: tl.tensor,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Look at everything the peers may have said, and note it in the state block; 1 when a claim was refused.

    ``placed``: combine messages before this number have a known place (COMBINE_BASE*).
    """
    dispatched_at = int64s(state_table(context, state, T_RECV_ACK_DISPATCH, peers))
    combined_at = int64s(state_table(context, state, T_RECV_ACK_COMBINE, peers))
    read_at = int64s(state_table(context, state, T_NOTICES_READ, peers))
    dispatched = tl.load(dispatched_at, mask=live, other=0)
    combined = tl.load(combined_at, mask=live, other=0)
    notices_read = tl.load(read_at, mask=live, other=0)
    inside = tl.where(live, peers, 0)
    address = arrived_address(context, inside, _NOTICE)
    notices = acquire_each(tl.where(live, address, state + S_SINK), BACKEND)
    settle(BACKEND)
    fresh = live & (notices > notices_read)
    # the newest says all; a newer one may be landing on it: each word is whole, and counts only grow
    slot = inside * _NOTICE_SLOTS + tl.where(fresh, notices - 1, 0) % _NOTICE_SLOTS
    notice = landing_window(context, inside) + peek(state + S_NOTICE_RECV) + slot * _HEADER
    tag = tl.load(int64s(notice), mask=fresh, other=_NOTICE_TAG)
    strange = refuse(context, state, peers, tag != _NOTICE_TAG, _NOTICE, tag, _NOTICE_TAG, BACKEND)
    dispatched, combined, broken = take_acks(
        context, state, peers, fresh & (tag == _NOTICE_TAG), notice, _NOTICE, dispatched, combined, BACKEND
    )
    broken = broken | strange
    notices_read = tl.where(fresh, notices, notices_read)
    tl.store(dispatched_at, dispatched, mask=live)
    tl.store(combined_at, combined, mask=live)
    tl.store(read_at, notices_read, mask=live)
    first, ahead = peek(state + S_DISPATCH_READ), peek(state + S_DISPATCH_AHEAD)
    for step in range(3):
        wanted = (first + step <= peek(state + S_DISPATCH_NUMBER)) & ((step != 1) | (ahead == 0))
        broken = broken | _listen(context, state, peers, live, _DISPATCH, first + step, wanted, BACKEND)
    first, ahead = peek(state + S_COMBINE_READ), peek(state + S_COMBINE_AHEAD)
    for step in range(3):
        wanted = (first + step < placed) & ((step != 1) | (ahead == 0))
        broken = broken | _listen(context, state, peers, live, _COMBINE, first + step, wanted, BACKEND)
    return broken


@triton.jit
def _recv_acks(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, live: tl.tensor, PHASE: tl.constexpr
) -> tl.tensor:
    """Own messages of the phase that the peers say they have read."""
    if PHASE == _COMBINE:
        table = T_RECV_ACK_COMBINE
    else:
        table = T_RECV_ACK_DISPATCH
    return tl.load(int64s(state_table(context, state, table, peers)), mask=live, other=1 << 60)


@triton.jit
def _wait_acks(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    needed: tl.tensor,
    PHASE: tl.constexpr,
    start: tl.tensor,
    BACKEND: tl.constexpr,
) -> None:
    """Wait until each of the ``live`` peers has said that ``needed`` own messages of the phase are read."""
    placed = peek(state + S_COMBINE_NUMBER)
    if PHASE == _COMBINE:
        # the message being sent has its place in the peers' route already
        placed += 1
    ending, checked = tl.full((), 0, tl.int32), start
    acked = _recv_acks(context, state, peers, live, PHASE)
    present = tl.min((acked >= needed).to(tl.int32), axis=0)
    while (present == 0) & (ending == GO_ON):
        broken = _read_acks(context, state, peers, live, placed, BACKEND)
        settle(BACKEND)
        now = _recv_acks(context, state, peers, live, PHASE)
        present = tl.min((now >= needed).to(tl.int32), axis=0)
        if broken != 0:
            ending = tl.full((), _REFUSED, tl.int32)
        elif present == 0:
            ending, checked = end_spin(context, start, checked, BACKEND)
    if (ending != GO_ON) & (ending != _REFUSED):
        last = _recv_acks(context, state, peers, live, PHASE)
        code = tl.where(ending == TOO_LATE, FAILURE_PEER_TIMEOUT, 0)
        fail_at(context, state, code, peers, live & (last < needed), _NOTICE, last, needed, BACKEND)


@triton.jit
def wait_spaces(
    context: tl.tensor,
    state: tl.tensor,
    PHASE: tl.constexpr,
    start: tl.tensor,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Wait until the next message of the phase may be packed and published: every peer has read the one before last,
    own writes that a NIC may still repeat are over, the rings have room."""
    if PHASE == _DISPATCH:
        number = peek(state + S_DISPATCH_NUMBER)
        over = number - 2
    else:
        # completed here: the peer may take this message as the proof that nothing of the one before is repeated; it
        # also frees this parity's staging, since the previous call waited likewise for the one before that
        number = peek(state + S_COMBINE_NUMBER)
        over = number - 1
    ranks, me = rank_count(context), own_rank(context)
    for first in range(0, ranks, LANES):
        peers = first + tl.arange(0, LANES).to(tl.int64)
        live = is_live(context, peers) & (peers != me)
        _wait_acks(context, state, peers, live, number - 1, PHASE, start, BACKEND)
        if over >= 0:
            wait_messages(context, state, peers, live, PHASE, over, 0, start, False, BACKEND)
    channels = channel_count(context)
    for channel in range(channels):
        # as if every channel had the same ring
        commands = ranks * channels * peek(state + S_PARTS)
        wait_room(context, state, stream_of(PHASE, number) + channel, commands, start, BACKEND)


@triton.jit
def _send_notices(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    chosen: tl.tensor,
    dispatched: tl.tensor,
    combined: tl.tensor,
    start: tl.tensor,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Tell the ``chosen`` peers both counts now."""
    sent_at = int64s(state_table(context, state, T_NOTICES_SENT, peers))
    sent = tl.load(sent_at, mask=chosen, other=0)
    inside = tl.where(chosen, peers, 0)
    mapped = peer_window(context, inside)
    proxied = chosen & (mapped == 0)
    # the slot's previous notice has left this rank for good
    address = tl.where(proxied, completed_address(context, inside, _NOTICE), state + S_SINK)
    needed = tl.where(proxied, sent - _NOTICE_SLOTS + 1, -(1 << 60))
    ending, checked = tl.full((), 0, tl.int32), start
    done = acquire_each(address, BACKEND)
    present = tl.min((done >= needed).to(tl.int32), axis=0)
    while (present == 0) & (ending == GO_ON):
        ending, checked = end_spin(context, start, checked, BACKEND)
        now = acquire_each(address, BACKEND)
        present = tl.min((now >= needed).to(tl.int32), axis=0)
    if present == 0:
        last = acquire_each(address, BACKEND)
        code = tl.where(ending == TOO_LATE, FAILURE_PEER_TIMEOUT, 0)
        fail_at(context, state, code, peers, chosen & (done < needed), _NOTICE, last, needed, BACKEND)
    elif wait_room(context, state, _NOTICE, tl.sum(proxied.to(tl.int64), axis=0), start, BACKEND):
        slot = sent % _NOTICE_SLOTS
        source = peek(state + S_NOTICE_SEND) + (inside * _NOTICE_SLOTS + slot) * _HEADER
        target = peek(state + S_NOTICE_RECV) + (own_rank(context) * _NOTICE_SLOTS + slot) * _HEADER
        notice = tl.where(proxied, window_address(context) + source, mapped + target)
        zero = tl.zeros_like(peers)
        tl.store(int64s(notice + _TAG), zero + _NOTICE_TAG, mask=chosen)
        tl.store(int64s(notice + _NUMBER), sent, mask=chosen)
        tl.store(int64s(notice + _CONSUMED_DISPATCH), zero + dispatched, mask=chosen)
        tl.store(int64s(notice + _CONSUMED_COMBINE), zero + combined, mask=chosen)
        settle(BACKEND)
        store_flags(context, state, peers, chosen & (mapped != 0), _NOTICE, sent + 1, BACKEND)
        put_writes(context, state, peers, proxied, _NOTICE, source, target, zero + _HEADER, proxied, BACKEND)
        tl.store(sent_at, sent + 1, mask=chosen)
        tl.store(int64s(state_table(context, state, T_SENT_ACK_DISPATCH, peers)), zero + dispatched, mask=chosen)
        tl.store(int64s(state_table(context, state, T_SENT_ACK_COMBINE, peers)), zero + combined, mask=chosen)


@triton.jit
def ack_dispatches(
    context: tl.tensor, state: tl.tensor, start: tl.tensor, LANES: tl.constexpr, BACKEND: tl.constexpr
) -> None:
    """Before a dispatch: notices to the peers that were not told that their dispatch before last is read."""
    needed = peek(state + S_DISPATCH_NUMBER) - 1
    ranks, me, read = rank_count(context), own_rank(context), peek(state + S_DISPATCH_READ)
    free = free_spaces(context, state, LANES)
    poke(state + S_FREE, free)
    for first in range(0, ranks, LANES):
        peers = first + tl.arange(0, LANES).to(tl.int64)
        live = is_live(context, peers) & (peers != me)
        sent_ack = tl.load(int64s(state_table(context, state, T_SENT_ACK_DISPATCH, peers)), mask=live, other=1 << 60)
        if any_of(sent_ack < needed) != 0:
            _send_notices(context, state, peers, sent_ack < needed, read, free, start, LANES, BACKEND)


@triton.jit
def ack_combines(
    context: tl.tensor, state: tl.tensor, start: tl.tensor, LANES: tl.constexpr, BACKEND: tl.constexpr
) -> None:
    """Before a combine: wait until the space of the one before last is free, and tell the peers that were not told."""
    number = peek(state + S_COMBINE_NUMBER)
    needed = number - 1
    ranks, me = rank_count(context), own_rank(context)
    free = free_spaces(context, state, LANES)
    if free < needed:
        # known to be free once every peer's previous message has arrived, see spaces_free
        arrived = needed >= 0
        for first in range(0, ranks, LANES):
            peers = first + tl.arange(0, LANES).to(tl.int64)
            live = is_live(context, peers)
            if arrived:
                arrived = wait_messages(context, state, peers, live, _COMBINE, needed, 0, start, True, BACKEND)
            come = int64s(state_table(context, state, T_COMBINE_COME + (needed & 1), peers))
            tl.store(come, tl.zeros_like(peers) + needed // 2 + 1, mask=live)
        free = needed
    poke(state + S_FREE, free)
    for first in range(0, ranks, LANES):
        peers = first + tl.arange(0, LANES).to(tl.int64)
        live = is_live(context, peers) & (peers != me)
        sent_ack = tl.load(int64s(state_table(context, state, T_SENT_ACK_COMBINE, peers)), mask=live, other=1 << 60)
        if any_of(sent_ack < needed) != 0:
            read = peek(state + S_DISPATCH_READ)
            _send_notices(context, state, peers, sent_ack < needed, read, free, start, LANES, BACKEND)
