"""Memory of the compiled TCP data path, and what it does on one connection: a receive, a gathered write.

Memory: one int64 context per endpoint, records per connection and per peer. The endpoint writes it before the proxy
thread starts, then that thread alone; nothing here is shared with another process. Words are indices into int64 arrays.

Received headers are copied before they are checked, and payload bytes go only where a checked header says. No function
here blocks, allocates or raises.
"""

from __future__ import annotations

import errno
import os
import socket

from ...native.atomics import copy, peek, peek32, poke
from ...native.calls import monotonic_ns
from ...native.jit import compiled, external
from ...protocol.command import MAX_WRITE_BYTES
from ...protocol.frame import FRAME_BYTES, FRAME_LENGTH, FRAME_MAGIC, FRAME_NUMBER, FRAME_TARGET
from ...protocol.imm import IMM
from .base import (
    ARRIVED,
    FAULT,
    FAULT_BAD_FRAME,
    FAULT_BITS,
    FAULT_NUMBER,
    FAULT_OUTSIDE_WINDOW,
    FAULT_TOO_LONG,
    FAULT_WRONG_SOURCE,
    SENT,
    put_event,
)

# --- context ----------------------------------------------------------------------------------------------------------
WINDOW = 0  # address of this rank's window
WINDOW_BYTES = 1  # its length
RANKS = 2
CONNECTIONS = 3  # connections per peer
LINKS = 4  # address of the connection records, [rank][connection]
PEERS = 5  # address of the peer records
EPOLL = 6  # epoll descriptor, edge-triggered over all connections
EVENTS_HEAD = 7  # events queued for the next poll
EVENTS_TAIL = 8  # events delivered
EVENTS = 9  # address of EVENT_SLOTS events
READY = 10  # address of the ring of connections with work to do, one slot per connection
READY_HEAD = 11
READY_TAIL = 12
STAGING = 13  # address of STAGING_BYTES for received bytes
VECTORS = 14  # address of the scatter-gather list
MESSAGE = 15  # address of the msghdr that points at it
WAITING = 16  # address of room for WAITING_SLOTS epoll events
ENDING = 17  # peers that lost a connection and are not reported yet
BY_FD = 18  # address of a table from descriptor to connection: what epoll returns is a descriptor
CONTEXT_WORDS = 24

# --- a connection -----------------------------------------------------------------------------------------------------
FD = 0  # descriptor, -1 = not connected
PEER = 1
FLAGS = 2  # READABLE | WRITABLE | FINISHING | QUEUED | RECEIVE_OVER | SEND_OVER
POSTED = 3  # frames accepted
SENT_FRAMES = 4  # frames handed to the kernel completely
SENT_BYTES = 5  # bytes of the next frame that the kernel has taken
QUEUE = 6  # address of QUEUE_SLOTS frames, 64 bytes each
IN_HEADER = 7  # bytes of the current header that have arrived, FRAME_BYTES = it is complete and checked
IN_LEFT = 8  # payload bytes of the current frame still to come
IN_PLACE = 9  # address where the next of them goes
IN_NUMBER = 10  # number of the next frame
IN_IMM = 11
HEADER = 12  # 4 words: the header as received, copied here so that each field is read once
LINK_WORDS = 16

READABLE, WRITABLE = 1, 2  # since the last EAGAIN; edge-triggered epoll tells only about changes
FINISHING = 4  # the peer has closed: read on until the end even after a short read
QUEUED = 8  # is in the READY ring
RECEIVE_OVER, SEND_OVER = 16, 32  # no more in this direction

# --- a frame in a connection's queue: its header, then ----------------------------------------------------------------
FRAME_LOCAL = FRAME_BYTES  # address of the payload
FRAME_NBYTES = FRAME_BYTES + 8
FRAME_WR_ID = FRAME_BYTES + 16
FRAME_SLOT_BYTES = 64

# --- a peer -----------------------------------------------------------------------------------------------------------
STATE = 0
LOST_ERRNO = 1  # why the first connection ended
LOST_TIME = 2  # CLOCK_MONOTONIC ns at which DOWN is reported even if other connections still seem alive
LOST_BYTES = 3  # bytes at least that are missing of the frame in which it ended, 0 = it ended between frames
PEER_WORDS = 4

ABSENT = 0
UP = 1
ENDING_PEER = 2  # a connection ended, the others are still read
CLOSED = 3  # DOWN was queued after everything that came before it
DROPPED = 4  # told to forget it: queued events are discarded too

