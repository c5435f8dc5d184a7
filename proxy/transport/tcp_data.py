"""Compiled data path of ``tcp``: non-blocking sockets, gathered writes, receives straight into the window.

A connection that has something to do stands in the READY ring, so a poll costs one ``epoll_wait`` and nothing per idle
peer. The time slice of a connection is bounded (one receive, one gathered write), then the next one is served: a peer
that floods or does not read delays nobody. Sockets are registered edge-triggered once; READABLE and WRITABLE remember
the state between edges, so no epoll_ctl is needed while data moves.

What a time slice does is in :mod:`.tcp_link`. No function here blocks, allocates or raises.
"""

from __future__ import annotations

import errno
import socket

from ...native.atomics import copy, fetch_add, load64, peek, peek32, poke, store64
from ...native.calls import monotonic_ns
from ...native.jit import compiled, external
from ...protocol.command import MAX_WRITE_BYTES
from ...protocol.frame import FRAME_LENGTH, FRAME_MAGIC, FRAME_NUMBER, FRAME_TARGET, connection_of
from . import tcp_words as tcp
from .base import ACCEPTED, BUSY, DOWN, EVENT_BYTES, DataFunctions
from .tcp_auth import MAX_SEALED_BYTES
from .tcp_link import break_off, lost, receive, send, take_over

_EINTR = errno.EINTR
_EINVAL = errno.EINVAL
_ENOTCONN = errno.ENOTCONN
_SHUT_WR = int(socket.SHUT_WR)
_EPOLLIN, _EPOLLOUT, _EPOLLERR, _EPOLLHUP, _EPOLLRDHUP = 0x1, 0x4, 0x8, 0x10, 0x2000
_LOW32 = 0xFFFFFFFF

_shutdown = external("shutdown", "int32(int32, int32)")
_errno_location = external("__errno_location", "int64()")
_epoll_wait = external("epoll_wait", "int32(int32, int64, int32, int32)")

_connection_of = compiled(connection_of)


@compiled
def _room(context: int) -> bool:
    queued = peek(context + 8 * tcp.EVENTS_HEAD) - peek(context + 8 * tcp.EVENTS_TAIL)
    return tcp.EVENT_SLOTS - queued >= tcp.SLICE_EVENTS


@compiled
def _serve_ready(context: int, reading: bool) -> None:
    """One time slice for every connection that was ready at the start, while there is room for its events."""
    slots = peek(context + 8 * tcp.RANKS) * peek(context + 8 * tcp.CONNECTIONS)
    slices = peek(context + 8 * tcp.READY_HEAD) - peek(context + 8 * tcp.READY_TAIL)
    while slices > 0 and _room(context):
        slices -= 1
        tail = peek(context + 8 * tcp.READY_TAIL)
        index = peek(peek(context + 8 * tcp.READY) + (tail % slots) * 8)
        poke(context + 8 * tcp.READY_TAIL, tail + 1)
        link = tcp.link_record(context, index)
        tcp.clear_flags(link, tcp.QUEUED)
        if reading and peek(link + 8 * tcp.FLAGS) & tcp.READABLE != 0 and peek(link + 8 * tcp.STATE) == tcp.UP:
            receive(context, link)
        flags = peek(link + 8 * tcp.FLAGS)
        sends = flags & tcp.WRITABLE != 0 and flags & tcp.SEND_OVER == 0 and tcp.wants_to_send(link)
        if sends and peek(link + 8 * tcp.STATE) == tcp.UP:
            send(context, link)
        if tcp.has_work(link):
            tcp.enqueue(context, index)


@compiled
def _tell_counts(context: int) -> None:
    """Have what arrived some time ago be acknowledged, where no frame has gone back since."""
    now = monotonic_ns()
    if now - peek(context + 8 * tcp.OWING) < tcp.ACK_DELAY_NS:
        return
    poke(context + 8 * tcp.OWING, 0)
    for index in range(peek(context + 8 * tcp.RANKS) * peek(context + 8 * tcp.CONNECTIONS)):
        link = tcp.link_record(context, index)
        if peek(link + 8 * tcp.IN_NUMBER) != peek(link + 8 * tcp.TOLD) and peek(link + 8 * tcp.STATE) == tcp.UP:
            tcp.set_flags(link, tcp.ACK_DUE)
            if tcp.has_work(link):
                tcp.enqueue(context, index)


