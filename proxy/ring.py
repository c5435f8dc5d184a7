"""From the ring to the transport: take commands, check them, post them or queue them; and serve the queues."""

from __future__ import annotations

from ..native.atomics import load64, peek, poke, store64
from ..native.jit import compiled, inlined
from ..protocol.command import KIND_WRITE, MAX_WRITE_BYTES
from ..protocol.ring import SLOTS
from ..protocol.ring import TAIL as RING_TAIL
from ..protocol.streams import CREDIT, STREAMS
from .codec import (
    COMMAND_KIND_MASK,
    COMMAND_KIND_SHIFT,
    COMMAND_LAST_SHIFT,
    COMMAND_RANK_MASK,
    COMMAND_RANK_SHIFT,
    COMMAND_STREAM_MASK,
    COMMAND_STREAM_SHIFT,
    LENGTH_MASK,
    LENGTH_SHIFT,
    LENGTH_STEP,
    OFFSET_MASK,
    OFFSET_SHIFT,
    OFFSET_STEP,
    UNIT_SHIFT,
)
from .faults import (
    FAULT_COMMAND_KIND,
    FAULT_COMMAND_PEER,
    FAULT_COMMAND_RANGE,
    FAULT_COMMAND_STREAM,
    refuse_command,
)
from .flow import admitted, claim_room, post, post_apart
from .queues import drop_first, enqueue, first_node, mark_ready, pop_ready
from .state import (
    ABSENT,
    C_COMMANDS,
    C_DISCARDED,
    C_QUEUED,
    C_RING_BLOCKED,
    COMPLETED,
    COUNTERS,
    DIE_AFTER,
    ENQUEUED,
    NODE_HIGH,
    NODE_LOW,
    OWNED,
    PEER_ENTRY,
    PEER_STATE,
    PEER_WAITER,
    PEERS,
    QUANTUM,
    QUEUE_HEAD,
    RANKS,
    READY_COUNT,
    RING,
    RING_MASK,
    RING_SHIFT,
    SEND,
    SEND_ENTRY,
    TAIL,
    UP,
    WAITING,
    WINDOW,
    WINDOW_BYTES,
)
from .transport.base import ACCEPTED

__all__ = ["DEAD", "send_queued", "take_commands"]

#: Commands taken per iteration. The tail is published once per batch: producers wait for room, not for single slots.
BATCH = 64
#: Streams served per iteration, and writes per stream and turn: fair among streams, bounded for everybody else.
TURNS = 128
WRITES_PER_TURN = 16

#: Returned by :func:`take_commands` when the injected fault strikes.
DEAD = -1


@inlined
def _fault_of(state: int, low: int, high: int) -> int:
    """What is wrong with a command, a FAULT_COMMAND_*; 0 = nothing."""
    peer = (high >> COMMAND_RANK_SHIFT) & COMMAND_RANK_MASK
    stream = (high >> COMMAND_STREAM_SHIFT) & COMMAND_STREAM_MASK
    nbytes = ((low >> LENGTH_SHIFT) & LENGTH_MASK) << UNIT_SHIFT
    limit = peek(state + WINDOW_BYTES) - nbytes
    fault = 0
    if (high >> COMMAND_KIND_SHIFT) & COMMAND_KIND_MASK != KIND_WRITE:
        fault = FAULT_COMMAND_KIND
    elif peer >= peek(state + RANKS) or peek(peek(state + PEERS) + peer * PEER_ENTRY + PEER_STATE) == ABSENT:
        fault = FAULT_COMMAND_PEER
    elif stream >= CREDIT or peek(peek(state + OWNED) + stream * 8) == 0:
        fault = FAULT_COMMAND_STREAM
    # rule: commands stay inside the window
    elif nbytes > MAX_WRITE_BYTES or _offset(low) > limit or _offset(high) > limit:
        fault = FAULT_COMMAND_RANGE
    return fault


@inlined
def _offset(word: int) -> int:
    """The offset in either word of a command: source in the low one, target in the high one. Bytes."""
    return ((word >> OFFSET_SHIFT) & OFFSET_MASK) << UNIT_SHIFT


@inlined
def _begin(state: int, low: int, high: int) -> bool:
    """Post or queue one checked command; False when its destination's quota is full and it must stay in the ring."""
    peer = (high >> COMMAND_RANK_SHIFT) & COMMAND_RANK_MASK
    stream = (high >> COMMAND_STREAM_SHIFT) & COMMAND_STREAM_MASK
    last = (high >> COMMAND_LAST_SHIFT) & 1
    nbytes = ((low >> LENGTH_SHIFT) & LENGTH_MASK) << UNIT_SHIFT
    index = peer * STREAMS + stream
    entry = peek(state + PEERS) + peer * PEER_ENTRY
    record = peek(state + SEND) + index * SEND_ENTRY
    # rule: commands do not overtake queued ones of their stream
    if (
        peek(record + QUEUE_HEAD) == 0
        and nbytes <= peek(state + QUANTUM)
        and peek(entry + PEER_STATE) == UP
        and admitted(state, entry, record, nbytes)
        and post(
            state,
            entry,
            record,
            peer,
            stream,
            peek(state + WINDOW) + _offset(low),
            _offset(high),
            nbytes,
            last,
        )
        == ACCEPTED
    ):
        poke(record + ENQUEUED, peek(record + ENQUEUED) + last)
        return True
    return _set_aside(state, entry, record, index, low, high, last)


