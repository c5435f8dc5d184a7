"""What outlives one low-latency operation on a device: counters, kernels and addresses of the present epoch.

The windows of an epoch serve every plan that they have room for. The first dispatch with sizes that do not fit, or
after a rank was masked, has all ranks rebuild them: every counter starts at 0, and what belongs to the old ones is
refused by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..data_plane.runtime import Runtime
from ..errors import ConfigError
from ..gpu.context import GpuContext
from ..gpu.window import DeviceSpace
from ..handles import EventOverlap, LowLatencyHandle
from ..kernels.blocks.low_latency_device import DevicePlan, DeviceState
from ..kernels.select import device_low_latency_kernels
from ..protocol.layout import LowLatencyPlan
from .arguments import VALUE_CODES
from .epoch import RESERVE_FIRST, Epoch, InFlight, RecvHook
from .low_latency_arguments import Coding, check_zero_copy

if TYPE_CHECKING:
    from ..kernels.triton.launch import Launch
    from ..kernels.triton.low_latency import TritonLowLatencyKernels

__all__ = ["LowLatencyGpuSession", "Serving"]

#: Shapes of dispatches that are remembered: every number of tokens in a batch is one.
_KNOWN = 1024


class Serving(NamedTuple):
    """What serves the operations of one plan in one epoch.

    Attributes:
        state: counters, in device memory, the same for all plans.
        space: the kernel context, in device memory, the same for all plans.
        kernels: of the plan.
        block: its sizes, in device memory.
    """

    state: DeviceState
    space: DeviceSpace
    kernels: TritonLowLatencyKernels
    block: DevicePlan


class LowLatencyGpuSession:
    """Low-latency state of one Buffer on one rank.

    Args:
        runtime: of the Buffer.
        gpu: memory, streams and space, shared with normal mode.

    Attributes:
        epoch: that the counters belong to.
        dispatches, combines: what is in flight.
    """

    def __init__(self, runtime: Runtime, gpu: GpuContext) -> None:
        self.dispatches, self.combines = InFlight("dispatches"), InFlight("combines")
        self.epoch = Epoch(runtime, (self.dispatches, self.combines), gpu)
        self._runtime = runtime
        self._gpu = gpu
        self._shared: tuple[DeviceState, DeviceSpace]
        self._servings: dict[LowLatencyPlan, Serving] = {}
        #: By what the checks of a dispatch look at: what they, and :meth:`enter`, have come to in the present epoch.
        self._known: dict[tuple[object, ...], tuple[LowLatencyPlan, Coding, Serving]] = {}
        self._combine_buffers: dict[tuple[LowLatencyPlan, torch.dtype], torch.Tensor] = {}
        # of any epoch
        self._kernels: dict[LowLatencyPlan, TritonLowLatencyKernels] = {}
        self._blocks: dict[LowLatencyPlan, DevicePlan] = {}
        self._compiled: set[tuple[LowLatencyPlan, tuple[int | bool, ...]]] = set()

    def enter(
        self,
        phase: str,
        plan: LowLatencyPlan,
        coding: Coding,
        x: torch.Tensor,
        round_scale: bool,
        reduced: bool,
        *,
        ahead: bool = False,
    ) -> Serving:
        """What serves ``plan``; the first call with sizes that do not fit rebuilds the windows on all ranks.

        Args:
            coding, x, round_scale, reduced: of the dispatch that needs it, for which kernels are compiled.
            ahead: that dispatch does not begin yet.

        Raises:
            ConfigError: the kernels cannot serve it, an operation is in flight, or a graph is being captured.
        """
        runtime, source = self._runtime, VALUE_CODES[x.dtype]

        def compile() -> None:
            kernels = self._kernels_for(plan)
            self._compile_dispatch(kernels, source, coding.dtype, round_scale, reduced)
            self.compile_combine(kernels, source, reduced)

        def check() -> None:
            self._kernels_for(plan).check(runtime.channels, runtime.settings.ring_slots)

        self.epoch.make_room(phase, plan, check, compile, ahead=ahead)
        if not self.epoch.present:
            self._refuse_capture("the windows are not in use yet")
            space = self._gpu.space()
            device, channels = self._gpu.memory.device, runtime.channels
            state = self._gpu.prepare(lambda: DeviceState(runtime.layout, channels, device))
            runtime.before_unmapping(lambda: self._gpu.keep(state, *self._blocks.values()))
            self._servings, self._combine_buffers, self._known = {}, {}, {}
            self._shared = state, space
            self.epoch.enter()
        serving = self._servings.get(plan)
        if serving is None:
            serving = self._servings[plan] = Serving(*self._shared, self._kernels_for(plan), self._block_for(plan))
        self._compile_dispatch(serving.kernels, source, coding.dtype, round_scale, reduced)
        return serving

    def known(self, key: tuple[object, ...] | None) -> tuple[LowLatencyPlan, Coding, Serving] | None:
        """What the checks of a dispatch and :meth:`enter` have come to before in the present epoch, for arguments of
        this ``dispatch_key``; None where they must look again: also where ranks may have to rebuild the windows."""
        found = None if key is None else self._known.get(key)
        return None if found is None or not self.epoch.present or self._runtime.rebuild_requested else found

    def remember(self, key: tuple[object, ...] | None, plan: LowLatencyPlan, coding: Coding, serving: Serving) -> None:
        """For :meth:`known`. A serving engine has a few shapes; of any number the latest are kept."""
        if key is not None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known[key] = plan, coding, serving

    def of(self, phase: str, handle: LowLatencyHandle, owner: object) -> Serving:
        """What ``handle`` belongs to. Raises ConfigError when it is not ``owner``'s, or of another epoch."""
        self.epoch.check_handle(phase, handle, owner)
        return self._servings[handle.plan]

    def _kernels_for(self, plan: LowLatencyPlan) -> TritonLowLatencyKernels:
        if plan not in self._kernels:
            with self._gpu.on_its_device():
                self._kernels[plan] = device_low_latency_kernels(plan, self._gpu.interpreted)
        return self._kernels[plan]

    def _block_for(self, plan: LowLatencyPlan) -> DevicePlan:
        if plan not in self._blocks:
            self._refuse_capture(f"{plan} is new")
            self._blocks[plan] = self._gpu.prepare(lambda: DevicePlan(plan, self._gpu.memory.device))
        return self._blocks[plan]

    def _compile_dispatch(
        self, kernels: TritonLowLatencyKernels, source: int, coding: int, round_scale: bool, reduced: bool
    ) -> None:
        """Compile what a dispatch launches, unless that was done. Raises ConfigError while a graph is captured."""
        kind = (source, coding, round_scale, reduced)
        self._compile_once(kernels.plan, kind, lambda: kernels.warm_dispatch(*kind))

    def compile_combine(self, kernels: TritonLowLatencyKernels, dtype: int, reduced: bool) -> None:
        """The same for a combine of rows of DTYPE_* ``dtype``."""
        kind = (dtype, reduced)
        self._compile_once(kernels.plan, kind, lambda: kernels.warm_combine(*kind))

    def _compile_once(self, plan: LowLatencyPlan, kind: tuple[int | bool, ...], warm: Callable[[], None]) -> None:
        if (plan, kind) not in self._compiled:
            self._refuse_capture("its kernels are not compiled for these dtypes yet")
            with self._gpu.on_its_device():
                warm()
            self._compiled.add((plan, kind))

    def _refuse_capture(self, why: str) -> None:
        if self._gpu.order.capturing:
            raise ConfigError(
                f"low-latency mode: {why}, and what that takes cannot be captured in a graph. {RESERVE_FIRST}"
            )

    def launch(
        self,
        phase: str,
        flight: InFlight,
        plan: LowLatencyPlan,
        send: tuple[Launch, ...],
        receive: tuple[Launch, ...],
        used: Sequence[torch.Tensor],
        received: Callable[[int], None],
        *,
        async_finish: bool,
        return_recv_hook: bool,
    ) -> tuple[EventOverlap, RecvHook | None]:
        """Launch an operation, or its first half.

        Args:
            plan: its sizes.
            used: tensors that its kernels touch.
            received: called once the receive is launched, with the nanoseconds that launching took.
            async_finish: the current stream does not wait: the caller waits for the event.
            return_recv_hook: launch the first half only; the hook launches the second.

        Returns:
            The event of what was launched, and the hook or None.
        """
        started = time.monotonic_ns()
        epoch, order, interpreted = self.epoch, self._gpu.order, self._gpu.interpreted
        operation = epoch.operation(phase, flight, plan)
        if self._runtime.rebuild_requested:
            # for other windows, since this call began
            epoch.check(phase)

        def run(
            launches: tuple[Launch, ...], own_stream: bool, finish: bool, tensors: Sequence[torch.Tensor] = used
        ) -> EventOverlap:
            return order.run(lambda: _run_all(launches), tensors, own_stream=own_stream, finish=finish)

        def done(nanoseconds: int) -> None:
            received(nanoseconds)
            if interpreted:
                # kernels are over when their launch returns, so this call can raise what they report
                epoch.check(phase)

        if not return_recv_hook:
            with operation:
                event = run((*send, *receive), True, not async_finish)
                operation.received()
            done(time.monotonic_ns() - started)
            return event, None
        with operation:
            capture = epoch.capture
            # The hook holds all tensors until the receive is launched, which waits for this. To record them as well
            # would keep their memory from all that is captured later: of each layer the experts' output.
            event = run(send, False, True, used if capture is None else ())
        sent = time.monotonic_ns() - started
        later = f"{phase} recv"
        return event, RecvHook(
            epoch,
            operation,
            later,
            lambda: run(receive, False, True),
            lambda nanoseconds: done(sent + nanoseconds),
            capture=capture,
        )

    def check_zero_copy(self, plan: LowLatencyPlan, x: torch.Tensor) -> None:
        """Raise ConfigError unless ``x`` is the :meth:`combine_buffer` of its plan and dtype."""
        check_zero_copy(x, self._combine_buffers.get((plan, x.dtype)))

    def combine_buffer(self, plan: LowLatencyPlan, dtype: torch.dtype) -> torch.Tensor:
        """[L, R * T, H] for the experts' output, the same tensor for a plan and dtype within an epoch. The current
        stream waits for what may still read it, a combine with ``async_finish``."""
        self._gpu.order.run(lambda: None, (), own_stream=False, finish=False)
        if (plan, dtype) not in self._combine_buffers:
            shape = (plan.local_experts, plan.ranks * plan.tokens, plan.hidden)
            # whoever asks first may be an engine's warm-up, whose tensors nobody else may write to
            with torch.inference_mode(False):
                buffer = torch.empty(shape, dtype=dtype, device=self._gpu.memory.device)
            self._combine_buffers[plan, dtype] = buffer
            # experts of a captured graph may write to it
            self._runtime.before_unmapping(lambda: self._gpu.keep(buffer))
        return self._combine_buffers[plan, dtype]


def _run_all(launches: tuple[Launch, ...]) -> None:
    for one in launches:
        one.run()
