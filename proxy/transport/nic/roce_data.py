"""Compiled data path of ``roce``: RDMA writes with immediates over reliable connections.

A write is one RDMA_WRITE_WITH_IMM. Its immediate uses up a receive of the peer, so a peer says how many it has posted
in all, by a plain RDMA_WRITE into a word of ours: a receiver that stands still makes its senders BUSY, and its NIC is
never asked for a receive that is not there.

What a link does is in :mod:`.roce_link`. No function here blocks, allocates or raises.
"""

from __future__ import annotations

import errno
import functools

from ....native.atomics import load64, peek, peek32, poke
from ....native.calls import call3_int, monotonic_ns
from ....native.jit import compiled, inlined
from ....protocol.command import MAX_WRITE_BYTES
from ....protocol.imm import IMM
from ..base import (
    ACCEPTED,
    ARRIVED,
    BUSY,
    DOWN,
    FAULT,
    FAULT_BAD_FRAME,
    FAULT_WRONG_SOURCE,
    SENT,
    c_functions,
    put_event,
)
from ..verbs import codes
from ..verbs.abi import WC
from .roce_link import (
    add_request,
    fail_peer,
    grant,
    link_count,
    link_record,
    owe_credit,
    peer_record,
    renew_receives,
    retire,
    ring,
    stop_links,
    take_credit,
)
from .roce_words import (
    ABSENT,
    ALLOWED,
    BROKEN_RAIL,
    BROKEN_STATUS,
    BYTE_LIMIT,
    CLOSED,
    COMMON_RAILS,
    COMPLETIONS,
    CQ,
    CREDIT_IN,
    CURSOR,
    DEVICE_LKEYS,
    DEVICE_RKEYS,
    DEVICE_SHIFT,
    DEVICE_TARGET,
    DEVICE_TARGET_SHIFT,
    DEVICE_WINDOW,
    DIRTY_COUNT,
    DROPPED,
    ENDED_AT,
    ENDING,
    ENDING_PEER,
    ERRNOS,
    FLAGS,
    GRACE_NS,
    IMMEDIATES,
    LENGTHS,
    LINK_LOAD,
    LKEYS,
    LOAD,
    NEXT_PLACE,
    OWED,
    PEER,
    PEER_LINKS,
    POLL_CQ,
    POLL_ENTRIES,
    POSTED,
    PROBLEM,
    QP,
    QPS,
    RAIL,
    RAIL_COUNT,
    RAIL_WORDS,
    RAILS,
    RANK,
    RANKS,
    READY,
    READY_HEAD,
    READY_LINK,
    READY_TAIL,
    RECEIVE_BIT,
    RECEIVE_OVER,
    RETIRED,
    RKEYS,
    SEND_RESERVE,
    SEND_SLOTS,
    SHIFT,
    SPLIT,
    STATE,
    STATUS,
    STRIPES,
    TARGET,
    TARGET_SHIFT,
    TICKETS,
    TOLD,
    UP,
    WATCH_EVERY_POLLS,
    WATCH_NS,
    WATCH_POLLS,
    WATCH_TIME,
    WATCHING,
    WINDOW,
    WINDOW_BYTES,
)
from .striping import rail_of

__all__ = ["warm"]

_WC_BYTES = WC.nbytes
_WR_ID, _STATUS, _OPCODE, _VENDOR = WC["wr_id"], WC["status"], WC["opcode"], WC["vendor_err"]
_BYTE_LEN, _IMM = WC["byte_len"], WC["imm_data"]
_WRITE_WITH_IMM = codes.WR_RDMA_WRITE_WITH_IMM
_RECEIVED_IMM = codes.WC_RECV_RDMA_WITH_IMM
_SOURCE_SHIFT = IMM["source"].shift
_LOW32 = 0xFFFFFFFF
_rail_of = inlined(rail_of)
_EINVAL, _EIO, _ENOTCONN = errno.EINVAL, errno.EIO, errno.ENOTCONN


@inlined
def _swap(word: int) -> int:
    """A 32-bit word with its bytes in the other order: verbs keeps immediates big-endian."""
    return (word & 0xFF) << 24 | (word & 0xFF00) << 8 | (word >> 8) & 0xFF00 | (word >> 24) & 0xFF


