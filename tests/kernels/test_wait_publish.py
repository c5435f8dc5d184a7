"""The shared building blocks: bounded waits, and publishing into rings and flags."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from uccl_ep_serving.data_plane import kernel_space
from uccl_ep_serving.data_plane.kernel_space import KernelSpace
from uccl_ep_serving.data_plane.segments import Segment
from uccl_ep_serving.errors import PeerLost, ProtocolError
from uccl_ep_serving.kernels.cpu.context import (
    ALWAYS,
    arrived_count,
    completed_count,
    is_masked,
    own_rank,
    peer_window,
    rank_count,
)
from uccl_ep_serving.kernels.cpu.ll_message import wait_message
from uccl_ep_serving.kernels.cpu.publish import put_write, reserve, store_flag
from uccl_ep_serving.kernels.cpu.wait import wait_arrived, wait_completed
from uccl_ep_serving.protocol.command import MAX_WRITE_BYTES, Command, decode
from uccl_ep_serving.protocol.context import (
    ERROR_CODE,
    ERROR_PEER,
    FAILURE_CLAIMED,
    FAILURE_PEER_LOST,
    STATUS_OK,
    STATUS_PENDING,
    STATUS_POISONED,
    WINDOW_BYTES,
)
from uccl_ep_serving.protocol.layout import NormalPlan, WindowLayout
from uccl_ep_serving.protocol.ring import CAPACITY, HEAD, SLOTS, TAIL, lap_of, ring_bytes
from uccl_ep_serving.protocol.streams import CREDIT, LL_DISPATCH, STREAMS

STREAM = LL_DISPATCH + 3


class Bench:
    """Rank 0 of three: rank 1 is mapped, rank 2 is reached through a ring that the test reads."""

    def __init__(self, capacity: int = 8) -> None:
        layout = WindowLayout(3, None, NormalPlan(3, 16, heap=4096, rounds=4096, chunk=4096))
        self.segments = [Segment.create("bench", layout.nbytes) for _ in range(2)]
        self.space = KernelSpace(0, 3, 1, self.segments[0], layout, 1.0)
        self.space.connect_direct(1, self.segments[1].address)
        self.arrived = np.zeros(STREAMS, dtype=np.int64)
        self.completed = np.zeros(STREAMS, dtype=np.int64)
        self.space.connect_proxied(
            2,
            lambda peer, stream: self.arrived[stream:].ctypes.data,
            lambda peer, stream: self.completed[stream:].ctypes.data,
        )
        self.ring = np.zeros(ring_bytes(capacity) // 8, dtype=np.int64)
        self.capacity = capacity
        self.ring[CAPACITY // 8] = capacity
        for stream in range(CREDIT):
            self.space.set_ring(stream, self.ring.ctypes.data)
        self.layout = layout

    def put(self, **command: int) -> int:
        defaults = {"peer": 2, "stream": STREAM, "source": 64, "target": 128, "nbytes": 32, "last": 1}
        return put_write(self.space.context, *{**defaults, **command}.values())

    def take(self) -> list[Command]:
        """Everything in the ring, as the proxy would take it."""
        commands = []
        while True:
            tail = int(self.ring[TAIL // 8])
            slot = SLOTS // 8 + tail % self.capacity * 2
            low, high = int(self.ring[slot]), int(self.ring[slot + 1])
            if not low & 1 == high & 1 == lap_of(tail, self.capacity):
                return commands
            commands.append(decode(low, high))
            self.ring[TAIL // 8] = tail + 1

    def flag(self, stream: int) -> int:
        """Rank 1's view of the count that rank 0 stored."""
        words = self.segments[1].bytes[self.layout.direct_flags :].view(np.int64)
        return int(words[stream])


@pytest.fixture
def bench() -> Bench:
    return Bench()


def soon(milliseconds: float = 20) -> int:
    return time.monotonic_ns() + int(milliseconds * 1e6)


def test_context(bench: Bench) -> None:
    context = bench.space.context
    assert (own_rank(context), rank_count(context)) == (0, 3)
    assert peer_window(context, 0) == bench.segments[0].address
    assert peer_window(context, 1) == bench.segments[1].address
    assert peer_window(context, 2) == 0
    bench.arrived[STREAM], bench.completed[STREAM] = 5, 4
    assert arrived_count(context, 2, STREAM) == 5
    assert completed_count(context, 2, STREAM) == 4
    assert completed_count(context, 1, STREAM) == ALWAYS
    bench.space.mask[2] = 1
    assert [is_masked(context, peer) for peer in range(3)] == [False, False, True]


def test_commands_say_what_was_put(bench: Bench) -> None:
    assert bench.put() == STATUS_OK
    assert bench.put(stream=1, source=4096, target=0, nbytes=0, last=0) == STATUS_OK
    assert bench.take() == [
        Command(rank=2, stream=STREAM, source=64, target=128, length=32, last=True),
        Command(rank=2, stream=1, source=4096, target=0, length=0, last=False),
    ]


