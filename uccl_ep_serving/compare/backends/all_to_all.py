"""An all-to-all collective (gloo, MPI, NCCL) as the backend of a layer.

A dispatch begins with the ids and weights of the router, as a layer has them, and ends with the rows that local experts
want, who wants them, and how many rows each expert has: it finds out where each token goes, exchanges counts (the host
waits for them), gathers a row once per (token, destination rank) with its ids and weights behind it, exchanges those in
one all-to-all, and counts. A combine sends the rows back and sums them in float32, in ascending order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.peers import AllToAll, CollectiveSubject
from uccl_ep_serving.bench.problem import FlatProblem, WrongData, compare
from uccl_ep_serving.bench.subjects import finish

__all__ = ["AllToAllLayer", "expert_counts"]

#: Bytes of an id and of a weight behind a row: int32, float32.
_CHOICE_BYTES = 8


def expert_counts(card: Card, ids: torch.Tensor, rank: int) -> torch.Tensor:
    """int64 [L]: how often the experts of ``rank`` stand in ``ids`` [..., K] (global, any integer dtype)."""
    local = card.experts // card.ranks
    here = ids.flatten().long() - rank * local
    # whatever is not of this rank counts for one expert more
    here = torch.where((here >= 0) & (here < local), here, local)
    return torch.bincount(here, minlength=local + 1)[:local]


class AllToAllLayer(CollectiveSubject):
    """Dispatch and combine of a layer by an all-to-all that knows nothing beforehand."""

    def __init__(
        self,
        name: str,
        problem: FlatProblem,
        all_to_all: AllToAll,
        device: torch.device,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name, problem, all_to_all, device, stop)
        card = problem.card
        self._ids = problem.routing.topk_idx[problem.rank].to(device)
        self._weights = problem.routing.topk_weights[problem.rank].to(device)
        self._tokens = torch.arange(card.tokens, device=device)[:, None]
        width = self._x[0].shape[1] + card.topk * _CHOICE_BYTES
        # as many as there can be: a token goes to a rank once
        self._staging = self._x[0].new_zeros(card.tokens * min(card.ranks, card.topk), width)
        self._landing = self._x[0].new_zeros(card.tokens * card.ranks, width)
        self._back = self._y[0].new_zeros(len(self._staging), self._y[0].shape[1])
        self._go: list[int] = []
        self._come: list[int] = []
        self._counts: list[int] = []

    def _dispatch(self, variant: int) -> None:
        card, ranks = self._problem.card, self._problem.card.ranks
        wanted = torch.zeros(card.tokens, ranks, dtype=torch.bool, device=self._device)
        wanted[self._tokens, self._ids // (card.experts // ranks)] = True
        destination, token = wanted.t().nonzero(as_tuple=True)
        told = torch.bincount(destination, minlength=ranks)[:, None]
        heard = torch.empty_like(told)
        self._all_to_all(heard.view(torch.uint8), told.view(torch.uint8), [1] * ranks, [1] * ranks)
        self._go, self._come = told.flatten().tolist(), heard.flatten().tolist()
        width = self._x[variant].shape[1]
        sent, received = self._staging[: len(token)], self._landing[: sum(self._come)]
        sent[:, :width] = self._x[variant][token]
        choices = torch.cat([self._ids[token].int(), self._weights[token].view(torch.int32)], dim=1)
        sent[:, width:] = choices.view(torch.uint8)
        self._all_to_all(received, sent, self._come, self._go)
        self._received = received[:, :width]
        self._choices = received[:, width:].contiguous().view(torch.int32)
        self._counts = expert_counts(card, self._choices[:, : card.topk], self._problem.rank).tolist()
        self._sent_tokens = list(token.split(self._go))
        finish(self._device)

    def _combine(self, variant: int) -> None:
        self._returned = self._back[: sum(self._go)]
        self._pieces = self._cut(self._sent_tokens)
        super()._combine(variant)

    def _exchange_back(self, variant: int) -> None:
        self._all_to_all(self._returned, self._y[variant], self._go, self._come)

    def check(self, variant: int) -> float:
        there = self._problem.delivered[self._problem.rank]
        if self._counts != there.expert_counts:
            raise WrongData(f"{self.name}: dispatch: counts {self._counts}, the oracle has {there.expert_counts}")
        k, local = self._problem.card.topk, self._problem.card.experts // self._problem.card.ranks
        ids = self._choices[:, :k].cpu().long() - self._problem.rank * local
        here = (ids >= 0) & (ids < local)
        weights = self._choices[:, k:].contiguous().view(torch.float32).cpu()
        compare(f"{self.name}: dispatch, ids", torch.where(here, ids, -1), there.topk_idx)
        compare(f"{self.name}: dispatch, weights", torch.where(here, weights, 0.0), there.topk_weights)
        return super().check(variant)
