"""Arrivals: from immediates in any order, repeated or forged, to counts that kernels trust; and the credits owed."""

from __future__ import annotations

from ..native.atomics import peek, poke
from ..native.jit import compiled, inlined
from ..protocol.streams import CREDIT, CREDIT_WRITES, STREAMS
from . import words
from .faults import FAULT_CREDIT, FAULT_IMMEDIATE, FAULT_SEQUENCE, FAULT_SOURCE, FAULT_STREAM_OWNER, blame_source
from .flow import credit_open, post_apart
from .sequence import IN_ORDER, PREFIX, REPEATED, SEQUENCE_MASK, imm_last, imm_source, imm_stream, note
from .transport.base import ACCEPTED


@inlined
def arrive(state: int, proven: int, imm: int, nbytes: int) -> None:
    """ARRIVED: a write with immediate ``imm`` from rank ``proven`` (-1: the immediate must be believed) is visible.

    Nothing of an immediate is used before it was checked: an impossible one is blamed on the peer, and the peer is
    dropped.
    """
    source = imm_source(imm)
    stream = imm_stream(imm)
    fault = 0
    if imm >> 32:
        fault = FAULT_IMMEDIATE
    # rule: the source must be proven
    elif (
        source >= peek(state + words.RANKS) or source == peek(state + words.RANK) or (proven >= 0 and proven != source)
    ):
        fault = FAULT_SOURCE
    # rule: nothing is believed from a peer that was dropped
    elif words.peer_state(state, source) != words.UP:
        # Lost, forgotten or never connected: nothing of it counts.
        return
    # rule: a stream has one owner
    elif peek(peek(state + words.OWNED) + stream * 8) == 0:
        fault = FAULT_STREAM_OWNER
    else:
        fault = _note_arrival(state, source, stream, imm, nbytes)
    if fault:
        # a write that is out of its place is compared with the place that comes next
        record = words.receive_record(state, source * STREAMS + stream)
        expected = peek(record + words.SEEN + PREFIX) & SEQUENCE_MASK if fault == FAULT_SEQUENCE else source
        blame_source(state, proven, source, fault, stream, imm, expected)


@inlined
def _note_arrival(state: int, source: int, stream: int, imm: int, nbytes: int) -> int:
    """Enter a checked immediate in the window of its stream; a fault code when it cannot be right."""
    index = source * STREAMS + stream
    record = words.receive_record(state, index)
    outcome = note(record + words.SEEN, peek(state + words.ARRIVED) + index * 8, imm, imm_last(imm))
    if outcome != IN_ORDER:
        # rule: a number out of sequence is a fault where order is kept
        if peek(words.peer_entry(state, source) + words.PEER_EXACT):
            # One connection carries the stream: a number that is not the next one is forged, or writes were lost.
            return FAULT_SEQUENCE
        if outcome == REPEATED:
            words.count(state, words.C_DUPLICATES)
            return 0
        words.count(state, words.C_HELD_BACK)
    prefix = peek(record + words.SEEN + PREFIX)
    if stream >= CREDIT:
        send = words.send_record(state, index ^ CREDIT)
        covered = prefix * CREDIT_WRITES
        # rule: credits are bounded by what was sent
        if covered > peek(send + words.NEXT):
            # Believing it would let this rank run past the receiver's window.
            return FAULT_CREDIT
        poke(send + words.CREDITED, covered)
        return 0
    words.add(state, words.C_BYTES_RECEIVED, nbytes)
    if prefix - peek(record + words.GRANTED) >= CREDIT_WRITES and peek(record + words.DUE) == 0:
        _owe(state, record, index)
    return 0


@compiled
def _owe(state: int, record: int, index: int) -> None:
    """Append stream ``index`` to the list of those that owe their sender a credit."""
    poke(record + words.DUE, 1)
    poke(record + words.DUE_NEXT, 0)
    tail = peek(state + words.DUE_TAIL)
    if tail:
        poke(words.receive_record(state, tail - 1) + words.DUE_NEXT, index + 1)
    else:
        poke(state + words.DUE_HEAD, index + 1)
    poke(state + words.DUE_TAIL, index + 1)


@compiled
def grant_credits(state: int) -> int:
    """Post the credits that are owed; returns how many. They pass by rings, queues and byte caps.

    A sender can be stopped by missing credits while the ring and the caps of its receiver are full of data that waits
    for credits of the other direction: were credits to queue behind data, both could stop for ever.
    """
    index = peek(state + words.DUE_HEAD) - 1
    posted = 0
    # Those that cannot be posted now are appended again, behind the last one of this round.
    end = peek(state + words.DUE_TAIL) - 1
    while index >= 0:
        record = words.receive_record(state, index)
        following = peek(record + words.DUE_NEXT) - 1
        poke(state + words.DUE_HEAD, following + 1)
        if following < 0:
            poke(state + words.DUE_TAIL, 0)
        poke(record + words.DUE, 0)
        peer = index // STREAMS
        entry = words.peer_entry(state, peer)
        stream = (index % STREAMS) | CREDIT
        send = words.send_record(state, index | CREDIT)
        while (
            peek(entry + words.PEER_STATE) == words.UP
            and peek(record + words.SEEN + PREFIX) - peek(record + words.GRANTED) >= CREDIT_WRITES
        ):
            # rule: credits pass by the caps
            if peek(entry + words.PEER_BUSY) == peek(state + words.STAMP) or not credit_open(send):
                _owe(state, record, index)
                break
            if post_apart(state, entry, send, peer, stream, peek(state + words.WINDOW), 0, 0, 1) != ACCEPTED:
                if peek(entry + words.PEER_STATE) == words.UP:
                    _owe(state, record, index)
                break
            poke(record + words.GRANTED, peek(record + words.GRANTED) + CREDIT_WRITES)
            posted += 1
        if index == end:
            break
        index = following
    return posted
