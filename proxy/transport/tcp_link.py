"""What the compiled TCP data path does on one connection: a receive, a gathered write, a break, and going on after it.

Received headers are copied before they are checked, and payload bytes go only where a checked header says. A frame is
complete when the peer says that it has it whole; until then its source is not touched, so that what the peer lacks can
be sent again on a new connection. No function here blocks, allocates or raises.
"""

from __future__ import annotations

import errno
import select
import socket

from ...native.atomics import copy, peek, peek32, poke, poke32, store64
from ...native.calls import monotonic_ns
from ...native.jit import compiled, external
from ...protocol.command import MAX_WRITE_BYTES
from ...protocol.frame import ACK_MAGIC, FRAME_LENGTH, FRAME_MAGIC, FRAME_NUMBER, FRAME_TARGET
from ...protocol.imm import IMM
from . import tcp_words as tcp
from .base import (
    ARRIVED,
    FAULT,
    FAULT_BAD_FRAME,
    FAULT_BITS,
    FAULT_COUNT,
    FAULT_NUMBER,
    FAULT_OUTSIDE_WINDOW,
    FAULT_TOO_LONG,
    FAULT_WRONG_SOURCE,
    SENT,
)
from .tcp_auth import MAX_SEALED_BYTES, is_header_genuine, is_payload_genuine, seal

