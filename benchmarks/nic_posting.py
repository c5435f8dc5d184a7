"""What a write costs to post over ``efa``: nanoseconds, beside a C++ twin that posts the same list.

    python benchmarks/nic_posting.py [--json FILE] [--rounds N]

Both post through the function pointers of the same ``ibv_qp_ex``, a queue in memory that builds a 64-byte work request
per write: the cost of that is in both figures, a NIC's doorbell in neither. The twin is compiled with g++ -O3 where
there is one. What was posted is compared byte by byte after every round.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.memory_queue import DEPTH, MemoryQueue
from benchmarks.twins import compile_twin, figures, markdown, result
from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.native.atomics import peek
from uccl_ep_serving.native.calls import call1, call3, call8
from uccl_ep_serving.native.jit import compiled
from uccl_ep_serving.proxy.transport.nic import efa_words as srd
from uccl_ep_serving.proxy.transport.nic import words
from uccl_ep_serving.proxy.transport.nic.efa_data import FUNCTIONS
from uccl_ep_serving.proxy.transport.nic.window import WHOLE_SHIFT, KeyTable

__all__ = ["measure"]

CASE = "a write to one of 24 peers, in batches of 24"

PEERS = 24  # the other hosts' ranks at EP32 with 8 GPUs a host
COUNT = 2048
BATCH = 24  # writes of one dispatch: one per peer
WINDOW_BYTES = 1 << 30
TWIN = Path(__file__).with_name("nic_posting_twin.cpp")
#: peer, stream, local, target, nbytes, imm, wr_id
WRITE_WORDS = 7


@compiled
def _post_list(post: int, flush: int, context: int, writes: int, count: int, batch: int) -> int:
    """Post a list as the proxy loop does, through the pointers of a data path."""
    for i in range(count):
        w = writes + i * 56
        status = call8(
            post, context, peek(w), peek(w + 8), peek(w + 16), peek(w + 24), peek(w + 32), peek(w + 40), peek(w + 48)
        )
        if status != 0:
            return status
        if (i + 1) % batch == 0 or i + 1 == count:
            status = call1(flush, context)
            if status != 0:
                return status
    return 0


@compiled
def _drain(poll: int, context: int, events: int, count: int) -> int:
    """Poll until ``count`` completions came; returns how many."""
    seen = 0
    while seen < count:
        found = call3(poll, context, events, 64)
        if found <= 0:
            break
        seen += found
    return seen


def _writes(window: int) -> np.ndarray:
    """The list: messages of 4 to 64 tokens of DeepSeek-V3 in FP8 to all peers in turn."""
    rng = np.random.default_rng(1)
    writes = np.zeros((COUNT, WRITE_WORDS), np.int64)
    writes[:, 0] = 1 + np.arange(COUNT) % PEERS
    writes[:, 1] = 8
    writes[:, 4] = rng.integers(4, 65, COUNT) * 7424
    writes[:, 3] = rng.integers(0, (WINDOW_BYTES >> 4) - (1 << 16), COUNT) << 4
    writes[:, 2] = window + (rng.integers(0, (WINDOW_BYTES >> 4) - (1 << 16), COUNT) << 4)
    writes[:, 5] = (8 << 12) | (1 << 11) | (np.arange(COUNT) % 2048)
    writes[:, 6] = np.arange(COUNT)
    return writes


class Numba:
    """The data path of ``efa`` on a queue in memory."""

    def __init__(self, window: int) -> None:
        self.queue = MemoryQueue()
        self.state = state = srd.EfaMemory(
            rank=0,
            ranks=1 + PEERS,
            proxies=1,
            window=window,
            window_bytes=WINDOW_BYTES,
            max_write=1 << 30,
            depths=[DEPTH],
            receives=[0],
        )
        address = self.queue.address
        places = (srd.WR_START, srd.WR_WRITE_IMM, srd.WR_SET_ADDRESS, srd.WR_SET_SGE, srd.WR_COMPLETE)
        operations = {place: op.address for place, op in zip(places, self.queue.operations, strict=True)}
        queue = {srd.QP: address, srd.QP_EX: address, words.CQ: address, words.POLL_CQ: self.queue.poll_cq}
        state.fill(state.rails[0], {**queue, **operations})
        for peer in range(1, 1 + PEERS):
            state.peers[peer, [words.STATE, words.COMMON_RAILS, words.TARGET]] = words.UP, 1, peer << 40
            link = state.link_index(peer, 0)
            state.links[link, [srd.AH, srd.QPN, srd.QKEY]] = 4096 + peer, 100 + peer, 200 + peer
            own, there = KeyTable(WHOLE_SHIFT, (77,)), KeyTable(WHOLE_SHIFT, (300 + peer,))
            state.use_keys([link], words.HOST_KEYS, own, there)
        self._post, self._flush, self._poll, _ = FUNCTIONS.addresses
        self._events = np.zeros(64 * 4, np.int64)

    def post(self, writes: np.ndarray) -> None:
        """The timed part."""
        context = self.state.address
        assert _post_list(self._post, self._flush, context, writes.ctypes.data, len(writes), BATCH) == 0

    def complete(self) -> None:
        """Take the completions."""
        assert _drain(self._poll, self.state.address, self._events.ctypes.data, COUNT) == COUNT


class _TwinPeer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("up", "window", "ah", "qpn", "qkey", "rkey")]


class _Twin(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "qp",
            "window",
            "window_bytes",
            "max_write",
            "lkey",
            "open",
            "free",
            "peers",
            "slots",
            "free_slots",
        )
    ]


class Cpp:
    """The twin on a queue of its own."""

    def __init__(self, window: int, loaded: ctypes.CDLL) -> None:
        self.queue = MemoryQueue()
        self._peers = (_TwinPeer * (1 + PEERS))()
        for peer in range(1, 1 + PEERS):
            self._peers[peer] = _TwinPeer(1, peer << 40, 4096 + peer, 100 + peer, 200 + peer, 300 + peer)
        self._slots, self._free = np.zeros(2 * DEPTH, np.int64), np.arange(DEPTH, dtype=np.int64)
        self._twin = _Twin(
            self.queue.address,
            window,
            WINDOW_BYTES,
            1 << 30,
            77,
            0,
            DEPTH,
            ctypes.addressof(self._peers),
            self._slots.ctypes.data,
            self._free.ctypes.data,
        )
        self._post_list, self._complete = loaded.twin_post_list, loaded.twin_complete
        self._post_list.restype = ctypes.c_int64
        self._post_list.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self._complete.argtypes = [ctypes.c_void_p, ctypes.c_int64]

    def post(self, writes: np.ndarray) -> None:
        """The timed part."""
        assert self._post_list(ctypes.addressof(self._twin), writes.ctypes.data, len(writes), BATCH) == 0

    def complete(self) -> None:
        """Give the slots back, in the order in which the other one gets its own."""
        self._complete(ctypes.addressof(self._twin), COUNT)
        self._free[:] = np.arange(DEPTH)


def _round(subject: Numba | Cpp, writes: np.ndarray) -> float:
    """Nanoseconds per write of one list."""
    start = time.perf_counter_ns()
    subject.post(writes)
    taken = time.perf_counter_ns() - start
    subject.complete()
    return taken / len(writes)


def _same(one: MemoryQueue, other: MemoryQueue) -> bool:
    """Whether both built the same requests, but for the slots' numbers."""
    return one.posted == other.posted and bool(np.array_equal(one.requests[:, 8:56], other.requests[:, 8:56]))


def measure(rounds: int) -> dict[str, Any]:
    """Nanoseconds per write: summaries of the data path, of the twin, and of their quotients round by round.

    Raises:
        AssertionError: the two built different work requests.
    """
    machine = describe()
    window = 1 << 45  # nothing reads it
    writes = _writes(window)
    with tempfile.TemporaryDirectory() as directory:
        loaded, compiler = compile_twin(TWIN, Path(directory))
        numba = Numba(window)
        if loaded is None:
            case = figures(lambda: _round(numba, writes), None, rounds, 3)
        else:
            twin = Cpp(window, loaded)

            def beside() -> float:
                taken = _round(twin, writes)
                assert _same(numba.queue, twin.queue), "the two posted different work requests"
                return taken

            case = figures(lambda: _round(numba, writes), beside, rounds, 3)
    return result(machine, compiler, rounds, {CASE: case})


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    found = measure(arguments.rounds)
    print(markdown(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
