"""Other libraries, whose rows come in an order of their own, another one in each call.

Their rows are brought into the oracle's order when they are verified, and what the experts return is laid out in the
order in which rows came: in a phase of its own, which is not timed.
"""

from __future__ import annotations

from typing import Any

import torch

from uccl_ep_serving import oracle as reference
from uccl_ep_serving.bench.problem import FlatProblem, LowLatencyProblem, WrongData, compare
from uccl_ep_serving.bench.subjects import EXPERTS, LowLatencySubject, Phases, finish, read

__all__ = ["CLOSE", "AnyOrderFlat", "AnyOrderLowLatency"]

#: Largest calc_diff of low-latency sums in another order than the oracle's, as in DeepEP's own tests; and of fp8 rows
#: that were rounded otherwise.
CLOSE = 1e-5


class AnyOrderLowLatency(LowLatencySubject):
    """Low-latency mode of DeepEP, and of libraries that have its interface.

    A dispatch takes bf16 rows and ids, quantises if the card says fp8, and delivers a row once per (token, expert) in
    the layout [L, R * T, H] with counts on the device. It carries no weights: the combine takes them, returns a row
    once per (token, expert), and sums them in another order than the oracle.
    """

    def __init__(self, name: str, buffer: Any, problem: LowLatencyProblem, device: torch.device) -> None:
        super().__init__(name, buffer, problem, device, weights_at_dispatch=False)

    def _check_rows(self, variant: int, rows: torch.Tensor, scales: torch.Tensor | None, counts: torch.Tensor) -> float:
        try:
            return super()._check_rows(variant, rows, scales, counts)
        except WrongData:
            if scales is None or counts.tolist() != self._problem.counts.tolist():
                raise
            return self._rounded_otherwise(variant, rows, scales)

    def _check_combined(self, variant: int, combined: torch.Tensor) -> float:
        return self._problem.check_combine(self.name, variant, combined, CLOSE)

    def _rounded_otherwise(self, variant: int, rows: torch.Tensor, scales: torch.Tensor) -> float:
        """The distance of what fp8 rows stand for from what the oracle's do."""
        worst, problem = 0.0, self._problem
        for expert, codes in enumerate(problem.received[variant]):
            if len(codes):
                expected = reference.dequantise_fp8(codes, problem.received_scales[variant][expert])
                found = reference.dequantise_fp8(rows[expert, : len(codes)], scales[expert, : len(codes)])
                who = f"{self.name}: dispatch, local expert {expert}"
                worst = max(worst, compare(who, found.to(expected.dtype), expected, CLOSE))
        return worst


class AnyOrderFlat:
    """Rows once per (token, rank), of which a library says where each came from. A subclass calls it.

    Its :meth:`_dispatch` leaves what came: ``_rows`` [N, H], ``_scales`` (None, or [N, H / 128]), ``_chosen`` [N, K]
    (local ids of experts, anything outside 0..L-1 for those elsewhere), ``_told`` float32 [N, K] (their weights) and
    ``_counts`` (rows of each local expert; None where the library tells none). Its :meth:`_combine` sends the first N
    rows of ``_out`` [capacity, H] back and leaves ``_combined`` [T, H].
    """

    def __init__(self, name: str, problem: FlatProblem, device: torch.device, capacity: int) -> None:
        self.name = name
        self._problem, self._device = problem, device
        self._x = [one.to(device) for one in problem.x]
        self._x_scales = [one.to(device) for one in problem.scales]
        self._y = [one.to(device) for one in problem.outputs]
        self._ids = problem.routing.topk_idx[problem.rank].to(device)
        self._weights = problem.routing.topk_weights[problem.rank].to(device)
        self._out = torch.zeros(capacity, problem.card.hidden, dtype=self._y[0].dtype, device=device)
        self._rows = self._scales = self._chosen = self._told = self._combined = None
        self._counts: list[int] | None = None

    @property
    def phases(self) -> Phases:
        return {"dispatch": self._dispatch, EXPERTS: self._experts, "combine": self._combine}

    def _dispatch(self, variant: int) -> None:
        raise NotImplementedError

    def _combine(self, variant: int) -> None:
        raise NotImplementedError

    def _positions(self) -> torch.Tensor:
        """int64 [N] on the CPU: source rank * T + token of each row."""
        raise NotImplementedError

    def _experts(self, variant: int) -> None:
        order = self._positions().argsort()[: len(self._y[variant])].to(self._device)
        self._out[order] = self._y[variant][: len(order)]
        finish(self._device)

    def touch(self, phase: str, variant: int) -> None:
        read(self._x[variant] if phase == "dispatch" else self._out)

    def check(self, variant: int) -> float:
        problem, who = self._problem, f"{self.name}: dispatch"
        there = problem.delivered[problem.rank]
        positions = self._positions()
        order = positions.argsort()
        wanted = there.source * problem.card.tokens + there.token
        compare(f"{who}, sources", positions[order][:, None], wanted[:, None])
        if self._counts is not None and self._counts != there.expert_counts:
            raise WrongData(f"{who}: counts {self._counts}, the oracle has {there.expert_counts}")

        def sorted_rows(rows: Any) -> torch.Tensor:
            return torch.as_tensor(rows).cpu()[: len(order)][order]

        ids, weights = sorted_rows(self._chosen).long(), sorted_rows(self._told)
        here = (ids >= 0) & (ids < len(there.expert_counts))
        compare(f"{who}, ids", torch.where(here, ids, -1), there.topk_idx)
        compare(f"{who}, weights", torch.where(here, weights, 0.0), there.topk_weights)
        scales = None if self._scales is None else sorted_rows(self._scales)
        worst = problem.check_dispatch(self.name, variant, sorted_rows(self._rows), scales)
        combined = torch.as_tensor(self._combined)[: problem.card.tokens].cpu()
        return max(worst, problem.check_combine(self.name, variant, combined))

    def close(self) -> None:
        self._rows = self._scales = self._chosen = self._told = self._combined = None
