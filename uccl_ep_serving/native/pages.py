"""Zeroed memory that shares no page with anything else: a device maps host memory page by page, and each page once."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

__all__ = ["own_pages"]


def own_pages(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed bytes at the start of pages of their own, committed when first touched, private to the process."""
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype=np.uint8)[:nbytes]
