"""What the proxy loop costs on this machine: nanoseconds per command and per immediate, over a stub transport.

    python tests/proxy/bench_loop.py

The stub's ``post`` notes the ticket and its ``poll`` hands out completions or prepared immediates, so the figures are
the loop's own: ring, checks, flow control, books, post through a pointer, completion; and the sequence window.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from uccl_ep_serving.native.atomics import load64, peek, poke, store64
from uccl_ep_serving.native.calls import call3, call8
from uccl_ep_serving.native.jit import c_function, compiled
from uccl_ep_serving.protocol.command import HIGH, KIND_WRITE, LOW
from uccl_ep_serving.protocol.context import ERROR_WORDS
from uccl_ep_serving.protocol.imm import SEQUENCE_SPACE
from uccl_ep_serving.protocol.streams import CREDIT, CREDIT_WRITES, LL_DISPATCH
from uccl_ep_serving.proxy.loop import step, warm
from uccl_ep_serving.proxy.state import C_QUEUED, ProxyState, aligned_zeros
from uccl_ep_serving.proxy.transport.base import ARRIVED, EVENT_BYTES, SENT, Capabilities, DataPath

_SLOTS = 4096
_ROUNDS = 200
_PEERS = 8
_COUNT, _TAKEN, _FEED, _FEED_END, _QUEUE = 0, 8, 16, 24, 64


@c_function("int64(int64, int64, int64, int64, int64, int64, int64, int64)")
def _post(context: int, peer: int, stream: int, local: int, target: int, nbytes: int, imm: int, wr_id: int) -> int:
    count = peek(context + _COUNT)
    poke(context + _QUEUE + (count & (_SLOTS - 1)) * 8, wr_id)
    poke(context + _COUNT, count + 1)
    return 0


@c_function("int64(int64)")
def _flush(context: int) -> int:
    return 0


@c_function("int64(int64, int64, int64)")
def _poll(context: int, events: int, limit: int) -> int:
    n = 0
    taken = peek(context + _TAKEN)
    count = peek(context + _COUNT)
    while taken < count and n < limit:
        event = events + n * EVENT_BYTES
        poke(event, SENT)
        poke(event + 8, peek(context + _QUEUE + (taken & (_SLOTS - 1)) * 8))
        poke(event + 16, 0)
        poke(event + 24, 0)
        taken += 1
        n += 1
    poke(context + _TAKEN, taken)
    feed = peek(context + _FEED)
    end = peek(context + _FEED_END)
    while feed < end and n < limit:
        imm = peek(feed)
        event = events + n * EVENT_BYTES
        poke(event, ARRIVED)
        poke(event + 8, imm)
        poke(event + 16, imm >> 20)
        poke(event + 24, 0)
        feed += 8
        n += 1
    poke(context + _FEED, feed)
    return n


@c_function("int64(int64, int64, int64)")
def _drop(context: int, peer: int, reason: int) -> int:
    return 0


@compiled
def _fill(ring: int, head: int, low: int, high: int, rank_step: int, peers: int) -> int:
    """Write a full ring of 64-byte commands to ``peers`` peers in turn, as kernels would."""
    lap = ((head // 4096) + 1) & 1
    for i in range(4096):
        slot = ring + 256 + i * 16
        poke(slot, low | lap)
        store64(slot + 8, (high + (1 + i % peers) * rank_step) | lap)
    poke(ring, head + 4096)
    return head + 4096


@compiled
def _until_taken(state: int, ring: int, head: int, context: int) -> None:
    while load64(ring + 64) < head or peek(context + 8) < peek(context):
        step(state)


@compiled
def _stub_alone(post: int, poll: int, context: int, events: int, count: int) -> None:
    """What the stub costs by itself: ``count`` posts in batches of 64, and a poll for each batch."""
    for k in range(count):
        call8(post, context, k & 7, 8, 4096, 0, 64, 5, k)
        if k & 63 == 63:
            call3(poll, context, events, 64)


@compiled
def _until_fed(state: int, context: int) -> None:
    while peek(context + 16) < peek(context + 24):
        step(state)


def _state(memory: np.ndarray, error: np.ndarray) -> ProxyState:
    path = DataPath(
        memory.ctypes.data, post=_post.address, flush=_flush.address, poll=_poll.address, drop=_drop.address
    )
    capabilities = Capabilities("stub", True, True, ("shared",), 32, 256 << 20)
    return ProxyState(
        rank=0,
        ranks=1 + _PEERS,
        proxy=0,
        proxies=1,
        window=1 << 20,
        window_bytes=1 << 20,
        error=error.ctypes.data,
        paths=[path],
        capabilities=[capabilities],
        route=[-1] + [0] * _PEERS,
        ring_slots=_SLOTS,
        quantum=1 << 20,
        bytes_in_flight=64 << 20,
        peer_bytes_in_flight=16 << 20,
        writes_in_flight=4096,
    )


def _credits(state: ProxyState, sent: int, before: int) -> np.ndarray:
    """The immediates by which all peers cover ``sent`` writes each."""
    words = [
        peer << 20 | (CREDIT | LL_DISPATCH) << 12 | 1 << 11 | k % SEQUENCE_SPACE
        for peer in range(1, 1 + _PEERS)
        for k in range(before // CREDIT_WRITES, sent // CREDIT_WRITES)
    ]
    return np.array(words, np.int64)


def commands() -> float:
    """Nanoseconds per command: ring -> post -> completion, 64-byte writes to 8 peers in turn."""
    memory, error = aligned_zeros(_QUEUE + _SLOTS * 8), np.zeros(ERROR_WORDS, np.int64)
    state = _state(memory, error)
    words = memory.view(np.int64)
    low = LOW.pack(length=4)
    high = HIGH.pack(stream=LL_DISPATCH, kind=KIND_WRITE, last=1)
    head, samples, covered = 0, [], 0
    for _ in range(_ROUNDS):
        head = _fill(state.ring, head, low, high, 1 << HIGH["rank"].shift, _PEERS)
        start = time.perf_counter_ns()
        _until_taken(state.address, state.ring, head, memory.ctypes.data)
        samples.append((time.perf_counter_ns() - start) / _SLOTS)
        sent = head // _PEERS
        feed = _credits(state, sent, covered)
        covered = sent
        words[_FEED // 8], words[_FEED_END // 8] = feed.ctypes.data, feed.ctypes.data + feed.nbytes
        _until_fed(state.address, memory.ctypes.data)
    assert error[0] == 0
    assert (state.completed[1:, LL_DISPATCH] == head // _PEERS).all()
    assert not state.counters[C_QUEUED // 8], "commands were queued: the fast path was not measured"
    return statistics.median(samples)


def stub() -> float:
    """Nanoseconds that one post and its completion cost inside the stub."""
    memory, events = aligned_zeros(_QUEUE + _SLOTS * 8), aligned_zeros(64 * EVENT_BYTES)
    arguments = _post.address, _poll.address, memory.ctypes.data, events.ctypes.data
    samples = []
    for _ in range(_ROUNDS):
        start = time.perf_counter_ns()
        _stub_alone(*arguments, _SLOTS)
        samples.append((time.perf_counter_ns() - start) / _SLOTS)
    return statistics.median(samples)


def immediates(shuffle: int) -> float:
    """Nanoseconds per immediate of 8 peers in turn; each peer's come shuffled within groups of ``shuffle``."""
    memory, error = aligned_zeros(_QUEUE + _SLOTS * 8), np.zeros(ERROR_WORDS, np.int64)
    state = _state(memory, error)
    words = memory.view(np.int64)
    rng = np.random.default_rng(1)
    samples, number, per_peer = [], 0, 512
    for _ in range(_ROUNDS):
        order = np.arange(per_peer).reshape(-1, shuffle)
        order = rng.permuted(order, axis=1).reshape(-1)
        sequence = (number + order)[:, None] % SEQUENCE_SPACE
        peers = np.arange(1, 1 + _PEERS)[None, :]
        feed = (peers << 20 | LL_DISPATCH << 12 | 1 << 11 | sequence).astype(np.int64).reshape(-1)
        words[_FEED // 8], words[_FEED_END // 8] = feed.ctypes.data, feed.ctypes.data + feed.nbytes
        start = time.perf_counter_ns()
        _until_fed(state.address, memory.ctypes.data)
        samples.append((time.perf_counter_ns() - start) / len(feed))
        number += per_peer
    assert error[0] == 0
    assert (state.arrived[1:, LL_DISPATCH] == number).all()
    return statistics.median(samples)


def main() -> None:
    """Print the figures (medians)."""
    warm()
    figures: dict[str, Any] = {
        "command, ring to completion": commands(),
        "    of which inside the stub": stub(),
        "immediate, in order": immediates(1),
        "immediate, shuffled in groups of 16": immediates(16),
    }
    for name, value in figures.items():
        print(f"{name:40s} {value:6.1f} ns")


if __name__ == "__main__":
    main()
