"""What the loop does when something is wrong: note it where Python finds it, set the sticky error, drop a peer.

The loop never raises and never stops because of a peer: the others go on. :class:`FaultReader` turns what is noted here
into exceptions in words: who did what, where, what was expected, what to do next.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..errors import PeerLost, ProtocolError, TransportError, UcclEpError, after_loss
from ..native.atomics import load64, peek, poke, store64
from ..native.calls import call2
from ..native.failure import acquired, set_failure
from ..native.jit import compiled
from ..protocol.command import HIGH, LOW, UNIT
from ..protocol.context import FAILURE_PEER_LOST, FAILURE_PROTOCOL, FAILURE_TRANSPORT
from ..protocol.streams import STREAMS, channel_of, name_of
from . import words
from .queues import release_queue
from .state import ProxyState
from .transport import base
from .transport.base import Diagnosed, Endpoint

# Codes of what went wrong, continuing the FAULT_* codes of transport.base (1..15), which pass through unchanged.
# 16..19: the connection or the transport; 20..: a peer's immediates; 25..: commands of this rank's own kernels; 29: the
# GPU.
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
FAULT_FENCE = 29


@compiled
def _failure_of(fault: int) -> int:
    """The FAILURE_* code of the sticky error for a fault."""
    if fault == FAULT_DOWN:
        return FAILURE_PEER_LOST
    if fault == FAULT_FENCE:
        return FAILURE_TRANSPORT
    return FAILURE_TRANSPORT if FAULT_DOWN < fault <= FAULT_SENT_TWICE else FAILURE_PROTOCOL


@compiled
def give_back(state: int, entry: int, record: int, index: int) -> None:
    """Nobody waits for a stream of a peer that is LOST or FORGOTTEN: what was enqueued counts as completed, and its
    bytes may be written again.

    Unless a NIC may still read them. A lost peer may live, and would take for a message whatever is sent to it from
    there; then the sticky error ends who waits. A forgotten one takes nothing from us any more.
    """
    # rule: bytes that a NIC may still read are not given back
    if peek(entry + words.PEER_READS) == 0 or peek(entry + words.PEER_STATE) == words.FORGOTTEN:
        # rule: writes to a lost peer count as completed
        store64(peek(state + words.COMPLETED) + index * 8, peek(record + words.ENQUEUED))


@compiled
def _drop_peer(state: int, peer: int, new_state: int) -> None:
    """Nothing is sent to ``peer`` or believed from it any more; whoever waits for own writes to it is released."""
    entry = words.peer_entry(state, peer)
    endpoint = peek(entry + words.PEER_ENDPOINT)
    was = peek(entry + words.PEER_STATE)
    poke(entry + words.PEER_STATE, new_state)
    if was != words.UP:
        return
    call2(peek(endpoint + words.EP_DROP), peek(endpoint + words.EP_CONTEXT), peer)
    for stream in range(STREAMS):
        index = peer * STREAMS + stream
        record = words.send_record(state, index)
        # Records of streams that carried nothing are left alone: writing them would commit their pages.
        if peek(record + words.ENQUEUED) == 0 and peek(record + words.QUEUE_HEAD) == 0:
            continue
        release_queue(state, entry, record)
        give_back(state, entry, record, index)
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
    # Dropped first: a kernel that the sticky error releases must find its writes completed, if they can be.
    _drop_peer(state, peer, words.FORGOTTEN if request else words.LOST)
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
        is_asked = load64(entry + words.PEER_REQUEST) != 0
        if is_asked and peek(entry + words.PEER_STATE) != words.FORGOTTEN and peek(entry + words.PEER_ENDPOINT) != 0:
            _drop_peer(state, peer, words.FORGOTTEN)
    return 1


#: Words for each code.
_WHAT = {
    base.FAULT_BAD_FRAME: "a frame that the format forbids",
    base.FAULT_TOO_LONG: "a frame longer than any write",
    base.FAULT_NUMBER: "a frame out of sequence",
    base.FAULT_COUNT: "that more frames have arrived than were sent",
    base.FAULT_OUTSIDE_WINDOW: "an offset outside the window",
    base.FAULT_WRONG_SOURCE: "a source rank that its connection does not prove",
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
    FAULT_FENCE: "the flush of what NICs wrote into GPU memory failed (by the GPU's driver, or a read of the NIC's)",
}

#: What was expected instead, for faults of a peer; ``detail`` as the loop noted it.
_EXPECTED = {
    base.FAULT_BAD_FRAME: "{detail:#x} was expected",
    base.FAULT_NUMBER: "{detail:#x} was expected",
    base.FAULT_COUNT: "at most {detail:#x} were expected",
    base.FAULT_TOO_LONG: "at most {detail:#x} bytes were expected",
    base.FAULT_OUTSIDE_WINDOW: "an offset of at most {detail:#x} was expected",
    base.FAULT_WRONG_SOURCE: "source rank {detail} was expected",
    FAULT_IMMEDIATE: "a word below 2**32 was expected",
    FAULT_SOURCE: "it names rank {detail}",
    FAULT_STREAM_OWNER: "it names rank {detail} and a stream that nobody here reads",
    FAULT_CREDIT: "fewer credits were expected",
    FAULT_SEQUENCE: "sequence {detail} was expected",
}


class _Fault(NamedTuple):
    """What the loop noted: ``failure << 8 | code``, and what it depends on the code to mean."""

    fault: int
    peer: int
    stream: int
    value: int
    detail: int


class FaultReader:
    """Reads the faults of one rank's proxies and puts them into words.

    Args:
        rank, ranks: EP rank of this process and number of EP ranks.
        endpoints: ``[proxy][k]``.
        route: per peer, the index k of the endpoint that reaches it, -1 = not through a proxy.
    """

    def __init__(self, rank: int, ranks: int, endpoints: Sequence[Sequence[Endpoint]], route: Sequence[int]) -> None:
        self._rank, self._ranks, self._endpoints, self._route = rank, ranks, endpoints, route

    def error(self, state: ProxyState, forgotten: Collection[int]) -> UcclEpError | None:
        """The exception for what went wrong in the proxy of ``state``, None when nothing has.

        Faults of peers in ``forgotten`` do not count.
        """
        fault = int(acquired(state.address + words.FAULT))
        if fault:
            peer, stream = state.word(words.FAULT_PEER), state.word(words.FAULT_STREAM)
            return self._error_of(state, _Fault(fault, peer, stream, state.word(words.FAULT_VALUE), 0))
        for peer in range(self._ranks):
            if peer not in forgotten and (found := _of_peer(state, peer)).fault:
                return self._error_of(state, found)
        return None

    def loss_of(self, state: ProxyState, peer: int) -> str:
        """What the proxy of ``state`` noticed of the end of ``peer``: how it was reached and what its transport said,
        with the NIC and the status of its completion; "" when it noticed nothing."""
        found = _of_peer(state, peer)
        return self._ending(state, found) if found.fault == FAILURE_PEER_LOST << 8 | FAULT_DOWN else ""

    def refusal(self, state: ProxyState, new: int) -> ProtocolError:
        """The exception for the first of ``new`` refused commands that no operation waits for."""
        low, high = state.word(words.REFUSED_LOW), state.word(words.REFUSED_HIGH)
        others = f" (and {new - 1} after it)" if new > 1 else ""
        return ProtocolError(
            f"the proxy refused command {state.word(words.REFUSED_INDEX)} of its ring{others}: "
            f"{self._command(state, low, high)}, noticed "
            f"by proxy {state.proxy} of rank {self._rank}. Nothing of it was sent and no message number was used "
            "for it; the group goes on. Look for whoever put it there",
            peer=HIGH["rank"].get(high),
            channel=channel_of(HIGH["stream"].get(high)),
        )

    def _command(self, state: ProxyState, low: int, high: int) -> str:
        """A command in words, and what it is to be compared with."""
        peer, stream, kind = (HIGH[name].get(high) for name in ("rank", "stream", "kind"))
        source, target, length = LOW["source"].get(low), HIGH["target"].get(high), LOW["length"].get(low)
        return (
            f"a write of {length * UNIT} bytes from offset {source * UNIT} to offset {target * UNIT} of rank {peer}'s "
            f"window, stream {stream} ({name_of(stream)}), channel {channel_of(stream)}, kind {kind}; windows have "
            f"{state.word(words.WINDOW_BYTES)} bytes, ranks are 0..{self._ranks - 1}"
        )

    def _where(self, state: ProxyState, stream: int) -> str:
        on = f", stream {stream} ({name_of(stream)})" if stream >= 0 else ""
        return f"proxy {state.proxy} of rank {self._rank}{on}"

    def _ending(self, state: ProxyState, noted: _Fault) -> str:
        """A DOWN in words."""
        device = self._endpoints[state.proxy][self._route[noted.peer]].describe(noted.peer)
        reason = os.strerror(noted.value) if noted.value > 0 else "no reason given"
        if noted.detail > 0:
            reason += f"; its last frame was cut off, at least {noted.detail} bytes are missing"
        what = _WHAT[FAULT_DOWN]
        return f"{device}: {what} ({reason}), noticed by {self._where(state, noted.stream)}"

    def _error_of(self, state: ProxyState, noted: _Fault) -> UcclEpError:
        failure, code = noted.fault >> 8, noted.fault & 255
        peer, stream, value, detail = noted[1:]
        what = _WHAT.get(code, f"fault {code}")
        known = 0 <= peer < self._ranks and self._route[peer] >= 0
        row = self._endpoints[state.proxy]
        device = row[self._route[peer]].describe(peer) if known else ", ".join(one.capabilities.name for one in row)
        where = self._where(state, stream)
        channel = channel_of(stream) if stream >= 0 else -1
        if failure == FAILURE_PEER_LOST:
            cause = self._ending(state, noted)
            return PeerLost(
                f"rank {peer} is gone ({cause}). {after_loss(peer)}",
                peer=peer,
                phase="proxy",
                channel=channel,
                cause=cause,
            )
        if failure == FAILURE_PROTOCOL and code >= FAULT_COMMAND_KIND:
            # of a command that broke with its destination, value and detail are the two words
            command = f": {self._command(state, value, detail)}" if detail else f" (peer {peer}, word {value:#x})"
            return ProtocolError(
                f"a kernel of this rank enqueued {what}{command}, noticed by {where}. Nothing of it was sent, and the "
                "operation that waits for it ends on both sides. Likely cause: memory was overwritten; close the "
                "buffer, the other ranks go on without this one",
                peer=peer if known else -1,
                channel=channel,
                own=True,
            )
        if failure == FAILURE_PROTOCOL:
            return ProtocolError(
                f"rank {peer} ({device}) sent {what}: {value:#x} arrived, {_EXPECTED[code].format(detail=detail)}, "
                f"noticed by {where}. Its connection is closed. Likely cause: the ranks run different versions, or "
                f"memory was overwritten; look at the log of rank {peer}, then mask the rank or close the buffer",
                peer=peer if known else -1,
                channel=channel,
            )
        number = -value if value < 0 else 0
        name = errno.errorcode.get(number, "")
        device = "; ".join(said for one in row if isinstance(one, Diagnosed) and (said := one.diagnosis())) or device
        return TransportError(
            f"{what} ({device}, status {value} {name}), noticed by {where}"
            + (f", peer {peer}" if peer >= 0 else "")
            + ". Close the buffer; look for errors of the device or the connection in the system log",
            device=device,
            errno=number,
            status=value,
        )


def _of_peer(state: ProxyState, peer: int) -> _Fault:
    """The fault that ``peer`` is to blame for; ``fault`` is 0 when there is none."""
    entry = state.peers[peer]
    # acquire, before the words that say more of it
    fault = int(acquired(entry[words.PEER_FAULT // 8 :].ctypes.data))
    details = (words.PEER_FAULT_STREAM, words.PEER_FAULT_VALUE, words.PEER_FAULT_DETAIL)
    stream, value, detail = (int(entry[word // 8]) for word in details)
    return _Fault(fault, peer, stream, value, detail)
