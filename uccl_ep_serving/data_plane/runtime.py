"""The runtime of a Buffer: allocate -> register -> connect -> start, and the reverse on close.

A runtime outlives its *data plane* (window, endpoints, proxies, kernel space). When low-latency mode meets a shape
that does not fit, or after a rank was masked, all ranks agree and build another one (:meth:`Runtime.rebuild`),
which begins a new *epoch*; the control connections stay. Everything above sees only the kernel space of the present
epoch.

:class:`Runtime` is what ``modes/`` and ``gpu/`` know of all this: there is no other description of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config import Settings, unknown_variables
from ..control_plane.bootstrap import Exchange, introduce, refusing
from ..control_plane.mesh import ControlMesh
from ..control_plane.steps import CLOSE
from ..errors import PeerError, UcclEpError
from ..native.failure import STICKY_ERROR
from ..native.groups import load
from ..protocol.layout import LowLatencyPlan, WindowLayout
from ..proxy.fence import DriverFlush
from ..proxy.stats import add_up
from ..proxy.transport.select import DIRECT
from ..stats import LiveServer, OperationLog
from .agreement import SETUP
from .epochs import Epochs
from .flight_recorder import FlightRecorder
from .gpu_direct import Gpu, GpuReach
from .kernel_space import KernelSpace
from .segments import HeapAllocator
from .standing import state_of
from .turn import Turn
from .window_sizes import normal_plan

__all__ = ["Runtime"]

_log = logging.getLogger("uccl_ep_serving")

#: Seconds that an orderly close waits for the others; a rank that never closes must not hold this one's shutdown.
_CLOSE_SECONDS = 10.0
#: Variables that are no settings, once a process has been told of them.
_told: set[str] = set()


class Runtime:
    """Connections, memory and proxies of one Buffer on one rank. Construction is collective.

    Args:
        exchange: the launcher's all-gather; used once.
        settings: this rank's settings.
        heap_bytes: least bytes of window for normal mode's received rows (the engine's size hint).
        gpu: whose tensors it may serve; None = CPU tensors only.

    Attributes:
        rank, ranks, settings: of the group.
        check: raises what is known to be wrong before an operation starts; ``check_usable`` only that the Buffer is
            closed, forked or broken, from any thread.

    Raises:
        ConfigError, BootstrapError, TransportError: nothing is left open.
    """

    def __init__(self, exchange: Exchange, settings: Settings, heap_bytes: int = 0, gpu: Gpu | None = None) -> None:
        for name, closest in unknown_variables().items():
            if name in _told:
                continue
            _told.add(name)
            _log.warning(
                "%s is not a setting of uccl_ep_serving%s", name, f"; did you mean {closest}?" if closest else ""
            )
        self.settings = settings
        #: 32 bits that name this opening of the group, equal on all ranks
        self.opening = 0
        self.rank = exchange.rank
        self.ranks = exchange.size
        #: of the tensors that are served, once the first has come; written by the Buffer, read for stats
        self.device = ""
        #: in seconds since 1970; tells Buffers apart
        self._opened = time.time()
        #: taken by every call of the Buffer that sends or receives
        self.turn = Turn()
        self.operations = OperationLog()
        self.record = self.operations.record
        with refusing(exchange):
            load(STICKY_ERROR)
            normal = normal_plan(self.ranks, settings, heap_bytes)
            recorder = None
            if settings.flight_recorder:
                recorder = FlightRecorder(settings.flight_recorder, self.rank, self.stats, self.operations.latest)
            # an exchange of the caller's own need not know
            self._mesh = ControlMesh(self.rank, self.ranks, settings, getattr(exchange, "store_host", ""))
        self._liveness = self._mesh.liveness
        self._epochs = Epochs(self._mesh, settings, normal, gpu)
        self._watch = self._epochs.watch
        self._watch.recorder = recorder
        self.check = self._watch.check
        self.check_usable = self._watch.check_usable
        self._live: LiveServer | None = None
        try:
            introduction = introduce(
                exchange,
                settings,
                socket_name=self._mesh.socket_name,
                address=self._mesh.address,
                port=self._mesh.port,
                chosen=self._mesh.chosen,
                sizes={"normal-mode heap bytes": normal.heap},
            )
            self.opening = int(introduction.group, 16)
            if recorder is not None:
                recorder.group = introduction.group
            self._mesh.connect(introduction)
            self._epochs.start(introduction)
            try:
                self._live = LiveServer(lambda: {**self.stats(), "calls": self.operations.latest()})
            except BaseException as error:
                self._epochs.tell(error)
                raise
        except BaseException:
            self._teardown(time.monotonic() + 1.0)
            raise

    # -- the present epoch --------------------------------------------------------------------------------------

    @property
    def space(self) -> KernelSpace:
        """Kernel space of the present epoch. Raises UcclEpError when the Buffer is closed or broken, and when
        there is none; that the process was forked, :meth:`check` says."""
        space = self._watch.present.space
        assert space is not None
        return space

    @property
    def epoch(self) -> int:
        """How often ranks have rebuilt their windows; message counters restart at 0 with each epoch."""
        return self._epochs.number

    @property
    def layout(self) -> WindowLayout:
        """Where everything lies in the windows of the present epoch."""
        return self.space.layout

    @property
    def window_bytes(self) -> npt.NDArray[np.uint8]:
        """uint8 view of this rank's window."""
        return self.space.window_bytes

    @property
    def context(self) -> int:
        """Address of the kernel context block (``protocol.context``)."""
        return self.space.context

    @property
    def mask(self) -> npt.NDArray[np.int32]:
        """int32[ranks], 1 = peer masked."""
        return self._liveness.mask

    @property
    def heap(self) -> HeapAllocator:
        """Heap of normal mode's received rows."""
        return self.space.heap

    @property
    def all_direct(self) -> bool:
        """True when kernels of this rank write every peer's window themselves; after the last data plane, while there
        is none."""
        return self._epochs.all_direct

    @property
    def node_ranks(self) -> int:
        """Ranks of a node when all nodes are equal groups of consecutive ranks that write each other's windows
        themselves and no rank is masked, else 1; the same on all ranks."""
        return self._epochs.node_ranks

    @property
    def channels(self) -> int:
        """Channels that messages are striped over, the same on all ranks and in all epochs."""
        return self._epochs.channels

    # -- operations ---------------------------------------------------------------------------------------------

    def begin_operation(self, plan: LowLatencyPlan | None = None, combines: bool = False) -> None:
        """Count a collective operation, before anything of it is sent; ``plan``: of one of low latency, which
        ``combines`` or dispatches."""
        self._watch.begin(plan, combines)

    def interrupt(self, operation: str) -> None:
        """An ``operation`` has ended early, so that this rank can go on only in a new epoch."""
        self._watch.interrupted = operation

    @property
    def interrupted(self) -> str:
        """The operation of this epoch that has ended early on this rank, in words; empty while none has."""
        return self._watch.interrupted

    def exchange(self, step: str, payload: bytes) -> list[bytes]:
        """What every rank gave, by rank, empty for masked ones. Collective. Raises PeerError naming who is missing."""
        try:
            return [payload for payload, _ in self._mesh.steps.gather(step, payload)]
        except PeerError as error:
            self._watch.raise_named(error, step)

    # -- memory on devices --------------------------------------------------------------------------------------

    @property
    def gpu_reach(self) -> GpuReach:
        """What stands in the way of windows in GPU memory; the same on all ranks."""
        return self._watch.present.gpu_reach

    @property
    def far_apart(self) -> bool:
        """True when some ranks reach each other through proxies only; the same on all ranks."""
        return bool(self._liveness.present - self.near_peers)

    @property
    def first_here(self) -> bool:
        """True on one rank of each host."""
        return self.rank < min(self._mesh.local_peers & self._liveness.present, default=self.ranks)

    @property
    def nic_peers(self) -> frozenset[int]:
        """Ranks that are not masked and that this one reaches over NICs."""
        return self._watch.present.nic_peers & self._liveness.present

    @property
    def near_peers(self) -> frozenset[int]:
        """Ranks that are not masked and whose windows kernels of this one write themselves."""
        routes = self._watch.present.routes
        return frozenset(peer for peer, way in routes.items() if way == DIRECT) & self._liveness.present

    @property
    def device_unreachable(self) -> frozenset[int]:
        """Ranks that are not masked whose device memory nothing of this rank reaches: neither on this host nor over
        NICs."""
        return self._liveness.present - self._mesh.local_peers - self.nic_peers

    def register_device_window(
        self,
        start: int,
        nbytes: int,
        export: Callable[[int, int], tuple[int, int]],
        flush: Callable[[], DriverFlush | None] = lambda: None,
    ) -> str:
        """Have the NICs of all ranks use device memory [start, start + nbytes) for the windows of the present epoch,
        and let go of those in host memory. Collective, before anything of the epoch is sent.

        Args:
            nbytes: of the windows.
            export: makes a dma-buf of a range (address, bytes): a descriptor, taken over, and the offset in it.
            flush: gives what proxies call before counts of arrivals are published, None where nothing is needed.

        Returns:
            How the NICs reach the memory, in words.

        Raises:
            TransportError: on every rank, when a NIC of one of them takes the memory in no way.
            PeerError: a rank did not take part.
        """
        return self._watch.present.register_device_window(start, nbytes, export, flush, self.exchange)

    def meet(self) -> None:
        """Wait for all ranks that are not masked, six timeouts: before ranks share memory of their GPUs, and for an
        engine whose ranks have compiled their models in very different times, before its first operation. Collective.

        Raises:
            PeerError: a rank is gone, or did not come.
        """
        self.check(SETUP)
        self._epochs.meet()

    def setting_up(self) -> contextlib.AbstractContextManager[Callable[[Callable[[], object]], None]]:
        """Goes around the steps in which all ranks share and register memory on devices for the present epoch.

        It gives a function, which every rank calls as the last of these steps with what it has to make by itself. That
        raises ConfigError on every rank where one of them could not: the epoch is stale then, and the group stays
        usable. ConfigError and TransportError leave the context as they are, since every rank raises them after the
        same step. Whatever else leaves it breaks the Buffer: the ranks are in different steps.
        """
        return self._epochs.setting_up()

    def before_draining(self, finish: Callable[[float], bool]) -> None:
        """Call ``finish`` before the present epoch is drained, and before its memory goes: it waits until a device has
        finished, and returns False where that has not at a ``time.monotonic()`` instant. The sticky error ends kernels
        that wait for peers."""
        self._watch.present.finishes.append(finish)

    def before_unmapping(self, release: Callable[[], object]) -> None:
        """Call ``release`` when the memory of the present epoch goes, once its proxies have stopped."""
        self._watch.present.releases.append(release)

    # -- rebuilding ---------------------------------------------------------------------------------------------

    @property
    def stale(self) -> str:
        """Why the next operation must begin with :meth:`rebuild`, in words; empty when it need not."""
        return self._watch.stale

    @property
    def rebuild_requested(self) -> bool:
        """True when a peer waits for this rank in :meth:`rebuild` or :meth:`compile_together`, and this rank has no
        operations to begin before: the host of a GPU may be ahead of another one's."""
        return self._watch.is_awaited

    def compile_together(self, compile: Callable[[], object]) -> None:
        """Call ``compile`` on every rank before the first operation of normal mode that needs it, and wait until all
        have: a rank with a cold cache would use up the deadlines of the others. Collective.

        Raises:
            ConfigError: a rank could not, or began another operation; on every rank, and the group stays usable.
            PeerError: a rank did not take part.
        """
        self.check(SETUP)
        self._epochs.compile_together(compile)

    def rebuild(
        self, plan: LowLatencyPlan | None, objection: str = "", compile: Callable[[], object] = lambda: None
    ) -> None:
        """Rebuild the windows of all ranks that are not masked, with room for ``plan`` and for every plan that they had
        room for before. Collective; none of this rank's operations may be in flight that shall still end.

        Args:
            plan: sizes of the low-latency operation that needs it, None for one of normal mode.
            objection: why this rank cannot; it then raises on all ranks.
            compile: what operations in the new windows need, called once the ranks agree; see
                :meth:`compile_together`.

        Raises:
            ConfigError: a rank objects or cannot compile, or ranks ask for different plans or have masked different
                ranks. Every rank raises, and the group stays usable.
            PeerError: a rank did not take part; mask it, or close the group.
        """
        self.check(SETUP)
        self._epochs.rebuild(plan, objection, compile)

    def call_off(self, why: str) -> None:
        """Have all ranks refuse the operation that this rank has begun and cannot go on with. The others join from
        their waits; the next operation of all begins a new epoch.

        Raises:
            ConfigError: says ``why``, on every rank; the group stays usable.
            PeerError: a rank did not take part.
        """
        self._epochs.call_off(why)

    # -- peers --------------------------------------------------------------------------------------------------

    def mask_peer(self, peer: int) -> None:
        """Leave ``peer`` out from now on: its tokens and experts drop out, the others go on.

        Local; each rank that is left calls it. What was sent before is void: the next operation of every rank begins
        in a new data plane, which those that are left build without ``peer`` (:meth:`rebuild`). The others are told, so
        that an operation of theirs that still waits raises PeerLost. Masking a masked rank does nothing.

        Raises:
            UcclEpError: the Buffer is closed.
        """
        if self._watch.closed or self._watch.forked:
            self._watch.check_usable()  # raises; a broken Buffer, however, may be mended by this
        if self._liveness.mask[peer]:
            return
        self._mesh.mask_out(peer)
        self._epochs.leave_out(peer)
        _log.warning("rank %d masked rank %d: its tokens and experts are left out", self.rank, peer)

    # -- counters and end ---------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Plain counters of this rank; the live socket serves them, and the latest calls. What is summed over all
        proxies and over all calls only grows while the Buffer is open; what is told by proxy and by stream begins anew
        with each epoch."""
        plane = self._watch.plane
        state, why = state_of(self._watch)
        running, wait = self.turn.running, None if self._watch.closed else self._watch.waits_for
        counters = plane.stats() if plane is not None else {}
        return {
            "rank": self.rank,
            "world": self.ranks,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "opened": self._opened,
            "time": time.time(),
            "state": state,
            "why": why,
            "running": None if running is None else {"call": running[0], "seconds": round(running[1], 3)},
            "waits_for": None if wait is None else wait._asdict(),
            "waits": self._watch.waits.as_dict(),
            "epoch": self.epoch,
            "begun": self._watch.begun,
            "device": self.device,
            "proxies": self.settings.proxies,
            "channels": self.channels,
            "masked": sorted(self._liveness.masked),
            "lost": list(self._liveness.lost),
            "ops": self.operations.snapshot(),
            "durations": self.operations.durations(),
            "control_reconnections": self._mesh.reconnections,
            **counters,
            **add_up(self._epochs.ended, {name: counters[name] for name in self._epochs.ended if name in counters}),
        }

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._watch.closed

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Stop, drain, wait for the others (bounded by ``timeout`` seconds), unmap. May be called twice."""
        if self._watch.forked:
            return
        self._watch.note()
        if not self._watch.shut():
            return
        deadline = time.monotonic() + timeout
        try:
            self._take_leave(deadline)
        finally:
            self._teardown(deadline)

    def give_up(self, error: BaseException) -> None:
        """Close, once the others have heard of ``error``, unless it is one that all raise alike, a ConfigError."""
        try:
            self._epochs.tell(error)
        finally:
            self.close(0.0)

    def _take_leave(self, deadline: float) -> None:
        """Let what is under way arrive, and wait until nobody uses this rank's memory any more."""
        plane = self._watch.plane
        if (
            self._watch.broken
            or self._watch.short
            or self._liveness.stopped
            or self._watch.stale
            or plane is None
            or plane.space is None
            or plane.space.failed
        ):
            return
        if plane.space.busy_elsewhere() or self._mesh.steps.present:
            _log.warning("rank %d closes under an operation of another of its threads, which ends here", self.rank)
            return
        try:
            self._watch.drain(plane, deadline)
            self._mesh.steps.gather(CLOSE, timeout=max(deadline - time.monotonic(), 0.0))
        except UcclEpError as error:
            # The others may keep working or be gone; this rank leaves all the same.
            level = logging.WARNING if isinstance(error, PeerError) else logging.ERROR
            _log.log(level, "rank %d closes without the others: %s", self.rank, error)

    def _teardown(self, deadline: float) -> None:
        """Let go of everything, each part whatever becomes of the others (Ctrl-C included)."""
        self._watch.shut()
        plane, self._watch.plane = self._watch.plane, None
        with contextlib.ExitStack() as steps:  # runs from the last to the first
            if self._live is not None:
                steps.callback(self._live.close)
            steps.callback(self._mesh.close)
            if plane is not None:
                steps.callback(plane.close, deadline)
            steps.callback(self._mesh.goodbye, self._watch.last_words)
