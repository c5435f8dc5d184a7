"""The receiving side of the row exchange: give grants, note what has arrived, unpack rows or sum them.

In place, one grant covers all rows of a peer. In rounds, a peer has two landing slots of SLOT_ROWS rows; grant g uses
slot ``g % 2`` and is given as soon as the rows of grant g - 2 are consumed.

Rows of every peer come in ascending token order, so the first row of a peer that has not arrived yet names the token
before which everything of that peer is here; the smallest of these over all peers is the frontier up to which tokens
can be summed. The order of a sum is the order of ranks, and every sum is taken in float32 and rounded once, so the
result depends on nothing but the rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...native.atomics import copy, peek, peek32, poke, zero
from ...native.copy import stream, stream_fence
from ...native.failure import set_failure
from ...native.jit import compiled
from ...protocol.context import FAILURE_PROTOCOL, STATUS_OK, STATUS_PENDING, STATUS_PROTOCOL
from ...protocol.message import DTYPE_F32, GRANT_SLOTS, HEADER_BYTES, NormalGrant
from ...protocol.streams import NORMAL_GRANT
from ..blocks import normal as block
from .context import arrived_count, channel_count, completed_count, error_address, own_rank, rank_count, window_address
from .elements import float_view
from .normal_rows import unpack_meta
from .publish import message_address, publish
from .quant import accumulate, add_two, narrow_sum, narrow_sum_of_two
from .words import MOVED, NOTHING, add, get, phase_of, put

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
    grant = row // slot_rows
    return start + (grant & 1) * get(state, block.SLOT_STRIDE) + (row - grant * slot_rows) * nbytes


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
    grant, slot_rows = get(state, block.GRANTED), get(state, block.SLOT_ROWS)
    first = grant * slot_rows
    left = get(state, block.RECV_ROWS) - first
    if left <= 0:
        return NOTHING
    # rule: landing space is granted again only when its rows are consumed
    if grant >= 2 and get(state, block.CONSUMED) < first - slot_rows:
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
    put(at, _AT_ROUND, grant)
    put(at, _AT_ROWS, min(left, slot_rows))
    put(at, _AT_ROW_OFFSET, _landing(state, first, get(state, block.ROW_LANDING), 0))
    put(at, _AT_META_OFFSET, _landing(state, first, get(state, block.META_LANDING), 0))
    put(at, _AT_CHUNK_ROWS, get(state, block.CHUNK_ROWS))
    put(at, 7, 0)
    status = publish(context, peer, NORMAL_GRANT, source, target, HEADER_BYTES, given + 1)
    if status != STATUS_OK:
        return NOTHING if status == STATUS_PENDING else -status
    put(life, block.GRANTS_SENT, given + 1)
    put(state, block.GRANTED, grant + 1)
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


#: Rows read in one step, so that sending goes on in between; about 1 MiB at 7168 bfloat16 values.
_STEP_ROWS = 64
#: A float32, so that the products of ``accumulate`` stay float32.
_ONE: Any = np.float32(1.0)


@compiled
def _ready_until(operation: int, peers: int, ranks: int) -> int:
    """The first token that still misses a row, or TOKENS."""
    limit = get(operation, block.TOKENS)
    for rank in range(ranks):
        state = peers + 8 * block.PEER_WORDS * rank
        arrived = get(state, block.ARRIVED_ROWS)
        if arrived < get(state, block.RECV_ROWS):
            limit = min(limit, peek32(get(state, block.RECV_LIST) + 4 * arrived))
    return limit


@compiled
def sum_rows(operation: int, out: int, found: int, rows: int) -> None:
    """The row at ``out`` = sum, in that order, of the ``found`` rows whose addresses stand at ``rows``.

    The first two are added and the last is rounded on the way, so that two rows, the most common case, take one pass
    and every further one reads and writes the float32 total once.
    """
    hidden, dtype = get(operation, block.HIDDEN), get(operation, block.ELEMENT)
    nbytes = get(operation, block.ROW_BYTES)
    width = 4 if dtype == DTYPE_F32 else 2
    if found == 0:
        zero(out, nbytes)
    elif found == 1:
        copy(out, peek(rows), nbytes)
    elif found == 2:
        narrow_sum_of_two(out, peek(rows), peek(rows + 8), hidden, dtype)
    else:
        total = get(operation, block.SCRATCH)
        for start in range(0, hidden, block.TILE):
            count, at = min(block.TILE, hidden - start), start * width
            add_two(total, peek(rows) + at, peek(rows + 8) + at, count, dtype)
            for index in range(2, found - 1):
                accumulate(total, peek(rows + 8 * index) + at, count, dtype, _ONE)
            narrow_sum(out + at, total, peek(rows + 8 * (found - 1)) + at, count, dtype)


@compiled
def _sum_token(operation: int, token: int, found: int, rows: int) -> None:
    """OUT of ``token`` = sum of the ``found`` rows whose addresses stand at ``rows``, then of the biases."""
    nbytes = get(operation, block.ROW_BYTES)
    bias_0, bias_1 = get(operation, block.BIAS_0), get(operation, block.BIAS_1)
    if bias_0 != 0:
        poke(rows + 8 * found, bias_0 + token * nbytes)
        found += 1
    if bias_1 != 0:
        poke(rows + 8 * found, bias_1 + token * nbytes)
        found += 1
    sum_rows(operation, get(operation, block.OUT) + token * nbytes, found, rows)


@compiled
def add_weights(operation: int, target: int, weights: int) -> None:
    """Add the router weights at address ``weights`` to those at ``target``."""
    topk = get(operation, block.TOPK)
    total = float_view(target, topk)
    part = float_view(weights, topk)
    for slot in range(topk):
        total[slot] += part[slot]


@compiled
def reduce_ready(context: int, operation: int, peers: int) -> int:
    """Sum tokens whose rows have all arrived, a bounded number of them. Returns MOVED or NOTHING."""
    ranks, me = rank_count(context), own_rank(context)
    token = first = get(operation, block.FRONTIER)
    limit = _ready_until(operation, peers, ranks)
    rows = get(operation, block.SCRATCH) + block.SCRATCH_BYTES
    weighted = get(operation, block.META_BYTES) != 0
    weights_bytes = 4 * get(operation, block.TOPK)
    used = 0
    while token < limit and used < _STEP_ROWS:
        found = 0
        if weighted:
            zero(get(operation, block.OUT_WEIGHTS) + weights_bytes * token, weights_bytes)
        for rank in range(ranks):
            state = peers + 8 * block.PEER_WORDS * rank
            row = get(state, block.CONSUMED)
            if row == get(state, block.RECV_ROWS) or peek32(get(state, block.RECV_LIST) + 4 * row) != token:
                continue
            if rank == me:
                # own rows go through no message: they are summed where the caller has them
                row += get(state, block.SEND_FIRST)
                address = get(operation, block.X) + row * get(operation, block.ROW_BYTES)
                meta = get(operation, block.WEIGHTS) + weights_bytes * row
            else:
                address = landed_row(context, operation, state, row)
                meta = landed_meta(context, operation, state, row)
            poke(rows + 8 * found, address)
            if weighted:
                add_weights(operation, get(operation, block.OUT_WEIGHTS) + weights_bytes * token, meta)
            found += 1
            add(state, block.CONSUMED, 1)
        _sum_token(operation, token, found, rows)
        used += found + 1
        token += 1
    put(operation, block.FRONTIER, token)
    return MOVED if token > first else NOTHING
