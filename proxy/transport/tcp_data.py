"""Compiled data path of ``tcp``: non-blocking sockets, gathered writes, receives straight into the window.

A connection that has something to do stands in the READY ring, so a poll costs one ``epoll_wait`` and nothing per idle
peer. A turn of a connection is bounded (one receive, one gathered write), then the next one has its turn: a peer that
floods or does not read delays nobody. Sockets are registered edge-triggered once; READABLE and WRITABLE remember the
state between edges, so no epoll_ctl is needed while data moves.

What a turn does is in :mod:`.tcp_link`. No function here blocks, allocates or raises.
"""

from __future__ import annotations

import errno
import functools
import socket

from numba import types

from ...native.atomics import copy, peek, peek32, poke
from ...native.calls import monotonic_ns
from ...native.jit import compiled
from ...protocol.command import MAX_WRITE_BYTES
from ...protocol.frame import FRAME_LENGTH, FRAME_MAGIC, FRAME_NUMBER, FRAME_TARGET, connection_of
from .base import ACCEPTED, BUSY, DOWN, EVENT_BYTES, c_functions
from .tcp_link import clear_flags, has_work, peer_record, queue_event, receive, send, set_flags
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
    LINK_WORDS,
    LINKS,
    LOST_BYTES,
    LOST_ERRNO,
    LOST_TIME,
    PEER,
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
    SENT_FRAMES,
    STATE,
    TURN_EVENTS,
    UP,
    WAITING,
    WAITING_SLOTS,
    WINDOW_BYTES,
    WRITABLE,
)

__all__ = ["warm"]

_EINTR = errno.EINTR
_EINVAL = errno.EINVAL
_ENOTCONN = errno.ENOTCONN
_SHUT_WR = int(socket.SHUT_WR)
_EPOLLIN, _EPOLLOUT, _EPOLLERR, _EPOLLHUP, _EPOLLRDHUP = 0x1, 0x4, 0x8, 0x10, 0x2000
_LOW32 = 0xFFFFFFFF

_shutdown = types.ExternalFunction("shutdown", types.int32(types.int32, types.int32))
_errno_location = types.ExternalFunction("__errno_location", types.int64())
_epoll_wait = types.ExternalFunction("epoll_wait", types.int32(types.int32, types.int64, types.int32, types.int32))

_connection_of = compiled(connection_of)


@compiled
def _link(context: int, index: int) -> int:
    return peek(context + 8 * LINKS) + index * 8 * LINK_WORDS


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
def _turns(context: int, reading: bool) -> None:
    """One turn for every connection that was ready at the start, while there is room for its events."""
    slots = peek(context + 8 * RANKS) * peek(context + 8 * CONNECTIONS)
    turns = peek(context + 8 * READY_HEAD) - peek(context + 8 * READY_TAIL)
    while turns > 0 and _room(context):
        turns -= 1
        tail = peek(context + 8 * READY_TAIL)
        index = peek(peek(context + 8 * READY) + (tail % slots) * 8)
        poke(context + 8 * READY_TAIL, tail + 1)
        link = _link(context, index)
        clear_flags(link, QUEUED)
        if peek(peer_record(context, peek(link + 8 * PEER)) + 8 * STATE) >= CLOSED:
            continue
        flags = peek(link + 8 * FLAGS)
        if reading and flags & READABLE != 0 and flags & RECEIVE_OVER == 0:
            receive(context, link)
        flags = peek(link + 8 * FLAGS)
        unsent = peek(link + 8 * POSTED) > peek(link + 8 * SENT_FRAMES)
        if unsent and flags & WRITABLE != 0 and flags & SEND_OVER == 0:
            send(context, link)
        if has_work(link):
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
        set_flags(link, flags)
        if has_work(link):
            _enqueue(context, index)
    return 0


@compiled
def _close_peer(context: int, rank: int, state: int) -> None:
    """Move nothing more for this peer. Its sockets stay until close; what the kernel took still goes out."""
    peer = peer_record(context, rank)
    before = peek(peer + 8 * STATE)
    poke(peer + 8 * STATE, state)
    if before == ENDING_PEER:
        poke(context + 8 * ENDING, peek(context + 8 * ENDING) - 1)
    if before != UP and before != ENDING_PEER:
        return
    connections = peek(context + 8 * CONNECTIONS)
    for connection in range(connections):
        link = _link(context, rank * connections + connection)
        set_flags(link, RECEIVE_OVER | SEND_OVER)
        _shutdown(peek(link + 8 * FD), _SHUT_WR)


@compiled
def _end_peers(context: int) -> None:
    """Report DOWN for peers whose connections have all ended, or whose grace is over, in the order of their losses.

    A rank that dies makes others give up and close as well: who is told first is who gets the blame.
    """
    now = monotonic_ns()
    connections = peek(context + 8 * CONNECTIONS)
    while peek(context + 8 * ENDING) > 0 and _room(context):
        rank = -1
        for candidate in range(peek(context + 8 * RANKS)):
            peer = peer_record(context, candidate)
            if peek(peer + 8 * STATE) == ENDING_PEER and (
                rank < 0 or peek(peer + 8 * LOST_TIME) < peek(peer_record(context, rank) + 8 * LOST_TIME)
            ):
                rank = candidate
        peer = peer_record(context, rank)
        over = True
        for connection in range(connections):
            link = _link(context, rank * connections + connection)
            over = over and peek(link + 8 * FLAGS) & RECEIVE_OVER != 0
        if not over and now < peek(peer + 8 * LOST_TIME):
            return
        queue_event(context, DOWN, peek(peer + 8 * LOST_BYTES), rank, peek(peer + 8 * LOST_ERRNO))
        _close_peer(context, rank, CLOSED)


def _post(context: int, peer: int, stream: int, local: int, target: int, nbytes: int, imm: int, wr_id: int) -> int:
    state = peek(peer_record(context, peer) + 8 * STATE)
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
        if peek(peer_record(context, peek(source + 16)) + 8 * STATE) != DROPPED:
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
    return c_functions("tcp", _post, _flush, _poll, _drop)
