"""The receiving side of the row exchange: give grants, note what has arrived, unpack dispatched rows.

In place, one grant covers all rows of a peer. In rounds, a peer has two landing slots of SLOT_ROWS rows; grant g uses
slot ``g % 2`` and is given as soon as the rows of grant g - 2 are consumed.
"""

from __future__ import annotations

from ...native.atomics import copy
from ...native.copy import stream, stream_fence
from ...native.failure import set_failure
from ...native.jit import compiled
from ...protocol.context import FAILURE_PROTOCOL, STATUS_OK, STATUS_PENDING, STATUS_PROTOCOL
from ...protocol.message import GRANT_SLOTS, HEADER_BYTES, NormalGrant
from ...protocol.streams import NORMAL_GRANT
from ..blocks import normal as block
from .context import (
    arrived_count,
    channel_count,
    completed_count,
    error_address,
    own_rank,
    window_address,
)
from .normal_rows import unpack_meta
from .normal_wire import message_address, publish
from .words import MOVED, NOTHING, add, get, phase_of, put

__all__ = ["give_grant", "landed_meta", "landed_row", "next_message", "note_arrivals", "unpack"]

_TAG = NormalGrant.TAG_VALUE
_AT_TAG, _AT_NUMBER, _AT_ROUND, _AT_ROWS = (
    NormalGrant.TAG,
    NormalGrant.NUMBER,
    NormalGrant.ROUND,
    NormalGrant.ROWS,
)
_AT_ROW_OFFSET, _AT_META_OFFSET, _AT_CHUNK_ROWS = (
    NormalGrant.ROW_OFFSET,
    NormalGrant.META_OFFSET,
    NormalGrant.CHUNK_ROWS,
)


@compiled
def _landing(state: int, row: int, start: int, nbytes: int) -> int:
    """Offset where ``nbytes`` bytes of row ``row`` of a peer land, in slots that begin at ``start``."""
    slot_rows = get(state, block.SLOT_ROWS)
    turn = row // slot_rows
    return start + (turn & 1) * get(state, block.SLOT_STRIDE) + (row - turn * slot_rows) * nbytes


@compiled
def landed_row(context: int, operation: int, state: int, row: int) -> int:
    """Address of row ``row`` of a peer after it has arrived."""
    offset = _landing(state, row, get(state, block.ROW_LANDING), get(operation, block.ROW_BYTES))
    return window_address(context) + offset


@compiled
def landed_meta(context: int, operation: int, state: int, row: int) -> int:
    """Address of the meta of row ``row`` of a peer after it has arrived."""
    offset = _landing(state, row, get(state, block.META_LANDING), get(operation, block.META_BYTES))
    return window_address(context) + offset


@compiled
def give_grant(context: int, counts: int, operation: int, peers: int, peer: int) -> int:
    """Give ``peer`` its next grant when there is room. Returns MOVED, NOTHING or minus a status."""
    state = peers + 8 * block.PEER_WORDS * peer
    turn, slot_rows = get(state, block.GRANTED), get(state, block.SLOT_ROWS)
    first = turn * slot_rows
    left = get(state, block.RECV_ROWS) - first
    if left <= 0:
        return NOTHING
    # rule: landing space is granted again only when its rows are consumed
    if turn >= 2 and get(state, block.CONSUMED) < first - slot_rows:
        return NOTHING
    life = counts + 8 * block.COUNT_WORDS * peer
    given = get(life, block.GRANTS_SENT)
    # The peer has read the grant of four before: the rows of all but the last two have arrived. Local completion is
    # what the slot still needs.
    # rule: a grant slot is written again only when its last write completed
    if completed_count(context, peer, NORMAL_GRANT) < given - GRANT_SLOTS + 1:
        return NOTHING
    me = own_rank(context)
    source = get(operation, block.GRANT_SEND) + (peer * GRANT_SLOTS + given % GRANT_SLOTS) * HEADER_BYTES
    target = get(operation, block.GRANT_RECV) + (me * GRANT_SLOTS + given % GRANT_SLOTS) * HEADER_BYTES
    at = message_address(context, peer, source, target)
    put(at, _AT_TAG, _TAG)
    put(at, _AT_NUMBER, get(operation, block.NUMBER))
    put(at, _AT_ROUND, turn)
    put(at, _AT_ROWS, min(left, slot_rows))
    put(at, _AT_ROW_OFFSET, _landing(state, first, get(state, block.ROW_LANDING), 0))
    put(at, _AT_META_OFFSET, _landing(state, first, get(state, block.META_LANDING), 0))
    put(at, _AT_CHUNK_ROWS, get(state, block.CHUNK_ROWS))
    put(at, 7, 0)
    status = publish(context, peer, NORMAL_GRANT, source, target, HEADER_BYTES, given + 1)
    if status != STATUS_OK:
        return NOTHING if status == STATUS_PENDING else -status
    put(life, block.GRANTS_SENT, given + 1)
    put(state, block.GRANTED, turn + 1)
    return MOVED


