"""What both modes of a Buffer share on a device: memory, the order of kernels, the space of an epoch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from ..data_plane.gpu_direct import NicWrites
from ..data_plane.nodes import crossed_once
from ..data_plane.runtime import Runtime
from ..errors import ConfigError, TransportError, in_words
from ..proxy.fence import DriverFlush
from .memory import DeviceMemory, memory_of
from .streams import GpuOrder, HostOrder, StreamOrder
from .window import DeviceSpace, DeviceWindow

__all__ = ["GpuContext"]

_Made = TypeVar("_Made")
_log = logging.getLogger("uccl_ep_serving")


#: What graphs look at that were captured in windows which are gone: kilobytes each, and the combine buffers that were
#: asked for, which experts in a graph write to. The host does not hear when the last of the graphs is destroyed.
_kept: list[object] = []
_STEP = (
    "Next step: uccl-ep doctor says how each NIC reaches GPU memory and what it lacks; or UCCL_EP_WINDOW=host on all "
    "ranks, to have it so without a warning"
)


class GpuContext:
    """One per Buffer: ring heads live in device memory, so the kernels of both modes must use the same.

    Args:
        runtime: of the Buffer.
        device: of the tensors; "cpu" for kernels in Triton's interpreter.
        order: in which kernels run; by default that of streams of the device, of the calling thread in the interpreter.

    Attributes:
        interpreted: kernels run in the interpreter.
        memory: of the device.
        order: in which all kernels of the Buffer run.
    """

    def __init__(self, runtime: Runtime, device: torch.device, order: StreamOrder | None = None) -> None:
        self._runtime = runtime
        self.interpreted = device.type == "cpu"
        self.memory: DeviceMemory = memory_of(device, self.interpreted)
        self.order: StreamOrder = order or (
            HostOrder() if self.interpreted else GpuOrder(self.memory.device, self.memory.capture_of)
        )
        self._space: DeviceSpace | None = None
        self._epoch = -1
        #: What the order had captured when the present space was built.
        self._captures = 0
        #: Why windows lie in host memory, as it was logged.
        self._said: set[str] = set()

    @property
    def comm_stream(self) -> Any:
        """The stream that communication kernels run on, None in the interpreter."""
        return self.order.stream

    @property
    def crossed(self) -> int:
        """In the present windows: ranks of a node when a row of normal mode crosses once to a node, else 0; equal on
        all ranks. A GPU may forward only what NICs wrote for it and for those that read it there."""
        runtime, reach, wanted = self._runtime, self._runtime.gpu_reach, self._runtime.settings.window
        on_device = wanted == "device" or (wanted == "auto" and not reach.near and not reach.far)
        if self._space is not None and self._epoch == runtime.epoch:
            on_device = self._space.on_device
        if on_device and not reach.across:
            return 0
        return crossed_once(runtime.node_ranks, runtime.ranks, runtime.settings.hierarchy, bool(runtime.mask.any()))

    def on_its_device(self) -> contextlib.AbstractContextManager[None]:
        """Makes the Buffer's device the calling thread's, for which Triton compiles. Kernels compiled for another would
        be compiled once more by their first launch, inside an operation or a capture."""
        return contextlib.nullcontext() if self.interpreted else torch.cuda.device(self.memory.device)

    def take_report(self) -> None:
        """Make a failure that a kernel of the present epoch has reported this rank's sticky error."""
        if self._space is not None and self._epoch == self._runtime.epoch:
            self._space.take_report()

    def check_ids(self, phase: str) -> None:
        """Raise ConfigError when a dispatch of the present epoch was given an expert id out of range."""
        if self._space is not None and self._epoch == self._runtime.epoch:
            found = self._space.take_ids()
            if found is not None:
                position, experts = found
                raise ConfigError(
                    f"{phase}: a dispatch was given an expert id outside -1 .. {experts - 1}, at position {position} "
                    "of topk_idx, counting all slots. Kernels took it for -1, no expert, and the dispatch ended well "
                    "on all ranks; only what belongs to that token is wrong. Next step: look at the router; if this "
                    "is a later call, which has moved nothing, make it again"
                )

    def keep(self, *memory: object) -> bool:
        """Make memory of the present windows outlive them where graphs were captured in them; False where none was."""
        if self.order.captures == self._captures:
            return False
        _kept.extend(memory)
        return True

    def check_graphs(self, phase: str) -> None:
        """Raise ConfigError when graphs were captured, and none of them in the present windows."""
        present = self._epoch == self._runtime.epoch and not self._runtime.stale
        if self.order.captures and not (present and self.order.captures > self._captures):
            raise ConfigError(
                f"{phase}: the windows were rebuilt since graphs were captured (other sizes were dispatched, or a rank "
                "was masked). The kernels of those graphs move nothing any more, and combined rows are zero. "
                "Next step: dispatch and combine once, and capture the graphs again"
            )

    def prepare(self, make: Callable[[], _Made], undo: Callable[[_Made], object] = lambda made: None) -> _Made:
        """Allocate, with ``make``, memory that outlives the operation that is about to begin.

        Args:
            undo: for what ``make`` has made once the calling thread was interrupted.

        Raises:
            ConfigError: it cannot. Every rank raises, also those that wait in that operation already, and says whose
                memory it is; the group stays usable.
        """
        return self._refusing(lambda: self._lasting(make, undo))

    def _lasting(self, make: Callable[[], _Made], undo: Callable[[_Made], object]) -> _Made:
        """Run ``make`` in a thread of its own. An engine may have given the calling thread a memory pool, which it
        discards while it sleeps (vLLM); from torch 2.8 on such a pool is of one thread (``torch.cuda.use_mem_pool``).
        """
        if self.interpreted:
            return make()

        def made() -> _Made:
            with self.on_its_device():
                found = make()
                # no stream of the calling thread waits for this one's
                self.memory.synchronize()
                return found

        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="uccl_ep memory") as thread:
            task = thread.submit(made)
            try:
                return task.result()
            except BaseException:
                # interrupted: what the other thread makes meanwhile is nobody's
                task.add_done_callback(lambda done: done.exception() or undo(done.result()))
                raise

    def _refusing(self, make: Callable[[], _Made]) -> _Made:
        """What ``make`` makes, or its error, which all ranks then raise."""
        try:
            return make()
        # of whatever kind: the others would wait
        except Exception as error:
            # an objection to the windows: it ends the waits of who has begun, and refuses on all
            self._runtime.rebuild(None, in_words(error))
            raise

    def space(self) -> DeviceSpace:
        """The space of the present epoch. Its first use is collective unless windows lie in host memory.

        Raises:
            ConfigError: UCCL_EP_WINDOW=device with ranks on other hosts whose GPU memory no NIC reaches; or, on every
                rank, one that cannot pin its memory or copy its tables to the device. The group stays usable.
            TransportError: with UCCL_EP_WINDOW=device, some rank cannot allocate its window, open a peer's or register
                it with a NIC (auto takes windows in host memory then, on all ranks).
        """
        runtime = self._runtime
        if self._space is None or self._epoch != runtime.epoch:
            self._space = self._build()
            self._epoch, self._captures = runtime.epoch, self.order.captures
        return self._space

    def _build(self) -> DeviceSpace:
        with self._runtime.setting_up() as finish_together:
            window = self._place_windows()
            if window is not None:
                spaces: list[DeviceSpace] = []
                finish_together(lambda: spaces.append(self._space_over(window)))
                return spaces[0]
        return self._refusing(lambda: self._space_over(None))

    def _space_over(self, window: DeviceWindow | None) -> DeviceSpace:
        space = self._lasting(
            lambda: DeviceSpace(self._runtime.space, self.memory, window), lambda space: space.close()
        )
        # what a kernel has not published yet, no proxy can wait for
        self._runtime.before_draining(self.memory.synchronize)
        self._runtime.before_unmapping(lambda: space.close(self.keep))
        return space

    def _place_windows(self) -> DeviceWindow | None:
        """The device windows of the present epoch, None for windows in host memory; alike on all ranks."""
        runtime, wanted = self._runtime, self._runtime.settings.window
        reach = runtime.gpu_reach
        if wanted == "device":
            if far := runtime.device_unreachable:
                raise ConfigError(
                    f"UCCL_EP_WINDOW=device: nothing here reaches GPU memory of ranks "
                    f"{', '.join(map(str, sorted(far)))}, which are on other hosts and not reached over NICs. Use "
                    "UCCL_EP_WINDOW=host"
                )
            if reach.far:
                raise ConfigError(f"UCCL_EP_WINDOW=device: NICs reach no GPU memory: {reach.far}. {_STEP}")
            return self._share(near_only=False)
        if wanted == "host":
            return None
        if reach.near:
            self._say(reach.near)
            return None
        try:
            if not reach.far:
                return self._share(near_only=False)
            why = reach.far
        except TransportError as error:
            # on every rank, so that all go on with the other kind
            why = str(error)
        self._say(why)
        if not (reach.pairs and runtime.far_apart):
            return None
        try:
            return self._share(near_only=True)
        except TransportError as error:
            _log.info("uccl_ep rank %d: no second window in GPU memory: %s", runtime.rank, error)
            return None

    def _share(self, near_only: bool) -> DeviceWindow:
        """Windows in device memory, opened by the ranks of a host and registered with the NICs to the others.

        Raises:
            TransportError: on every rank, when it cannot be done on one of them; nothing is left.
        """
        runtime, memory = self._runtime, self.memory
        # an engine may have compiled its model just before, on one node longer than on another
        runtime.meet()
        proxied = runtime.nic_peers if not near_only else frozenset(range(runtime.ranks)) - runtime.near_peers
        window = DeviceWindow(memory, runtime.layout, runtime.rank, runtime.exchange, proxied, near_only)
        runtime.before_unmapping(window.close)
        said = "for the messages of ranks of a host"
        if not near_only:
            said = "for all messages"
            if runtime.nic_peers:
                found: list[NicWrites] = []

                def flush() -> DriverFlush | None:
                    found.append(memory.nic_writes())
                    return memory.driver_flush(found[0].flush) if found[0].flush else None

                try:
                    way = runtime.register_device_window(window.own, window.nbytes, memory.export_dmabuf, flush)
                except TransportError:
                    window.give_back(runtime.exchange)
                    raise
                said += f": NICs reach them by {way}; {found[0].words}"
        _log.info("uccl_ep rank %d: windows in GPU memory %s", runtime.rank, said)
        return window

    def _say(self, why: str) -> None:
        """Say once, on one rank of the host as a warning, why windows lie in host memory, and what to do."""
        if why in self._said:
            return
        self._said.add(why)
        level = logging.WARNING if self._runtime.first_here else logging.INFO
        _log.log(
            level,
            "UCCL_EP_WINDOW=auto: windows lie in host memory, which takes each row over PCIe twice more: %s. %s",
            why,
            _STEP,
        )
