"""What expert parallelism takes of a GPU's memory: window and expert activations, by formula, for both engines.

Pure arithmetic: an engine reserves it before it sizes its KV cache, and its launch says it in GiB. Low latency has
shapes of the worst case, every token of every rank at one expert: experts x T rows on every rank, whatever the number
of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from uccl_ep_serving.protocol.layout import LowLatencyPlan, NormalPlan, WindowLayout
from uccl_ep_serving.protocol.message import SCALE_BLOCK

__all__ = ["GIB", "MemoryBudget", "MoeShape", "memory_budget"]

GIB = 1 << 30

#: Beside each row: its source, int32.
_ROW_INFO = 4
#: Beside each (local expert, source rank): count and offset, int64.
_RANGE_INFO = 8


@dataclass(frozen=True, slots=True)
class MoeShape:
    """One MoE layer.

    Attributes:
        hidden: values per token.
        experts: physical experts over all ranks, redundant ones included.
        topk: experts per token.
        intermediate: values per row between an expert's two products.
        element: bytes of a value of the model's dtype.
    """

    hidden: int
    experts: int
    topk: int
    intermediate: int
    element: int = 2


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes of one GPU.

    Attributes:
        window: symmetric memory of both modes.
        received: what low-latency dispatch returns.
        runner: what the expert runner allocates beside it: gate and up, their product, the rows to return.
    """

    window: int
    received: int
    runner: int

    @property
    def activations(self) -> int:
        """Bytes of an expert layer's tensors, each once: a graph's memory pool finds no room for one in another."""
        return self.received + self.runner

    @property
    def total(self) -> int:
        """All of it."""
        return self.window + self.activations


def memory_budget(
    shape: MoeShape,
    ranks: int,
    tokens: int,
    normal: NormalPlan,
    *,
    quantised: bool = True,
    on_device: bool = True,
    batches: int = 1,
) -> MemoryBudget:
    """What ``shape`` takes of each of ``ranks`` GPUs.

    Args:
        tokens: most tokens of a rank in a low-latency dispatch, T; 0: normal mode only.
        normal: sizes of normal mode's regions; the rows that it returns are the engine's own, as many as arrive.
        quantised: rows travel in FP8 and experts compute in it.
        on_device: the window lies in GPU memory.
        batches: micro-batches whose experts' tensors are there at once; two with two-batch overlap.

    Raises:
        ValueError: the formats cannot hold such a window.
    """
    if not tokens:
        return MemoryBudget(WindowLayout(ranks, None, normal).nbytes if on_device else 0, 0, 0)
    plan = LowLatencyPlan(ranks, tokens, shape.hidden, shape.experts, shape.topk, shape.element)
    window = WindowLayout(ranks, plan, normal).nbytes if on_device else 0
    rows = plan.local_experts * ranks * tokens
    received = rows * (_values(shape.hidden, shape.element, quantised) + _ROW_INFO)
    received += plan.local_experts * (ranks * _RANGE_INFO + _ROW_INFO)
    gate_up = 2 * shape.intermediate * shape.element
    runner = rows * (gate_up + _values(shape.intermediate, shape.element, quantised) + shape.hidden * shape.element)
    return MemoryBudget(window, batches * received, batches * runner)


def _values(width: int, element: int, quantised: bool) -> int:
    """Bytes of a row of ``width`` values, scales included."""
    return width + 4 * (-(-width // SCALE_BLOCK)) if quantised else width * element
