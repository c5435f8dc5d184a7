"""``benchmarks/normal_counts.py``: every kernel of normal mode is compiled and counted once."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks import normal_counts
from tests.support.nvrtc import needs_nvrtc

pytestmark = [
    needs_nvrtc,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


def test_bulk_copies_of_a_group() -> None:
    found = normal_counts.execute_here(2, 4, "tma")
    assert {"copy_dispatch", "copy_combine", "open_rows"} <= set(found)
    for name in ("copy_dispatch", "copy_combine"):
        assert found[name]["launches"] == 1
        assert 0 < found[name]["longest"] < found[name]["executed"]


@pytest.mark.model
def test_a_whole_measurement() -> None:
    found = normal_counts.measure([2], tokens=4)
    kernels = {one["kernel"] for one in found["compiled"][normal_counts.NOW]}
    assert kernels >= {"dispatch_rows", "combine_rows", "open_rows", "mark_tokens", "copy_dispatch", "copy_combine"}
    table = normal_counts.markdown(found)
    assert "| EP2, triton | `dispatch_rows` | 1 |" in table
    assert "| EP2, tma | `copy_combine` | 1 |" in table
