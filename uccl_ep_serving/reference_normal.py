"""A torch oracle of normal mode: what every rank must get, computed from what all ranks gave.

It shares no code and no order of work with the kernels: plain indexing over the inputs of all ranks. Tests compare
against it, and so can users who doubt a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .oracle import calc_diff

__all__ = ["Delivered", "calc_diff", "combine", "combine_weights", "deliver", "in_rank"]


@dataclass(frozen=True, slots=True)
class Delivered:
    """What one rank receives from a dispatch: its rows sorted by source rank, then by token.

    Attributes:
        source: int64 [N], source rank of each row.
        token: int64 [N], token index at the source.
        topk_idx: int64 [N, K], local expert ids, -1 for experts elsewhere.
        topk_weights: float32 [N, K], 0 where the id is -1.
        expert_counts: rows per local expert, a row counted once for each of its slots there.
    """

    source: torch.Tensor
    token: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    expert_counts: list[int]

    def rows(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """[N, ...]: the rows of ``tensors`` (one per source rank, indexed by token) that arrive."""
        parts = [tensors[rank][self.token[self.source == rank]] for rank in range(len(tensors))]
        return torch.cat(parts)


def in_rank(topk_idx: torch.Tensor, experts: int, ranks: int) -> torch.Tensor:
    """bool [T, R]: the token has an expert on the rank. ``topk_idx`` int64 [T, K], -1 = none."""
    owner = torch.where(topk_idx < 0, -1, topk_idx // (experts // ranks))
    return (owner.unsqueeze(2) == torch.arange(ranks)).any(dim=1)


def deliver(topk_idx: Sequence[torch.Tensor], topk_weights: Sequence[torch.Tensor], experts: int) -> list[Delivered]:
    """What each rank receives when rank r dispatches ``topk_idx[r]`` int64 [T_r, K] and ``topk_weights[r]``."""
    ranks = len(topk_idx)
    local = experts // ranks
    delivered = []
    for rank in range(ranks):
        sources, tokens, ids, weights = [], [], [], []
        for source in range(ranks):
            chosen = torch.nonzero(in_rank(topk_idx[source], experts, ranks)[:, rank]).flatten()
            here = topk_idx[source][chosen] - rank * local
            mine = (here >= 0) & (here < local) & (topk_idx[source][chosen] >= 0)
            sources.append(torch.full_like(chosen, source))
            tokens.append(chosen)
            ids.append(torch.where(mine, here, -1))
            weights.append(torch.where(mine, topk_weights[source][chosen], 0.0))
        all_ids = torch.cat(ids)
        counts = torch.bincount(all_ids[all_ids >= 0], minlength=local).tolist()
        delivered.append(Delivered(torch.cat(sources), torch.cat(tokens), all_ids, torch.cat(weights), counts))
    return delivered


def _sum(parts: Sequence[torch.Tensor], delivered: Sequence[Delivered], source: int, tokens: int) -> torch.Tensor:
    total = torch.zeros(tokens, parts[0].shape[1], dtype=torch.float32)
    for part, there in zip(parts, delivered, strict=True):
        back = there.source == source
        total[there.token[back]] += part[: len(there.source)][back].float()
    return total


def combine(
    rows: Sequence[torch.Tensor],
    delivered: Sequence[Delivered],
    source: int,
    tokens: int,
    bias: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """[T, H] that rank ``source`` gets back when rank r returns ``rows[r]`` [N_r, H]: float32 sum, rounded once."""
    total = _sum(rows, delivered, source, tokens)
    for one in bias:
        total += one.float()
    return total.to(rows[0].dtype)


def combine_weights(
    weights: Sequence[torch.Tensor], delivered: Sequence[Delivered], source: int, tokens: int
) -> torch.Tensor:
    """float32 [T, K]: the router weights ``weights[r]`` [N_r, K] summed back at rank ``source``."""
    return _sum(weights, delivered, source, tokens)
