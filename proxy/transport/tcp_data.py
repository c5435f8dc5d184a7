"""Compiled data path of ``tcp``: non-blocking sockets, gathered writes, receives straight into the window.

A connection that has something to do stands in the READY ring, so a poll costs one ``epoll_wait`` and nothing per idle
peer. A turn of a connection is bounded (one receive, one gathered write), then the next one has its turn: a peer that
floods or does not read delays nobody. Sockets are registered edge-triggered once; READABLE and WRITABLE remember the
state between edges, so no epoll_ctl is needed while data moves.

Received headers are copied before they are checked, and payload bytes go only where a checked header says. No function
here blocks, allocates or raises.
"""

from __future__ import annotations

import errno
import functools
import socket

from numba import types

from ...native.atomics import copy, peek, peek32, poke
from ...native.calls import monotonic_ns
from ...native.jit import c_function, compile_lock, compiled
from ...protocol.command import MAX_WRITE_BYTES
from ...protocol.frame import FRAME_BYTES, FRAME_LENGTH, FRAME_MAGIC, FRAME_NUMBER, FRAME_TARGET, connection_of
from ...protocol.imm import IMM
from .base import (
    ACCEPTED,
    ARRIVED,
    BUSY,
    DOWN,
    EVENT_BYTES,
    FAULT,
    FAULT_BAD_FRAME,
    FAULT_OUTSIDE_WINDOW,
    FAULT_WRONG_SOURCE,
    SENT,
)
from .tcp_state import (
    BY_FD,
    CLOSED,
    CONNECTIONS,
    DROPPED,
    ENDING,
    ENDING_PEER,
    EPOLL,
    EPOLL_DATA,
    EPOLL_EVENT_BYTES,
    EVENT_SLOTS,
    EVENTS,
    EVENTS_HEAD,
    EVENTS_TAIL,
    FD,
    FINISHING,
    FLAGS,
    FRAME_LOCAL,
    FRAME_NBYTES,
    FRAME_SLOT_BYTES,
    FRAME_WR_ID,
    GATHER_FRAMES,
    HEADER,
    IN_HEADER,
    IN_IMM,
    IN_LEFT,
    IN_NUMBER,
    IN_PLACE,
    LINK_WORDS,
    LINKS,
    LOST_ERRNO,
    LOST_GRACE_NS,
    LOST_TIME,
    MESSAGE,
    MESSAGE_COUNT,
    PEER,
    PEER_WORDS,
    PEERS,
    POSTED,
    QUEUE,
    QUEUE_SLOTS,
    QUEUED,
    RANKS,
    READABLE,
    READY,
    READY_HEAD,
    READY_TAIL,
    RECEIVE_OVER,
    SEND_OVER,
    SENT_BYTES,
    SENT_FRAMES,
    STAGING,
    STAGING_BYTES,
    STATE,
    TURN_EVENTS,
    UP,
    VECTORS,
    WAITING,
    WAITING_SLOTS,
    WINDOW,
    WINDOW_BYTES,
    WRITABLE,
)

__all__ = ["warm"]

_EAGAIN = errno.EAGAIN
_EINTR = errno.EINTR
_EINVAL = errno.EINVAL
_ENOTCONN = errno.ENOTCONN
_ENOBUFS = errno.ENOBUFS
_ENOMEM = errno.ENOMEM
#: What DOWN says when the peer just closed: there is no errno, and this is how the closed socket would answer.
_ECONNRESET = errno.ECONNRESET
_SEND_FLAGS = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_RECEIVE_FLAGS = int(socket.MSG_DONTWAIT)
_SHUT_WR, _SHUT_RDWR = int(socket.SHUT_WR), int(socket.SHUT_RDWR)
_EPOLLIN, _EPOLLOUT, _EPOLLERR, _EPOLLHUP, _EPOLLRDHUP = 0x1, 0x4, 0x8, 0x10, 0x2000
_SOURCE_SHIFT = IMM["source"].shift
_LOW32 = 0xFFFFFFFF

_sendmsg = types.ExternalFunction("sendmsg", types.int64(types.int32, types.int64, types.int32))
_recvmsg = types.ExternalFunction("recvmsg", types.int64(types.int32, types.int64, types.int32))
_shutdown = types.ExternalFunction("shutdown", types.int32(types.int32, types.int32))
_errno_location = types.ExternalFunction("__errno_location", types.int64())
_epoll_wait = types.ExternalFunction("epoll_wait", types.int32(types.int32, types.int64, types.int32, types.int32))

