"""From the ring to the transport: take commands, check them, post them or queue them; and serve the queues."""

from __future__ import annotations

from ..native.atomics import load64, peek, poke, store64
from ..native.jit import compiled, inlined
from ..protocol.command import COMMAND_BYTES, HIGH, KIND_WRITE, LOW, MAX_WRITE_BYTES
from ..protocol.ring import CAPACITY, SLOTS
from ..protocol.ring import TAIL as RING_TAIL
from ..protocol.streams import CREDIT, HOST, STREAMS
from . import faults, words
from .flow import admitted, claim_room, post, post_apart
from .queues import drop_first, enqueue, first_node, mark_ready, pop_ready
from .sequence import UNIT_SHIFT
from .transport.base import ACCEPTED

# The bits of a command as plain integers: compiled code cannot call methods of a Word.
OFFSET_SHIFT = LOW["source"].shift
OFFSET_MASK = LOW["source"].mask
OFFSET_STEP = 1 << OFFSET_SHIFT
LENGTH_SHIFT = LOW["length"].shift
LENGTH_MASK = LOW["length"].mask
LENGTH_STEP = 1 << LENGTH_SHIFT
COMMAND_RANK_SHIFT, COMMAND_RANK_MASK = HIGH["rank"].shift, HIGH["rank"].mask
COMMAND_STREAM_SHIFT, COMMAND_STREAM_MASK = HIGH["stream"].shift, HIGH["stream"].mask
COMMAND_KIND_SHIFT, COMMAND_KIND_MASK = HIGH["kind"].shift, HIGH["kind"].mask
COMMAND_LAST_SHIFT = HIGH["last"].shift

assert HIGH["target"].shift == OFFSET_SHIFT
assert HIGH["target"].mask == OFFSET_MASK

#: Commands taken per iteration. The tail is published once per batch: producers wait for room, not for single slots.
BATCH = 64
#: Streams served per iteration, and writes of a time slice: fair among streams, bounded for everybody else.
SLICES = 128
WRITES_PER_SLICE = 16

#: Returned by :func:`take_commands` when the injected fault strikes.
DEAD = -1


@inlined
def _fault_of(state: int, low: int, high: int) -> int:
    """What is wrong with a command, a faults.FAULT_COMMAND_*; 0 = nothing."""
    peer = (high >> COMMAND_RANK_SHIFT) & COMMAND_RANK_MASK
    stream = (high >> COMMAND_STREAM_SHIFT) & COMMAND_STREAM_MASK
    nbytes = ((low >> LENGTH_SHIFT) & LENGTH_MASK) << UNIT_SHIFT
    limit = peek(state + words.WINDOW_BYTES) - nbytes
    fault = 0
    if (high >> COMMAND_KIND_SHIFT) & COMMAND_KIND_MASK != KIND_WRITE:
        fault = faults.FAULT_COMMAND_KIND
    elif peer >= peek(state + words.RANKS) or words.peer_state(state, peer) == words.ABSENT:
        fault = faults.FAULT_COMMAND_PEER
    elif stream >= CREDIT or peek(peek(state + words.OWNED) + stream * 8) == 0:
        fault = faults.FAULT_COMMAND_STREAM
    # rule: commands stay inside the window
    elif nbytes > MAX_WRITE_BYTES or _offset(low) > limit or _offset(high) > limit:
        fault = faults.FAULT_COMMAND_RANGE
    return fault


@inlined
def _offset(word: int) -> int:
    """The offset in either word of a command: source in the low one, target in the high one. Bytes."""
    return ((word >> OFFSET_SHIFT) & OFFSET_MASK) << UNIT_SHIFT


@compiled
def _refuse(state: int, fault: int, low: int, high: int, index: int) -> None:
    """Command ``index`` of the ring is wrong and is dropped: nothing of it is posted, no number is used for it.

    Kernels check what they enqueue, so this is the second line. On HOST nobody waits for it: its author is
    told once, and everything goes on. Anywhere else it was part of an operation, and a later message must not be taken
    for the one that is missing: this rank drops the destination, and the operation ends by name on both sides. A
    command without a possible destination leaves open which operation it belonged to: then all of this rank's end.
    """
    peer = (high >> COMMAND_RANK_SHIFT) & COMMAND_RANK_MASK
    stream = (high >> COMMAND_STREAM_SHIFT) & COMMAND_STREAM_MASK
    words.count(state, words.C_REFUSED)
    # rule: a wrong command of an operation ends the pair
    if stream == HOST:
        if peek(state + words.REFUSED) == load64(state + words.NAMED):
            poke(state + words.REFUSED_LOW, low)
            poke(state + words.REFUSED_HIGH, high)
            poke(state + words.REFUSED_INDEX, index)
        store64(state + words.REFUSED, peek(state + words.REFUSED) + 1)
        # rule: a wrong command outside operations ends nothing
        return
    peer_state = words.ABSENT
    if peer < peek(state + words.RANKS):
        peer_state = words.peer_state(state, peer)
    if peer_state == words.UP:
        faults.blame_peer(state, peer, fault, stream, low, high)
    elif peer_state == words.ABSENT:
        faults.blame_self(state, fault, peer, stream, low)