@inlined
def _open_link(context: int, link: int, nbytes: int) -> bool:
    """True when the link can take one more write of ``nbytes`` bytes now."""
    # rule: roce: no more work requests than the send queue holds
    if peek(link + 8 * POSTED) - peek(link + 8 * RETIRED) >= peek(context + 8 * SEND_SLOTS) - SEND_RESERVE:
        return False
    rail = peek(link + 8 * RAIL)
    limit, load = peek(rail + 8 * BYTE_LIMIT), peek(rail + 8 * LOAD)
    # One write always goes: a limit smaller than it slows a NIC down and never stops it.
    # rule: roce: one write always goes
    # rule: roce: a NIC has no more in flight than its share
    if limit > 0 and load > 0 and load + nbytes > limit:
        return False
    # rule: roce: an immediate goes out only when the peer has posted a receive for it
    return peek(link + 8 * IMMEDIATES) < peek(link + 8 * ALLOWED) or take_credit(context, link)


@inlined
def _count_bytes(context: int, link: int, nbytes: int) -> None:
    """The next work request of the link puts ``nbytes`` bytes on its rail."""
    rail = peek(link + 8 * RAIL)
    if peek(rail + 8 * BYTE_LIMIT) > 0:
        slot = peek(link + 8 * POSTED) % peek(context + 8 * SEND_SLOTS)
        poke(peek(link + 8 * LENGTHS) + 8 * slot, nbytes)
        poke(link + 8 * LINK_LOAD, peek(link + 8 * LINK_LOAD) + nbytes)
        poke(rail + 8 * LOAD, peek(rail + 8 * LOAD) + nbytes)


@inlined
def _uncount_bytes(link: int, slot: int) -> None:
    """The write in ``slot`` of the link is off its rail."""
    rail = peek(link + 8 * RAIL)
    if peek(rail + 8 * BYTE_LIMIT) > 0:
        nbytes = peek(peek(link + 8 * LENGTHS) + 8 * slot)
        poke(link + 8 * LINK_LOAD, peek(link + 8 * LINK_LOAD) - nbytes)
        poke(rail + 8 * LOAD, peek(rail + 8 * LOAD) - nbytes)


def _post(context: int, peer: int, stream: int, local: int, target: int, nbytes: int, imm: int, wr_id: int) -> int:
    record = peer_record(context, peer)
    state = peek(record + 8 * STATE)
    if state != UP:
        # A failing peer is reported by poll, with its reason, once what it sent has been delivered.
        return BUSY if state == ENDING_PEER else -_ENOTCONN
    if nbytes < 0 or nbytes > MAX_WRITE_BYTES or target < 0 or target > peek(context + 8 * WINDOW_BYTES) - nbytes:
        return -_EINVAL
    source, split = local - peek(context + 8 * WINDOW), peek(context + 8 * SPLIT)
    on_device = target < split
    # rule: roce: a write lies in one kind of memory
    if (nbytes > 0 and (source < split) != on_device) or (on_device and max(source, target) + nbytes > split):
        return -_EINVAL
    qps, rails, rail = peek(context + 8 * QPS), peek(record + 8 * COMMON_RAILS), 0
    if rails > 1:
        # rule: roce: a stream keeps to the NIC that both ends know
        rail = _rail_of(peek(peek(context + 8 * STRIPES) + 8 * stream), peek(context + 8 * RANK), peer, rails)
    index = peer * peek(context + 8 * PEER_LINKS) + rail * qps
    link = first = link_record(context, index)
    # rule: roce: queue pairs of a rail take turns of their own
    place = peek(first + 8 * NEXT_PLACE)
    if place > 0:
        index += place
        link = link_record(context, index)
    if not _open_link(context, link, nbytes):
        return BUSY
    if qps > 1:
        # Counted for each rail: streams that alternate between two rails would keep to one queue pair of each.
        poke(first + 8 * NEXT_PLACE, place + 1 if place + 1 < qps else 0)
    poke(link + 8 * IMMEDIATES, peek(link + 8 * IMMEDIATES) + 1)
    _count_bytes(context, link, nbytes)
    # A write lies whole in the chunk in which it starts, at either end: chunks overlap by the longest write.
    if on_device:
        local = peek(context + 8 * DEVICE_WINDOW) + source
        lkey = peek(peek(link + 8 * DEVICE_LKEYS) + (source >> peek(link + 8 * DEVICE_SHIFT)) * 8)
        rkey = peek(peek(link + 8 * DEVICE_RKEYS) + (target >> peek(link + 8 * DEVICE_TARGET_SHIFT)) * 8)
        there = peek(record + 8 * DEVICE_TARGET) + target
    else:
        lkey = peek(peek(link + 8 * LKEYS) + (source >> peek(link + 8 * SHIFT)) * 8)
        rkey = peek(peek(link + 8 * RKEYS) + (target >> peek(link + 8 * TARGET_SHIFT)) * 8)
        there = peek(record + 8 * TARGET) + target
    add_request(
        context, index, link, _WRITE_WITH_IMM, local, nbytes, lkey, there, rkey, _swap(imm), wr_id + 1
    )  # fmt: skip
    return ACCEPTED


