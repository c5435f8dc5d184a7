"""The low-latency kernels for tensors on a device."""

from __future__ import annotations

import functools

import torch

from ...errors import ConfigError
from ...protocol.command import MAX_WRITE_BYTES
from ...protocol.layout import LowLatencyPlan
from ...protocol.message import (
    DTYPE_FP8,
    DTYPE_FP8_UE8M0,
    SCALE_BLOCK,
    element_bytes,
    row_bytes,
)
from .launch import Launch, Target, Variant, present_target
from .ll_combine import pack_combine, prepare_combine, sum_rows
from .ll_dispatch import count_rows, pack_dispatch, unpack_rows
from .ll_message import combine_arrival, dispatch_arrival
from .routing import route

#: Slots of a token are compared with each other in registers.
MAX_TOPK = 64
#: Elements of the three-dimensional comparison of :mod:`.routing` that a program of one warp holds.
_COMPARED = 2048
#: Words (or values) of a row that a program moves at a time, and its threads: 16 bytes of BF16 each, 8 of FP8.
_BLOCK, _THREADS = 1024, 128
#: A multiple of 16 like the real ones, for compiling ahead.
_ANY_ADDRESS = 1 << 40
#: Slots of a token whose rows are loaded together, by the expert's rank and by the token's: with more, ptxas spills.
_WEIGHED_TOGETHER, _SUMMED_TOGETHER = 4, 8
#: Programs of one kernel, some for each multiprocessor of any device. Few tokens have several each; the rows of many
#: sources share them, since few come from each.
_PROGRAMS = 1024
#: (expert, source) pairs laid out at a time.
_LAID_OUT = 1024


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


