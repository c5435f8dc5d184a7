"""Nodes in normal mode on a device: who is near and who is far, who forwards for whom, and the words they share.

As in :mod:`..cpu.normal_nodes`: ranks are counted node by node; a rank is *far* when it is on another node, and the
*rail* peers of a rank are the far ranks with its own place in their nodes. Rows of far ranks travel between rail peers,
and inside a node through the progress boards and lines of ``protocol.relay``. For kernels of an operation with
NODE_RANKS.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol import relay
from ...protocol.message import META_LINE
from .blocks import (
    N_RELAY_FIRST,
    S_SINK,
    W_BOARDS,
    W_CHUNK_BYTES,
    W_DEPTH,
    W_KEPT,
    W_LINES,
    W_META_BYTES,
    W_NODE_RANKS,
    W_NUMBER,
    W_ROUND_SLOT,
    W_ROW_BYTES,
    W_STAGING,
    get_each,
)
from .context import own_rank, peer_window, rank_count
from .wait import FAILURE_PROTOCOL, fail, first_of
from .words import acquire_each, any_of, peek, release_each

_BOARD, _LINE = tl.constexpr(relay.BOARD_BYTES), tl.constexpr(relay.LINE_BYTES)
_SHIFT = tl.constexpr(relay.STAMP_SHIFT)
EVERYTHING = tl.constexpr(relay.EVERYTHING)
_META_LINE = tl.constexpr(META_LINE)


@triton.jit
def is_far(context: tl.tensor, state: tl.tensor, peers: tl.tensor) -> tl.tensor:
    """True for ranks of other nodes."""
    size = peek(state + W_NODE_RANKS)
    return peers // size != own_rank(context) // size


@triton.jit
def is_rail(context: tl.tensor, state: tl.tensor, peers: tl.tensor) -> tl.tensor:
    """True for far ranks with the place of this one."""
    size = peek(state + W_NODE_RANKS)
    return is_far(context, state, peers) & (peers % size == own_rank(context) % size)


@triton.jit
def forwarder(context: tl.tensor, state: tl.tensor, peers: tl.tensor) -> tl.tensor:
    """The rank of this node through which rows of, and to, a far rank pass."""
    size = peek(state + W_NODE_RANKS)
    return own_rank(context) // size * size + peers % size


@triton.jit
def mark_bytes(state: tl.tensor) -> tl.tensor:
    """Bytes with a bit for each rank of a node."""
    return (peek(state + W_NODE_RANKS) + 7) // 8


@triton.jit
def board_of(context: tl.tensor, state: tl.tensor, ranks: tl.tensor, nodes: tl.tensor) -> tl.tensor:
    """Addresses of the progress boards for ``nodes`` in the windows of near ``ranks``."""
    return peer_window(context, ranks) + peek(state + W_BOARDS) + nodes * _BOARD


@triton.jit
def slot_bytes(context: tl.tensor, state: tl.tensor) -> tl.tensor:
    """Bytes of a landing slot: those of two for each rank are dealt to those from which rows can come, as many as a
    node has, and one for each node."""
    size, ranks = peek(state + W_NODE_RANKS), rank_count(context)
    return peek(state + W_ROUND_SLOT) * ranks // (size + ranks // size) // _META_LINE * _META_LINE


@triton.jit
def line_of(context: tl.tensor, state: tl.tensor, ranks: tl.tensor, nodes: tl.tensor, writers: tl.tensor) -> tl.tensor:
    """Addresses of the lines in the windows of near ``ranks`` that near ``writers`` write about ``nodes``."""
    size = peek(state + W_NODE_RANKS)
    return peer_window(context, ranks) + peek(state + W_LINES) + (nodes * size + writers % size) * _LINE


@triton.jit
def rows_at(state: tl.tensor, addresses: tl.tensor, chosen: tl.tensor, BACKEND: tl.constexpr) -> tl.tensor:
    """Rows of the stamps at the ``chosen`` addresses, acquire: 0 of an earlier operation, all of a later one."""
    word = acquire_each(tl.where(chosen, addresses, state + S_SINK), BACKEND)
    stamped, number = word >> _SHIFT, peek(state + W_NUMBER) + 1
    # rule: what a line said in an earlier operation is nothing
    other = tl.where(stamped < number, 0, EVERYTHING)
    # rule: what a line says in a later operation is everything
    rows = tl.where(stamped == number, word & EVERYTHING, other)
    return tl.where(chosen, rows, EVERYTHING)


@triton.jit
def stamp_rows(
    state: tl.tensor, addresses: tl.tensor, rows: tl.tensor, chosen: tl.tensor, BACKEND: tl.constexpr
) -> None:
    """Store ``rows`` with this operation's stamp where ``chosen``, release; ``settle`` comes before it."""
    where = tl.where(chosen, addresses, state + S_SINK)
    word = ((peek(state + W_NUMBER) + 1) << _SHIFT) | rows
    release_each(where, word, chosen, state + S_SINK, BACKEND)


