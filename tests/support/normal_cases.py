"""Inputs of normal-mode tests, one operation over them, and the comparison with the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch

from tests.support.bits import check_bits, same_bits
from uccl_ep_serving import oracle
from uccl_ep_serving.handles import NormalHandle
from uccl_ep_serving.modes.normal_cpu import Normal


@dataclass(frozen=True)
class Case:
    """What all ranks dispatch.

    Attributes:
        tokens: tokens of each rank, one entry a rank.
        dtype: of the rows; float8_e4m3fn brings float32 scales.
        lost: share of expert ids that are -1.
        hot: every token chooses experts of this rank only, -1 = of all ranks.
    """

    tokens: tuple[int, ...]
    hidden: int = 256
    experts: int = 32
    topk: int = 4
    dtype: torch.dtype = torch.bfloat16
    lost: float = 0.1
    hot: int = -1
    seed: int = 0

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    def inputs(self) -> Inputs:
        generator = torch.Generator().manual_seed(self.seed)
        local = self.experts // self.ranks
        first, choice = (0, self.experts) if self.hot < 0 else (self.hot * local, local)
        x: list[torch.Tensor] = []
        scales, ids, weights = [], [], []
        for tokens in self.tokens:
            rows = torch.randn(tokens, self.hidden, generator=generator)
            x.append(rows.to(self.dtype))
            scales.append(torch.rand(tokens, self.hidden // 128, generator=generator))
            order = torch.rand(tokens, choice, generator=generator).argsort(dim=1)[:, : self.topk] + first
            gone = torch.rand(tokens, self.topk, generator=generator) < self.lost
            ids.append(torch.where(gone, -1, order))
            weights.append(torch.rand(tokens, self.topk, generator=generator))
        return Inputs(self, x, scales, ids, weights)


@dataclass(frozen=True)
class Inputs:
    """Inputs of all ranks: x[r] [T_r, H], scales[r], topk_idx[r] and topk_weights[r] [T_r, K]."""

    case: Case
    x: list[torch.Tensor]
    scales: list[torch.Tensor]
    topk_idx: list[torch.Tensor]
    topk_weights: list[torch.Tensor]

    @property
    def quantised(self) -> bool:
        return self.case.dtype == torch.float8_e4m3fn

    def rows(self, rank: int) -> Any:
        return (self.x[rank], self.scales[rank]) if self.quantised else self.x[rank]

    @cached_property
    def delivered(self) -> list[oracle.NormalReceived]:
        """What each rank receives."""
        return oracle.normal_dispatch(self.topk_idx, self.topk_weights, self.case.experts)


def dispatch(normal: Normal, inputs: Inputs, rank: int, *, counted: bool = True, **options: Any) -> Any:
    """Layout and dispatch of one rank; ``options`` go to dispatch.

    Args:
        counted: the layout was counted of the ids that the dispatch is given, which need not be counted again.
    """
    ids = inputs.topk_idx[rank]
    per_rank, _, per_expert, in_rank, _ = normal.get_dispatch_layout(ids, inputs.case.experts)
    return normal.dispatch(
        inputs.rows(rank),
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids if counted else ids.clone(),
        topk_weights=inputs.topk_weights[rank],
        **options,
    )


def expert_outputs(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """Something of each row that differs by rank, in a dtype that combine takes."""
    wide = rows.float() * (rank + 1.5)
    return wide.to(torch.bfloat16 if rows.dtype == torch.float8_e4m3fn else rows.dtype)


class CountedEvent:
    """A stream event that counts who waits for it."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


@dataclass(frozen=True)
class Outcome:
    """What one rank got from a dispatch and the combine of its expert outputs."""

    received: Any
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    per_expert: list[int]
    handle: NormalHandle
    combined: torch.Tensor
    combined_weights: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        return self.received[0] if isinstance(self.received, tuple) else self.received


def round_trip(normal: Normal, inputs: Inputs, rank: int, **options: Any) -> Outcome:
    """Dispatch, expert outputs, combine with weights."""
    received, idx, weights, per_expert, handle, _ = dispatch(normal, inputs, rank, **options)
    rows = received[0] if isinstance(received, tuple) else received
    combined, combined_weights, _ = normal.combine(expert_outputs(rows, rank), handle, topk_weights=weights)
    return Outcome(received, idx, weights, per_expert, handle, combined, combined_weights)


def combine_unaware(
    normal: Any, session: Any, inputs: Inputs, rank: int, kept: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The combined tokens and weights where more rows come than the one that ``num_worst_tokens`` promised, and the
    combine is launched before the host knows, as on a device.

    Args:
        session: of ``normal``.
        kept: rows of the tensors that the row of ones and its weights of 0.5 are the first of. The others are sevens.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "check", lambda phase: None)
        rows, _, _, _, handle, _ = dispatch(normal, inputs, rank, num_worst_tokens=1)
        assert len(rows) == 1
        more = torch.full((kept, inputs.case.hidden), 7.0, dtype=rows.dtype)
        weights = torch.full((kept, inputs.case.topk), 7.0)
        more[:1], weights[:1] = 1.0, 0.5
        combined, factors, _ = normal.combine(more[:1], handle, topk_weights=weights[:1])
    return combined, factors


def check(inputs: Inputs, outcomes: Sequence[Outcome], alignment: int = 1, worst: int = 0) -> None:
    """:func:`check_rank` for every rank."""
    assert len(outcomes) == inputs.case.ranks
    for rank, outcome in enumerate(outcomes):
        check_rank(inputs, rank, outcome, alignment, worst)


def check_rank(inputs: Inputs, rank: int, outcome: Outcome, alignment: int = 1, worst: int = 0) -> None:
    """Compare what a rank got with the oracle: dispatch bit by bit, combine by DeepEP's tolerances."""
    delivered = inputs.delivered
    there = delivered[rank]
    n = len(there.source)
    assert len(outcome.rows) == (worst or n)
    check_bits(f"rows of rank {rank}", outcome.rows[:n], there.rows(inputs.x))
    assert same_bits(outcome.topk_idx[:n], there.topk_idx)
    assert same_bits(outcome.topk_weights[:n], there.topk_weights)
    if inputs.quantised:
        assert same_bits(outcome.received[1][:n], there.rows(inputs.scales))
    assert (outcome.topk_idx[n:] == -1).all()
    rounded = [-(-count // alignment) * alignment for count in there.expert_counts]
    assert outcome.per_expert == ([] if worst else rounded)
    outputs = [expert_outputs(one.rows(inputs.x), peer) for peer, one in enumerate(delivered)]
    tokens = inputs.case.tokens[rank]
    expected = oracle.normal_combine(outputs, delivered, rank, tokens)
    assert outcome.combined.dtype == expected.dtype
    assert outcome.combined.shape == expected.shape
    assert oracle.calc_diff(outcome.combined, expected) < 5e-6
    nowhere = ~oracle.in_rank(inputs.topk_idx[rank], inputs.case.experts, inputs.case.ranks).any(dim=1)
    assert (outcome.combined[nowhere] == 0).all()
    back = oracle.normal_combine_weights([one.topk_weights for one in delivered], delivered, rank, tokens)
    assert oracle.calc_diff(outcome.combined_weights, back) < 1e-9
