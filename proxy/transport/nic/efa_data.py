"""Compiled data path of ``efa``: posting through ``ibv_qp_ex``, polling, and no reliance on any order.

Writes of one batch are posted in one session (``wr_start`` … ``wr_complete``, which rings the doorbell). A session
holds the queue's lock, and a provider that is polled returns slots to the queue under the same lock: polling inside a
session would wait for itself for ever. So every way out of a batch closes the session first. A session that fails takes
all its writes back; the queue's room is counted here, so that only a broken QP can make it fail.

Every write is signalled and carries its immediate itself. SRD delivers in any order, so nothing follows from an
immediate but that its own write has arrived; and it is connectionless, so a completion is believed only when it comes
from the QP and the address that the rank it names told us at connect. Others (a rank that was replaced, a stranger who
guessed a QKEY) are counted and dropped.

A completion queue that overflows loses completions without a word, and a write without a receive is held back by
nothing. So each end says how many writes of a peer its queue holds; a peer that has posted as many waits until it is
told that a quarter of them was taken. That is a write without payload, whose immediate no proxy sees.

No function here blocks, allocates or raises.
"""

from __future__ import annotations

import errno

from ....native.atomics import peek, peek32, poke, poke32
from ....native.calls import call1, call1_int, call3_int, call4
from ....native.jit import compiled, inlined
from ....protocol.imm import IMM
from ....protocol.streams import TRANSPORT
from ..base import ACCEPTED, ARRIVED, BUSY, DOWN, SENT, DataFunctions, put_event
from ..verbs.abi import QP_EX as QP_EX_STRUCT
from ..verbs.abi import RECV_WR, WC
from ..verbs.codes import SEND_SIGNALED, SUCCESS, WC_WITH_IMM, WR_FLUSH_ERR
from . import efa_words as srd
from . import words

_WR_ID = QP_EX_STRUCT["wr_id"]
_WR_FLAGS = QP_EX_STRUCT["wr_flags"]
_SIGNALED = int(SEND_SIGNALED)
_WC_BYTES = WC.nbytes
_WC_WR_ID = WC["wr_id"]
_WC_STATUS = WC["status"]
_WC_VENDOR = WC["vendor_err"]
_WC_BYTE_LEN = WC["byte_len"]
_WC_IMM = WC["imm_data"]
_WC_SOURCE = WC["src_qp"]
_WC_FLAGS = WC["wc_flags"]
# Read with the 16 bits before it: an aligned word.
_WC_SLID = WC["slid"] - 2
_SUCCESS, _FLUSHED = int(SUCCESS), int(WR_FLUSH_ERR)
_WITH_IMM = int(WC_WITH_IMM)
_RECV_BYTES = RECV_WR.nbytes
_RECV_NEXT = RECV_WR["next"]
_SOURCE_SHIFT, _STREAM_SHIFT = IMM["source"].shift, IMM["stream"].shift
_STREAM_MASK, _COUNT_MASK = IMM["stream"].limit, IMM["sequence"].limit
_OWN_STREAM = TRANSPORT
_EINVAL = errno.EINVAL
_EIO = errno.EIO
_ENOTCONN = errno.ENOTCONN


@inlined
def _link(context: int, rank: int, rail: int) -> int:
    return peek(context + 8 * words.LINKS) + (rank * peek(context + 8 * words.RAIL_COUNT) + rail) * 8 * srd.LINK_WORDS


@compiled
def _broken(context: int, index: int, status: int, vendor: int) -> int:
    """Note why a rail is of no use any more; a negative errno."""
    poke(context + 8 * words.BROKEN_RAIL, index + 1)
    poke(context + 8 * words.BROKEN_STATUS, status)
    poke(context + 8 * words.BROKEN_VENDOR, vendor)
    return status if status < 0 else -_EIO


@compiled
def _close_session(context: int, index: int) -> int:
    """Ring the doorbell for what was posted on a rail since wr_start; 0 or a negative errno."""
    rail = words.rail_record(context, index)
    if peek(rail + 8 * srd.OPEN) == 0:
        return 0
    poke(rail + 8 * srd.OPEN, 0)
    status = call1_int(peek(rail + 8 * srd.WR_COMPLETE), peek(rail + 8 * srd.QP_EX))
    return _broken(context, index, -abs(status), 0) if status != 0 else 0