@triton.jit
def ring_of(state: tl.tensor, windows: tl.tensor, far: tl.tensor) -> tl.tensor:
    """(address of the ring of rows for rank ``far`` in near ``windows``, rows that it holds): its staging."""
    room, depth = peek(state + W_CHUNK_BYTES), peek(state + W_DEPTH)
    held = depth * (room // (peek(state + W_ROW_BYTES) + peek(state + W_META_BYTES)))
    return windows + peek(state + W_STAGING) + far * depth * room, held


@triton.jit
def kept_of(context: tl.tensor, state: tl.tensor, rails: tl.tensor, chosen: tl.tensor) -> tl.tensor:
    """(index of the first row for rail peers ``rails`` in the marks of a combine's handle, rows there is room for)."""
    room = peek(state + W_KEPT)
    first = tl.minimum(get_each(context, state, N_RELAY_FIRST, rails, chosen), room)
    return first, room - first


@triton.jit
def counts_at(
    context: tl.tensor,
    state: tl.tensor,
    counts: tl.tensor,
    rails: tl.tensor,
    chosen: tl.tensor,
    rows: tl.tensor,
    places: tl.tensor,
) -> tl.tensor:
    """Addresses of int32: how many of the first ``rows`` rows for rail peers ``rails`` have a part of rank ``places``
    of this node. Rows of a rail peer have one entry more than there are rows; those whose marks were not kept, since
    more came than was promised, have no parts and no entries."""
    size = peek(state + W_NODE_RANKS)
    first, kept = kept_of(context, state, rails, chosen)
    # rule: nobody lays out, or waits for, rows whose marks were not kept
    rows = tl.minimum(rows, kept)
    return counts + 4 * ((first + rails // size + rows) * size + places)


@triton.jit
def blame_of(
    context: tl.tensor,
    state: tl.tensor,
    code: tl.tensor,
    peers: tl.tensor,
    bad: tl.tensor,
    blamed: tl.tensor,
    stream: tl.tensor,
    arrived: tl.tensor,
    expected: tl.tensor,
    BACKEND: tl.constexpr,
) -> None:
    """``wait.fail`` with what stands in the lane of the smallest ``bad`` peer: there, ``blamed`` is the rank named."""
    mine = peers == first_of(peers, bad)
    zero = tl.zeros_like(peers)
    fail(
        context,
        state,
        code,
        tl.sum(tl.where(mine, zero + blamed, 0), axis=0),
        stream,
        tl.sum(tl.where(mine, zero + arrived, 0), axis=0),
        tl.sum(tl.where(mine, zero + expected, 0), axis=0),
        BACKEND,
    )


@triton.jit
def refuse_of(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    bad: tl.tensor,
    blamed: tl.tensor,
    stream: tl.tensor,
    got: tl.tensor,
    expected: tl.tensor,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Fail when a rank, ``blamed`` for a ``bad`` peer, claimed what it must not: 1 then, else 0."""
    broken = any_of(bad)
    if broken != 0:
        blame_of(context, state, FAILURE_PROTOCOL, peers, bad, blamed, stream, got, expected, BACKEND)
    return broken
