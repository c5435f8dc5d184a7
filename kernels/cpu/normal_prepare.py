"""What an operation's blocks need before rows move: who has how many rows for whom, and where they land.

The host knows the handle and the heap; everything per rank is worked out here, because a loop over ranks costs
nanoseconds here and microseconds in the interpreter.
"""

from __future__ import annotations

from ...native.atomics import peek, peek32, poke, zero
from ...native.jit import compiled
from ...protocol.message import NormalNotify
from ..blocks import normal as block
from .context import channel_count, is_masked, own_rank, peer_window, rank_count
from .normal_nodes import is_far, lane_of, meta_room, slot_bytes, take_rails
from .words import get, put

__all__ = ["measure", "place", "prepare"]

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
        operation, peers: addresses of the blocks of ``normal_block``; the words of the host are filled in.
        route: address of what ROUTE of an operation holds; a first dispatch does not know yet what it will receive.
    """
    ranks, me = rank_count(context), own_rank(context)
    kind = get(operation, block.KIND)
    given, taken, lists = route, route + 8 * ranks, route + 16 * ranks
    put(operation, block.ROUTE, route)
    zero(peers, 8 * block.PEER_WORDS * ranks)
    masked = away = given_before = taken_before = 0
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
            away += get(state, block.SEND_ROWS)
        given_before += sent
        taken_before += came
    own = peers + 8 * block.PEER_WORDS * me
    if kind == _COMBINE:
        # own rows are summed where they are
        put(own, block.ARRIVED_ROWS, get(own, block.RECV_ROWS))
    else:
        put(own, block.RECV_ROWS, get(own, block.SEND_ROWS))
    put(operation, block.MASKED, masked)
    put(operation, block.SENT_AWAY, away)
    put(operation, block.RECV_TOTAL, taken_before)
    if kind == _DISPATCH:
        local = get(operation, block.LOCAL_EXPERTS)
        counts, told = get(operation, block.EXPERT_COUNTS), get(operation, block.EXPERT_COUNTS_SENT) + 4 * local * me
        for expert in range(local):
            poke(counts + 8 * expert, peek32(told + 4 * expert))


@compiled
def measure(context: int, operation: int, peers: int) -> None:
    """After all ranks have spoken: whether they agree, and how much room their rows need."""
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
        if get(state, block.TOLD) != 0 and get(state, block.TOLD_SHAPE) != get(operation, block.SHAPE):
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
        operation, peers: addresses of the blocks of ``normal_block``; RECV_FIRST of a first dispatch is set here, and
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
        # rows to be handed on pass through the rounds: a bounded area that stays in the caches
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
