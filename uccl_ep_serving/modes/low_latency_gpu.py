"""Low-latency dispatch and combine of tensors on a device: the host only launches kernels.

The same operations, arguments and formats as :mod:`.low_latency`. The host never waits for the device and reads nothing
back: message numbers, parities, routing and counts stay in device memory, so that a captured graph of a dispatch and
its combine replays with other tokens. What a kernel reports (a silent peer, a refused header) is raised by the next
call; until then the kernels leave zero counts and zero rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..errors import ConfigError
from ..gpu.context import GpuContext
from ..gpu.launch import Hook, InFlight, launch
from ..gpu.streams import StreamOrder
from ..handles import EventOverlap, LowLatencyHandle
from ..kernels.interface import KernelLaunch
from ..protocol.layout import LowLatencyPlan
from ..protocol.message import DTYPE_FP8, SCALE_BLOCK
from .low_latency_arguments import (
    VALUE_CODES,
    Coding,
    check_combine,
    check_dispatch,
    check_stats,
    combine_coding,
    dispatch_coding,
)
from .low_latency_gpu_session import DeviceSpaceOwner, LowLatencyGpuSession

__all__ = ["LowLatencyGpu"]

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class LowLatencyGpu:
    """Low-latency mode of one Buffer for tensors on a device. Not thread-safe: one host thread calls it.

    Args:
        runtime: of the Buffer.
        device: of the tensors; "cpu" for kernels in Triton's interpreter.
        order: on which kernels run; by default streams of the device, the calling thread in the interpreter.
        gpu: what it shares with normal mode, with a order; by default its own.
    """

    def __init__(
        self,
        runtime: DeviceSpaceOwner,
        device: torch.device,
        order: StreamOrder | None = None,
        gpu: GpuContext | None = None,
    ) -> None:
        self._runtime = runtime
        gpu = gpu or GpuContext(runtime, device, order)
        self._interpreted = gpu.interpreted
        self._order = gpu.order
        self._session = LowLatencyGpuSession(runtime, gpu)

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
        """See :meth:`LowLatency.dispatch`. Ids outside -1 .. experts - 1 count as -1, and the next call raises
        ConfigError (in the interpreter this one). ``x``, ``topk_idx`` and ``topk_weights`` are read in the order of the
        stream.

        Raises:
            ConfigError: wrong arguments, a third dispatch in flight, a new shape while a graph is captured.
            PeerTimeout, PeerLost, ProxyDied, TransportError, ProtocolError: of this or an earlier operation.
        """
        started = time.monotonic_ns()
        session, phase = self._session, "low-latency dispatch"
        session.check(phase, begins=True)
        if async_finish and return_recv_hook:
            raise ConfigError(f"{phase}: async_finish and return_recv_hook exclude each other")
        plan = check_dispatch(
            self._runtime.ranks, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, topk_weights
        )
        coding = dispatch_coding(x, use_fp8, round_scale, use_ue8m0)
        session.check_tensor(phase, "x", x)
        stats = check_stats(
            "cumulative_local_expert_recv_stats",
            cumulative_local_expert_recv_stats,
            torch.int32,
            plan.local_experts,
            x.device,
        )
        waited = check_stats(
            "dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, torch.int64, plan.ranks, x.device
        )
        ids = topk_idx.contiguous()
        weights = None if topk_weights is None else topk_weights.contiguous()
        state, kernels, space = session.adopt(plan, coding, x, round_scale, weights is not None)
        plan = state.plan
        session.dispatches.check_room()
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
            epoch=session.epoch,
            route=route,
            topk_idx=ids,
            topk_weights=weights,
            dtype=x.dtype,
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

        event, hook = self._launch(session.dispatches, send, receive, used, received, async_finish, return_recv_hook)
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
        session, phase = self._session, "low-latency combine"
        session.check(phase)
        if async_finish and return_recv_hook:
            raise ConfigError(f"{phase}: async_finish and return_recv_hook exclude each other")
        state, kernels, space = session.of(handle, self, phase)
        plan = state.plan
        if not handle.received:
            raise ConfigError(f"{phase}: the dispatch of this handle is not received yet: call its recv hook first")
        check_combine(plan, handle, x, topk_idx, topk_weights, out)
        session.check_tensor(phase, "x", x)
        waited = check_stats(
            "combine_wait_recv_cost_stats", combine_wait_recv_cost_stats, torch.int64, plan.ranks, x.device
        )
        session.combines.check_room()
        coding = combine_coding(x)
        reduced = handle.topk_weights is not None
        session.compile_combine(plan, kernels, coding.dtype, reduced)
        weights = handle.topk_weights if handle.topk_weights is not None else topk_weights.contiguous()
        result = torch.empty(topk_idx.shape[0], plan.hidden, dtype=x.dtype, device=x.device) if out is None else out
        session.check_tensor(phase, "out", result)
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

        event, hook = self._launch(session.combines, send, receive, used, received, async_finish, return_recv_hook)
        return result, event, hook

    def next_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """See :meth:`LowLatency.next_combine_buffer`."""
        plan = self._session.of(handle, self, "low-latency combine buffer").state.plan
        return self._session.combine_buffer(plan, handle.dtype)

    def _launch(
        self,
        flight: InFlight,
        send: tuple[KernelLaunch, ...],
        receive: tuple[KernelLaunch, ...],
        used: list[torch.Tensor],
        received: Callable[[], None],
        async_finish: bool,
        return_recv_hook: bool,
    ) -> tuple[EventOverlap, Hook | None]:
        session, phase = self._session, f"{flight.phase} recv" if return_recv_hook else flight.phase
        epoch = session.epoch

        def done() -> None:
            received()
            if self._interpreted:
                # kernels are over when their launch returns, so this call can raise what they report
                session.check(phase)

        self._runtime.begin_operation()
        if self._runtime.rebuild_requested:
            # for other windows, since this call began
            session.check(phase)
        return launch(
            self._order,
            flight,
            send,
            receive,
            used,
            before_receive=lambda: session.still(phase, epoch),
            received=done,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
        )


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
