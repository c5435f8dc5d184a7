"""What a launch says it takes of a GPU's memory, against what is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.ranks import Ranks
from uccl_ep_serving import Buffer, Settings
from uccl_ep_serving.data_plane.window_sizes import normal_plan
from uccl_ep_serving.engines.memory_budget import GIB, MemoryBudget, MoeShape, memory_budget

DEEPSEEK_V3 = MoeShape(hidden=7168, experts=256, topk=8, intermediate=2048)
SMALL = MoeShape(hidden=256, experts=8, topk=2, intermediate=128)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


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


def test_the_runner_has_each_tensor_of_an_expert_layer_once() -> None:
    """As DeepGEMM's masked products allocate them: gate and up in bf16, their product in FP8, rows in bf16."""
    rows = 256 // 16 * 16 * 128
    tensors = (rows * 2 * 2048 * 2, rows * (2048 + 4 * 2048 // 128), rows * 7168 * 2)
    found = memory_budget(DEEPSEEK_V3, 16, 128, normal_plan(16, Settings(), 0))
    assert found.runner == sum(tensors)
    assert found.total == found.window + found.received + found.runner
    assert 0.95 < found.activations / GIB < 1.0


def test_two_micro_batches_have_their_experts_tensors_twice() -> None:
    normal = normal_plan(8, Settings(), 0)
    one, two = (memory_budget(DEEPSEEK_V3, 8, 64, normal, batches=batches) for batches in (1, 2))
    assert (two.window, two.activations) == (one.window, 2 * one.activations)


def test_a_window_in_host_memory_takes_none_of_the_gpu() -> None:
    normal = normal_plan(8, Settings(), 0)
    assert memory_budget(DEEPSEEK_V3, 8, 64, normal, on_device=False).window == 0
