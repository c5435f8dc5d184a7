"""Compiled data path of ``roce``: RDMA writes with immediates over reliable connections.

A write is one RDMA_WRITE_WITH_IMM. Its immediate uses up a receive of the peer, so a peer says how many it has posted
in all, by a plain RDMA_WRITE into a word of ours: a receiver that stands still makes its senders BUSY, and its NIC is
never asked for a receive that is not there.

What a link does is in :mod:`.roce_link`. No function here blocks, allocates or raises.
"""

from __future__ import annotations

import errno

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
    DataFunctions,
    put_event,
)
from ..verbs import codes
from ..verbs.abi import WC
from . import roce_words as rc
from . import words
from .loopback import flush_by_reading
from .roce_link import (
    add_request,
    fail_peer,
    grant,
    link_count,
    link_record,
    owe_credit,
    renew_receives,
    retire,
    ring,
    stop_links,
    take_credit,
)

_WC_BYTES = WC.nbytes
_WR_ID, _STATUS, _OPCODE, _VENDOR = WC["wr_id"], WC["status"], WC["opcode"], WC["vendor_err"]
_BYTE_LEN, _IMM = WC["byte_len"], WC["imm_data"]
_WRITE_WITH_IMM = codes.WR_RDMA_WRITE_WITH_IMM
_RECEIVED_IMM = codes.WC_RECV_RDMA_WITH_IMM
_SOURCE_SHIFT = IMM["source"].shift
_LOW32 = 0xFFFFFFFF
_EINVAL, _EIO, _ENOTCONN = errno.EINVAL, errno.EIO, errno.ENOTCONN


@inlined
def _open_link(context: int, link: int, nbytes: int) -> bool:
    """True when the link can take one more write of ``nbytes`` bytes now."""
    # rule: roce: no more work requests than the send queue holds
    if peek(link + 8 * rc.POSTED) - peek(link + 8 * rc.REPORTED) >= peek(context + 8 * rc.SEND_SLOTS) - rc.SEND_RESERVE:
        return False
    rail = peek(link + 8 * rc.RAIL)
    limit, load = peek(rail + 8 * rc.BYTE_LIMIT), peek(rail + 8 * rc.LOAD)
    # One write always goes: a limit smaller than it slows a NIC down and never stops it.
    # rule: roce: one write always goes
    # rule: roce: a NIC has no more in flight than its share
    if load > 0 and load + nbytes > limit:
        return False
    # rule: roce: an immediate goes out only when the peer has posted a receive for it
    return peek(link + 8 * rc.IMMEDIATES) < peek(link + 8 * rc.ALLOWED) or take_credit(context, link)


@inlined
def _count_bytes(context: int, link: int, nbytes: int) -> None:
    """The next work request of the link puts ``nbytes`` bytes on its rail."""
    rail = peek(link + 8 * rc.RAIL)
    slot = peek(link + 8 * rc.POSTED) % peek(context + 8 * rc.SEND_SLOTS)
    poke(peek(link + 8 * rc.LENGTHS) + 8 * slot, nbytes)
    poke(link + 8 * rc.LINK_LOAD, peek(link + 8 * rc.LINK_LOAD) + nbytes)
    poke(rail + 8 * rc.LOAD, peek(rail + 8 * rc.LOAD) + nbytes)


@inlined
def _uncount_bytes(link: int, slot: int) -> None:
    """The write in ``slot`` of the link is off its rail."""
    rail, nbytes = peek(link + 8 * rc.RAIL), peek(peek(link + 8 * rc.LENGTHS) + 8 * slot)
    poke(link + 8 * rc.LINK_LOAD, peek(link + 8 * rc.LINK_LOAD) - nbytes)
    poke(rail + 8 * rc.LOAD, peek(rail + 8 * rc.LOAD) - nbytes)


