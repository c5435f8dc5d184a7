"""All-gather and reduce-scatter (gloo, NCCL) as the backend of a layer: what an engine does without an EP library.

A dispatch gives every rank all tokens, ids (int32, as the engines') and weights. A combine adds up what the ranks'
experts made of every token, in the dtype of the rows, and leaves each rank its own tokens. The engines' experts find
their rows inside of their kernels, so nothing is looked for or counted here: its time is the same for every route, and
what it moves grows with the ranks and not with top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from uccl_ep_serving.bench.problem import TOLERANCE, FlatProblem, compare, sent_rows
from uccl_ep_serving.bench.subjects import Phases, finish, read

__all__ = ["GatherLayer"]

# names of torch before 2.13, which newer ones call deprecated
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class GatherLayer:
    """Dispatch and combine of a layer by collectives of ``group``.

    Args:
        name: of the backend.
        problem: whose rows to move.
        group: of torch.distributed.
        device: on which the rows lie.
        stop: called by :meth:`close`.
    """

    def __init__(
        self,
        name: str,
        problem: FlatProblem,
        group: dist.ProcessGroup,
        device: torch.device,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._problem, self._group, self._device, self._stop = problem, group, device, stop
        card, rank = problem.card, problem.rank
        everybody = card.ranks * card.tokens
        self._x = [one.to(device) for one in sent_rows(problem)]
        self._ids = problem.routing.topk_idx[rank].to(device, torch.int32)
        self._weights = problem.routing.topk_weights[rank].to(device)
        self._rows = self._x[0].new_zeros(everybody, self._x[0].shape[1])
        self._all_ids = self._ids.new_zeros(everybody, card.topk)
        self._all_weights = self._weights.new_zeros(everybody, card.topk)
        # what the experts of this rank leave in place: their rows, and zeros for tokens of others
        here = problem.delivered[rank]
        self._partial = [outputs.new_zeros(everybody, card.hidden) for outputs in problem.outputs]
        for partial, outputs in zip(self._partial, problem.outputs, strict=True):
            partial[here.source * card.tokens + here.token] = outputs
        self._partial = [one.to(device) for one in self._partial]
        self._combined = torch.zeros_like(problem.combined[0], device=device)

    @property
    def phases(self) -> Phases:
        return {"dispatch": self._dispatch, "combine": self._combine}

    def _dispatch(self, variant: int) -> None:
        for gathered, one in (
            (self._rows, self._x[variant]),
            (self._all_ids, self._ids),
            (self._all_weights, self._weights),
        ):
            _all_gather(gathered, one, group=self._group)
        finish(self._device)

    def _combine(self, variant: int) -> None:
        _reduce_scatter(self._combined, self._partial[variant], group=self._group)
        finish(self._device)

    def touch(self, phase: str, variant: int) -> None:
        read(self._x[variant] if phase == "dispatch" else self._partial[variant])

    def check(self, variant: int) -> float:
        """What local experts want must be among the rows; sums in the rows' dtype are farther from the oracle's by a
        rounding for each rank."""
        problem, card = self._problem, self._problem.card
        here = problem.delivered[problem.rank]
        compare(f"{self.name}: dispatch, ids", self._all_ids.cpu().long(), torch.cat(problem.routing.topk_idx))
        compare(f"{self.name}: dispatch, weights", self._all_weights.cpu(), torch.cat(problem.routing.topk_weights))
        wanted = self._rows.cpu()[here.source * card.tokens + here.token]
        rows, scales = wanted, None
        if card.dtype == "fp8":
            rows, scales = wanted[:, : card.hidden].contiguous(), wanted[:, card.hidden :].contiguous()
            scales = scales.view(torch.float32)
        problem.check_dispatch(self.name, variant, rows.view(problem.x[variant].dtype), scales)
        expected = problem.combined[variant]
        return compare(f"{self.name}: combine", self._combined.cpu(), expected, TOLERANCE * card.ranks)

    def close(self) -> None:
        self._stop()
