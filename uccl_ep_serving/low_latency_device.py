"""Low-latency dispatch and combine of tensors on a device: the host only launches kernels.

The same operations, arguments and formats as :mod:`.low_latency`. The host never waits for the device and reads nothing
back: message numbers, parities, routing and counts stay in device memory, so that a captured graph of a dispatch and
its combine replays with other tokens. What a kernel reports (a silent peer, a refused header, an expert id out of
range) is raised by the next call; until then the kernels leave zero counts and zero rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .config import Settings
from .device_lane import DeviceLane, HostLane, StreamLane
from .device_memory import DeviceMemory, memory_of
from .device_space import DeviceSpace, DeviceWindow
from .errors import ConfigError
from .handles import EventOverlap, LowLatencyHandle
from .kernel_space import KernelSpace
from .kernels.interface import DeviceLowLatencyKernels, DeviceStateBlock, KernelLaunch
from .kernels.select import device_low_latency_kernels
from .low_latency_arguments import (
    VALUE_CODES,
    Coding,
    check_combine,
    check_dispatch,
    check_stats,
    combine_coding,
    covers,
    dispatch_coding,
)
from .protocol.layout import LowLatencyPlan, WindowLayout
from .protocol.message import DTYPE_FP8, SCALE_BLOCK

__all__ = ["DeviceLowLatency", "DeviceSpaceOwner"]

Hook = Callable[[], None]
Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class DeviceSpaceOwner(Protocol):
    """What low-latency mode on a device needs of a Runtime; see there."""

    rank: int
    ranks: int
    generation: int

    @property
    def settings(self) -> Settings: ...
    @property
    def space(self) -> KernelSpace: ...
    @property
    def layout(self) -> WindowLayout: ...
    @property
    def record(self) -> Callable[..., None]: ...
    @property
    def all_on_this_host(self) -> bool: ...
    def exchange(self, step: str, payload: bytes) -> list[bytes]: ...
    def before_unmapping(self, release: Callable[[], None]) -> None: ...
    def check(self, phase: str) -> None: ...
    def begin_operation(self) -> None: ...
    @property
    def stale(self) -> str: ...
    @property
    def grow_asked(self) -> bool: ...
    def grow(self, plan: LowLatencyPlan | None, objection: str = "") -> None: ...


class DeviceLowLatency:
    """Low-latency mode of one Buffer for tensors on a device. Not thread-safe: one host thread calls it.

    Args:
        runtime: of the Buffer.
        device: of the tensors; "cpu" for kernels in Triton's interpreter.
    """

    def __init__(self, runtime: DeviceSpaceOwner, device: torch.device) -> None:
        self._runtime = runtime
        self._interpreted = device.type == "cpu"
        self._memory: DeviceMemory = memory_of(device, self._interpreted)
        self._lane: DeviceLane = HostLane() if self._interpreted else StreamLane(self._memory.device)
        self._space: DeviceSpace | None = None
        self._state: DeviceStateBlock | None = None
        self._kernels: DeviceLowLatencyKernels | None = None
        self._generation = -1
        self._dispatches = _InFlight("low-latency dispatch", "dispatches")
        self._combines = _InFlight("low-latency combine", "combines")
        self._combine_buffer: torch.Tensor | None = None

    @property
    def comm_stream(self) -> Any:
        """The stream that communication kernels run on, None in the interpreter."""
        return self._lane.stream

    # -- dispatch -----------------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        *,
        topk_weights: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[Rows, torch.Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """See :meth:`LowLatency.dispatch`. Ids outside -1 .. experts - 1 are refused by the kernel, before anything is
        sent, which ends the Buffer. ``x``, ``topk_idx`` and ``topk_weights`` are read in the order of the stream.

        Raises:
            ConfigError: wrong arguments, a third dispatch in flight, a new shape while a graph is captured.
            PeerTimeout, PeerLost, ProxyDied, TransportError, ProtocolError: of this or an earlier operation.
        """
        started = time.monotonic_ns()
        phase = "low-latency dispatch"
        self._check(phase, begins=True)
        if async_finish and return_recv_hook:
            raise ConfigError(f"{phase}: async_finish and return_recv_hook exclude each other")
        plan = check_dispatch(
            self._runtime.ranks, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, topk_weights
        )
        coding = dispatch_coding(x, use_fp8, round_scale, use_ue8m0)
        self._check_tensor(phase, "x", x)
        stats = check_stats(
            "cumulative_local_expert_recv_stats", cumulative_local_expert_recv_stats, torch.int32, plan.local_experts
        )
        waited = check_stats("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, torch.int64, plan.ranks)
        ids = topk_idx.contiguous()
        weights = None if topk_weights is None else topk_weights.contiguous()
        state, kernels, space = self._adopt(plan, coding, x, round_scale, weights is not None)
        plan = state.plan
        self._dispatches.check_room()
        outputs = _Outputs(plan, coding, x.device, kernels.fp8_dtype)
        route = state.new_route()
        send = kernels.dispatch_send(
            space.context,
            state.address,
            route.data_ptr(),
            x.data_ptr(),
            ids.data_ptr(),
            0 if weights is None else weights.data_ptr(),
            x.shape[0],
            VALUE_CODES[x.dtype],
            coding.dtype,
            round_scale,
            weights is not None,
        )
        receive = kernels.dispatch_recv(
            space.context,
            state.address,
            route.data_ptr(),
            coding.dtype,
            outputs.values.data_ptr(),
            outputs.scales_address,
            outputs.count.data_ptr(),
            outputs.src_info.data_ptr(),
            outputs.layout_range.data_ptr(),
            stats,
            waited,
        )
        handle = LowLatencyHandle.build(
            (outputs.src_info, outputs.layout_range, plan.tokens, plan.hidden, plan.experts),
            owner=self,
            generation=self._generation,
            route=route,
            topk_idx=ids,
            topk_weights=weights,
        )
        used = [x, ids, route, *outputs.tensors]
        used += [
            one
            for one in (weights, cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats)
            if one is not None
        ]

        def received() -> None:
            handle.received = True
            self._runtime.record("ll_dispatch", int(ids.shape[0]), 0, time.monotonic_ns() - started)

        event, hook = self._launch(
            phase, self._dispatches, send, receive, used, received, async_finish, return_recv_hook
        )
        return outputs.rows, outputs.count, handle, event, hook

    # -- combine ------------------------------------------------------------------------------------------------

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        *,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """See :meth:`LowLatency.combine`. Weights that were not given at dispatch are read when the hook runs.

        Raises:
            ConfigError: wrong arguments, a handle of another Buffer, a third combine in flight; nothing has moved.
            PeerTimeout, PeerLost, ProxyDied, TransportError, ProtocolError: of this or an earlier operation.
        """
        started = time.monotonic_ns()
        phase = "low-latency combine"
        self._check(phase)
        if async_finish and return_recv_hook:
            raise ConfigError(f"{phase}: async_finish and return_recv_hook exclude each other")
        state, kernels, space = self._of(handle, phase)
        plan = state.plan
        if not handle.received:
            raise ConfigError(f"{phase}: the dispatch of this handle is not received yet: call its recv hook first")
        check_combine(plan, handle, x, topk_idx, topk_weights, out)
        self._check_tensor(phase, "x", x)
        waited = check_stats("combine_wait_recv_cost_stats", combine_wait_recv_cost_stats, torch.int64, plan.ranks)
        self._combines.check_room()
        coding = combine_coding(x)
        reduced = handle.topk_weights is not None
        weights = handle.topk_weights if handle.topk_weights is not None else topk_weights.contiguous()
        result = torch.empty(topk_idx.shape[0], plan.hidden, dtype=x.dtype, device=x.device) if out is None else out
        self._check_tensor(phase, "out", result)
        ticket = torch.empty(1, dtype=torch.int64, device=x.device)
        route: torch.Tensor = handle.route
        send = kernels.combine_send(
            space.context,
            state.address,
            route.data_ptr(),
            ticket.data_ptr(),
            x.data_ptr(),
            handle.layout_range.data_ptr(),
            coding.dtype,
        )
        receive = kernels.combine_recv(
            space.context,
            state.address,
            route.data_ptr(),
            ticket.data_ptr(),
            weights.data_ptr(),
            result.data_ptr(),
            result.shape[0],
            coding.dtype,
            reduced,
            waited,
        )
        used = [x, weights, result, ticket, route, handle.layout_range]
        used += [] if combine_wait_recv_cost_stats is None else [combine_wait_recv_cost_stats]

        def received() -> None:
            self._runtime.record(
                "ll_combine", int(result.shape[0]), 0, time.monotonic_ns() - started, reduced=int(reduced)
            )

        event, hook = self._launch(phase, self._combines, send, receive, used, received, async_finish, return_recv_hook)
        return result, event, hook

    def next_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """See :meth:`LowLatency.next_combine_buffer`."""
        state, _, _ = self._of(handle, "low-latency combine buffer")
        plan = state.plan
        if self._combine_buffer is None:
            dtype = torch.bfloat16 if plan.element == 2 else torch.float32
            shape = (plan.local_experts, plan.ranks * plan.tokens, plan.hidden)
            self._combine_buffer = torch.empty(shape, dtype=dtype, device=self._memory.device)
        return self._combine_buffer

    # -- inside -------------------------------------------------------------------------------------------------

    def _check(self, phase: str, begins: bool = False) -> None:
        """Raise what is known to be wrong; ``begins``: the operation needs nothing that was sent before."""
        runtime = self._runtime
        if self._space is not None and self._generation == runtime.generation:
            self._space.take_report()
        runtime.check(phase)
        if runtime.stale and not begins:
            raise ConfigError(
                f"{phase}: {runtime.stale}, so what was sent before is void. Next step: go on with a dispatch on every "
                "rank"
            )

    def _check_tensor(self, phase: str, name: str, tensor: torch.Tensor) -> None:
        if tensor.device != self._memory.device:
            raise ConfigError(
                f"{phase}: {name} is on {tensor.device}, and this Buffer serves tensors on {self._memory.device}"
            )
        if tensor.numel() and tensor.data_ptr() % 16:
            raise ConfigError(f"{phase}: {name} must start on a multiple of 16 bytes")

    def _adopt(
        self, plan: LowLatencyPlan, coding: Coding, x: torch.Tensor, round_scale: bool, reduced: bool
    ) -> tuple[DeviceStateBlock, DeviceLowLatencyKernels, DeviceSpace]:
        """State, kernels and space for ``plan``, laid out anew on all ranks when the window has no room for it."""
        runtime = self._runtime
        laid_out = None if runtime.stale else runtime.layout.low_latency
        if laid_out is None or not covers(laid_out, plan) or runtime.grow_asked:
            # what is wrong on this rank alone is told to the others, who would wait for it
            objection = ""
            try:
                self._check_idle(plan)
                kernels = device_low_latency_kernels(plan, self._interpreted)
                kernels.check(runtime.settings)
                # before the ranks meet: a rank that compiles while others wait would eat into their deadline
                kernels.warm(VALUE_CODES[x.dtype], coding.dtype, round_scale, reduced)
            except ConfigError as error:
                objection = str(error)
            runtime.grow(plan, objection)
            laid_out = plan
        if self._state is None or self._generation != runtime.generation:
            self._kernels = device_low_latency_kernels(laid_out, self._interpreted)
            self._space = self._build_space()
            self._state = self._kernels.new_state(runtime.layout, runtime.settings.channels, self._memory.device)
            self._generation = runtime.generation
            self._combine_buffer = None
            self._dispatches.clear()
            self._combines.clear()
        assert self._kernels is not None
        assert self._space is not None
        return self._state, self._kernels, self._space

    def _check_idle(self, plan: LowLatencyPlan) -> None:
        """Raise ConfigError where the windows cannot be laid out anew for ``plan`` now."""
        if self._lane.capturing:
            raise ConfigError(
                f"low-latency dispatch: {plan} is new, and laying out windows cannot be captured in a graph: dispatch "
                "and combine once with these shapes before the capture"
            )
        stale = self._runtime.stale or self._generation != self._runtime.generation
        if not stale and (self._dispatches.count or self._combines.count):
            raise ConfigError(
                f"low-latency dispatch: {plan} needs another window layout, and an operation is in flight: call its "
                "recv hook first"
            )

    def _build_space(self) -> DeviceSpace:
        """Collective where windows are in device memory."""
        runtime, window = self._runtime, None
        wanted = runtime.settings.window
        if wanted == "device" and not runtime.all_on_this_host:
            raise ConfigError(
                "UCCL_EP_WINDOW=device needs all ranks on one host: no transport of this version reads GPU memory. Use "
                "UCCL_EP_WINDOW=host"
            )
        if wanted == "device" or (wanted == "auto" and runtime.all_on_this_host and runtime.settings.direct):
            window = DeviceWindow(
                self._memory,
                runtime.layout,
                runtime.rank,
                lambda handle: runtime.exchange("sharing device windows", handle),
            )
        space = DeviceSpace(runtime.space, self._memory, window)
        runtime.before_unmapping(space.close)
        return space

    def _of(self, handle: object, phase: str) -> tuple[DeviceStateBlock, DeviceLowLatencyKernels, DeviceSpace]:
        """What ``handle`` belongs to. Raises ConfigError when it is not this object's, or older than the window."""
        if not isinstance(handle, LowLatencyHandle) or handle.owner is not self:
            raise ConfigError(f"{phase}: the handle must be what low-latency dispatch of the same Buffer returned")
        if handle.generation != self._runtime.generation:
            raise ConfigError(
                f"{phase}: the handle is older than the present window layout (another T, hidden, number of experts, "
                "top-k or dtype was dispatched since): combine before dispatching other shapes"
            )
        assert self._state is not None
        assert self._kernels is not None
        assert self._space is not None
        return self._state, self._kernels, self._space

    def _launch(
        self,
        phase: str,
        flight: _InFlight,
        send: tuple[KernelLaunch, ...],
        receive: tuple[KernelLaunch, ...],
        used: list[torch.Tensor],
        received: Callable[[], None],
        async_finish: bool,
        return_recv_hook: bool,
    ) -> tuple[EventOverlap, Hook | None]:
        lane = self._lane

        def all_of(launches: tuple[KernelLaunch, ...]) -> Callable[[], None]:
            def run() -> None:
                for launch in launches:
                    launch.run()

            return run

        self._runtime.begin_operation()
        number = flight.start()
        if not return_recv_hook:
            event = lane.run(all_of(send + receive), used, own_stream=True, finish=not async_finish)
            flight.end(number)
            received()
            if self._interpreted:
                self._check(phase)
            return event, None
        event = lane.run(all_of(send), used, own_stream=False, finish=True)
        generation = self._generation
        pending = True

        def hook() -> None:
            nonlocal pending
            if not pending:
                return
            self._check(f"{phase} recv")
            if generation != self._runtime.generation:
                raise ConfigError(f"{phase} recv: the window was laid out anew since this operation was sent")
            lane.run(all_of(receive), used, own_stream=False, finish=True)
            pending = False
            flight.end(number)
            received()
            if self._interpreted:
                self._check(f"{phase} recv")

        return event, hook