@inlined
def _begin(state: int, low: int, high: int) -> bool:
    """Post or queue one checked command; False when its destination's quota is full and it must stay in the ring."""
    peer = (high >> COMMAND_RANK_SHIFT) & COMMAND_RANK_MASK
    stream = (high >> COMMAND_STREAM_SHIFT) & COMMAND_STREAM_MASK
    last = (high >> COMMAND_LAST_SHIFT) & 1
    nbytes = ((low >> LENGTH_SHIFT) & LENGTH_MASK) << UNIT_SHIFT
    index = peer * STREAMS + stream
    entry = words.peer_entry(state, peer)
    record = words.send_record(state, index)
    # rule: commands do not overtake queued ones of their stream
    if (
        peek(record + words.QUEUE_HEAD) == 0
        and nbytes <= peek(state + words.QUANTUM)
        and peek(entry + words.PEER_STATE) == words.UP
        and admitted(state, entry, record, nbytes)
        and post(
            state,
            entry,
            record,
            peer,
            stream,
            peek(state + words.WINDOW) + _offset(low),
            _offset(high),
            nbytes,
            last,
        )
        == ACCEPTED
    ):
        poke(record + words.ENQUEUED, peek(record + words.ENQUEUED) + last)
        return True
    return _set_aside(state, entry, record, index, low, high, last)


@compiled
def _set_aside(state: int, entry: int, record: int, index: int, low: int, high: int, last: int) -> bool:
    """Queue a command that cannot go now, or discard it when its destination is lost; False when the quota is full."""
    if peek(entry + words.PEER_STATE) == words.UP:
        # rule: a blocked destination does not block its ring
        if not enqueue(state, entry, record, index, low, high):
            return False
        poke(record + words.WAITING, peek(record + words.WAITING) + last)
        poke(record + words.ENQUEUED, peek(record + words.ENQUEUED) + last)
        words.count(state, words.C_QUEUED)
        return True
    poke(record + words.WAITING, peek(record + words.WAITING) + last)
    poke(record + words.ENQUEUED, peek(record + words.ENQUEUED) + last)
    # Nobody shall wait for a slot whose message can never leave.
    faults.give_back(state, entry, record, index)
    words.count(state, words.C_DISCARDED)
    return True


@compiled
def commands_in(ring: int, most: int) -> int:
    """Commands that wait in a ring of any proxy, counted up to ``most``: who takes them may go on meanwhile.

    Told by the slots, as for the one who takes them. ``head`` tells what CPU kernels have reserved; kernels of a device
    have a head of their own.
    """
    capacity, tail = peek(ring + CAPACITY), load64(ring + RING_TAIL)
    count = 0
    while count < min(most, capacity):
        index = tail + count
        slot = ring + SLOTS + (index % capacity) * COMMAND_BYTES
        lap = ((index // capacity) + 1) & 1
        if load64(slot) & 1 != lap or load64(slot + 8) & 1 != lap:
            break
        count += 1
    return count


@compiled
def take_commands(state: int) -> int:
    """Take up to BATCH commands from the ring; returns how many, or DEAD when the injected fault strikes."""
    counters = peek(state + words.COUNTERS)
    commands = peek(counters + words.C_COMMANDS)
    limit = BATCH
    if peek(state + words.DIE_AFTER):
        if commands >= peek(state + words.DIE_AFTER):
            return DEAD
        limit = min(limit, peek(state + words.DIE_AFTER) - commands)
    ring = peek(state + words.RING)
    mask = peek(state + words.RING_MASK)
    shift = peek(state + words.RING_SHIFT)
    first = peek(state + words.TAIL)
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
            _refuse(state, fault, low, high, tail)
        elif not _begin(state, low, high):
            words.count(state, words.C_RING_BLOCKED)
            break
        tail += 1
    if tail != first:
        poke(state + words.TAIL, tail)
        poke(counters + words.C_COMMANDS, commands + tail - first)
        store64(ring + RING_TAIL, tail)
    return tail - first


@compiled
def _serve_stream(state: int, index: int) -> int:
    """One time slice of a stream with queued commands: at most WRITES_PER_SLICE writes, about one quantum of bytes."""
    peer = index // STREAMS
    stream = index % STREAMS
    entry = words.peer_entry(state, peer)
    record = words.send_record(state, index)
    quantum = peek(state + words.QUANTUM)
    posted = 0
    moved = 0
    if peek(entry + words.PEER_WAITER) == stream + 1:
        poke(entry + words.PEER_WAITER, 0)
    # rule: a stream gets time slices
    while posted < WRITES_PER_SLICE and moved < quantum:
        node = first_node(state, record)
        if node == 0:
            break
        low = peek(node + words.NODE_LOW)
        high = peek(node + words.NODE_HIGH)
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
        local = peek(state + words.WINDOW) + _offset(low)
        if post_apart(state, entry, record, peer, stream, local, _offset(high), nbytes, last) != ACCEPTED:
            break
        if final:
            poke(record + words.WAITING, peek(record + words.WAITING) - last)
            drop_first(state, entry, record)
        else:
            # Both offsets move on and the length shrinks, inside the two words; _fault_of() has made sure that
            # no field can overflow into the next.
            units = nbytes >> UNIT_SHIFT
            poke(node + words.NODE_LOW, low + units * OFFSET_STEP - units * LENGTH_STEP)
            poke(node + words.NODE_HIGH, high + units * OFFSET_STEP)
        posted += 1
        moved += nbytes
    if peek(record + words.QUEUE_HEAD):
        mark_ready(state, record, index)
    return posted


@compiled
def send_queued(state: int) -> int:
    """Give up to SLICES streams with queued commands a time slice, in order; returns the number of writes posted."""
    ready = peek(state + words.READY_COUNT)
    slices = min(ready, SLICES)
    retries = peek(peek(state + words.COUNTERS) + words.C_RETRIES)
    posted = 0
    for _ in range(slices):
        posted += _serve_stream(state, pop_ready(state))
    # What is refused keeps the others of its peer waiting until the next iteration, which begins with another one: they
    # may go over other NICs. Where not all were served it does so anyway.
    if ready == slices and peek(peek(state + words.COUNTERS) + words.C_RETRIES) != retries:
        index = pop_ready(state)
        if index >= 0:
            mark_ready(state, words.send_record(state, index), index)
    return posted
