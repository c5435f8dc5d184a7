"""Flow control and posting: when a write may go out, and the books that are kept while it is under way."""

from __future__ import annotations

from numba import int64

from ..native.atomics import peek, poke
from ..native.calls import call8, monotonic_ns
from ..native.jit import compiled, inlined
from ..protocol.imm import SEQUENCE_WINDOW
from ..protocol.streams import CREDIT, STREAMS
from .codec import (
    SEQUENCE_MASK,
    immediate,
    ticket,
    ticket_bytes,
    ticket_last,
    ticket_peer,
    ticket_stream,
)
from .faults import FAULT_POST, FAULT_SENT_TWICE, blame_peer, blame_self
from .sequence import PREFIX, REPEATED, note
from .state import (
    BYTE_CAP,
    C_BYTES_SENT,
    C_RETRIES,
    COMPLETED,
    COUNTERS,
    CREDITED,
    CREDITS,
    DONE,
    EP_CONTEXT,
    EP_DIRTY,
    EP_POST,
    LATENCY,
    LATENCY_BUCKETS,
    LOAD,
    LOAD_BYTES,
    LOAD_SHIFT,
    LOAD_WRITE,
    NEXT,
    PEER_BUSY,
    PEER_BYTE_CAP,
    PEER_CREDITS,
    PEER_ENDPOINT,
    PEER_ENTRY,
    PEER_LOAD,
    PEER_STATE,
    PEER_WAITER,
    PEERS,
    PROBE,
    PROBE_AT,
    RANK,
    RANKS,
    SEND,
    SEND_ENTRY,
    STAMP,
    UP,
    WRITE_CAP,
)
from .transport.base import ACCEPTED, BUSY

__all__ = ["REFUSED", "admitted", "claim_room", "complete", "credit_open", "post", "post_apart"]

#: Besides ACCEPTED and BUSY: the transport refused the write for good, the peer has been parted from.
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
    covered = min(peek(record + CREDITED), peek(record + DONE + PREFIX))
    return peek(record + NEXT) - covered < SEQUENCE_WINDOW


@compiled
def credit_open(record: int) -> bool:
    """True when one more credit may be posted: credits need none themselves, but local completion as any write."""
    return peek(record + NEXT) - peek(record + DONE + PREFIX) < SEQUENCE_WINDOW


@inlined
def capacity_open(state: int, entry: int, nbytes: int) -> bool:
    """True when a data write of ``nbytes`` fits the caps of this proxy and of the peer.

    One peer gets at most half of the writes, so that a slow one leaves room for the others. With nothing in flight to
    the peer one write always goes: caps smaller than a write, or caps used up by other peers, slow a peer down and
    never stop it.
    """
    peer_load = peek(entry + PEER_LOAD)
    # rule: one write to an idle peer is always admitted
    if peer_load == 0:
        return True
    load = peek(state + LOAD)
    # rule: bytes and writes in flight are capped
    return (
        load >> LOAD_SHIFT < peek(state + WRITE_CAP)
        and (peer_load >> LOAD_SHIFT) * 2 < peek(state + WRITE_CAP)
        and (load & LOAD_BYTES) + nbytes <= peek(state + BYTE_CAP)
        and (peer_load & LOAD_BYTES) + nbytes <= peek(state + PEER_BYTE_CAP)
    )


@inlined
def admitted(state: int, entry: int, record: int, nbytes: int) -> bool:
    """True when the next data write of a stream may be posted now."""
    # rule: room under the caps goes to the write that waits for it
    return (
        peek(entry + PEER_BUSY) != peek(state + STAMP)
        and peek(entry + PEER_WAITER) == 0
        and sequence_open(record)
        and capacity_open(state, entry, nbytes)
    )


