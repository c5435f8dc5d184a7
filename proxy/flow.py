"""Flow control and posting: when a write may go out, and the books that are kept while it is under way."""

from __future__ import annotations

from ..native.atomics import peek, poke
from ..native.calls import call8, monotonic_ns
from ..native.jit import compiled, inlined
from ..protocol.imm import SEQUENCE_WINDOW
from ..protocol.streams import CREDIT, STREAMS
from . import words
from .faults import FAULT_POST, FAULT_SENT_TWICE, blame_peer, blame_self
from .sequence import (
    PREFIX,
    REPEATED,
    SEQUENCE_MASK,
    immediate,
    note,
    ticket,
    ticket_bytes,
    ticket_last,
    ticket_peer,
    ticket_stream,
)
from .transport.base import ACCEPTED, BUSY

#: Besides ACCEPTED and BUSY: the transport refused the write for good, the peer has been dropped.
REFUSED = -1

#: One write at a time, of every 8th iteration, is timed: samples for the histogram at next to no cost.
_PROBE_MASK = 7


@inlined
def sequence_open(record: int) -> bool:
    """True when one more write of the stream may be outstanding.

    A number is free again once the receiver's prefix covers it (else the receiver could not tell it from the one 1,024
    before) *and* the write has completed locally (until then the network may repeat it, and a repeat that arrives
    2,048 numbers later would be taken for a new write).
    """
    # rule: outstanding writes need credits
    # rule: outstanding writes need local completion
    covered = min(peek(record + words.CREDITED), peek(record + words.DONE + PREFIX))
    return peek(record + words.NEXT) - covered < SEQUENCE_WINDOW


@compiled
def credit_open(record: int) -> bool:
    """True when one more credit may be posted: credits need none themselves, but local completion as any write."""
    return peek(record + words.NEXT) - peek(record + words.DONE + PREFIX) < SEQUENCE_WINDOW


@inlined
def capacity_open(state: int, entry: int, nbytes: int) -> bool:
    """True when a data write of ``nbytes`` fits the caps of this proxy and of the peer.

    One peer gets at most half of the writes, so that a slow one leaves room for the others. With nothing in flight to
    the peer one write always goes: caps smaller than a write, or caps used up by other peers, slow a peer down and
    never stop it.
    """
    peer_load = peek(entry + words.PEER_LOAD)
    # rule: one write to an idle peer is always admitted
    if peer_load == 0:
        return True
    load = peek(state + words.LOAD)
    # rule: bytes and writes in flight are capped
    return (
        load >> words.LOAD_SHIFT < peek(state + words.WRITE_CAP)
        and (peer_load >> words.LOAD_SHIFT) * 2 < peek(state + words.WRITE_CAP)
        and (load & words.LOAD_BYTES) + nbytes <= peek(state + words.BYTE_CAP)
        and (peer_load & words.LOAD_BYTES) + nbytes <= peek(state + words.PEER_BYTE_CAP)
    )


@inlined
def admitted(state: int, entry: int, record: int, nbytes: int) -> bool:
    """True when the next data write of a stream may be posted now."""
    # rule: room under the caps goes to the write that waits for it
    return (
        peek(entry + words.PEER_BUSY) != peek(state + words.STAMP)
        and peek(entry + words.PEER_WAITER) == 0
        and sequence_open(record)
        and capacity_open(state, entry, nbytes)
    )


@compiled
def claim_room(state: int, entry: int, record: int, index: int, nbytes: int) -> None:
    """Stream ``index`` waits for room under the caps: nothing else goes to the peer before its next time slice.

    Otherwise small writes to the same peer could take for ever the room that a large one waits for.
    """
    if peek(entry + words.PEER_WAITER) == 0 and sequence_open(record) and not capacity_open(state, entry, nbytes):
        poke(entry + words.PEER_WAITER, index % STREAMS + 1)