class _InFlight:
    """Operations of a phase that were launched and whose receive was not; the host's count, in launch order.

    A slot is used again by the operation after next, so that one must have been received.
    """

    def __init__(self, phase: str, words: str) -> None:
        self._phase, self._words = phase, words
        self._next = 0
        self._open: set[int] = set()

    @property
    def count(self) -> int:
        """Operations in flight."""
        return len(self._open)

    def check_room(self) -> None:
        """Raises ConfigError while the operation before last is in flight."""
        if any(number <= self._next - 2 for number in self._open):
            raise ConfigError(
                f"{self._phase}: {self.count} {self._words} are in flight and the one before last is not received: at "
                "most two at a time. Call its recv hook first"
            )

    def start(self) -> int:
        """A new operation's number."""
        self._open.add(self._next)
        self._next += 1
        return self._next - 1

    def end(self, number: int) -> None:
        """Its receive is launched."""
        self._open.discard(number)

    def clear(self) -> None:
        """Counters start again with a window generation."""
        self._open.clear()
        self._next = 0


class _Outputs:
    """What dispatch returns, on the device. Only the counts have content before the kernels have run: zero.

    Attributes:
        rows: what the caller gets: values, or (values, scales).
        tensors: all of them.
    """

    def __init__(self, plan: LowLatencyPlan, coding: Coding, device: torch.device, fp8: torch.dtype) -> None:
        experts, capacity = plan.local_experts, plan.ranks * plan.tokens
        dtype = fp8 if coding.quantised else coding.output
        self.values = torch.empty(experts, capacity, plan.hidden, dtype=dtype, device=device)
        self.count = torch.zeros(experts, dtype=torch.int32, device=device)
        self.src_info = torch.empty(experts, capacity, dtype=torch.int32, device=device)
        self.layout_range = torch.empty(experts, plan.ranks, dtype=torch.int64, device=device)
        self.rows: Rows = self.values
        self.scales_address = 0
        self.tensors = [self.values, self.count, self.src_info, self.layout_range]
        if coding.quantised:
            packed = 1 if coding.dtype == DTYPE_FP8 else 4
            columns = torch.empty(
                experts,
                plan.hidden // (packed * SCALE_BLOCK),
                capacity,
                dtype=torch.float32 if coding.dtype == DTYPE_FP8 else torch.int32,
                device=device,
            )
            self.scales_address = columns.data_ptr()
            self.rows = (self.values, columns.transpose(1, 2))
            self.tensors.append(columns)