_connection_of = compiled(connection_of)


@compiled
def _link(context: int, index: int) -> int:
    return peek(context + 8 * LINKS) + index * 8 * LINK_WORDS


@compiled
def _peer(context: int, rank: int) -> int:
    return peek(context + 8 * PEERS) + rank * 8 * PEER_WORDS


@compiled
def _event(context: int, kind: int, value: int, peer: int, status: int) -> None:
    """Queue an event; a turn begins only when there is room for all it can make."""
    head = peek(context + 8 * EVENTS_HEAD)
    address = peek(context + 8 * EVENTS) + (head % EVENT_SLOTS) * EVENT_BYTES
    poke(address, kind)
    poke(address + 8, value)
    poke(address + 16, peer)
    poke(address + 24, status)
    poke(context + 8 * EVENTS_HEAD, head + 1)


@compiled
def _room(context: int) -> bool:
    queued = peek(context + 8 * EVENTS_HEAD) - peek(context + 8 * EVENTS_TAIL)
    return EVENT_SLOTS - queued >= TURN_EVENTS


@compiled
def _enqueue(context: int, index: int) -> None:
    """Put connection ``index`` into the READY ring unless it stands there."""
    link = _link(context, index)
    flags = peek(link + 8 * FLAGS)
    if flags & QUEUED != 0:
        return
    poke(link + 8 * FLAGS, flags | QUEUED)
    head = peek(context + 8 * READY_HEAD)
    slots = peek(context + 8 * RANKS) * peek(context + 8 * CONNECTIONS)
    poke(peek(context + 8 * READY) + (head % slots) * 8, index)
    poke(context + 8 * READY_HEAD, head + 1)


@compiled
def _has_work(link: int) -> bool:
    flags = peek(link + 8 * FLAGS)
    if flags & READABLE != 0 and flags & RECEIVE_OVER == 0:
        return True
    unsent = peek(link + 8 * POSTED) > peek(link + 8 * SENT_FRAMES)
    return unsent and flags & WRITABLE != 0 and flags & SEND_OVER == 0


@compiled
def _set_flags(link: int, flags: int) -> None:
    poke(link + 8 * FLAGS, peek(link + 8 * FLAGS) | flags)


@compiled
def _clear_flags(link: int, flags: int) -> None:
    poke(link + 8 * FLAGS, peek(link + 8 * FLAGS) & ~flags)


@compiled
def _lost(context: int, rank: int, code: int) -> None:
    """A connection of ``rank`` ended in one direction: DOWN follows when the others have ended, or after the grace."""
    peer = _peer(context, rank)
    if peek(peer + 8 * STATE) == UP:
        poke(peer + 8 * STATE, ENDING_PEER)
        poke(peer + 8 * LOST_ERRNO, code)
        poke(peer + 8 * LOST_TIME, monotonic_ns() + LOST_GRACE_NS)
        poke(context + 8 * ENDING, peek(context + 8 * ENDING) + 1)


@compiled
def _fault(context: int, link: int, value: int, status: int) -> None:
    """Close a connection on which the peer broke the format."""
    _shutdown(peek(link + 8 * FD), _SHUT_RDWR)
    _set_flags(link, RECEIVE_OVER | SEND_OVER)
    _event(context, FAULT, value, peek(link + 8 * PEER), status)


@compiled
def _check_header(context: int, link: int) -> bool:
    """Check the header in the record and set where its payload goes; False after a fault."""
    header = link + 8 * HEADER
    first = peek(header)
    target, length = peek(header + FRAME_TARGET), peek(header + FRAME_LENGTH)
    number = peek(link + 8 * IN_NUMBER)
    if first & _LOW32 != FRAME_MAGIC or peek(header + FRAME_NUMBER) != number:
        _fault(context, link, first & _LOW32, FAULT_BAD_FRAME)
        return False
    if length < 0 or length > MAX_WRITE_BYTES:
        _fault(context, link, length, FAULT_BAD_FRAME)
        return False
    if target < 0 or target > peek(context + 8 * WINDOW_BYTES) - length:
        _fault(context, link, target, FAULT_OUTSIDE_WINDOW)
        return False
    imm = (first >> 32) & _LOW32
    if imm >> _SOURCE_SHIFT != peek(link + 8 * PEER):
        _fault(context, link, imm, FAULT_WRONG_SOURCE)
        return False
    poke(link + 8 * IN_NUMBER, number + 1)
    poke(link + 8 * IN_IMM, imm)
    poke(link + 8 * IN_LEFT, length)
    poke(link + 8 * IN_PLACE, peek(context + 8 * WINDOW) + target)
    return True