def _post(context: int, peer: int, stream: int, local: int, target: int, nbytes: int, imm: int, wr_id: int) -> int:
    record = words.peer_record(context, peer)
    state = peek(record + 8 * words.STATE)
    if state != words.UP:
        # A failing peer is reported by poll, with its reason, once what it sent has been delivered.
        return BUSY if state == rc.ENDING_PEER else -_ENOTCONN
    if nbytes < 0 or nbytes > MAX_WRITE_BYTES or target < 0 or target > peek(context + 8 * words.WINDOW_BYTES) - nbytes:
        return -_EINVAL
    source, split = local - peek(context + 8 * words.WINDOW), peek(context + 8 * words.SPLIT)
    if nbytes == 0:
        # it stands where the memory in use begins: the other kind may not be registered
        source = target = 0
    on_device = target < split
    # rule: roce: a write lies in one kind of memory
    if (source < split) != on_device or (on_device and max(source, target) + nbytes > split):
        return -_EINVAL
    qps, rails, rail = peek(context + 8 * rc.QPS), peek(record + 8 * words.COMMON_RAILS), 0
    if rails > 1:
        # rule: roce: a stream keeps to the NIC that both ends know
        rail = words.rail_of_stream(context, peer, stream, rails)
    index = peer * peek(context + 8 * rc.PEER_LINKS) + rail * qps
    link = first = link_record(context, index)
    # rule: roce: queue pairs of a rail take turns of their own
    place = peek(first + 8 * rc.NEXT_PLACE)
    if place > 0:
        index += place
        link = link_record(context, index)
    if not _open_link(context, link, nbytes):
        return BUSY
    if qps > 1:
        # Counted for each rail: streams that alternate between two rails would keep to one queue pair of each.
        poke(first + 8 * rc.NEXT_PLACE, place + 1 if place + 1 < qps else 0)
    poke(link + 8 * rc.IMMEDIATES, peek(link + 8 * rc.IMMEDIATES) + 1)
    _count_bytes(context, link, nbytes)
    kind = 1 if on_device else 0
    lkey, rkey = words.own_key(link, kind, source), words.target_key(link, kind, target)
    here = peek(context + 8 * (words.WINDOW + kind)) + source
    there = peek(record + 8 * (words.TARGET + kind)) + target
    add_request(
        context, index, link, _WRITE_WITH_IMM, here, nbytes, lkey, there, rkey, words.swapped(imm), wr_id + 1
    )  # fmt: skip
    return ACCEPTED


def _flush(context: int) -> int:
    ring(context)
    return 0


@compiled
def _report_sent(context: int, events: int, count: int, limit: int) -> int:
    """SENT events of retired writes until ``limit`` events are stored; returns the new count."""
    slots = link_count(context)
    while count < limit and peek(context + 8 * rc.READY_TAIL) < peek(context + 8 * rc.READY_HEAD):
        tail = peek(context + 8 * rc.READY_TAIL)
        link = link_record(context, peek(peek(context + 8 * rc.READY) + tail % slots * 8))
        peer = peek(link + 8 * rc.PEER)
        # rule: roce: a write is over only when it has completed
        reported, retired = peek(link + 8 * rc.REPORTED), peek(link + 8 * rc.RETIRED)
        state = peek(words.peer_record(context, peer) + 8 * words.STATE)
        if state >= rc.CLOSED:
            reported = retired
        tickets, sends = peek(link + 8 * rc.TICKETS), peek(context + 8 * rc.SEND_SLOTS)
        while reported < retired and count < limit:
            ticket = peek(tickets + reported % sends * 8)
            if ticket != 0:
                if state == words.UP:
                    _uncount_bytes(link, reported % sends)
                put_event(events, count, SENT, ticket - 1, peer, 0)
                count += 1
            reported += 1
        poke(link + 8 * rc.REPORTED, reported)
        if reported == retired:
            poke(link + 8 * rc.FLAGS, peek(link + 8 * rc.FLAGS) & ~rc.READY_LINK)
            poke(context + 8 * rc.READY_TAIL, tail + 1)
    return count


@compiled
def _close_with_fault(context: int, peer: int) -> None:
    """The peer broke the format: nothing of it is believed any more."""
    poke(words.peer_record(context, peer) + 8 * words.STATE, rc.CLOSED)
    stop_links(context, peer)


