"""A combine inside a node: ranks lay rows out for the forwarder, which sums those of a token and sends one row back.

As in :mod:`..cpu.normal_gather`: rows for a far rank lie in the staging of that far rank, in this rank's own window;
the forwarder reads them there, and sums in the order of the ranks of its node, in float32, rounded once. Which rows a
sum is made of follows from the marks that the dispatch has kept: :func:`count_marks` counts them once for a combine,
so that a forwarder knows of every batch how many rows each rank must have laid out, and where they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol import relay
from ...protocol.message import DTYPE_F32
from .context import has_failed, own_rank, peer_window, window_address
from .normal_advance import batch_chunks
from .normal_blocks import (
    N_CHUNKS_SENT,
    N_GRANT_CHUNK,
    N_GRANT_LEFT,
    N_GRANT_META,
    N_GRANT_ROW,
    N_PACK_ROWS,
    N_PASS_READY,
    N_PASS_SEND,
    N_PASSED,
    N_RELAY_FIRST,
    N_SEND_FIRST,
    N_SEND_ROWS,
    N_SENT,
    N_SENT_CHUNKS,
    W_BAD_PEER,
    W_CHUNK_BYTES,
    W_DEPTH,
    W_KEPT,
    W_META_BYTES,
    W_NODE_RANKS,
    W_OPEN,
    W_STAGING,
    W_STREAM,
    entry,
    get_each,
    phase_of,
    set_each,
)
from .normal_nodes import (
    EVERYTHING,
    counts_at,
    forwarder,
    is_far,
    kept_of,
    line_of,
    mark_bytes,
    ring_of,
    rows_at,
    stamp_rows,
)
from .normal_rows import copy_rows, pad
from .normal_sum import add_rows
from .normal_tensors import RowShape, RowTensors
from .normal_wait import first_unfinished
from .quant import load_floats, store_floats
from .words import any_of, floats, int32s, int64s, peek, poke, settle, uint8s

_F32 = tl.constexpr(DTYPE_F32)
#: Ranks of the node whose rows are asked for together.
_TOGETHER = tl.constexpr(2)
#: More rows than there are.
_EVERY = tl.constexpr(1 << 62)
_OFFERED, _FREED = tl.constexpr(8 * relay.OFFERED), tl.constexpr(8 * relay.FREED)


@triton.jit(do_not_specialize=["marks", "room", "counts"])
def count_marks(
    context: tl.int64,
    state: tl.int64,
    marks: tl.int64,
    room: tl.int64,
    counts: tl.int64,
    BLOCK: tl.constexpr,
) -> None:
    """Count, for each rank of this node and the rows handed on from each other node, which of them it got; grid
    (ranks,): program r for the rows from the node of rank r, and the rank of this node with its place.

    Args:
        marks: uint8[room, mark bytes], as the dispatch kept them, rail peer after rail peer.
        counts: int32[room + nodes, ranks of a node], written: see :func:`.normal_nodes.counts_at`.
    """
    far, room = tl.program_id(0).to(tl.int64), room.to(tl.int64)
    if (has_failed(context) == 0) & (peek(state + W_OPEN) == 1):
        # the same of every program
        poke(state + W_KEPT, room)
        if is_far(context, state, far):
            size, nbytes = peek(state + W_NODE_RANKS), mark_bytes(state)
            rail, place = far // size * size + own_rank(context) % size, far % size
            rows, first = (
                peek(entry(context, state, N_SEND_ROWS, rail)),
                tl.minimum(peek(entry(context, state, N_RELAY_FIRST, rail)), room),
            )
            at = counts + 4 * ((first + rail // size) * size + place)
            tl.store(int32s(at), 0)
            count = tl.full((), 0, tl.int64)
            for begin in range(0, rows, BLOCK):
                index = begin + tl.arange(0, BLOCK).to(tl.int64)
                inside = (index < rows) & (first + index < room)
                mark = tl.load(uint8s(marks + (first + index) * nbytes + place // 8), mask=inside, other=0)
                one = (mark.to(tl.int64) >> (place % 8)) & 1
                after = count + tl.cumsum(one, axis=0)
                tl.store(int32s(at + 4 * (index + 1) * size), after.to(tl.int32), mask=inside)
                count += tl.sum(one, axis=0)


@triton.jit
def say_offered(context: tl.tensor, state: tl.tensor, peers: tl.tensor, far: tl.tensor, BACKEND: tl.constexpr) -> None:
    """Tell the forwarders of the ``far`` ranks what the turn before has laid out for them."""
    laid = get_each(context, state, N_PASS_READY, peers, far)
    set_each(context, state, N_PASSED, peers, far, laid)
    via, me = forwarder(context, state, tl.where(far, peers, 0)), own_rank(context)
    at = line_of(context, state, via, peers // peek(state + W_NODE_RANKS), me) + _OFFERED
    stamp_rows(state, at, laid, far & (via != me), BACKEND)


@triton.jit
def say_freed(
    context: tl.tensor,
    state: tl.tensor,
    counts: tl.tensor,
    peers: tl.tensor,
    far: tl.tensor,
    BACKEND: tl.constexpr,
) -> None:
    """As the forwarder: tell the rank of this node with the place of each of the ``far`` ranks how many of its rows for
    that one's node are summed."""
    size, me = peek(state + W_NODE_RANKS), own_rank(context)
    inside = tl.where(far, peers, 0)
    rail, near = inside // size * size + me % size, forwarder(context, state, inside)
    # rule: rows are free only when their sums are sent
    sent = get_each(context, state, N_SENT, rail, far)
    freed = tl.load(int32s(counts_at(context, state, counts, rail, far, sent, inside % size)), mask=far, other=0)
    # rows that no sum needs, of a dispatch that received more than was promised, need no room
    _, kept = kept_of(context, state, rail, far)
    freed = tl.where(sent >= kept, EVERYTHING, freed.to(tl.int64))
    at = line_of(context, state, near, inside // size, me) + _FREED
    stamp_rows(state, at, freed, far & (near != me), BACKEND)


@triton.jit
def choose_laid_out(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, far: tl.tensor, BACKEND: tl.constexpr
) -> tl.tensor:
    """Decide what to lay out for the ``far`` ranks in this turn. True for those whose forwarder should free more room
    first: half of the ring keeps it busy."""
    own = own_rank(context)
    via = forwarder(context, state, tl.where(far, peers, 0))
    others = far & (via != own)
    at = line_of(context, state, own + tl.zeros_like(peers), peers // peek(state + W_NODE_RANKS), via) + _FREED
    passed = get_each(context, state, N_PASSED, peers, others)
    total = get_each(context, state, N_PASS_SEND, peers, others)
    freed = rows_at(state, at, others, BACKEND)
    # rule: a forwarder has read no more than was laid out
    freed = tl.minimum(freed, passed)
    _, held = ring_of(context, state, peers, peers)
    # rule: rows laid out for a forwarder are overwritten only when it has read them
    ready = tl.minimum(total, freed + held)
    set_each(context, state, N_PASS_READY, peers, others, ready)
    # own rows are summed where the caller has them
    set_each(context, state, N_PASS_READY, peers, far & (via == own), get_each(context, state, N_PASS_SEND, peers, far))
    return others & (ready - passed < tl.minimum(total - passed, tl.maximum(held // 2, 1)))


@triton.jit
def lacking(
    context: tl.tensor,
    state: tl.tensor,
    counts: tl.tensor,
    peers: tl.tensor,
    rail: tl.tensor,
    rows: tl.tensor,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """(the last rank of this node that has not laid out its part of the next ``rows`` rows for the ``rail`` peers or
    -1, rows that it has laid out, rows that it must have)."""
    size, me = peek(state + W_NODE_RANKS), own_rank(context)
    end = get_each(context, state, N_SENT, peers, rail) + rows
    own = me + tl.zeros_like(peers)
    found, got, missing = tl.zeros_like(peers) - 1, tl.zeros_like(peers), tl.zeros_like(peers)
    for place in range(size):
        need = tl.load(
            int32s(counts_at(context, state, counts, tl.where(rail, peers, 0), rail, end, place)), mask=rail, other=0
        ).to(tl.int64)
        at = line_of(context, state, own, peers // size, place) + _OFFERED
        offered = rows_at(state, at, rail & (place != me % size), BACKEND)
        late = rail & (offered < need)
        found = tl.where(late, me // size * size + place, found)
        got, missing = tl.where(late, offered, got), tl.where(late, need, missing)
    return found, got, missing


@triton.jit
def batch_of(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, rail: tl.tensor, BACKEND: tl.constexpr
) -> tl.tensor:
    """Rows of the next batch for the ``rail`` peers: of what they have granted, 0 while the staging is not free."""
    left = get_each(context, state, N_GRANT_LEFT, peers, rail)
    wanted = rail & (left > 0) & (get_each(context, state, N_PACK_ROWS, peers, rail) == 0)
    chunk = tl.maximum(get_each(context, state, N_GRANT_CHUNK, peers, wanted), 1)
    rows = tl.where(wanted, tl.minimum(left, batch_chunks(state) * chunk), 0)
    chunks = (rows + chunk - 1) // chunk
    number = get_each(context, state, N_CHUNKS_SENT + phase_of(state), peers, wanted)
    over = tl.maximum(number + chunks - peek(state + W_DEPTH), 0)
    busy = first_unfinished(context, state, peers, wanted, peek(state + W_STREAM), over, BACKEND) >= 0
    return tl.where(busy, 0, rows)


@triton.jit
def choose_sums(
    context: tl.tensor,
    state: tl.tensor,
    counts: tl.tensor,
    peers: tl.tensor,
    rail: tl.tensor,
    BACKEND: tl.constexpr,
) -> None:
    """Decide what to sum for the ``rail`` peers: a batch of which all parts are laid out."""
    rows = batch_of(context, state, peers, rail, BACKEND)
    wanted = rows > 0
    if any_of(wanted, BACKEND) != 0:
        late, _, _ = lacking(context, state, counts, peers, wanted, rows, BACKEND)
        settle(BACKEND)
        # rule: a forwarder sums a token only when all of its rows are laid out
        whole = wanted & (late < 0)
        set_each(context, state, N_PACK_ROWS, peers, whole, rows)


@triton.jit
def lay_out(
    context: tl.tensor,
    state: tl.tensor,
    far: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    tensors: RowTensors,
    shape: RowShape,
) -> None:
    """This program's part of the rows for a far rank that its forwarder, another rank, sums."""
    begin, end = peek(entry(context, state, N_PASSED, far)), peek(entry(context, state, N_PASS_READY, far))
    if (begin < end) & (forwarder(context, state, far) != own_rank(context)):
        ring, held = ring_of(context, state, window_address(context), far)
        meta, send_first = peek(state + W_META_BYTES), peek(entry(context, state, N_SEND_FIRST, far))
        word, slot = tl.arange(0, shape.BLOCK)[None, :], tl.arange(0, shape.SLOTS)[None, :]
        for first in range(begin + program * shape.ROWS, end, programs * shape.ROWS):
            index = first + tl.arange(0, shape.ROWS).to(tl.int64)
            row = send_first + index
            # of a dispatch that received more than was promised, the rest is not there
            inside = (index < end) & (row < tensors.tokens)
            at = index % held
            copy_rows(tensors.x + row * (4 * shape.WORDS), ring + at * (4 * shape.WORDS), inside, word, shape)
            if shape.TOPK > 0:
                given = inside[:, None] & (slot < shape.TOPK)
                bits = tl.load(int32s(tensors.weights + 4 * (row[:, None] * shape.TOPK + slot)), mask=given, other=0)
                target = ring + held * (4 * shape.WORDS) + at * meta
                tl.store(int32s(target[:, None] + 4 * slot), bits, mask=given)
                pad(target, inside, shape.TOPK, meta)


@triton.jit
def sum_laid_out(
    context: tl.tensor,
    state: tl.tensor,
    rail: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    tensors: RowTensors,
    counts: tl.tensor,
    shape: RowShape,
    HIDDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """This program's part of the batch for a rail peer: rows summed over this node, into its window or the staging."""
    rows = peek(entry(context, state, N_PACK_ROWS, rail))
    if rows > 0:
        width: tl.constexpr = 4 if DTYPE == _F32 else 2
        row_bytes: tl.constexpr = HIDDEN * width
        me, size = own_rank(context), peek(state + W_NODE_RANKS)
        meta, done = peek(state + W_META_BYTES), peek(entry(context, state, N_SENT, rail))
        window = peer_window(context, rail)
        row_at, meta_at = (
            peek(entry(context, state, N_GRANT_ROW, rail)),
            peek(entry(context, state, N_GRANT_META, rail)),
        )
        chunk = tl.maximum(peek(entry(context, state, N_GRANT_CHUNK, rail)), 1)
        depth, chunk_bytes = peek(state + W_DEPTH), peek(state + W_CHUNK_BYTES)
        sent_chunks = peek(entry(context, state, N_SENT_CHUNKS, rail))
        staging = window_address(context) + peek(state + W_STAGING) + rail * depth * chunk_bytes
        known, own_first = (
            peek(entry(context, state, N_PASS_SEND, rail)),
            peek(entry(context, state, N_SEND_FIRST, rail)),
        )
        relay_first, room = peek(entry(context, state, N_RELAY_FIRST, rail)), peek(state + W_KEPT)
        counted = counts + 4 * (relay_first + rail // size + done) * size
        # rows whose marks were not kept have no parts
        kept = room - relay_first - done
        near, most = me // size * size, tl.minimum(known, tensors.tokens - own_first)
        ring_at, held = ring_of(context, state, 0, rail)
        value, slot = tl.arange(0, shape.BLOCK)[None, :], tl.arange(0, shape.SLOTS)[None, :]
        for first in range(program * shape.ROWS, rows, programs * shape.ROWS):
            index = first + tl.arange(0, shape.ROWS).to(tl.int64)
            inside = index < rows
            # rule: rows whose marks were not kept are not summed
            counting = index < tl.minimum(rows, kept)
            at = index // chunk
            stage = staging + (sent_chunks + at) % depth * chunk_bytes
            within = index - at * chunk
            stage_meta = stage + tl.minimum(chunk, rows - at * chunk) * row_bytes + within * meta
            target = tl.where(window != 0, window + row_at + index * row_bytes, stage + within * row_bytes)
            target_meta = tl.where(window != 0, window + meta_at + index * meta, stage_meta)
            factors = tl.zeros([shape.ROWS, shape.SLOTS], tl.float32)
            for start in range(0, HIDDEN, shape.BLOCK):
                column = start + value
                wanted = inside[:, None] & (column < HIDDEN)
                weighing = (slot < shape.TOPK) & (start == 0)
                total = tl.zeros([shape.ROWS, shape.BLOCK], tl.float32)
                # rule: a sum of one row is that row
                found = tl.zeros([shape.ROWS], tl.int32)
                wrong = tl.zeros([shape.ROWS], tl.int32)
                for begin in range(0, size, _TOGETHER):
                    sources, metas, there, parts, weights = (), (), (), (), ()
                    for step in tl.static_range(_TOGETHER):
                        place = tl.minimum(size - 1, begin + step)
                        own = place == me % size
                        here_at = counted + 4 * (index * size + place)
                        part = tl.load(int32s(here_at), mask=counting, other=0).to(tl.int64)
                        until = tl.load(int32s(here_at + 4 * size), mask=counting, other=0).to(tl.int64)
                        marked = tl.where(size > begin + step, until - part, 0) > 0
                        # the source marked more rows for this rank than it told of
                        # rule: a forwarder sums no more of its own rows than their source told of
                        wrong += (marked & (part >= tl.where(own, known, _EVERY))).to(tl.int32)
                        here = marked & (part < tl.where(own, most, _EVERY))
                        ring = peer_window(context, near + place) + ring_at
                        source = tl.where(
                            own, tensors.x + (own_first + part) * row_bytes, ring + part % held * row_bytes
                        )
                        sources += (tl.where(here, source, tensors.x),)  # type: ignore[assignment]
                        if shape.TOPK > 0:
                            metas += (  # type: ignore[assignment]
                                tl.where(
                                    own,
                                    tensors.weights + (own_first + part) * (4 * shape.TOPK),
                                    ring + held * row_bytes + part % held * meta,
                                ),
                            )
                        there += (here,)  # type: ignore[assignment]
                    # as in quant.load_together: else the compiler waits for one row before it asks for the next
                    tl.debug_barrier()
                    for step in tl.static_range(_TOGETHER):
                        piece = load_floats(sources[step], column, there[step][:, None] & wanted, DTYPE)
                        parts += (piece,)  # type: ignore[assignment]
                        if shape.TOPK > 0:
                            given = there[step][:, None] & weighing
                            weight = tl.load(floats(metas[step][:, None] + 4 * slot), mask=given, other=0.0)
                            weights += (weight,)  # type: ignore[assignment]
                    tl.debug_barrier()
                    for step in tl.static_range(_TOGETHER):
                        total, found = add_rows(total, found, parts[step], there[step])
                        if shape.TOPK > 0:
                            factors += weights[step]
                blame = int64s(state + W_BAD_PEER + tl.zeros_like(index))
                tl.store(blame, rail + 1 + tl.zeros_like(index), mask=wrong > 0)
                store_floats(target, column, total, wanted, DTYPE, BACKEND)
            if shape.TOPK > 0:
                given = inside[:, None] & (slot < shape.TOPK)
                tl.store(floats(target_meta[:, None] + 4 * slot), factors, mask=given)
                pad(target_meta, inside, shape.TOPK, meta)