def _post(context: int, peer: int, stream: int, local: int, target: int, nbytes: int, imm: int, wr_id: int) -> int:
    record = words.peer_record(context, peer)
    if peek(record + 8 * words.STATE) != words.UP:
        return -_ENOTCONN
    if nbytes < 0 or nbytes > peek(context + 8 * srd.MAX_WRITE) or target < 0:
        return -_EINVAL
    # rule: efa: a write ends inside the window
    if target > peek(context + 8 * words.WINDOW_BYTES) - nbytes:
        return -_EINVAL
    source = local - peek(context + 8 * words.WINDOW)
    # rule: efa: a write without payload names an address that the keys cover
    if nbytes == 0:
        # The NIC still wants an address that its keys cover, and the end of a window is none.
        source = target = 0
    split = peek(context + 8 * words.SPLIT)
    on_device = target < split
    # rule: efa: a write lies in one kind of memory
    if (source < split) != on_device or (on_device and max(source, target) + nbytes > split):
        return -_EINVAL
    index = 0
    rails = peek(record + 8 * words.COMMON_RAILS)
    if rails > 1:
        index = words.rail_of_stream(context, peer, stream, rails)
    link = _link(context, peer, index)
    room, untold = peek(link + 8 * srd.ROOM), peek(link + 8 * srd.UNTOLD)
    # rule: efa: no more writes than the peer's completion queue holds
    if room > 0 and untold >= room:
        return BUSY
    if not _write(context, index, peer, link, source, target, nbytes, imm, wr_id):
        return BUSY
    poke(link + 8 * srd.UNTOLD, untold + 1)
    return ACCEPTED


@compiled
def _write(
    context: int, index: int, peer: int, link: int, source: int, target: int, nbytes: int, imm: int, ticket: int
) -> bool:
    """Add a write over rail ``index`` to its session, which is opened where none is; False where no slot is free.

    ``source`` and ``target`` are offsets in the windows.
    """
    rail = words.rail_record(context, index)
    free = peek(rail + 8 * srd.FREE) - 1
    if free < 0:
        return False
    qp = peek(rail + 8 * srd.QP_EX)
    opened = peek(rail + 8 * srd.OPEN)
    if opened == 0:
        call1(peek(rail + 8 * srd.WR_START), qp)
    poke(rail + 8 * srd.OPEN, opened + 1)
    poke(rail + 8 * srd.FREE, free)
    slot = peek(peek(rail + 8 * srd.FREE_SLOTS) + 8 * free)
    entry = peek(rail + 8 * srd.SLOTS) + slot * 8 * srd.SLOT_WORDS
    poke(entry + 8 * srd.SLOT_TICKET, ticket)
    poke(entry + 8 * srd.SLOT_PEER, peer)
    kind = 1 if target < peek(context + 8 * words.SPLIT) else 0
    lkey, rkey = words.own_key(link, kind, source), words.target_key(link, kind, target)
    here = peek(context + 8 * (words.WINDOW + kind)) + source
    there = peek(words.peer_record(context, peer) + 8 * (words.TARGET + kind)) + target
    poke(qp + _WR_ID, slot + 1)
    # rule: efa: every write asks for a completion
    poke32(qp + _WR_FLAGS, _SIGNALED)
    call4(peek(rail + 8 * srd.WR_WRITE_IMM), qp, rkey, there, words.swapped(imm))
    address, number = peek(link + 8 * srd.AH), peek(link + 8 * srd.QPN)
    call4(peek(rail + 8 * srd.WR_SET_ADDRESS), qp, address, number, peek(link + 8 * srd.QKEY))
    call4(peek(rail + 8 * srd.WR_SET_SGE), qp, lkey, here, nbytes)
    poke(rail + 8 * srd.POSTED, peek(rail + 8 * srd.POSTED) + 1)
    return True


def _flush(context: int) -> int:
    for index in range(peek(context + 8 * words.RAIL_COUNT)):
        status = _close_session(context, index)
        if status < 0:
            return status
    return 0