def _flush(context: int) -> int:
    ring(context)
    return 0


@compiled
def _tell(context: int, events: int, count: int, limit: int) -> int:
    """SENT events of retired writes until ``limit`` events are stored; returns the new count."""
    slots = link_count(context)
    while count < limit and peek(context + 8 * READY_TAIL) < peek(context + 8 * READY_HEAD):
        tail = peek(context + 8 * READY_TAIL)
        link = link_record(context, peek(peek(context + 8 * READY) + tail % slots * 8))
        peer = peek(link + 8 * PEER)
        # rule: roce: a write is over only when it has completed
        told, retired = peek(link + 8 * TOLD), peek(link + 8 * RETIRED)
        state = peek(peer_record(context, peer) + 8 * STATE)
        if state >= CLOSED:
            told = retired
        tickets, sends = peek(link + 8 * TICKETS), peek(context + 8 * SEND_SLOTS)
        while told < retired and count < limit:
            ticket = peek(tickets + told % sends * 8)
            if ticket != 0:
                if state == UP:
                    _uncount_bytes(link, told % sends)
                put_event(events, count, SENT, ticket - 1, peer, 0)
                count += 1
            told += 1
        poke(link + 8 * TOLD, told)
        if told == retired:
            poke(link + 8 * FLAGS, peek(link + 8 * FLAGS) & ~READY_LINK)
            poke(context + 8 * READY_TAIL, tail + 1)
    return count


@compiled
def _close_with_fault(context: int, peer: int) -> None:
    """The peer broke the format: nothing of it is believed any more."""
    poke(peer_record(context, peer) + 8 * STATE, CLOSED)
    stop_links(context, peer)


@compiled
def _failed(context: int, index: int, link: int, entry: int) -> None:
    """A completion with an error."""
    wr_id = peek(entry + _WR_ID)
    peer = peek(link + 8 * PEER)
    status, vendor = peek32(entry + _STATUS), peek32(entry + _VENDOR)
    if wr_id & RECEIVE_BIT != 0:
        poke(link + 8 * FLAGS, peek(link + 8 * FLAGS) | RECEIVE_OVER)
    elif peek(peer_record(context, peer) + 8 * STATE) == UP:
        # The first failure of a queue pair: everything before it has completed.
        number = wr_id & _LOW32
        # rule: roce: what completed before a failure is over
        if number != peek(link + 8 * RETIRED) & _LOW32:
            retire(context, index, link, (number - 1) & _LOW32)
    fail_peer(context, link, status, vendor)


@inlined
def _completion(context: int, entry: int, events: int, count: int) -> int:
    """Handle one completion; returns the new count of events."""
    wr_id = peek(entry + _WR_ID)
    index = (wr_id & ~RECEIVE_BIT) >> 32
    link = link_record(context, index)
    if peek32(entry + _STATUS) != 0:
        _failed(context, index, link, entry)
        return count
    if wr_id & RECEIVE_BIT == 0:
        retire(context, index, link, wr_id & _LOW32)
        return count
    peer = peek(link + 8 * PEER)
    state = peek(peer_record(context, peer) + 8 * STATE)
    if state not in (UP, ENDING_PEER):
        return count
    imm = _swap(peek32(entry + _IMM))
    status = 0
    if peek32(entry + _OPCODE) != _RECEIVED_IMM:
        status = FAULT_BAD_FRAME
    # rule: roce: the source in an immediate is the rank of its queue pair
    elif imm >> _SOURCE_SHIFT != peer:
        status = FAULT_WRONG_SOURCE
    if status != 0:
        put_event(events, count, FAULT, imm, peer, status)
        if state == ENDING_PEER:
            poke(context + 8 * ENDING, peek(context + 8 * ENDING) - 1)
        _close_with_fault(context, peer)
        return count + 1
    put_event(events, count, ARRIVED, imm, peer, peek32(entry + _BYTE_LEN))
    if state == UP:
        renew_receives(context, link)
    return count + 1


