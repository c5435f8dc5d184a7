"""Compiled data path of ``efa``: posting through ``ibv_qp_ex``, polling, and no reliance on any order.

Writes of one batch are posted in one session (``wr_start`` … ``wr_complete``, which rings the doorbell). A session
holds the queue's lock, and a provider that is polled returns slots to the queue under the same lock: polling inside a
session would wait for itself for ever. So every way out of a batch closes the session first. A session that fails takes
all its writes back; the queue's room is counted here, so that only a broken QP can make it fail.

Every write is signalled and carries its immediate itself. SRD delivers in any order, so nothing follows from an
immediate but that its own write has arrived; and it is connectionless, so a completion is believed only when it comes
from the QP and the address that the rank it names told us at connect. Others (a rank that was replaced, a stranger who
guessed a QKEY) are counted and dropped.

No function here blocks, allocates or raises.
"""

from __future__ import annotations

import errno
import functools

from ....native.atomics import peek, peek32, poke, poke32
from ....native.calls import call1, call1_int, call3_int, call4
from ....native.jit import compiled, inlined
from ....protocol.imm import IMM
from ..base import ACCEPTED, ARRIVED, BUSY, DOWN, SENT, c_functions, put_event
from ..verbs.abi import QP_EX as QP_EX_STRUCT
from ..verbs.abi import RECV_WR, WC
from ..verbs.codes import SEND_SIGNALED, SUCCESS, WC_WITH_IMM, WR_FLUSH_ERR
from .efa_words import (
    AH,
    AH_NUMBER,
    BROKEN_RAIL,
    BROKEN_STATUS,
    BROKEN_VENDOR,
    CLOSED,
    COMPLETION_BATCH,
    COMPLETIONS,
    CQ,
    CURSOR,
    DEVICE_KEYS,
    DEVICE_REMOTE_KEYS,
    DEVICE_SHIFT,
    DEVICE_TARGET,
    DEVICE_TARGET_SHIFT,
    DEVICE_WINDOW,
    ERRNOS,
    FREE,
    FREE_SLOTS,
    LINK_COUNT,
    LINK_WORDS,
    LINKS,
    LOCAL_KEYS,
    LOST_STATUS,
    LOST_VENDOR,
    MAX_WRITE,
    OPEN,
    OWED,
    PEER_WORDS,
    PEERS,
    POLL_CQ,
    POST_RECV,
    POSTED,
    QKEY,
    QP,
    QP_EX,
    QPN,
    RAIL_COUNT,
    RAIL_WORDS,
    RAILS,
    RANK,
    RANKS,
    RECEIVE_BATCH,
    RECEIVE_ID,
    RECEIVE_LIST,
    RECEIVES,
    REMOTE_KEYS,
    REMOTE_WINDOW,
    SHIFT,
    SLOT_PEER,
    SLOT_TICKET,
    SLOT_WORDS,
    SLOTS,
    SPLIT,
    STATE,
    STATUSES,
    STRANGERS,
    STRIPES,
    UP,
    WINDOW,
    WINDOW_BYTES,
    WR_COMPLETE,
    WR_SET_ADDRESS,
    WR_SET_SGE,
    WR_START,
    WR_WRITE_IMM,
)
from .striping import rail_of

__all__ = ["warm"]

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
_SOURCE_SHIFT = IMM["source"].shift
_EINVAL = errno.EINVAL
_EIO = errno.EIO
_ENOTCONN = errno.ENOTCONN

_rail_of = inlined(rail_of)


@inlined
def _swapped(word: int) -> int:
    """The 32 bits in the other byte order: immediates are big-endian to the verbs interface."""
    return ((word & 0xFF) << 24) | ((word & 0xFF00) << 8) | ((word >> 8) & 0xFF00) | ((word >> 24) & 0xFF)


@inlined
def _rail(context: int, index: int) -> int:
    return peek(context + 8 * RAILS) + index * 8 * RAIL_WORDS


@inlined
def _peer(context: int, rank: int) -> int:
    return peek(context + 8 * PEERS) + rank * 8 * PEER_WORDS


@inlined
def _link(context: int, rank: int, rail: int) -> int:
    return peek(context + 8 * LINKS) + (rank * peek(context + 8 * RAIL_COUNT) + rail) * 8 * LINK_WORDS


@compiled
def _broken(context: int, index: int, status: int, vendor: int) -> int:
    """Note why a rail is of no use any more; a negative errno."""
    poke(context + 8 * BROKEN_RAIL, index + 1)
    poke(context + 8 * BROKEN_STATUS, status)
    poke(context + 8 * BROKEN_VENDOR, vendor)
    return status if status < 0 else -_EIO


@compiled
def _close_session(context: int, index: int) -> int:
    """Ring the doorbell for what was posted on a rail since wr_start; 0 or a negative errno."""
    rail = _rail(context, index)
    if peek(rail + 8 * OPEN) == 0:
        return 0
    poke(rail + 8 * OPEN, 0)
    status = call1_int(peek(rail + 8 * WR_COMPLETE), peek(rail + 8 * QP_EX))
    return _broken(context, index, -abs(status), 0) if status != 0 else 0