@compiled
def _lose(context: int, rank: int, completion: int, events: int, count: int) -> int:
    """A write to ``rank`` failed: DOWN, once. The QP stays good for everybody else. Returns the new count."""
    record = words.peer_record(context, rank)
    # rule: efa: a lost peer is reported once
    if peek(record + 8 * words.STATE) != words.UP:
        return count
    poke(record + 8 * words.STATE, srd.CLOSED)
    poke(record + 8 * words.LOST_STATUS, peek32(completion + _WC_STATUS))
    poke(record + 8 * words.LOST_VENDOR, peek32(completion + _WC_VENDOR))
    put_event(events, count, DOWN, 0, rank, words.errno_of(context, peek32(completion + _WC_STATUS)))
    return count + 1


@inlined
def _sent(context: int, index: int, slot: int, completion: int, events: int, count: int) -> int:
    """A write of ours completed. Returns the new count of events, negative when the rail is of no use any more."""
    rail = words.rail_record(context, index)
    entry = peek(rail + 8 * srd.SLOTS) + slot * 8 * srd.SLOT_WORDS
    rank = peek(entry + 8 * srd.SLOT_PEER)
    free = peek(rail + 8 * srd.FREE)
    poke(peek(rail + 8 * srd.FREE_SLOTS) + 8 * free, slot)
    poke(rail + 8 * srd.FREE, free + 1)
    status = peek32(completion + _WC_STATUS)
    # rule: efa: what fails in the NIC itself is no fault of a peer
    if status != _SUCCESS and status <= _FLUSHED:
        # Up to there statuses are the NIC's own fault: no peer of it is to blame, and none can be reached any more.
        return _broken(context, index, status, peek32(completion + _WC_VENDOR))
    # rule: efa: a failed write is not over
    if status != _SUCCESS:
        return _lose(context, rank, completion, events, count)
    ticket = peek(entry + 8 * srd.SLOT_TICKET)
    if ticket == srd.UNTICKETED:
        return count
    # rule: efa: nothing is told of a dropped peer
    if peek(words.peer_record(context, rank) + 8 * words.STATE) == words.UP:
        put_event(events, count, SENT, ticket, rank, 0)
        return count + 1
    return count


@inlined
def _take(context: int, index: int, link: int) -> None:
    """A write of the peer has left the completion queue."""
    rail = words.rail_record(context, index)
    taken, step = peek(link + 8 * srd.TAKEN) + 1, peek(rail + 8 * srd.STEP)
    if step > 0:
        poke(link + 8 * srd.TAKEN, taken)
        if taken >= step:
            poke(rail + 8 * srd.LATE, 1)


@compiled
def _tell(context: int, index: int) -> int:
    """Tell the peers of a rail how many of their writes were taken; 0 or a negative errno. A later poll tells those for
    whom no slot is free."""
    rail = words.rail_record(context, index)
    step, late = peek(rail + 8 * srd.STEP), 0
    for rank in range(peek(context + 8 * words.RANKS)):
        record = words.peer_record(context, rank)
        if peek(record + 8 * words.STATE) != words.UP or index >= peek(record + 8 * words.COMMON_RAILS):
            continue
        link = _link(context, rank, index)
        taken = peek(link + 8 * srd.TAKEN)
        if taken < step:
            continue
        imm = peek(context + 8 * words.RANK) << _SOURCE_SHIFT | _OWN_STREAM << _STREAM_SHIFT | step
        # of no bytes, but its addresses must be some that the keys cover
        # rule: efa: a peer is told what was taken of its writes
        told = _write(context, index, rank, link, 0, 0, 0, imm, srd.UNTICKETED)
        if told:
            taken -= step
            poke(link + 8 * srd.TAKEN, taken)
        if taken >= step:
            late = 1
    poke(rail + 8 * srd.LATE, late)
    return _close_session(context, index)


