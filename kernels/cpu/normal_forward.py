"""A dispatch inside a node: the forwarder shows what has arrived from another node, every rank takes its own rows.

Rows are not sent a second time. They land in the forwarder's rounds, its progress board says so, and each rank of the
node that an arrived row is marked for copies it from there to its final place: one copy, by the rank that wants it,
wherever its tensor is. A landing slot is granted again when every rank of the node is done with its rows.
"""

from __future__ import annotations

from ...native.atomics import copy, load64
from ...native.copy import stream, stream_fence
from ...native.failure import set_failure
from ...native.jit import compiled
from ...protocol.context import FAILURE_PROTOCOL, STATUS_OK, STATUS_PROTOCOL
from ...protocol.relay import (
    ARRIVED,
    EVERYTHING,
    META_OFFSET,
    ROW_OFFSET,
    ROWS,
    SLOT_ROWS,
    SLOT_STRIDE,
    TAKEN,
)
from ..blocks import normal as block
from .context import error_address, own_rank, peer_window, rank_count
from .normal_nodes import board_of, forwarder, is_current, line_of, node_of, place_of, rows_at, slot_bytes, stamp_rows
from .normal_receive import landed_meta
from .normal_rows import is_marked, unpack_passed_meta
from .wait import note_progress
from .words import MOVED, NOTHING, get, put

#: Rows read in one step, so that sending goes on in between.
_STEP_ROWS = 64


@compiled
def _mark_offset(operation: int) -> int:
    """Where in a row's meta the mark bytes stand."""
    return 8 * get(operation, block.TOPK) + get(operation, block.SCALE_BYTES)


@compiled
def _keep_marks(context: int, operation: int, state: int, first: int, end: int) -> None:
    """Note in the handle for which ranks rows ``first`` … ``end`` are: the combine sums what those send back."""
    kept, nbytes = get(operation, block.RELAY_MARKS), get(operation, block.MARK_BYTES)
    if kept == 0:
        return
    kept += get(state, block.RELAY_FIRST) * nbytes
    for row in range(first, end):
        meta = landed_meta(context, operation, state, row)
        copy(kept + row * nbytes, meta + _mark_offset(operation), nbytes)


@compiled
def show_arrivals(context: int, operation: int, peers: int, peer: int) -> int:
    """As the forwarder: show what has arrived from rail peer ``peer``, and note what the node is done with.

    Returns MOVED, NOTHING or minus a status.
    """
    state = peers + 8 * block.PEER_WORDS * peer
    me, node = own_rank(context), node_of(operation, peer)
    arrived, shown = get(state, block.ARRIVED_ROWS), get(state, block.SHOWN)
    moved = NOTHING
    if shown != arrived + 1:
        board = board_of(context, operation, me, node)
        if shown == 0:
            # nobody follows these under an older stamp, nor when no row is to come
            put(board, ROWS, get(state, block.RECV_ROWS))
            put(board, ROW_OFFSET, get(state, block.ROW_LANDING))
            put(board, META_OFFSET, get(state, block.META_LANDING))
            put(board, SLOT_ROWS, get(state, block.SLOT_ROWS))
            put(board, SLOT_STRIDE, get(state, block.SLOT_STRIDE))
        else:
            _keep_marks(context, operation, state, shown - 1, arrived)
        status = stamp_rows(context, operation, board + 8 * ARRIVED, arrived if shown != 0 else 0)
        if status != STATUS_OK:
            return -status
        put(state, block.SHOWN, (arrived if shown != 0 else 0) + 1)
        moved = MOVED
    done = get(state, block.CONSUMED)
    if done < arrived:
        least = get(state, block.SHOWN) - 1
        first = me - place_of(operation, me)
        for rank in range(first, first + get(operation, block.NODE_RANKS)):
            # rule: rows to be forwarded are overwritten only when their node is done with them
            least = min(least, rows_at(operation, line_of(context, operation, me, node, rank) + 8 * TAKEN))
        if least > done:
            put(state, block.CONSUMED, least)
            moved = MOVED
    return moved


@compiled
def lags_behind(context: int, operation: int, peers: int, peer: int, progress: int) -> bool:
    """As the forwarder: True when ``peer`` may send nothing because a rank of the node is not done with what came;
    progress then names that rank.

    Once everything is here the forwarder waits for nobody: its landing slots are used again only after all ranks have
    opened another operation.
    """
    state = peers + 8 * block.PEER_WORDS * peer
    arrived, me = get(state, block.ARRIVED_ROWS), own_rank(context)
    granted = get(state, block.GRANTED) * get(state, block.SLOT_ROWS)
    if arrived == get(state, block.RECV_ROWS) or arrived < granted:
        return False
    first = me - place_of(operation, me)
    for rank in range(first, first + get(operation, block.NODE_RANKS)):
        taken = rows_at(operation, line_of(context, operation, me, node_of(operation, peer), rank) + 8 * TAKEN)
        if taken <= get(state, block.CONSUMED):
            note_progress(progress, rank, get(operation, block.PHASE), taken, arrived)
            return True
    return False


@compiled
def _refuse(context: int, operation: int, peer: int, claimed: int, expected: int) -> int:
    set_failure(error_address(context), FAILURE_PROTOCOL, peer, get(operation, block.PHASE), claimed, expected)
    return -STATUS_PROTOCOL


