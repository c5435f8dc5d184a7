"""The layout of a normal-mode dispatch of CPU tensors: counted from expert ids, or given by the caller and checked."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch

from ..errors import ConfigError
from ..kernels.interface import NormalKernels
from .normal_arguments import check_layout, check_topk

__all__ = ["Layout", "count_layout", "given_layout", "refuse_layout"]


class Layout(NamedTuple):
    """What a caller gives a first dispatch beside its rows; all tensors are contiguous. T tokens, R ranks, E experts.

    Attributes:
        per_rank: int32 [R], tokens for each rank.
        in_rank: bool [T, R], which tokens go there.
        per_expert: int32 [E], tokens for each expert.
        topk_idx, topk_weights: int64 and float32 [T, K], both or none.
    """

    per_rank: torch.Tensor
    in_rank: torch.Tensor
    per_expert: torch.Tensor
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None

    @property
    def topk(self) -> int:
        """Experts per token, 0 when no ids travel."""
        return 0 if self.topk_idx is None else self.topk_idx.shape[1]


def given_layout(
    per_rank: torch.Tensor | None,
    in_rank: torch.Tensor | None,
    per_expert: torch.Tensor | None,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    tokens: int,
    ranks: int,
) -> Layout:
    """The layout that dispatch was given. Raises ConfigError for dtypes and shapes; contents are checked in routing."""
    counted = check_layout(per_rank, in_rank, per_expert, tokens, ranks)
    if topk_idx is None and topk_weights is None:
        return Layout(*counted, None, None)
    return Layout(*counted, *check_topk(topk_idx, topk_weights, tokens))


def count_layout(
    kernels: NormalKernels, topk_idx: torch.Tensor, experts: int, ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int32 [R] per rank, int32 [E] per expert, bool [T, R] in rank. Raises ConfigError for an id out of range.

    Args:
        topk_idx: int64 [T, K], contiguous.
        experts: E, a multiple of R.
    """
    tokens, topk = topk_idx.shape
    per_rank = torch.empty(ranks, dtype=torch.int32)
    per_expert = torch.empty(experts, dtype=torch.int32)
    in_rank = torch.empty(tokens, ranks, dtype=torch.bool)
    bad = kernels.layout(
        topk_idx.data_ptr(),
        tokens,
        topk,
        experts,
        ranks,
        per_rank.data_ptr(),
        per_expert.data_ptr(),
        in_rank.data_ptr(),
    )
    if bad >= 0:
        raise ConfigError(
            f"topk_idx[{bad // topk}, {bad % topk}] = {int(topk_idx.flatten()[bad])} is not an expert: ids are "
            f"-1 .. {experts - 1}"
        )
    return per_rank, per_expert, in_rank


def refuse_layout(kernels: NormalKernels, layout: Layout) -> NoReturn:
    """Say what is wrong with a layout that contradicts itself or its ids. Raises ConfigError."""
    per_rank, in_rank, per_expert, topk_idx, _ = layout
    if topk_idx is not None:
        _, own_expert, own_marks = count_layout(kernels, topk_idx, len(per_expert), in_rank.shape[1])
        if not torch.equal(own_expert, per_expert):
            raise ConfigError("num_tokens_per_expert does not count the experts of topk_idx")
        if not torch.equal(own_marks, in_rank):
            raise ConfigError("is_token_in_rank does not mark the ranks of topk_idx")
    raise ConfigError(
        f"num_tokens_per_rank {per_rank.tolist()} contradicts is_token_in_rank, which marks "
        f"{in_rank.sum(dim=0).tolist()}"
    )
