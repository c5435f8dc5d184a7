"""What a launch says it takes of a GPU's memory: the formula. Real Buffers: tests/system/test_memory_budget.py."""

from __future__ import annotations

from uccl_ep_serving import Settings
from uccl_ep_serving.data_plane.window_sizes import normal_plan
from uccl_ep_serving.engines.memory_budget import GIB, MoeShape, memory_budget

DEEPSEEK_V3 = MoeShape(hidden=7168, experts=256, topk=8, intermediate=2048)


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
