"""Opening a normal-mode operation: every rank tells every rank what it is about to do and how many rows it has.

Nothing else moves before the notifies of all peers have arrived, so ranks that were given different shapes part
without damage: unless all values are equal, *every* rank sees at least one that differs from its own, and every rank
refuses the operation. A notify also proves that its sender has finished the operation before: its writes are over,
repeated ones included, and the memory they went to may be granted again.

The host knows the handle and the heap; who has how many rows for whom, and where they land, is worked out here, because
a loop over ranks costs nanoseconds here and microseconds in the interpreter.
"""

from __future__ import annotations

from ...native.atomics import copy, peek, peek32, poke, zero
from ...native.failure import set_failure
from ...native.jit import compiled
from ...protocol.context import FAILURE_PROTOCOL, STATUS_OK, STATUS_PENDING, STATUS_PROTOCOL
from ...protocol.layout import MAX_EXPERTS
from ...protocol.message import HEADER_BYTES, MOST_TOKENS, NormalNotify
from ...protocol.streams import NORMAL_NOTIFY
from ..blocks import normal as block
from .context import (
    arrived_count,
    channel_count,
    completed_count,
    error_address,
    is_masked,
    own_rank,
    peer_window,
    rank_count,
    window_address,
)
from .normal_nodes import is_far, is_rail, lane_of, meta_room, node_of, slot_bytes
from .publish import message_address, publish
from .wait import end_spin, note_progress
from .words import add, get, put

_DISPATCH = NormalNotify.OPERATION_DISPATCH
_COMBINE = NormalNotify.OPERATION_COMBINE


@compiled
def _present(context: int, peer: int, rows: int) -> int:
    return 0 if is_masked(context, peer) else rows


@compiled
def prepare(context: int, operation: int, peers: int, route: int) -> None:
    """Fill the blocks of the peers for a new operation, from what the dispatch of its handle sent and received.

    Args:
        context: address of the kernel context block.
        operation, peers: addresses of the blocks of ``blocks.normal``; the words of the host are filled in.
        route: address of what ROUTE of an operation holds; a first dispatch does not know yet what it will receive.
    """
    ranks, me = rank_count(context), own_rank(context)
    kind = get(operation, block.KIND)
    given, taken, lists = route, route + 8 * ranks, route + 16 * ranks
    put(operation, block.ROUTE, route)
    zero(peers, 8 * block.PEER_WORDS * ranks)
    masked = remote = given_before = taken_before = 0
    for rank in range(ranks):
        state = peers + 8 * block.PEER_WORDS * rank
        sent = peek(given + 8 * rank)
        came = peek(taken + 8 * rank) if kind != _DISPATCH else 0
        tokens = lists + 4 * given_before
        if is_masked(context, rank):
            put(state, block.ABSENT, 1)
            masked += 1
        # a combine sends back what was received, and what was sent comes back
        if kind == _COMBINE:
            put(state, block.SEND_ROWS, _present(context, rank, came))
            put(state, block.SEND_FIRST, taken_before)
            put(state, block.RECV_ROWS, _present(context, rank, sent))
            put(state, block.RECV_LIST, tokens)
        else:
            put(state, block.SEND_ROWS, _present(context, rank, sent))
            put(state, block.SEND_LIST, tokens)
            put(state, block.RECV_ROWS, _present(context, rank, came))
            # a cached dispatch keeps the places of its handle, also where a rank has been masked since
            put(state, block.RECV_FIRST, taken_before)
        if rank != me:
            remote += get(state, block.SEND_ROWS)
        given_before += sent
        taken_before += came
    own = peers + 8 * block.PEER_WORDS * me
    if kind == _COMBINE:
        # own rows are summed where they are
        put(own, block.ARRIVED_ROWS, get(own, block.RECV_ROWS))
    else:
        put(own, block.RECV_ROWS, get(own, block.SEND_ROWS))
    put(operation, block.MASKED, masked)
    put(operation, block.REMOTE_ROWS, remote)
    put(operation, block.RECV_TOTAL, taken_before)
    if kind == _DISPATCH:
        local = get(operation, block.LOCAL_EXPERTS)
        counts, told = get(operation, block.EXPERT_COUNTS), get(operation, block.EXPERT_COUNTS_SENT) + 4 * local * me
        for expert in range(local):
            poke(counts + 8 * expert, peek32(told + 4 * expert))


