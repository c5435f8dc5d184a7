"""Which messages have been read: the acknowledgements that this rank sends and receives.

The same rules as :mod:`..cpu.ll_message`. All that concerns a peer is done by the program that serves it, in one lane.
It first tells the peer what that may be waiting for, then waits itself: two ranks that wait for each other's word have
both spoken, also where a rank serves its peers one after the other, since all go through pairs of ranks in the same
order. Normally every header has said all in time, and nothing here touches memory of the host.
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
    S_NOTICE_RECV,
    S_NOTICE_SEND,
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
    completed_address,
    is_live,
    landing_window,
    own_rank,
    peer_window,
    rank_count,
    stream_of,
    window_address,
)
from .publish import put_command, store_flags
from .wait import (
    FAILURE_PEER_TIMEOUT,
    FAILURE_PROTOCOL,
    GO_ON,
    TOO_LATE,
    end_spin,
    fail,
    fail_at,
    messages_arrived,
    refuse,
    wait_messages,
)
from .words import acquire, acquire_each, any_of, int64s, peek, poke, settle

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
def one_lane(peer: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """(``peer`` and the ones behind it; True in the lane of ``peer`` alone)."""
    lane = tl.arange(0, LANES).to(tl.int64)
    return peer + lane, lane == 0


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
) -> tl.tensor:
    """Wait until each of the ``live`` peers has said that ``needed`` own messages of the phase are read. False after a
    failure."""
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
    return ending == GO_ON


@triton.jit
def wait_space(
    context: tl.tensor,
    state: tl.tensor,
    peer: tl.tensor,
    PHASE: tl.constexpr,
    start: tl.tensor,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Wait until the next message of the phase to ``peer`` may be packed: the peer has read the one before last, and own
    writes that a NIC may still repeat are over. False after a failure."""
    ranks = rank_count(context)
    good = tl.full((), 1, tl.int1)
    if PHASE == _DISPATCH:
        number = peek(state + S_DISPATCH_NUMBER)
    else:
        number = peek(state + S_COMBINE_NUMBER)
    peers, mine = one_lane(peer, LANES)
    if peer != own_rank(context):
        good = _wait_acks(context, state, peers, mine, number - 1, PHASE, start, BACKEND)
    if peer_window(context, peer) == 0:
        # rule: low latency: a combine waits for the completion of the one before
        if good & (number > 0) & (PHASE == _COMBINE):
            # completed here: the peer may take this message as the proof that nothing of the one before is repeated
            good = wait_messages(context, state, peers, mine, PHASE, number - 1, 0, start, False, BACKEND)
        # rule: low latency: staging is packed again only when its last writes completed, to whomever they went
        if number > 1:
            for first in range(0, ranks, LANES):
                others = first + tl.arange(0, LANES).to(tl.int64)
                live = is_live(context, others)
                if good:
                    good = wait_messages(context, state, others, live, PHASE, number - 2, 0, start, False, BACKEND)
    return good


@triton.jit
def _send_notice(
    context: tl.tensor,
    state: tl.tensor,
    peer: tl.tensor,
    dispatched: tl.tensor,
    combined: tl.tensor,
    start: tl.tensor,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Tell ``peer`` both counts now. False after a failure."""
    sent_at = state_table(context, state, T_NOTICES_SENT, peer)
    sent, mapped = peek(sent_at), peer_window(context, peer)
    needed = sent - _NOTICE_SLOTS + 1
    ending, checked = tl.full((), 0, tl.int32), start
    if mapped == 0:
        # the slot's previous notice has left this rank for good
        address = completed_address(context, peer, _NOTICE)
        done = acquire(address, BACKEND)
        while (done < needed) & (ending == GO_ON):
            ending, checked = end_spin(context, start, checked, BACKEND)
            done = acquire(address, BACKEND)
        if ending != GO_ON:
            code = tl.where(ending == TOO_LATE, FAILURE_PEER_TIMEOUT, 0)
            fail(context, state, code, peer, _NOTICE, done, needed, BACKEND)
    if ending == GO_ON:
        slot = sent % _NOTICE_SLOTS
        source = peek(state + S_NOTICE_SEND) + (peer * _NOTICE_SLOTS + slot) * _HEADER
        target = peek(state + S_NOTICE_RECV) + (own_rank(context) * _NOTICE_SLOTS + slot) * _HEADER
        notice = tl.where(mapped != 0, mapped + target, window_address(context) + source)
        # every thread has read how many were sent, and that the slot's last one is gone
        settle(BACKEND)
        poke(notice + _TAG, tl.full((), _NOTICE_TAG, tl.int64))
        poke(notice + _NUMBER, sent)
        poke(notice + _CONSUMED_DISPATCH, dispatched)
        poke(notice + _CONSUMED_COMBINE, combined)
        poke(sent_at, sent + 1)
        poke(state_table(context, state, T_SENT_ACK_DISPATCH, peer), dispatched)
        poke(state_table(context, state, T_SENT_ACK_COMBINE, peer), combined)
        settle(BACKEND)
        if mapped != 0:
            peers, mine = one_lane(peer, LANES)
            store_flags(context, state, peers, mine, _NOTICE, sent + 1, BACKEND)
        else:
            one = tl.full((), 1, tl.int64)
            put_command(
                context, state, peer, _NOTICE, source, target, one * _HEADER, one, start, LANES, BACKEND
            )
    return ending == GO_ON


@triton.jit
def tell_dispatches_read(
    context: tl.tensor, state: tl.tensor, peer: tl.tensor, start: tl.tensor, LANES: tl.constexpr, BACKEND: tl.constexpr
) -> tl.tensor:
    """Before a dispatch: a notice to ``peer`` when it was not told that its dispatch before last is read. (Own combine
    messages that are free; False after a failure.)"""
    needed = peek(state + S_DISPATCH_NUMBER) - 1
    free = free_spaces(context, state, LANES)
    good = tl.full((), 1, tl.int1)
    if (peer != own_rank(context)) & (peek(state_table(context, state, T_SENT_ACK_DISPATCH, peer)) < needed):
        good = _send_notice(context, state, peer, peek(state + S_DISPATCH_READ), free, start, LANES, BACKEND)
    return free, good


@triton.jit
def tell_combines_free(
    context: tl.tensor, state: tl.tensor, peer: tl.tensor, start: tl.tensor, LANES: tl.constexpr, BACKEND: tl.constexpr
) -> tl.tensor:
    """Before a combine: wait until the space of the one before last is free, and tell ``peer`` when it was not told.
    (Own combine messages that are free; False after a failure.)"""
    needed = peek(state + S_COMBINE_NUMBER) - 1
    ranks = rank_count(context)
    free = free_spaces(context, state, LANES)
    good = tl.full((), 1, tl.int1)
    if free < needed:
        # known to be free once every peer's previous message has arrived, see spaces_free
        for first in range(0, ranks, LANES):
            peers = first + tl.arange(0, LANES).to(tl.int64)
            live = is_live(context, peers)
            if good:
                good = wait_messages(context, state, peers, live, _COMBINE, needed, 0, start, True, BACKEND)
        free = needed
    told = peek(state_table(context, state, T_SENT_ACK_COMBINE, peer))
    if good & (peer != own_rank(context)) & (told < needed):
        good = _send_notice(context, state, peer, peek(state + S_DISPATCH_READ), free, start, LANES, BACKEND)
    return free, good
