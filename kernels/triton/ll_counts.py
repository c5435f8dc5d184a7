"""Which messages have been read: the acknowledgements that this rank sends and receives.

The same rules as :mod:`..cpu.ll_message`. One program serves a peer, in one lane. It first tells the peer what that may
be waiting for, and only then waits itself: two ranks that wait for each other have both spoken.

Normally every header has said all in time, and nothing here touches memory of the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import HEADER_BYTES, NOTICE_SLOTS, LowLatencyHeader, Notice
from ...protocol.streams import LL_COMBINE, LL_DISPATCH
from ...protocol.streams import NOTICE as NOTICE_STREAM
from .blocks import S, T, state_table
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
from .publish import put_commands, store_flags
from .target import lanes
from .wait import FAILURE_PEER_TIMEOUT, FAILURE_PROTOCOL, GO_ON, TOO_LATE, end_spin, fail, wait_messages
from .words import acquire, int64s, least, peek, poke, settle

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
_LARGEST = tl.constexpr((1 << 63) - 1)
#: Where a peer may have said something: its notice, and three messages of each phase.
_PLACES = tl.constexpr(7)


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
def free_spaces(context: tl.tensor, state: tl.tensor) -> tl.tensor:
    """Combine messages whose space here is free again, by the arrivals that kernels have seen; see
    :func:`..cpu.ll_message.spaces_free`."""
    free = peek(state + S.COMBINE_READ)
    ranks = rank_count(context)
    for first in range(0, ranks, lanes()):
        peers = first + tl.arange(0, lanes()).to(tl.int64)
        live = is_live(context, peers)
        even = tl.load(int64s(state_table(state, T.COMBINE_COME, peers)), mask=live, other=1 << 60)
        odd = tl.load(int64s(state_table(state, T.COMBINE_COME + 1, peers)), mask=live, other=1 << 60)
        free = tl.minimum(free, least(tl.minimum(2 * even - 1, 2 * odd)))
    return tl.maximum(free, 0)


@triton.jit
def take_acks(state: tl.tensor, peer: tl.tensor, dispatched: tl.tensor, combined: tl.tensor) -> tuple[tl.tensor, ...]:
    """Note the counts of a header of ``peer``. (A claim that cannot be, else -1; the most that it could be.)"""
    sent, returned = peek(state + S.DISPATCH_NUMBER), peek(state + S.COMBINE_NUMBER)
    dispatched_at = state_table(state, T.RECV_ACK_DISPATCH, peer)
    combined_at = state_table(state, T.RECV_ACK_COMBINE, peer)
    known, known_combined = peek(dispatched_at), peek(combined_at)
    wrong = (dispatched < 0) | (dispatched > sent)
    wrong_combined = (combined < 0) | (combined > returned)
    # every thread has read what one of them is about to overwrite
    settle()
    if (wrong == 0) & (wrong_combined == 0):
        poke(dispatched_at, tl.maximum(known, dispatched))
        poke(combined_at, tl.maximum(known_combined, combined))
    # a negative count is told as one that is too large
    claim = tl.where(wrong, dispatched, combined) & _LARGEST
    return tl.where(wrong | wrong_combined, claim, -1), tl.where(wrong, sent, returned)


@triton.jit
def _message_place(
    context: tl.tensor, state: tl.tensor, peer: tl.tensor, combine: tl.tensor, step: tl.tensor, placed: tl.tensor
) -> tuple[tl.tensor, ...]:
    """A message of ``peer`` that is not received yet, the next of its phase or one of the two behind. (Its number; the
    address of its header when it has arrived, else 0; its first stream.)

    ``placed``: combine messages before this number have a known place.
    """
    first = peek(state + tl.where(combine, S.COMBINE_READ, S.DISPATCH_READ))
    ahead = peek(state + tl.where(combine, S.COMBINE_AHEAD, S.DISPATCH_AHEAD))
    number = first + step
    parity, stream = number & 1, stream_of(tl.where(combine, _COMBINE, _DISPATCH), number)
    header = tl.full((), 0, tl.int64)
    if ((step != 1) | (ahead == 0)) & ((combine == 0) | (number < placed)):
        count = tl.full((), 1 << 60, tl.int64)
        for channel in range(channel_count(context)):
            count = tl.minimum(count, acquire(arrived_address(context, peer, stream + channel)))
        if count >= number // 2 + 1:
            if combine:
                header = peek(state + S.COMBINE_RECV) + parity * peek(state + S.COMBINE_RECV_STEP)
                header += peek(state_table(state, T.COMBINE_BASE + parity, peer))
            else:
                slot = parity * rank_count(context) + peer
                header = peek(state + S.DISPATCH_RECV) + slot * peek(state + S.DISPATCH_SLOT)
            header += landing_window(context, peer)
    return number, header, stream


@triton.jit
def _read_acks(context: tl.tensor, state: tl.tensor, peer: tl.tensor, placed: tl.tensor) -> tuple[tl.tensor, ...]:
    """Look at everything that ``peer`` may have said, and note it in the state block: its newest notice, and headers of
    messages that have arrived although they are not received yet. (Claim and most of what cannot be, as of
    :func:`take_acks`, and its stream.)

    ``placed``: combine messages before this number have a known place (COMBINE_BASE*).
    """
    claim, most = tl.full((), -1, tl.int64), tl.full((), 0, tl.int64)
    stream = most + _NOTICE
    for place in range(_PLACES):
        if claim < 0:
            combine, step = place > 3, tl.where(place > 3, place - 4, place - 1).to(tl.int64)
            tag = tl.where(combine, _COMBINE_TAG, _DISPATCH_TAG).to(tl.int64)
            if place == 0:
                # the newest says all; a newer one may be landing on it: each word is whole, and counts only grow
                notices = acquire(arrived_address(context, peer, _NOTICE))
                slot = peer * _NOTICE_SLOTS + (notices - 1) % _NOTICE_SLOTS
                number, tag = notices - 1, tag * 0 + _NOTICE_TAG
                header = landing_window(context, peer) + peek(state + S.NOTICE_RECV) + slot * _HEADER
                read_at = state_table(state, T.NOTICES_READ, peer)
                fresh = notices > peek(read_at)
                settle()
                if fresh:
                    poke(read_at, notices)
                else:
                    header = header * 0
            else:
                number, header, stream = _message_place(context, state, peer, combine, step, placed)
            if header != 0:
                told, counted = acquire(header + _TAG), acquire(header + _NUMBER)
                if (told == tag) & ((counted == number) | (place == 0)):
                    # acquire: a newer notice may be landing on this one, by a NIC, and its count allows its space to be
                    # written; a mapped peer stores it without an order, but not while this one may be looked at
                    dispatched = acquire(header + _CONSUMED_DISPATCH)
                    combined = acquire(header + _CONSUMED_COMBINE)
                    claim, most = take_acks(state, peer, dispatched, combined)
                    # the next look reads what this one has noted
                    settle()
                elif place == 0:
                    claim, most = told & _LARGEST, tag
                # the header of a message that is not the expected one is refused when the message is received
    return claim, most, stream


@triton.jit
def _wait_acks(
    context: tl.tensor, state: tl.tensor, peer: tl.tensor, needed: tl.tensor, PHASE: tl.constexpr, start: tl.tensor
) -> tl.tensor:
    """Wait until ``peer`` has said that ``needed`` own messages of the phase are read. False after a failure."""
    placed = peek(state + S.COMBINE_NUMBER)
    acked_at = state_table(state, T.RECV_ACK_DISPATCH, peer)
    if PHASE == _COMBINE:
        # the message being sent has its place in the peer's route already
        placed += 1
        acked_at = state_table(state, T.RECV_ACK_COMBINE, peer)
    ending, checked = tl.full((), 0, tl.int32), start
    acked, expected, stream = peek(acked_at), needed, tl.full((), 0, tl.int64) + _NOTICE
    while (acked < needed) & (ending == GO_ON):
        claim, most, told = _read_acks(context, state, peer, placed)
        settle()
        acked = peek(acked_at)
        if claim >= 0:
            ending = tl.full((), _REFUSED, tl.int32)
            acked, expected, stream = claim, most, told
        elif acked < needed:
            ending, checked = end_spin(context, start, checked)
    if ending != GO_ON:
        code = tl.where(ending == TOO_LATE, FAILURE_PEER_TIMEOUT, tl.where(ending == _REFUSED, FAILURE_PROTOCOL, 0))
        fail(context, state, code, peer, stream, acked, expected)
    return ending == GO_ON


@triton.jit
def wait_space(
    context: tl.tensor, state: tl.tensor, peer: tl.tensor, PHASE: tl.constexpr, start: tl.tensor
) -> tl.tensor:
    """Wait until the next message of the phase to ``peer`` may be packed: the peer has read the one before last, and
    own writes that a NIC may still repeat are over. False after a failure."""
    ranks = rank_count(context)
    good = tl.full((), 1, tl.int1)
    if PHASE == _DISPATCH:
        number = peek(state + S.DISPATCH_NUMBER)
    else:
        number = peek(state + S.COMBINE_NUMBER)
    if peer != own_rank(context):
        good = _wait_acks(context, state, peer, number - 1, PHASE, start)
    # staging is packed again only when its last writes completed, to whomever they went; dispatches have two
    over = number - 2
    if PHASE == _COMBINE:
        # combines share one. Also, the peer takes this message as the proof that nothing of the one before is repeated
        over = number - 1
    if (peer_window(context, peer) == 0) & (over >= 0):
        for first in range(0, ranks, lanes()):
            others = first + tl.arange(0, lanes()).to(tl.int64)
            live = is_live(context, others)
            if good:
                good = wait_messages(context, state, others, live, live, PHASE, over, 0, start, False)
    return good


@triton.jit
def one_lane(peer: tl.tensor) -> tuple[tl.tensor, ...]:
    """(``peer`` and the ones behind it; True in the lane of ``peer`` alone)."""
    lane = tl.arange(0, lanes()).to(tl.int64)
    return peer + lane, lane == 0


@triton.jit
def _send_notice(
    context: tl.tensor, state: tl.tensor, peer: tl.tensor, dispatched: tl.tensor, combined: tl.tensor, start: tl.tensor
) -> tl.tensor:
    """Tell ``peer`` both counts now. False after a failure."""
    sent_at = state_table(state, T.NOTICES_SENT, peer)
    sent, mapped = peek(sent_at), peer_window(context, peer)
    needed = sent - _NOTICE_SLOTS + 1
    ending, checked = tl.full((), 0, tl.int32), start
    if mapped == 0:
        # the slot's previous notice has left this rank for good
        address = completed_address(context, peer, _NOTICE)
        done = acquire(address)
        while (done < needed) & (ending == GO_ON):
            ending, checked = end_spin(context, start, checked)
            done = acquire(address)
        if ending != GO_ON:
            code = tl.where(ending == TOO_LATE, FAILURE_PEER_TIMEOUT, 0)
            fail(context, state, code, peer, _NOTICE, done, needed)
    if ending == GO_ON:
        slot = sent % _NOTICE_SLOTS
        source = peek(state + S.NOTICE_SEND) + (peer * _NOTICE_SLOTS + slot) * _HEADER
        target = peek(state + S.NOTICE_RECV) + (own_rank(context) * _NOTICE_SLOTS + slot) * _HEADER
        notice = tl.where(mapped != 0, mapped + target, window_address(context) + source)
        # every thread has read how many were sent, and that the slot's last one is gone
        settle()
        poke(notice + _TAG, tl.full((), _NOTICE_TAG, tl.int64))
        poke(notice + _NUMBER, sent)
        poke(notice + _CONSUMED_DISPATCH, dispatched)
        poke(notice + _CONSUMED_COMBINE, combined)
        poke(sent_at, sent + 1)
        poke(state_table(state, T.SENT_ACK_DISPATCH, peer), dispatched)
        poke(state_table(state, T.SENT_ACK_COMBINE, peer), combined)
        settle()
        peers, mine = one_lane(peer)
        if mapped != 0:
            store_flags(context, state, peers, mine, _NOTICE, sent + 1)
        else:
            none = tl.zeros_like(peers)
            size, last, stream = none + _HEADER, none + 1, none + _NOTICE
            put_commands(context, state, peer, stream, mine, source, target, size, last, start)
    return ending == GO_ON


@triton.jit
def tell_dispatches_read(
    context: tl.tensor, state: tl.tensor, peer: tl.tensor, start: tl.tensor
) -> tuple[tl.tensor, ...]:
    """Before a dispatch: a notice to ``peer`` when it was not told that its dispatch before last is read. (Own combine
    messages that are free; False after a failure.)"""
    needed = peek(state + S.DISPATCH_NUMBER) - 1
    free = free_spaces(context, state)
    good = tl.full((), 1, tl.int1)
    if (peer != own_rank(context)) & (peek(state_table(state, T.SENT_ACK_DISPATCH, peer)) < needed):
        good = _send_notice(context, state, peer, peek(state + S.DISPATCH_READ), free, start)
    return free, good


@triton.jit
def tell_combines_free(
    context: tl.tensor, state: tl.tensor, peer: tl.tensor, start: tl.tensor
) -> tuple[tl.tensor, ...]:
    """Before a combine: wait until the space of the one before last is free, and tell ``peer`` when it was not told.
    (Own combine messages that are free; False after a failure.)"""
    needed = peek(state + S.COMBINE_NUMBER) - 1
    ranks = rank_count(context)
    free = free_spaces(context, state)
    good = tl.full((), 1, tl.int1)
    if free < needed:
        # known to be free once every peer's previous message has arrived, see spaces_free
        for first in range(0, ranks, lanes()):
            peers = first + tl.arange(0, lanes()).to(tl.int64)
            live = is_live(context, peers)
            if good:
                good = wait_messages(context, state, peers, live, live, _COMBINE, needed, 0, start, True)
        free = needed
    told = peek(state_table(state, T.SENT_ACK_COMBINE, peer))
    if good & (peer != own_rank(context)) & (told < needed):
        good = _send_notice(context, state, peer, peek(state + S.DISPATCH_READ), free, start)
    return free, good