class TritonLowLatencyKernels:
    """Builds the launches of each step. Addresses are those of device memory; see the kernels for their meaning.

    Args:
        plan: sizes.
        target: what to compile for; by default this process's.
    """

    name = "triton"

    def __init__(self, plan: LowLatencyPlan, target: Target | None = None) -> None:
        self.plan = plan
        self.target = target or present_target()
        # In the interpreter an operation costs the same for one row and for many.
        self._rows = 16 if self.target.interpreted else 1
        self._slots, self._ranks = _power_of_two(plan.topk), _power_of_two(plan.ranks)
        self._backend = {"BACKEND": self.target.backend}
        self._lanes = {"LANES": self.target.warp, **self._backend}
        self._warps = _THREADS // self.target.warp
        self._publishing = {"LANES": self.target.warp if self.target.interpreted else _THREADS, **self._backend}
        self.fp8_dtype = torch.float8_e4m3fnuz if self.target.fnuz else torch.float8_e4m3fn
        # each is made once for its formats, of which an engine has one or two
        self._of_dispatch_send = functools.cache(self._make_dispatch_send)
        self._of_dispatch_recv = functools.cache(self._make_dispatch_recv)
        self._of_combine_send = functools.cache(self._make_combine_send)
        self._of_combine_recv = functools.cache(self._make_combine_recv)

    def check(self, channels: int, ring_slots: int) -> None:
        """Raise ConfigError for what these kernels cannot serve."""
        plan = self.plan
        if plan.topk > MAX_TOPK:
            raise ConfigError(f"low-latency dispatch: topk = {plan.topk} exceeds {MAX_TOPK} on a device")
        # a kernel publishes everything at once, after it has waited for room
        parts = max(1, -(-plan.room.longest_message // (channels * MAX_WRITE_BYTES)))
        commands = plan.ranks * channels * parts
        if commands > ring_slots:
            raise ConfigError(
                f"low-latency dispatch: {plan} needs up to {commands} commands at once, and a ring holds "
                f"{ring_slots}. Next step: raise UCCL_EP_RING_SLOTS on all ranks"
            )

    def warm_dispatch(self, source: int, coding: int, round_scale: bool, reduced: bool) -> None:
        """Compile for tokens of DTYPE_* ``source`` sent as ``coding``, and load what is compiled."""
        for launch in self.dispatch_ahead(source, coding, round_scale, reduced):
            launch.compile()

    def warm_combine(self, dtype: int, reduced: bool) -> None:
        """The same for experts' rows of DTYPE_* ``dtype``."""
        for launch in self.combine_ahead(dtype, reduced):
            launch.compile()

    def dispatch_ahead(self, source: int, coding: int, round_scale: bool, reduced: bool) -> tuple[Launch, ...]:
        """Launches of a dispatch, to compile."""
        at = _ANY_ADDRESS
        send = self.dispatch_send(at, at, at, at, at, at, at, self.plan.tokens, source, coding, round_scale, reduced)
        return send + self.dispatch_recv(at, at, at, coding, at, at, at, at, at, 0, 0)

    def combine_ahead(self, dtype: int, reduced: bool) -> tuple[Launch, ...]:
        """The same of a combine."""
        at = _ANY_ADDRESS
        send = self.combine_send(at, at, at, at, at, at, dtype)
        return send + self.combine_recv(at, at, at, at, at, at, self.plan.tokens, dtype, reduced, 0)

    def _blocks(self, tokens: int) -> int:
        return max(-(-tokens // self._rows), 1)

    def _blocks_of_a_source(self) -> int:
        return min(self._blocks(self.plan.tokens), max(_PROGRAMS // self.plan.ranks, 1))

    def dispatch_send(
        self,
        context: int,
        state: int,
        plan_block: int,
        route_block: int,
        x: int,
        topk_idx: int,
        weights: int,
        tokens: int,
        source: int,
        coding: int,
        round_scale: bool,
        reduced: bool,
    ) -> tuple[Launch, ...]:
        """Route ``tokens`` tokens and send the next dispatch message to every rank.

        Twelve arguments: blocks, tensors and formats, as the kernels of its launches take them.

        Args:
            x: [tokens, H] of DTYPE_* ``source``. topk_idx: int64[tokens, K]. weights: float32[tokens, K], or 0.
            coding: DTYPE_* of the rows on the wire. reduced: weights are given (their address may be 0 without tokens).
        """
        routing, packing, wire, columns = self._of_dispatch_send(source, coding, round_scale, reduced)
        blocks = self._blocks(tokens)
        return (
            Launch(
                routing, (self.plan.ranks + 1, 1, 1), (context, state, plan_block, route_block, topk_idx, tokens, wire)
            ),
            Launch(
                packing,
                (blocks, min(max(_PROGRAMS // blocks, 1), columns), 1),
                (context, state, route_block, x, topk_idx, weights, tokens, wire),
            ),
        )

    def _make_dispatch_send(
        self, source: int, coding: int, round_scale: bool, reduced: bool
    ) -> tuple[Variant, Variant, int, int]:
        """Its kernels, bytes of a row on the wire, and programs that a row has work for."""
        plan, slots = self.plan, self._slots
        block = min(_BLOCK, max(_power_of_two(plan.hidden), SCALE_BLOCK))
        routing = Variant(
            route,
            {
                "REDUCED": reduced,
                "TOPK": plan.topk,
                "SLOTS": slots,
                "BLOCK": min(max(_COMPARED // (slots * slots), 1), _power_of_two(plan.tokens)),
                "RANKS": self._ranks,
                **self._lanes,
            },
        )
        packing = Variant(
            pack_dispatch,
            {
                "HIDDEN": plan.hidden,
                "SOURCE": source,
                "CODING": coding,
                "ROUND": round_scale or coding == DTYPE_FP8_UE8M0,
                "FNUZ": self.target.fnuz,
                "REDUCED": reduced,
                "TOPK": plan.topk,
                "SLOTS": slots,
                "ROWS": self._rows,
                "BLOCK": block,
                **self._publishing,
            },
            self._warps,
        )
        return routing, packing, row_bytes(plan.hidden, coding), -(-plan.hidden // block)

    def dispatch_recv(
        self,
        context: int,
        state: int,
        route_block: int,
        coding: int,
        recv_x: int,
        scales: int,
        recv_count: int,
        src_info: int,
        layout_range: int,
        stats: int,
        waited: int,
    ) -> tuple[Launch, ...]:
        """Wait for every rank's message and unpack it. Optional addresses are 0.

        Eleven arguments: blocks, the format, then each tensor that is filled.
        """
        arrival, counting, unpacking, wire = self._of_dispatch_recv(coding)
        ranks = self.plan.ranks
        return (
            Launch(arrival, (1, 1, 1), (context, state, route_block, waited)),
            Launch(
                counting,
                (self.plan.local_experts, ranks, 1),
                (context, state, route_block, recv_count, layout_range, stats),
            ),
            Launch(
                unpacking,
                (self._blocks_of_a_source(), ranks, 1),
                (context, state, route_block, recv_x, scales, src_info, layout_range, wire),
            ),
        )

    def _make_dispatch_recv(self, coding: int) -> tuple[Variant, Variant, Variant, int]:
        """Its kernels, and bytes of a row on the wire."""
        plan, slots = self.plan, self._slots
        payload = plan.hidden * (1 if coding in (DTYPE_FP8, DTYPE_FP8_UE8M0) else element_bytes(coding))
        arrival = Variant(dispatch_arrival, {"CODING": coding, **self._lanes})
        counting = Variant(
            count_rows,
            {
                "TOPK": plan.topk,
                "SLOTS": slots,
                "BLOCK": min(max(_COMPARED // (4 * slots), 1), _power_of_two(plan.tokens)),
                "RANKS": self._ranks,
                "EXPERTS": min(max(_LAID_OUT // self._ranks, 1), _power_of_two(plan.local_experts)),
                **self._backend,
            },
        )
        unpacking = Variant(
            unpack_rows,
            {
                "PAYLOAD": payload,
                "CODING": coding,
                "TOPK": plan.topk,
                "SLOTS": slots,
                "ROWS": self._rows,
                "BLOCK": min(_BLOCK, _power_of_two(payload // 4)),
                **self._backend,
            },
            self._warps,
        )
        return arrival, counting, unpacking, row_bytes(plan.hidden, coding)

    def combine_send(
        self, context: int, state: int, route_block: int, ticket: int, x: int, layout_range: int, dtype: int
    ) -> tuple[Launch, ...]:
        """Return the experts' rows [L, R * T, H] of DTYPE_* ``dtype`` to their sources."""
        preparing, packing, wire = self._of_combine_send(dtype)
        return (
            Launch(preparing, (1, 1, 1), (context, state, route_block, ticket, wire)),
            Launch(
                packing,
                (self._blocks_of_a_source(), self.plan.ranks, 1),
                (context, state, route_block, x, layout_range, wire),
            ),
        )

    def _make_combine_send(self, dtype: int) -> tuple[Variant, Variant, int]:
        """Its kernels, and bytes of a row on the wire."""
        plan = self.plan
        preparing = Variant(prepare_combine, {"RANKS": self._ranks, **self._lanes})
        packing = Variant(
            pack_combine,
            {
                "HIDDEN": plan.hidden,
                "DTYPE": dtype,
                "TOPK": plan.topk,
                "TOGETHER": min(_WEIGHED_TOGETHER, self._slots),
                "ROWS": self._rows,
                "BLOCK": min(_BLOCK, _power_of_two(plan.hidden)),
                **self._publishing,
            },
            self._warps,
            fused=False,
        )
        return preparing, packing, row_bytes(plan.hidden, dtype)

    def combine_recv(
        self,
        context: int,
        state: int,
        route_block: int,
        ticket: int,
        weights: int,
        out: int,
        tokens: int,
        dtype: int,
        reduced: bool,
        waited: int,
    ) -> tuple[Launch, ...]:
        """Wait for every rank's rows and sum them into ``out``, [tokens, H] of DTYPE_* ``dtype``."""
        arrival, summing, wire, columns = self._of_combine_recv(dtype, reduced)
        return (
            Launch(arrival, (1, 1, 1), (context, state, route_block, ticket, waited)),
            Launch(
                summing,
                (self._blocks(tokens), columns, 1),
                (context, state, route_block, ticket, weights, out, tokens, wire),
            ),
        )

    def _make_combine_recv(self, dtype: int, reduced: bool) -> tuple[Variant, Variant, int, int]:
        """Its kernels, bytes of a row on the wire, and programs that a row has work for."""
        plan = self.plan
        block = min(_BLOCK, _power_of_two(plan.hidden))
        arrival = Variant(combine_arrival, {"REDUCED": reduced, "DTYPE": dtype, **self._lanes})
        summing = Variant(
            sum_rows,
            {
                "HIDDEN": plan.hidden,
                "DTYPE": dtype,
                "REDUCED": reduced,
                "TOPK": plan.topk,
                "TOGETHER": min(_SUMMED_TOGETHER, self._slots),
                "ROWS": self._rows,
                "BLOCK": block,
                **self._backend,
            },
            self._warps,
            fused=False,
        )
        return arrival, summing, row_bytes(plan.hidden, dtype), -(-plan.hidden // block)
