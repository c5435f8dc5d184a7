"""What a GPU Buffer launches for one model, to compile before there is a Buffer."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import ConfigError
from ..kernels.triton.launch import Launch
from ..kernels.triton.low_latency import TritonLowLatencyKernels
from ..kernels.triton.normal import TritonNormalKernels
from ..protocol.layout import LowLatencyPlan
from ..protocol.message import DTYPE_BF16, DTYPE_FP8, DTYPE_FP8_UE8M0, SCALE_BLOCK, NormalNotify
from .low_latency_arguments import UE8M0_BLOCK
from .row_format import RowFormat, wire_format

__all__ = ["CODINGS", "launches", "low_latency_launches"]

#: How tokens travel, by name: DTYPE_*, values that share what ``hidden`` must be a multiple of, bytes of a value, and
#: bytes of scales for as many values.
CODINGS = {
    "bf16": (DTYPE_BF16, 1, 2, 0),
    "fp8": (DTYPE_FP8, SCALE_BLOCK, 1, 4),
    "ue8m0": (DTYPE_FP8_UE8M0, UE8M0_BLOCK, 1, 4),
}


def launches(plan: LowLatencyPlan, codings: tuple[str, ...], node_ranks: int) -> list[Launch]:
    """Each kernel in each specialization that SGLang and vLLM ask for, once.

    Args:
        plan: sizes, of both modes.
        codings: how dispatches send tokens, names in :data:`CODINGS`. Combines send BF16.
        node_ranks: ranks of a node where normal mode crosses once between nodes, 0 where it does not.

    Raises:
        ConfigError: a coding does not fit the hidden size.
    """
    for name in codings:
        if plan.hidden % (block := CODINGS[name][1]):
            raise ConfigError(f"hidden = {plan.hidden} must be a multiple of {block} for {name}")
    found = [*_normal_launches(plan, codings, node_ranks), *low_latency_launches(plan, codings)]
    unique = {(one.kernel.__name__, tuple(one.constants.items())): one for one in found}
    # what takes longest first
    return sorted(unique.values(), key=lambda one: one.kernel.__name__ not in ("combine_rows", "dispatch_rows"))


def low_latency_launches(plan: LowLatencyPlan, codings: tuple[str, ...]) -> Iterator[Launch]:
    """Those of low-latency mode."""
    kernels = TritonLowLatencyKernels(plan)
    for reduced in (False, True):
        for coding, *_ in map(CODINGS.__getitem__, codings):
            yield from kernels.dispatch_ahead(DTYPE_BF16, coding, coding == DTYPE_FP8_UE8M0, reduced)
        yield from kernels.combine_ahead(DTYPE_BF16, reduced)


def _normal_launches(plan: LowLatencyPlan, codings: tuple[str, ...], node_ranks: int) -> Iterator[Launch]:
    kernels, hidden = TritonNormalKernels(plan.ranks), plan.hidden
    forms = [
        RowFormat(NormalNotify.OPERATION_COMBINE, DTYPE_BF16, hidden, 2 * hidden, node_ranks=node_ranks, channels=1)
    ]
    for dtype, block, width, scale in map(CODINGS.__getitem__, codings):
        scales, row = hidden // block * scale, hidden * width
        kind, experts = NormalNotify.OPERATION_DISPATCH, plan.local_experts
        forms.append(RowFormat(kind, dtype, hidden, row, plan.topk, scales, experts, node_ranks, 1))
    for form in forms:
        yield from kernels.ahead(wire_format(form), plan.experts, 0)