# --- sizes ------------------------------------------------------------------------------------------------------------
#: Frames a connection queues before BUSY.
QUEUE_SLOTS = 256
#: Bytes of one receive that are not the rest of a payload. Large enough to make the system call cheap, small enough to
#: stay in a core's second-level cache until they are copied to the window.
STAGING_BYTES = 128 << 10
#: Frames gathered into one sendmsg (two entries each; the kernel allows 1024 entries).
GATHER_FRAMES = 64
#: Most events that one time slice of a connection can make: zero-length frames in a full staging buffer, the frame
#: whose payload came before it, the sends, and a DOWN or FAULT.
SLICE_EVENTS = STAGING_BYTES // FRAME_BYTES + GATHER_FRAMES + 4
EVENT_SLOTS = 2 * SLICE_EVENTS
WAITING_SLOTS = 64
EPOLL_EVENT_BYTES = 12 if os.uname().machine == "x86_64" else 16
EPOLL_DATA = EPOLL_EVENT_BYTES - 8
#: A dead process closes all its connections at once; a peer that lost one is reported when the rest has ended, or after
#: this.
LOST_GRACE_NS = 100_000_000

IOVEC_WORDS = 2
MSGHDR_WORDS = 7
#: Word of msghdr.msg_iovlen (LP64: name, namelen, iov, iovlen, control, controllen, flags).
MESSAGE_COUNT = 3

_EAGAIN = errno.EAGAIN
_EINTR = errno.EINTR
_ENOBUFS = errno.ENOBUFS
_ENOMEM = errno.ENOMEM
#: What DOWN says when the peer just closed: there is no errno, and this is how the closed socket would answer.
_ECONNRESET = errno.ECONNRESET
_SEND_FLAGS = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_RECEIVE_FLAGS = int(socket.MSG_DONTWAIT)
_SHUT_RDWR = int(socket.SHUT_RDWR)
_SOURCE_SHIFT = IMM["source"].shift
_LOW32 = 0xFFFFFFFF

_sendmsg = external("sendmsg", "int64(int32, int64, int32)")
_recvmsg = external("recvmsg", "int64(int32, int64, int32)")
_shutdown = external("shutdown", "int32(int32, int32)")
_errno_location = external("__errno_location", "int64()")


@compiled
def peer_record(context: int, rank: int) -> int:
    """Address of the record of peer ``rank``."""
    return peek(context + 8 * PEERS) + rank * 8 * PEER_WORDS


@compiled
def queue_event(context: int, kind: int, value: int, peer: int, status: int) -> None:
    """Queue an event; a time slice begins only when there is room for all it can make."""
    head = peek(context + 8 * EVENTS_HEAD)
    put_event(peek(context + 8 * EVENTS), head % EVENT_SLOTS, kind, value, peer, status)
    poke(context + 8 * EVENTS_HEAD, head + 1)


@compiled
def set_flags(link: int, flags: int) -> None:
    """Set ``flags`` of the connection record at ``link``."""
    poke(link + 8 * FLAGS, peek(link + 8 * FLAGS) | flags)


@compiled
def clear_flags(link: int, flags: int) -> None:
    """Clear ``flags`` of the connection record at ``link``."""
    poke(link + 8 * FLAGS, peek(link + 8 * FLAGS) & ~flags)


@compiled
def has_work(link: int) -> bool:
    """Whether a time slice of the connection could move something."""
    flags = peek(link + 8 * FLAGS)
    if flags & READABLE != 0 and flags & RECEIVE_OVER == 0:
        return True
    unsent = peek(link + 8 * POSTED) > peek(link + 8 * SENT_FRAMES)
    return unsent and flags & WRITABLE != 0 and flags & SEND_OVER == 0


@compiled
def lost(context: int, rank: int, code: int) -> None:
    """A connection of ``rank`` ended in one direction: DOWN follows when the others have ended, or after the grace."""
    peer = peer_record(context, rank)
    if peek(peer + 8 * STATE) == UP:
        poke(peer + 8 * STATE, ENDING_PEER)
        poke(peer + 8 * LOST_ERRNO, code)
        poke(peer + 8 * LOST_TIME, monotonic_ns() + LOST_GRACE_NS)
        poke(context + 8 * ENDING, peek(context + 8 * ENDING) + 1)


