"""What low-latency dispatch returns, and memory for it that is used again once the caller has dropped the tensors.

Received rows have the shape of the worst case (every token of every rank at one expert), of which a call touches
little. Fresh memory for each call would cost a page fault for every page touched, more than the copy itself.
"""

from __future__ import annotations

import collections
import mmap
import weakref
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ..protocol.layout import LowLatencyPlan
from ..protocol.message import DTYPE_FP8, SCALE_BLOCK
from .low_latency_arguments import Coding

__all__ = ["MOST_SIZES", "DispatchOutputs", "OutputMemory", "Rows", "keep_latest"]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_Bytes = npt.NDArray[np.uint8]

#: Unused blocks kept per size: two operations in flight, and one in the caller's hands.
_KEPT = 3
#: Sizes of which memory is kept, those used last: FP8 rows, scales, rows for warm-up and for serving, and spare.
MOST_SIZES = 8


def keep_latest(kept: dict[_Key, _Value], key: _Key, make: Callable[[], _Value]) -> _Value:
    """What ``kept`` has under ``key``, made where there is none; those asked for last stand last, and only so many."""
    value = kept.pop(key) if key in kept else make()
    kept[key] = value
    while len(kept) > MOST_SIZES:
        del kept[next(iter(kept))]
    return value


class OutputMemory:
    """Blocks by size. One host thread takes; a block returns in whatever thread collects the last tensor over it."""

    def __init__(self) -> None:
        self._free: dict[int, collections.deque[_Bytes]] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] on a page boundary, with undefined content; returned when its storage is collected."""
        free = keep_latest(self._free, nbytes, lambda: collections.deque(maxlen=_KEPT))
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

    def rows(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Tensor of ``shape`` and ``dtype``, content undefined."""
        nbytes = int(np.prod(shape)) * dtype.itemsize
        return self.take(nbytes).view(dtype).view(shape)

    def clear(self) -> None:
        """Forget the unused blocks: shapes have changed."""
        self._free.clear()


class DispatchOutputs:
    """What dispatch returns, allocated before it is filled. Only the counts have content until then: zero.

    Args:
        fp8: dtype of quantised values.
        allocate: memory for rows, of a shape and a dtype, on ``device``.

    Attributes:
        rows: what the caller gets: values, or (values, scales).
        values: [L, R * T, H]. count: int32[L]. src_info: int32[L, R * T]. layout_range: int64[L, R].
        scales_address: of the scales' memory, [L, groups, R * T], or 0.
        tensors: all of them.
    """

    def __init__(
        self,
        plan: LowLatencyPlan,
        coding: Coding,
        device: torch.device,
        fp8: torch.dtype,
        allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
    ) -> None:
        experts, capacity = plan.local_experts, plan.ranks * plan.tokens
        self.values = allocate((experts, capacity, plan.hidden), fp8 if coding.quantised else coding.output)
        self.count = torch.zeros(experts, dtype=torch.int32, device=device)
        self.src_info = torch.empty(experts, capacity, dtype=torch.int32, device=device)
        self.layout_range = torch.empty(experts, plan.ranks, dtype=torch.int64, device=device)
        self.rows: Rows = self.values
        self.scales_address = 0
        self.tensors = [self.values, self.count, self.src_info, self.layout_range]
        if coding.quantised:
            plain = coding.dtype == DTYPE_FP8
            groups = plan.hidden // (SCALE_BLOCK if plain else 4 * SCALE_BLOCK)
            columns = allocate((experts, groups, capacity), torch.float32 if plain else torch.int32)
            self.scales_address = columns.data_ptr()
            self.rows = (self.values, columns.transpose(1, 2))
            self.tensors.append(columns)
