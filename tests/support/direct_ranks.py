"""Ranks as threads of one process whose kernels map each other's windows: no proxies, no sockets, starts in no time."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.kernel_space import KernelSpace
from uccl_ep_serving.data_plane.segments import Segment
from uccl_ep_serving.data_plane.turn import Turn
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.protocol.layout import LowLatencyPlan, LowLatencyRoom, NormalPlan, WindowLayout


class DirectRuntime:
    """What ``low_latency`` and ``normal`` need of a Runtime, for one of several threads.

    See ``uccl_ep_serving.data_plane.runtime.Runtime`` for the meaning of the attributes.
    """

    def __init__(self, group: DirectGroup, rank: int, settings: Settings) -> None:
        self.group = group
        self.rank = rank
        self.ranks = group.ranks
        self.settings = settings
        self.turn = Turn()
        self.opening = id(group) & 0xFFFFFFFF
        self.epoch = 0
        self.stale = self.interrupted = ""
        self.rebuild_requested = False
        self.records: list[tuple[str, int, int, int]] = []
        self.space = group.spaces[rank]
        self.node_ranks = group.node_ranks
        self.channels = group.settings.least_channels

    def __getattr__(self, name: str) -> Any:
        # layout, window, context, mask, progress, and heap are the kernel space's own
        return getattr(self.space, name)

    def check(self, phase: str) -> None:
        self.space.phase = phase
        self.space.watch()
        if self.space.failed:
            raise self.space.failure(phase)

    def record(self, op: str, tokens: int, rows: int, nanoseconds: int, **extra: int) -> None:
        self.records.append((op, tokens, rows, nanoseconds))

    def begin_operation(self, plan: LowLatencyPlan | None = None, combines: bool = False) -> None:
        pass

    def interrupt(self, operation: str) -> None:
        self.interrupted = operation

    def compile_together(self, compile: Callable[[], object]) -> None:
        compile()

    def rebuild(
        self, plan: LowLatencyPlan | None, objection: str = "", compile: Callable[[], object] = lambda: None
    ) -> None:
        """Collective: new windows with room for ``plan`` and all before it."""
        if objection:
            raise ConfigError(objection)
        compile()
        self.group.proposals[self.rank] = plan
        if self.group.barrier.wait(30) == 0:
            self.group.agreed = len(set(self.group.proposals)) == 1
            if self.group.agreed:
                rooms = [room for room in (self.layout.low_latency, plan and plan.room) if room]
                self.group.build(functools.reduce(LowLatencyRoom.with_room_for, rooms) if rooms else None)
        self.group.barrier.wait(30)
        if not self.group.agreed:
            raise ConfigError(f"ranks disagree on the low-latency plan: {self.group.proposals}")
        self.space = self.group.spaces[self.rank]
        self.epoch += 1
        self.interrupted = ""


class DirectGroup:
    """``ranks`` kernel spaces connected to each other directly."""

    def __init__(self, ranks: int, normal: NormalPlan | None = None, settings: Settings | None = None) -> None:
        self.ranks = ranks
        self.settings = settings or Settings(timeout=20.0)
        self.normal = normal or NormalPlan(ranks, 256, heap=64 << 20, rounds=1 << 20, chunk=64 << 10)
        self.node_ranks = 1
        self.barrier = threading.Barrier(ranks)
        self.proposals: list[LowLatencyPlan | None] = [None] * ranks
        self.agreed = False
        self.spaces: list[KernelSpace] = []
        self.build(None)

    def build(self, room: LowLatencyRoom | None) -> None:
        layout = WindowLayout(self.ranks, room, self.normal)
        segments = [Segment.create(f"test{rank}", layout.nbytes) for rank in range(self.ranks)]
        self.spaces = [
            KernelSpace(rank, self.ranks, self.settings.least_channels, segment, layout, self.settings.timeout)
            for rank, segment in enumerate(segments)
        ]
        for space in self.spaces:
            for peer, segment in enumerate(segments):
                space.connect_direct(peer, segment.address)
        for segment in segments:
            segment.close_descriptor()

    def run(self, body: Callable[[DirectRuntime], Any], seconds: float = 100.0) -> list[Any]:
        """Run ``body`` in one thread per rank; returns results by rank, raises the first failure.

        A rank that has not come back after ``seconds`` is one: compiled code that hangs cannot be interrupted.
        """
        results: list[Any] = [None] * self.ranks
        failures: list[BaseException | None] = [None] * self.ranks

        def work(rank: int) -> None:
            try:
                results[rank] = body(DirectRuntime(self, rank, self.settings))
            except BaseException as failure:
                failures[rank] = failure

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        assert not hanging, f"ranks {hanging} hang: {failures}"
        for failure in failures:
            if failure is not None:
                raise failure
        return results
