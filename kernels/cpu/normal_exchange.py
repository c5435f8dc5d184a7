"""The row exchange: one loop per rank that sends what is granted, takes what has arrived and grants what is free.

A step serves every peer, a chunk of each, so that a slow one never holds the others, and no rank waits for anything a
peer does only in a later operation. The loop ends when every row is sent and its write is over, every row is received
and consumed, and (dispatch in place) every peer has said that its writes are over.

Between nodes a row crosses once to each node, and comes back once, summed. Near peers write each other as they always
do. Rows of far ranks travel between rail peers under the same grants and chunks, and inside the node through progress
boards and lines, each chunk as soon as it is there: a rank never waits for one thing while it could do another.
"""

from __future__ import annotations

from ...native.jit import compiled
from ...protocol.context import STATUS_OK
from ...protocol.message import NormalNotify
from ...protocol.streams import NORMAL_GRANT, NORMAL_NOTIFY
from ..blocks import normal as block
from .context import arrived_count, completed_count, own_rank, rank_count
from .normal_forward import keeps_waiting, lags_behind, show_arrivals, take_passed
from .normal_gather import keeps_rows, lacks_rows, lay_out, send_sums
from .normal_nodes import is_far, is_rail
from .normal_receive import give_grant, next_message, note_arrivals, reduce_ready, unpack
from .normal_rows import copy_own
from .normal_send import chunks_over, say_over, send_chunk, sent_on, take_grant
from .wait import end_spin, note_progress
from .words import MOVED, NOTHING, add, get, put

_COMBINE = NormalNotify.OPERATION_COMBINE
#: Own rows copied in one step when nothing could be sent.
_OWN_ROWS = 64


@compiled
def _serve(context: int, counts: int, operation: int, peers: int, peer: int, combine: bool) -> int:
    """One step of a peer, both directions. Returns MOVED, NOTHING or minus a status."""
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
def _own_step(context: int, operation: int, peers: int) -> int:
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
def _waits_for(context: int, counts: int, operation: int, peers: int, peer: int, combine: bool, progress: int) -> bool:
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
    """Exchange the rows of an operation that ``normal_open.open_operation`` has opened on all ranks.

    Args:
        context: address of the kernel context block.
        counts, operation, peers: addresses of the blocks of ``blocks.normal``.
        progress: address of the progress block, written when PENDING is returned.
        slice_end: CLOCK_MONOTONIC instant in ns at which to return PENDING; call again with the same blocks then.

    Returns:
        STATUS_OK, STATUS_PENDING, STATUS_POISONED or STATUS_PROTOCOL.
    """
    ranks, me = rank_count(context), own_rank(context)
    combine = get(operation, block.KIND) == _COMBINE
    spin = 0
    while True:
        moved = NOTHING
        for step in range(1, ranks):
            peer = (me + step) % ranks
            if get(peers + 8 * block.PEER_WORDS * peer, block.ABSENT) == 0:
                result = _serve(context, counts, operation, peers, peer, combine)
                if result < 0:
                    return -result
                moved |= result
        # own work fills the time in which peers write, grant and poll
        own = reduce_ready(context, operation, peers) if combine else _own_step(context, operation, peers)
        moved |= own
        if moved == NOTHING:
            missing = False
            for step in range(1, ranks):
                peer = (me + step) % ranks
                if get(peers + 8 * block.PEER_WORDS * peer, block.ABSENT) == 0 and _waits_for(
                    context, counts, operation, peers, peer, combine, progress
                ):
                    missing = True
                    break
            if not missing:
                return STATUS_OK
            spin += 1
        else:
            add(operation, block.STEPS, 1)
            spin = 0
        status = end_spin(context, spin, slice_end)
        if status != STATUS_OK:
            return status


@compiled
def _serve_rail(context: int, counts: int, operation: int, peers: int, peer: int, combine: bool) -> int:
    """One step of a rail peer, both directions. Returns MOVED, NOTHING or minus a status."""
    moved = give_grant(context, counts, operation, peers, peer)
    if moved < 0:
        return moved
    step = take_grant(context, counts, operation, peers, peer)
    if step < 0:
        return step
    moved |= step
    if combine:
        step = send_sums(context, counts, operation, peers, peer)
    else:
        step = send_chunk(context, counts, operation, peers, peer)
    if step < 0:
        return step
    moved |= step
    moved |= note_arrivals(context, counts, operation, peers, peer)
    if not combine:
        step = show_arrivals(context, operation, peers, peer)
        if step < 0:
            return step
        moved |= step
    return moved


@compiled
def _serve_far(context: int, counts: int, operation: int, peers: int, peer: int, combine: bool) -> int:
    """One step of a far rank. Returns MOVED, NOTHING or minus a status."""
    moved = NOTHING
    if is_rail(operation, own_rank(context), peer):
        moved = _serve_rail(context, counts, operation, peers, peer, combine)
        if moved < 0:
            return moved
    if combine:
        step = lay_out(context, operation, peers, peer)
        return step if step < 0 else moved | step
    step = take_passed(context, operation, peers, peer)
    if step < 0:
        return step
    moved |= step
    step = say_over(context, counts, operation, peers, peer)
    return step if step < 0 else moved | step


@compiled
def _waits_for_rank(
    context: int, counts: int, operation: int, peers: int, peer: int, combine: bool, progress: int
) -> bool:
    """True when something of, or for, ``peer`` is still missing; the progress block then says what, and of whom."""
    me = own_rank(context)
    if not is_far(operation, me, peer):
        return _waits_for(context, counts, operation, peers, peer, combine, progress)
    rail = is_rail(operation, me, peer)
    if combine:
        if rail and lacks_rows(context, operation, peers, peer, progress):
            return True
        if _waits_for(context, counts, operation, peers, peer, combine, progress):
            return True
        return keeps_rows(context, operation, peers, peer, progress)
    if rail and lags_behind(context, operation, peers, peer, progress):
        return True
    if _waits_for(context, counts, operation, peers, peer, combine, progress):
        return True
    return keeps_waiting(context, operation, peers, peer, progress)


@compiled
def exchange_nodes(context: int, counts: int, operation: int, peers: int, progress: int, slice_end: int) -> int:
    """``normal_exchange.exchange`` for an operation with NODE_RANKS: same arguments, same statuses."""
    ranks, me = rank_count(context), own_rank(context)
    combine = get(operation, block.KIND) == _COMBINE
    spin = 0
    while True:
        moved = NOTHING
        for step in range(1, ranks):
            peer = (me + step) % ranks
            if is_far(operation, me, peer):
                result = _serve_far(context, counts, operation, peers, peer, combine)
            else:
                result = _serve(context, counts, operation, peers, peer, combine)
            if result < 0:
                return -result
            moved |= result
        moved |= reduce_ready(context, operation, peers) if combine else _own_step(context, operation, peers)
        if moved == MOVED:
            add(operation, block.STEPS, 1)
            spin = 0
        else:
            missing = False
            for step in range(1, ranks):
                if _waits_for_rank(context, counts, operation, peers, (me + step) % ranks, combine, progress):
                    missing = True
                    break
            if not missing:
                return STATUS_OK
            spin += 1
        status = end_spin(context, spin, slice_end)
        if status != STATUS_OK:
            return status