@inlined
def _arrived(context: int, index: int, completion: int, events: int, count: int) -> int:
    """A write of a peer has arrived, if it is a peer's. Returns the new count of events."""
    imm = words.swapped(peek32(completion + _WC_IMM))
    rank = imm >> _SOURCE_SHIFT
    # rule: completion: its rank exists and it has an immediate
    if rank < peek(context + 8 * words.RANKS) and peek32(completion + _WC_FLAGS) & _WITH_IMM != 0:
        link = _link(context, rank, index)
        number = peek(link + 8 * srd.AH_NUMBER)
        known = index < peek(words.peer_record(context, rank) + 8 * words.COMMON_RAILS)
        # rule: efa: an immediate is believed only from its rank's queue pair
        known = known and peek(link + 8 * srd.QPN) == peek32(completion + _WC_SOURCE)
        # rule: efa: an immediate is believed only from its rank's address
        if known and (number < 0 or number == peek32(completion + _WC_SLID) >> 16):
            if peek(words.peer_record(context, rank) + 8 * words.STATE) != words.UP:
                return count
            if imm >> _STREAM_SHIFT & _STREAM_MASK == _OWN_STREAM:
                untold = peek(link + 8 * srd.UNTOLD)
                poke(link + 8 * srd.UNTOLD, untold - min(imm & _COUNT_MASK, untold))
                return count
            _take(context, index, link)
            put_event(events, count, ARRIVED, imm, rank, peek32(completion + _WC_BYTE_LEN))
            return count + 1
    poke(context + 8 * srd.STRANGERS, peek(context + 8 * srd.STRANGERS) + 1)
    return count


@compiled
def _post_receives(rail: int) -> int:
    """Post the receives that are owed, a full batch at a time; 0 or a negative errno."""
    while peek(rail + 8 * srd.OWED) >= srd.RECEIVE_BATCH:
        first = peek(rail + 8 * srd.RECEIVE_LIST)
        # Room for the address of a request that was refused: the next field of the last one, put back afterwards.
        bad = first + (srd.RECEIVE_BATCH - 1) * _RECV_BYTES + _RECV_NEXT
        status = call3_int(peek(rail + 8 * words.POST_RECV), peek(rail + 8 * srd.QP), first, bad)
        poke(bad, 0)
        if status != 0:
            return -abs(status)
        poke(rail + 8 * srd.OWED, peek(rail + 8 * srd.OWED) - srd.RECEIVE_BATCH)
    return 0


@compiled
def _poll_rail(context: int, index: int, events: int, count: int, limit: int) -> int:
    """Take the completions of one rail; the new count of events or a negative errno."""
    rail = words.rail_record(context, index)
    # rule: efa: nothing is polled inside a posting session
    status = _close_session(context, index)
    if status < 0:
        return status
    completions = peek(context + 8 * words.COMPLETIONS)
    room = min(limit - count, words.COMPLETION_BATCH)
    found = call3_int(peek(rail + 8 * words.POLL_CQ), peek(rail + 8 * words.CQ), room, completions)
    if found < 0:
        return _broken(context, index, found, 0)
    for position in range(found):
        completion = completions + position * _WC_BYTES
        slot = peek(completion + _WC_WR_ID) - 1
        if slot >= 0 and slot < srd.RECEIVE_ID - 1:
            count = _sent(context, index, slot, completion, events, count)
            if count < 0:
                return count
            continue
        # rule: efa: receives that were used are posted anew
        if slot >= 0:
            poke(rail + 8 * srd.OWED, peek(rail + 8 * srd.OWED) + 1)
        status = peek32(completion + _WC_STATUS)
        if status == _SUCCESS:
            count = _arrived(context, index, completion, events, count)
        elif status != _FLUSHED:
            return _broken(context, index, status, peek32(completion + _WC_VENDOR))
    if peek(rail + 8 * srd.RECEIVES) > 0:
        status = _post_receives(rail)
        if status < 0:
            return _broken(context, index, status, 0)
    if peek(rail + 8 * srd.LATE):
        status = _tell(context, index)
        if status < 0:
            return status
    return count


def _poll(context: int, events: int, limit: int) -> int:
    count = 0
    rails = peek(context + 8 * words.RAIL_COUNT)
    first = peek(context + 8 * words.CURSOR)
    for step in range(rails):
        if count >= limit:
            break
        index = first + step
        if index >= rails:
            index -= rails
        if peek(words.rail_record(context, index) + 8 * srd.QP) == 0:
            continue
        count = _poll_rail(context, index, events, count, limit)
        if count < 0:
            return count
    # The one after the first comes first next time: a rail that is always full starves no other.
    poke(context + 8 * words.CURSOR, first + 1 if first + 1 < rails else 0)
    return count


def _drop(context: int, peer: int) -> int:
    poke(words.peer_record(context, peer) + 8 * words.STATE, srd.CLOSED)
    return 0


FUNCTIONS = DataFunctions("efa", _post, _flush, _poll, _drop)
