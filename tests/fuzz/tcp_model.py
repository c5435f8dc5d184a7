"""What must become of a stream of bytes on a tcp connection: written anew, over the whole stream at once; compiled.

It knows nothing of chunks, records or libcrypto: bytes are genuine when they are those that were sealed. The oracle in
:mod:`.tcp_oracle` says the same in Python, of some of the cases.
"""

from __future__ import annotations

import errno

from tests.fuzz import tcp_words as fuzz
from tests.fuzz.tcp_words import get, put
from uccl_ep_serving.native.atomics import copy, peek, peek8, peek32
from uccl_ep_serving.native.jit import compiled
from uccl_ep_serving.protocol.command import MAX_WRITE_BYTES
from uccl_ep_serving.protocol.frame import ACK_MAGIC, FRAME_BYTES, FRAME_LENGTH, FRAME_MAGIC, FRAME_NUMBER, FRAME_TARGET
from uccl_ep_serving.proxy.transport import tcp_words as tcp
from uccl_ep_serving.proxy.transport.base import (
    ARRIVED,
    DOWN,
    EVENT_BYTES,
    FAULT,
    FAULT_BAD_FRAME,
    FAULT_BITS,
    FAULT_COUNT,
    FAULT_NUMBER,
    FAULT_OUTSIDE_WINDOW,
    FAULT_TOO_LONG,
    FAULT_WRONG_SOURCE,
    SENT,
    put_event,
)
from uccl_ep_serving.proxy.transport.tcp_auth import MAX_SEALED_BYTES

__all__ = ["expect", "ticket"]

_EBADMSG, _ECONNRESET = errno.EBADMSG, errno.ECONNRESET
_SOURCE_SHIFT = 20
_LOW32 = (1 << 32) - 1
assert EVENT_BYTES == 32


@compiled
def ticket(number: int) -> int:
    """wr_id of frame ``number`` of the other direction."""
    return number * 3 + 1


@compiled
def _expect_event(work: int, kind: int, value: int, status: int) -> None:
    count = get(work, fuzz.EXPECTED_COUNT)
    put_event(get(work, fuzz.EXPECTED), count, kind, value, get(work, fuzz.PEER), status)
    put(work, fuzz.EXPECTED_COUNT, count + 1)


@compiled
def _refused(work: int, fault: int, arrived: int, expected: int) -> None:
    """The connection ends with a FAULT and nothing else; its peer is not told to be down."""
    _expect_event(work, FAULT, arrived, fault | expected << FAULT_BITS)
    put(work, fuzz.END_STATE, tcp.OVER)
    put(work, fuzz.REFUSED, 1)


@compiled
def _broken(work: int, code: int, missing: int) -> None:
    """The connection breaks: it waits to be mended, or its peer is down."""
    put(work, fuzz.REFUSED, 1 if code == _EBADMSG or missing > 0 else 0)
    if get(work, fuzz.MENDED) != 0:
        put(work, fuzz.END_STATE, tcp.BROKEN)
        return
    put(work, fuzz.END_STATE, tcp.OVER)
    put(work, fuzz.END_STANDING, tcp.CLOSED)
    _expect_event(work, DOWN, missing, code)


@compiled
def _common(work: int) -> int:
    """Bytes that arrive as they were sealed, from the first on."""
    stream, wire = get(work, fuzz.STREAM), get(work, fuzz.WIRE)
    nbytes = min(get(work, fuzz.GENUINE), get(work, fuzz.STREAM_BYTES), get(work, fuzz.WIRE_BYTES))
    at = 0
    while at + 8 <= nbytes and peek(stream + at) == peek(wire + at):
        at += 8
    while at < nbytes and peek8(stream + at) == peek8(wire + at):
        at += 1
    return at


