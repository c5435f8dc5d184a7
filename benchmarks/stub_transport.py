"""A transport that moves nothing: its ``post`` notes the ticket, its ``poll`` hands out completions or prepared
immediates. What remains to be measured is the proxy loop itself.

Memory of the stub, int64 words (one thread uses it): COUNT posted, TAKEN completions handed out, FEED and FEED_END
addresses of immediates to hand out, then from QUEUE a ring of SLOTS tickets.
"""

from __future__ import annotations

import numpy as np

from uccl_ep_serving.config import Settings
from uccl_ep_serving.native.atomics import peek, poke
from uccl_ep_serving.native.jit import c_function
from uccl_ep_serving.proxy.state import ProxyState, aligned_zeros
from uccl_ep_serving.proxy.transport.base import ARRIVED, EVENT_BYTES, SENT, Capabilities, DataPath

SLOTS = 4096
COUNT, TAKEN, FEED, FEED_END, QUEUE = 0, 8, 16, 24, 64


@c_function("int64(int64, int64, int64, int64, int64, int64, int64, int64)")
def post(context: int, peer: int, stream: int, local: int, target: int, nbytes: int, imm: int, wr_id: int) -> int:
    count = peek(context + COUNT)
    poke(context + QUEUE + (count & (SLOTS - 1)) * 8, wr_id)
    poke(context + COUNT, count + 1)
    return 0


@c_function("int64(int64)")
def flush(context: int) -> int:
    return 0


@c_function("int64(int64, int64, int64)")
def poll(context: int, events: int, limit: int) -> int:
    n = 0
    taken = peek(context + TAKEN)
    count = peek(context + COUNT)
    while taken < count and n < limit:
        event = events + n * EVENT_BYTES
        poke(event, SENT)
        poke(event + 8, peek(context + QUEUE + (taken & (SLOTS - 1)) * 8))
        poke(event + 16, 0)
        poke(event + 24, 0)
        taken += 1
        n += 1
    poke(context + TAKEN, taken)
    feed = peek(context + FEED)
    end = peek(context + FEED_END)
    while feed < end and n < limit:
        imm = peek(feed)
        event = events + n * EVENT_BYTES
        poke(event, ARRIVED)
        poke(event + 8, imm)
        poke(event + 16, imm >> 20)
        poke(event + 24, 0)
        feed += 8
        n += 1
    poke(context + FEED, feed)
    return n


@c_function("int64(int64, int64)")
def drop(context: int, peer: int) -> int:
    return 0


class Stub:
    """The stub, and an endpoint for a ProxyService."""

    def __init__(self) -> None:
        self.memory = aligned_zeros(QUEUE + SLOTS * 8)
        self.address = int(self.memory.ctypes.data)
        self.capabilities = Capabilities("stub", proves_source=True, max_write=256 << 20)

    def data_path(self) -> DataPath:
        """Addresses of the functions above."""
        return DataPath(self.address, post=post.address, flush=flush.address, poll=poll.address, drop=drop.address)

    def feed(self, immediates: np.ndarray) -> None:
        """Hand these out by the next polls; the array must live until then."""
        words = self.memory.view(np.int64)
        words[FEED // 8] = immediates.ctypes.data
        words[FEED_END // 8] = immediates.ctypes.data + immediates.nbytes

    @property
    def posted(self) -> int:
        """Writes posted so far."""
        return int(self.memory.view(np.int64)[COUNT // 8])


def proxy_state(stub: Stub, error: np.ndarray, peers: int) -> ProxyState:
    """State of a proxy of rank 0 that reaches ``peers`` other ranks through ``stub``."""
    settings = Settings(
        ring_slots=SLOTS,
        quantum=1 << 20,
        bytes_in_flight=64 << 20,
        peer_bytes_in_flight=16 << 20,
        writes_in_flight=4096,
    )
    return ProxyState(
        settings,
        rank=0,
        ranks=1 + peers,
        proxy=0,
        window=1 << 20,
        window_bytes=1 << 20,
        error=error.ctypes.data,
        endpoints=[stub],
        route=[-1] + [0] * peers,
    )
