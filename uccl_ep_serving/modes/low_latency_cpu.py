"""Low-latency dispatch and combine: what the host does around the kernels.

The host checks arguments, allocates what is returned and launches four kernels: dispatch send and receive, combine send
and receive. Counters and routing live in blocks that only kernels advance (:mod:`.kernels.blocks.low_latency`). Every
rank calls dispatch and combine in the same order; recv hooks may be called later and in another order.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..errors import ConfigError
from ..handles import EventOverlap, LowLatencyHandle
from ..kernels.blocks.low_latency import RouteBlock
from ..kernels.interface import LowLatencyKernels
from ..kernels.select import low_latency_kernels
from ..protocol.message import FORM_EXPANDED, FORM_REDUCED, SCALE_BLOCK
from .low_latency_arguments import (
    VALUE_CODES,
    Coding,
    check_combine,
    check_dispatch,
    check_stats,
    combine_coding,
    dispatch_coding,
)
from .low_latency_memory import DispatchOutputs, OutputMemory, rows_of
from .low_latency_session import Receipt, Session, Space
from .low_latency_steps import CombineSteps, DispatchSteps

__all__ = ["LowLatency"]

Hook = Callable[[], None]
Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class LowLatency:
    """Low-latency mode of one Buffer. Not thread-safe: one host thread calls it, as with DeepEP."""

    def __init__(self, runtime: Space) -> None:
        self._runtime = runtime
        self._memory = OutputMemory()
        self._session = Session(runtime, self._forget_outputs)
        self._quantised: torch.Tensor = torch.empty(0, dtype=torch.uint8)
        self._block_scratch: torch.Tensor = torch.empty(SCALE_BLOCK, dtype=torch.float32)
        self._combine_buffers: dict[torch.dtype, torch.Tensor] = {}

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
        """Send every token once to each rank that has one of its experts, and receive the tokens of this rank's
        experts.

        R ranks, T = ``num_max_dispatch_tokens_per_rank``, H hidden, K top-k, L = ``num_experts`` / R local experts.

        Args:
            x: bfloat16, float16 or float32 [tokens, H], contiguous, tokens <= T (0 is fine).
            topk_idx: int64 [tokens, K], global expert ids, -1 = none. Expert e lives on rank e // L.
            num_max_dispatch_tokens_per_rank, num_experts: equal on all ranks. The first call with new sizes is
                collective: it lays the windows out anew.
            topk_weights: float32 [tokens, K], exactly what combine will get. Given here, one row per (token, rank)
                returns at combine, summed by the expert side; otherwise one per (token, expert).
            use_fp8: send e4m3 with one float32 scale per 128 values; round_scale: scales rounded up to powers of two;
                use_ue8m0: scales as exponent bytes (needs round_scale).
            async_finish: accepted; on CPU the operation is over when this returns. Not together with a hook.
            return_recv_hook: only send now, and receive when the returned hook is called.
            cumulative_local_expert_recv_stats: int32 [L] to which the received counts are added.
            dispatch_wait_recv_cost_stats: int64 [R] to which nanoseconds waited for each source are added.

        Returns:
            ``(recv_x, recv_count, handle, event, hook)``. recv_x is [L, R * T, H], or with FP8 a pair of e4m3 values
            and scales: float32 [L, R * T, H / 128] or, UE8M0, int32 [L, R * T, H / 512], column-major in the last two
            dimensions. Expert l has recv_count[l] (int32 [L]) rows, by source rank, then token; the rest is undefined.
            With a hook nothing of it is valid before the hook has been called; hook is None without one.

        Raises:
            ConfigError: wrong arguments, a third dispatch in flight; nothing has moved.
            PeerTimeout, PeerLost, ProxyDied, TransportError, ProtocolError: as named.
        """
        started = time.monotonic_ns()
        phase, session = "low-latency dispatch", self._session
        session.check(phase, begins=True)
        if async_finish and return_recv_hook:
            raise ConfigError(f"{phase}: async_finish and return_recv_hook exclude each other")
        plan = check_dispatch(
            self._runtime.ranks, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, topk_weights
        )
        coding = dispatch_coding(x, use_fp8, round_scale, use_ue8m0)
        counts, waits = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
        stats = check_stats("cumulative_local_expert_recv_stats", counts, torch.int32, plan.local_experts, x.device)
        waited = check_stats("dispatch_wait_recv_cost_stats", waits, torch.int64, plan.ranks, x.device)
        kernels = low_latency_kernels(x.device.type)
        # what the handle keeps must not change under it; contiguous for the kernels
        ids = topk_idx.clone(memory_format=torch.contiguous_format)
        weights = None if topk_weights is None else topk_weights.clone(memory_format=torch.contiguous_format)
        bad = kernels.first_bad_id(ids.data_ptr(), ids.numel(), num_experts)
        if bad >= 0:
            raise _bad_id(phase, ids, bad, num_experts)
        state = session.adopt(plan)
        plan = state.plan
        # rule: a third dispatch in flight is refused
        if not state.next_dispatch_has_space:
            raise _third_in_flight(phase, f"{state.dispatches_in_flight} dispatches")
        route = RouteBlock(plan, x.shape[0], FORM_EXPANDED if weights is None else FORM_REDUCED)
        rows, stride = x.data_ptr(), coding.payload
        if coding.quantised:
            rows, stride = self._quantise(kernels, x, coding, round_scale), coding.row
        # all of it before the send: a message without a hook could never be received
        outputs = DispatchOutputs(self._memory, plan, coding)
        handle = LowLatencyHandle.build(
            (outputs.src_info, outputs.layout_range, plan.tokens, plan.hidden, plan.experts),
            owner=self,
            epoch=session.epoch,
            route=route,
            topk_idx=ids,
            topk_weights=weights,
            dtype=x.dtype,
        )

        steps = DispatchSteps(self._runtime, kernels, state, handle, coding, outputs, (rows, stride), (stats, waited))
        # what the caller passed must live until the kernel has run
        hook = Receipt(session, f"{phase} recv", steps.receive, steps.received, (counts, waits))
        session.send(f"{phase} send", steps.send)
        steps.spent = time.monotonic_ns() - started
        if not return_recv_hook:
            session.finish(hook)
        return outputs.rows, outputs.count, handle, EventOverlap(), hook if return_recv_hook else None

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
        """Bring the experts' rows back to their tokens and sum them with the router weights, in float32.

        Args:
            x: experts' output [L, R * T, H] in the layout of recv_x; bfloat16, float16 or float32, not wider than the
                tokens were.
            topk_idx, topk_weights: int64 and float32 [tokens, K] of the dispatch; weights given there must be equal
            here. handle: of a dispatch that has been received. It may be combined any number of times.
            zero_copy: accepted: rows are packed straight from ``x`` wherever it lies.
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
        phase, session = "low-latency combine", self._session
        session.check(phase)
        if async_finish and return_recv_hook:
            raise ConfigError(f"{phase}: async_finish and return_recv_hook exclude each other")
        state = session.state_of(handle, self, phase)
        plan = state.plan
        if not handle.received:
            raise ConfigError(f"{phase}: the dispatch of this handle is not received yet: call its recv hook first")
        check_combine(plan, handle, x, topk_idx, topk_weights, out)
        waits = combine_wait_recv_cost_stats
        waited = check_stats("combine_wait_recv_cost_stats", waits, torch.int64, plan.ranks, x.device)
        # rule: a third combine in flight is refused
        if not state.next_combine_has_space:
            raise _third_in_flight(phase, f"{state.combines_in_flight} combines")
        kernels = low_latency_kernels(x.device.type)
        coding = combine_coding(x)
        weights = handle.topk_weights
        if weights is None:
            # read only when the hook runs: the caller may change its own by then
            weights = topk_weights.clone(memory_format=torch.contiguous_format)
        result = torch.empty(topk_idx.shape[0], plan.hidden, dtype=x.dtype) if out is None else out
        steps = CombineSteps(self._runtime, kernels, state, handle, coding, x.data_ptr(), weights, result, waited)
        hook = Receipt(session, f"{phase} recv", steps.receive, steps.received, (waits,))
        session.send(f"{phase} send", steps.send)
        steps.spent = time.monotonic_ns() - started
        if not return_recv_hook:
            session.finish(hook)
        return result, EventOverlap(), hook if return_recv_hook else None

    def next_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """A tensor [L, R * T, H] for the experts' output, for callers of ``zero_copy=True``.

        Its dtype is that of the tokens at the handle's dispatch. The same tensor is returned for the same plan and
        dtype: combine has read it when it returns. Raises ConfigError for a handle of another Buffer.
        """
        plan = self._session.state_of(handle, self, "low-latency combine buffer").plan
        if handle.dtype not in self._combine_buffers:
            self._combine_buffers[handle.dtype] = rows_of(
                self._memory, (plan.local_experts, plan.ranks * plan.tokens, plan.hidden), handle.dtype
            )
        return self._combine_buffers[handle.dtype]

    # -- inside -------------------------------------------------------------------------------------------------

    def _forget_outputs(self) -> None:
        self._memory.clear()
        self._combine_buffers.clear()

    def _quantise(self, kernels: LowLatencyKernels, x: torch.Tensor, coding: Coding, round_scale: bool) -> int:
        """Address of the FP8 wire rows of ``x``. They are read before the dispatch returns, so one buffer is enough."""
        tokens, hidden = x.shape
        if self._quantised.numel() < tokens * coding.row:
            self._quantised = torch.empty(tokens * coding.row, dtype=torch.uint8)
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


def _bad_id(phase: str, ids: torch.Tensor, at: int, experts: int) -> ConfigError:
    """What to raise for the id that is the ``at``-th of ``ids``."""
    token, slot = divmod(at, ids.shape[1])
    return ConfigError(f"{phase}: topk_idx[{token}, {slot}] = {int(ids[token, slot])} is outside -1 .. {experts - 1}")


def _third_in_flight(phase: str, in_flight: str) -> ConfigError:
    """What to raise for an operation beside ``in_flight``, the number and the name of those that are."""
    return ConfigError(
        f"{phase}: {in_flight} are in flight and the one before last is not received: at most two at a time. Call its "
        "recv hook first"
    )