def test_largest_offsets_fit(bench: Bench) -> None:
    far = (1 << 40) - 16
    bench.space._context[WINDOW_BYTES] = 1 << 41
    bench.put(source=far, target=far, nbytes=MAX_WRITE_BYTES, peer=2)
    assert bench.take() == [Command(rank=2, stream=STREAM, source=far, target=far, length=MAX_WRITE_BYTES, last=True)]


@pytest.mark.parametrize(
    "misfit",
    [
        {"source": -16},
        {"target": -16},
        {"nbytes": -16},
        {"source": "end"},
        {"target": "end"},
        {"nbytes": "window"},
        {"source": 8},
        {"target": 8},
        {"nbytes": 8},
    ],
)
def test_a_write_outside_the_window_is_refused_before_it_is_published(bench: Bench, misfit: dict[str, Any]) -> None:
    """At the very end it still fits, one unit further it does not."""
    window = bench.layout.nbytes
    assert bench.put(source=window - 32, target=window - 32) == STATUS_OK
    words = {"end": window - 16, "window": window}
    assert bench.put(**{name: words.get(value, value) for name, value in misfit.items()}) == STATUS_POISONED
    assert len(bench.take()) == 1
    error = bench.space.failure("bench")
    assert isinstance(error, ProtocolError)
    assert (error.peer, error.channel) == (2, 3)
    assert f"a window of {window} bytes. Nothing of it was sent" in str(error)


def test_long_write_becomes_several_commands(bench: Bench) -> None:
    bench.space._context[WINDOW_BYTES] = 1 << 41
    assert bench.put(source=0, target=1 << 30, nbytes=2 * MAX_WRITE_BYTES + 48) == STATUS_OK
    commands = bench.take()
    assert [(command.length, command.last) for command in commands] == [
        (MAX_WRITE_BYTES, False),
        (MAX_WRITE_BYTES, False),
        (48, True),
    ]
    assert [command.source for command in commands] == [0, MAX_WRITE_BYTES, 2 * MAX_WRITE_BYTES]
    assert [command.target - (1 << 30) for command in commands] == [0, MAX_WRITE_BYTES, 2 * MAX_WRITE_BYTES]


