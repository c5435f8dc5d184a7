"""Valid streams of frames, and what is done to them, as functions of a case's number; compiled.

A *field* is changed by a peer that knows the keys: where frames carry MACs they fit. Everything else happens on the
wire, to bytes that are sealed already.
"""

from __future__ import annotations

from tests.fuzz import tcp_words as fuzz
from tests.fuzz.draw import below, draw, one_in, seed
from tests.fuzz.tcp_words import get, put
from uccl_ep_serving.native.atomics import copy, peek, peek8, peek32, poke, poke8, poke32
from uccl_ep_serving.native.jit import compiled
from uccl_ep_serving.protocol.command import MAX_WRITE_BYTES
from uccl_ep_serving.protocol.frame import ACK_MAGIC, FRAME_LENGTH, FRAME_MAGIC, FRAME_NUMBER, FRAME_TARGET
from uccl_ep_serving.proxy.transport import tcp_words as tcp
from uccl_ep_serving.proxy.transport.tcp_auth import MAX_SEALED_BYTES, seal

__all__ = ["KINDS", "make_case"]

#: What is done to a stream.
KINDS = (
    "nothing",
    "a field",
    "a bit",
    "bytes",
    "cut short",
    "left out",
    "repeated",
    "reordered",
    "spliced",
    "random bytes",
    "another key",
)
(
    _NOTHING,
    _FIELD,
    _BIT,
    _BYTES,
    _CUT,
    _LEFT_OUT,
    _REPEATED,
    _REORDERED,
    _SPLICED,
    _RANDOM,
    _OTHER_KEY,
) = range(len(KINDS))
_PLAIN_KINDS = len(KINDS) - 1

_SOURCE_SHIFT = 20
_LOW20, _LOW32 = (1 << 20) - 1, (1 << 32) - 1
_MOST_INT = (1 << 63) - 1


@compiled
def _some_length(rng: int, window_bytes: int) -> int:
    """Mostly short, now and then as long as it can be."""
    what = below(rng, 128)
    if what < 16:
        return 0
    if what < 112:
        return below(rng, 65)
    if what < 127:
        return below(rng, 1025)
    return min(below(rng, window_bytes + 1), MAX_SEALED_BYTES)


@compiled
def _change_field(rng: int, header: int, window_bytes: int, sent: int) -> None:
    """Change one field to a value at a bound, beside it, or to any."""
    what = below(rng, 6)
    target, length = peek(header + FRAME_TARGET), peek32(header + FRAME_LENGTH)
    shift = below(rng, 3) - 1
    if what == 0:
        bounds = below(rng, 6)
        value = window_bytes - length + shift
        if bounds == 1:
            value = window_bytes + shift
        elif bounds == 2:
            value = -length + shift
        elif bounds == 3:
            value = _MOST_INT - below(rng, 2) * length
        elif bounds == 4:
            value = draw(rng)
        elif bounds == 5:
            value = target | 1 << below(rng, 64)
        poke(header + FRAME_TARGET, value)
    elif what == 1:
        bounds = below(rng, 6)
        value = window_bytes - target + shift
        if bounds == 1:
            value = MAX_WRITE_BYTES + shift
        elif bounds == 2:
            value = _LOW32 + shift
        elif bounds == 3:
            value = draw(rng)
        elif bounds == 4:
            value = length + shift
        elif bounds == 5:
            value = MAX_SEALED_BYTES + shift
            # where it ends within the window, if it can
            poke(header + FRAME_TARGET, max(0, min(target, window_bytes - value)))
        poke32(header + FRAME_LENGTH, value & _LOW32)
    elif what == 2:
        source = below(rng, 6)
        poke32(header + 4, ((draw(rng) if source == 5 else source) << _SOURCE_SHIFT | below(rng, 4)) & _LOW32)
    elif what == 3:
        value = peek(header + FRAME_NUMBER) + shift
        if one_in(rng, 3):
            value = draw(rng) if one_in(rng, 2) else value + (1 << 32)
        poke(header + FRAME_NUMBER, value)
    elif what == 4:
        value = sent + 1 + below(rng, 2)
        if one_in(rng, 2):
            value = peek32(header + FRAME_LENGTH + 4) - 1 if one_in(rng, 2) else draw(rng)
        poke32(header + FRAME_LENGTH + 4, value & _LOW32)
    else:
        bounds = below(rng, 4)
        value = ACK_MAGIC
        if bounds == 1:
            value = FRAME_MAGIC + (1 << 24)
        elif bounds == 2:
            value = FRAME_MAGIC ^ 1 << below(rng, 32)
        elif bounds == 3:
            # a count that carries something: none of it may
            poke32(header + 4, below(rng, 2))
            poke(header + FRAME_TARGET, below(rng, 2))
            poke32(header + FRAME_LENGTH, below(rng, 2))
        poke32(header, value & _LOW32)


