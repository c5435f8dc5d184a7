"""Low-latency messages: where their pieces travel, whether they have arrived, and how they are posted.

Message ``number`` of a phase is message ``number // 2`` of the streams of its parity. Its contiguous bytes are cut
into one piece per channel; a piece is one write and may be empty, so that every stream carries every message.
"""

from __future__ import annotations

from ...native.atomics import peek, poke
from ...native.calls import monotonic_ns
from ...native.failure import set_failure
from ...native.jit import compiled
from ...protocol.context import FAILURE_PROTOCOL, STATUS_OK, STATUS_PROTOCOL
from ...protocol.message import LowLatencyHeader
from ...protocol.streams import MAX_CHANNELS
from ..blocks.low_latency import DIGEST, PEER_TABLES, ROUTE_TABLES
from .context import (
    arrived_count,
    channel_count,
    completed_count,
    error_address,
    peer_window,
    rank_count,
)
from .publish import put_write, store_flag
from .wait import note_progress, turn_over

__all__ = [
    "AT_CODING",
    "AT_CONSUMED_COMBINE",
    "AT_CONSUMED_DISPATCH",
    "AT_NUMBER",
    "AT_PLAN",
    "AT_RETURN_OFFSET",
    "AT_ROWS",
    "AT_TAG",
    "PIECE_ALIGNMENT",
    "check_origin",
    "has_arrived",
    "has_completed",
    "peer_word",
    "post_message",
    "refuse",
    "route_word",
    "streams_of",
    "wait_message",
]

#: Pieces start on cache lines, so that two channels never write to the same one.
PIECE_ALIGNMENT = 64

# Byte offsets of the words of a header. Module constants, because Numba knows no class attributes.
AT_TAG = LowLatencyHeader.TAG * 8
AT_NUMBER = LowLatencyHeader.NUMBER * 8
AT_ROWS = LowLatencyHeader.ROWS * 8
AT_CODING = LowLatencyHeader.CODING * 8
AT_PLAN = LowLatencyHeader.PLAN * 8
AT_RETURN_OFFSET = LowLatencyHeader.RETURN_OFFSET * 8
AT_CONSUMED_DISPATCH = LowLatencyHeader.CONSUMED_DISPATCH * 8
AT_CONSUMED_COMBINE = LowLatencyHeader.CONSUMED_COMBINE * 8


@compiled
def peer_word(context: int, state: int, table: int, peer: int) -> int:
    """Address of a peer's entry in a table of the state block."""
    return state + 8 * (PEER_TABLES + table * rank_count(context) + peer)


@compiled
def route_word(context: int, route: int, table: int, rank: int) -> int:
    """Address of a rank's entry in a table of the route block."""
    return route + 8 * (ROUTE_TABLES + table * rank_count(context) + rank)


@compiled
def streams_of(phase: int, number: int) -> int:
    """Stream of channel 0 of message ``number``; channel c has the id c above it."""
    return phase + (number & 1) * MAX_CHANNELS


@compiled
def has_arrived(context: int, progress: int, peer: int, phase: int, number: int) -> bool:
    """True when all pieces of message ``number`` of ``peer`` are visible; else the first missing one is in
    ``progress``."""
    first, expected = streams_of(phase, number), number // 2 + 1
    for channel in range(channel_count(context)):
        count = arrived_count(context, peer, first + channel)
        # rule: a receive waits for every unmasked peer
        if count < expected:
            note_progress(progress, peer, first + channel, count, expected)
            return False
    return True


@compiled
def has_completed(context: int, progress: int, peer: int, phase: int, number: int) -> bool:
    """True when own message ``number`` to ``peer`` completed locally, hence is never repeated; True for number < 0."""
    if number < 0 or peer_window(context, peer) != 0:
        return True
    first, expected = streams_of(phase, number), number // 2 + 1
    for channel in range(channel_count(context)):
        count = completed_count(context, peer, first + channel)
        if count < expected:
            note_progress(progress, peer, first + channel, count, expected)
            return False
    return True


@compiled
def wait_message(
    context: int, progress: int, peer: int, phase: int, number: int, waited: int, slice_end_ns: int
) -> int:
    """Wait for message ``number`` of ``peer``: STATUS_OK, STATUS_PENDING or STATUS_POISONED.

    ``waited``: address of int64[ranks] to which the nanoseconds are added at the peer's place, or 0.
    """
    turn, status = 0, STATUS_OK
    start = monotonic_ns() if waited != 0 else 0
    while status == STATUS_OK and not has_arrived(context, progress, peer, phase, number):
        status = turn_over(context, turn, slice_end_ns)
        turn += 1
    if waited != 0:
        poke(waited + 8 * peer, peek(waited + 8 * peer) + monotonic_ns() - start)
    return status


@compiled
def post_message(
    context: int, peer: int, phase: int, number: int, posted: int, source: int, target: int, nbytes: int
) -> int:
    """Publish a packed message of ``nbytes`` bytes to ``peer``, one piece per channel.

    Args:
        posted: address of the count of pieces published to the peer in this phase; a resumed call goes on there.
        source, target: window offsets of the message here and there. A mapped peer has the bytes already.

    Returns:
        STATUS_OK, STATUS_PENDING when a ring is full, or STATUS_POISONED.
    """
    channels = channel_count(context)
    first = streams_of(phase, number)
    piece = ((nbytes + channels - 1) // channels + PIECE_ALIGNMENT - 1) // PIECE_ALIGNMENT * PIECE_ALIGNMENT
    direct = peer_window(context, peer) != 0
    while True:
        channel = peek(posted) - number * channels
        if channel >= channels:
            return STATUS_OK
        if direct:
            status = store_flag(context, peer, first + channel, number // 2 + 1)
        else:
            start = min(channel * piece, nbytes)
            length = min(piece, nbytes - start)
            if length == 0:
                # an empty write names the start of the message: the end may be the end of the window
                start = 0
            status = put_write(context, peer, first + channel, source + start, target + start, length, 1)
        if status != STATUS_OK:
            return status
        poke(posted, number * channels + channel + 1)


@compiled
def refuse(context: int, peer: int, stream: int, got: int, expected: int) -> int:
    """Set the sticky error: ``peer`` claims something the formats forbid. Returns STATUS_PROTOCOL."""
    set_failure(error_address(context), FAILURE_PROTOCOL, peer, stream, got, expected)
    return STATUS_PROTOCOL


@compiled
def check_origin(context: int, state: int, peer: int, stream: int, header: int, tag: int, number: int) -> int:
    """STATUS_OK when ``header`` is of message ``number`` of ``peer``, of this kind and plan; else STATUS_PROTOCOL.

    Each word is read once: the peer could change it.
    """
    word = peek(header + AT_TAG)
    if word != tag:
        return refuse(context, peer, stream, word, tag)
    word = peek(header + AT_PLAN)
    if word != peek(state + 8 * DIGEST):
        return refuse(context, peer, stream, word, peek(state + 8 * DIGEST))
    word = peek(header + AT_NUMBER)
    # rule: the number in a header is checked
    if word != number:
        return refuse(context, peer, stream, word, number)
    return STATUS_OK
