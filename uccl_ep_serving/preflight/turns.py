"""Messages between two ranks, compiled: one into a mapped window takes less than a call from Python."""

from __future__ import annotations

from ..kernels.cpu.context import peer_window, window_address
from ..kernels.cpu.publish import message_address, publish
from ..kernels.cpu.wait import wait_arrived
from ..native.atomics import copy, peek, poke
from ..native.groups import Group
from ..native.jit import compiled
from ..protocol.context import STATUS_OK
from ..protocol.streams import HOST

__all__ = ["PLACES", "STATE_WORDS", "WIRE", "send_burst", "take_turns"]

#: Places that the messages of a burst go to in turn.
PLACES = 4
#: Words of the memory of a compiled function: messages sent to the peer and received from it, the counts of either at
#: which it ends, and 1 for the rank that sends first.
_SENT, _RECEIVED, _LAST_SENT, _LAST_RECEIVED, _FIRST = range(0, 40, 8)
STATE_WORDS = 5
_STREAM = HOST


@compiled
def _put(context: int, peer: int, source: int, target: int, nbytes: int, count: int) -> int:
    """Send a message; its bytes are copied here where the peer's window is mapped."""
    if peer_window(context, peer) != 0:
        copy(message_address(context, peer, source, target), window_address(context) + source, nbytes)
    return publish(context, peer, _STREAM, source, target, nbytes, count)


@compiled
def take_turns(
    context: int, progress: int, state: int, peer: int, source: int, target: int, nbytes: int, end: int
) -> int:
    """Messages of ``nbytes`` to ``peer`` and back, each after the last has come; a STATUS_*."""
    while True:
        to_send = peek(state + _LAST_SENT) - peek(state + _SENT)
        to_receive = peek(state + _LAST_RECEIVED) - peek(state + _RECEIVED)
        if to_send == 0 and to_receive == 0:
            return STATUS_OK
        if to_send + peek(state + _FIRST) > to_receive:
            count = peek(state + _SENT) + 1
            status = _put(context, peer, source, target, nbytes, count)
            if status != STATUS_OK:
                return status
            poke(state + _SENT, count)
        else:
            count = peek(state + _RECEIVED) + 1
            status = wait_arrived(context, progress, peer, _STREAM, count, end)
            if status != STATUS_OK:
                return status
            poke(state + _RECEIVED, count)


@compiled
def send_burst(context: int, state: int, peer: int, source: int, target: int, nbytes: int) -> int:
    """Messages of ``nbytes`` one behind the other, to each place in turn; a STATUS_*."""
    while peek(state + _SENT) < peek(state + _LAST_SENT):
        count = peek(state + _SENT) + 1
        status = _put(context, peer, source, target + (count % PLACES) * nbytes, nbytes, count)
        if status != STATUS_OK:
            return status
        poke(state + _SENT, count)
    return STATUS_OK


#: To compile.
WIRE = Group("check of the wire", take_turns, send_burst)