@compiled
def prepare_nodes(context: int, operation: int, peers: int, given: int, taken: int, lists: int) -> None:
    """After ``prepare``: what goes over the rails, from what the dispatch of the handle sent and received on them.

    Args:
        context: address of the kernel context block.
        operation, peers: addresses of the blocks of ``blocks.normal``.
        given: address of int64 [nodes], rows that the dispatch sends to each node.
        taken: address of int64 [nodes], rows that this rank forwards from each node; 0 when that is not known yet.
        lists: address of int32 [nodes, TOKENS], tokens for each node.
    """
    me, combine = own_rank(context), get(operation, block.KIND) == _COMBINE
    for rank in range(rank_count(context)):
        if not is_rail(operation, me, rank):
            continue
        state, node = peers + 8 * block.PEER_WORDS * rank, node_of(operation, rank)
        sent = peek(given + 8 * node)
        came = peek(taken + 8 * node) if taken != 0 else 0
        put(state, block.RAIL_SEND, came if combine else sent)
        put(state, block.RAIL_RECV, sent if combine else came)
        put(state, block.RAIL_LIST, lists + 4 * node * get(operation, block.TOKENS))
    zero(get(operation, block.CURSORS), 8 * rank_count(context))


@compiled
def take_rails(context: int, operation: int, peers: int) -> None:
    """When all notifies are here: from here on the rows of far ranks are those on the rails."""
    me, combine = own_rank(context), get(operation, block.KIND) == _COMBINE
    meta = get(operation, block.META_BYTES)
    remote = room = relayed = 0
    for rank in range(rank_count(context)):
        state = peers + 8 * block.PEER_WORDS * rank
        if is_far(operation, me, rank):
            passing = get(state, block.SEND_ROWS) if combine else get(state, block.RECV_ROWS)
            sends, takes = get(state, block.RAIL_SEND), get(state, block.RAIL_RECV)
            put(state, block.PASS_ROWS, passing)
            put(state, block.SEND_ROWS, sends)
            put(state, block.RECV_ROWS, takes)
            put(state, block.RECV_LIST if combine else block.SEND_LIST, get(state, block.RAIL_LIST))
            put(state, block.RELAY_FIRST, relayed)
            relayed += sends if combine else takes
            remote += takes if combine else passing
            if combine:
                room += meta_room(takes * meta)
        elif rank != me:
            remote += get(state, block.RECV_ROWS)
            room += meta_room(get(state, block.RECV_ROWS) * meta)
    put(operation, block.RECV_REMOTE, remote)
    put(operation, block.META_ROOM, room)


@compiled
def measure(context: int, operation: int, peers: int) -> None:
    """After all notifies are here: whether they agree, and how much room their rows need."""
    ranks, me = rank_count(context), own_rank(context)
    dispatch, meta = get(operation, block.KIND) == _DISPATCH, get(operation, block.META_BYTES)
    total = remote = room = different = 0
    for rank in range(ranks):
        state = peers + 8 * block.PEER_WORDS * rank
        rows = get(state, block.RECV_ROWS)
        total += rows
        if rank != me:
            remote += rows
            room += meta_room(rows * meta)
        if get(state, block.PEER_NOTIFIED) != 0 and get(state, block.PEER_SHAPE) != get(operation, block.SHAPE):
            different += 1
    put(operation, block.DIFFERENT, different)
    put(operation, block.RECV_REMOTE, remote)
    put(operation, block.META_ROOM, room)
    if dispatch:
        put(operation, block.RECV_TOTAL, total)
    if get(operation, block.NODE_RANKS) != 0:
        take_rails(context, operation, peers)


