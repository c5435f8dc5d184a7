"""The ranks of ``tests/system`` and the cases of ``tests/kernels`` serve here too; rank processes inherit the path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parents[1] / "system"))

# after the path
from gpu_ranks import GpuRanks


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[GpuRanks]:
    """Rank processes that each have a context of their own on the device."""
    pool = GpuRanks()
    yield pool
    pool.close()