@compiled
def _objection(work: int, header: int) -> bool:
    """Whether a header is refused; the FAULT is expected then."""
    magic, imm = peek32(header), peek32(header + 4)
    target, length, number = peek(header + FRAME_TARGET), peek32(header + FRAME_LENGTH), peek(header + FRAME_NUMBER)
    room = get(work, fuzz.WINDOW_BYTES) - length
    is_count = magic == ACK_MAGIC and imm == 0 and target == 0 and length == 0
    if magic != FRAME_MAGIC and not is_count:
        _refused(work, FAULT_BAD_FRAME, magic, FRAME_MAGIC)
    elif number != get(work, fuzz.END_NUMBER):
        _refused(work, FAULT_NUMBER, number, get(work, fuzz.END_NUMBER))
    elif length > MAX_WRITE_BYTES:
        _refused(work, FAULT_TOO_LONG, length, MAX_WRITE_BYTES)
    elif target < 0 or target > room:
        _refused(work, FAULT_OUTSIDE_WINDOW, target, room)
    elif magic == FRAME_MAGIC and imm >> _SOURCE_SHIFT != get(work, fuzz.PEER):
        _refused(work, FAULT_WRONG_SOURCE, imm, get(work, fuzz.PEER))
    elif get(work, fuzz.AUTH) != 0 and length > MAX_SEALED_BYTES:
        _refused(work, FAULT_TOO_LONG, length, MAX_SEALED_BYTES)
    else:
        return False
    return True


@compiled
def _whole(work: int, header: int) -> bool:
    """The frame has arrived whole; False where what it says of the other direction cannot be."""
    told, acked = peek32(header + FRAME_LENGTH + 4), get(work, fuzz.END_ACKED)
    ahead = (told - acked) & _LOW32
    if ahead > get(work, fuzz.SENT) - acked:
        _refused(work, FAULT_COUNT, told, get(work, fuzz.SENT) & _LOW32)
        return False
    for number in range(acked, acked + ahead):
        _expect_event(work, SENT, ticket(number), 0)
    put(work, fuzz.END_ACKED, acked + ahead)
    if peek32(header) == FRAME_MAGIC:
        _expect_event(work, ARRIVED, peek32(header + 4), peek32(header + FRAME_LENGTH))
        put(work, fuzz.END_NUMBER, get(work, fuzz.END_NUMBER) + 1)
    return True


@compiled
def expect(work: int) -> None:
    """Fill in EXPECTED and the END words, and make SHADOW what the window must hold then."""
    wire, nbytes, header = get(work, fuzz.WIRE), get(work, fuzz.WIRE_BYTES), get(work, fuzz.SCRATCH)
    shadow = get(work, fuzz.SHADOW) + get(work, fuzz.CANARY)
    auth = get(work, fuzz.AUTH)
    header_bytes = fuzz.HEADER_ROOM if auth != 0 else FRAME_BYTES
    put(work, fuzz.EXPECTED_COUNT, 0)
    put(work, fuzz.END_STATE, tcp.UP)
    put(work, fuzz.END_STANDING, tcp.PRESENT)
    put(work, fuzz.END_NUMBER, get(work, fuzz.NUMBER))
    put(work, fuzz.END_ACKED, get(work, fuzz.ACKED))
    put(work, fuzz.JUDGED, 0)
    put(work, fuzz.REFUSED, 0)
    genuine = _common(work) if auth != 0 else nbytes
    at, missing = 0, 0
    while at < nbytes:
        if nbytes - at < header_bytes:
            missing = header_bytes - (nbytes - at)
            break
        put(work, fuzz.JUDGED, get(work, fuzz.JUDGED) + 1)
        if at + header_bytes > genuine:
            _broken(work, _EBADMSG, 0)
            return
        copy(header, wire + at, header_bytes)
        if _objection(work, header):
            return
        at += header_bytes
        length = peek32(header + FRAME_LENGTH)
        place, have = shadow + peek(header + FRAME_TARGET), min(length, nbytes - at)
        if auth == 0:
            copy(place, wire + at, have)
        if have < length:
            missing = length - have
            break
        if auth != 0:
            if length > 0 and at + length > genuine:
                _broken(work, _EBADMSG, 0)
                return
            copy(place, wire + at, length)
        at += length
        if not _whole(work, header):
            return
    if get(work, fuzz.CLOSES) != 0:
        _broken(work, _ECONNRESET, missing)