@compiled
def _make_stream(work: int, kind: int) -> None:
    """The frames of a peer, sealed where frames carry MACs; of one a field may be wrong, or the key."""
    rng, stream, scratch, window_bytes = (
        get(work, fuzz.RNG),
        get(work, fuzz.STREAM),
        get(work, fuzz.SCRATCH),
        get(work, fuzz.WINDOW_BYTES),
    )
    frames = 1 + below(rng, 8)
    if one_in(rng, 64):
        frames = fuzz.MOST_FRAMES
    auth = get(work, fuzz.AUTH)
    header_bytes = fuzz.HEADER_ROOM if auth != 0 else FRAME_NUMBER + 8
    number, told, sent, at = get(work, fuzz.NUMBER), get(work, fuzz.ACKED), get(work, fuzz.SENT), 0
    odd = below(rng, frames) if kind in (_FIELD, _OTHER_KEY) else -1
    sender = get(work, fuzz.SENDER)
    poke(sender + 8 * tcp.SEND_COUNTER, 0)
    poke(get(work, fuzz.STRANGER) + 8 * tcp.SEND_COUNTER, odd)
    put(work, fuzz.GENUINE, _MOST_INT)
    count = 0
    while count < frames and at + header_bytes + window_bytes + 8 <= fuzz.ROOM // 2:
        told += below(rng, min(sent - told, 2) + 1)
        length = _some_length(rng, window_bytes)
        target = below(rng, window_bytes - length + 1)
        imm = get(work, fuzz.PEER) << _SOURCE_SHIFT | below(rng, 1 << 20)
        magic = FRAME_MAGIC
        if one_in(rng, 8):
            magic, imm, target, length = ACK_MAGIC, 0, 0, 0
        poke(scratch, magic | imm << 32)
        poke(scratch + FRAME_TARGET, target)
        poke(scratch + FRAME_LENGTH, length | (told & _LOW32) << 32)
        poke(scratch + FRAME_NUMBER, number)
        if kind == _FIELD and count == odd:
            _change_field(rng, scratch, window_bytes, sent)
        payload = stream + at + header_bytes
        for place in range(0, length, 8):
            poke(payload + place, draw(rng))
        if auth != 0:
            # of a length that was changed, what the stream holds: a peer that lies seals what it sends
            sealed = min(peek32(scratch + FRAME_LENGTH), MAX_SEALED_BYTES)
            if kind == _OTHER_KEY and count == odd:
                put(work, fuzz.GENUINE, at)
                seal(get(work, fuzz.SENDER_CONTEXT), get(work, fuzz.STRANGER), scratch, payload, length)
                poke(sender + 8 * tcp.SEND_COUNTER, count + 1)
            elif sealed != length:
                # the payload that the header promises is not there: its MAC is of less, so that it never fits
                seal(get(work, fuzz.SENDER_CONTEXT), sender, scratch, payload, length)
                put(work, fuzz.GENUINE, at + header_bytes)
            else:
                seal(get(work, fuzz.SENDER_CONTEXT), sender, scratch, payload, length)
        copy(stream + at, scratch, header_bytes)
        poke(get(work, fuzz.STARTS) + 8 * count, at)
        at += header_bytes + length
        number += 1 if magic == FRAME_MAGIC else 0
        count += 1
    put(work, fuzz.FRAMES, count)
    put(work, fuzz.STREAM_BYTES, at)


@compiled
def _frame_start(work: int, frame: int) -> int:
    """Where a frame starts; where the stream ends for the one after the last."""
    if frame >= get(work, fuzz.FRAMES):
        return get(work, fuzz.STREAM_BYTES)
    return peek(get(work, fuzz.STARTS) + 8 * frame)


