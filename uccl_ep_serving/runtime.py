"""The runtime of a Buffer: allocate -> register -> connect -> start, and the reverse on close.

A runtime outlives its *data plane* (window, endpoints, proxies, kernel space). When low-latency mode first meets a
shape that does not fit, all ranks agree on it and rebuild the data plane with a larger window (:meth:`Runtime.grow`);
the control connections stay. Everything above sees only the kernel space of the current generation.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .bootstrap import Exchange, introduce
from .config import Settings, unknown_variables
from .control import ControlMesh
from .data_plane import DataPlane
from .errors import ConfigError, PeerError, UcclEpError
from .kernel_space import KernelSpace
from .live import LiveServer
from .memory import HeapAllocator
from .operation_log import OperationLog
from .plane_builder import PlaneBuilder, normal_plan
from .protocol import context as ctx
from .protocol.layout import LowLatencyPlan, WindowLayout
from .proxy.transport.select import DIRECT

__all__ = ["Runtime"]

_log = logging.getLogger("uccl_ep_serving")

#: Seconds that an orderly close waits for the others; a rank that never closes must not hold this one's shutdown.
_CLOSE_SECONDS = 10.0


class Runtime:
    """Connections, memory and proxies of one Buffer on one rank. Construction is collective.

    Args:
        exchange: the launcher's all-gather; used once.
        settings: this rank's settings.
        heap_bytes: least bytes of window for normal mode's received rows (the engine's size hint).

    Attributes:
        rank, ranks, settings: of the group.
        generation: number of :meth:`grow` calls; message counters restart at 0 with each.

    Raises:
        ConfigError, BootstrapError, TransportError: nothing is left open.
    """

    def __init__(self, exchange: Exchange, settings: Settings, heap_bytes: int = 0) -> None:
        for name, closest in unknown_variables().items():
            _log.warning(
                "%s is not a setting of uccl_ep_serving%s", name, f"; did you mean {closest}?" if closest else ""
            )
        self.settings = settings
        self.rank = exchange.rank
        self.ranks = exchange.size
        self.generation = 0
        self.operations = OperationLog()
        self.record = self.operations.record
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._broken = ""
        self._mask: npt.NDArray[np.int32] = np.zeros(self.ranks, dtype=np.int32)
        self._normal = normal_plan(self.ranks, settings, heap_bytes)
        self._mesh = ControlMesh(self.rank, self.ranks, settings)
        self._plane: DataPlane | None = None
        self._live: LiveServer | None = None
        try:
            introduction = introduce(
                exchange,
                settings,
                socket_name=self._mesh.socket_name,
                address=self._mesh.address,
                port=self._mesh.port,
                sizes={"normal-mode heap bytes": self._normal.heap},
            )
            self._builder = PlaneBuilder(self._mesh, introduction, settings, self._normal, self._mask)
            self._mesh.on_lost = self._on_lost
            self._mesh.on_goodbye = self._on_goodbye
            self._mesh.connect(introduction)
            self._plane = self._build(None)
            self._live = LiveServer(self.stats)
        except BaseException:
            self._teardown(time.monotonic() + 1.0)
            raise
        self._log_choices()

    # -- what low_latency and normal use ------------------------------------------------------------------------

    @property
    def space(self) -> KernelSpace:
        """Kernel space of the current generation. Raises UcclEpError when the Buffer is closed, forked or broken."""
        if self._broken and not self._closed:
            raise UcclEpError(f"{self._broken}. Close this Buffer on all ranks and build the group again")
        if self._plane is None or self._plane.space is None or self._closed:
            raise UcclEpError("this Buffer is closed")
        if os.getpid() != self._pid:
            raise UcclEpError("this Buffer belongs to the parent process: build one in each process, after the fork")
        return self._plane.space

    @property
    def layout(self) -> WindowLayout:
        """Where everything lies in the windows of the current generation."""
        return self.space.layout

    @property
    def window(self) -> int:
        """Address of this rank's window."""
        return self.space.window

    @property
    def window_bytes(self) -> npt.NDArray[np.uint8]:
        """uint8 view of this rank's window."""
        return self.space.window_bytes

    @property
    def context(self) -> int:
        """Address of the kernel context block (``protocol.context``)."""
        return self.space.context

    @property
    def progress(self) -> int:
        """Address of the progress block: what a pending kernel waits for."""
        return self.space.progress

    @property
    def mask(self) -> npt.NDArray[np.int32]:
        """int32[ranks], 1 = peer masked."""
        return self._mask

    @property
    def heap(self) -> HeapAllocator:
        """Heap of normal mode's received rows."""
        return self.space.heap

    def check(self, phase: str = "operation") -> None:
        """Raise what is known to be wrong before an operation starts."""
        self.space.check(phase)

    def wait(self, phase: str, step: Callable[[int], int]) -> None:
        """See :meth:`KernelSpace.wait`."""
        self.space.wait(phase, step)

    def grow(self, plan: LowLatencyPlan) -> None:
        """Rebuild the data plane with room for ``plan``. Collective; no operation may be in flight.

        Raises:
            ConfigError: ranks ask for different plans; every rank raises and the group goes on as it was.
            PeerError: a rank did not take part.
        """
        self.check("low-latency setup")
        try:
            refusal = self._agree_on(plan)
            if not refusal:
                self._rebuild(plan)
        except BaseException as error:
            # Some ranks may have gone on and others not: there is no window, nor a step, that all of them share.
            self._broken = (
                f"rank {self.rank} could not lay its window out anew: {type(error).__name__}: {error}".rstrip(": ")
            )
            raise
        if refusal:
            raise ConfigError(f"low-latency setup: {refusal}. Nothing was changed")

    def _agree_on(self, plan: LowLatencyPlan) -> str:
        """Why no rank can have ``plan``, in words and for the same reason on every rank; empty when all can."""
        mine = msgspec.msgpack.encode(plan)
        answers = self._mesh.gather("low-latency setup", mine, without=self._masked(), timeout=self.settings.timeout)
        others = {
            rank: msgspec.msgpack.decode(payload, type=LowLatencyPlan)
            for rank, (payload, _) in enumerate(answers)
            if payload and payload != mine
        }
        if others:
            return f"the ranks disagree: rank {self.rank} has {plan}, " + ", ".join(
                f"rank {rank} has {other}" for rank, other in others.items()
            )
        try:
            WindowLayout(self.ranks, plan, self._normal)
        except ValueError as error:
            return str(error)
        return ""

    def _rebuild(self, plan: LowLatencyPlan) -> None:
        deadline = time.monotonic() + self.settings.connect_timeout
        old = self._plane
        if old is not None:
            if old.service is not None and not old.service.drain(deadline):
                _log.warning("rank %d: writes to the old window are still under way after the deadline", self.rank)
            # Nobody may unmap or stop while another rank still writes to it.
            self._mesh.gather("leaving the old window", without=self._masked())
            self._plane = None
            old.close(deadline)
        self.generation += 1
        self._plane = self._build(plan)

    def _build(self, plan: LowLatencyPlan | None) -> DataPlane:
        return self._builder.build(plan, self.generation, self._watch)

    # -- peers --------------------------------------------------------------------------------------------------

    def _masked(self) -> frozenset[int]:
        return frozenset(int(peer) for peer in np.flatnonzero(self._mask))

    def mask_peer(self, peer: int) -> None:
        """Leave ``peer`` out from now on: its tokens and experts drop out, the others go on."""
        self._mask[peer] = 1
        space = self.space
        space.clear_failure_of(peer)
        if self._plane is not None and self._plane.service is not None and not space.is_direct(peer):
            self._plane.service.forget(peer, ctx.FAILURE_PEER_LOST)
        _log.warning("rank %d masked rank %d: its tokens and experts are left out", self.rank, peer)

    def _on_lost(self, peer: int) -> None:
        if self._closed or self._mask[peer]:
            return
        plane = self._plane
        if plane is not None and plane.space is not None:
            plane.space.fail(ctx.FAILURE_PEER_LOST, peer)

    def _on_goodbye(self, peer: int) -> None:
        plane = self._plane
        if plane is not None and plane.service is not None and plane.routes.get(peer) not in (None, DIRECT):
            plane.service.forget(peer, ctx.FAILURE_CLOSED)

    def _watch(self) -> None:
        """Between slices of a wait: raise what the proxies or the control connections know."""
        plane = self._plane
        if plane is None or plane.space is None or plane.service is None:
            return
        for peer in self._mesh.lost:
            if not self._mask[peer]:
                plane.space.fail(ctx.FAILURE_PEER_LOST, peer)
        if not plane.space.failed:
            plane.service.check()

    def _log_choices(self) -> None:
        by_reason: dict[str, list[str]] = {}
        for peer, choice in sorted(self._plane.choices.items() if self._plane else ()):
            by_reason.setdefault(choice.reason, []).append(str(peer))
        routes = "; ".join(f"{reason}: ranks {', '.join(peers)}" for reason, peers in by_reason.items())
        _log.info(
            "uccl_ep rank %d of %d: %s. %d proxies, %d channels, window %.0f MiB (heap %.0f MiB), timeout %g s",
            self.rank,
            self.ranks,
            routes or "alone",
            self.settings.proxies,
            self.settings.channels,
            self.layout.nbytes / 2**20,
            self._normal.heap / 2**20,
            self.settings.timeout,
        )

    # -- sight and end ------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Plain counters of this rank; also what the live socket serves."""
        plane = self._plane
        routes = plane.routes if plane is not None else {}
        counters: dict[str, Any] = plane.service.counters() if plane is not None and plane.service is not None else {}
        return {
            "rank": self.rank,
            "world": self.ranks,
            "pid": self._pid,
            "generation": self.generation,
            "transport_by_peer": {str(peer): kind for peer, kind in routes.items()},
            "direct_peers": sorted(peer for peer, kind in routes.items() if kind == DIRECT),
            "proxies": self.settings.proxies,
            "channels": self.settings.channels,
            "masked": sorted(self._masked()),
            "lost": list(self._mesh.lost),
            "ops": self.operations.snapshot(),
            **counters.get("total", {}),
            "by_proxy": counters.get("proxies", []),
            "streams": counters.get("streams", []),
            "latency": {str(stream): buckets for stream, buckets in counters.get("latency", {}).items()},
        }

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._closed

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Stop, drain, wait for the others (bounded by ``timeout`` seconds), unmap. May be called twice."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
        deadline = time.monotonic() + timeout
        try:
            self._take_leave(deadline)
        finally:
            self._teardown(deadline)

    def _take_leave(self, deadline: float) -> None:
        """Let what is under way arrive, and wait until nobody uses this rank's memory any more."""
        plane = self._plane
        if self._broken or plane is None or plane.space is None or plane.service is None or plane.space.failed:
            return
        try:
            plane.service.drain(deadline)
            self._mesh.gather("close", without=self._masked(), timeout=max(deadline - time.monotonic(), 0.0))
        except UcclEpError as error:
            # The others may keep working or be gone; this rank leaves all the same.
            level = logging.WARNING if isinstance(error, PeerError) else logging.ERROR
            _log.log(level, "rank %d closes without the others: %s", self.rank, error)

    def _teardown(self, deadline: float) -> None:
        """Let go of everything, each part whatever becomes of the others (Ctrl-C included)."""
        self._closed = True
        plane, self._plane = self._plane, None
        with contextlib.ExitStack() as steps:  # runs from the last to the first
            if self._live is not None:
                steps.callback(self._live.close)
            steps.callback(self._mesh.close)
            if plane is not None:
                steps.callback(plane.close, deadline)
            steps.callback(self._mesh.goodbye)
