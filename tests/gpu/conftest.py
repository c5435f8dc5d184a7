"""The ranks of ``tests/system`` and the cases of ``tests/kernels`` serve here too; rank processes inherit the path."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.gpu_ranks import GpuRanks


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[GpuRanks]:
    """Rank processes that each have a context of their own on the device."""
    pool = GpuRanks()
    yield pool
    pool.close()