@compiled
def _fault(context: int, link: int, fault: int, arrived: int, expected: int) -> bool:
    """Close a connection on which the peer broke the format. Always False."""
    _shutdown(peek(link + 8 * FD), _SHUT_RDWR)
    set_flags(link, RECEIVE_OVER | SEND_OVER)
    queue_event(context, FAULT, arrived, peek(link + 8 * PEER), fault | expected << FAULT_BITS)
    return False


@compiled
def _check_header(context: int, link: int) -> bool:
    """Check the header in the record and set where its payload goes; False after a fault."""
    header = link + 8 * HEADER
    first = peek(header)
    target, length = peek(header + FRAME_TARGET), peek(header + FRAME_LENGTH)
    number = peek(link + 8 * IN_NUMBER)
    limit = peek(context + 8 * WINDOW_BYTES) - length
    imm = (first >> 32) & _LOW32
    peer = peek(link + 8 * PEER)
    if first & _LOW32 != FRAME_MAGIC:
        return _fault(context, link, FAULT_BAD_FRAME, first & _LOW32, FRAME_MAGIC)
    if peek(header + FRAME_NUMBER) != number:
        return _fault(context, link, FAULT_NUMBER, peek(header + FRAME_NUMBER), number)
    if length < 0 or length > MAX_WRITE_BYTES:
        return _fault(context, link, FAULT_TOO_LONG, length, MAX_WRITE_BYTES)
    if target < 0 or target > limit:
        return _fault(context, link, FAULT_OUTSIDE_WINDOW, target, limit)
    if imm >> _SOURCE_SHIFT != peer:
        return _fault(context, link, FAULT_WRONG_SOURCE, imm, peer)
    poke(link + 8 * IN_NUMBER, number + 1)
    poke(link + 8 * IN_IMM, imm)
    poke(link + 8 * IN_LEFT, length)
    poke(link + 8 * IN_PLACE, peek(context + 8 * WINDOW) + target)
    return True


@compiled
def _arrived(context: int, link: int) -> None:
    """The current frame is complete."""
    nbytes = peek(link + 8 * HEADER + FRAME_LENGTH)
    queue_event(context, ARRIVED, peek(link + 8 * IN_IMM), peek(link + 8 * PEER), nbytes)
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
def _cut(context: int, link: int, code: int) -> None:
    """Nothing more comes from the peer: note whether that was in the middle of a frame."""
    set_flags(link, RECEIVE_OVER)
    have = peek(link + 8 * IN_HEADER)
    missing = 0
    if have > 0:
        missing = peek(link + 8 * IN_LEFT) if have == FRAME_BYTES else FRAME_BYTES - have
    rank = peek(link + 8 * PEER)
    if missing > 0:
        poke(peer_record(context, rank) + 8 * LOST_BYTES, missing)
    lost(context, rank, code)


@compiled
def receive(context: int, link: int) -> None:
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
            clear_flags(link, READABLE)
        elif code != _EINTR and code != _ENOMEM and code != _ENOBUFS:
            _cut(context, link, code)
        return
    if got == 0:
        _cut(context, link, _ECONNRESET)
        return
    if got < direct + STAGING_BYTES and peek(link + 8 * FLAGS) & FINISHING == 0:
        # A short read means empty, and later bytes make a new edge.
        clear_flags(link, READABLE)
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
def send(context: int, link: int) -> None:
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
            clear_flags(link, WRITABLE)
        elif code != _EINTR and code != _ENOMEM and code != _ENOBUFS:
            # What the peer sent before it broke is still to be read: only sending is over.
            set_flags(link, SEND_OVER | READABLE | FINISHING)
            lost(context, peek(link + 8 * PEER), code)
        return
    if taken < asked:
        # The socket buffer is full; room in it makes a new edge.
        clear_flags(link, WRITABLE)
    taken += peek(link + 8 * SENT_BYTES)
    rank = peek(link + 8 * PEER)
    while sent < last:
        frame = queue + (sent % QUEUE_SLOTS) * FRAME_SLOT_BYTES
        whole = FRAME_BYTES + peek(frame + FRAME_NBYTES)
        if taken < whole:
            break
        taken -= whole
        sent += 1
        queue_event(context, SENT, peek(frame + FRAME_WR_ID), rank, 0)
    poke(link + 8 * SENT_FRAMES, sent)
    poke(link + 8 * SENT_BYTES, taken)
