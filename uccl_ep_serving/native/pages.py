"""Zeroed memory that shares no page with anything else: a device maps host memory page by page, and each page once."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

__all__ = ["own_pages"]


def own_pages(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed bytes at the start of pages of their own, committed when first touched.

    Shared with children of a fork, who get no copies: else the first write after a fork would move the writer to other
    pages than those that a device has mapped (Linux before 5.9 does not spare pinned ones).
    """
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, whole, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype=np.uint8)[:nbytes]