@compiled
def _failed(context: int, index: int, link: int, entry: int) -> None:
    """A completion with an error."""
    wr_id = peek(entry + _WR_ID)
    peer = peek(link + 8 * rc.PEER)
    status, vendor = peek32(entry + _STATUS), peek32(entry + _VENDOR)
    if wr_id & rc.RECEIVE_BIT != 0:
        poke(link + 8 * rc.FLAGS, peek(link + 8 * rc.FLAGS) | rc.RECEIVE_OVER)
    elif peek(words.peer_record(context, peer) + 8 * words.STATE) == words.UP:
        # The first failure of a queue pair: everything before it has completed.
        number = wr_id & _LOW32
        # rule: roce: what completed before a failure is over
        if number != peek(link + 8 * rc.RETIRED) & _LOW32:
            retire(context, index, link, (number - 1) & _LOW32)
    fail_peer(context, link, status, vendor)


@inlined
def _completion(context: int, entry: int, events: int, count: int) -> int:
    """Handle one completion; returns the new count of events."""
    wr_id = peek(entry + _WR_ID)
    index = (wr_id & ~rc.RECEIVE_BIT) >> 32
    link = link_record(context, index)
    if peek32(entry + _STATUS) != 0:
        _failed(context, index, link, entry)
        return count
    if wr_id & rc.RECEIVE_BIT == 0:
        retire(context, index, link, wr_id & _LOW32)
        return count
    peer = peek(link + 8 * rc.PEER)
    state = peek(words.peer_record(context, peer) + 8 * words.STATE)
    if state not in (words.UP, rc.ENDING_PEER):
        return count
    imm = words.swapped(peek32(entry + _IMM))
    status = 0
    # rule: completion: it is of a write with an immediate
    if peek32(entry + _OPCODE) != _RECEIVED_IMM:
        status = FAULT_BAD_FRAME
    # rule: roce: the source in an immediate is the rank of its queue pair
    elif imm >> _SOURCE_SHIFT != peer:
        status = FAULT_WRONG_SOURCE
    if status != 0:
        put_event(events, count, FAULT, imm, peer, status)
        if state == rc.ENDING_PEER:
            poke(context + 8 * rc.ENDING, peek(context + 8 * rc.ENDING) - 1)
        _close_with_fault(context, peer)
        return count + 1
    put_event(events, count, ARRIVED, imm, peer, peek32(entry + _BYTE_LEN))
    if state == words.UP:
        renew_receives(context, link)
    return count + 1


@compiled
def _end_peers(context: int, events: int, count: int, limit: int) -> int:
    """DOWN for failed peers whose receives are flushed, or whose grace is over; returns the new count of events."""
    links = peek(context + 8 * rc.PEER_LINKS)
    for peer in range(peek(context + 8 * words.RANKS)):
        record = words.peer_record(context, peer)
        if count >= limit or peek(record + 8 * words.STATE) != rc.ENDING_PEER:
            continue
        open_links = 0
        for place in range(links):
            link = link_record(context, peer * links + place)
            if peek(link + 8 * rc.QP) != 0 and peek(link + 8 * rc.FLAGS) & rc.RECEIVE_OVER == 0:
                open_links += 1
        # rule: roce: what arrived before a failure is delivered before DOWN
        if open_links > 0 and monotonic_ns() - peek(record + 8 * rc.ENDED_AT) < rc.GRACE_NS:
            continue
        status = peek(record + 8 * words.LOST_STATUS)
        code = -status if status < 0 else words.errno_of(context, status)
        put_event(events, count, DOWN, 0, peer, code)
        count += 1
        poke(record + 8 * words.STATE, rc.CLOSED)
        poke(context + 8 * rc.ENDING, peek(context + 8 * rc.ENDING) - 1)
    return count


