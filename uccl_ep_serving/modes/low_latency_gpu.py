"""Low-latency dispatch and combine of tensors on a device: the host only launches kernels.

The same operations, arguments and formats as :mod:`.low_latency_cpu`. The host never waits for the device and reads
nothing back: message numbers, parities, routing and counts stay in device memory, so that a captured graph of a
dispatch and its combine replays with other tokens. What a kernel reports (a silent peer, a refused header) is raised by
the next call; until then the kernels leave zero counts and zero rows.
"""

from __future__ import annotations

import time

import torch

from ..data_plane.runtime import Runtime
from ..errors import ConfigError
from ..gpu.context import GpuContext
from ..handles import EventOverlap, LowLatencyHandle
from ..protocol.layout import LowLatencyPlan
from .arguments import VALUE_CODES, check_memory, check_start
from .epoch import COMBINED_EARLY, RecvHook
from .low_latency_arguments import (
    check_combine,
    check_dispatch,
    check_finish,
    check_reserve,
    check_stats,
    combine_coding,
    dispatch_coding,
    dispatch_key,
)
from .low_latency_gpu_session import LowLatencyGpuSession
from .low_latency_outputs import DispatchOutputs, Rows

__all__ = ["LowLatencyGpu"]


class LowLatencyGpu:
    """Low-latency mode of one Buffer for tensors on a device. Not thread-safe: one host thread calls it.

    Args:
        runtime: of the Buffer.
        gpu: what it shares with normal mode.
    """

    def __init__(self, runtime: Runtime, gpu: GpuContext) -> None:
        self._runtime = runtime
        self._device = gpu.memory.device
        self._session = LowLatencyGpuSession(runtime, gpu)

    def reserve(
        self,
        tokens: int,
        hidden: int,
        experts: int,
        topk: int,
        *,
        dtype: torch.dtype,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
        with_topk_weights: bool,
    ) -> None:
        """Give the windows room for dispatches of these sizes, and compile what they and their combines launch; see
        :meth:`Buffer.reserve_low_latency`."""
        phase, session = "reserve_low_latency", self._session
        session.epoch.check(phase, begins=True)
        session.epoch.receive_dropped()
        plan, x = check_reserve(self._runtime.ranks, tokens, hidden, experts, topk, dtype)
        coding = dispatch_coding(x, use_fp8, round_scale, use_ue8m0)
        serving = session.enter(phase, plan, coding, x, round_scale, with_topk_weights, ahead=True)
        session.compile_combine(serving.kernels, VALUE_CODES[dtype], with_topk_weights)

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
        deterministic: bool | None = None,
    ) -> tuple[Rows, torch.Tensor, LowLatencyHandle, EventOverlap, RecvHook | None]:
        """The arguments of :meth:`LowLatency.dispatch`. Ids outside -1 .. experts - 1 count as -1, and the next call
        raises ConfigError (in the interpreter this one). ``x``, ``topk_idx`` and ``topk_weights`` are read in the order
        of the stream.

        Raises:
            ConfigError: wrong arguments, a third dispatch in flight, a new shape while a graph is captured.
            PeerTimeout, PeerLost, ProxyDied, TransportError, ProtocolError: of this or an earlier operation.
        """
        started = time.monotonic_ns()
        phase, session, device = "low-latency dispatch", self._session, self._device
        counts, waits = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
        session.epoch.check(phase, begins=True)
        session.epoch.receive_dropped()
        check_finish(phase, async_finish, return_recv_hook)
        sizes = num_max_dispatch_tokens_per_rank, num_experts
        key = dispatch_key(x, topk_idx, topk_weights, sizes, (use_fp8, round_scale, use_ue8m0))
        known = session.known(key)
        if known is None:
            plan = check_dispatch(self._runtime.ranks, x, topk_idx, *sizes, topk_weights)
            coding = dispatch_coding(x, use_fp8, round_scale, use_ue8m0)
        else:
            plan, coding, serving = known
        start = check_start("low-latency dispatch: x", x, device)
        counts_address = check_stats(
            "cumulative_local_expert_recv_stats", counts, torch.int32, plan.local_experts, device
        )
        waits_address = check_stats("dispatch_wait_recv_cost_stats", waits, torch.int64, plan.ranks, device)
        check_memory("low-latency dispatch: topk_idx", topk_idx)
        ids = topk_idx.contiguous()
        if topk_weights is not None:
            check_memory("low-latency dispatch: topk_weights", topk_weights)
        weights = None if topk_weights is None else topk_weights.contiguous()
        if known is None:
            serving = session.enter(phase, plan, coding, x, round_scale, weights is not None)
            session.remember(key, plan, coding, serving)
        state, space, kernels, block = serving
        if not session.dispatches.has_room:
            raise session.dispatches.refusal(phase)

        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        outputs = DispatchOutputs(plan, coding, device, kernels.fp8_dtype, allocate)
        route = block.new_route()
        if deterministic is None:
            deterministic = self._runtime.settings.deterministic
        send = kernels.dispatch_send(
            space.context,
            state.address,
            block.address,
            route.data_ptr(),
            start,
            ids.data_ptr(),
            0 if weights is None else weights.data_ptr(),
            x.shape[0],
            VALUE_CODES[x.dtype],
            coding.dtype,
            round_scale,
            weights is not None,
            deterministic,
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
            counts_address,
            waits_address,
            deterministic,
        )
        handle = LowLatencyHandle.build(
            (outputs.src_info, outputs.layout_range),
            owner=self,
            epoch=session.epoch.number,
            plan=plan,
            route=route,
            topk_idx=ids,
            topk_weights=weights,
            dtype=x.dtype,
        )
        used = [x, ids, route, *outputs.tensors, *(one for one in (weights, counts, waits) if one is not None)]
        spent = time.monotonic_ns() - started

        def received(nanoseconds: int) -> None:
            handle.received = True
            self._runtime.record("ll_dispatch", int(ids.shape[0]), 0, spent + nanoseconds)

        event, hook = session.launch(
            phase,
            session.dispatches,
            plan,
            send,
            receive,
            used,
            received,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
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
    ) -> tuple[torch.Tensor, EventOverlap, RecvHook | None]:
        """See :meth:`LowLatency.combine`. Weights that were not given at dispatch are read when the hook runs.

        Raises:
            ConfigError: wrong arguments, a handle of another Buffer, a third combine in flight; nothing has moved.
            PeerTimeout, PeerLost, ProxyDied, TransportError, ProtocolError: of this or an earlier operation.
        """
        started = time.monotonic_ns()
        phase, session, device = "low-latency combine", self._session, self._device
        waits = combine_wait_recv_cost_stats
        session.epoch.check(phase)
        # before a dropped recv hook is made up for: x was computed by now
        early = isinstance(handle, LowLatencyHandle) and not handle.received
        session.epoch.receive_dropped()
        check_finish(phase, async_finish, return_recv_hook)
        state, space, kernels, _ = session.of(phase, handle, self)
        plan: LowLatencyPlan = handle.plan
        if early:
            raise ConfigError(f"{phase}: {COMBINED_EARLY}")
        check_combine(plan, handle, x, topk_idx, topk_weights, out)
        if zero_copy:
            session.check_zero_copy(plan, x)
        start = check_start("low-latency combine: x", x, device)
        waits_address = check_stats("combine_wait_recv_cost_stats", waits, torch.int64, plan.ranks, device)
        if not session.combines.has_room:
            raise session.combines.refusal(phase)
        coding, reduced = combine_coding(x), handle.topk_weights is not None
        session.compile_combine(kernels, coding.dtype, reduced)
        check_memory("low-latency combine: topk_weights", topk_weights)
        weights = topk_weights.contiguous() if handle.topk_weights is None else handle.topk_weights
        result = torch.empty(topk_idx.shape[0], plan.hidden, dtype=x.dtype, device=device) if out is None else out
        out_start = check_start("low-latency combine: out", result, device)
        ticket = torch.empty(1, dtype=torch.int64, device=device)
        route: torch.Tensor = handle.route
        send = kernels.combine_send(
            space.context,
            state.address,
            route.data_ptr(),
            ticket.data_ptr(),
            start,
            handle.layout_range.data_ptr(),
            coding.dtype,
        )
        receive = kernels.combine_recv(
            space.context,
            state.address,
            route.data_ptr(),
            ticket.data_ptr(),
            weights.data_ptr(),
            out_start,
            result.shape[0],
            coding.dtype,
            reduced,
            waits_address,
        )
        used = [x, weights, result, ticket, route, handle.layout_range, *([] if waits is None else [waits])]
        spent = time.monotonic_ns() - started

        def received(nanoseconds: int) -> None:
            self._runtime.record("ll_combine", int(result.shape[0]), 0, spent + nanoseconds, reduced=int(reduced))

        event, hook = session.launch(
            phase,
            session.combines,
            plan,
            send,
            receive,
            used,
            received,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
        )
        return result, event, hook

    def next_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """See :meth:`LowLatency.next_combine_buffer`."""
        plan = self._session.of("low-latency combine buffer", handle, self).kernels.plan
        return self._session.combine_buffer(plan, handle.dtype)