@compiled
def _end_peers(context: int, events: int, count: int, limit: int) -> int:
    """DOWN for failed peers whose receives are flushed, or whose grace is over; returns the new count of events."""
    links = peek(context + 8 * PEER_LINKS)
    for peer in range(peek(context + 8 * RANKS)):
        record = peer_record(context, peer)
        if count >= limit or peek(record + 8 * STATE) != ENDING_PEER:
            continue
        open_links = 0
        for place in range(links):
            link = link_record(context, peer * links + place)
            if peek(link + 8 * QP) != 0 and peek(link + 8 * FLAGS) & RECEIVE_OVER == 0:
                open_links += 1
        # rule: roce: what arrived before a failure is delivered before DOWN
        if open_links > 0 and monotonic_ns() - peek(record + 8 * ENDED_AT) < GRACE_NS:
            continue
        status = peek(record + 8 * STATUS)
        code = -status if status < 0 else peek(peek(context + 8 * ERRNOS) + (status & 31) * 8)
        put_event(events, count, DOWN, 0, peer, code)
        count += 1
        poke(record + 8 * STATE, CLOSED)
        poke(context + 8 * ENDING, peek(context + 8 * ENDING) - 1)
    return count


@compiled
def _watch(context: int, events: int, count: int, limit: int) -> int:
    """Report impossible credits, and write to peers with whom nothing is under way: a dead one does not answer."""
    poke(context + 8 * WATCH_POLLS, 0)
    now = monotonic_ns()
    if now < peek(context + 8 * WATCH_TIME):
        return count
    poke(context + 8 * WATCH_TIME, now + WATCH_NS)
    watching = peek(context + 8 * WATCHING)
    for index in range(link_count(context)):
        link = link_record(context, index)
        record = peer_record(context, peek(link + 8 * PEER))
        if peek(link + 8 * QP) == 0 or peek(record + 8 * STATE) != UP:
            continue
        problem = peek(record + 8 * PROBLEM)
        if problem != 0 and count < limit:
            put_event(events, count, FAULT, load64(peek(link + 8 * CREDIT_IN)), peek(link + 8 * PEER), problem)
            count += 1
            _close_with_fault(context, peek(link + 8 * PEER))
        # rule: roce: an idle peer is written to
        elif watching != 0 and peek(link + 8 * POSTED) == peek(link + 8 * RETIRED):
            owe_credit(context, link)
    return count


@compiled
def _poll_rail(context: int, rail: int, events: int, count: int, limit: int) -> int:
    """Take the completions of one rail; the new count of events or a negative errno."""
    room = min(limit - count, POLL_ENTRIES)
    cq = peek(rail + 8 * CQ)
    if room <= 0 or cq == 0:
        return count
    entries = peek(context + 8 * COMPLETIONS)
    found = call3_int(peek(rail + 8 * POLL_CQ), cq, room, entries)
    if found < 0:
        poke(context + 8 * BROKEN_RAIL, (rail - peek(context + 8 * RAILS)) // (8 * RAIL_WORDS) + 1)
        poke(context + 8 * BROKEN_STATUS, found)
        return -_EIO
    for place in range(found):
        count = _completion(context, entries + place * _WC_BYTES, events, count)
    return count


def _poll(context: int, events: int, limit: int) -> int:
    # Half of the room at most, so that a burst of own writes does not hold back what arrives.
    count = _tell(context, events, 0, (limit + 1) // 2)
    polls = peek(context + 8 * WATCH_POLLS) + 1
    poke(context + 8 * WATCH_POLLS, polls)
    if polls >= WATCH_EVERY_POLLS:
        count = _watch(context, events, count, limit)
    rails, index = peek(context + 8 * RAIL_COUNT), peek(context + 8 * CURSOR)
    for _ in range(rails):
        count = _poll_rail(context, peek(context + 8 * RAILS) + index * (8 * RAIL_WORDS), events, count, limit)
        if count < 0:
            return count
        index = index + 1 if index + 1 < rails else 0
    # The one after the first has the first turn next time: a rail that is always full starves no other.
    poke(context + 8 * CURSOR, index + 1 if index + 1 < rails else 0)
    count = _tell(context, events, count, limit)
    if peek(context + 8 * ENDING) != 0:
        count = _end_peers(context, events, count, limit)
    if peek(context + 8 * OWED) != 0:
        grant(context)
        if peek(context + 8 * DIRTY_COUNT) != 0:
            ring(context)
    return count


def _drop(context: int, peer: int, reason: int) -> int:
    record = peer_record(context, peer)
    state = peek(record + 8 * STATE)
    if state in (ABSENT, DROPPED):
        return 0
    if state == ENDING_PEER:
        poke(context + 8 * ENDING, peek(context + 8 * ENDING) - 1)
    poke(record + 8 * STATE, DROPPED)
    # Once this returns the NIC reads no source bytes for the peer any more, so that they may be used again.
    # rule: roce: the NIC stops reading and writing for a peer that was dropped
    stop_links(context, peer)
    return 0


@functools.cache
def warm() -> tuple[int, int, int, int]:
    """Compile (or load) the data path; addresses of post, flush, poll and drop."""
    return c_functions("roce", _post, _flush, _poll, _drop)