@compiled
def _watch(context: int, events: int, count: int, limit: int) -> int:
    """Report impossible credits, and write to peers with whom nothing is under way: a dead one does not answer."""
    poke(context + 8 * rc.WATCH_POLLS, 0)
    now = monotonic_ns()
    if now < peek(context + 8 * rc.WATCH_TIME):
        return count
    poke(context + 8 * rc.WATCH_TIME, now + rc.WATCH_NS)
    watching = peek(context + 8 * rc.WATCHING)
    for index in range(link_count(context)):
        link = link_record(context, index)
        record = words.peer_record(context, peek(link + 8 * rc.PEER))
        if peek(link + 8 * rc.QP) == 0 or peek(record + 8 * words.STATE) != words.UP:
            continue
        problem = peek(record + 8 * rc.PROBLEM)
        if problem != 0 and count < limit:
            put_event(events, count, FAULT, load64(peek(link + 8 * rc.CREDIT_IN)), peek(link + 8 * rc.PEER), problem)
            count += 1
            _close_with_fault(context, peek(link + 8 * rc.PEER))
        # rule: roce: an idle peer is written to
        elif watching != 0 and peek(link + 8 * rc.POSTED) == peek(link + 8 * rc.RETIRED):
            owe_credit(context, link)
    return count


@compiled
def _poll_rail(context: int, rail: int, events: int, count: int, limit: int) -> int:
    """Take the completions of one rail; the new count of events or a negative errno."""
    room = min(limit - count, words.COMPLETION_BATCH)
    cq = peek(rail + 8 * words.CQ)
    if room <= 0 or cq == 0:
        return count
    entries = peek(context + 8 * words.COMPLETIONS)
    found = call3_int(peek(rail + 8 * words.POLL_CQ), cq, room, entries)
    if found < 0:
        poke(context + 8 * words.BROKEN_RAIL, (rail - peek(context + 8 * words.RAILS)) // (8 * words.RAIL_WORDS) + 1)
        poke(context + 8 * words.BROKEN_STATUS, found)
        return -_EIO
    for place in range(found):
        count = _completion(context, entries + place * _WC_BYTES, events, count)
    return count


def _poll(context: int, events: int, limit: int) -> int:
    # Half of the room at most, so that a burst of own writes does not hold back what arrives.
    count = _report_sent(context, events, 0, (limit + 1) // 2)
    polls = peek(context + 8 * rc.WATCH_POLLS) + 1
    poke(context + 8 * rc.WATCH_POLLS, polls)
    if polls >= rc.WATCH_EVERY_POLLS:
        count = _watch(context, events, count, limit)
    rails, index = peek(context + 8 * words.RAIL_COUNT), peek(context + 8 * words.CURSOR)
    for _ in range(rails):
        count = _poll_rail(context, words.rail_record(context, index), events, count, limit)
        if count < 0:
            return count
        index = index + 1 if index + 1 < rails else 0
    # The one after the first comes first next time: a rail that is always full starves no other.
    poke(context + 8 * words.CURSOR, index + 1 if index + 1 < rails else 0)
    count = _report_sent(context, events, count, limit)
    if peek(context + 8 * rc.ENDING) != 0:
        count = _end_peers(context, events, count, limit)
    if peek(context + 8 * rc.OWED) != 0:
        grant(context)
        if peek(context + 8 * rc.DIRTY_COUNT) != 0:
            ring(context)
    return count


def _drop(context: int, peer: int) -> int:
    record = words.peer_record(context, peer)
    state = peek(record + 8 * words.STATE)
    if state in (words.ABSENT, rc.DROPPED):
        return 0
    if state == rc.ENDING_PEER:
        poke(context + 8 * rc.ENDING, peek(context + 8 * rc.ENDING) - 1)
    poke(record + 8 * words.STATE, rc.DROPPED)
    # Once this returns the NIC reads no source bytes for the peer any more, so that they may be used again.
    # rule: roce: the NIC stops reading and writing for a peer that was dropped
    stop_links(context, peer)
    return 0


FUNCTIONS = DataFunctions("roce", _post, _flush, _poll, _drop, flush_by_reading)
