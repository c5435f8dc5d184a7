"""The row exchange: one loop per rank that sends what is granted, takes what has arrived and grants what is free.

All peers take turns, one chunk at a time, so that a slow one never holds the others, and no rank waits for anything a
peer does only in a later operation. The loop ends when every row is sent and its write is over, every row is received
and consumed, and (dispatch in place) every peer has said that its writes are over.
"""

from __future__ import annotations

from ...native.jit import compiled
from ...protocol.context import STATUS_OK
from ...protocol.message import NormalNotify
from ...protocol.streams import NORMAL_GRANT, NORMAL_NOTIFY
from ..blocks import normal as block
from .context import arrived_count, completed_count, own_rank, rank_count
from .normal_receive import give_grant, next_message, note_arrivals, unpack
from .normal_reduce import reduce_ready
from .normal_rows import copy_own
from .normal_send import chunks_over, say_over, send_chunk, sent_on, take_grant
from .words import MOVED, NOTHING, add, get, put
from .wait import note_progress, turn_over

__all__ = ["exchange", "own_step", "serve", "waits_for"]

_COMBINE = NormalNotify.OPERATION_COMBINE
#: Own rows copied in one step when nothing could be sent.
_OWN_ROWS = 64


@compiled
def serve(context: int, counts: int, operation: int, peers: int, peer: int, combine: bool) -> int:
    """One turn of a peer, both directions. Returns MOVED, NOTHING or minus a status."""
    moved = give_grant(context, counts, operation, peers, peer)
    if moved < 0:
        return moved
    step = take_grant(context, counts, operation, peers, peer)
    if step < 0:
        return step
    moved |= step
    step = send_chunk(context, counts, operation, peers, peer)
    if step < 0:
        return step
    moved |= step
    moved |= note_arrivals(context, counts, operation, peers, peer)
    if not combine:
        step = unpack(context, operation, peers, peer)
        if step < 0:
            return step
        moved |= step
        step = say_over(context, counts, operation, peers, peer)
        if step < 0:
            return step
        moved |= step
    return moved


@compiled
def own_step(context: int, operation: int, peers: int) -> int:
    """Copy some of a dispatch's rows from this rank to itself. Returns MOVED or NOTHING."""
    me = own_rank(context)
    state = peers + 8 * block.PEER_WORDS * me
    done, rows = get(state, block.SENT), get(state, block.SEND_ROWS)
    if done == rows:
        return NOTHING
    part = min(_OWN_ROWS, rows - done)
    copy_own(context, operation, state, done, part)
    put(state, block.SENT, done + part)
    return MOVED


@compiled
def waits_for(context: int, counts: int, operation: int, peers: int, peer: int, combine: bool, progress: int) -> bool:
    """True when something of ``peer`` is still missing; the progress block then says what."""
    state = peers + 8 * block.PEER_WORDS * peer
    life = counts + 8 * block.COUNT_WORDS * peer
    if get(state, block.ARRIVED_ROWS) < get(state, block.RECV_ROWS):
        stream, count = next_message(context, counts, operation, peer)
        note_progress(progress, peer, stream, arrived_count(context, peer, stream), count)
        return True
    if get(state, block.SENT) < get(state, block.SEND_ROWS) and get(state, block.GRANT_LEFT) == 0:
        count = get(life, block.GRANTS_TAKEN) + 1
        arrived = arrived_count(context, peer, NORMAL_GRANT)
        if arrived < count:
            note_progress(progress, peer, NORMAL_GRANT, arrived, count)
            return True
    stream = chunks_over(context, counts, operation, peer)
    if stream >= 0:
        count = sent_on(context, counts, operation, peer, stream)
        note_progress(progress, peer, stream, completed_count(context, peer, stream), count)
        return True
    if get(state, block.SENT) < get(state, block.SEND_ROWS):
        note_progress(progress, peer, get(operation, block.PHASE), get(state, block.SENT), get(state, block.SEND_ROWS))
        return True
    count = get(life, block.GRANTS_SENT)
    if completed_count(context, peer, NORMAL_GRANT) < count:
        note_progress(progress, peer, NORMAL_GRANT, completed_count(context, peer, NORMAL_GRANT), count)
        return True
    count = get(operation, block.NOTICES) + (1 if combine else 2)
    if completed_count(context, peer, NORMAL_NOTIFY) < count or (not combine and get(state, block.OVER) == 0):
        note_progress(progress, peer, NORMAL_NOTIFY, completed_count(context, peer, NORMAL_NOTIFY), count)
        return True
    # rows that landed in place belong to the caller from here on: nobody may still be writing them
    # rule: rows in place are handed out only when their writes are over
    if (
        get(operation, block.IN_PLACE) != 0
        and get(state, block.RECV_ROWS) > 0
        and arrived_count(context, peer, NORMAL_NOTIFY) < count
    ):
        note_progress(progress, peer, NORMAL_NOTIFY, arrived_count(context, peer, NORMAL_NOTIFY), count)
        return True
    return False


@compiled
def exchange(context: int, counts: int, operation: int, peers: int, progress: int, slice_end: int) -> int:
    """Exchange the rows of an operation that ``normal_notify.open_operation`` has opened on all ranks.

    Args:
        context: address of the kernel context block.
        counts, operation, peers: addresses of the blocks of ``normal_block``.
        progress: address of the progress block, written when PENDING is returned.
        slice_end: CLOCK_MONOTONIC instant in ns at which to return PENDING; call again with the same blocks then.

    Returns:
        STATUS_OK, STATUS_PENDING, STATUS_POISONED or STATUS_PROTOCOL.
    """
    ranks, me = rank_count(context), own_rank(context)
    combine = get(operation, block.KIND) == _COMBINE
    turn = 0
    while True:
        moved = NOTHING
        for step in range(1, ranks):
            peer = (me + step) % ranks
            if get(peers + 8 * block.PEER_WORDS * peer, block.ABSENT) == 0:
                result = serve(context, counts, operation, peers, peer, combine)
                if result < 0:
                    return -result
                moved |= result
        # own work fills the time in which peers write, grant and poll
        own = reduce_ready(context, operation, peers) if combine else own_step(context, operation, peers)
        moved |= own
        if moved == NOTHING:
            missing = False
            for step in range(1, ranks):
                peer = (me + step) % ranks
                if get(peers + 8 * block.PEER_WORDS * peer, block.ABSENT) == 0 and waits_for(
                    context, counts, operation, peers, peer, combine, progress
                ):
                    missing = True
                    break
            if not missing:
                return STATUS_OK
            turn += 1
        else:
            add(operation, block.STEPS, 1)
            turn = 0
        status = turn_over(context, turn, slice_end)
        if status != STATUS_OK:
            return status
