"""SGLang's run-time gaps on a CPU without AMX, closed through its own hook registry (see the package's table)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from uccl_ep_serving.demo.sglang_cpu.experts import low_latency_experts, normal_experts, quantize

__all__ = ["register"]

_DEEPEP = "sglang.srt.layers.moe.token_dispatcher.deepep"


def _moe_forward_native(
    original: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, topk_output: Any, config: Any
) -> torch.Tensor:
    """Expert-parallel reference: slots of other ranks carry -1, which the engine's function would index with.

    Each gets weight 0 and a local id that its token does not use yet, since the engine's function counts an id that
    stands twice in a row once.
    """
    weights, ids, logits = topk_output
    if x.shape[0] == 0:
        return torch.empty_like(x)
    local_experts = layer.w13_weight.shape[0]
    foreign = ids < 0
    used = torch.zeros((ids.shape[0], local_experts + 1), dtype=torch.int8)
    used.scatter_(1, ids.masked_fill(foreign, local_experts).to(torch.int64), 1)
    free = used[:, :local_experts].argsort(dim=1, stable=True)  # unused ids of each token first
    nth = (foreign.cumsum(dim=1) - 1).clamp_min(0)
    filled = torch.where(foreign, free.gather(1, nth).to(ids.dtype), ids)
    return original(layer, x, type(topk_output)(weights.masked_fill(foreign, 0.0), filled, logits), config)


def _get_deepep_buffer(
    cls: Any,
    group: Any,
    hidden_size: int,
    param_bytes: int,
    deepep_mode: Any,
    num_max_dispatch_tokens_per_rank: int = -1,
    num_experts: int = -1,
) -> Any:
    """``DeepEPBuffer.get_deepep_buffer`` without its questions to CUDA (SM count, fabric, CUDA version)."""
    from sglang.srt.layers.moe.token_dispatcher import deepep

    state = cls._state()
    if state.buffer is not None:
        return state.buffer
    state.hidden_size = hidden_size
    state.num_max_dispatch_tokens_per_rank = num_max_dispatch_tokens_per_rank
    state.num_experts = num_experts
    settings = deepep.DeepEPConfig.get_instance()
    rdma_bytes = 0
    if deepep_mode.enable_normal():
        for config in (
            settings.normal_dispatch_config or deepep.Buffer.get_dispatch_config(group.size()),
            settings.normal_combine_config or deepep.Buffer.get_combine_config(group.size()),
        ):
            hint = config.get_rdma_buffer_size_hint(hidden_size * param_bytes, group.size())
            rdma_bytes = max(rdma_bytes, hint)
    if deepep_mode.enable_low_latency():
        hint = deepep.Buffer.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank, hidden_size, group.size(), num_experts
        )
        rdma_bytes = max(rdma_bytes, hint)
    state.buffer = deepep.Buffer(
        group,
        0,
        rdma_bytes,
        low_latency_mode=deepep_mode.enable_low_latency(),
        num_qps_per_rank=max(1, num_experts // group.size()),
        allow_mnnvl=False,
    )
    return state.buffer


def _after_dispatch_a(result: Any, self: Any, *_args: object, **_kwargs: object) -> Any:
    """Normal mode with FP8: quantise the rows before they are sent, as the engine does where DeepGEMM is there."""
    if not self.use_fp8:
        return result
    rows, *rest = result
    return (quantize(rows), *rest)


def _combine_a(
    self: Any, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    """``combine_a`` of the normal mode: the experts have weighted and summed already, so pass through."""
    from sglang.srt.layers.moe.token_dispatcher import deepep

    return hidden_states, deepep.Buffer.capture() if self.async_finish else None


def _run_moe_core(self: Any, dispatch_output: Any) -> Any:
    """``DeepEPMoE.run_moe_core`` with the experts in torch; the combine inputs are the engine's own."""
    from sglang.srt.layers.moe.token_dispatcher import DispatchOutputChecker
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPLLCombineInput, DeepEPNormalCombineInput

    w13, w2 = self.w13_weight, self.w2_weight
    x, scale = dispatch_output.hidden_states, dispatch_output.hidden_states_scale
    ids, weights = dispatch_output.topk_ids, dispatch_output.topk_weights
    if DispatchOutputChecker.format_is_deepep_ll(dispatch_output):
        out = low_latency_experts(x, scale, dispatch_output.masked_m, w13, w2)
        return DeepEPLLCombineInput(hidden_states=out, topk_ids=ids, topk_weights=weights)
    out = normal_experts(x, scale, ids, weights, w13, w2)
    return DeepEPNormalCombineInput(hidden_states=out, topk_ids=ids, topk_weights=weights)


def _prepare_attention() -> None:
    """Let ``torch_native`` serve MLA: absorbed path for prefill and decode, and padded lengths under DP attention."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    handler.AttentionBackendRegistry.register("torch_native", handler._dispatch_mla_subtype)
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _self: 1


def _after_configure(result: None, *_args: object, **_kwargs: object) -> None:
    _prepare_attention()
    return result


def register() -> None:
    """Register every hook; ``sglang.srt.plugins`` applies them right after."""
    HookRegistry.register(
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native", _moe_forward_native, HookType.AROUND
    )
    HookRegistry.register(f"{_DEEPEP}.DeepEPBuffer.get_deepep_buffer", _get_deepep_buffer, HookType.REPLACE)
    HookRegistry.register(f"{_DEEPEP}._DeepEPDispatcherImplNormal.dispatch_a", _after_dispatch_a, HookType.AFTER)
    HookRegistry.register(f"{_DEEPEP}._DeepEPDispatcherImplNormal.combine_a", _combine_a, HookType.REPLACE)
    HookRegistry.register("sglang.srt.layers.moe.ep_moe.layer.DeepEPMoE.run_moe_core", _run_moe_core, HookType.REPLACE)
    HookRegistry.register("sglang.srt.managers.scheduler.configure_scheduler_process", _after_configure, HookType.AFTER)
