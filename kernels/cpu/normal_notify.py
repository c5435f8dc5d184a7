"""Opening a normal-mode operation: every rank tells every rank what it is about to do and how many rows it has.

Nothing else moves before the notifies of all peers have arrived, so ranks that were given different shapes part
without damage: unless all values are equal, *every* rank sees at least one that differs from its own, and every rank
refuses the operation. A notify also proves that its sender has finished the operation before: its writes are over,
repeated ones included, and the memory they went to may be granted again.
"""

from __future__ import annotations

from ...native.atomics import copy, peek, peek32, poke
from ...native.failure import set_failure
from ...native.jit import compiled
from ...protocol.context import (
    FAILURE_PROTOCOL,
    STATUS_OK,
    STATUS_PENDING,
    STATUS_PROTOCOL,
)
from ...protocol.message import HEADER_BYTES, MOST_ROWS, NormalNotify
from ...protocol.streams import NORMAL_NOTIFY
from ..blocks import normal as block
from .context import arrived_count, completed_count, error_address, own_rank, rank_count, window_address
from .normal_nodes import is_rail
from .normal_prepare import measure
from .normal_wire import message_address, publish
from .words import add, get, put
from .wait import note_progress, turn_over

__all__ = ["open_operation"]

_TAG = NormalNotify.TAG_VALUE
_DISPATCH = NormalNotify.OPERATION_DISPATCH
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
    put(state, block.TOLD, 1)
    put(state, block.TOLD_SHAPE, shape)
    put(state, block.TOLD_CODING, get(at, _AT_CODING))
    put(state, block.TOLD_ROW_BYTES, get(at, _AT_ROW_BYTES))
    put(state, block.TOLD_META_BYTES, get(at, _AT_META_BYTES))
    if tag != _TAG:
        set_failure(error, FAILURE_PROTOCOL, peer, NORMAL_NOTIFY, tag, _TAG)
        return STATUS_PROTOCOL
    if number != get(operation, block.NUMBER):
        set_failure(error, FAILURE_PROTOCOL, peer, NORMAL_NOTIFY, number, get(operation, block.NUMBER))
        return STATUS_PROTOCOL
    if shape != get(operation, block.SHAPE):
        return STATUS_OK  # the host refuses the operation when all have spoken
    if get(operation, block.KIND) != _DISPATCH:
        if rows != get(state, block.RECV_ROWS):
            set_failure(error, FAILURE_PROTOCOL, peer, NORMAL_NOTIFY, rows, get(state, block.RECV_ROWS))
            return STATUS_PROTOCOL
        if rail != get(state, block.RAIL_RECV):
            set_failure(error, FAILURE_PROTOCOL, peer, NORMAL_NOTIFY, rail, get(state, block.RAIL_RECV))
            return STATUS_PROTOCOL
        return STATUS_OK
    if rows < 0 or rows > MOST_ROWS:
        set_failure(error, FAILURE_PROTOCOL, peer, NORMAL_NOTIFY, rows, MOST_ROWS)
        return STATUS_PROTOCOL
    most_rail = MOST_ROWS if is_rail(operation, own_rank(context), peer) else 0
    if rail < 0 or rail > most_rail:
        set_failure(error, FAILURE_PROTOCOL, peer, NORMAL_NOTIFY, rail, most_rail)
        return STATUS_PROTOCOL
    put(state, block.RECV_ROWS, rows)
    put(state, block.RAIL_RECV, rail)
    counts = get(operation, block.EXPERT_COUNTS)
    most = rows * max(get(operation, block.TOPK), 1)
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
        operation, peers: addresses of the blocks of ``normal_block``.
        progress: address of the progress block, written when PENDING is returned.
        slice_end: CLOCK_MONOTONIC instant in ns at which to return PENDING; call again with the same blocks then.

    Returns:
        STATUS_OK (DIFFERENT then counts the peers that were given another shape), STATUS_PENDING, STATUS_POISONED or
        STATUS_PROTOCOL.
    """
    ranks, me = rank_count(context), own_rank(context)
    expected = get(operation, block.NOTICES) + 1
    turn = 0
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
            if get(state, block.TOLD) == 0:
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
            turn = 0
        if unsent < 0 and missing < 0:
            measure(context, operation, peers)
            return STATUS_OK
        status = turn_over(context, turn, slice_end)
        if status != STATUS_OK:
            # this rank's own proxy must move on before anything can be expected of the peer
            peer = unsent if unsent >= 0 else missing
            note_progress(progress, peer, NORMAL_NOTIFY, arrived_count(context, peer, NORMAL_NOTIFY), expected)
            return status
        turn += 1
