"""What the machine does for the product's ranks beside running their kernels."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
trials = pytest.importorskip("tests.ptx.product.trials", reason="needs Triton")

from tests.ptx.product.test_low_latency import compiled  # noqa: E402


def test_memory_of_a_rank_that_has_ended_stays() -> None:
    """The memory model compares it with what it knows at each launch of the others, and writes what is late."""
    machine = trials.machine_of("weak", 1)
    with trials.group_of(machine, compiled("weak"), 2, "mapped") as group:

        def body(runtime: Any) -> set[int]:
            if runtime.rank == 1:
                machine.sleep(1.0)
            # what is freed is taken again by the next of the same size
            return {torch.zeros(1 << 20).data_ptr() for _ in range(4)}

        ended, other = group.run(body)
    assert not ended & other
