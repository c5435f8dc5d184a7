"""Low-latency dispatch and combine of CPU tensors: what the host does around the kernels.

:meth:`LowLatency.dispatch` and :meth:`LowLatency.combine` are the sequence diagram of docs/architecture/overview.md,
seen from the host. Counters and routing live in blocks that only kernels advance (``kernels.blocks.low_latency``).
Every rank calls dispatch and combine in the same order; recv hooks may be called later and in another order.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import torch

from ..data_plane.runtime import Runtime
from ..errors import ConfigError
from ..handles import EventOverlap, LowLatencyHandle
from ..kernels.blocks import low_latency as block
from ..kernels.cpu import low_latency as kernels
from ..native.groups import load
from ..protocol.layout import LowLatencyPlan
from ..protocol.message import FORM_EXPANDED, FORM_REDUCED, SCALE_BLOCK
from .arguments import CPU, VALUE_CODES, check_device, check_memory
from .epoch import COMBINED_EARLY, Epoch, InFlight, RecvHook
from .low_latency_arguments import (
    Coding,
    check_combine,
    check_dispatch,
    check_finish,
    check_reserve,
    check_ring,
    check_stats,
    check_zero_copy,
    combine_coding,
    dispatch_coding,
)
from .low_latency_outputs import DispatchOutputs, OutputMemory, Rows, keep_latest

__all__ = ["LowLatency"]


class LowLatency:
    """Low-latency mode of one Buffer. Not thread-safe: one host thread calls it, as with DeepEP."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._dispatches, self._combines = InFlight("dispatches"), InFlight("combines")
        self._epoch = Epoch(runtime, (self._dispatches, self._combines))
        self._state: block.StateBlock | None = None
        self._memory = OutputMemory()
        self._quantised: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=CPU)
        self._block_scratch: torch.Tensor = torch.empty(SCALE_BLOCK, dtype=torch.float32, device=CPU)
        self._combine_buffers: dict[tuple[LowLatencyPlan, torch.dtype], torch.Tensor] = {}

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
        """Give the windows room for dispatches of these sizes, see :meth:`Buffer.reserve_low_latency`."""
        phase = "reserve_low_latency"
        self._epoch.check(phase, begins=True)
        self._epoch.receive_dropped()
        plan, x = check_reserve(self._runtime.ranks, tokens, hidden, experts, topk, dtype)
        dispatch_coding(x, use_fp8, round_scale, use_ue8m0)
        self._enter(phase, plan, ahead=True)

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
        """Send every token once to each rank that has one of its experts, and receive the tokens of this rank's
        experts. The arguments are DeepEP's.

        R ranks, T = ``num_max_dispatch_tokens_per_rank``, H hidden, K top-k, L = ``num_experts`` / R local experts.

        Args:
            x: bfloat16, float16 or float32 [tokens, H], contiguous, tokens <= T (0 is fine).
            topk_idx: int64 [tokens, K], global expert ids, -1 = none. Expert e lives on rank e // L.
            num_max_dispatch_tokens_per_rank, num_experts: equal on all ranks, like H and K. The first call with sizes
                that the windows have no room for is collective: they are rebuilt.
            topk_weights: float32 [tokens, K], exactly what combine will get. Given here, one row per (token, rank)
                returns at combine, summed by the expert side; otherwise one per (token, expert).
            use_fp8: send e4m3 with one float32 scale per 128 values; round_scale: scales rounded up to powers of two;
                use_ue8m0: scales as exponent bytes (needs round_scale).
            async_finish: accepted; on CPU the operation is over when this returns. Not together with a hook.
            return_recv_hook: only send now, and receive when the returned hook is called.
            cumulative_local_expert_recv_stats: int32 [L] to which the received counts are added.
            dispatch_wait_recv_cost_stats: int64 [R] to which the nanoseconds from the begin of the receive until each
                source's message was here are added.
            deterministic: an expert's rows stand by source rank, whatever comes first; None: as the settings say. The
                combined tokens do not depend on it.

        Returns:
            ``(recv_x, recv_count, handle, event, hook)``. recv_x is [L, R * T, H], or with FP8 a pair of e4m3 values
            and scales: float32 [L, R * T, H / 128] or, UE8M0, int32 [L, R * T, H / 512], column-major in the last two
            dimensions. Expert l has recv_count[l] (int32 [L]) rows, those of one source rank together and by token (see
            ``handle.layout_range``); the rest is undefined.
            With a hook nothing of it is valid before the hook has been called; hook is None without one.

        Raises:
            ConfigError: wrong arguments, a third dispatch in flight; nothing has moved.
            PeerTimeout, PeerLost, ProxyDied, TransportError, ProtocolError: as named.
        """
        started = time.monotonic_ns()
        phase, runtime, epoch = "low-latency dispatch", self._runtime, self._epoch
        counts, waits = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
        epoch.check(phase, begins=True)
        epoch.receive_dropped()

        # What is given: nothing of it has moved when it is refused.
        check_finish(phase, async_finish, return_recv_hook)
        plan = check_dispatch(runtime.ranks, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, topk_weights)
        coding = dispatch_coding(x, use_fp8, round_scale, use_ue8m0)
        check_device(CPU, x=x, topk_idx=topk_idx, topk_weights=topk_weights)
        counts_address = check_stats("cumulative_local_expert_recv_stats", counts, torch.int32, plan.local_experts, CPU)
        waits_address = check_stats("dispatch_wait_recv_cost_stats", waits, torch.int64, plan.ranks, CPU)
        # what the handle keeps must not change under it; contiguous for the kernels
        ids = topk_idx.clone(memory_format=torch.contiguous_format)
        weights = None if topk_weights is None else topk_weights.clone(memory_format=torch.contiguous_format)
        if (bad := kernels.first_bad_id(ids.data_ptr(), ids.numel(), num_experts)) >= 0:
            raise _bad_id(phase, ids, bad, num_experts)

        # Windows with room for it: the first call with sizes that do not fit rebuilds them on all ranks.
        state = self._enter(phase, plan)
        # rule: a third dispatch in flight is refused
        if not self._dispatches.has_room:
            raise self._dispatches.refusal(phase)

        with epoch.operation(phase, self._dispatches, plan) as operation:
            # Memory, all of it before the send: a message without a hook could never be received. Where there is none,
            # the others are told.
            rows, stride = x.data_ptr(), coding.payload
            if coding.quantised:
                rows, stride = self._quantise(x, coding, round_scale), coding.row
            route = block.RouteBlock(plan, x.shape[0], FORM_EXPANDED if weights is None else FORM_REDUCED)
            outputs = DispatchOutputs(plan, coding, CPU, coding.output, self._memory.rows)
            handle = LowLatencyHandle.build(
                (outputs.src_info, outputs.layout_range),
                owner=self,
                epoch=epoch.number,
                plan=plan,
                route=route,
                topk_idx=ids,
                topk_weights=weights,
                dtype=x.dtype,
            )

            # Who gets which tokens; one message to every rank; one message of every rank, unpacked per expert.
            space = runtime.space
            blocks = space.context, state.address, route.address
            kernels.route(space.context, route.address, ids.data_ptr())
            send = partial(
                kernels.dispatch_send,
                *blocks,
                space.progress,
                rows,
                stride,
                coding.row if coding.quantised else coding.payload,
                coding.row,
                ids.data_ptr(),
                0 if weights is None else weights.data_ptr(),
                coding.dtype,
            )
            receive = partial(
                kernels.dispatch_recv,
                *blocks,
                space.progress,
                coding.dtype,
                outputs.values.data_ptr(),
                coding.payload,
                coding.row,
                outputs.scales_address,
                outputs.count.data_ptr(),
                outputs.src_info.data_ptr(),
                outputs.layout_range.data_ptr(),
                counts_address,
                waits_address,
                int(runtime.settings.deterministic if deterministic is None else deterministic),
            )
            space.wait(f"{phase} send", send)
            if not return_recv_hook:
                space.wait(f"{phase} recv", receive)
                operation.received()
        spent = time.monotonic_ns() - started
        if not return_recv_hook:
            self._dispatched(handle, spent)
            return outputs.rows, outputs.count, handle, EventOverlap(), None
        later = f"{phase} recv"
        hook = RecvHook(
            epoch,
            operation,
            later,
            lambda: runtime.space.wait(later, receive),
            lambda ns: self._dispatched(handle, spent + ns),
            kept=(outputs, counts, waits),
        )
        return outputs.rows, outputs.count, handle, EventOverlap(), hook

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
        """Bring the experts' rows back to their tokens and sum them with the router weights, in float32.

        Args:
            x: experts' output [L, R * T, H] in the layout of recv_x; bfloat16, float16 or float32, not wider than the
                tokens were.
            topk_idx, topk_weights: int64 and float32 [tokens, K] of the dispatch; weights given there must be equal
            here. handle: of a dispatch that has been received. It may be combined any number of times.
            zero_copy: ``x`` is what :meth:`next_combine_buffer` returned. Rows are packed straight from any ``x``.
            async_finish, return_recv_hook: as for dispatch. ``x`` and ``topk_weights`` may be changed once this
                returns.
            out: [tokens, H] in x.dtype to write into.
            combine_wait_recv_cost_stats: int64 [R] to which nanoseconds waited for each rank are added.

        Returns:
            ``(out, event, hook)``, out [tokens, H] in x.dtype; tokens without experts are zero. Not valid before the
            hook has been called.

        Raises:
            ConfigError: wrong arguments, a handle of another Buffer, a third combine in flight; nothing has moved.
            PeerTimeout, PeerLost, ProxyDied, TransportError, ProtocolError: as named.
        """
        started = time.monotonic_ns()
        phase, runtime, epoch = "low-latency combine", self._runtime, self._epoch
        epoch.check(phase)
        # before a dropped recv hook is made up for: x was computed by now
        early = isinstance(handle, LowLatencyHandle) and not handle.received
        epoch.receive_dropped()

        # What is given: nothing of it has moved when it is refused.
        check_finish(phase, async_finish, return_recv_hook)
        state = self._state_of(phase, handle)
        plan: LowLatencyPlan = handle.plan
        if early:
            raise ConfigError(f"{phase}: {COMBINED_EARLY}")
        for name, given in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights), ("out", out)):
            if isinstance(given, torch.Tensor) and given.device == CPU:
                check_memory(f"{phase}: {name}", given)
        check_combine(plan, handle, x, topk_idx, topk_weights, out)
        if zero_copy:
            check_zero_copy(x, self._combine_buffers.get((plan, x.dtype)))
        coding, waits = combine_coding(x), combine_wait_recv_cost_stats
        waits_address = check_stats("combine_wait_recv_cost_stats", waits, torch.int64, plan.ranks, CPU)
        # rule: a third combine in flight is refused
        if not self._combines.has_room:
            raise self._combines.refusal(phase)

        with epoch.operation(phase, self._combines, plan) as operation:
            # Memory, all of it before the send.
            weights = handle.topk_weights
            if weights is None:
                # read only when the hook runs: the caller may change its own by then
                weights = topk_weights.clone(memory_format=torch.contiguous_format)
            result = out
            if result is None:
                result = torch.empty(topk_idx.shape[0], plan.hidden, dtype=x.dtype, device=CPU)
            # the number of this combine: written by combine_send, read by combine_recv
            ticket = np.zeros(1, dtype=np.int64)

            # The experts' rows go back to their sources; rows of every rank come, and are summed per token.
            space = runtime.space
            blocks = space.context, state.address, handle.route.address, ticket.ctypes.data, space.progress
            form = coding.payload, coding.row, coding.dtype
            send = partial(kernels.combine_send, *blocks, x.data_ptr(), *form)
            receive = partial(
                kernels.combine_recv, *blocks, weights.data_ptr(), result.data_ptr(), *form, waits_address
            )
            space.wait(f"{phase} send", send)
            if not return_recv_hook:
                space.wait(f"{phase} recv", receive)
                operation.received()
        spent = time.monotonic_ns() - started
        if not return_recv_hook:
            self._combined(handle, spent)
            return result, EventOverlap(), None
        later = f"{phase} recv"
        hook = RecvHook(
            epoch,
            operation,
            later,
            lambda: runtime.space.wait(later, receive),
            lambda ns: self._combined(handle, spent + ns),
            kept=(weights, result, ticket, waits),
        )
        return result, EventOverlap(), hook

    def next_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """A tensor [L, R * T, H] for the experts' output, for callers of ``zero_copy=True``.

        Its dtype is that of the tokens at the handle's dispatch. The same tensor is returned for the same plan and
        dtype: combine has read it when it returns. Raises ConfigError for a handle of another Buffer.
        """
        self._state_of("low-latency combine buffer", handle)
        plan: LowLatencyPlan = handle.plan
        shape = plan.local_experts, plan.ranks * plan.tokens, plan.hidden
        # whoever asks first may be an engine's warm-up, whose tensors nobody else may write to
        with torch.inference_mode(False):
            make = partial(self._memory.rows, shape, handle.dtype)
            return keep_latest(self._combine_buffers, (plan, handle.dtype), make)

    # -- inside -------------------------------------------------------------------------------------------------

    def _enter(self, phase: str, plan: LowLatencyPlan, ahead: bool = False) -> block.StateBlock:
        """Counters of windows that have room for ``plan``."""
        runtime = self._runtime
        self._epoch.make_room(
            phase,
            plan,
            lambda: check_ring(plan, runtime.channels, runtime.settings.ring_slots),
            lambda: load(kernels.LOW_LATENCY),
            ahead=ahead,
        )
        if self._epoch.enter() or self._state is None:
            self._state = block.StateBlock(runtime.layout)
            self._memory.clear()
            self._combine_buffers.clear()
        return self._state

    def _state_of(self, phase: str, handle: LowLatencyHandle) -> block.StateBlock:
        """Counters that ``handle`` belongs to. Raises ConfigError when it is not of this Buffer and epoch."""
        self._epoch.check_handle(phase, handle, self)
        assert self._state is not None
        return self._state

    def _quantise(self, x: torch.Tensor, coding: Coding, round_scale: bool) -> int:
        """Address of the FP8 wire rows of ``x``. They are read before the dispatch returns, so one buffer is enough."""
        tokens, hidden = x.shape
        if self._quantised.numel() < tokens * coding.row:
            self._quantised = torch.empty(tokens * coding.row, dtype=torch.uint8, device=CPU)
        kernels.quantise(
            self._quantised.data_ptr(),
            coding.row,
            x.data_ptr(),
            tokens,
            hidden,
            VALUE_CODES[x.dtype],
            coding.dtype,
            int(round_scale),
            self._block_scratch.data_ptr(),
        )
        return self._quantised.data_ptr()

    def _dispatched(self, handle: LowLatencyHandle, nanoseconds: int) -> None:
        """A dispatch is received: it may be combined, and counts."""
        handle.received = True
        rank, route = self._runtime.rank, handle.route
        counts, pairs = route.table(block.COUNTS).tolist(), route.table(block.PAIRS).tolist()
        self._runtime.record(
            "ll_dispatch",
            handle.topk_idx.shape[0],
            sum(counts) - counts[rank],
            nanoseconds,
            expert_rows=sum(pairs) - pairs[rank],
        )

    def _combined(self, handle: LowLatencyHandle, nanoseconds: int) -> None:
        """A combine is received, and counts."""
        returned = handle.route.table(block.RETURN_ROWS).tolist()
        self._runtime.record(
            "ll_combine",
            handle.topk_idx.shape[0],
            sum(returned) - returned[self._runtime.rank],
            nanoseconds,
            reduced=0 if handle.topk_weights is None else 1,
        )


def _bad_id(phase: str, ids: torch.Tensor, at: int, experts: int) -> ConfigError:
    """What to raise for the id that is the ``at``-th of ``ids``."""
    token, slot = divmod(at, ids.shape[1])
    return ConfigError(f"{phase}: topk_idx[{token}, {slot}] = {int(ids[token, slot])} is outside -1 .. {experts - 1}")