@compiled
def next_message(context: int, counts: int, operation: int, peer: int) -> tuple[int, int]:
    """Stream of the next chunk that ``peer`` sends, and the count at which it has arrived."""
    stream0 = get(operation, block.PHASE)
    phase = phase_of(operation)
    number = get(counts + 8 * block.COUNT_WORDS * peer, block.CHUNKS_TAKEN + phase)
    channels = channel_count(context)
    return stream0 + number % channels, number // channels + 1


@compiled
def note_arrivals(context: int, counts: int, operation: int, peers: int, peer: int) -> int:
    """Move ARRIVED_ROWS of ``peer`` past every chunk that has arrived in order. Returns MOVED or NOTHING."""
    state = peers + 8 * block.PEER_WORDS * peer
    life = counts + 8 * block.COUNT_WORDS * peer
    phase = phase_of(operation)
    rows, granted = get(state, block.RECV_ROWS), get(state, block.GRANTED) * get(state, block.SLOT_ROWS)
    limit = min(rows, granted)
    moved = NOTHING
    while get(state, block.ARRIVED_ROWS) < limit:
        stream, count = next_message(context, counts, operation, peer)
        if arrived_count(context, peer, stream) < count:
            break
        add(life, block.CHUNKS_TAKEN + phase, 1)
        add(state, block.ARRIVED_CHUNKS, 1)
        put(state, block.ARRIVED_ROWS, min(limit, get(state, block.ARRIVED_CHUNKS) * get(state, block.CHUNK_ROWS)))
        moved = MOVED
    return moved


@compiled
def unpack(context: int, operation: int, peers: int, peer: int) -> int:
    """Bring the arrived rows of a dispatch to the outputs. Returns MOVED, NOTHING or minus a status."""
    state = peers + 8 * block.PEER_WORDS * peer
    done, ready = get(state, block.CONSUMED), get(state, block.ARRIVED_ROWS)
    if done == ready:
        return NOTHING
    row_bytes, meta_bytes = get(operation, block.ROW_BYTES), get(operation, block.META_BYTES)
    base, out = get(state, block.RECV_FIRST), get(operation, block.OUT)
    in_place, streamed = get(operation, block.IN_PLACE) != 0, get(operation, block.STREAMED) != 0
    for row in range(done, ready):
        if not in_place:
            target, source = out + (base + row) * row_bytes, landed_row(context, operation, state, row)
            if streamed:
                stream(target, source, row_bytes)
            else:
                copy(target, source, row_bytes)
        if meta_bytes != 0:
            meta = landed_meta(context, operation, state, row)
            if not unpack_meta(operation, meta, base + row):
                set_failure(error_address(context), FAILURE_PROTOCOL, peer, get(operation, block.PHASE), row, ready)
                return -STATUS_PROTOCOL
    if streamed:
        stream_fence()
    put(state, block.CONSUMED, ready)
    return MOVED
