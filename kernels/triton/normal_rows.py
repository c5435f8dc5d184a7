"""Rows of normal mode with their meta, and which of them a turn moves where.

A row of a ring is the row's data, then its meta: int32 local experts, float32 weights and scales (dispatch), float32
weights (combine), over a rail of a dispatch a bit for each rank of the node that gets it, zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from .blocks import N
from .normal_pipes import STEP, Channel, ChannelShape, get_each, node_of, peer_of, rest, set_each, ways_of
from .words import aligned, int32s, int64s, uint8s


@dataclass(frozen=True, kw_only=True, repr=False)
class RowShape(ChannelShape):
    """What a kernel that moves rows is compiled for.

    Attributes:
        WORDS: of 4 bytes in a row. TOPK: of a row; SLOTS: rounded up to a power of two, at least 1.
        ROWS: moved together. BLOCK: words of each likewise.
        STARTS_IN_ORDER: programs start in the order of their numbers.
    """

    WORDS: int
    TOPK: int
    SLOTS: int
    ROWS: int
    BLOCK: int
    STARTS_IN_ORDER: bool


class Marks(NamedTuple):
    """Which pipes each row of a turn passes: bytes by row and rank, or bits by row and rank of a node; int64.

    Attributes:
        at: address of the first row's. stride: bytes between two rows.
        known: rows of which anything is known; the others pass no pipe.
    """

    at: tl.tensor
    stride: tl.tensor
    known: tl.tensor


@triton.jit
def nth_pipe(one: Channel, index: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Of the pipes through which tokens of this rank go and come back, in the order of the ranks: rails to nodes before
    its own, the ranks of its node, rails to nodes behind it."""
    if shape.NODES:
        node = node_of(one)
        near = node * one.size + index - node
        rail = one.ranks + tl.where(index < node, index, index - one.size + 1)
        return tl.where((index >= node) & (index < node + one.size), near, rail)
    else:
        return index


@triton.jit
def pipes_of_tokens(one: Channel, shape: tl.constexpr) -> tl.tensor:
    """How many those are."""
    if shape.NODES:
        return one.size + one.ranks // one.size - 1
    else:
        return one.ranks


@triton.jit
def _marked(
    one: Channel,
    marks: Marks,
    pipes: tl.tensor,
    index: tl.tensor,
    inside: tl.tensor,
    BITS: tl.constexpr,
    shape: tl.constexpr,
) -> tl.tensor:
    """1 for each row ``index`` [rows, 1] that passes each of the ``pipes`` [1, pipes], else 0."""
    inside = inside & (index < marks.known)
    at = marks.at + index * marks.stride
    if BITS:
        place = rest(pipes, one.size)
        mark = tl.load(uint8s(at + (place >> 3)), mask=inside, other=0).to(tl.int32)
        return (mark >> (place & 7).to(tl.int32)) & 1
    elif shape.NODES:
        rail = pipes >= one.ranks
        first = tl.where(rail, (pipes - one.ranks) * one.size, peer_of(one, pipes, shape))
        mark = tl.load(uint8s(at + first), mask=inside, other=0)
        for rank in range(1, one.size):
            mark |= tl.load(uint8s(at + first + rank), mask=inside & rail, other=0)
        return (mark != 0).to(tl.int32)
    else:
        return (tl.load(uint8s(at + pipes), mask=inside, other=0) != 0).to(tl.int32)


@triton.jit
def plan_rows(
    one: Channel,
    marks: Marks,
    first: tl.tensor,
    pipes: tl.tensor,
    rows: tl.tensor,
    SENDING: tl.constexpr,
    BITS: tl.constexpr,
    shape: tl.constexpr,
) -> tl.tensor:
    """Of the next ``rows`` rows, at most STEP: how many can be moved, which are the first ones. The ways that each goes
    are in :func:`.normal_pipes.ways_of`, behind a barrier: in the order of the ranks where rows are taken out, and
    beginning with this rank's place where they are put in.

    Args:
        first, pipes: pipes ``first`` .. ``first + pipes - 1`` where marks are BITS, else those of :func:`nth_pipe`.
        SENDING: rows are put into pipes, else taken out.
    """
    # tables: rows of an operation, those that have passed a pipe, that may, and that will have after this turn
    table: tl.constexpr = N.SEND_ROWS if SENDING else N.RECV_ROWS
    before: tl.constexpr = N.SENT if SENDING else N.TAKEN
    bound: tl.constexpr = N.LIMIT if SENDING else N.ARRIVED
    after: tl.constexpr = N.NEXT_SENT if SENDING else N.NEXT_TAKEN
    rings: tl.constexpr = N.OUT_RING if SENDING else N.IN_RING
    ring_rows: tl.constexpr = N.OUT_ROWS if SENDING else N.IN_ROWS
    index, place = tl.arange(0, STEP).to(tl.int64)[:, None], tl.arange(0, shape.RANKS).to(tl.int64)
    inside = place < pipes
    if SENDING:
        # not all ranks write to the same peer first
        place = place + one.me % pipes
        place = tl.where(place >= pipes, place - pipes, place)
    if BITS:
        pipe = first + place
    else:
        pipe = nth_pipe(one, place, shape)
    # nobody waits for a rank that is masked
    needed = get_each(one, table, pipe, inside) > 0
    base = get_each(one, before, pipe, inside)
    mark = _marked(one, marks, pipe[None, :], index, (index < rows) & needed[None, :], BITS, shape)
    passing = tl.cumsum(mark, axis=0)
    room = get_each(one, bound, pipe, inside) - base
    fitting = tl.sum(((index < rows) & (passing <= room[None, :])).to(tl.int32), axis=0)
    rows = tl.minimum(rows, tl.min(tl.where(needed, fitting, STEP), axis=0))
    mark = tl.where(index < rows, mark, 0)
    ring, held = get_each(one, rings, pipe, inside), tl.maximum(get_each(one, ring_rows, pipe, inside), 1)
    row = row_address(ring[None, :], held[None, :], one.stride, (base[None, :] + passing - 1).to(tl.int32))
    at = ways_of(one, index) + 16 * tl.cumsum(mark, axis=1)
    # all threads have read the plan before
    settle_plan()
    tl.store(int64s(at - 8), row, mask=mark != 0)
    tl.store(int64s(at), tl.zeros_like(row) + pipe[None, :], mask=mark != 0)
    tl.store(int64s(ways_of(one, index)), tl.sum(mark, axis=1).to(tl.int64)[:, None])
    set_each(one, after, pipe, inside, base + tl.sum(mark, axis=0))
    settle_plan()
    return rows


