"""``benchmarks/kernel_counts.py``: every kernel of low latency is counted once, whatever is counted of it."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks import kernel_counts

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.model,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


def test_work_is_counted_and_no_waiting() -> None:
    found = kernel_counts.measure([2], tokens=4, hidden=256)
    counts = found["counts"][kernel_counts.NOW]["2"]
    assert set(counts) == {"dispatch_send", "dispatch_recv", "combine_send", "combine_recv"}
    for name, one in counts.items():
        assert one["launches"] == 1
        # a program that waits spins thousands of times
        assert 0 < one["longest"] < one["text"]
        assert one["longest"] <= one["executed"]
        seen = found["accesses"][name]
        assert seen["longest"] == one["longest"]
        assert 0 < seen["rounds"] <= seen["loads"] < one["longest"]
    again = kernel_counts.measure([2], tokens=4, hidden=256)
    assert again["counts"] == found["counts"]
    table = kernel_counts.markdown(found)
    assert "| EP2 | now | `dispatch_send` | 1 |" in table
    compiled = found["compile"][kernel_counts.NOW]
    assert compiled["kernels"] >= len(counts)
    assert 0 < compiled["slowest"] < compiled["seconds"]
    assert f"| now | {compiled['kernels']} |" in table
