"""Frames of the control connections: a fixed header, a bounded payload, and descriptors that come along."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..errors import TransportError
from .links import MAGIC, Link
from .seal import HEADER_BYTES, MAC_BYTES

__all__ = [
    "COUNT",
    "DOING",
    "GATHER",
    "GOODBYE",
    "MOST_PAYLOAD",
    "NOTE",
    "Ended",
    "Frame",
    "close_all",
    "count_frame",
    "read_frames",
    "send_frame",
    "send_now",
]

#: magic, kind, number of descriptors that come with it, sequence of the gather or the question, payload bytes
_HEADER = struct.Struct("<IHHQI")
assert _HEADER.size == HEADER_BYTES
#: Kinds: a part of a step; the sender leaves in good order; what the sender says of who goes on (``reports.Note``); the
#: sender waits for you in the operation that the payload names; how many frames of yours have arrived (over TCP).
GATHER, GOODBYE, NOTE, DOING, COUNT = 1, 2, 3, 4, 5
_KINDS = frozenset((GATHER, GOODBYE, NOTE, DOING, COUNT))
MOST_PAYLOAD = 1 << 20
_MOST_DESCRIPTORS = 8
#: A peer that runs takes a small frame within this time.
_MOST_WAIT_SECONDS = 0.05
#: Descriptors wait so long until there is room for them: ranks of a host share windows at the same time.
_ROOM_SECONDS = 10.0


class Ended(ConnectionError):
    """The peer, or the system for it, has closed the connection; nothing that it sent before is missing."""


class Frame(NamedTuple):
    """A received frame; its descriptors belong to whoever takes it."""

    kind: int
    sequence: int
    payload: bytes
    descriptors: list[int]


def close_all(descriptors: list[int]) -> None:
    """Close and forget."""
    while descriptors:
        os.close(descriptors.pop())


def _receive_some(connection: socket.socket) -> tuple[bytes, list[int]]:
    """What is there, with the descriptors that came along.

    Raises BlockingIOError when there is nothing, another OSError when this process may not open so many files.

    ``socket.recv_fds`` of Python 3.11 ignores its flags and would block.
    """
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    data, ancillary, told, _ = connection.recvmsg(65536, socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4), flags)
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) // 4 * 4])
    if told & socket.MSG_CTRUNC:
        close_all(list(descriptors))
        raise OSError(errno.EMFILE, "descriptors were lost on the way: raise the limit on open files (ulimit -n)")
    return data, list(descriptors)


def read_frames(link: Link) -> Iterator[Frame]:
    """The frames that have arrived whole, without waiting for more.

    Raises:
        Ended: the connection was closed. OSError: it is over, or somebody altered what came. ValueError: what the peer
            sent is no frame.
    """
    while True:
        try:
            data, descriptors = _receive_some(link.socket)
        except BlockingIOError:
            return
        link.descriptors += descriptors
        if not data:
            raise Ended("closed")
        link.buffer += data
        behind = MAC_BYTES if link.seal is not None else 0
        while len(link.buffer) >= _HEADER.size + (0 if link.has_header else behind):
            if not link.has_header:
                _check_mac(link, 0, _HEADER.size)
                link.has_header = True
            magic, kind, due, sequence, length = _HEADER.unpack_from(link.buffer)
            # rule: control: a frame is one of ours
            if magic != MAGIC or length > MOST_PAYLOAD or kind not in _KINDS:
                raise ValueError(f"rank {link.peer} sent a malformed control frame")
            whole = _HEADER.size + length
            if len(link.buffer) < whole + (behind if length else 0):
                break
            if length:
                _check_mac(link, _HEADER.size, whole)
            link.has_header = False
            # rule: control: a frame has the descriptors that it names
            if due > len(link.descriptors):
                raise ValueError(f"rank {link.peer} sent a control frame without {due} descriptors that it names")
            payload = bytes(link.buffer[_HEADER.size : whole])
            del link.buffer[:whole]
            taken, link.descriptors = link.descriptors[:due], link.descriptors[due:]
            if link.outbox is not None:
                if kind == COUNT:
                    link.outbox.forget(sequence)
                    continue
                link.outbox.taken += 1
            yield Frame(kind, sequence, payload, taken)
        # those of the next frame may be here before the rest of it
        # rule: control: no descriptors are kept that no frame names
        if len(link.descriptors) > (_MOST_DESCRIPTORS if link.buffer else 0):
            raise ValueError(f"rank {link.peer} sent {len(link.descriptors)} descriptors that no control frame names")


def _check_mac(link: Link, start: int, end: int) -> None:
    """Take the MAC of bytes [start, end) out of the buffer. Raises ConnectionError when it is wrong."""
    if link.seal is None:
        return
    part, mac = bytes(link.buffer[start:end]), bytes(link.buffer[end : end + MAC_BYTES])
    # rule: control: nothing of a frame over TCP counts before its MAC is checked
    if not link.seal.is_genuine(part, mac):
        raise ConnectionError("a control frame was altered on the way: its MAC is wrong")
    del link.buffer[end : end + MAC_BYTES]


def count_frame(taken: int) -> bytes:
    """The frame that says how many frames have arrived."""
    return _HEADER.pack(MAGIC, COUNT, 0, taken, 0)


def send_frame(link: Link, kind: int, sequence: int = 0, body: bytes = b"", descriptors: Sequence[int] = ()) -> None:
    """Write one frame. A peer that is gone is no error here: whoever waits for its answer names it.

    Raises:
        TransportError: other ranks of the host have not taken in time what was handed to them.
    """
    frame = _HEADER.pack(MAGIC, kind, len(descriptors), sequence, len(body)) + body
    if link.outbox is not None:
        link.outbox.post(frame)
        return
    end = time.monotonic() + _ROOM_SECONDS
    while not _write(link, frame, descriptors):
        # outside the lock: the thread that reads does not wait for it
        if time.monotonic() > end:
            raise TransportError(
                f"no descriptors can be handed to rank {link.peer}: {os.strerror(errno.ETOOMANYREFS)}. Next step: "
                "raise the limit on open files (ulimit -n), which counts those that are under way as well",
                device="control",
                errno=errno.ETOOMANYREFS,
            )
        time.sleep(0.001)


def _write(link: Link, frame: bytes, descriptors: Sequence[int]) -> bool:
    """Write a frame; False, and nothing is out, where no more descriptors may be under way. Of one user the system lets
    as many be, between all processes of the host, as one process may have open, until others have taken theirs."""
    with link.sending:
        if link.writing:
            return True  # from a handler, which has interrupted another frame
        link.writing = True
        try:
            sent = socket.send_fds(link.socket, [frame], list(descriptors)) if descriptors else 0
            link.socket.sendall(frame[sent:])
        except BaseException as error:
            if isinstance(error, OSError) and error.errno == errno.ETOOMANYREFS:
                return False
            # Part of the frame may be out, and nothing may follow it. What the peer sent is still read.
            with contextlib.suppress(OSError):
                link.socket.shutdown(socket.SHUT_WR)
            if not isinstance(error, OSError):
                raise
        finally:
            link.writing = False
    return True


def send_now(link: Link, kind: int, body: bytes) -> bool:
    """Write one frame without waiting for the peer; False when the connection takes none, or is over.

    One that is about to be mended takes it.
    """
    if link.outbox is not None:
        return link.outbox.post(_HEADER.pack(MAGIC, kind, 0, 0, len(body)) + body)
    if not link.sending.acquire(timeout=_MOST_WAIT_SECONDS):
        return False
    if link.writing:
        link.sending.release()
        return False  # as above
    link.writing = True
    try:
        frame = memoryview(_HEADER.pack(MAGIC, kind, 0, 0, len(body)) + body)
        end = time.monotonic() + _MOST_WAIT_SECONDS
        while frame:
            try:
                frame = frame[link.socket.send(frame, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.001)
        return True
    except OSError:
        # part of the frame may be out, and nothing may follow it
        with contextlib.suppress(OSError):
            link.socket.shutdown(socket.SHUT_WR)
        return False
    finally:
        link.writing = False
        link.sending.release()