@compiled
def _change_bytes(work: int, kind: int) -> None:
    """One or several bits or bytes; half of the time in a header."""
    rng, wire, nbytes = get(work, fuzz.RNG), get(work, fuzz.WIRE), get(work, fuzz.WIRE_BYTES)
    at = below(rng, nbytes)
    if one_in(rng, 2):
        at = min(_frame_start(work, below(rng, get(work, fuzz.FRAMES))) + below(rng, 32), nbytes - 1)
    if kind == _BIT:
        poke8(wire + at, peek8(wire + at) ^ 1 << below(rng, 8))
    else:
        for place in range(at, min(at + 1 + below(rng, 8), nbytes)):
            poke8(wire + place, draw(rng) & 0xFF)


@compiled
def _move_bytes(work: int, kind: int) -> None:
    """Frames, or any bytes, left out, repeated, reordered or put in from elsewhere in the stream."""
    rng, wire, stream = get(work, fuzz.RNG), get(work, fuzz.WIRE), get(work, fuzz.STREAM)
    nbytes, frames = get(work, fuzz.STREAM_BYTES), get(work, fuzz.FRAMES)
    first, other = below(rng, frames), below(rng, frames)
    start, end = _frame_start(work, first), _frame_start(work, first + 1)
    if kind != _REORDERED and one_in(rng, 2):
        start = below(rng, nbytes)
        end = start + 1 + below(rng, min(nbytes - start, 64))
    if kind == _LEFT_OUT:
        copy(wire + start, stream + end, nbytes - end)
        put(work, fuzz.WIRE_BYTES, nbytes - (end - start))
    elif kind == _REPEATED:
        copy(wire + end, stream + start, nbytes - start)
        put(work, fuzz.WIRE_BYTES, nbytes + end - start)
    elif kind == _REORDERED:
        low, high = min(first, other), max(first, other)
        low_at, low_end = _frame_start(work, low), _frame_start(work, low + 1)
        high_at, high_end = _frame_start(work, high), _frame_start(work, high + 1)
        if low != high:
            copy(wire + low_at, stream + high_at, high_end - high_at)
            between = low_at + high_end - high_at
            copy(wire + between, stream + low_end, high_at - low_end)
            copy(wire + between + high_at - low_end, stream + low_at, low_end - low_at)
    else:
        source = below(rng, nbytes)
        copy(wire + start, stream + source, min(end - start, nbytes - source))


@compiled
def make_case(work: int, case: int) -> None:
    """Have STREAM, WIRE and the words of the present case be those of ``case``."""
    rng = get(work, fuzz.RNG)
    seed(rng, case)
    kind = below(rng, len(KINDS) if get(work, fuzz.AUTH) != 0 else _PLAIN_KINDS)
    put(work, fuzz.KIND, kind)
    put(work, fuzz.PEER, 1 + below(rng, 2))
    put(work, fuzz.MENDED, below(rng, 2))
    put(work, fuzz.CLOSES, below(rng, 2))
    # counts go round at 2**32 on the wire
    base = (1 << 32) - below(rng, 8) if one_in(rng, 4) else below(rng, 1 << 34)
    put(work, fuzz.NUMBER, below(rng, 1 << 40) if one_in(rng, 4) else below(rng, 4))
    put(work, fuzz.ACKED, base)
    put(work, fuzz.SENT, base + below(rng, 8))
    _make_stream(work, kind)
    nbytes = get(work, fuzz.STREAM_BYTES)
    put(work, fuzz.WIRE_BYTES, nbytes)
    copy(get(work, fuzz.WIRE), get(work, fuzz.STREAM), nbytes)
    if kind in (_BIT, _BYTES):
        _change_bytes(work, kind)
    elif kind == _CUT:
        put(work, fuzz.WIRE_BYTES, below(rng, nbytes))
    elif kind == _RANDOM:
        # from a place on: where it is a frame's start, nothing before it is out of order
        start = _frame_start(work, below(rng, get(work, fuzz.FRAMES)))
        for place in range(start, nbytes):
            poke8(get(work, fuzz.WIRE) + place, draw(rng) & 0xFF)
    elif kind in (_LEFT_OUT, _REPEATED, _REORDERED, _SPLICED):
        _move_bytes(work, kind)
