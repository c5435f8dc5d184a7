"""A cache of compiled code with nothing in it, of this process and those that it starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from uccl_ep_serving.native.cache import cache_directory, read_directories

__all__ = ["empty_cache"]


@contextlib.contextmanager
def empty_cache(place: Path) -> Iterator[Path]:
    """Inside, compiled code is kept below ``place``; yields where."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCCL_EP_CACHE_DIR", str(place))
        cache_directory.cache_clear()
        read_directories.cache_clear()
        yield cache_directory()
    cache_directory.cache_clear()
    read_directories.cache_clear()
