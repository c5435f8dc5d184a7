"""Queues behind the ring: where commands wait whose destination cannot take them now.

Each stream has a FIFO of nodes from one pool, so a blocked destination does not block the ring that it shares with
others. The pool holds a quota for every destination, hence it is never the bottleneck: only a destination whose own
quota is full holds up the ring. Streams with a queue stand in one round-robin list.
All links are "index + 1", because zeroed memory must mean "none".
"""

from __future__ import annotations

from ..native.atomics import peek, poke, store64
from ..native.jit import compiled
from .state import (
    NODE_BYTES,
    NODE_HIGH,
    NODE_LOW,
    NODE_NEXT,
    PEER_QUEUED,
    POOL,
    POOL_FREE,
    POOL_TOP,
    QUEUE_HEAD,
    QUEUE_TAIL,
    QUEUED,
    QUOTA,
    READY,
    READY_COUNT,
    READY_HEAD,
    READY_NEXT,
    READY_TAIL,
    SEND,
    SEND_ENTRY,
)

__all__ = ["drop_first", "enqueue", "first_node", "mark_ready", "pop_ready", "release_queue"]


@compiled
def enqueue(state: int, entry: int, record: int, index: int, low: int, high: int) -> bool:
    """Append a command to the queue of stream ``index``; False when the destination's quota is full."""
    queued = peek(entry + PEER_QUEUED)
    if queued >= peek(state + QUOTA):
        return False
    node = peek(state + POOL_FREE)
    if node:
        poke(state + POOL_FREE, peek(peek(state + POOL) + (node - 1) * NODE_BYTES + NODE_NEXT))
    else:
        node = peek(state + POOL_TOP) + 1
        poke(state + POOL_TOP, node)
    address = peek(state + POOL) + (node - 1) * NODE_BYTES
    poke(address + NODE_LOW, low)
    poke(address + NODE_HIGH, high)
    poke(address + NODE_NEXT, 0)
    tail = peek(record + QUEUE_TAIL)
    if tail:
        poke(peek(state + POOL) + (tail - 1) * NODE_BYTES + NODE_NEXT, node)
    else:
        poke(record + QUEUE_HEAD, node)
    poke(record + QUEUE_TAIL, node)
    poke(entry + PEER_QUEUED, queued + 1)
    poke(state + QUEUED, peek(state + QUEUED) + 1)
    mark_ready(state, record, index)
    return True


@compiled
def first_node(state: int, record: int) -> int:
    """Address of the first queued command, 0 when there is none."""
    node = peek(record + QUEUE_HEAD)
    return peek(state + POOL) + (node - 1) * NODE_BYTES if node else 0


@compiled
def drop_first(state: int, entry: int, record: int) -> None:
    """Free the first queued command."""
    node = peek(record + QUEUE_HEAD)
    address = peek(state + POOL) + (node - 1) * NODE_BYTES
    following = peek(address + NODE_NEXT)
    poke(record + QUEUE_HEAD, following)
    if following == 0:
        poke(record + QUEUE_TAIL, 0)
    poke(address + NODE_NEXT, peek(state + POOL_FREE))
    poke(state + POOL_FREE, node)
    poke(entry + PEER_QUEUED, peek(entry + PEER_QUEUED) - 1)
    # release: drain() must find the write in LOAD once it is gone from here
    store64(state + QUEUED, peek(state + QUEUED) - 1)


@compiled
def release_queue(state: int, entry: int, record: int) -> None:
    """Free all queued commands of a stream. It stays in the round-robin list until its turn finds it empty."""
    while peek(record + QUEUE_HEAD):
        drop_first(state, entry, record)


@compiled
def mark_ready(state: int, record: int, index: int) -> None:
    """Put stream ``index`` at the end of the round-robin list unless it is there."""
    if peek(record + READY):
        return
    poke(record + READY, 1)
    poke(record + READY_NEXT, 0)
    tail = peek(state + READY_TAIL)
    if tail:
        poke(peek(state + SEND) + (tail - 1) * SEND_ENTRY + READY_NEXT, index + 1)
    else:
        poke(state + READY_HEAD, index + 1)
    poke(state + READY_TAIL, index + 1)
    poke(state + READY_COUNT, peek(state + READY_COUNT) + 1)


@compiled
def pop_ready(state: int) -> int:
    """Take the first stream index out of the round-robin list, -1 when it is empty."""
    head = peek(state + READY_HEAD)
    if head == 0:
        return -1
    record = peek(state + SEND) + (head - 1) * SEND_ENTRY
    following = peek(record + READY_NEXT)
    poke(state + READY_HEAD, following)
    if following == 0:
        poke(state + READY_TAIL, 0)
    poke(record + READY, 0)
    poke(state + READY_COUNT, peek(state + READY_COUNT) - 1)
    return head - 1
