"""Experts in plain torch for vLLM on a CPU, in both activation forms; they honour ``expert_map`` and batched counts."""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.platforms import current_platform

__all__ = ["TorchBatchedExperts", "TorchExperts"]


class _Torch(mk.FusedMoEExpertsModular):  # type: ignore[misc]
    """What both forms share: the feed-forward part, and what vLLM asks before it chooses experts."""

    @property
    def expects_unquantized_inputs(self) -> bool:
        return self.quant_config.quant_dtype is None

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cpu())

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == (None, None)

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return bool(activation == MoEActivation.SILU)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def _forward(
        self, rows: torch.Tensor, scales: torch.Tensor | None, expert: int, w1: torch.Tensor, w2: torch.Tensor
    ) -> torch.Tensor:
        """Rows [N, H] of one expert through w1 [2I, H], SiLU and w2 [H, I]; block scales are multiplied out."""
        up, down = w1[expert], w2[expert]
        if self.w1_scale is not None:
            block = self.block_shape
            up, down = (
                multiplied_out(up, self.w1_scale[expert], block),
                multiplied_out(down, self.w2_scale[expert], block),
            )
        if scales is not None:
            rows = multiplied_out(rows, scales, [1, rows.shape[-1] // scales.shape[-1]])
        gate, value = functional.linear(rows.to(up.dtype), up).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * value, down)


def multiplied_out(values: torch.Tensor, scales: torch.Tensor, block: list[int]) -> torch.Tensor:
    """float32 [M, N] of ``values`` times the scale of their block; scales are [ceil(M / rows), ceil(N / columns)]."""
    rows, columns = values.shape
    wide = scales.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return values.float() * wide


class TorchExperts(_Torch):
    """Standard form: rows with global expert ids; weighted and summed here, in float32."""

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.Standard

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self, M: int, N: int, K: int, *_args: Any, **_kwargs: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (M, K)

    def apply(
        self,
        *,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        **_rest: Any,
    ) -> None:
        local = topk_ids.long()
        if expert_map is not None:
            local = expert_map.long()[local]
        total = torch.zeros(output.shape, dtype=torch.float32)
        for expert in local.unique().tolist():
            if expert < 0:  # of another rank
                continue
            rows, slots = (local == expert).nonzero(as_tuple=True)
            scales = None if a1q_scale is None else a1q_scale[rows]
            result = self._forward(hidden_states[rows], scales, expert, w1, w2).float()
            if not apply_router_weight_on_input:
                result *= topk_weights[rows, slots].float().unsqueeze(1)
            total.index_add_(0, rows, result)
        output.copy_(total)


class TorchBatchedExperts(_Torch):
    """BatchedExperts form: rows sorted by local expert; weights and sums are left to combine."""

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceDelegate()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (local_num_experts, M, K)

    def apply(
        self,
        *,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        a1q_scale: torch.Tensor | None,
        expert_tokens_meta: Any,
        **_rest: Any,
    ) -> None:
        for expert, count in enumerate(expert_tokens_meta.expert_num_tokens.tolist()):
            if count:
                scales = None if a1q_scale is None else a1q_scale[expert, :count]
                output[expert, :count] = self._forward(hidden_states[expert, :count], scales, expert, w1, w2)