@compiled
def _arrived(context: int, link: int) -> None:
    """The current frame is complete."""
    nbytes = peek(link + 8 * HEADER + FRAME_LENGTH)
    _event(context, ARRIVED, peek(link + 8 * IN_IMM), peek(link + 8 * PEER), nbytes)
    poke(link + 8 * IN_HEADER, 0)


@compiled
def _parse(context: int, link: int, source: int, nbytes: int) -> None:
    """Take ``nbytes`` staged bytes: headers to the record, payload to the window."""
    while nbytes > 0:
        have = peek(link + 8 * IN_HEADER)
        if have < FRAME_BYTES:
            part = min(FRAME_BYTES - have, nbytes)
            copy(link + 8 * HEADER + have, source, part)
            poke(link + 8 * IN_HEADER, have + part)
            source += part
            nbytes -= part
            if have + part < FRAME_BYTES:
                return
            if not _check_header(context, link):
                return
        left = peek(link + 8 * IN_LEFT)
        part = min(left, nbytes)
        if part > 0:
            place = peek(link + 8 * IN_PLACE)
            copy(place, source, part)
            poke(link + 8 * IN_PLACE, place + part)
            source += part
            nbytes -= part
            left -= part
            poke(link + 8 * IN_LEFT, left)
        if left == 0:
            _arrived(context, link)


@compiled
def _receive(context: int, link: int) -> None:
    """One receive: the rest of the current payload goes straight to the window, what follows to the staging buffer."""
    vectors, message = peek(context + 8 * VECTORS), peek(context + 8 * MESSAGE)
    staging = peek(context + 8 * STAGING)
    direct = 0
    count = 0
    if peek(link + 8 * IN_HEADER) == FRAME_BYTES:
        direct = peek(link + 8 * IN_LEFT)
        poke(vectors, peek(link + 8 * IN_PLACE))
        poke(vectors + 8, direct)
        count = 1
    poke(vectors + 16 * count, staging)
    poke(vectors + 16 * count + 8, STAGING_BYTES)
    poke(message + 8 * MESSAGE_COUNT, count + 1)
    got = _recvmsg(peek(link + 8 * FD), message, _RECEIVE_FLAGS)
    if got < 0:
        code = peek32(_errno_location())
        if code == _EAGAIN:
            _clear_flags(link, READABLE)
        elif code != _EINTR and code != _ENOMEM and code != _ENOBUFS:
            _set_flags(link, RECEIVE_OVER)
            _lost(context, peek(link + 8 * PEER), code)
        return
    if got == 0:
        _set_flags(link, RECEIVE_OVER)
        _lost(context, peek(link + 8 * PEER), _ECONNRESET)
        return
    if got < direct + STAGING_BYTES and peek(link + 8 * FLAGS) & FINISHING == 0:
        # A short read means empty, and later bytes make a new edge.
        _clear_flags(link, READABLE)
    if direct > 0:
        part = min(got, direct)
        poke(link + 8 * IN_PLACE, peek(link + 8 * IN_PLACE) + part)
        poke(link + 8 * IN_LEFT, direct - part)
        if part == direct:
            _arrived(context, link)
        got -= part
    if got > 0:
        _parse(context, link, staging, got)


