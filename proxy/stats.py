"""What a proxy has done, as plain Python values: counters, the four states of each stream, sampled latencies.

Everything is read from memory that the loop updates with plain stores: reading costs the loop nothing. Values of one
snapshot were read one after another, so two of them may differ by what happened in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..native.failure import acquired
from ..protocol.streams import CREDIT, name_of
from . import words
from .ring import commands_in
from .sequence import HELD, MESSAGES, PREFIX
from .state import ProxyState

__all__ = ["add_up", "in_flight", "latencies", "proxy_counters", "stream_states"]

#: More commands than a ring has.
_ALL = 1 << 62
#: Of :func:`proxy_counters`, what says how much is somewhere now. The others only grow, as long as the proxy lives.
_GAUGES = ("ring_depth", "queue_depth", "writes_in_flight", "bytes_in_flight")


def add_up(ended: Mapping[str, int], present: Mapping[str, int]) -> dict[str, int]:
    """Counters of proxies that have ended and of those that run: what only grows goes on where it was."""
    grown = {name: count for name, count in ended.items() if name not in _GAUGES}
    return {name: grown.get(name, 0) + present.get(name, 0) for name in {**grown, **present}}


def in_flight(state: ProxyState) -> int:
    """Commands in the ring and in queues, plus writes and credits not completed.

    The order of the reads matters: the loop counts a command on the next stage before it takes it off the one before
    (release), so a command that moves on meanwhile is seen twice and never missed.
    """
    waiting = _ring_depth(state) + acquired(state.address + words.QUEUED)
    loaded = acquired(state.address + words.LOAD) >> words.LOAD_SHIFT
    return waiting + loaded + acquired(state.address + words.CREDITS)


def _ring_depth(state: ProxyState) -> int:
    """Commands in the ring."""
    return int(commands_in(state.ring, _ALL))


def proxy_counters(state: ProxyState) -> dict[str, int]:
    """All counters by name, and how much is in each place now.

    ``held_back`` counts writes that arrived before an earlier one, ``retries`` posts that the transport refused as
    busy, ``queued`` commands that could not be posted straight from the ring, ``ring_blocked`` iterations in which a
    destination whose quota was full held up the ring, ``discarded`` commands for lost or forgotten peers,
    ``refused`` commands that the formats forbid.
    """
    counters = {name: int(value) for name, value in zip(words.COUNTER_NAMES, state.counters, strict=True)}
    counters["ring_depth"] = _ring_depth(state)
    counters["queue_depth"] = state.word(words.QUEUED)
    load = state.word(words.LOAD)
    counters["writes_in_flight"] = load >> words.LOAD_SHIFT
    counters["bytes_in_flight"] = load & words.LOAD_BYTES
    # most records of a large group are of peers that no proxy reaches, in pages that nobody has touched
    present = _present(state)

    def total(records: NDArray[np.int64], streams: slice, *words: int) -> int:
        return sum(int(records[:, streams, word // 8][present].sum()) for word in words)

    send, receive = state.send, state.receive
    data, credit = slice(0, CREDIT), slice(CREDIT, None)
    counters["writes"] = total(send, data, words.NEXT)
    counters["writes_completed"] = total(send, data, words.DONE + PREFIX, words.DONE + HELD)
    counters["messages_sent"] = total(send, data, words.ENQUEUED) - total(send, data, words.WAITING)
    counters["messages_completed"] = total(send, data, words.DONE + MESSAGES)
    counters["writes_received"] = total(receive, data, words.SEEN + PREFIX, words.SEEN + HELD)
    counters["messages_received"] = total(receive, data, words.SEEN + MESSAGES)
    counters["credits_sent"] = total(send, credit, words.NEXT)
    counters["credits_received"] = total(receive, credit, words.SEEN + PREFIX)
    return counters


def _present(state: ProxyState) -> NDArray[np.intp]:
    """Ranks that this proxy reaches or has reached."""
    return np.flatnonzero(state.peers[:, words.PEER_STATE // 8] != words.ABSENT)


def stream_states(state: ProxyState) -> list[dict[str, Any]]:
    """One entry per (peer, stream) that has carried something.

    Sending, in messages: ``enqueued`` (taken from the ring), ``posted``, ``completed`` (locally). In writes:
    ``writes_posted``, ``writes_completed`` and ``writes_applied`` (covered by the receiver's credits, hence in steps
    of :data:`~uccl_ep_serving.protocol.streams.CREDIT_WRITES`). Receiving: ``arrived`` messages, ``writes_arrived``
    without a gap, ``held_back`` behind a gap now. A sender whose ``enqueued`` is ahead of ``posted`` waits for its own
    transport or for credits; ``posted`` ahead of ``completed``: the network is slow; all equal, and the receiver's
    ``arrived`` behind: the receiver's proxy is.
    """
    entries: list[dict[str, Any]] = []
    for peer in _present(state):
        send, receive = state.send[peer, :CREDIT], state.receive[peer, :CREDIT]
        active = (send[:, words.ENQUEUED // 8] | send[:, words.NEXT // 8]) != 0
        active |= (receive[:, (words.SEEN + PREFIX) // 8] | receive[:, (words.SEEN + HELD) // 8]) != 0
        for stream in np.flatnonzero(active):
            sent, seen = send[stream], receive[stream]
            entries.append(
                {
                    "peer": int(peer),
                    "stream": int(stream),
                    "name": name_of(int(stream)),
                    "enqueued": int(sent[words.ENQUEUED // 8]),
                    "posted": int(sent[words.ENQUEUED // 8] - sent[words.WAITING // 8]),
                    "completed": int(sent[(words.DONE + MESSAGES) // 8]),
                    "writes_posted": int(sent[words.NEXT // 8]),
                    "writes_completed": int(sent[(words.DONE + PREFIX) // 8]),
                    "writes_applied": int(sent[words.CREDITED // 8]),
                    "arrived": int(seen[(words.SEEN + MESSAGES) // 8]),
                    "writes_arrived": int(seen[(words.SEEN + PREFIX) // 8]),
                    "held_back": int(seen[(words.SEEN + HELD) // 8]),
                }
            )
    return entries


def latencies(state: ProxyState) -> dict[int, list[int]]:
    """Per stream that was sampled: counts of post-to-completion times, bucket b for [2**b, 2**(b+1)) ns.

    One write at a time is timed per proxy, so these are samples, not totals.
    """
    return {
        int(stream): [int(count) for count in state.latency[stream]]
        for stream in np.flatnonzero(state.latency.any(axis=1))
    }