@triton.jit
def ways_each(one: Channel, row: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """How many pipes each ``row`` [rows] of the plan passes."""
    return tl.load(int64s(ways_of(one, row)), mask=inside, other=0)


@triton.jit
def nth_way(one: Channel, row: tl.tensor, many: tl.tensor, nth: tl.tensor) -> tuple[tl.tensor, ...]:
    """Of each ``row`` [rows] of the plan, which passes ``many`` pipes: whether there is an ``nth``, from 0, and its
    address there. The address is loaded either way, without waiting for ``many``."""
    at = ways_of(one, row) + 8 + 16 * nth
    return nth < many, tl.load(int64s(at), mask=tl.zeros_like(row) + nth < one.ranks, other=0)


@triton.jit
def nth_pipe_of(one: Channel, row: tl.tensor, here: tl.tensor, nth: tl.tensor) -> tl.tensor:
    """The numbers of these pipes."""
    return tl.load(int64s(ways_of(one, row) + 16 + 16 * nth), mask=here, other=0)


@triton.jit
def settle_plan() -> None:
    """All threads have planned, and see what was."""
    tl.debug_barrier()


@triton.jit
def row_address(ring: tl.tensor, rows: tl.tensor, stride: tl.tensor, place: tl.tensor) -> tl.tensor:
    """Addresses of the rows at ``place``, int32, of pipes, in their rings of ``rows`` rows."""
    return ring + (place % rows.to(tl.int32)).to(tl.int64) * stride


@triton.jit
def copy_rows(source: tl.tensor, target: tl.tensor, inside: tl.tensor, there: tl.tensor, shape: tl.constexpr) -> None:
    """Rows of WORDS int32 from addresses ``source`` to addresses ``target``, both [rows] and multiples of 16, for rows
    that are ``inside``; zeros for those whose source is not ``there``."""
    words = tl.arange(0, shape.BLOCK)[None, :]
    for first in range(0, shape.WORDS, shape.BLOCK):
        word = first + words
        within = word < shape.WORDS
        part = tl.load(aligned(source, tl.int32)[:, None] + word, mask=there[:, None] & within, other=0)
        tl.store(aligned(target, tl.int32)[:, None] + word, part, mask=inside[:, None] & within)


@triton.jit
def load_words(addresses: tl.tensor, inside: tl.tensor, MANY: tl.constexpr, SPACE: tl.constexpr) -> tl.tensor:
    """MANY int32 at each of ``addresses`` [rows], in SPACE columns; 0 for rows that are not ``inside``."""
    place = tl.arange(0, SPACE)[None, :]
    return tl.load(int32s(addresses[:, None] + 4 * place), mask=inside[:, None] & (place < MANY), other=0)


@triton.jit
def store_words(
    addresses: tl.tensor, words: tl.tensor, inside: tl.tensor, MANY: tl.constexpr, SPACE: tl.constexpr
) -> None:
    """Store them."""
    place = tl.arange(0, SPACE)[None, :]
    tl.store(int32s(addresses[:, None] + 4 * place), words, mask=inside[:, None] & (place < MANY))


@triton.jit
def pad(target: tl.tensor, inside: tl.tensor, used: tl.tensor, meta: tl.tensor) -> None:
    """Zeros after the ``used`` words of a meta of ``meta`` bytes."""
    zero = tl.zeros([target.shape[0]], tl.int32)
    for word in range(used, meta // 4):
        tl.store(int32s(target + 4 * word), zero, mask=inside)