def _post(context: int, peer: int, stream: int, local: int, target: int, nbytes: int, imm: int, wr_id: int) -> int:
    record = _peer(context, peer)
    if peek(record + 8 * STATE) != UP:
        return -_ENOTCONN
    if nbytes < 0 or nbytes > peek(context + 8 * MAX_WRITE) or target < 0:
        return -_EINVAL
    # rule: efa: a write ends inside the window
    if target > peek(context + 8 * WINDOW_BYTES) - nbytes:
        return -_EINVAL
    source = local - peek(context + 8 * WINDOW)
    # rule: efa: a write without payload names an address that the keys cover
    if nbytes == 0:
        # The NIC still wants an address that its keys cover, and the end of a window is none.
        source = target = 0
    split = peek(context + 8 * SPLIT)
    on_device = target < split
    # rule: efa: a write lies in one kind of memory
    if (source < split) != on_device or (on_device and max(source, target) + nbytes > split):
        return -_EINVAL
    index = 0
    rails = peek(record + 8 * LINK_COUNT)
    if rails > 1:
        index = _rail_of(peek(peek(context + 8 * STRIPES) + 8 * stream), peek(context + 8 * RANK), peer, rails)
    rail = _rail(context, index)
    free = peek(rail + 8 * FREE) - 1
    if free < 0:
        return BUSY
    qp = peek(rail + 8 * QP_EX)
    opened = peek(rail + 8 * OPEN)
    if opened == 0:
        call1(peek(rail + 8 * WR_START), qp)
    poke(rail + 8 * OPEN, opened + 1)
    poke(rail + 8 * FREE, free)
    slot = peek(peek(rail + 8 * FREE_SLOTS) + 8 * free)
    entry = peek(rail + 8 * SLOTS) + slot * 8 * SLOT_WORDS
    poke(entry + 8 * SLOT_TICKET, wr_id)
    poke(entry + 8 * SLOT_PEER, peer)
    link = _link(context, peer, index)
    if on_device:
        lkey = peek(peek(rail + 8 * DEVICE_KEYS) + 8 * (source >> peek(rail + 8 * DEVICE_SHIFT)))
        rkey = peek(peek(link + 8 * DEVICE_REMOTE_KEYS) + 8 * (target >> peek(link + 8 * DEVICE_TARGET_SHIFT)))
        here, there = peek(context + 8 * DEVICE_WINDOW) + source, peek(record + 8 * DEVICE_TARGET) + target
    else:
        shift = peek(context + 8 * SHIFT)
        lkey = peek(peek(rail + 8 * LOCAL_KEYS) + 8 * (source >> shift))
        rkey = peek(peek(link + 8 * REMOTE_KEYS) + 8 * (target >> shift))
        here, there = peek(context + 8 * WINDOW) + source, peek(record + 8 * REMOTE_WINDOW) + target
    poke(qp + _WR_ID, slot + 1)
    # rule: efa: every write asks for a completion
    poke32(qp + _WR_FLAGS, _SIGNALED)
    call4(peek(rail + 8 * WR_WRITE_IMM), qp, rkey, there, _swapped(imm))
    call4(peek(rail + 8 * WR_SET_ADDRESS), qp, peek(link + 8 * AH), peek(link + 8 * QPN), peek(link + 8 * QKEY))
    call4(peek(rail + 8 * WR_SET_SGE), qp, lkey, here, nbytes)
    poke(rail + 8 * POSTED, peek(rail + 8 * POSTED) + 1)
    return ACCEPTED


def _flush(context: int) -> int:
    for index in range(peek(context + 8 * RAIL_COUNT)):
        status = _close_session(context, index)
        if status < 0:
            return status
    return 0


@compiled
def _lose(context: int, rank: int, completion: int, events: int, count: int) -> int:
    """A write to ``rank`` failed: DOWN, once. The QP stays good for everybody else. Returns the new count."""
    record = _peer(context, rank)
    # rule: efa: a lost peer is reported once
    if peek(record + 8 * STATE) != UP:
        return count
    poke(record + 8 * STATE, CLOSED)
    poke(record + 8 * LOST_STATUS, peek32(completion + _WC_STATUS))
    poke(record + 8 * LOST_VENDOR, peek32(completion + _WC_VENDOR))
    errno_of = peek(context + 8 * ERRNOS) + 8 * min(peek32(completion + _WC_STATUS), STATUSES - 1)
    put_event(events, count, DOWN, 0, rank, peek(errno_of))
    return count + 1


