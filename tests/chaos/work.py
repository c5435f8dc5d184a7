"""Round trips of both modes whose every value is held to the oracle, with any ranks left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tests.support import ll_cases, normal_cases
from tests.system.test_masking import case_of, combined, dispatched, dropped
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.oracle import low_latency_dispatch

__all__ = ["Work"]

#: Different inputs: what an earlier operation left behind is then not taken for right.
VARIANTS = 3
Check = Callable[[], None]


class Work:
    """The operations of one rank, which are numbered alike on all ranks.

    Args:
        mode: "low latency", "normal" or "both", which take turns.
    """

    def __init__(self, mode: str, ranks: int) -> None:
        self._mode = mode
        self._cases = [case_of(ranks, seed) for seed in range(VARIANTS)]
        tokens = tuple(16 + 4 * (rank % 3) for rank in range(ranks))
        self._normal = [normal_cases.Case(tokens, hidden=128, experts=4 * ranks, seed=one) for one in range(VARIANTS)]
        self._inputs = [case.inputs() for case in self._normal]

    def operation(self, buffer: Buffer, number: int, lost: frozenset[int]) -> Check:
        """Dispatch and combine; returns what raises AssertionError unless both were right with ``lost`` left out."""
        normal = self._mode == "normal" or (self._mode == "both" and number % 2 == 1)
        # two operations in a row of one mode have different inputs, whatever the modes
        variant = number // (2 if self._mode == "both" else 1) % VARIANTS
        return (self._trip_normal if normal else self._trip_low_latency)(buffer, variant, lost)

    def _trip_low_latency(self, buffer: Buffer, variant: int, lost: frozenset[int]) -> Check:
        case, rank = self._cases[variant], buffer.rank
        arrived = dispatched(buffer, case)
        # what the combine sends is as the dispatch left it: the experts read no unused row
        result = combined(buffer, case, arrived)[0]

        def check() -> None:
            inputs = dropped(case, case.inputs(), set(lost))
            want = low_latency_dispatch(inputs, rank, case.tokens, case.experts)
            ll_cases.check_received(case, arrived[0], arrived[1], arrived[2], want)
            assert torch.equal(result, ll_cases.expected_combined(case, inputs, rank)), "the combined rows differ"

        return check

    def _trip_normal(self, buffer: Buffer, variant: int, lost: frozenset[int]) -> Check:
        inputs, rank = self._inputs[variant], buffer.rank
        outcome = normal_cases.round_trip(buffer, inputs, rank)  # type: ignore[arg-type]
        return lambda: normal_cases.check_rank(without(inputs, lost), rank, outcome)


def without(inputs: normal_cases.Inputs, lost: frozenset[int]) -> normal_cases.Inputs:
    """``inputs`` as the oracle sees them: no token of the ranks ``lost`` goes anywhere, and none goes to them."""
    local = inputs.case.experts // inputs.case.ranks
    ids = []
    for rank, given in enumerate(inputs.topk_idx):
        kept = given.clone()
        for peer in lost:
            kept[(kept >= peer * local) & (kept < (peer + 1) * local)] = -1
        if rank in lost:
            kept[:] = -1
        ids.append(kept)
    return replace(inputs, topk_idx=ids)
