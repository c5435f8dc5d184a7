"""What the loop does when something is wrong: note it where Python finds it, set the sticky error, part from a peer.

The loop never raises and never stops because of a peer: the others go on. :mod:`.service` turns what is noted here into
exceptions with words.
"""

from __future__ import annotations

from ..native.atomics import load64, peek, poke, store64
from ..native.calls import call3
from ..native.failure import set_failure
from ..native.jit import compiled
from ..protocol.context import FAILURE_PEER_LOST, FAILURE_PROTOCOL, FAILURE_TRANSPORT
from ..protocol.streams import HOST, MAX_CHANNELS, STREAMS
from .codec import COMMAND_RANK_MASK, COMMAND_RANK_SHIFT, COMMAND_STREAM_MASK, COMMAND_STREAM_SHIFT
from .queues import release_queue
from .state import (
    ABSENT,
    C_REFUSED,
    COMPLETED,
    COUNTERS,
    CREDITS,
    ENQUEUED,
    EP_CONTEXT,
    EP_DROP,
    ERROR,
    FAULT,
    FAULT_PEER,
    FAULT_STREAM,
    FAULT_VALUE,
    FAULTS,
    FORGOTTEN,
    LOAD,
    LOST,
    NAMED,
    PEER_CREDITS,
    PEER_ENDPOINT,
    PEER_ENTRY,
    PEER_FAULT,
    PEER_FAULT_DETAIL,
    PEER_FAULT_STREAM,
    PEER_FAULT_VALUE,
    PEER_LOAD,
    PEER_REQUEST,
    PEER_STATE,
    PEERS,
    PROBE,
    QUEUE_HEAD,
    RANKS,
    REFUSED,
    REFUSED_HIGH,
    REFUSED_INDEX,
    REFUSED_LOW,
    REQUESTS,
    REQUESTS_SEEN,
    SEND,
    SEND_ENTRY,
    UP,
    WAITING,
)
from .transport.base import FAULT_BAD_FRAME, FAULT_NUMBER, FAULT_OUTSIDE_WINDOW, FAULT_TOO_LONG, FAULT_WRONG_SOURCE

__all__ = [
    "FAULT_COMMAND_KIND",
    "FAULT_COMMAND_PEER",
    "FAULT_COMMAND_RANGE",
    "FAULT_COMMAND_STREAM",
    "FAULT_CREDIT",
    "FAULT_DEVICE",
    "FAULT_DOWN",
    "FAULT_IMMEDIATE",
    "FAULT_POST",
    "FAULT_SENT_TWICE",
    "FAULT_SEQUENCE",
    "FAULT_SOURCE",
    "FAULT_STREAM_OWNER",
    "FAULT_WORDS",
    "blame_peer",
    "blame_self",
    "blame_source",
    "refuse_command",
    "serve_requests",
]

# Codes of what went wrong, continuing the FAULT_* codes of transport.base (1..15), which pass through unchanged.
# 16..19: the connection or the transport; 20..: a peer's immediates; 25..: commands of this rank's own kernels.
FAULT_DOWN = 16
FAULT_POST = 17
FAULT_DEVICE = 18
FAULT_SENT_TWICE = 19
FAULT_IMMEDIATE = 20
FAULT_SOURCE = 21
FAULT_STREAM_OWNER = 22
FAULT_CREDIT = 23
FAULT_SEQUENCE = 24
FAULT_COMMAND_KIND = 25
FAULT_COMMAND_PEER = 26
FAULT_COMMAND_STREAM = 27
FAULT_COMMAND_RANGE = 28

#: Words for each code, for the exception that :mod:`.service` raises.
FAULT_WORDS = {
    FAULT_BAD_FRAME: "a frame that the format forbids",
    FAULT_TOO_LONG: "a frame longer than any write",
    FAULT_NUMBER: "a frame out of its turn",
    FAULT_OUTSIDE_WINDOW: "an offset outside the window",
    FAULT_WRONG_SOURCE: "a source rank that its connection does not prove",
    FAULT_DOWN: "the connection closed or failed",
    FAULT_POST: "posting a write failed",
    FAULT_DEVICE: "polling or flushing the transport failed",
    FAULT_SENT_TWICE: "a completion for a write that is not in flight",
    FAULT_IMMEDIATE: "an immediate that is no 32-bit word",
    FAULT_SOURCE: "an immediate with an impossible or unproven source rank",
    FAULT_STREAM_OWNER: "an immediate of a stream that does not exist or that another proxy owns",
    FAULT_SEQUENCE: "a write out of the sequence of its stream",
    FAULT_CREDIT: "credits for more writes than were sent",
    FAULT_COMMAND_KIND: "a command of an unknown kind",
    FAULT_COMMAND_PEER: "a command for a rank that no proxy reaches",
    FAULT_COMMAND_STREAM: "a command for a stream that this proxy does not own",
    FAULT_COMMAND_RANGE: "a command whose bytes lie outside the window",
}


@compiled
def _failure_of(fault: int) -> int:
    """The FAILURE_* code of the sticky error for a fault."""
    if fault == FAULT_DOWN:
        return FAILURE_PEER_LOST
    return FAILURE_TRANSPORT if FAULT_DOWN < fault <= FAULT_SENT_TWICE else FAILURE_PROTOCOL