@compiled
def _obey(context: int, index: int, link: int, order: int) -> None:
    """Do what the mending thread wants of a connection."""
    state = peek(link + 8 * tcp.STATE)
    if order == tcp.LET_GO:
        break_off(context, link, 0)
    elif order == tcp.GIVE_UP and state == tcp.BROKEN:
        store64(link + 8 * tcp.STATE, tcp.OVER)
        lost(context, link)
    elif order == tcp.TAKE and state == tcp.BROKEN:
        take_over(context, index, peek(link + 8 * tcp.NEW_FD), peek(link + 8 * tcp.NEW_COUNT))
    elif order == tcp.TAKE:
        # its peer was dropped meanwhile
        _shutdown(peek(link + 8 * tcp.NEW_FD), _SHUT_WR)
    store64(link + 8 * tcp.ORDER, tcp.NO_ORDER)


@compiled
def _obey_all(context: int, orders: int) -> None:
    """Do all that the mending thread wants, as far as there is room for the events."""
    for index in range(peek(context + 8 * tcp.RANKS) * peek(context + 8 * tcp.CONNECTIONS)):
        link = tcp.link_record(context, index)
        order = load64(link + 8 * tcp.ORDER)
        if order != tcp.NO_ORDER:
            if not _room(context):
                return
            _obey(context, index, link, order)
    poke(context + 8 * tcp.ORDERS_SEEN, orders)


@compiled
def _wait(context: int) -> int:
    """Collect edges without waiting; 0 or a negative errno."""
    waiting = peek(context + 8 * tcp.WAITING)
    count = _epoll_wait(peek(context + 8 * tcp.EPOLL), waiting, tcp.WAITING_SLOTS, 0)
    if count < 0:
        code = peek32(_errno_location())
        return 0 if code == _EINTR else -code
    for position in range(count):
        entry = waiting + position * tcp.EPOLL_EVENT_BYTES
        edges = peek32(entry)
        index = peek32(entry + tcp.EPOLL_DATA)
        link = tcp.link_record(context, index)
        flags = 0
        if edges & (_EPOLLIN | _EPOLLRDHUP | _EPOLLHUP | _EPOLLERR) != 0:
            flags |= tcp.READABLE
        if edges & (_EPOLLOUT | _EPOLLHUP | _EPOLLERR) != 0:
            flags |= tcp.WRITABLE
        if edges & (_EPOLLRDHUP | _EPOLLHUP | _EPOLLERR) != 0:
            flags |= tcp.FINISHING
        tcp.set_flags(link, flags)
        if tcp.has_work(link):
            tcp.enqueue(context, index)
    return 0


@compiled
def _close_peer(context: int, rank: int, standing: int) -> None:
    """Move nothing more for this peer. Its sockets stay until close; what the kernel took still goes out."""
    peer = tcp.peer_record(context, rank)
    before = peek(peer + 8 * tcp.STANDING)
    poke(peer + 8 * tcp.STANDING, standing)
    if before == tcp.ENDING_PEER:
        poke(context + 8 * tcp.ENDING, peek(context + 8 * tcp.ENDING) - 1)
    if before != tcp.PRESENT and before != tcp.ENDING_PEER:
        return
    connections = peek(context + 8 * tcp.CONNECTIONS)
    for connection in range(connections):
        link = tcp.link_record(context, rank * connections + connection)
        if peek(link + 8 * tcp.STATE) == tcp.UP:
            _shutdown(peek(link + 8 * tcp.FD), _SHUT_WR)
        # rule: what is dropped is not connected again
        store64(link + 8 * tcp.STATE, tcp.OVER)


@compiled
def _end_peers(context: int) -> None:
    """Report DOWN for peers whose connections have all ended, or whose grace is over, in the order of their losses.

    A rank that dies makes others give up and close as well: who is told first is who gets the blame.
    """
    now = monotonic_ns()
    connections = peek(context + 8 * tcp.CONNECTIONS)
    while peek(context + 8 * tcp.ENDING) > 0 and _room(context):
        rank = -1
        for candidate in range(peek(context + 8 * tcp.RANKS)):
            peer = tcp.peer_record(context, candidate)
            if peek(peer + 8 * tcp.STANDING) == tcp.ENDING_PEER and (
                rank < 0 or peek(peer + 8 * tcp.LOST_AT) < peek(tcp.peer_record(context, rank) + 8 * tcp.LOST_AT)
            ):
                rank = candidate
        peer = tcp.peer_record(context, rank)
        over = True
        for connection in range(connections):
            link = tcp.link_record(context, rank * connections + connection)
            over = over and peek(link + 8 * tcp.STATE) != tcp.UP
        if not over and now < peek(peer + 8 * tcp.LOST_UNTIL):
            return
        tcp.queue_event(context, DOWN, peek(peer + 8 * tcp.LOST_BYTES), rank, peek(peer + 8 * tcp.LOST_ERRNO))
        _close_peer(context, rank, tcp.CLOSED)


