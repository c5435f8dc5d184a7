"""What the loop does when something is wrong: note it where Python finds it, set the sticky error, drop a peer.

The loop never raises and never stops because of a peer: the others go on. :mod:`.fault_errors` turns what is noted here
into exceptions with words.
"""

from __future__ import annotations

from ..native.atomics import load64, peek, poke, store64
from ..native.calls import call3
from ..native.failure import set_failure
from ..native.jit import compiled
from ..protocol.context import FAILURE_PEER_LOST, FAILURE_PROTOCOL, FAILURE_TRANSPORT
from ..protocol.streams import STREAMS
from . import words
from .queues import release_queue

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


@compiled
def _failure_of(fault: int) -> int:
    """The FAILURE_* code of the sticky error for a fault."""
    if fault == FAULT_DOWN:
        return FAILURE_PEER_LOST
    return FAILURE_TRANSPORT if FAULT_DOWN < fault <= FAULT_SENT_TWICE else FAILURE_PROTOCOL


@compiled
def _drop_peer(state: int, peer: int, new_state: int, reason: int) -> None:
    """Nothing is sent to ``peer`` or believed from it any more; whoever waits for own writes to it is released."""
    entry = words.peer_entry(state, peer)
    endpoint = peek(entry + words.PEER_ENDPOINT)
    was = peek(entry + words.PEER_STATE)
    poke(entry + words.PEER_STATE, new_state)
    if was != words.UP:
        return
    call3(peek(endpoint + words.EP_DROP), peek(endpoint + words.EP_CONTEXT), peer, reason)
    for stream in range(STREAMS):
        index = peer * STREAMS + stream
        record = words.send_record(state, index)
        # Records of streams that carried nothing are left alone: writing them would commit their pages.
        if peek(record + words.ENQUEUED) == 0 and peek(record + words.QUEUE_HEAD) == 0:
            continue
        release_queue(state, entry, record)
        poke(record + words.WAITING, 0)
        # The transport touches no source bytes of this peer after drop(), so all of them may be reused.
        # rule: writes to a lost peer count as completed
        store64(peek(state + words.COMPLETED) + index * 8, peek(record + words.ENQUEUED))
    poke(state + words.LOAD, peek(state + words.LOAD) - peek(entry + words.PEER_LOAD))
    poke(state + words.CREDITS, peek(state + words.CREDITS) - peek(entry + words.PEER_CREDITS))
    poke(state + words.PROBE, 0)
    poke(entry + words.PEER_LOAD, 0)
    poke(entry + words.PEER_CREDITS, 0)


@compiled
def blame_peer(state: int, peer: int, fault: int, stream: int, value: int, detail: int) -> None:
    """``peer`` failed or broke the rules: note it, set the sticky error, drop the peer.

    A peer that is (about to be) forgotten causes no error: goodbye and closed connection may overtake each other.
    """
    entry = words.peer_entry(state, peer)
    if peek(entry + words.PEER_STATE) != words.UP:
        return
    # rule: a forgotten peer causes no error
    request = load64(entry + words.PEER_REQUEST)
    if request == 0:
        failure = _failure_of(fault)
        poke(entry + words.PEER_FAULT_STREAM, stream)
        poke(entry + words.PEER_FAULT_VALUE, value)
        poke(entry + words.PEER_FAULT_DETAIL, detail)
        store64(entry + words.PEER_FAULT, failure << 8 | fault)
        store64(state + words.FAULTS, peek(state + words.FAULTS) + 1)
    # Dropped first: a kernel that the sticky error releases must find its writes completed.
    _drop_peer(state, peer, words.FORGOTTEN if request else words.LOST, request)
    # rule: a lost peer sets the sticky error
    if request == 0:
        set_failure(peek(state + words.ERROR), _failure_of(fault), peer, stream, value, detail)


@compiled
def blame_self(state: int, fault: int, peer: int, stream: int, value: int) -> None:
    """Something of this rank is wrong (a command, the transport itself): note the first, set the sticky error."""
    failure = _failure_of(fault)
    if peek(state + words.FAULT) == 0:
        poke(state + words.FAULT_PEER, peer)
        poke(state + words.FAULT_STREAM, stream)
        poke(state + words.FAULT_VALUE, value)
        store64(state + words.FAULT, failure << 8 | fault)
        store64(state + words.FAULTS, peek(state + words.FAULTS) + 1)
    set_failure(peek(state + words.ERROR), failure, peer, stream, value, fault)


@compiled
def blame_source(state: int, proven: int, source: int, fault: int, stream: int, imm: int, detail: int) -> None:
    """An immediate breaks the rules: blame the rank that the connection proves, else the one that it claims."""
    peer = proven if proven >= 0 else source
    peer_state = words.ABSENT
    if 0 <= peer < peek(state + words.RANKS):
        peer_state = words.peer_state(state, peer)
    if peer_state == words.UP:
        blame_peer(state, peer, fault, stream, imm, detail)
    elif peer_state == words.ABSENT:
        blame_self(state, fault, peer, stream, imm)


@compiled
def serve_requests(state: int) -> int:
    """Drop the peers that the host asked to forget; 1 when there were any."""
    requests = load64(state + words.REQUESTS)
    if requests == peek(state + words.REQUESTS_SEEN):
        return 0
    poke(state + words.REQUESTS_SEEN, requests)
    for peer in range(peek(state + words.RANKS)):
        entry = words.peer_entry(state, peer)
        request = load64(entry + words.PEER_REQUEST)
        if (
            request != 0
            and peek(entry + words.PEER_STATE) != words.FORGOTTEN
            and peek(entry + words.PEER_ENDPOINT) != 0
        ):
            _drop_peer(state, peer, words.FORGOTTEN, request - 1)
    return 1