@compiled
def _part(state: int, peer: int, new_state: int, reason: int) -> None:
    """Nothing is sent to ``peer`` or believed from it any more; whoever waits for own writes to it is released."""
    entry = peek(state + PEERS) + peer * PEER_ENTRY
    endpoint = peek(entry + PEER_ENDPOINT)
    was = peek(entry + PEER_STATE)
    poke(entry + PEER_STATE, new_state)
    if was != UP:
        return
    call3(peek(endpoint + EP_DROP), peek(endpoint + EP_CONTEXT), peer, reason)
    for stream in range(STREAMS):
        index = peer * STREAMS + stream
        record = peek(state + SEND) + index * SEND_ENTRY
        # Records of streams that carried nothing are left alone: writing them would commit their pages.
        if peek(record + ENQUEUED) == 0 and peek(record + QUEUE_HEAD) == 0:
            continue
        release_queue(state, entry, record)
        poke(record + WAITING, 0)
        # The transport touches no source bytes of this peer after drop(), so all of them may be reused.
        # rule: writes to a lost peer count as completed
        store64(peek(state + COMPLETED) + index * 8, peek(record + ENQUEUED))
    poke(state + LOAD, peek(state + LOAD) - peek(entry + PEER_LOAD))
    poke(state + CREDITS, peek(state + CREDITS) - peek(entry + PEER_CREDITS))
    poke(state + PROBE, 0)
    poke(entry + PEER_LOAD, 0)
    poke(entry + PEER_CREDITS, 0)


@compiled
def blame_peer(state: int, peer: int, fault: int, stream: int, value: int, detail: int) -> None:
    """``peer`` failed or broke the rules: note it, set the sticky error, part from the peer.

    A peer that is (about to be) forgotten causes no error: goodbye and closed connection may overtake each other.
    """
    entry = peek(state + PEERS) + peer * PEER_ENTRY
    if peek(entry + PEER_STATE) != UP:
        return
    # rule: a forgotten peer causes no error
    request = load64(entry + PEER_REQUEST)
    if request == 0:
        failure = _failure_of(fault)
        poke(entry + PEER_FAULT_STREAM, stream)
        poke(entry + PEER_FAULT_VALUE, value)
        poke(entry + PEER_FAULT_DETAIL, detail)
        store64(entry + PEER_FAULT, failure << 8 | fault)
        store64(state + FAULTS, peek(state + FAULTS) + 1)
    # Parted from first: a kernel that the sticky error releases must find its writes completed.
    _part(state, peer, FORGOTTEN if request else LOST, request)
    # rule: a lost peer sets the sticky error
    if request == 0:
        set_failure(peek(state + ERROR), _failure_of(fault), peer, stream, value, detail)


@compiled
def blame_self(state: int, fault: int, peer: int, stream: int, value: int) -> None:
    """Something of this rank is wrong (a command, the transport itself): note the first, set the sticky error."""
    failure = _failure_of(fault)
    if peek(state + FAULT) == 0:
        poke(state + FAULT_PEER, peer)
        poke(state + FAULT_STREAM, stream)
        poke(state + FAULT_VALUE, value)
        store64(state + FAULT, failure << 8 | fault)
        store64(state + FAULTS, peek(state + FAULTS) + 1)
    set_failure(peek(state + ERROR), failure, peer, stream, value, fault)


@compiled
def blame_source(state: int, proven: int, source: int, fault: int, stream: int, imm: int, detail: int) -> None:
    """An immediate breaks the rules: blame the rank that the connection proves, else the one that it claims."""
    peer = proven if proven >= 0 else source
    peer_state = ABSENT
    if 0 <= peer < peek(state + RANKS):
        peer_state = peek(peek(state + PEERS) + peer * PEER_ENTRY + PEER_STATE)
    if peer_state == UP:
        blame_peer(state, peer, fault, stream, imm, detail)
    elif peer_state == ABSENT:
        blame_self(state, fault, peer, stream, imm)


@compiled
def refuse_command(state: int, fault: int, low: int, high: int, index: int) -> None:
    """Command ``index`` of the ring is wrong and is dropped: nothing of it is posted, no number is used for it.

    Kernels check what they enqueue, so this is the second line. On a HOST stream nobody waits for it: its author is
    told once, and everything goes on. Anywhere else it was part of an operation, and a later message must not be taken
    for the one that is missing: this rank parts from the destination, and the operation ends by name on both sides. A
    command without a possible destination leaves open which operation it belonged to: then all of this rank's end.
    """
    peer = (high >> COMMAND_RANK_SHIFT) & COMMAND_RANK_MASK
    stream = (high >> COMMAND_STREAM_SHIFT) & COMMAND_STREAM_MASK
    counters = peek(state + COUNTERS)
    poke(counters + C_REFUSED, peek(counters + C_REFUSED) + 1)
    # rule: a wrong command of an operation parts the pair
    if HOST <= stream < HOST + MAX_CHANNELS:
        if peek(state + REFUSED) == load64(state + NAMED):
            poke(state + REFUSED_LOW, low)
            poke(state + REFUSED_HIGH, high)
            poke(state + REFUSED_INDEX, index)
        store64(state + REFUSED, peek(state + REFUSED) + 1)
        # rule: a wrong command outside operations ends nothing
        return
    peer_state = ABSENT
    if peer < peek(state + RANKS):
        peer_state = peek(peek(state + PEERS) + peer * PEER_ENTRY + PEER_STATE)
    if peer_state == UP:
        blame_peer(state, peer, fault, stream, low, high)
    elif peer_state == ABSENT:
        blame_self(state, fault, peer, stream, low)


@compiled
def serve_requests(state: int) -> int:
    """Part from the peers that the host asked to forget; 1 when there were any."""
    requests = load64(state + REQUESTS)
    if requests == peek(state + REQUESTS_SEEN):
        return 0
    poke(state + REQUESTS_SEEN, requests)
    for peer in range(peek(state + RANKS)):
        entry = peek(state + PEERS) + peer * PEER_ENTRY
        request = load64(entry + PEER_REQUEST)
        if request != 0 and peek(entry + PEER_STATE) != FORGOTTEN and peek(entry + PEER_ENDPOINT) != 0:
            _part(state, peer, FORGOTTEN, request - 1)
    return 1
