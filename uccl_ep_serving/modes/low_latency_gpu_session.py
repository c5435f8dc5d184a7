"""What outlives one low-latency operation on a device: counters, kernels and addresses of the present window.

A window serves one plan. The first dispatch with other sizes, or after a rank was masked, moves all ranks to a new one
(``Runtime.rebuild``) in which every counter starts at 0; what belongs to the old one is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from ..errors import ConfigError
from ..gpu.context import GpuContext, GroundRuntime
from ..gpu.launch import InFlight
from ..gpu.window import DeviceSpace
from ..handles import LowLatencyHandle
from ..kernels.interface import DeviceLowLatencyKernels, DeviceStateBlock
from ..kernels.select import device_low_latency_kernels
from ..protocol.layout import LowLatencyPlan
from .low_latency_arguments import VALUE_CODES, Coding, covers

__all__ = ["DeviceSpaceOwner", "LowLatencyGpuSession", "Serving"]


class DeviceSpaceOwner(GroundRuntime, Protocol):
    """What low-latency mode on a device needs of a Runtime, besides its gpu; see there."""

    ranks: int

    @property
    def record(self) -> Callable[..., None]: ...
    def check(self, phase: str) -> None: ...
    def begin_operation(self) -> None: ...
    @property
    def stale(self) -> str: ...
    @property
    def rebuild_requested(self) -> bool: ...
    def rebuild(self, plan: LowLatencyPlan | None, objection: str = "") -> None: ...


class Serving(NamedTuple):
    """What serves the operations of one window.

    Attributes:
        state: counters, in device memory.
        kernels: of its plan.
        space: the kernel context, in device memory.
    """

    state: DeviceStateBlock
    kernels: DeviceLowLatencyKernels
    space: DeviceSpace


class LowLatencyGpuSession:
    """Low-latency state of one Buffer on one rank.

    Args:
        runtime: of the Buffer.
        gpu: memory, order and space, shared with normal mode.

    Attributes:
        epoch: of the window that serves, -1 before the first.
        dispatches, combines: the host's counts of what is in flight.
    """

    def __init__(self, runtime: DeviceSpaceOwner, gpu: GpuContext) -> None:
        self.epoch = -1
        self.dispatches = InFlight("low-latency dispatch", "dispatches")
        self.combines = InFlight("low-latency combine", "combines")
        self._runtime = runtime
        self._gpu = gpu
        self._memory = gpu.memory
        self._order = gpu.order
        self._serving: Serving | None = None
        self._combine_buffers: dict[torch.dtype, torch.Tensor] = {}
        self._compiled: set[tuple[LowLatencyPlan, tuple[int | bool, ...]]] = set()

    def check(self, phase: str, begins: bool = False) -> None:
        """Raise what is known to be wrong; ``begins``: the operation needs nothing that was sent before."""
        runtime = self._runtime
        if self._serving is not None and self.epoch == runtime.epoch:
            self._serving.space.take_report()
        runtime.check(phase)
        self._gpu.check_ids(phase)
        if runtime.stale:
            if not begins:
                raise ConfigError(
                    f"{phase}: {runtime.stale}, so what was sent before is void. Next step: go on with a dispatch on "
                    "every rank"
                )
        elif self.epoch == runtime.epoch:
            self.dispatches.check_whole(phase)
            self.combines.check_whole(phase)

    def check_tensor(self, phase: str, name: str, tensor: torch.Tensor) -> None:
        """Raise ConfigError for a tensor that kernels cannot move in 16-byte pieces, or that is elsewhere."""
        if tensor.device != self._memory.device:
            raise ConfigError(
                f"{phase}: {name} is on {tensor.device}, and this Buffer serves tensors on {self._memory.device}"
            )
        if tensor.numel() and tensor.data_ptr() % 16:
            raise ConfigError(f"{phase}: {name} must start on a multiple of 16 bytes")

    def adopt(self, plan: LowLatencyPlan, coding: Coding, x: torch.Tensor, round_scale: bool, reduced: bool) -> Serving:
        """What serves ``plan``, laid out anew on all ranks when the window has no room for it.

        Args:
            coding, x, round_scale, reduced: of the dispatch that needs it, for which kernels are compiled.

        Raises:
            ConfigError: the kernels cannot serve it, an operation is in flight, or a graph is being captured.
        """
        runtime = self._runtime
        laid_out = None if runtime.stale else runtime.layout.low_latency
        if laid_out is None or not covers(laid_out, plan) or runtime.rebuild_requested:
            # what is wrong on this rank alone is told to the others, who would wait for it
            objection = ""
            try:
                self._check_idle(plan)
                kernels = self._new_kernels(plan)
                kernels.check(runtime.settings)
                # before the ranks meet: a rank that compiles while others wait would eat into their deadline
                self._compile_dispatch(plan, kernels, x, coding, round_scale, reduced)
                self.compile_combine(plan, kernels, VALUE_CODES[x.dtype], reduced)
            except ConfigError as error:
                objection = str(error)
            runtime.rebuild(plan, objection)
            laid_out = plan
        if self._serving is None or self.epoch != runtime.epoch:
            self._refuse_capture(f"the windows for {laid_out} are not in use yet")
            kernels = self._new_kernels(laid_out)
            space = self._gpu.space()
            device = self._memory.device
            state = self._gpu.prepare(lambda: kernels.new_state(runtime.layout, runtime.settings.channels, device))
            runtime.before_unmapping(lambda: self._gpu.keep(state))
            self._serving = Serving(state, kernels, space)
            self.epoch = runtime.epoch
            self._combine_buffers = {}
            self.dispatches.clear()
            self.combines.clear()
        self._compile_dispatch(laid_out, self._serving.kernels, x, coding, round_scale, reduced)
        return self._serving

    def _new_kernels(self, plan: LowLatencyPlan) -> DeviceLowLatencyKernels:
        with self._gpu.on_its_device():
            return device_low_latency_kernels(plan, self._gpu.interpreted)

    def _compile_dispatch(
        self,
        plan: LowLatencyPlan,
        kernels: DeviceLowLatencyKernels,
        x: torch.Tensor,
        coding: Coding,
        round_scale: bool,
        reduced: bool,
    ) -> None:
        """Compile what a dispatch launches, unless that was done. Raises ConfigError while a graph is captured."""
        source = VALUE_CODES[x.dtype]
        kind = (source, coding.dtype, round_scale, reduced)
        if (plan, kind) not in self._compiled:
            self._refuse_capture("its kernels are not compiled for these dtypes yet")
            with self._gpu.on_its_device():
                kernels.warm_dispatch(source, coding.dtype, round_scale, reduced)
            self._compiled.add((plan, kind))

    def compile_combine(
        self, plan: LowLatencyPlan, kernels: DeviceLowLatencyKernels, dtype: int, reduced: bool
    ) -> None:
        """The same for a combine of rows of DTYPE_* ``dtype``."""
        kind = (dtype, reduced)
        if (plan, kind) not in self._compiled:
            self._refuse_capture("its kernels are not compiled for these dtypes yet")
            with self._gpu.on_its_device():
                kernels.warm_combine(dtype, reduced)
            self._compiled.add((plan, kind))

    def _refuse_capture(self, why: str) -> None:
        if self._order.capturing:
            raise ConfigError(
                f"low-latency mode: {why}, and what that takes cannot be captured in a graph: dispatch and combine "
                "once with the same shapes and dtypes before the capture"
            )

    def _check_idle(self, plan: LowLatencyPlan) -> None:
        """Raise ConfigError where the windows cannot be laid out anew for ``plan`` now."""
        self._refuse_capture(f"{plan} is new")
        stale = self._runtime.stale or self.epoch != self._runtime.epoch
        if not stale and (self.dispatches.count or self.combines.count):
            raise ConfigError(
                f"low-latency dispatch: {plan} needs another window layout, and an operation is in flight: call its "
                "recv hook first"
            )

    def of(self, handle: object, owner: object, phase: str) -> Serving:
        """What ``handle`` belongs to. Raises ConfigError when it is not ``owner``'s, or older than the window."""
        if not isinstance(handle, LowLatencyHandle) or handle.owner is not owner:
            raise ConfigError(f"{phase}: the handle must be what low-latency dispatch of the same Buffer returned")
        if handle.epoch != self._runtime.epoch:
            raise ConfigError(
                f"{phase}: the handle is older than the present window layout (another T, hidden, number of experts, "
                "top-k or dtype was dispatched since): combine before dispatching other shapes"
            )
        assert self._serving is not None
        return self._serving

    def still(self, phase: str, epoch: int) -> None:
        """Raise what is known to be wrong, or that the window of ``epoch`` is gone."""
        self.check(phase)
        if epoch != self._runtime.epoch:
            raise ConfigError(f"{phase}: the window was laid out anew since this operation was sent")

    def combine_buffer(self, plan: LowLatencyPlan, dtype: torch.dtype) -> torch.Tensor:
        """[L, R * T, H] for the experts' output, the same tensor for a dtype as long as the window serves ``plan``."""
        if dtype not in self._combine_buffers:
            shape = (plan.local_experts, plan.ranks * plan.tokens, plan.hidden)
            buffer = self._combine_buffers[dtype] = torch.empty(shape, dtype=dtype, device=self._memory.device)
            # experts of a captured graph may write to it
            self._runtime.before_unmapping(lambda: self._gpu.keep(buffer))
        return self._combine_buffers[dtype]
