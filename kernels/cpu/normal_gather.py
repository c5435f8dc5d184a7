"""A combine inside a node: ranks lay rows out for the forwarder, which sums those of a token and sends one row back.

Rows of this rank for a far rank lie in the staging of that far rank, which this rank does not write to itself, as a
ring of rows followed by a ring of meta. The forwarder reads them there, so they are copied once. It sums in the order
of the ranks of its node, in float32, rounded once; own rows it reads where its caller has them.
"""

from __future__ import annotations

from ...native.atomics import copy, peek, poke, zero
from ...native.failure import set_failure
from ...native.jit import compiled
from ...protocol.context import FAILURE_PROTOCOL, STATUS_OK, STATUS_PROTOCOL
from ...protocol.relay import FREED, OFFERED
from ..blocks import normal as block
from .context import error_address, own_rank, peer_window, window_address
from .normal_nodes import forwarder, line_of, node_of, place_of, rows_at, stamp_rows
from .normal_receive import add_weights, sum_rows
from .normal_rows import is_marked
from .normal_send import chunk_address, publish_chunk
from .wait import note_progress
from .words import MOVED, NOTHING, get, put

#: Rows copied or summed in one step, so that the other peers are served soon; about 1 MiB at 7168 bfloat16 values.
_STEP_ROWS = 64