@inlined
def _sent(context: int, index: int, slot: int, completion: int, events: int, count: int) -> int:
    """A write of ours completed. Returns the new count of events, negative when the rail is of no use any more."""
    rail = _rail(context, index)
    entry = peek(rail + 8 * SLOTS) + slot * 8 * SLOT_WORDS
    rank = peek(entry + 8 * SLOT_PEER)
    free = peek(rail + 8 * FREE)
    poke(peek(rail + 8 * FREE_SLOTS) + 8 * free, slot)
    poke(rail + 8 * FREE, free + 1)
    status = peek32(completion + _WC_STATUS)
    # rule: efa: what fails in the NIC itself is no fault of a peer
    if status != _SUCCESS and status <= _FLUSHED:
        # Up to there statuses are the NIC's own fault: no peer of it is to blame, and none can be reached any more.
        return _broken(context, index, status, peek32(completion + _WC_VENDOR))
    # rule: efa: a failed write is not over
    if status != _SUCCESS:
        return _lose(context, rank, completion, events, count)
    # rule: efa: nothing is told of a dropped peer
    if peek(_peer(context, rank) + 8 * STATE) == UP:
        put_event(events, count, SENT, peek(entry + 8 * SLOT_TICKET), rank, 0)
        return count + 1
    return count


@inlined
def _arrived(context: int, index: int, completion: int, events: int, count: int) -> int:
    """A write of a peer has arrived, if it is a peer's. Returns the new count of events."""
    imm = _swapped(peek32(completion + _WC_IMM))
    rank = imm >> _SOURCE_SHIFT
    if rank < peek(context + 8 * RANKS) and peek32(completion + _WC_FLAGS) & _WITH_IMM != 0:
        link = _link(context, rank, index)
        number = peek(link + 8 * AH_NUMBER)
        known = index < peek(_peer(context, rank) + 8 * LINK_COUNT)
        # rule: efa: an immediate is believed only from its rank's queue pair
        known = known and peek(link + 8 * QPN) == peek32(completion + _WC_SOURCE)
        # rule: efa: an immediate is believed only from its rank's address
        if known and (number < 0 or number == peek32(completion + _WC_SLID) >> 16):
            if peek(_peer(context, rank) + 8 * STATE) == UP:
                put_event(events, count, ARRIVED, imm, rank, peek32(completion + _WC_BYTE_LEN))
                return count + 1
            return count
    poke(context + 8 * STRANGERS, peek(context + 8 * STRANGERS) + 1)
    return count


@compiled
def _post_receives(rail: int) -> int:
    """Post the receives that are owed, a full batch at a time; 0 or a negative errno."""
    while peek(rail + 8 * OWED) >= RECEIVE_BATCH:
        first = peek(rail + 8 * RECEIVE_LIST)
        # Room for the address of a request that was refused: the next field of the last one, put back afterwards.
        bad = first + (RECEIVE_BATCH - 1) * _RECV_BYTES + _RECV_NEXT
        status = call3_int(peek(rail + 8 * POST_RECV), peek(rail + 8 * QP), first, bad)
        poke(bad, 0)
        if status != 0:
            return -abs(status)
        poke(rail + 8 * OWED, peek(rail + 8 * OWED) - RECEIVE_BATCH)
    return 0


@compiled
def _poll_rail(context: int, index: int, events: int, count: int, limit: int) -> int:
    """Take the completions of one rail; the new count of events or a negative errno."""
    rail = _rail(context, index)
    # rule: efa: nothing is polled inside a posting session
    status = _close_session(context, index)
    if status < 0:
        return status
    completions = peek(context + 8 * COMPLETIONS)
    room = min(limit - count, COMPLETION_BATCH)
    found = call3_int(peek(rail + 8 * POLL_CQ), peek(rail + 8 * CQ), room, completions)
    if found < 0:
        return _broken(context, index, found, 0)
    for position in range(found):
        completion = completions + position * _WC_BYTES
        slot = peek(completion + _WC_WR_ID) - 1
        if slot >= 0 and slot < RECEIVE_ID - 1:
            count = _sent(context, index, slot, completion, events, count)
            if count < 0:
                return count
            continue
        # rule: efa: receives that were used are posted anew
        if slot >= 0:
            poke(rail + 8 * OWED, peek(rail + 8 * OWED) + 1)
        status = peek32(completion + _WC_STATUS)
        if status == _SUCCESS:
            count = _arrived(context, index, completion, events, count)
        elif status != _FLUSHED:
            return _broken(context, index, status, peek32(completion + _WC_VENDOR))
    if peek(rail + 8 * RECEIVES) > 0:
        status = _post_receives(rail)
        if status < 0:
            return _broken(context, index, status, 0)
    return count


def _poll(context: int, events: int, limit: int) -> int:
    count = 0
    rails = peek(context + 8 * RAIL_COUNT)
    first = peek(context + 8 * CURSOR)
    for step in range(rails):
        if count >= limit:
            break
        index = first + step
        if index >= rails:
            index -= rails
        if peek(_rail(context, index) + 8 * QP) == 0:
            continue
        count = _poll_rail(context, index, events, count, limit)
        if count < 0:
            return count
    # The one after the first has the first turn next time: a rail that is always full starves no other.
    poke(context + 8 * CURSOR, first + 1 if first + 1 < rails else 0)
    return count


def _drop(context: int, peer: int, reason: int) -> int:
    poke(_peer(context, peer) + 8 * STATE, CLOSED)
    return 0


@functools.cache
def warm() -> tuple[int, int, int, int]:
    """Compile (or load) the data path; addresses of post, flush, poll and drop."""
    return c_functions("efa", _post, _flush, _poll, _drop)
