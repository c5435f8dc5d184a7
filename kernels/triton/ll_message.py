"""Low-latency messages: where they are packed, what their headers say, and how they are published.

What a received header claims is read once and checked, and the copy is what later programs use: the peer could change
it. Each word has one reader, who tells all threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.command import MAX_WRITE_BYTES
from ...protocol.message import CODING_MARK, HEADER_BYTES, LowLatencyHeader
from .blocks import P, S, T, state_table
from .context import channel_count, peer_window, sticky_code, stream_of, window_address
from .ll_counts import take_acks
from .programs import Message
from .publish import put_commands, store_flags
from .target import lanes
from .words import divide, int64s, peek, poke, settle

HEADER = tl.constexpr(HEADER_BYTES)
AT_TAG, AT_NUMBER = tl.constexpr(8 * LowLatencyHeader.TAG), tl.constexpr(8 * LowLatencyHeader.NUMBER)
AT_ROWS, AT_CODING = tl.constexpr(8 * LowLatencyHeader.ROWS), tl.constexpr(8 * LowLatencyHeader.CODING)
AT_PLAN = tl.constexpr(8 * LowLatencyHeader.PLAN)
AT_RETURN_OFFSET = tl.constexpr(8 * LowLatencyHeader.RETURN_OFFSET)
_AT_CONSUMED_DISPATCH = tl.constexpr(8 * LowLatencyHeader.CONSUMED_DISPATCH)
_AT_CONSUMED_COMBINE = tl.constexpr(8 * LowLatencyHeader.CONSUMED_COMBINE)
MARK, LOW = tl.constexpr(CODING_MARK), tl.constexpr(0xFFFFFFFF)
_MAX_WRITE = tl.constexpr(MAX_WRITE_BYTES)
#: Pieces start on cache lines, so that two channels never write to the same one.
_PIECE = tl.constexpr(64)


@triton.jit
def offset_among(peer: tl.tensor, before: tl.tensor) -> tl.tensor:
    """Where the part for ``peer`` of a region begins: ``before`` bytes are needed by lower ranks. Each begins on a
    cache line, within 64 bytes a rank that the layout reserves for that."""
    return (before // 64 + peer) * 64


@triton.jit
def place_message(one: Message, source: tl.tensor, target: tl.tensor, nbytes: tl.tensor) -> None:
    """Note where the message is packed: in the peer's window at ``target`` when that is mapped, else in the own one at
    ``source``."""
    context, state, peer = one.context, one.state, one.peer
    mapped = peer_window(context, peer)
    at = tl.where(mapped != 0, mapped + target, window_address(context) + source)
    poke(state_table(state, T.MESSAGE_AT, peer), at)
    poke(state_table(state, T.MESSAGE_FROM, peer), source)
    poke(state_table(state, T.MESSAGE_TO, peer), target)
    poke(state_table(state, T.MESSAGE_BYTES, peer), nbytes)


@triton.jit
def write_header(
    one: Message,
    plan: tl.tensor,
    message: tl.tensor,
    rows: tl.tensor,
    coding: tl.tensor,
    return_offset: tl.tensor,
    free: tl.tensor,
    TAG: tl.constexpr,
) -> None:
    """The header at address ``message``; ``plan`` is a plan block or a route with its copy."""
    state = one.state
    read = peek(state + S.DISPATCH_READ)
    # every thread has read what the peer was told before
    settle()
    poke(message + AT_TAG, tl.full((), TAG, tl.int64))
    poke(message + AT_NUMBER, one.number)
    poke(message + AT_ROWS, rows)
    poke(message + AT_CODING, coding)
    poke(message + AT_PLAN, peek(plan + P.PLAN))
    poke(message + AT_RETURN_OFFSET, return_offset)
    poke(message + _AT_CONSUMED_DISPATCH, read)
    poke(message + _AT_CONSUMED_COMBINE, free)
    poke(state_table(state, T.SENT_ACK_DISPATCH, one.peer), read)
    poke(state_table(state, T.SENT_ACK_COMBINE, one.peer), free)


@triton.jit
def publish_message(one: Message, PHASE: tl.constexpr, start: tl.tensor) -> None:
    """Publish the packed message. A mapped peer has the bytes already and gets the flags of all channels, for any other
    proxies get commands. :func:`settle` comes before it."""
    context, state, peer, number = one.context, one.state, one.peer, one.number
    if peer_window(context, peer) != 0:
        first, channels = stream_of(PHASE, number), channel_count(context)
        for lowest in range(0, channels, lanes()):
            channel = lowest + tl.arange(0, lanes()).to(tl.int64)
            chosen, to = channel < channels, tl.zeros_like(channel) + peer
            stream = first + tl.where(chosen, channel, 0)
            store_flags(context, state, to, chosen, stream, number // 2 + 1)
    # nothing is published once a proxy or the host has set the sticky error
    elif sticky_code(context) == 0:
        put_message(one, PHASE, start)


@triton.jit
def put_message(one: Message, PHASE: tl.constexpr, start: tl.tensor) -> None:
    """Have proxies send the packed message, one piece per channel.

    A piece is one write and may be empty, so that every stream carries every message; more than 256 MiB of a piece are
    several commands, of which only the last ends the message.
    """
    context, state, peer = one.context, one.state, one.peer
    first, channels = stream_of(PHASE, one.number), channel_count(context)
    source = peek(state_table(state, T.MESSAGE_FROM, peer))
    target = peek(state_table(state, T.MESSAGE_TO, peer))
    nbytes = peek(state_table(state, T.MESSAGE_BYTES, peer))
    lines = divide((nbytes + _PIECE - 1) // _PIECE + channels - 1, channels)[0]
    piece = lines * _PIECE
    parts = peek(state + S.PARTS)
    for lowest in range(0, channels, lanes()):
        channel = lowest + tl.arange(0, lanes()).to(tl.int64)
        begin = tl.minimum(channel * piece, nbytes)
        length = tl.minimum(piece, nbytes - begin)
        # an empty write names the start of the message: the end may be the end of the window
        begin = tl.where(length == 0, 0, begin)
        for part in range(parts):
            done = part * _MAX_WRITE
            rest = length - done
            # also an empty piece is a write
            chosen = (channel < channels) & (rest >= tl.minimum(part, 1))
            put_commands(
                context,
                state,
                peer,
                first + channel,
                chosen,
                source + begin + done,
                target + begin + done,
                tl.minimum(rest, _MAX_WRITE),
                (rest <= _MAX_WRITE).to(tl.int64),
                start,
            )


@triton.jit
def read_header(header: tl.tensor) -> tl.tensor:
    """The words of the header at address ``header``, whose arrival was acquired, and zeros behind them. All are read
    together, since a read of host memory takes a microsecond and more; and each by one thread once, since the peer
    could change it between two reads."""
    # as many elements as a warp has threads: of fewer, several threads have the same one
    lane = tl.arange(0, lanes()).to(tl.int64)
    return tl.load(int64s(header + 8 * lane), mask=lane < HEADER // 8, other=0, volatile=True)


@triton.jit
def word_of(words: tl.tensor, AT: tl.constexpr) -> tl.tensor:
    """The one of :func:`read_header` that is AT bytes from its start, which the thread that read it tells all."""
    return tl.sum(tl.gather(words, tl.full([1], AT // 8, tl.int32), 0), axis=0)


@triton.jit
def check_header(one: Message, words: tl.tensor, TAG: tl.constexpr) -> tuple[tl.tensor, ...]:
    """A message with these ``words`` is of this kind, plan and number; and what it says of the receiver's own messages.
    (A word that is refused, and what it should be: the same where nothing is.)"""
    plan = peek(one.route + P.PLAN)
    got, expected = word_of(words, AT_TAG), tl.full((), TAG, tl.int64)
    if got == expected:
        # rule: low latency: a message of another shape is refused
        got, expected = word_of(words, AT_PLAN), plan
    if got == expected:
        got, expected = word_of(words, AT_NUMBER), one.number
    if got == expected:
        dispatched, combined = word_of(words, _AT_CONSUMED_DISPATCH), word_of(words, _AT_CONSUMED_COMBINE)
        claim, most = take_acks(one.state, one.peer, dispatched, combined)
        if claim >= 0:
            got, expected = claim, most
    return got, expected
