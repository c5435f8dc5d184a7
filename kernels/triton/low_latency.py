"""The low-latency kernels for tensors on a device."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...errors import ConfigError
from ...protocol.command import MAX_WRITE_BYTES
from ...protocol.layout import LowLatencyPlan
from ...protocol.message import DTYPE_FP8, DTYPE_FP8_UE8M0, SCALE_BLOCK, element_bytes, row_bytes
from .launch import Launch, Variant
from .ll_combine_recv import CombineRecvShape, combine_recv
from .ll_combine_send import CombineSendShape, combine_send
from .ll_dispatch_recv import DispatchRecvShape, dispatch_recv
from .ll_dispatch_send import DispatchSendShape, dispatch_send
from .target import Target, present_target

#: Slots of a token are compared with each other in registers.
MAX_TOPK = 64
#: Words (or values) of a row that a program casts or copies to several ranks at a time, words that it copies to several
#: experts, and values that it sums: a program is one warp, so that whatever it exchanges between its threads takes no
#: barrier, and needs several loads of each on their way.
_BLOCK, _MOVED, _SUMMED = 1024, 2048, 512
#: A multiple of 16 like the real ones, for compiling ahead.
_ANY_ADDRESS = 1 << 40
#: Slots of a token whose rows are loaded together, by the expert's rank and by the token's: with more, ptxas spills.
_WEIGHED_TOGETHER, _SUMMED_TOGETHER = 4, 8
#: Programs that share the rows of all peers: as many as an H100 runs at once (32 of one warp on each of 132
#: multiprocessors) where rows are summed before they are sent, and some for each multiprocessor where they are copied.
#: Few tokens have several each. What a combine receives has a program for each token and block besides.
_PROGRAMS, _SUMMING = 1024, 4096


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


class TritonLowLatencyKernels:
    """Builds the launches of each step. Addresses are those of device memory; see the kernels for their meaning.

    Args:
        plan: sizes.
        target: what the launches are made for; by default this process's, for which Triton compiles them.
    """

    name = "triton"

    def __init__(self, plan: LowLatencyPlan, target: Target | None = None) -> None:
        self.plan = plan
        self.target = target or present_target()
        # In the interpreter an operation costs the same for one row and for many.
        self._rows = 16 if self.target.interpreted else 1
        self._slots = _power_of_two(plan.topk)
        self._common: dict[str, Any] = {
            "TOPK": plan.topk,
            "SLOTS": self._slots,
            "ROWS": self._rows,
            "STARTS_IN_ORDER": self.target.in_order,
            "ONCE": plan.topk > plan.local_experts,
        }
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
        # a message and a notice to each other rank, see publish.put_commands: no program waits for another's commands
        parts = max(1, -(-plan.room.longest_message // (channels * MAX_WRITE_BYTES)))
        commands = (plan.ranks - 1) * (channels * parts + 1)
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
        formats = source, coding, round_scale, reduced
        send = self.dispatch_send(at, at, at, at, at, at, at, self.plan.tokens, *formats, False)
        return send + self.dispatch_recv(at, at, at, coding, at, at, at, at, at, 0, 0, False)

    def combine_ahead(self, dtype: int, reduced: bool) -> tuple[Launch, ...]:
        """The same of a combine."""
        at = _ANY_ADDRESS
        send = self.combine_send(at, at, at, at, at, at, dtype)
        return send + self.combine_recv(at, at, at, at, at, at, self.plan.tokens, dtype, reduced, 0)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._rows)

    def _programs_of_a_peer(self) -> int:
        return max(min(self._blocks(self.plan.tokens), _PROGRAMS // self.plan.ranks), 1)

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
        deterministic: bool,
    ) -> tuple[Launch, ...]:
        """Send the next dispatch message to every rank.

        Thirteen arguments: blocks, tensors and formats, as the kernels of its launches take them.

        Args:
            x: [tokens, H] of DTYPE_* ``source``. topk_idx: int64[tokens, K]. weights: float32[tokens, K], or 0.
            coding: DTYPE_* of the rows on the wire. reduced: weights are given (their address may be 0 without tokens).
            deterministic: the rows of an expert stand by token.
        """
        variant, columns = self._of_dispatch_send(source, coding, round_scale, reduced)
        blocks = self._blocks(tokens)
        columns = min(max(_PROGRAMS // max(blocks, 1), 1), columns)
        arguments = (context, state, plan_block, route_block, x, topk_idx, weights, tokens, int(deterministic))
        return (Launch(variant, (self.plan.ranks + blocks * columns, 1, 1), arguments),)

    def _make_dispatch_send(self, source: int, coding: int, round_scale: bool, reduced: bool) -> tuple[Variant, int]:
        """Its kernel, and programs that a row has work for."""
        plan = self.plan
        quantised = coding in (DTYPE_FP8, DTYPE_FP8_UE8M0)
        values = plan.hidden if quantised else plan.hidden * element_bytes(source) // 4
        block = min(_BLOCK, max(_power_of_two(values), SCALE_BLOCK))
        shape = DispatchSendShape(
            HIDDEN=plan.hidden,
            ROW_BYTES=row_bytes(plan.hidden, coding),
            SOURCE=source,
            CODING=coding,
            ROUND=round_scale or coding == DTYPE_FP8_UE8M0,
            FNUZ=self.target.fnuz,
            REDUCED=reduced,
            BLOCK=block,
            **self._common,
        )
        variant = Variant(dispatch_send, {"SHAPE": shape})
        return variant, -(-values // block)

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
        deterministic: bool,
    ) -> tuple[Launch, ...]:
        """Receive every rank's message. Optional addresses are 0.

        Twelve arguments: blocks, the format, each tensor that is filled, and whether rows stand by source rank.
        """
        addresses = (context, state, route_block, recv_x, scales, recv_count, src_info, layout_range, stats, waited)
        grid = self.plan.ranks * self._programs_of_a_peer(), 1, 1
        return (Launch(self._of_dispatch_recv(coding), grid, (*addresses, int(deterministic))),)

    def _make_dispatch_recv(self, coding: int) -> Variant:
        plan = self.plan
        payload = plan.hidden * (1 if coding in (DTYPE_FP8, DTYPE_FP8_UE8M0) else element_bytes(coding))
        shape = DispatchRecvShape(
            PAYLOAD=payload,
            ROW_BYTES=row_bytes(plan.hidden, coding),
            CODING=coding,
            BLOCK=min(_MOVED, _power_of_two(payload // 4)),
            **self._common,
        )
        return Variant(dispatch_recv, {"SHAPE": shape})

    def combine_send(
        self, context: int, state: int, route_block: int, ticket: int, x: int, layout_range: int, dtype: int
    ) -> tuple[Launch, ...]:
        """Return the experts' rows [L, R * T, H] of DTYPE_* ``dtype`` to their sources."""
        variant, columns = self._of_combine_send(dtype)
        programs = max(min(self._blocks(self.plan.tokens) * columns, _SUMMING // self.plan.ranks), 1)
        grid = self.plan.ranks * programs, 1, 1
        return (Launch(variant, grid, (context, state, route_block, ticket, x, layout_range)),)

    def _make_combine_send(self, dtype: int) -> tuple[Variant, int]:
        """Its kernel, and programs that a row has work for."""
        plan = self.plan
        block = min(_SUMMED, _power_of_two(plan.hidden))
        shape = CombineSendShape(
            HIDDEN=plan.hidden,
            ROW_BYTES=row_bytes(plan.hidden, dtype),
            DTYPE=dtype,
            TOGETHER=min(_WEIGHED_TOGETHER, self._slots),
            BLOCK=block,
            **self._common,
        )
        variant = Variant(combine_send, {"SHAPE": shape}, fused=False)
        return variant, -(-plan.hidden // block)

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
        variant, columns = self._of_combine_recv(dtype, reduced)
        arguments = (context, state, route_block, ticket, weights, out, tokens, waited)
        return (Launch(variant, (self.plan.ranks + self._blocks(tokens) * columns, 1, 1), arguments),)

    def _make_combine_recv(self, dtype: int, reduced: bool) -> tuple[Variant, int]:
        """Its kernel, and programs that a row has work for."""
        plan = self.plan
        block = min(_SUMMED, _power_of_two(plan.hidden))
        shape = CombineRecvShape(
            HIDDEN=plan.hidden,
            ROW_BYTES=row_bytes(plan.hidden, dtype),
            DTYPE=dtype,
            REDUCED=reduced,
            TOGETHER=min(_SUMMED_TOGETHER, self._slots),
            BLOCK=block,
            **self._common,
        )
        variant = Variant(combine_recv, {"SHAPE": shape}, fused=False)
        return variant, -(-plan.hidden // block)
