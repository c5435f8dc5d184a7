"""The row exchange between nodes: a row crosses once to each node, and comes back once, summed.

One loop per rank, as in ``normal_exchange`` and of its steps. Near peers write each other as they always do. Rows of
far ranks travel between rail peers under the same grants and chunks, and inside the node through boards and lines, each
chunk as soon as it is there: a rank never waits for one thing while it could do another.
"""

from __future__ import annotations

from ...native.jit import compiled
from ...protocol.context import STATUS_OK
from ...protocol.message import NormalNotify
from ..blocks import normal as block
from .context import own_rank, rank_count
from .normal_exchange import own_step, serve, waits_for
from .normal_forward import keeps_waiting, lags_behind, show_arrivals, take_passed
from .normal_gather import keeps_rows, lacks_rows, lay_out, send_sums
from .normal_nodes import is_far, is_rail
from .normal_receive import give_grant, note_arrivals
from .normal_reduce import reduce_ready
from .normal_send import say_over, send_chunk, take_grant
from .words import MOVED, NOTHING, add, get
from .wait import turn_over

__all__ = ["exchange_nodes"]

_COMBINE = NormalNotify.OPERATION_COMBINE


@compiled
def _serve_rail(context: int, counts: int, operation: int, peers: int, peer: int, combine: bool) -> int:
    """One turn of a rail peer, both directions. Returns MOVED, NOTHING or minus a status."""
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
    """One turn of a far rank. Returns MOVED, NOTHING or minus a status."""
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
def _waits(context: int, counts: int, operation: int, peers: int, peer: int, combine: bool, progress: int) -> bool:
    """True when something of, or for, ``peer`` is still missing; the progress block then says what, and of whom."""
    me = own_rank(context)
    if not is_far(operation, me, peer):
        return waits_for(context, counts, operation, peers, peer, combine, progress)
    rail = is_rail(operation, me, peer)
    if combine:
        if rail and lacks_rows(context, operation, peers, peer, progress):
            return True
        if waits_for(context, counts, operation, peers, peer, combine, progress):
            return True
        return keeps_rows(context, operation, peers, peer, progress)
    if rail and lags_behind(context, operation, peers, peer, progress):
        return True
    if waits_for(context, counts, operation, peers, peer, combine, progress):
        return True
    return keeps_waiting(context, operation, peers, peer, progress)


@compiled
def exchange_nodes(context: int, counts: int, operation: int, peers: int, progress: int, slice_end: int) -> int:
    """``normal_exchange.exchange`` for an operation with NODE_RANKS: same arguments, same statuses."""
    ranks, me = rank_count(context), own_rank(context)
    combine = get(operation, block.KIND) == _COMBINE
    turn = 0
    while True:
        moved = NOTHING
        for step in range(1, ranks):
            peer = (me + step) % ranks
            if is_far(operation, me, peer):
                result = _serve_far(context, counts, operation, peers, peer, combine)
            else:
                result = serve(context, counts, operation, peers, peer, combine)
            if result < 0:
                return -result
            moved |= result
        moved |= reduce_ready(context, operation, peers) if combine else own_step(context, operation, peers)
        if moved == MOVED:
            add(operation, block.STEPS, 1)
            turn = 0
        else:
            missing = False
            for step in range(1, ranks):
                if _waits(context, counts, operation, peers, (me + step) % ranks, combine, progress):
                    missing = True
                    break
            if not missing:
                return STATUS_OK
            turn += 1
        status = turn_over(context, turn, slice_end)
        if status != STATUS_OK:
            return status
