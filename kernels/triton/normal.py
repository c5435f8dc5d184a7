"""The normal-mode kernels for tensors on a device as one object."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...config import Settings
from ...errors import ConfigError
from ...protocol.layout import MAX_EXPERTS, WindowLayout
from ...protocol.message import NormalNotify, element_bytes
from ...protocol.pipe import pipe_count
from ...protocol.streams import NORMAL_CHANNELS
from ..blocks import normal_device as block
from ..blocks.normal_device import DeviceNormalState, NormalFormat, NormalOpening, NormalTensors
from .launch import Launch, Variant
from .low_latency import MAX_TOPK
from .normal_combine import CombineShape, combine_rows
from .normal_dispatch import DispatchShape, dispatch_rows
from .normal_open import OpenShape, open_rows
from .routing import MarkShape, mark_tokens
from .target import CUDA, Target, present_target

#: Threads of a program, and registers of each at most on CUDA: all that there are. Where a kernel calls functions ptxas
#: may take 128 otherwise, and spill 440 bytes (combine between nodes, Triton 3.8).
_THREADS, _REGISTERS = 256, 255
#: Rows that a program copies together at least and at most, and words of 4 bytes of a row: 64 KiB are on their way to
#: it, unless rows are short.
_ROWS, _MOST_ROWS, _BLOCK = 4, 8, 4096
#: Tokens that it sums together, bytes of a row of each, and ranks whose rows it asks for together: 64 KiB likewise.
_SUM_ROWS, _SUMMED, _TOGETHER = 2, 8192, 4
#: Tokens that a program marks together; (token, rank) pairs that it holds.
_MARKED, _PAIRS = 128, 4096


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


class TritonNormalKernels:
    """Builds the launches of an operation. Addresses are those of device memory; see the kernels for their meaning.

    Args:
        ranks: of the group.
        target: what the launches are made for; by default this process's, for which Triton compiles them.

    Attributes:
        most_channels: that an operation may have.
    """

    name = "triton"

    def __init__(self, ranks: int, target: Target | None = None) -> None:
        self.ranks = ranks
        self.target = target or present_target()
        self._ranks = _power_of_two(ranks)
        # in the interpreter an operation costs the same for one row and for many, and programs take turns
        interpreted = self.target.interpreted
        self._rows = 16 if interpreted else _ROWS
        self.most_channels = 3 if interpreted else NORMAL_CHANNELS
        self._warps = max(_THREADS // self.target.warp, 1)
        self._registers = _REGISTERS if self.target.backend == int(CUDA.value) else 0
        pipes = _power_of_two(pipe_count(ranks))
        self._shared = {
            "RANKS": self._ranks,
            "TOKENS": min(max(_PAIRS // self._ranks, 1), 64 if interpreted else _PAIRS),
            # one for each thread, so that nobody reads for another; and no fewer than there are channels
            "PIPES": max(pipes, _power_of_two(NORMAL_CHANNELS) if interpreted else _THREADS),
        }
        # each is made once for its formats, of which an engine has a few
        self._of_mark = functools.cache(self._make_mark)
        self._of_opening = functools.cache(self._make_opening)
        self._of_dispatch = functools.cache(self._make_dispatch)
        self._of_combine = functools.cache(self._make_combine)

    def check(self, settings: Settings, topk: int) -> None:
        """Raise ConfigError for what these kernels cannot serve."""
        if topk > MAX_TOPK:
            raise ConfigError(f"normal mode: topk = {topk} exceeds {MAX_TOPK} on a device")
        # a command to each peer, see publish.put_batch
        if self.ranks > settings.ring_slots:
            raise ConfigError(
                f"normal mode on a device puts up to {self.ranks} commands into a ring at once, which holds "
                f"{settings.ring_slots}. Next step: raise UCCL_EP_RING_SLOTS on all ranks"
            )

    def warm(self, form: NormalFormat, experts: int, biases: int) -> None:
        """Compile what an operation of this format launches, and load what is compiled."""
        for launch in self.ahead(form, experts, biases):
            launch.compile()

    def ahead(self, form: NormalFormat, experts: int, biases: int) -> tuple[Launch, ...]:
        """Launches of an operation of this format, to compile."""
        # any address that is a multiple of 16 like the real ones, and fits an int64 only
        at = 1 << 40
        opening = NormalOpening(at, 1, at, at, at, at, 1)
        tensors = NormalTensors(at, at, at, at, at, at, at, at)
        if form.kind == NormalNotify.OPERATION_COMBINE:
            return self.combine(at, at, form, opening, tensors, 1, at, 1, (at,) * biases)
        found = self.dispatch(at, at, form, opening, tensors, 1, at, 1, False)
        if form.kind == NormalNotify.OPERATION_DISPATCH:
            found += self.open(at, at, form, opening, 1)
        if form.topk:
            found += self.mark(at, 1, form.topk, experts, at, at, at, at)
        return found

    def new_state(self, layout: WindowLayout, device: torch.device) -> DeviceNormalState:
        """Counters at zero."""
        return DeviceNormalState(layout, device)

    def info_bytes(self, local_experts: int) -> int:
        """Bytes of what the opening tells the host."""
        return 8 * (block.INFO_WORDS + block.PEER_INFO_WORDS * self.ranks + local_experts)

    # -- routing ------------------------------------------------------------------------------------------------

    def mark(
        self,
        topk_idx: int,
        tokens: int,
        topk: int,
        experts: int,
        rank_counts: int,
        expert_counts: int,
        in_rank: int,
        wrong: int,
    ) -> tuple[Launch, ...]:
        """Counts and marks of int64[tokens, topk] ids: see :func:`.routing.mark_tokens`."""
        block, grid = self._marking(tokens)
        counts = rank_counts, expert_counts, in_rank, wrong
        return (Launch(self._of_mark(topk, block), grid, (topk_idx, tokens, experts, self.ranks, *counts)),)

    def _marking(self, tokens: int) -> tuple[int, tuple[int, int, int]]:
        """Tokens that a program marks, and the grid for all."""
        block = min(_MARKED, max(_PAIRS // self._ranks, 1))
        if self.target.interpreted:
            block = min(max(_PAIRS // self._ranks, 1), _power_of_two(tokens))
        return block, (max(-(-tokens // block), 1), 1, 1)

    def _make_mark(self, topk: int, block: int) -> Variant:
        return Variant(mark_tokens, {"SHAPE": MarkShape(TOPK=topk, RANKS=self._ranks, BLOCK=block)}, warps=4)

    # -- the exchange -------------------------------------------------------------------------------------------

    def open(
        self, context: int, state: int, form: NormalFormat, opening: NormalOpening, capacity: int
    ) -> tuple[Launch, ...]:
        """The opening alone, and what counts ids before it: see :func:`.normal_open.open_rows`. ``capacity``: rows that
        were promised to be enough, 0: none."""
        block, grid = self._marking(opening.tokens)
        topk = form.topk if form.kind == NormalNotify.OPERATION_DISPATCH else 0
        variant = self._of_opening(form.kind, form.node_ranks > 0, topk, block)
        told = (*_told(form, opening, capacity), opening.topk_idx, opening.rank_counts)
        grid = grid if opening.topk_idx else (1, 1, 1)
        return (Launch(variant, grid, (context, state, form.channels, form.node_ranks, *told)),)

    def _make_opening(self, kind: int, nodes: bool, topk: int, block: int) -> Variant:
        shape = OpenShape(KIND=kind, NODES=nodes, TOPK=topk, BLOCK=block, **self._shared)
        return Variant(open_rows, {"SHAPE": shape}, self._warps)

    def dispatch(
        self,
        context: int,
        state: int,
        form: NormalFormat,
        opening: NormalOpening,
        tensors: NormalTensors,
        capacity: int,
        marks: int,
        kept: int,
        is_open: bool,
    ) -> tuple[Launch, ...]:
        """A dispatch into outputs of ``capacity`` rows: see :func:`.normal_dispatch.dispatch_rows`. What counts ids is
        another launch, before.

        Args:
            marks, kept: of the rows that this rank forwards. is_open: :meth:`open` was launched before.
        """
        counting: tuple[Launch, ...] = ()
        if opening.topk_idx and not is_open:
            experts, counts = form.local_experts * self.ranks, (opening.rank_counts, opening.expert_counts)
            ids = opening.topk_idx, opening.tokens, form.topk, experts
            counting = self.mark(*ids, *counts, opening.in_rank, opening.wrong)
        arguments = (
            context,
            state,
            form.channels,
            form.node_ranks,
            int(is_open),
            *_told(form, opening, capacity),
            tensors.x,
            tensors.topk_idx,
            tensors.weights,
            tensors.scales,
            tensors.out,
            tensors.out_idx,
            tensors.out_weights,
            tensors.out_scales,
            marks,
            kept,
        )
        kind = (form.kind, form.node_ranks > 0, form.row_bytes, form.scale_bytes, form.topk)
        return *counting, Launch(self._of_dispatch(*kind), (form.channels, 1, 1), arguments)

    def _moving(self, nodes: bool, row_bytes: int, topk: int) -> dict[str, Any]:
        """Fields of a :class:`.normal_rows.RowShape`; all dtypes are copied alike."""
        words = row_bytes // 4
        block = min(_BLOCK, _power_of_two(words))
        return {
            "NODES": nodes,
            "WORDS": words,
            "TOPK": topk,
            "SLOTS": _power_of_two(topk),
            "ROWS": self._rows if self.target.interpreted else min(_ROWS * (_BLOCK // block), _MOST_ROWS),
            "BLOCK": block,
            "STARTS_IN_ORDER": self.target.in_order,
            **self._shared,
        }

    def _make_dispatch(self, kind: int, nodes: bool, row_bytes: int, scale_bytes: int, topk: int) -> Variant:
        shape = DispatchShape(
            KIND=kind,
            SCALE_WORDS=scale_bytes // 4,
            SCALES=_power_of_two(scale_bytes // 4),
            **self._moving(nodes, row_bytes, topk),
        )
        return Variant(dispatch_rows, {"SHAPE": shape}, self._warps, registers=self._registers)

    def combine(
        self,
        context: int,
        state: int,
        form: NormalFormat,
        opening: NormalOpening,
        tensors: NormalTensors,
        received: int,
        marks: int,
        kept: int,
        biases: tuple[int, ...],
    ) -> tuple[Launch, ...]:
        """A combine of ``received`` rows of this rank's experts: see :func:`.normal_combine.combine_rows`."""
        bias_0, bias_1 = (*biases, 0, 0)[:2]
        arguments = (
            context,
            state,
            form.channels,
            form.node_ranks,
            opening.in_rank,
            opening.tokens,
            opening.route,
            opening.number,
            opening.info,
            opening.ticket,
            form.shape,
            form.shape_step,
            form.kind << 16 | form.dtype,
            form.row_bytes,
            form.meta_bytes,
            tensors.x,
            received,
            tensors.weights,
            marks,
            kept,
            bias_0,
            bias_1,
            tensors.out,
            tensors.out_weights,
        )
        kind = (form.node_ranks > 0, form.dtype, form.row_bytes, form.topk, len(biases))
        return (Launch(self._of_combine(*kind), (form.channels, 1, 1), arguments),)

    def _make_combine(self, nodes: bool, dtype: int, row_bytes: int, topk: int, biases: int) -> Variant:
        hidden = row_bytes // element_bytes(dtype)
        shape = CombineShape(
            KIND=NormalNotify.OPERATION_COMBINE,
            HIDDEN=hidden,
            DTYPE=dtype,
            BIASES=biases,
            TOGETHER=min(_TOGETHER, self._ranks),
            SUMMED_ROWS=self._rows if self.target.interpreted else _SUM_ROWS,
            SUMMED=min(_SUMMED // element_bytes(dtype), _power_of_two(hidden)),
            **self._moving(nodes, row_bytes, topk),
        )
        return Variant(combine_rows, {"SHAPE": shape}, self._warps, fused=False, registers=self._registers)


def _told(form: NormalFormat, opening: NormalOpening, capacity: int) -> tuple[int, ...]:
    """Arguments of a kernel that opens: :class:`.normal_notify.Opening`."""
    return (
        opening.in_rank,
        opening.tokens,
        opening.route,
        opening.expert_counts,
        opening.wrong,
        opening.number,
        opening.info,
        opening.ticket,
        capacity,
        form.shape,
        form.shape_step,
        form.kind << 16 | form.dtype,
        form.row_bytes,
        form.meta_bytes,
        form.local_experts,
        # who gives no ids may have counted tokens that name one expert again and again
        form.topk or MAX_EXPERTS,
    )