@compiled
def _send(context: int, link: int) -> None:
    """One gathered write of up to GATHER_FRAMES frames; SENT for those that the kernel took whole."""
    vectors, message = peek(context + 8 * VECTORS), peek(context + 8 * MESSAGE)
    queue = peek(link + 8 * QUEUE)
    sent, posted = peek(link + 8 * SENT_FRAMES), peek(link + 8 * POSTED)
    skip = peek(link + 8 * SENT_BYTES)
    last = min(posted, sent + GATHER_FRAMES)
    count = 0
    asked = 0
    for number in range(sent, last):
        frame = queue + (number % QUEUE_SLOTS) * FRAME_SLOT_BYTES
        if skip < FRAME_BYTES:
            poke(vectors + 16 * count, frame + skip)
            poke(vectors + 16 * count + 8, FRAME_BYTES - skip)
            asked += FRAME_BYTES - skip
            count += 1
            skip = 0
        else:
            skip -= FRAME_BYTES
        left = peek(frame + FRAME_NBYTES) - skip
        if left > 0:
            poke(vectors + 16 * count, peek(frame + FRAME_LOCAL) + skip)
            poke(vectors + 16 * count + 8, left)
            asked += left
            count += 1
        skip = 0
    poke(message + 8 * MESSAGE_COUNT, count)
    taken = _sendmsg(peek(link + 8 * FD), message, _SEND_FLAGS)
    if taken < 0:
        code = peek32(_errno_location())
        if code == _EAGAIN:
            _clear_flags(link, WRITABLE)
        elif code != _EINTR and code != _ENOMEM and code != _ENOBUFS:
            # What the peer sent before it broke is still to be read: only sending is over.
            _set_flags(link, SEND_OVER | READABLE | FINISHING)
            _lost(context, peek(link + 8 * PEER), code)
        return
    if taken < asked:
        # The socket buffer is full; room in it makes a new edge.
        _clear_flags(link, WRITABLE)
    taken += peek(link + 8 * SENT_BYTES)
    rank = peek(link + 8 * PEER)
    while sent < last:
        frame = queue + (sent % QUEUE_SLOTS) * FRAME_SLOT_BYTES
        whole = FRAME_BYTES + peek(frame + FRAME_NBYTES)
        if taken < whole:
            break
        taken -= whole
        sent += 1
        _event(context, SENT, peek(frame + FRAME_WR_ID), rank, 0)
    poke(link + 8 * SENT_FRAMES, sent)
    poke(link + 8 * SENT_BYTES, taken)


@compiled
def _turns(context: int, receive: bool) -> None:
    """One turn for every connection that was ready at the start, while there is room for its events."""
    slots = peek(context + 8 * RANKS) * peek(context + 8 * CONNECTIONS)
    turns = peek(context + 8 * READY_HEAD) - peek(context + 8 * READY_TAIL)
    while turns > 0 and _room(context):
        turns -= 1
        tail = peek(context + 8 * READY_TAIL)
        index = peek(peek(context + 8 * READY) + (tail % slots) * 8)
        poke(context + 8 * READY_TAIL, tail + 1)
        link = _link(context, index)
        _clear_flags(link, QUEUED)
        if peek(_peer(context, peek(link + 8 * PEER)) + 8 * STATE) >= CLOSED:
            continue
        flags = peek(link + 8 * FLAGS)
        if receive and flags & READABLE != 0 and flags & RECEIVE_OVER == 0:
            _receive(context, link)
        flags = peek(link + 8 * FLAGS)
        unsent = peek(link + 8 * POSTED) > peek(link + 8 * SENT_FRAMES)
        if unsent and flags & WRITABLE != 0 and flags & SEND_OVER == 0:
            _send(context, link)
        if _has_work(link):
            _enqueue(context, index)


@compiled
def _wait(context: int) -> int:
    """Collect edges without waiting; 0 or a negative errno."""
    waiting = peek(context + 8 * WAITING)
    count = _epoll_wait(peek(context + 8 * EPOLL), waiting, WAITING_SLOTS, 0)
    if count < 0:
        code = peek32(_errno_location())
        return 0 if code == _EINTR else -code
    for position in range(count):
        entry = waiting + position * EPOLL_EVENT_BYTES
        edges = peek32(entry)
        index = peek(peek(context + 8 * BY_FD) + 8 * peek32(entry + EPOLL_DATA))
        link = _link(context, index)
        flags = 0
        if edges & (_EPOLLIN | _EPOLLRDHUP | _EPOLLHUP | _EPOLLERR) != 0:
            flags |= READABLE
        if edges & (_EPOLLOUT | _EPOLLHUP | _EPOLLERR) != 0:
            flags |= WRITABLE
        if edges & (_EPOLLRDHUP | _EPOLLHUP | _EPOLLERR) != 0:
            flags |= FINISHING
        _set_flags(link, flags)
        if _has_work(link):
            _enqueue(context, index)
    return 0


@compiled
def _close_peer(context: int, rank: int, state: int) -> None:
    """Move nothing more for this peer. Its sockets stay until close; what the kernel took still goes out."""
    peer = _peer(context, rank)
    before = peek(peer + 8 * STATE)
    poke(peer + 8 * STATE, state)
    if before == ENDING_PEER:
        poke(context + 8 * ENDING, peek(context + 8 * ENDING) - 1)
    if before != UP and before != ENDING_PEER:
        return
    connections = peek(context + 8 * CONNECTIONS)
    for connection in range(connections):
        link = _link(context, rank * connections + connection)
        _set_flags(link, RECEIVE_OVER | SEND_OVER)
        _shutdown(peek(link + 8 * FD), _SHUT_WR)