@compiled
def _set_aside(state: int, entry: int, record: int, index: int, low: int, high: int, last: int) -> bool:
    """Queue a command that cannot go now, or discard it when its destination is lost; False when the quota is full."""
    counters = peek(state + COUNTERS)
    if peek(entry + PEER_STATE) == UP:
        # rule: a blocked destination does not block its ring
        if not enqueue(state, entry, record, index, low, high):
            return False
        poke(record + WAITING, peek(record + WAITING) + last)
        poke(record + ENQUEUED, peek(record + ENQUEUED) + last)
        poke(counters + C_QUEUED, peek(counters + C_QUEUED) + 1)
        return True
    poke(record + ENQUEUED, peek(record + ENQUEUED) + last)
    # Nobody shall wait for a slot whose message can never leave.
    store64(peek(state + COMPLETED) + index * 8, peek(record + ENQUEUED))
    poke(counters + C_DISCARDED, peek(counters + C_DISCARDED) + 1)
    return True


@compiled
def take_commands(state: int) -> int:
    """Take up to BATCH commands from the ring; returns how many, or DEAD when the injected fault strikes."""
    counters = peek(state + COUNTERS)
    commands = peek(counters + C_COMMANDS)
    limit = BATCH
    if peek(state + DIE_AFTER):
        if commands >= peek(state + DIE_AFTER):
            return DEAD
        limit = min(limit, peek(state + DIE_AFTER) - commands)
    ring = peek(state + RING)
    mask = peek(state + RING_MASK)
    shift = peek(state + RING_SHIFT)
    first = peek(state + TAIL)
    tail = first
    # rule: the proxy takes a bounded batch of commands
    while tail - first < limit:
        slot = ring + SLOTS + ((tail & mask) << 4)
        lap = ((tail >> shift) + 1) & 1
        low = load64(slot)
        high = load64(slot + 8)
        # Both lap bits stand for this lap only when both words are written, in whatever order they became visible.
        # rule: a command is taken when both of its words are written
        if low & 1 != lap or high & 1 != lap:
            break
        fault = _fault_of(state, low, high)
        if fault:
            refuse_command(state, fault, low, high, tail)
        elif not _begin(state, low, high):
            poke(counters + C_RING_BLOCKED, peek(counters + C_RING_BLOCKED) + 1)
            break
        tail += 1
    if tail != first:
        poke(state + TAIL, tail)
        poke(counters + C_COMMANDS, commands + tail - first)
        store64(ring + RING_TAIL, tail)
    return tail - first


@compiled
def _serve_stream(state: int, index: int) -> int:
    """One turn of a stream with queued commands: post up to WRITES_PER_TURN writes and about one quantum of bytes."""
    peer = index // STREAMS
    stream = index % STREAMS
    entry = peek(state + PEERS) + peer * PEER_ENTRY
    record = peek(state + SEND) + index * SEND_ENTRY
    quantum = peek(state + QUANTUM)
    posted = 0
    moved = 0
    if peek(entry + PEER_WAITER) == stream + 1:
        poke(entry + PEER_WAITER, 0)
    # rule: streams take turns
    while posted < WRITES_PER_TURN and moved < quantum:
        node = first_node(state, record)
        if node == 0:
            break
        low = peek(node + NODE_LOW)
        high = peek(node + NODE_HIGH)
        left = ((low >> LENGTH_SHIFT) & LENGTH_MASK) << UNIT_SHIFT
        nbytes = min(left, quantum)
        final = nbytes == left
        # rule: only the last piece of a split command ends the message
        last = (high >> COMMAND_LAST_SHIFT) & 1 if final else 0
        if not admitted(state, entry, record, nbytes):
            # a stream that has just posted stands aside for the next one that waits
            if posted == 0:
                claim_room(state, entry, record, index, nbytes)
            break
        local = peek(state + WINDOW) + _offset(low)
        if post_apart(state, entry, record, peer, stream, local, _offset(high), nbytes, last) != ACCEPTED:
            break
        if final:
            poke(record + WAITING, peek(record + WAITING) - last)
            drop_first(state, entry, record)
        else:
            # Both offsets move on and the length shrinks, inside the two words; _fault_of() has made sure that
            # no field can overflow into the next.
            units = nbytes >> UNIT_SHIFT
            poke(node + NODE_LOW, low + units * OFFSET_STEP - units * LENGTH_STEP)
            poke(node + NODE_HIGH, high + units * OFFSET_STEP)
        posted += 1
        moved += nbytes
    if peek(record + QUEUE_HEAD):
        mark_ready(state, record, index)
    return posted


@compiled
def send_queued(state: int) -> int:
    """Give up to TURNS streams with queued commands their turn, in order; returns the number of writes posted."""
    turns = min(peek(state + READY_COUNT), TURNS)
    posted = 0
    for _ in range(turns):
        posted += _serve_stream(state, pop_ready(state))
    return posted
