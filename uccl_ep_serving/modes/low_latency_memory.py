"""Memory for what low-latency dispatch returns, used again once the caller has dropped the tensors.

Received rows have the shape of the worst case (every token of every rank at one expert), of which a call touches
little. Fresh memory for each call would cost a page fault for every page touched, more than the copy itself.
"""

from __future__ import annotations

import collections
import mmap
import weakref

import numpy as np
import numpy.typing as npt
import torch

from ..protocol.layout import LowLatencyPlan
from ..protocol.message import DTYPE_FP8, SCALE_BLOCK
from .low_latency_arguments import Coding

__all__ = ["DispatchOutputs", "OutputMemory", "rows_of"]

_Bytes = npt.NDArray[np.uint8]

#: Unused blocks kept per size: two operations in flight, and one in the caller's hands.
_KEPT = 3


class OutputMemory:
    """Blocks by size. One host thread takes; a block returns in whatever thread collects the last tensor over it."""

    def __init__(self) -> None:
        self._free: dict[int, collections.deque[_Bytes]] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] on a page boundary, with undefined content; returned when its storage is collected."""
        free = self._free.setdefault(nbytes, collections.deque(maxlen=_KEPT))
        try:
            block = free.popleft()
        except IndexError:
            # private pages, committed when they are first touched
            pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            block = np.frombuffer(pages, dtype=np.uint8)
        lent = block[:nbytes]
        # torch keeps exactly this array object alive for as long as any tensor shares the storage
        weakref.finalize(lent, free.append, block).atexit = False
        return torch.from_numpy(lent)

    def clear(self) -> None:
        """Forget the unused blocks: shapes have changed."""
        self._free.clear()


def rows_of(memory: OutputMemory, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Tensor of ``shape`` and ``dtype`` over a block of ``memory``, content undefined."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return memory.take(nbytes).view(dtype).view(shape)


class DispatchOutputs:
    """What dispatch returns, allocated before it is filled.

    Attributes:
        rows: what the caller gets: values, or (values, scales).
        values: [L, R * T, H]. count: int32[L], zero. src_info: int32[L, R * T]. layout_range: int64[L, R].
        scales_address: of the scales' memory, [L, groups, R * T], or 0.
    """

    def __init__(self, memory: OutputMemory, plan: LowLatencyPlan, coding: Coding) -> None:
        experts, capacity = plan.local_experts, plan.ranks * plan.tokens
        self.values = rows_of(memory, (experts, capacity, plan.hidden), coding.output)
        self.count = torch.zeros(experts, dtype=torch.int32)
        self.src_info = torch.empty(experts, capacity, dtype=torch.int32)
        self.layout_range = torch.empty(experts, plan.ranks, dtype=torch.int64)
        self.rows: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = self.values
        self.scales_address = 0
        if coding.quantised:
            if coding.dtype == DTYPE_FP8:
                columns = rows_of(memory, (experts, plan.hidden // SCALE_BLOCK, capacity), torch.float32)
            else:
                columns = rows_of(memory, (experts, plan.hidden // (4 * SCALE_BLOCK), capacity), torch.int32)
            self.scales_address = columns.data_ptr()
            self.rows = (self.values, columns.transpose(1, 2))