@compiled
def _end_peers(context: int) -> None:
    """Report DOWN for peers whose connections have all ended, or whose grace is over."""
    now = monotonic_ns()
    connections = peek(context + 8 * CONNECTIONS)
    for rank in range(peek(context + 8 * RANKS)):
        peer = _peer(context, rank)
        if peek(peer + 8 * STATE) != ENDING_PEER:
            continue
        over = True
        for connection in range(connections):
            link = _link(context, rank * connections + connection)
            over = over and peek(link + 8 * FLAGS) & RECEIVE_OVER != 0
        if (over or now >= peek(peer + 8 * LOST_TIME)) and _room(context):
            _event(context, DOWN, 0, rank, peek(peer + 8 * LOST_ERRNO))
            _close_peer(context, rank, CLOSED)


def _post(context: int, peer: int, stream: int, local: int, target: int, nbytes: int, imm: int, wr_id: int) -> int:
    state = peek(_peer(context, peer) + 8 * STATE)
    if state == ENDING_PEER:
        return BUSY
    if state != UP:
        return -_ENOTCONN
    if nbytes < 0 or nbytes > MAX_WRITE_BYTES or target < 0:
        return -_EINVAL
    if target > peek(context + 8 * WINDOW_BYTES) - nbytes:
        return -_EINVAL
    connections = peek(context + 8 * CONNECTIONS)
    index = peer * connections + _connection_of(stream, connections)
    link = _link(context, index)
    posted = peek(link + 8 * POSTED)
    if posted - peek(link + 8 * SENT_FRAMES) >= QUEUE_SLOTS:
        return BUSY
    frame = peek(link + 8 * QUEUE) + (posted % QUEUE_SLOTS) * FRAME_SLOT_BYTES
    poke(frame, FRAME_MAGIC | ((imm & _LOW32) << 32))
    poke(frame + FRAME_TARGET, target)
    poke(frame + FRAME_LENGTH, nbytes)
    poke(frame + FRAME_NUMBER, posted)
    poke(frame + FRAME_LOCAL, local)
    poke(frame + FRAME_NBYTES, nbytes)
    poke(frame + FRAME_WR_ID, wr_id)
    poke(link + 8 * POSTED, posted + 1)
    if peek(link + 8 * FLAGS) & WRITABLE != 0:
        _enqueue(context, index)
    return ACCEPTED


def _flush(context: int) -> int:
    _turns(context, False)
    return 0


def _poll(context: int, events: int, limit: int) -> int:
    if peek(context + 8 * EVENTS_HEAD) - peek(context + 8 * EVENTS_TAIL) < limit:
        status = _wait(context)
        if status < 0:
            return status
        _turns(context, True)
        if peek(context + 8 * ENDING) > 0:
            _end_peers(context)
    head, tail = peek(context + 8 * EVENTS_HEAD), peek(context + 8 * EVENTS_TAIL)
    count = 0
    while tail < head and count < limit:
        source = peek(context + 8 * EVENTS) + (tail % EVENT_SLOTS) * EVENT_BYTES
        tail += 1
        if peek(_peer(context, peek(source + 16)) + 8 * STATE) != DROPPED:
            copy(events + count * EVENT_BYTES, source, EVENT_BYTES)
            count += 1
    if tail == head:
        # Start over: the first lines of the queue stay in the cache.
        poke(context + 8 * EVENTS_HEAD, 0)
        tail = 0
    poke(context + 8 * EVENTS_TAIL, tail)
    return count


def _drop(context: int, peer: int, reason: int) -> int:
    _close_peer(context, peer, DROPPED)
    return 0


@functools.cache
def warm() -> tuple[int, int, int, int]:
    """Compile (or load) the data path; addresses of post, flush, poll and drop."""
    with compile_lock():
        functions = (
            c_function("int64(int64, int64, int64, int64, int64, int64, int64, int64)")(_post),
            c_function("int64(int64)")(_flush),
            c_function("int64(int64, int64, int64)")(_poll),
            c_function("int64(int64, int64, int64)")(_drop),
        )
    post, flush, poll, drop = (int(function.address) for function in functions)
    return post, flush, poll, drop
