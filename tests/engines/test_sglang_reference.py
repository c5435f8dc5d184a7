"""The experts of a reference server on a CPU (``--moe-a2a-backend none``), which the demo's hooks complete."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from uccl_ep_serving.demo.sglang_cpu import experts


def engine_native_with_foreign_ids() -> tuple[Any, Any]:
    """The reference's experts on ids of which some are -1, and the same computed one slot at a time."""
    from types import SimpleNamespace

    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from uccl_ep_serving.demo.sglang_cpu.hooks import _moe_forward_native

    local, hidden, inner = 3, 256, 64
    generator = torch.Generator().manual_seed(5)
    w13 = torch.randn(local, 2 * inner, hidden, generator=generator) / 16
    w2 = torch.randn(local, hidden, inner, generator=generator) / 8
    x = torch.randn(4, hidden, generator=generator)
    ids = torch.tensor([[0, 2], [-1, 0], [-1, -1], [1, -1]], dtype=torch.int32)
    scores = torch.rand(4, 2, generator=generator)
    layer = SimpleNamespace(num_experts=2 * local, w13_weight=w13, w2_weight=w2)
    config = SimpleNamespace(
        activation="silu", apply_router_weight_on_input=False, gemm1_alpha=None, gemm1_clamp_limit=None
    )
    got = _moe_forward_native(moe_forward_native, layer, x, StandardTopKOutput(scores, ids, None), config)
    expected = experts.normal_experts(x, None, ids, scores, w13, w2)
    empty = _moe_forward_native(moe_forward_native, layer, x[:0], StandardTopKOutput(scores[:0], ids[:0], None), config)
    assert empty.shape == (0, hidden)
    return got.tolist(), expected.tolist()


@pytest.mark.engine
def test_reference_experts_skip_foreign_slots(in_engine: Any) -> None:
    got, expected = in_engine(engine_native_with_foreign_ids)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), atol=1e-5, rtol=1e-5)
