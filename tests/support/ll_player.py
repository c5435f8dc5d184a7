"""Low-latency operations in any legal order: programs of calls, a rank that plays one, and how to draw one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

from tests.support.ll_cases import (
    Case,
    check_combined,
    check_received,
    expert_output,
    received_values,
    weights_at_dispatch,
)
from uccl_ep_serving.oracle import LowLatencyInput, low_latency_dispatch


class Player:
    """One rank that plays a program of operations, each checked when it is received.

    A program is a list of words: ``D`` dispatch, ``C<i>`` combine dispatch i, ``d<i>`` / ``c<i>`` call the hook of
    dispatch i / combine i. Dispatches have the sizes of ``case`` and ``others`` in turn.

    Args:
        low_latency: the mode of the rank, of CPU kernels or a device's.
        routings: of the case by dispatch, where it is another one.
    """

    def __init__(
        self, low_latency: Any, rank: int, case: Case, *others: Case, routings: dict[int, str] | None = None
    ) -> None:
        self.low_latency, self.rank = low_latency, rank
        self.cases, self.routings = (case, *others), routings or {}
        self.dispatches: list[dict[str, Any]] = []
        self.combines: list[dict[str, Any]] = []

    def play(self, program: str) -> None:
        for word in program.split():
            if word == "D":
                self.dispatch()
            else:
                {"C": self.combine, "d": self.dispatch_hook, "c": self.combine_hook}[word[0]](int(word[1:]))

    def dispatch(self) -> None:
        number = len(self.dispatches)
        case = self.cases[number % len(self.cases)]
        case = replace(case, seed=number, routing=self.routings.get(number, case.routing))
        inputs = case.inputs()
        self.dispatch_of(case, inputs, inputs[self.rank].topk_idx)

    def dispatch_of(self, case: Case, inputs: list[LowLatencyInput], topk_idx: torch.Tensor) -> None:
        """``inputs`` are what is expected of each rank, ``topk_idx`` what this one gives."""
        mine = inputs[self.rank]
        rows, count, handle, _, hook = self.low_latency.dispatch(
            mine.x,
            topk_idx,
            case.tokens,
            case.experts,
            topk_weights=weights_at_dispatch(case, mine),
            return_recv_hook=True,
            deterministic=case.deterministic,
            **case.options,
        )
        self.dispatches.append(
            {
                "case": case,
                "inputs": inputs,
                "ids": topk_idx,
                "rows": rows,
                "count": count,
                "handle": handle,
                "hook": hook,
            }
        )

    def dispatch_hook(self, index: int) -> None:
        one = self.dispatches[index]
        one["hook"]()
        case = one["case"]
        want = low_latency_dispatch(one["inputs"], self.rank, case.tokens, case.experts)
        check_received(case, one["rows"], one["count"], one["handle"], want)

    def combine(self, index: int) -> None:
        one = self.dispatches[index]
        mine = one["inputs"][self.rank]
        y = expert_output(received_values(one["case"], one["rows"], one["count"]), self.rank)
        out, _, hook = self.low_latency.combine(y, one["ids"], mine.topk_weights, one["handle"], return_recv_hook=True)
        # the caller may do with its tensor what it likes now
        y.fill_(float("nan"))
        self.combines.append({"of": one, "out": out, "hook": hook})

    def combine_hook(self, index: int) -> None:
        one = self.combines[index]
        one["hook"]()
        check_combined(one["of"]["case"], one["of"]["inputs"], self.rank, one["out"])


def program_of(rank_seed: int, collectives: list[int]) -> str:
    """A legal program: the same collectives for every rank, hooks wherever ``rank_seed`` puts them."""
    choose = random.Random(rank_seed)
    words: list[str] = []
    pending: dict[str, list[int]] = {"d": [], "c": []}
    counts = {"d": 0, "c": 0}

    def call(kind: str, index: int) -> None:
        pending[kind].remove(index)
        words.append(f"{kind}{index}")

    for number in collectives:
        for kind in ("d", "c"):
            for index in list(pending[kind]):
                if choose.random() < 0.4:
                    call(kind, index)
        if number == 0 or counts["d"] == 0:
            kind, word = "d", "D"
        else:
            of = counts["d"] - 1 - (number - 1) % min(2, counts["d"])
            if of in pending["d"]:
                call("d", of)
            kind, word = "c", f"C{of}"
        # the one before last of its kind must have been received, and everything before it
        for index in [index for index in pending[kind] if index <= counts[kind] - 2]:
            call(kind, index)
        words.append(word)
        pending[kind].append(counts[kind])
        counts[kind] += 1
    for kind in ("d", "c"):
        for index in list(pending[kind]):
            call(kind, index)
    return " ".join(words)