@compiled
def claim_room(state: int, entry: int, record: int, index: int, nbytes: int) -> None:
    """Stream ``index`` waits for room under the caps: nothing else goes to the peer before its next turn.

    Otherwise small writes to the same peer could take for ever the room that a large one waits for.
    """
    if peek(entry + PEER_WAITER) == 0 and sequence_open(record) and not capacity_open(state, entry, nbytes):
        poke(entry + PEER_WAITER, index % STREAMS + 1)


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
    endpoint = peek(entry + PEER_ENDPOINT)
    sequence = peek(record + NEXT)
    word = ticket(peer, stream, sequence, last, nbytes)
    status = call8(
        peek(endpoint + EP_POST),
        peek(endpoint + EP_CONTEXT),
        peer,
        stream,
        local,
        target,
        nbytes,
        immediate(peek(state + RANK), stream, sequence, last),
        word,
    )
    if status != ACCEPTED:
        return _refused(state, entry, peer, stream, status, nbytes)
    poke(endpoint + EP_DIRTY, 1)
    poke(record + NEXT, sequence + 1)
    if stream >= CREDIT:
        poke(entry + PEER_CREDITS, peek(entry + PEER_CREDITS) + 1)
        poke(state + CREDITS, peek(state + CREDITS) + 1)
        return ACCEPTED
    load = LOAD_WRITE + nbytes
    poke(entry + PEER_LOAD, peek(entry + PEER_LOAD) + load)
    poke(state + LOAD, peek(state + LOAD) + load)
    counters = peek(state + COUNTERS)
    poke(counters + C_BYTES_SENT, peek(counters + C_BYTES_SENT) + nbytes)
    if peek(state + PROBE) == 0 and peek(state + STAMP) & _PROBE_MASK == 0:
        poke(state + PROBE, word + 1)
        poke(state + PROBE_AT, monotonic_ns())
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
    """The transport did not accept a write: try again in a later iteration, or part from the peer."""
    if status == BUSY:
        poke(entry + PEER_BUSY, peek(state + STAMP))
        counters = peek(state + COUNTERS)
        poke(counters + C_RETRIES, peek(counters + C_RETRIES) + 1)
        return BUSY
    # int64(): a literal argument would make Numba compile a copy of the callee for it.
    blame_peer(state, peer, int64(FAULT_POST), stream, status, nbytes)
    return REFUSED


@compiled
def _measure(state: int, stream: int) -> None:
    """The timed write completed: enter its latency in the histogram of its stream."""
    poke(state + PROBE, 0)
    latency = monotonic_ns() - peek(state + PROBE_AT)
    bucket = 0
    while latency > 1 and bucket < LATENCY_BUCKETS - 1:
        latency >>= 1
        bucket += 1
    address = peek(state + LATENCY) + (stream * LATENCY_BUCKETS + bucket) * 8
    poke(address, peek(address) + 1)


@inlined
def complete(state: int, word: int) -> None:
    """SENT: the write of ticket ``word`` completed locally."""
    peer = ticket_peer(word)
    stream = ticket_stream(word)
    entry = peek(state + PEERS) + peer * PEER_ENTRY
    index = peer * STREAMS + stream
    record = peek(state + SEND) + index * SEND_ENTRY
    known = peer < peek(state + RANKS)
    if known:
        # rule: a completion of a peer that was parted from changes nothing
        if peek(entry + PEER_STATE) != UP:
            return
        done = peek(record + DONE + PREFIX)
        known = (word - done) & SEQUENCE_MASK < peek(record + NEXT) - done
    if not known:
        blame_self(state, int64(FAULT_SENT_TWICE), peer, stream, word)
        return
    # The low bits of a ticket are the sequence number, and note() looks at nothing else of it.
    # rule: a completion counts once
    if note(record + DONE, peek(state + COMPLETED) + index * 8, word, ticket_last(word)) == REPEATED:
        blame_self(state, int64(FAULT_SENT_TWICE), peer, stream, word)
        return
    if stream >= CREDIT:
        poke(entry + PEER_CREDITS, peek(entry + PEER_CREDITS) - 1)
        poke(state + CREDITS, peek(state + CREDITS) - 1)
        return
    load = LOAD_WRITE + ticket_bytes(word)
    poke(entry + PEER_LOAD, peek(entry + PEER_LOAD) - load)
    poke(state + LOAD, peek(state + LOAD) - load)
    if word + 1 == peek(state + PROBE):
        _measure(state, stream)
