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

__all__ = ["OutputMemory"]

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