@compiled
def _ring(operation: int, far: int) -> tuple[int, int]:
    """Offset of the ring of rows for rank ``far`` in the window of a rank of this node, and how many rows it holds."""
    room, depth = get(operation, block.CHUNK_BYTES), get(operation, block.DEPTH)
    rows = depth * (room // (get(operation, block.ROW_BYTES) + get(operation, block.META_BYTES)))
    return get(operation, block.STAGING) + far * depth * room, rows


@compiled
def lay_out(context: int, operation: int, peers: int, far: int) -> int:
    """Lay out rows for the far rank ``far`` while its forwarder, another rank, frees room. Returns MOVED, NOTHING or
    minus a status."""
    state = peers + 8 * block.PEER_WORDS * far
    me = own_rank(context)
    rows, done = get(state, block.PASS_ROWS), get(state, block.PASSED)
    via = forwarder(operation, me, far)
    if done == rows or via == me:
        return NOTHING
    node = node_of(operation, far)
    base, held = _ring(operation, far)
    freed = min(rows_at(operation, line_of(context, operation, me, node, via) + 8 * FREED), done)
    # rule: rows laid out for a forwarder are overwritten only when it has read them
    stop = min(rows, freed + held, done + _STEP_ROWS)
    if stop == done:
        return NOTHING
    row_bytes, meta_bytes = get(operation, block.ROW_BYTES), get(operation, block.META_BYTES)
    weights_bytes, first = 4 * get(operation, block.TOPK), get(state, block.SEND_FIRST)
    ring = window_address(context) + base
    x, weights = get(operation, block.X), get(operation, block.WEIGHTS)
    for row in range(done, stop):
        copy(ring + row % held * row_bytes, x + (first + row) * row_bytes, row_bytes)
        if meta_bytes != 0:
            meta = ring + held * row_bytes + row % held * meta_bytes
            copy(meta, weights + (first + row) * weights_bytes, weights_bytes)
    put(state, block.PASSED, stop)
    line = line_of(context, operation, via, node, me)
    status = stamp_rows(context, operation, line + 8 * OFFERED, stop)
    return MOVED if status == STATUS_OK else -status


@compiled
def keeps_rows(context: int, operation: int, peers: int, far: int, progress: int) -> bool:
    """True while not all rows for ``far`` are laid out; progress then names its forwarder, which has to free room.

    What is laid out may stay so when the combine returns: it lies in this window, which is used again only after the
    forwarder has opened another operation.
    """
    state = peers + 8 * block.PEER_WORDS * far
    via = forwarder(operation, own_rank(context), far)
    rows, done = get(state, block.PASS_ROWS), get(state, block.PASSED)
    if done == rows or via == own_rank(context):
        return False
    note_progress(progress, via, get(operation, block.PHASE), done, rows)
    return True


@compiled
def _next_marks(operation: int, state: int) -> int:
    """Address of the marks of the next row to be summed for a rail peer."""
    index = get(state, block.RELAY_FIRST) + get(state, block.SENT) + get(state, block.FILLED)
    return get(operation, block.RELAY_MARKS) + index * get(operation, block.MARK_BYTES)


@compiled
def _lacking(context: int, operation: int, state: int, peer: int) -> int:
    """The first rank of this node that has not laid out its part of the next row for ``peer`` yet, or -1."""
    me, node, size = own_rank(context), node_of(operation, peer), get(operation, block.NODE_RANKS)
    marks, first = _next_marks(operation, state), me - place_of(operation, me)
    cursors = get(operation, block.CURSORS) + 8 * node * size
    for place in range(size):
        rank = first + place
        if rank != me and is_marked(marks, place):
            offered = rows_at(operation, line_of(context, operation, me, node, rank) + 8 * OFFERED)
            # rule: a forwarder sums a token only when all of its rows are laid out
            if offered <= peek(cursors + 8 * place):
                return rank
    return -1


@compiled
def lacks_rows(context: int, operation: int, peers: int, peer: int, progress: int) -> bool:
    """True when rows for rail peer ``peer`` are granted and a rank of this node keeps them waiting; progress then names
    that rank."""
    state = peers + 8 * block.PEER_WORDS * peer
    if get(state, block.GRANT_LEFT) == 0 or get(state, block.PACKED) != block.PACKED_NOTHING:
        return False
    rank = _lacking(context, operation, state, peer)
    if rank < 0:
        return False
    note_progress(progress, rank, get(operation, block.PHASE), get(state, block.SENT), get(state, block.SEND_ROWS))
    return True


@compiled
def _fill(context: int, operation: int, state: int, peer: int, rows: int, at: int, at_meta: int) -> int:
    """Sum the next rows for ``peer`` into a chunk of ``rows`` rows. Returns MOVED, NOTHING or minus a status."""
    me, node, size = own_rank(context), node_of(operation, peer), get(operation, block.NODE_RANKS)
    row_bytes, meta_bytes = get(operation, block.ROW_BYTES), get(operation, block.META_BYTES)
    weights_bytes = 4 * get(operation, block.TOPK)
    first, cursors = me - place_of(operation, me), get(operation, block.CURSORS) + 8 * node * size
    base, held = _ring(operation, peer)
    listed = get(operation, block.SCRATCH) + block.SCRATCH_BYTES
    steps = 0
    while steps < _STEP_ROWS and get(state, block.FILLED) < rows and _lacking(context, operation, state, peer) < 0:
        filled, marks = get(state, block.FILLED), _next_marks(operation, state)
        target = at_meta + filled * meta_bytes
        if meta_bytes != 0:
            zero(target, meta_bytes)
        found = 0
        for place in range(size):
            if not is_marked(marks, place):
                continue
            row = peek(cursors + 8 * place)
            poke(cursors + 8 * place, row + 1)
            if first + place == me:
                # rule: a forwarder sums no more of its own rows than their source told of
                if row >= get(state, block.PASS_ROWS):
                    # the source marked more rows for this rank than it told of
                    error, stream = error_address(context), get(operation, block.PHASE)
                    set_failure(error, FAILURE_PROTOCOL, peer, stream, row + 1, get(state, block.PASS_ROWS))
                    return -STATUS_PROTOCOL
                row += get(state, block.SEND_FIRST)
                address = get(operation, block.X) + row * row_bytes
                meta = get(operation, block.WEIGHTS) + row * weights_bytes
            else:
                ring = peer_window(context, first + place) + base
                address = ring + row % held * row_bytes
                meta = ring + held * row_bytes + row % held * meta_bytes
            poke(listed + 8 * found, address)
            found += 1
            if meta_bytes != 0:
                add_weights(operation, target, meta)
        sum_rows(operation, at + filled * row_bytes, found, listed)
        put(state, block.FILLED, filled + 1)
        steps += 1
    if steps == 0:
        return NOTHING
    for place in range(size):
        if first + place != me:
            line = line_of(context, operation, first + place, node, me)
            status = stamp_rows(context, operation, line + 8 * FREED, peek(cursors + 8 * place))
            if status != STATUS_OK:
                return -status
    return MOVED


@compiled
def send_sums(context: int, counts: int, operation: int, peers: int, peer: int) -> int:
    """Like ``send_chunk``, of rows summed over this node, to rail peer ``peer``. Returns MOVED, NOTHING or minus a
    status."""
    state = peers + 8 * block.PEER_WORDS * peer
    left = get(state, block.GRANT_LEFT)
    if left == 0:
        return NOTHING
    if get(state, block.PACKED) != block.PACKED_NOTHING:
        return publish_chunk(context, counts, operation, peers, peer)
    at, at_meta = chunk_address(context, counts, operation, peers, peer)
    if at == 0:
        return NOTHING
    rows = min(left, get(state, block.GRANT_CHUNK))
    step = _fill(context, operation, state, peer, rows, at, at_meta)
    if step < 0 or get(state, block.FILLED) < rows:
        return step
    put(state, block.FILLED, 0)
    put(state, block.PACKED, block.PACKED_ROWS_AND_META)
    step = publish_chunk(context, counts, operation, peers, peer)
    return step if step < 0 else MOVED
