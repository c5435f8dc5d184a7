"""Which of vLLM's activation formats travel as they are, and what is quantised before or after dispatch."""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.utils as fused_moe
from vllm.platforms import current_platform

from uccl_ep_serving.protocol.message import SCALE_BLOCK

__all__ = ["is_block_scaled_fp8", "one_scale_of_all", "quantised_after", "quantised_before", "weighted_input"]


def is_block_scaled_fp8(quant_config: Any) -> bool:
    """Whether the experts take e4m3 rows with a scale per 128 values: the format that travels quantised, and that low
    latency quantises itself."""
    return (
        quant_config is not None
        and quant_config.quant_dtype == current_platform.fp8_dtype()
        and quant_config.block_shape == [SCALE_BLOCK, SCALE_BLOCK]
    )


def one_scale_of_all(quant_config: Any) -> bool:
    """Whether quantising finds one scale in the whole tensor: rows that nobody sent must not decide it."""
    own_scale = quant_config.per_act_token_quant or quant_config.block_shape is not None
    return isinstance(quant_config.quant_dtype, torch.dtype) and quant_config.a1_scale is None and not own_scale


def weighted_input(a1: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """``apply_router_weight_on_input``: the one weight of each token times the token."""
    if topk_weights.size(1) != 1:
        raise NotImplementedError(
            f"apply_router_weight_on_input with top-{topk_weights.size(1)}: a token has one input for all its experts, "
            "so only top-1 can be weighted there"
        )
    return a1 * topk_weights.to(a1.dtype)


def quantised_before(a1: torch.Tensor, quant_config: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Block-scaled rows, quantised before they travel: half the bytes, and their scales travel with them."""
    rows, scales = fused_moe.moe_kernel_quantize_input(
        a1,
        quant_config.a1_scale,
        quant_dtype=quant_config.quant_dtype,
        per_act_token_quant=quant_config.per_act_token_quant,
        block_shape=quant_config.block_shape,
    )
    if scales is not None and scales.numel() == 1:
        scales = scales.view(1, 1)
    return rows, scales


def quantised_after(rows: torch.Tensor, quant_config: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Everything else travels as it is and is quantised where the experts are.

    NVFP4 wants the global scale in the place of the activation scale, and its scales swizzled as the experts read them.
    """
    nvfp4 = quant_config.quant_dtype == "nvfp4"
    quantised: tuple[torch.Tensor, torch.Tensor | None] = fused_moe.moe_kernel_quantize_input(
        rows,
        quant_config.a1_gscale if nvfp4 else quant_config.a1_scale,
        quant_dtype=quant_config.quant_dtype,
        per_act_token_quant=quant_config.per_act_token_quant,
        block_shape=quant_config.block_shape,
        is_scale_swizzled=quant_config.is_scale_swizzled,
    )
    return quantised
