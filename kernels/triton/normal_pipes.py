"""Pipes of normal mode: who is at the other end, where their rings and tables stand, how their rows are cut.

``protocol.pipe`` says what a pipe is. Each program serves one channel: its own entries of the tables of the state
block, which no other program touches once an operation is open. Programs of several warps decide by what stands there
and never by what a thread has read for itself. Vectors of pipes have an element for each thread, so that nothing is
read or told twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from ...protocol import pipe
from ...protocol.message import NormalNotify
from ...protocol.streams import NORMAL_CHANNELS
from ..blocks import normal_device
from .blocks import W
from .context import is_live, landing_window, own_rank, peer_window, rank_count, window_address
from .kernel import Shape
from .words import divide, int64s, peek

_WORDS, _CHANNELS = tl.constexpr(normal_device.STATE_WORDS), tl.constexpr(NORMAL_CHANNELS)
_TABLES = tl.constexpr(len(normal_device.TABLES))
COMBINE = tl.constexpr(NormalNotify.OPERATION_COMBINE)
EVERYTHING, STEP = tl.constexpr(pipe.EVERYTHING), tl.constexpr(pipe.STEP)
_SHIFT, _LINE = tl.constexpr(pipe.STAMP_SHIFT), tl.constexpr(pipe.LINE)


@triton.jit
def as_long(value: tl.tensor) -> tl.tensor:
    """The variable of a loop, which the interpreter makes a plain number, as int64."""
    return tl.full((), 0, tl.int64) + value


@dataclass(frozen=True, kw_only=True, repr=False)
class ChannelShape(Shape):
    """What each kernel of normal mode is compiled for.

    Attributes:
        KIND: OPERATION_*. NODES: rows cross once between nodes.
        RANKS: pipes of a row, rounded up to a power of two. PIPES: the same of a rank, at least one for each thread.
        TOKENS: that an opening counts at a time.
    """

    KIND: int
    NODES: bool
    RANKS: int
    TOKENS: int
    PIPES: int


class Channel(NamedTuple):
    """What a program knows of its channel; int64 scalars.

    Attributes:
        context, state: addresses of the blocks. index, channels: this channel, of how many.
        ranks, me, size: of the group, and of a node; all ranks are one node where there are no rails.
        phase: 0 in a dispatch, 1 in a combine. stamp: of this operation, in words of pipes.
        stride: bytes from one row of a ring to the next: a row and its meta.
        ring, rows: bytes of a ring that rows land in, and rows that fit.
        staging, staged: the same of the rings for proxied peers.
    """

    context: tl.tensor
    state: tl.tensor
    index: tl.tensor
    channels: tl.tensor
    ranks: tl.tensor
    me: tl.tensor
    size: tl.tensor
    phase: tl.tensor
    stamp: tl.tensor
    stride: tl.tensor
    ring: tl.tensor
    rows: tl.tensor
    staging: tl.tensor
    staged: tl.tensor


@triton.jit
def channel_of(
    context: tl.tensor,
    state: tl.tensor,
    index: tl.tensor,
    channels: tl.tensor,
    node_ranks: tl.tensor,
    stride: tl.tensor,
    shape: tl.constexpr,
) -> Channel:
    """Channel ``index`` of the running operation, with rows of ``stride`` bytes."""
    ranks, size, phase = rank_count(context), rank_count(context), tl.full((), shape.KIND == COMBINE, tl.int64)
    incoming, proxied = ranks, ranks
    if shape.NODES:
        size = node_ranks
        incoming, proxied = ranks + ranks // size, ranks // size
    ring = peek(state + W.LANDING_BYTES) // (incoming * channels) // _LINE * _LINE
    staging = peek(state + W.STAGING_BYTES) // (proxied * channels) // _LINE * _LINE
    stamp = (peek(state + W.NUMBER) + 1) << _SHIFT
    rows, staged = ring // stride, staging // stride
    me = own_rank(context)
    return Channel(context, state, index, channels, ranks, me, size, phase, stamp, stride, ring, rows, staging, staged)


@triton.jit
def on_channel(one: Channel, index: tl.tensor) -> Channel:
    """Another channel of the same operation."""
    return Channel(*one[:2], index, *one[3:])


@triton.jit
def entry(one: Channel, table: tl.tensor, pipes: tl.tensor) -> tl.tensor:
    """Addresses of the pipes' entries in a table of the channel."""
    return one.state + 8 * (_WORDS + (table * _CHANNELS + one.index) * (2 * one.ranks) + pipes)


@triton.jit
def get_each(one: Channel, table: tl.tensor, pipes: tl.tensor, chosen: tl.tensor) -> tl.tensor:
    """Entries of the ``chosen`` pipes, 0 for the others."""
    return tl.load(int64s(entry(one, table, pipes)), mask=chosen, other=0)


@triton.jit
def set_each(one: Channel, table: tl.tensor, pipes: tl.tensor, chosen: tl.tensor, value: tl.tensor) -> None:
    """Set the entries of the ``chosen`` pipes."""
    tl.store(int64s(entry(one, table, pipes)), tl.zeros_like(pipes) + value, mask=chosen)


