"""What a launch says it takes of a GPU's memory, against what real Buffers allocate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.ranks import Ranks
from uccl_ep_serving import Buffer, Settings
from uccl_ep_serving.data_plane.window_sizes import normal_plan
from uccl_ep_serving.engines.memory_budget import MemoryBudget, MoeShape, memory_budget

SMALL = MoeShape(hidden=256, experts=8, topk=2, intermediate=128)


def allocated(group: Any, tokens: int, use_fp8: bool, normal_only: bool) -> tuple[int, int]:
    """Bytes of the window of a real Buffer, and of what a low-latency dispatch returns."""
    settings = replace(Settings.from_environment(), heap_bytes=1 << 20)
    buffer = Buffer(group, low_latency_mode=not normal_only, settings=settings)
    try:
        if normal_only:
            return len(buffer.runtime.window_bytes), 0
        ids = torch.zeros(1, SMALL.topk, dtype=torch.int64)
        ids[0] = torch.arange(SMALL.topk)
        x = torch.zeros(1, SMALL.hidden, dtype=torch.bfloat16)
        rows, count, handle, _, _ = buffer.low_latency_dispatch(x, ids, tokens, SMALL.experts, use_fp8=use_fp8)
        tensors = [*(rows if isinstance(rows, tuple) else (rows,)), count, handle[0], handle[1]]
        return len(buffer.runtime.window_bytes), sum(one.nbytes for one in tensors)
    finally:
        buffer.destroy()


def budget(ranks: int, tokens: int, quantised: bool = True) -> MemoryBudget:
    normal = normal_plan(ranks, replace(Settings.from_environment(), heap_bytes=1 << 20), 0)
    return memory_budget(SMALL, ranks, tokens, normal, quantised=quantised)


@pytest.mark.parametrize("use_fp8", [True, False], ids=["fp8", "bf16"])
def test_window_and_received_rows_are_what_a_buffer_allocates(ranks: Ranks, use_fp8: bool) -> None:
    expected = budget(2, 24, use_fp8)
    assert ranks.run(2, allocated, 24, use_fp8, False) == [(expected.window, expected.received)] * 2


def test_normal_mode_alone_takes_its_own_regions(ranks: Ranks) -> None:
    expected = budget(2, 0)
    assert expected.activations == 0
    assert ranks.run(2, allocated, 0, False, True) == [(expected.window, 0)] * 2