@compiled
def _read_board(context: int, operation: int, state: int, via: int, board: int) -> int:
    """Take over where the forwarder's rows land, once, checked. Returns STATUS_OK or minus a status."""
    rows, slot_rows, stride = get(board, ROWS), get(board, SLOT_ROWS), get(board, SLOT_STRIDE)
    row, meta = get(board, ROW_OFFSET), get(board, META_OFFSET)
    start, end = get(operation, block.LANDING), get(operation, block.LANDING_END)
    most = slot_bytes(operation, rank_count(context)) // (
        get(operation, block.ROW_BYTES) + get(operation, block.META_BYTES)
    )
    if rows < 0 or rows > EVERYTHING:
        return _refuse(context, operation, via, rows, EVERYTHING)
    if slot_rows < 1 or slot_rows > most or stride < 0 or stride > end - start:
        return _refuse(context, operation, via, slot_rows, most)
    row_end = row + stride + slot_rows * get(operation, block.ROW_BYTES)
    meta_end = meta + stride + slot_rows * get(operation, block.META_BYTES)
    # rule: where a progress board says that rows lie is checked
    if row < start or row > end or row_end > end:
        return _refuse(context, operation, via, row, start)
    if meta < start or meta > end or meta_end > end:
        return _refuse(context, operation, via, meta, start)
    put(state, block.VIEW_ROWS, rows)
    put(state, block.VIEW_ROW_OFFSET, row)
    put(state, block.VIEW_META_OFFSET, meta)
    put(state, block.VIEW_STRIDE, stride)
    put(state, block.VIEW_SLOT_ROWS, slot_rows)
    return STATUS_OK


@compiled
def take_passed(context: int, operation: int, peers: int, source: int) -> int:
    """Bring rows of the far rank ``source`` from its forwarder to the outputs. Returns MOVED, NOTHING or minus a
    status."""
    state = peers + 8 * block.PEER_WORDS * source
    if get(state, block.PASS_OVER) != 0:
        return NOTHING
    me, node = own_rank(context), node_of(operation, source)
    via = forwarder(operation, me, source)
    rows, taken = get(state, block.PASS_ROWS), get(state, block.PASSED)
    line = line_of(context, operation, via, node, me) + 8 * TAKEN
    if taken == rows:
        # Rows behind these are not read. Marks beyond what the source told of are found in the combine: by the
        # forwarder where they are its own; of another rank it waits for the row, and names that one when time is over.
        status = stamp_rows(context, operation, line, EVERYTHING)
        if status != STATUS_OK:
            return -status
        put(state, block.PASS_OVER, 1)
        return MOVED
    board = board_of(context, operation, via, node)
    word = load64(board + 8 * ARRIVED)
    # rule: what a forwarder's progress board said in an earlier operation means nothing
    if not is_current(operation, word):
        return NOTHING
    if get(state, block.VIEW_SLOT_ROWS) == 0:
        status = _read_board(context, operation, state, via, board)
        if status != STATUS_OK:
            return status
    arrived, scanned = word & EVERYTHING, get(state, block.SCANNED)
    # no more than its two slots hold: neither is granted again before this rank is done with it
    most = min(get(state, block.VIEW_ROWS), scanned + 2 * get(state, block.VIEW_SLOT_ROWS))
    if arrived > most:
        return _refuse(context, operation, via, arrived, most)
    if scanned >= arrived:
        if scanned == get(state, block.VIEW_ROWS):
            return _refuse(context, operation, source, taken, rows)
        return NOTHING
    row_bytes, meta_bytes = get(operation, block.ROW_BYTES), get(operation, block.META_BYTES)
    slot_rows, stride = get(state, block.VIEW_SLOT_ROWS), get(state, block.VIEW_STRIDE)
    window = peer_window(context, via)
    out, base, place = get(operation, block.OUT), get(state, block.RECV_FIRST), place_of(operation, me)
    marks, streamed = _mark_offset(operation), get(operation, block.STREAMED) != 0
    stop = min(arrived, scanned + _STEP_ROWS)
    while scanned < stop and taken < rows:
        grant = scanned // slot_rows
        within, slot = scanned - grant * slot_rows, window + (grant & 1) * stride
        meta = slot + get(state, block.VIEW_META_OFFSET) + within * meta_bytes
        if is_marked(meta + marks, place):
            row = slot + get(state, block.VIEW_ROW_OFFSET) + within * row_bytes
            target = out + (base + taken) * row_bytes
            if streamed:
                stream(target, row, row_bytes)
            else:
                copy(target, row, row_bytes)
            if not unpack_passed_meta(operation, meta, base + taken, place):
                return _refuse(context, operation, source, scanned, rows)
            taken += 1
        scanned += 1
    if streamed:
        stream_fence()
    put(state, block.PASSED, taken)
    put(state, block.SCANNED, scanned)
    status = stamp_rows(context, operation, line, scanned)
    return MOVED if status == STATUS_OK else -status


@compiled
def keeps_waiting(context: int, operation: int, peers: int, source: int, progress: int) -> bool:
    """True while rows of the far rank ``source`` are missing; progress then names it, or a forwarder not so far yet."""
    state = peers + 8 * block.PEER_WORDS * source
    if get(state, block.PASS_OVER) != 0:
        return False
    me = own_rank(context)
    via = forwarder(operation, me, source)
    word = load64(board_of(context, operation, via, node_of(operation, source)) + 8 * ARRIVED)
    blamed = source if is_current(operation, word) else via
    note_progress(progress, blamed, get(operation, block.PHASE), get(state, block.PASSED), get(state, block.PASS_ROWS))
    return True
