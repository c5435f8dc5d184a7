"""Queues behind the ring: where commands wait whose destination cannot take them now.

Each stream has a FIFO of nodes from one pool, so a blocked destination does not block the ring that it shares with
others. The pool holds a quota for every destination, hence it is never the bottleneck: only a destination whose own
quota is full holds up the ring. Streams with a queue stand in one round-robin list.
All links are "index + 1", because zeroed memory must mean "none".
"""

from __future__ import annotations

from ..native.atomics import peek, poke, store64
from ..native.jit import compiled
from . import words


@compiled
def enqueue(state: int, entry: int, record: int, index: int, low: int, high: int) -> bool:
    """Append a command to the queue of stream ``index``; False when the destination's quota is full."""
    queued = peek(entry + words.PEER_QUEUED)
    if queued >= peek(state + words.QUOTA):
        return False
    node = peek(state + words.POOL_FREE)
    if node:
        poke(state + words.POOL_FREE, peek(peek(state + words.POOL) + (node - 1) * words.NODE_BYTES + words.NODE_NEXT))
    else:
        node = peek(state + words.POOL_TOP) + 1
        poke(state + words.POOL_TOP, node)
    address = peek(state + words.POOL) + (node - 1) * words.NODE_BYTES
    poke(address + words.NODE_LOW, low)
    poke(address + words.NODE_HIGH, high)
    poke(address + words.NODE_NEXT, 0)
    tail = peek(record + words.QUEUE_TAIL)
    if tail:
        poke(peek(state + words.POOL) + (tail - 1) * words.NODE_BYTES + words.NODE_NEXT, node)
    else:
        poke(record + words.QUEUE_HEAD, node)
    poke(record + words.QUEUE_TAIL, node)
    poke(entry + words.PEER_QUEUED, queued + 1)
    poke(state + words.QUEUED, peek(state + words.QUEUED) + 1)
    mark_ready(state, record, index)
    return True


@compiled
def first_node(state: int, record: int) -> int:
    """Address of the first queued command, 0 when there is none."""
    node = peek(record + words.QUEUE_HEAD)
    return peek(state + words.POOL) + (node - 1) * words.NODE_BYTES if node else 0


@compiled
def drop_first(state: int, entry: int, record: int) -> None:
    """Free the first queued command."""
    node = peek(record + words.QUEUE_HEAD)
    address = peek(state + words.POOL) + (node - 1) * words.NODE_BYTES
    following = peek(address + words.NODE_NEXT)
    poke(record + words.QUEUE_HEAD, following)
    if following == 0:
        poke(record + words.QUEUE_TAIL, 0)
    poke(address + words.NODE_NEXT, peek(state + words.POOL_FREE))
    poke(state + words.POOL_FREE, node)
    poke(entry + words.PEER_QUEUED, peek(entry + words.PEER_QUEUED) - 1)
    # release: drain() must find the write in LOAD once it is gone from here
    store64(state + words.QUEUED, peek(state + words.QUEUED) - 1)


@compiled
def release_queue(state: int, entry: int, record: int) -> None:
    """Discard all queued commands of a stream. It stays in the round-robin list until its time slice finds it empty."""
    while peek(record + words.QUEUE_HEAD):
        drop_first(state, entry, record)
        words.count(state, words.C_DISCARDED)


@compiled
def mark_ready(state: int, record: int, index: int) -> None:
    """Put stream ``index`` at the end of the round-robin list unless it is there."""
    if peek(record + words.READY):
        return
    poke(record + words.READY, 1)
    poke(record + words.READY_NEXT, 0)
    tail = peek(state + words.READY_TAIL)
    if tail:
        poke(words.send_record(state, tail - 1) + words.READY_NEXT, index + 1)
    else:
        poke(state + words.READY_HEAD, index + 1)
    poke(state + words.READY_TAIL, index + 1)
    poke(state + words.READY_COUNT, peek(state + words.READY_COUNT) + 1)


@compiled
def pop_ready(state: int) -> int:
    """Take the first stream index out of the round-robin list, -1 when it is empty."""
    head = peek(state + words.READY_HEAD)
    if head == 0:
        return -1
    record = words.send_record(state, head - 1)
    following = peek(record + words.READY_NEXT)
    poke(state + words.READY_HEAD, following)
    if following == 0:
        poke(state + words.READY_TAIL, 0)
    poke(record + words.READY, 0)
    poke(state + words.READY_COUNT, peek(state + words.READY_COUNT) - 1)
    return head - 1