@compiled
def place(context: int, operation: int, peers: int) -> None:
    """Say where the rows of every peer land: in the ranges that the host has set, or in rounds.

    Args:
        context: address of the kernel context block.
        operation, peers: addresses of the blocks of ``blocks.normal``; RECV_FIRST of a first dispatch is set here, and
            in its route what it receives.
    """
    ranks, me, channels = rank_count(context), own_rank(context), channel_count(context)
    kind, row_range, meta_range = (
        get(operation, block.KIND),
        get(operation, block.ROW_RANGE),
        get(operation, block.META_RANGE),
    )
    row, meta = get(operation, block.ROW_BYTES), get(operation, block.META_BYTES)
    rounds = get(operation, block.LANDING)
    slot = slot_bytes(operation, ranks)
    most = get(operation, block.CHUNK_BYTES) // (row + meta)
    least = max(get(operation, block.LEAST_CHUNK_BYTES) // row, 1)
    # Rows that fit the last cache, which the ranks of a host share, are read there next. Of more, the first have left
    # before the last are written. Other ranks write about as much as this one receives.
    written = get(operation, block.RECV_REMOTE if kind == _COMBINE else block.RECV_TOTAL) * row
    writers = 1
    for peer in range(ranks):
        if peer != me and peer_window(context, peer) != 0:
            writers += 1
    put(operation, block.STREAMED, 1 if writers * written > get(operation, block.STREAM_FROM) else 0)
    first = meta_at = 0
    for rank in range(ranks):
        state = peers + 8 * block.PEER_WORDS * rank
        rows = get(state, block.RECV_ROWS)
        if kind == _DISPATCH:
            put(state, block.RECV_FIRST, first)
            came = get(state, block.PASS_ROWS) if is_far(operation, me, rank) else rows
            poke(get(operation, block.ROUTE) + 8 * (ranks + rank), came)
            first += came
        if rank == me:
            rows = 0
        put(state, block.SLOT_ROWS, max(rows, 1))
        if rows == 0:
            continue
        chunk = min(max((rows + channels - 1) // channels, least), most)
        # rows to be forwarded pass through the rounds: a bounded area that stays in the caches
        handed_on = kind != _COMBINE and is_far(operation, me, rank)
        if row_range >= 0 and not handed_on:
            at = first if kind == _COMBINE else get(state, block.RECV_FIRST)
            put(state, block.ROW_LANDING, row_range + at * row)
            put(state, block.META_LANDING, meta_range + meta_at)
            meta_at += meta_room(rows * meta)
        else:
            chunk = min(chunk, slot // (row + meta))
            slot_rows = slot // (row + meta) // chunk * chunk
            landing = rounds + lane_of(operation, me, rank) * 2 * slot
            put(state, block.SLOT_ROWS, slot_rows)
            put(state, block.SLOT_STRIDE, slot)
            put(state, block.ROW_LANDING, landing)
            put(state, block.META_LANDING, landing + slot_rows * row)
        put(state, block.CHUNK_ROWS, chunk)
        if kind == _COMBINE:
            first += rows


_TAG = NormalNotify.TAG_VALUE
_AT_TAG, _AT_NUMBER, _AT_ROWS, _AT_CODING = (
    NormalNotify.TAG,
    NormalNotify.NUMBER,
    NormalNotify.ROWS,
    NormalNotify.CODING,
)
_AT_SHAPE, _AT_ROW_BYTES, _AT_META_BYTES, _AT_RAIL_ROWS = (
    NormalNotify.SHAPE,
    NormalNotify.ROW_BYTES,
    NormalNotify.META_BYTES,
    NormalNotify.RAIL_ROWS,
)


@compiled
def _send(context: int, operation: int, peers: int, peer: int) -> int:
    """Write and publish the notify to ``peer``. The peer has read the slot: it has opened the last operation since.

    STATUS_PENDING when the ring is full, or while a NIC may still repeat the slot's last write: operations that the
    ranks refused ended without waiting for it. The last message may be under way, it left from the other slot.
    """
    # rule: a notify slot is written again only when its last write completed
    if completed_count(context, peer, NORMAL_NOTIFY) < get(operation, block.NOTICES) - 1:
        return STATUS_PENDING
    me = own_rank(context)
    stride = get(operation, block.NOTIFY_STRIDE)
    source = get(operation, block.NOTIFY_SEND) + peer * stride
    target = get(operation, block.NOTIFY_RECV) + me * stride
    at = message_address(context, peer, source, target)
    put(at, _AT_TAG, _TAG)
    put(at, _AT_NUMBER, get(operation, block.NUMBER))
    put(at, _AT_ROWS, get(peers + 8 * block.PEER_WORDS * peer, block.SEND_ROWS))
    put(at, _AT_CODING, get(operation, block.CODING))
    put(at, _AT_SHAPE, get(operation, block.SHAPE))
    put(at, _AT_ROW_BYTES, get(operation, block.ROW_BYTES))
    put(at, _AT_META_BYTES, get(operation, block.META_BYTES))
    put(at, _AT_RAIL_ROWS, get(peers + 8 * block.PEER_WORDS * peer, block.RAIL_SEND))
    nbytes = HEADER_BYTES
    if get(operation, block.KIND) == _DISPATCH:
        counts = 4 * get(operation, block.LOCAL_EXPERTS)
        copy(at + HEADER_BYTES, get(operation, block.EXPERT_COUNTS_SENT) + peer * counts, counts)
        nbytes += (counts + 15) // 16 * 16
    return publish(context, peer, NORMAL_NOTIFY, source, target, nbytes, get(operation, block.NOTICES) + 1)


@compiled
def _take(context: int, operation: int, peers: int, peer: int) -> int:
    """Read and check the notify of ``peer``, which has arrived."""
    state = peers + 8 * block.PEER_WORDS * peer
    error = error_address(context)
    at = window_address(context) + get(operation, block.NOTIFY_RECV) + peer * get(operation, block.NOTIFY_STRIDE)
    tag, number, rows = get(at, _AT_TAG), get(at, _AT_NUMBER), get(at, _AT_ROWS)
    shape, rail = get(at, _AT_SHAPE), get(at, _AT_RAIL_ROWS)
    put(state, block.PEER_NOTIFIED, 1)
    put(state, block.PEER_SHAPE, shape)
    put(state, block.PEER_CODING, get(at, _AT_CODING))
    put(state, block.PEER_ROW_BYTES, get(at, _AT_ROW_BYTES))
    put(state, block.PEER_META_BYTES, get(at, _AT_META_BYTES))
    if tag != _TAG:
        set_failure(error, FAILURE_PROTOCOL, peer, NORMAL_NOTIFY, tag, _TAG)
        return STATUS_PROTOCOL
    if number != get(operation, block.NUMBER):
        set_failure(error, FAILURE_PROTOCOL, peer, NORMAL_NOTIFY, number, get(operation, block.NUMBER))
        return STATUS_PROTOCOL
    if shape != get(operation, block.SHAPE):
        return STATUS_OK  # the host refuses the operation when all notifies are here
    if get(operation, block.KIND) != _DISPATCH:
        if rows != get(state, block.RECV_ROWS):
            set_failure(error, FAILURE_PROTOCOL, peer, NORMAL_NOTIFY, rows, get(state, block.RECV_ROWS))
            return STATUS_PROTOCOL
        if rail != get(state, block.RAIL_RECV):
            set_failure(error, FAILURE_PROTOCOL, peer, NORMAL_NOTIFY, rail, get(state, block.RAIL_RECV))
            return STATUS_PROTOCOL
        return STATUS_OK
    if rows < 0 or rows > MOST_TOKENS:
        set_failure(error, FAILURE_PROTOCOL, peer, NORMAL_NOTIFY, rows, MOST_TOKENS)
        return STATUS_PROTOCOL
    most_rail = MOST_TOKENS if is_rail(operation, own_rank(context), peer) else 0
    if rail < 0 or rail > most_rail:
        set_failure(error, FAILURE_PROTOCOL, peer, NORMAL_NOTIFY, rail, most_rail)
        return STATUS_PROTOCOL
    put(state, block.RECV_ROWS, rows)
    put(state, block.RAIL_RECV, rail)
    counts = get(operation, block.EXPERT_COUNTS)
    # who gives no ids may have counted tokens that name one expert again and again
    most = rows * (get(operation, block.TOPK) or MAX_EXPERTS)
    for expert in range(get(operation, block.LOCAL_EXPERTS)):
        count = peek32(at + HEADER_BYTES + 4 * expert)
        if count > most:
            set_failure(error, FAILURE_PROTOCOL, peer, NORMAL_NOTIFY, count, most)
            return STATUS_PROTOCOL
        poke(counts + 8 * expert, peek(counts + 8 * expert) + count)
    return STATUS_OK


@compiled
def open_operation(context: int, operation: int, peers: int, progress: int, slice_end: int) -> int:
    """Tell all peers, then wait for what all peers tell.

    Args:
        context: address of the kernel context block.
        operation, peers: addresses of the blocks of ``blocks.normal``.
        progress: address of the progress block, written when PENDING is returned.
        slice_end: CLOCK_MONOTONIC instant in ns at which to return PENDING; call again with the same blocks then.

    Returns:
        STATUS_OK (DIFFERENT then counts the peers that were given another shape), STATUS_PENDING, STATUS_POISONED or
        STATUS_PROTOCOL.
    """
    ranks, me = rank_count(context), own_rank(context)
    expected = get(operation, block.NOTICES) + 1
    spin = 0
    while True:
        unsent = missing = -1
        moved = False
        for step in range(1, ranks):
            peer = (me + step) % ranks
            state = peers + 8 * block.PEER_WORDS * peer
            if get(state, block.ABSENT) != 0:
                continue
            if get(state, block.NOTIFIED) == 0:
                status = _send(context, operation, peers, peer)
                if status == STATUS_OK:
                    put(state, block.NOTIFIED, 1)
                    moved = True
                elif status == STATUS_PENDING:
                    unsent = peer
                else:
                    return status
            if get(state, block.PEER_NOTIFIED) == 0:
                # rule: an operation opens only when every peer's notify has arrived
                if arrived_count(context, peer, NORMAL_NOTIFY) < expected:
                    missing = peer
                    continue
                status = _take(context, operation, peers, peer)
                if status != STATUS_OK:
                    return status
                moved = True
        if moved:
            add(operation, block.STEPS, 1)
            spin = 0
        if unsent < 0 and missing < 0:
            measure(context, operation, peers)
            return STATUS_OK
        status = end_spin(context, spin, slice_end)
        if status != STATUS_OK:
            # this rank's own proxy must move on before anything can be expected of the peer
            peer = unsent if unsent >= 0 else missing
            note_progress(progress, peer, NORMAL_NOTIFY, arrived_count(context, peer, NORMAL_NOTIFY), expected)
            return status
        spin += 1