def _post(context: int, peer: int, stream: int, local: int, target: int, nbytes: int, imm: int, wr_id: int) -> int:
    standing = peek(tcp.peer_record(context, peer) + 8 * tcp.STANDING)
    if standing != tcp.PRESENT:
        # its end may be queued behind what others sent: a failure here would be this rank's
        told = peek(context + 8 * tcp.EVENTS_HEAD) == peek(context + 8 * tcp.EVENTS_TAIL)
        ends = standing == tcp.ENDING_PEER or (standing == tcp.CLOSED and not told)
        return BUSY if ends else -_ENOTCONN
    if nbytes < 0 or nbytes > MAX_WRITE_BYTES or target < 0:
        return -_EINVAL
    if target > peek(context + 8 * tcp.WINDOW_BYTES) - nbytes:
        return -_EINVAL
    if nbytes > MAX_SEALED_BYTES and peek(context + 8 * tcp.AUTH) != 0:
        return -_EINVAL
    connections = peek(context + 8 * tcp.CONNECTIONS)
    index = peer * connections + _connection_of(stream, connections)
    link = tcp.link_record(context, index)
    posted = peek(link + 8 * tcp.POSTED)
    if posted - peek(link + 8 * tcp.ACKED) >= tcp.QUEUE_SLOTS:
        return BUSY
    frame = peek(link + 8 * tcp.QUEUE) + (posted % tcp.QUEUE_SLOTS) * tcp.FRAME_SLOT_BYTES
    poke(frame, FRAME_MAGIC | ((imm & _LOW32) << 32))
    poke(frame + FRAME_TARGET, target)
    poke(frame + FRAME_LENGTH, nbytes)
    poke(frame + FRAME_NUMBER, posted)
    poke(frame + tcp.FRAME_LOCAL, local)
    poke(frame + tcp.FRAME_NBYTES, nbytes)
    poke(frame + tcp.FRAME_WR_ID, wr_id)
    poke(link + 8 * tcp.POSTED, posted + 1)
    if peek(link + 8 * tcp.FLAGS) & tcp.WRITABLE != 0:
        tcp.enqueue(context, index)
    return ACCEPTED


def _flush(context: int) -> int:
    _serve_ready(context, False)
    return 0


def _poll(context: int, events: int, limit: int) -> int:
    if peek(context + 8 * tcp.EVENTS_HEAD) - peek(context + 8 * tcp.EVENTS_TAIL) < limit:
        orders = load64(context + 8 * tcp.ORDERS)
        if orders != peek(context + 8 * tcp.ORDERS_SEEN):
            _obey_all(context, orders)
        status = _wait(context)
        if status < 0:
            return status
        if peek(context + 8 * tcp.OWING) != 0:
            _tell_counts(context)
        _serve_ready(context, True)
        if peek(context + 8 * tcp.ENDING) > 0:
            _end_peers(context)
    head, tail = peek(context + 8 * tcp.EVENTS_HEAD), peek(context + 8 * tcp.EVENTS_TAIL)
    count = 0
    while tail < head and count < limit:
        source = peek(context + 8 * tcp.EVENTS) + (tail % tcp.EVENT_SLOTS) * EVENT_BYTES
        tail += 1
        if peek(tcp.peer_record(context, peek(source + 16)) + 8 * tcp.STANDING) != tcp.DROPPED:
            copy(events + count * EVENT_BYTES, source, EVENT_BYTES)
            count += 1
    if tail == head:
        # Start over: the first lines of the queue stay in the cache.
        poke(context + 8 * tcp.EVENTS_HEAD, 0)
        tail = 0
    poke(context + 8 * tcp.EVENTS_TAIL, tail)
    return count


def _drop(context: int, peer: int) -> int:
    _close_peer(context, peer, tcp.DROPPED)
    return 0


@compiled
def state_of(link: int) -> int:
    """STATE of a connection record, acquire: what the loop stored before can be read."""
    return load64(link + 8 * tcp.STATE)


@compiled
def order(context: int, link: int, what: int) -> int:
    """Have the loop obey ``what``; NEW_FD and NEW_COUNT are stored before. Returns the number of orders before."""
    store64(link + 8 * tcp.ORDER, what)
    return fetch_add(context + 8 * tcp.ORDERS, 1)


@compiled
def pending(link: int) -> int:
    """The order that has not been obeyed yet, acquire."""
    return load64(link + 8 * tcp.ORDER)


FUNCTIONS = DataFunctions("tcp", _post, _flush, _poll, _drop, take_over, state_of, order, pending)
