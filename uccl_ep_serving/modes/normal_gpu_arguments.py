"""What the caller of normal mode on a device passes: checked, with the format that all ranks must agree on.

Everything wrong is a ConfigError before anything moves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import ConfigError
from ..handles import NormalGpuHandle
from ..protocol.message import NormalNotify
from .normal_arguments import (
    bias_pair,
    check_alignment,
    check_device,
    check_layout,
    check_origin,
    check_topk,
    combine_weights,
    plain_dtype,
    rows_and_scales,
)
from .row_format import RowFormat

__all__ = ["CombineArguments", "DispatchArguments", "check_combine", "check_dispatch"]


class DispatchArguments(NamedTuple):
    """Of a dispatch of T tokens to R ranks. Tensors are contiguous and on the device.

    Attributes:
        form: what all ranks must agree on.
        rows: [T, hidden].
        scales: of float8 rows, [T, ...], or None.
        topk_idx, topk_weights: int64 and float32 [T, K], or None.
        layout: is_token_in_rank, bool [T, R], and num_tokens_per_expert, int32 [experts]; None from a handle.
        handle: what a cached dispatch takes its layout from, or None.
        copies: most ranks that a token goes to.
    """

    form: RowFormat
    rows: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    layout: tuple[torch.Tensor, torch.Tensor] | None
    handle: NormalGpuHandle | None
    copies: int

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What is moved."""
        return [self.rows, *(one for one in (self.scales, self.topk_idx, self.topk_weights) if one is not None)]


class CombineArguments(NamedTuple):
    """Of a combine. Tensors are contiguous and on the device.

    Attributes:
        form: what all ranks must agree on.
        rows: [capacity of the handle, hidden].
        topk_weights: float32 [capacity of the handle, K], or None.
        biases: none, one or two, [tokens, hidden] of the dtype of ``rows``.
        handle: of the dispatch.
    """

    form: RowFormat
    rows: torch.Tensor
    topk_weights: torch.Tensor | None
    biases: tuple[torch.Tensor, ...]
    handle: NormalGpuHandle


def check_dispatch(
    x: object,
    handle: object,
    owner: object,
    layout: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    expert_alignment: int,
    num_worst_tokens: int,
    ranks: int,
    device: torch.device,
) -> DispatchArguments:
    """Take apart what dispatch is given. Raises ConfigError.

    Args:
        owner: from whom a handle must come.
        layout: num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert.
    """
    rows, scales, dtype = rows_and_scales(x, device)
    _check_start("x", rows, device)
    tokens, hidden = rows.shape
    scale_bytes = 0 if scales is None else scales.shape[1] * scales.element_size()
    row_bytes = hidden * rows.element_size()
    if handle is not None:
        handle = _check_handle(handle, owner, tokens)
        if any(one is not None for one in (*layout, topk_idx, topk_weights)) or num_worst_tokens:
            raise ConfigError("a cached dispatch takes x and handle only: the layout comes from the handle")
        origin = (handle.origin.epoch, -1)
        kind = NormalNotify.OPERATION_CACHED_DISPATCH
        form = RowFormat(kind, dtype, hidden, row_bytes, scale_bytes=scale_bytes, origin=origin)
        return DispatchArguments(form, rows, scales, None, None, None, handle, ranks)
    check_alignment(expert_alignment, num_worst_tokens)
    _, in_rank, per_expert = check_layout(*layout, tokens, ranks, device)
    topk = 0
    if topk_idx is not None or topk_weights is not None:
        topk_idx, topk_weights = check_topk(topk_idx, topk_weights, tokens, device)
        topk = topk_idx.shape[1]
    kind, local_experts = NormalNotify.OPERATION_DISPATCH, len(per_expert) // ranks
    form = RowFormat(kind, dtype, hidden, row_bytes, topk, scale_bytes, local_experts)
    copies = min(topk or ranks, ranks)
    return DispatchArguments(form, rows, scales, topk_idx, topk_weights, (in_rank, per_expert), None, copies)


def check_combine(
    x: object,
    handle: object,
    owner: object,
    topk_weights: torch.Tensor | None,
    bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
    device: torch.device,
) -> CombineArguments:
    """Take apart what combine is given. Raises ConfigError.

    Args:
        owner: from whom the handle must come.
    """
    handle = _check_handle(handle, owner, None)
    rows, dtype = plain_dtype(x, device)
    _check_start("x", rows, device)
    if len(rows) != handle.capacity:
        raise ConfigError(f"x has {len(rows)} rows, and the dispatch of this handle returned {handle.capacity}")
    hidden = rows.shape[1]
    biases = bias_pair(bias, handle.origin.tokens, rows)
    for one in biases:
        _check_start("bias", one, device)
    topk = 0
    if topk_weights is not None:
        topk_weights = combine_weights(topk_weights, len(rows), device)
        topk = topk_weights.shape[1]
    kind, origin = NormalNotify.OPERATION_COMBINE, (handle.origin.epoch, -1)
    form = RowFormat(kind, dtype, hidden, hidden * rows.element_size(), topk, origin=origin)
    return CombineArguments(form, rows, topk_weights, biases, handle)


def _check_handle(handle: object, owner: object, tokens: int | None) -> NormalGpuHandle:
    if not isinstance(handle, NormalGpuHandle):
        raise ConfigError(f"handle must come from a normal-mode dispatch on a device, not {type(handle).__name__}")
    check_origin(handle.origin, owner, tokens)
    return handle


def _check_start(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    check_device(device, **{name: tensor})
    if tensor.numel() and tensor.data_ptr() % 16:
        raise ConfigError(f"{name} must start on a multiple of 16 bytes")
