"""What a stream of bytes means on a tcp connection, in Python, by the decoder of the formats."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence

from uccl_ep_serving.protocol import imm as immediates
from uccl_ep_serving.protocol.frame import FRAME_BYTES, SEAL_BYTES, decode_frame
from uccl_ep_serving.proxy.transport.base import ARRIVED, DOWN, FAULT, SENT
from uccl_ep_serving.proxy.transport.tcp_auth import MAX_SEALED_BYTES

__all__ = ["check"]


class _Ends(Exception):
    """The connection ends: with a FAULT, or the errno of a break and the bytes that were missing."""


class _Reader:
    """Of one connection: what it says of the bytes is what a correct receiver does."""

    def __init__(self, window: bytearray, auth: bool, peer: int, number: int, counts: tuple[int, int]) -> None:
        self.window, self.auth, self.peer, self.number = window, auth, peer, number
        self.acked, self.sent = counts

    def read(self, wire: bytes, sealed: bytes) -> Iterator[tuple[int, int]]:
        """(SENT, 0) and (ARRIVED, immediate). Raises _Ends."""
        at = 0
        header_bytes = FRAME_BYTES + (SEAL_BYTES if self.auth else 0)
        while at < len(wire):
            header = wire[at : at + header_bytes]
            if len(header) < header_bytes:
                raise _Ends(errno.ECONNRESET, header_bytes - len(header))
            at += header_bytes
            if self.auth and sealed[:at] != wire[:at]:
                raise _Ends(errno.EBADMSG, 0)
            frame = self._frame(header[:FRAME_BYTES])
            payload = wire[at : at + frame.length]
            at += len(payload)
            is_whole = len(payload) == frame.length
            if not self.auth:
                self.window[frame.target : frame.target + len(payload)] = payload
            if not is_whole:
                raise _Ends(errno.ECONNRESET, frame.length - len(payload))
            if self.auth and payload and sealed[:at] != wire[:at]:
                raise _Ends(errno.EBADMSG, 0)
            self.window[frame.target : frame.target + len(payload)] = payload
            count = self.acked + (frame.arrived - self.acked) % (1 << 32)
            if count > self.sent:
                raise _Ends(FAULT)
            yield from [(SENT, 0)] * (count - self.acked)
            self.acked = count
            if not frame.is_ack:
                self.number += 1
                yield ARRIVED, frame.imm

    def _frame(self, header: bytes):  # type: ignore[no-untyped-def]
        try:
            frame = decode_frame(header, window_bytes=len(self.window))
        except ValueError:
            raise _Ends(FAULT) from None
        if frame.number != self.number or (self.auth and frame.length > MAX_SEALED_BYTES):
            raise _Ends(FAULT)
        if not frame.is_ack and immediates.decode(frame.imm).source != self.peer:
            raise _Ends(FAULT)
        return frame


def check(
    *,
    wire: bytes,
    sealed: bytes,
    auth: bool,
    peer: int,
    number: int,
    counts: tuple[int, int],
    ends: tuple[bool, bool],
    windows: tuple[bytes, Sequence[int]],
    events: Sequence[Sequence[int]],
) -> str:
    """What the data path did wrong, in words; "" where it did right.

    Args:
        sealed: what the peer has sealed, as far as its key is the right one.
        counts: frames of the other direction that are acknowledged, and that were sent.
        ends: the peer closes after the last byte; a break waits to be mended.
        windows: before and after.
        events: rows of kind, value, peer, status.
    """
    window = bytearray(windows[0])
    reader = _Reader(window, auth, peer, number, counts)
    wanted: list[tuple[int, int]] = []
    end: tuple[int, ...] = (errno.ECONNRESET, 0)
    try:
        wanted.extend(reader.read(wire, sealed))
    except _Ends as why:
        end = why.args
    closes, mended = ends
    if end == (FAULT,):
        wanted.append((FAULT, -1))
    elif not mended and (closes or end[0] == errno.EBADMSG):
        wanted.append((DOWN, end[1]))
    found = [(kind, {SENT: 0, FAULT: -1}.get(kind, value)) for kind, value, _, _ in events]
    if found != wanted:
        return f"the events are {found[-5:]} and must be {wanted[-5:]}"
    if any(row[2] != peer for row in events):
        return f"an event is of another peer than {peer}"
    if bytes(windows[1]) != bytes(window):
        return "the window does not hold what it must"
    return ""