def test_full_ring_reserves_nothing(bench: Bench) -> None:
    bench.space._context[WINDOW_BYTES] = 1 << 40
    for index in range(8):
        assert bench.put(source=16 * index) == STATUS_OK
    assert bench.put() == STATUS_PENDING
    assert bench.ring[HEAD // 8] == 8
    # a long write needs all its slots at once
    assert len(bench.take()) == 8
    for _ in range(7):
        bench.put()
    assert bench.put(nbytes=2 * MAX_WRITE_BYTES) == STATUS_PENDING
    assert bench.put() == STATUS_OK


def test_laps_need_no_clearing(bench: Bench) -> None:
    for lap in range(5):
        for index in range(7):
            bench.put(source=16 * (lap * 7 + index))
        assert [command.source for command in bench.take()] == [16 * (lap * 7 + index) for index in range(7)]


def test_producers_share_a_ring() -> None:
    """Threads that put at once: each command arrives whole, once, and in the order of its producer."""
    bench = Bench(capacity=4)
    each = 300

    def produce(stream: int) -> None:
        for index in range(each):
            while bench.put(stream=stream, source=16 * index) == STATUS_PENDING:
                time.sleep(0)

    bench.put()
    bench.take()
    threads = [threading.Thread(target=produce, args=(stream,)) for stream in (1, 2, 3)]
    for thread in threads:
        thread.start()
    taken: list[Command] = []
    deadline = time.monotonic() + 20
    while len(taken) < 3 * each and time.monotonic() < deadline:
        taken += bench.take()
        time.sleep(0)
    for thread in threads:
        thread.join(5)
    for stream in (1, 2, 3):
        assert [command.source for command in taken if command.stream == stream] == [16 * i for i in range(each)]


def test_reserve_returns_consecutive_slots(bench: Bench) -> None:
    ring = bench.ring.ctypes.data
    assert [reserve(ring, 3), reserve(ring, 5), reserve(ring, 1)] == [0, 3, -1]
    bench.ring[TAIL // 8] = 2
    assert [reserve(ring, 3), reserve(ring, 2)] == [-1, 8]


def test_flag_of_a_mapped_peer(bench: Bench) -> None:
    assert store_flag(bench.space.context, 1, STREAM, 3) == STATUS_OK
    assert bench.flag(STREAM) == 3
    assert bench.flag(STREAM + 1) == 0


def test_nothing_is_published_after_the_sticky_error(bench: Bench) -> None:
    bench.space.fail(FAILURE_PEER_LOST, 2)
    assert bench.put() == STATUS_POISONED
    assert store_flag(bench.space.context, 1, STREAM, 3) == STATUS_POISONED
    assert bench.ring[HEAD // 8] == 0
    assert not bench.ring[SLOTS // 8 :].any()
    assert bench.flag(STREAM) == 0


@pytest.mark.parametrize("wait", [wait_arrived, wait_completed])
def test_wait_ends_with_its_slice(bench: Bench, wait: object) -> None:
    counts = bench.arrived if wait is wait_arrived else bench.completed
    counts[STREAM] = 2
    progress = bench.space.progress
    assert wait(bench.space.context, progress, 2, STREAM, 2, soon()) == STATUS_OK  # type: ignore[operator]
    started = time.monotonic()
    assert wait(bench.space.context, progress, 2, STREAM, 3, soon(30)) == STATUS_PENDING  # type: ignore[operator]
    assert 0.025 < time.monotonic() - started < 1
    assert bench.space._progress[:4].tolist() == [2, STREAM, 2, 3]


def test_wait_sees_the_count_arrive(bench: Bench) -> None:
    def arrive() -> None:
        time.sleep(0.05)
        bench.arrived[STREAM] = 1

    thread = threading.Thread(target=arrive)
    thread.start()
    assert wait_arrived(bench.space.context, bench.space.progress, 2, STREAM, 1, soon(5000)) == STATUS_OK
    thread.join()


def test_wait_ends_when_the_sticky_error_is_set(bench: Bench) -> None:
    def fail() -> None:
        time.sleep(0.05)
        bench.space.fail(FAILURE_PEER_LOST, 2)

    thread = threading.Thread(target=fail)
    thread.start()
    started = time.monotonic()
    assert wait_arrived(bench.space.context, bench.space.progress, 2, STREAM, 1, soon(5000)) == STATUS_POISONED
    assert time.monotonic() - started < 2
    thread.join()


def test_an_error_is_named_although_it_was_only_claimed_so_far(bench: Bench) -> None:
    """A proxy thread can lose its core between claiming the error word and saying what happened."""
    error = np.ctypeslib.as_array(ctypes.cast(bench.space.error, ctypes.POINTER(ctypes.c_int64)), (8,))
    error[ERROR_CODE] = FAILURE_CLAIMED

    def describe() -> None:
        error[ERROR_PEER] = 2
        error[ERROR_CODE] = FAILURE_PEER_LOST

    thread = threading.Timer(0.05, describe)
    thread.start()
    with pytest.raises(PeerLost, match="rank 2 is lost"):
        raise bench.space.failure("a test")
    thread.join()


def test_an_error_that_stays_claimed_has_a_cause_and_a_next_step(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_space, "CLAIM_TIMEOUT", 0.05)
    error = np.ctypeslib.as_array(ctypes.cast(bench.space.error, ctypes.POINTER(ctypes.c_int64)), (8,))
    error[ERROR_CODE] = FAILURE_CLAIMED
    text = str(bench.space.failure("a test"))
    assert "has not said why. Likely cause: it gets no core" in text
    assert text.endswith("build the group again")


def test_mapped_peers_writes_are_complete(bench: Bench) -> None:
    assert wait_completed(bench.space.context, bench.space.progress, 1, STREAM, 1 << 40, 0) == STATUS_OK


def _sleeps(thread: int) -> int:
    """How often a thread of this process has gone to sleep by itself."""
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


@pytest.mark.parametrize(
    "wait",
    [
        lambda context, progress, end: wait_arrived(context, progress, 2, LL_DISPATCH, 1, end),
        lambda context, progress, end: wait_completed(context, progress, 2, LL_DISPATCH, 1, end),
        lambda context, progress, end: wait_message(context, progress, 2, LL_DISPATCH, 0, 0, end),
    ],
    ids=["arrived", "completed", "message"],
)
def test_who_waits_for_long_leaves_the_core_to_others(bench: Bench, wait: Callable[[int, int, int], int]) -> None:
    """To the proxies, which bring what it waits for: it sleeps in between."""
    addresses = bench.space.context, bench.space.progress
    assert wait(*addresses, 0) == STATUS_PENDING  # it is compiled now
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(wait(*addresses, soon(100_000))))
    thread.start()
    try:
        assert thread.native_id is not None
        # naps come after some thousand spins, which take a while on a machine that is busy
        deadline = time.monotonic() + 60
        while _sleeps(thread.native_id) < 100:
            assert time.monotonic() < deadline, "it spins on"
            time.sleep(0.01)
    finally:
        bench.arrived[LL_DISPATCH] = bench.completed[LL_DISPATCH] = 1
        thread.join(30)
    assert ended == [STATUS_OK]