_EAGAIN = errno.EAGAIN
_EINTR = errno.EINTR
_ENOBUFS = errno.ENOBUFS
_ENOMEM = errno.ENOMEM
#: What DOWN says when the peer just closed: there is no errno, and this is how the closed socket would answer.
_ECONNRESET = errno.ECONNRESET
#: A frame whose MAC, or whose header before that, is not what the peer can have sent.
_EBADMSG = errno.EBADMSG
_SEND_FLAGS = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_RECEIVE_FLAGS = int(socket.MSG_DONTWAIT)
_SHUT_RDWR = int(socket.SHUT_RDWR)
_EDGES = int(select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
_CTL_ADD = 1  # EPOLL_CTL_ADD of sys/epoll.h
_SOURCE_SHIFT = IMM["source"].shift
_LOW32 = 0xFFFFFFFF

_sendmsg = external("sendmsg", "int64(int32, int64, int32)")
_recvmsg = external("recvmsg", "int64(int32, int64, int32)")
_write = external("write", "int64(int32, int64, int64)")
_shutdown = external("shutdown", "int32(int32, int32)")
_epoll_ctl = external("epoll_ctl", "int32(int32, int32, int32, int64)")
_errno_location = external("__errno_location", "int64()")


# --- its life ---------------------------------------------------------------------------------------------------------


@compiled
def take_over(context: int, index: int, fd: int, count: int) -> int:
    """Go on with the proven, non-blocking socket ``fd``, of whose other end the peer has ``count`` frames whole.

    0, or a negative errno: the connection is not usable, and BROKEN still.
    """
    link = tcp.link_record(context, index)
    acked, sent = peek(link + 8 * tcp.ACKED), peek(link + 8 * tcp.SENT_FRAMES)
    if count < acked or count > sent:
        _fault(context, link, FAULT_COUNT, count, sent)
        return 0
    entry = peek(context + 8 * tcp.VECTORS)
    poke32(entry, _EDGES)
    poke32(entry + tcp.EPOLL_DATA, index)
    poke32(entry + tcp.EPOLL_DATA + 4, 0)
    if _epoll_ctl(peek(context + 8 * tcp.EPOLL), _CTL_ADD, fd, entry) != 0:
        return -peek32(_errno_location())
    _complete(context, link, count)
    # rule: what the peer has not is sent again, from its count
    poke(link + 8 * tcp.SENT_FRAMES, count)
    poke(link + 8 * tcp.SENT_BYTES, 0)
    poke(link + 8 * tcp.SEALED, count)
    poke(link + 8 * tcp.ACK_LEFT, 0)
    poke(link + 8 * tcp.IN_HEADER, 0)
    poke(link + 8 * tcp.IN_LEFT, 0)
    poke(link + 8 * tcp.TOLD, peek(link + 8 * tcp.IN_NUMBER))
    poke(link + 8 * tcp.UNTOLD_BYTES, 0)
    poke(link + 8 * tcp.SEND_COUNTER, 0)
    poke(link + 8 * tcp.RECEIVE_COUNTER, 0)
    poke(link + 8 * tcp.FD, fd)
    # Not known to be readable, but an edge may have passed before: the first time slice finds out.
    poke(link + 8 * tcp.FLAGS, peek(link + 8 * tcp.FLAGS) & tcp.QUEUED | tcp.READABLE | tcp.WRITABLE)
    store64(link + 8 * tcp.STATE, tcp.UP)
    tcp.enqueue(context, index)
    return 0


@compiled
def lost(context: int, link: int) -> None:
    """A connection is not mended: DOWN of its peer follows when the others have ended, or after the grace."""
    rank = peek(link + 8 * tcp.PEER)
    peer = tcp.peer_record(context, rank)
    if peek(link + 8 * tcp.MISSING) > 0:
        poke(peer + 8 * tcp.LOST_BYTES, peek(link + 8 * tcp.MISSING))
    if peek(peer + 8 * tcp.STANDING) == tcp.PRESENT:
        poke(peer + 8 * tcp.STANDING, tcp.ENDING_PEER)
        poke(peer + 8 * tcp.LOST_ERRNO, peek(link + 8 * tcp.REASON))
        poke(peer + 8 * tcp.LOST_AT, peek(link + 8 * tcp.BROKE_AT))
        poke(peer + 8 * tcp.LOST_UNTIL, monotonic_ns() + tcp.LOST_GRACE_NS)
        poke(context + 8 * tcp.ENDING, peek(context + 8 * tcp.ENDING) + 1)


@compiled
def break_off(context: int, link: int, code: int) -> None:
    """The connection failed with errno ``code``: the mending thread has it from here on.

    The peer sends a frame again that is not whole: to the same place, the same bytes.
    """
    if peek(link + 8 * tcp.STATE) != tcp.UP:
        return
    have = peek(link + 8 * tcp.IN_HEADER)
    header_bytes = peek(context + 8 * tcp.HEADER_BYTES)
    missing = 0
    if have > 0:
        missing = peek(link + 8 * tcp.IN_LEFT) if have == header_bytes else header_bytes - have
    poke(link + 8 * tcp.MISSING, missing)
    poke(link + 8 * tcp.REASON, code)
    poke(link + 8 * tcp.BROKE_AT, monotonic_ns())
    bell = peek(context + 8 * tcp.BELL)
    if bell < 0:
        # nobody mends
        store64(link + 8 * tcp.STATE, tcp.OVER)
        lost(context, link)
        return
    store64(link + 8 * tcp.STATE, tcp.BROKEN)
    # not WAITING: that may be gone through at present
    entry = peek(context + 8 * tcp.VECTORS)
    poke(entry, 1)
    _write(bell, entry, 8)


@compiled
def _fault(context: int, link: int, fault: int, arrived: int, expected: int) -> bool:
    """Close a connection on which the peer broke the format. Always False."""
    if peek(link + 8 * tcp.STATE) == tcp.UP:
        _shutdown(peek(link + 8 * tcp.FD), _SHUT_RDWR)
    store64(link + 8 * tcp.STATE, tcp.OVER)
    tcp.queue_event(context, FAULT, arrived, peek(link + 8 * tcp.PEER), fault | expected << FAULT_BITS)
    return False


# --- receiving --------------------------------------------------------------------------------------------------------


@compiled
def _check_header(context: int, link: int) -> bool:
    """Check all fields of the header in the record; False after a fault."""
    header = link + 8 * tcp.HEADER
    first = peek(header)
    target, length = peek(header + FRAME_TARGET), peek(header + FRAME_LENGTH) & _LOW32
    number = peek(link + 8 * tcp.IN_NUMBER)
    limit = peek(context + 8 * tcp.WINDOW_BYTES) - length
    imm = (first >> 32) & _LOW32
    peer = peek(link + 8 * tcp.PEER)
    # rule: frame: it is a write or a count
    if first & _LOW32 != FRAME_MAGIC and (first != ACK_MAGIC or target | length != 0):
        return _fault(context, link, FAULT_BAD_FRAME, first & _LOW32, FRAME_MAGIC)
    # rule: frame: its number is the next one
    if peek(header + FRAME_NUMBER) != number:
        return _fault(context, link, FAULT_NUMBER, peek(header + FRAME_NUMBER), number)
    # rule: frame: its length is bounded
    if length > MAX_WRITE_BYTES:
        return _fault(context, link, FAULT_TOO_LONG, length, MAX_WRITE_BYTES)
    # rule: frame: it lies in the window
    if target < 0 or target > limit:
        return _fault(context, link, FAULT_OUTSIDE_WINDOW, target, limit)
    # rule: frame: its source is the peer of the connection
    if first != ACK_MAGIC and imm >> _SOURCE_SHIFT != peer:
        return _fault(context, link, FAULT_WRONG_SOURCE, imm, peer)
    return True


@compiled
def _begin_payload(context: int, link: int) -> bool:
    """A header is complete: say where its payload goes; False when the connection is over."""
    header = link + 8 * tcp.HEADER
    length = peek(header + FRAME_LENGTH) & _LOW32
    held = peek(link + 8 * tcp.HELD)
    # rule: nothing of a header is believed before its MAC is checked
    if held != 0 and not is_header_genuine(context, link, header):
        break_off(context, link, _EBADMSG)
        return False
    if not _check_header(context, link):
        return False
    # rule: frame: with a MAC it fits where it is held back
    if held != 0 and length > MAX_SEALED_BYTES:
        return _fault(context, link, FAULT_TOO_LONG, length, MAX_SEALED_BYTES)
    target = peek(context + 8 * tcp.WINDOW) + peek(header + FRAME_TARGET)
    poke(link + 8 * tcp.IN_PLACE, held if held != 0 else target)
    poke(link + 8 * tcp.IN_LEFT, length)
    return True


@compiled
def _complete(context: int, link: int, count: int) -> None:
    """The peer has ``count`` frames whole: what was sent with the new ones is complete."""
    queue, rank = peek(link + 8 * tcp.QUEUE), peek(link + 8 * tcp.PEER)
    for number in range(peek(link + 8 * tcp.ACKED), count):
        frame = queue + (number % tcp.QUEUE_SLOTS) * tcp.FRAME_SLOT_BYTES
        tcp.queue_event(context, SENT, peek(frame + tcp.FRAME_WR_ID), rank, 0)
    poke(link + 8 * tcp.ACKED, count)


@compiled
def _note_count(context: int, link: int, told: int) -> bool:
    """The peer says, modulo 2**32, how many frames it has whole; False after a fault."""
    acked, sent = peek(link + 8 * tcp.ACKED), peek(link + 8 * tcp.SENT_FRAMES)
    count = acked + (told - acked & _LOW32)
    # rule: a peer has no more frames than were sent
    if count > sent:
        return _fault(context, link, FAULT_COUNT, told, sent & _LOW32)
    _complete(context, link, count)
    return True


@compiled
def _arrived(context: int, link: int) -> bool:
    """The current frame is whole; False when the connection is over."""
    header = link + 8 * tcp.HEADER
    held = peek(link + 8 * tcp.HELD)
    length = peek(header + FRAME_LENGTH) & _LOW32
    if held != 0:
        # rule: no byte of a payload reaches the window before its MAC is checked
        if not is_payload_genuine(context, link, header, held, length):
            break_off(context, link, _EBADMSG)
            return False
        copy(peek(context + 8 * tcp.WINDOW) + peek(header + FRAME_TARGET), held, length)
    if not _note_count(context, link, (peek(header + FRAME_LENGTH) >> 32) & _LOW32):
        return False
    poke(link + 8 * tcp.IN_HEADER, 0)
    first = peek(header)
    if first == ACK_MAGIC:
        return True
    tcp.queue_event(context, ARRIVED, (first >> 32) & _LOW32, peek(link + 8 * tcp.PEER), length)
    number, untold = peek(link + 8 * tcp.IN_NUMBER) + 1, peek(link + 8 * tcp.UNTOLD_BYTES) + length
    poke(link + 8 * tcp.IN_NUMBER, number)
    poke(link + 8 * tcp.UNTOLD_BYTES, untold)
    if number - peek(link + 8 * tcp.TOLD) >= tcp.ACK_FRAMES or untold >= tcp.ACK_BYTES:
        tcp.set_flags(link, tcp.ACK_DUE)
    elif peek(context + 8 * tcp.OWING) == 0:
        poke(context + 8 * tcp.OWING, monotonic_ns())
    return True


@compiled
def _parse(context: int, link: int, source: int, nbytes: int) -> None:
    """Take ``nbytes`` staged bytes: headers to the record, payload to its place."""
    header_bytes = peek(context + 8 * tcp.HEADER_BYTES)
    while nbytes > 0:
        have = peek(link + 8 * tcp.IN_HEADER)
        if have < header_bytes:
            part = min(header_bytes - have, nbytes)
            copy(link + 8 * tcp.HEADER + have, source, part)
            poke(link + 8 * tcp.IN_HEADER, have + part)
            source += part
            nbytes -= part
            if have + part < header_bytes:
                return
            if not _begin_payload(context, link):
                return
        left = peek(link + 8 * tcp.IN_LEFT)
        part = min(left, nbytes)
        if part > 0:
            place = peek(link + 8 * tcp.IN_PLACE)
            copy(place, source, part)
            poke(link + 8 * tcp.IN_PLACE, place + part)
            source += part
            nbytes -= part
            left -= part
            poke(link + 8 * tcp.IN_LEFT, left)
        if left == 0 and not _arrived(context, link):
            return


@compiled
def receive(context: int, link: int) -> None:
    """One receive: the rest of the current payload goes straight to its place, what follows to the staging buffer."""
    vectors, message = peek(context + 8 * tcp.VECTORS), peek(context + 8 * tcp.MESSAGE)
    staging = peek(context + 8 * tcp.STAGING)
    direct = 0
    count = 0
    if peek(link + 8 * tcp.IN_HEADER) == peek(context + 8 * tcp.HEADER_BYTES):
        direct = peek(link + 8 * tcp.IN_LEFT)
        poke(vectors, peek(link + 8 * tcp.IN_PLACE))
        poke(vectors + 8, direct)
        count = 1
    poke(vectors + 16 * count, staging)
    poke(vectors + 16 * count + 8, tcp.STAGING_BYTES)
    poke(message + 8 * tcp.MESSAGE_COUNT, count + 1)
    got = _recvmsg(peek(link + 8 * tcp.FD), message, _RECEIVE_FLAGS)
    if got < 0:
        code = peek32(_errno_location())
        if code == _EAGAIN:
            tcp.clear_flags(link, tcp.READABLE)
            if peek(link + 8 * tcp.FLAGS) & tcp.SEND_OVER != 0:
                break_off(context, link, peek(link + 8 * tcp.REASON))
        elif code != _EINTR and code != _ENOMEM and code != _ENOBUFS:
            break_off(context, link, code)
        return
    if got == 0:
        break_off(context, link, _ECONNRESET)
        return
    if got < direct + tcp.STAGING_BYTES and peek(link + 8 * tcp.FLAGS) & tcp.FINISHING == 0:
        # A short read means empty, and later bytes make a new edge.
        tcp.clear_flags(link, tcp.READABLE)
    if direct > 0:
        part = min(got, direct)
        poke(link + 8 * tcp.IN_PLACE, peek(link + 8 * tcp.IN_PLACE) + part)
        poke(link + 8 * tcp.IN_LEFT, direct - part)
        if part == direct and not _arrived(context, link):
            return
        got -= part
    if got > 0:
        _parse(context, link, staging, got)


# --- sending ----------------------------------------------------------------------------------------------------------


@compiled
def _seal(context: int, link: int, frame: int, local: int, nbytes: int) -> None:
    """Make the header at ``frame`` final: it says what has arrived, and MACs cover it and the payload."""
    # rule: only whole frames are counted
    number = peek(link + 8 * tcp.IN_NUMBER)
    poke(frame + FRAME_LENGTH, nbytes | (number & _LOW32) << 32)
    poke(link + 8 * tcp.TOLD, number)
    poke(link + 8 * tcp.UNTOLD_BYTES, 0)
    tcp.clear_flags(link, tcp.ACK_DUE)
    if peek(link + 8 * tcp.HELD) != 0:
        seal(context, link, frame, local, nbytes)


@compiled
def _seal_count(context: int, link: int) -> None:
    """Make the frame that only says what has arrived."""
    frame = peek(link + 8 * tcp.QUEUE) + tcp.QUEUE_SLOTS * tcp.FRAME_SLOT_BYTES
    poke(frame, ACK_MAGIC)
    poke(frame + FRAME_TARGET, 0)
    poke(frame + FRAME_NUMBER, peek(link + 8 * tcp.SENT_FRAMES))
    _seal(context, link, frame, 0, 0)
    poke(link + 8 * tcp.ACK_LEFT, peek(context + 8 * tcp.HEADER_BYTES))


@compiled
def _gather(context: int, link: int, first: int, last: int) -> int:
    """Enter what is unsent of frames ``first`` to ``last`` - 1, after what is unsent of a count; returns its bytes."""
    vectors = peek(context + 8 * tcp.VECTORS)
    queue = peek(link + 8 * tcp.QUEUE)
    header_bytes = peek(context + 8 * tcp.HEADER_BYTES)
    skip = peek(link + 8 * tcp.SENT_BYTES)
    asked = peek(link + 8 * tcp.ACK_LEFT)
    count = 0
    if asked > 0:
        poke(vectors, queue + tcp.QUEUE_SLOTS * tcp.FRAME_SLOT_BYTES + header_bytes - asked)
        poke(vectors + 8, asked)
        count = 1
    for number in range(first, last):
        frame = queue + (number % tcp.QUEUE_SLOTS) * tcp.FRAME_SLOT_BYTES
        local, nbytes = peek(frame + tcp.FRAME_LOCAL), peek(frame + tcp.FRAME_NBYTES)
        if number == peek(link + 8 * tcp.SEALED):
            _seal(context, link, frame, local, nbytes)
            poke(link + 8 * tcp.SEALED, number + 1)
        if skip < header_bytes:
            poke(vectors + 16 * count, frame + skip)
            poke(vectors + 16 * count + 8, header_bytes - skip)
            asked += header_bytes - skip
            count += 1
            skip = 0
        else:
            skip -= header_bytes
        left = nbytes - skip
        if left > 0:
            poke(vectors + 16 * count, local + skip)
            poke(vectors + 16 * count + 8, left)
            asked += left
            count += 1
        skip = 0
    poke(peek(context + 8 * tcp.MESSAGE) + 8 * tcp.MESSAGE_COUNT, count)
    return asked


@compiled
def send(context: int, link: int) -> None:
    """One gathered write of up to GATHER_FRAMES frames, or of what has arrived where nothing else says it."""
    sent, posted = peek(link + 8 * tcp.SENT_FRAMES), peek(link + 8 * tcp.POSTED)
    if sent == posted and peek(link + 8 * tcp.ACK_LEFT) == 0:
        _seal_count(context, link)
    last = min(posted, sent + tcp.GATHER_FRAMES)
    asked = _gather(context, link, sent, last)
    taken = _sendmsg(peek(link + 8 * tcp.FD), peek(context + 8 * tcp.MESSAGE), _SEND_FLAGS)
    if taken < 0:
        code = peek32(_errno_location())
        if code == _EAGAIN:
            tcp.clear_flags(link, tcp.WRITABLE)
        elif code != _EINTR and code != _ENOMEM and code != _ENOBUFS:
            # What the peer sent before it broke is still to be read: only sending is over.
            poke(link + 8 * tcp.REASON, code)
            tcp.set_flags(link, tcp.SEND_OVER | tcp.READABLE | tcp.FINISHING)
        return
    if taken < asked:
        # The socket buffer is full; room in it makes a new edge.
        tcp.clear_flags(link, tcp.WRITABLE)
    part = min(taken, peek(link + 8 * tcp.ACK_LEFT))
    poke(link + 8 * tcp.ACK_LEFT, peek(link + 8 * tcp.ACK_LEFT) - part)
    taken += peek(link + 8 * tcp.SENT_BYTES) - part
    queue = peek(link + 8 * tcp.QUEUE)
    header_bytes = peek(context + 8 * tcp.HEADER_BYTES)
    while sent < last:
        whole = header_bytes + peek(queue + (sent % tcp.QUEUE_SLOTS) * tcp.FRAME_SLOT_BYTES + tcp.FRAME_NBYTES)
        if taken < whole:
            break
        taken -= whole
        sent += 1
    # rule: a frame over tcp is complete when the peer has it whole
    poke(link + 8 * tcp.SENT_FRAMES, sent)
    poke(link + 8 * tcp.SENT_BYTES, taken)
