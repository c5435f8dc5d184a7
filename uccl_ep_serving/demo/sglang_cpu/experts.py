"""The experts of one rank in plain torch, for both formats that SGLang's DeepEP dispatcher hands over.

The product never runs this: on a GPU DeepGEMM or another runner of SGLang computes the experts. It follows the
arithmetic of the model (gate and up in one matrix, SiLU, down), in the dtype of the weights.
"""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["dequantize", "low_latency_experts", "normal_experts", "quantize"]

_BLOCK = 128
"""Elements that share one scale in block-scaled FP8 (DeepEP's ``per_token_cast_to_fp8``)."""


_E4M3_MAX = 448.0
"""Largest finite value of ``torch.float8_e4m3fn``."""

_SMALLEST = 1e-4
"""Least magnitude a block is scaled for, so that a block of zeros has a scale (DeepEP's ``per_token_cast_to_fp8``)."""


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block-scaled FP8 of each row.

    Args:
        x: ``[tokens, hidden]``, hidden a multiple of 128.

    Returns:
        e4m3 ``[tokens, hidden]`` and its scales, float32 ``[tokens, hidden / 128]``.
    """
    blocks: torch.Tensor = x.to(torch.float32).unflatten(-1, (-1, _BLOCK))
    scale = blocks.abs().amax(dim=-1).clamp_min(_SMALLEST) / _E4M3_MAX
    return (blocks / scale.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn), scale


def dequantize(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Undo block-scaled FP8; without scales just convert.

    Args:
        x: ``[..., hidden]``, e4m3 when ``scale`` is given.
        scale: float32 ``[..., hidden / 128]`` (any strides), or int32 ``[..., hidden / 512]`` holding four UE8M0
            exponents each (biased by 127, little end first), or None.
        dtype: dtype to return.

    Returns:
        ``[..., hidden]`` in ``dtype``.
    """
    if scale is None:
        return x.to(dtype)
    if scale.dtype == torch.int32:
        exponents = scale.contiguous().view(torch.uint8).to(torch.int32)
        scale = (exponents << 23).view(torch.float32)  # a UE8M0 scale is the exponent field of a float32
    blocks: torch.Tensor = x.to(torch.float32).unflatten(-1, (-1, _BLOCK)) * scale.unsqueeze(-1)
    return blocks.flatten(-2).to(dtype)


def _expert(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate, up = functional.linear(x, w13).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, w2)


def low_latency_experts(
    x: torch.Tensor, scale: torch.Tensor | None, counts: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Run every local expert on the rows it received.

    Args:
        x: ``[local experts, rows, hidden]``; of expert ``e`` the first ``counts[e]`` rows are valid.
        scale: see :func:`dequantize`.
        counts: int32 ``[local experts]``.
        w13: ``[local experts, 2 * intermediate, hidden]``, gate first.
        w2: ``[local experts, hidden, intermediate]``.

    Returns:
        ``[local experts, rows, hidden]`` in the dtype of ``w2``; rows past the counts are NaN, so that a combine that
        reads one of them cannot go unnoticed.
    """
    out = torch.full(x.shape, float("nan"), dtype=w2.dtype, device=x.device)
    for expert, count in enumerate(counts.tolist()):
        if count:
            rows = dequantize(x[expert, :count], None if scale is None else scale[expert, :count], w2.dtype)
            out[expert, :count] = _expert(rows, w13[expert], w2[expert])
    return out


def normal_experts(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> torch.Tensor:
    """Weighted sum over the local experts of each received token.

    Args:
        x: ``[tokens, hidden]``.
        scale: see :func:`dequantize`.
        topk_ids: integer ``[tokens, topk]``, local expert ids, -1 where the slot belongs to another rank.
        topk_weights: float32 ``[tokens, topk]``.
        w13: ``[local experts, 2 * intermediate, hidden]``, gate first.
        w2: ``[local experts, hidden, intermediate]``.

    Returns:
        ``[tokens, hidden]`` in the dtype of ``w2``, summed in float32.
    """
    rows = dequantize(x, scale, w2.dtype)
    out = torch.zeros(rows.shape, dtype=torch.float32, device=x.device)
    for expert in range(w13.shape[0]):
        token, slot = torch.where(topk_ids == expert)
        if token.numel():
            weighted = _expert(rows[token], w13[expert], w2[expert]).float() * topk_weights[token, slot, None]
            out.index_add_(0, token, weighted)
    return out.to(w2.dtype)