@inlined
def post(
    state: int,
    entry: int,
    record: int,
    peer: int,
    stream: int,
    local: int,
    target: int,
    nbytes: int,
    last: int,
) -> int:
    """Post the next write of a stream and enter it in the books. ACCEPTED, BUSY or REFUSED."""
    endpoint = peek(entry + words.PEER_ENDPOINT)
    sequence = peek(record + words.NEXT)
    word = ticket(peer, stream, sequence, last, nbytes)
    status = call8(
        peek(endpoint + words.EP_POST),
        peek(endpoint + words.EP_CONTEXT),
        peer,
        stream,
        local,
        target,
        nbytes,
        immediate(peek(state + words.RANK), stream, sequence, last),
        word,
    )
    if status != ACCEPTED:
        return _refused(state, entry, peer, stream, status, nbytes)
    poke(endpoint + words.EP_DIRTY, 1)
    poke(record + words.NEXT, sequence + 1)
    if stream >= CREDIT:
        poke(entry + words.PEER_CREDITS, peek(entry + words.PEER_CREDITS) + 1)
        poke(state + words.CREDITS, peek(state + words.CREDITS) + 1)
        return ACCEPTED
    load = words.LOAD_WRITE + nbytes
    poke(entry + words.PEER_LOAD, peek(entry + words.PEER_LOAD) + load)
    poke(state + words.LOAD, peek(state + words.LOAD) + load)
    words.add(state, words.C_BYTES_SENT, nbytes)
    if peek(state + words.PROBE) == 0 and peek(state + words.STAMP) & _PROBE_MASK == 0:
        poke(state + words.PROBE, word + 1)
        poke(state + words.PROBE_AT, monotonic_ns())
    return ACCEPTED


@compiled
def post_apart(
    state: int,
    entry: int,
    record: int,
    peer: int,
    stream: int,
    local: int,
    target: int,
    nbytes: int,
    last: int,
) -> int:
    """:func:`post` as a function of its own, for callers that are not the hot path: it is long."""
    return post(state, entry, record, peer, stream, local, target, nbytes, last)


@compiled
def _refused(state: int, entry: int, peer: int, stream: int, status: int, nbytes: int) -> int:
    """The transport did not accept a write: try again in a later iteration, or drop the peer."""
    if status == BUSY:
        poke(entry + words.PEER_BUSY, peek(state + words.STAMP))
        words.count(state, words.C_RETRIES)
        return BUSY
    blame_peer(state, peer, FAULT_POST, stream, status, nbytes)
    return REFUSED


@compiled
def _measure(state: int, stream: int) -> None:
    """The timed write completed: enter its latency in the histogram of its stream."""
    poke(state + words.PROBE, 0)
    latency = monotonic_ns() - peek(state + words.PROBE_AT)
    bucket = 0
    while latency > 1 and bucket < words.LATENCY_BUCKETS - 1:
        latency >>= 1
        bucket += 1
    address = peek(state + words.LATENCY) + (stream * words.LATENCY_BUCKETS + bucket) * 8
    poke(address, peek(address) + 1)


@inlined
def complete(state: int, word: int) -> None:
    """SENT: the write of ticket ``word`` completed locally."""
    peer = ticket_peer(word)
    stream = ticket_stream(word)
    entry = words.peer_entry(state, peer)
    index = peer * STREAMS + stream
    record = words.send_record(state, index)
    known = peer < peek(state + words.RANKS)
    if known:
        # rule: a completion of a peer that was dropped changes nothing
        if peek(entry + words.PEER_STATE) != words.UP:
            return
        done = peek(record + words.DONE + PREFIX)
        known = (word - done) & SEQUENCE_MASK < peek(record + words.NEXT) - done
    if not known:
        blame_self(state, FAULT_SENT_TWICE, peer, stream, word)
        return
    # The low bits of a ticket are the sequence number, and note() looks at nothing else of it.
    # rule: a completion counts once
    if note(record + words.DONE, peek(state + words.COMPLETED) + index * 8, word, ticket_last(word)) == REPEATED:
        blame_self(state, FAULT_SENT_TWICE, peer, stream, word)
        return
    if stream >= CREDIT:
        poke(entry + words.PEER_CREDITS, peek(entry + words.PEER_CREDITS) - 1)
        poke(state + words.CREDITS, peek(state + words.CREDITS) - 1)
        return
    load = words.LOAD_WRITE + ticket_bytes(word)
    poke(entry + words.PEER_LOAD, peek(entry + words.PEER_LOAD) - load)
    poke(state + words.LOAD, peek(state + words.LOAD) - load)
    if word + 1 == peek(state + words.PROBE):
        _measure(state, stream)