@triton.jit
def get(one: Channel, table: tl.tensor, pipe: tl.tensor) -> tl.tensor:
    """One pipe's entry."""
    return peek(entry(one, table, pipe))


@triton.jit
def ways_of(one: Channel, row: tl.tensor) -> tl.tensor:
    """Addresses of int64[1 + 2 x ranks] for each ``row`` of this turn: through how many pipes it goes, and for each of
    them its address there and the pipe."""
    behind = one.state + 8 * (_WORDS + _TABLES * _CHANNELS * 2 * one.ranks)
    return behind + 8 * (one.index * STEP + row) * (1 + 2 * one.ranks)


@triton.jit
def turn_marks(one: Channel) -> tl.tensor:
    """Address of uint8[STEP, :func:`mark_stride`]: for whom the rows are that are forwarded in this turn."""
    behind = one.state + 8 * (_WORDS + _TABLES * _CHANNELS * 2 * one.ranks)
    return behind + 8 * STEP * _CHANNELS * (1 + 2 * one.ranks) + STEP * mark_stride(one) * one.index


@triton.jit
def over(number: tl.tensor, by: tl.tensor) -> tl.tensor:
    """Quotients, int64, of counts: see :func:`.words.divide`."""
    return divide(number, by)[0]


@triton.jit
def rest(number: tl.tensor, by: tl.tensor) -> tl.tensor:
    """What is left of them."""
    return divide(number, by)[1]


@triton.jit
def mark_stride(one: Channel) -> tl.tensor:
    """Bytes of the marks of a row in this turn."""
    return (one.ranks + 127) // 128 * 16


@triton.jit
def node_of(one: Channel) -> tl.tensor:
    """This rank's node."""
    return over(one.me, one.size)


@triton.jit
def peer_of(one: Channel, pipes: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """The rank at the other end of each pipe."""
    if shape.NODES:
        near = node_of(one) * one.size + rest(pipes, one.size)
        return tl.where(pipes < one.ranks, near, (pipes - one.ranks) * one.size + rest(one.me, one.size))
    else:
        return pipes


@triton.jit
def other_end(one: Channel, pipes: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """The number that each pipe has there."""
    if shape.NODES:
        near = over(pipes, one.size) * one.size + rest(one.me, one.size)
        return tl.where(pipes < one.ranks, near, one.ranks + node_of(one))
    else:
        return tl.zeros_like(pipes) + one.me


@triton.jit
def is_pipe(one: Channel, pipes: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """True for pipes that there are: to ranks that are not masked, and to no rail peer on the own node."""
    inside = pipes < one.ranks
    if shape.NODES:
        inside = (pipes < one.ranks + over(one.ranks, one.size)) & (pipes != one.ranks + node_of(one))
    return inside & is_live(one.context, tl.where(inside, peer_of(one, pipes, shape), 0))


@triton.jit
def chunk_rows(one: Channel, rows: tl.tensor) -> tl.tensor:
    """Rows of a message, of a proxied pipe of ``rows`` rows: four messages, so that one is under way while others are
    packed and read, unless those would be too short or too long."""
    least = tl.maximum(over(peek(one.state + W.LEAST_CHUNK), one.stride), 1)
    most = tl.minimum(over(peek(one.state + W.CHUNK_BYTES), one.stride), tl.minimum(one.rows, one.staged) >> 1)
    return tl.minimum(tl.maximum((rows + 3) >> 2, least), tl.maximum(most, 1))


@triton.jit
def whole(rows: tl.tensor, chunk: tl.tensor) -> tl.tensor:
    """Rows of a ring that holds a whole number of messages."""
    return over(rows, chunk) * chunk


@triton.jit
def in_ring(one: Channel, pipes: tl.tensor, peers: tl.tensor) -> tl.tensor:
    """Addresses of the rings that rows of each pipe land in."""
    at = peek(one.state + W.LANDING) + (pipes * one.channels + one.index) * one.ring
    return landing_window(one.context, peers) + at


@triton.jit
def out_offset(one: Channel, pipes: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Offsets in the peers' windows of the rings that rows for them land in."""
    end = other_end(one, pipes, shape)
    return peek(one.state + W.LANDING) + (end * one.channels + one.index) * one.ring


@triton.jit
def staging_offset(one: Channel, pipes: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Offsets in this window of the rings for proxied peers."""
    place = pipes
    if shape.NODES:
        place = pipes - one.ranks
    return peek(one.state + W.STAGING) + (place * one.channels + one.index) * one.staging


@triton.jit
def out_ring(one: Channel, pipes: tl.tensor, peers: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Addresses of the rings that rows for each pipe are put into."""
    window = peer_window(one.context, peers)
    staging = window_address(one.context) + staging_offset(one, pipes, shape)
    return tl.where(window != 0, window + out_offset(one, pipes, shape), staging)
