"""A layer as a captured graph holds it: dispatches, experts and combines on fixed tensors, replayed with other tokens.

On a GPU the graph is CUDA's. In Triton's interpreter it is the list of launches that the order was given, replayed with
the host's code left out, which is what a graph leaves out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.support import ll_cases
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.handles import EventOverlap

#: What a graph may hold: one layer; a dispatch that nobody combines, then one that is; two micro-batches in flight; two
#: layers of different shapes.
FORMS = ("plain", "twice", "overlapped", "shapes")


class RecordingOrder:
    """A order that runs what it is given at once and keeps it, so that it can be run again."""

    capturing = False
    stream = None
    #: What is run meanwhile is not kept.
    eager = False

    @property
    def capture(self) -> int | None:
        """There is one."""
        return 1 if self.capturing else None

    def __init__(self) -> None:
        self.launches: list[Callable[[], None]] = []
        self.captures = 0
        # a graph has a memory pool of its own, in which what was freed while it was captured stays as it was
        self._kept: list[torch.Tensor] = []

    def operation(
        self, previous: EventOverlap | None, *, own_stream: bool
    ) -> contextlib.AbstractContextManager[None, bool | None]:
        """See ``StreamOrder``."""
        return contextlib.nullcontext()

    def run(
        self, launch: Callable[[], None], tensors: Sequence[torch.Tensor], *, own_stream: bool, finish: bool
    ) -> EventOverlap:
        """See ``StreamOrder``."""
        if not self.eager:
            self.launches.append(launch)
            self._kept.extend(tensors)
            self.captures += 1
        launch()
        return EventOverlap()

    def compute(self, work: Callable[[], None]) -> None:
        """What the engine computes between communication."""
        self.run(work, (), own_stream=False, finish=True)

    def replay(self) -> None:
        """Run everything again, without the host's code around it."""
        for launch in self.launches:
            launch()


class _Batch:
    """One micro-batch on tensors that stay where they are."""

    def __init__(self, case: ll_cases.Case, rank: int, device: torch.device) -> None:
        self.case, self._rank = case, rank
        given = case.inputs()[rank]
        self.x, self.ids, self.weights = (one.to(device) for one in (given.x, given.topk_idx, given.topk_weights))
        local = case.experts // case.ranks
        self.y = torch.zeros(local, case.ranks * case.tokens, case.hidden, dtype=case.dtype, device=device)
        self._factors = 1 + 0.25 * (torch.arange(local, device=device) + rank * local).float()
        self.out = torch.zeros_like(self.x)

    def load(self, seed: int) -> list[ll_cases.LowLatencyInput]:
        """Put the tokens of another case into the same tensors; every rank's inputs."""
        inputs = ll_cases.Case(**{**self.case.__dict__, "seed": seed}).inputs()
        given = inputs[self._rank]
        for kept, new in ((self.x, given.x), (self.ids, given.topk_idx), (self.weights, given.topk_weights)):
            kept.copy_(new)
        return inputs

    def dispatch(self, buffer: Buffer) -> tuple[Any, Any, Callable[[], None]]:
        """(rows, handle, hook)."""
        case = self.case
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            self.x,
            self.ids,
            case.tokens,
            case.experts,
            use_fp8=False,
            topk_weights=self.weights if case.reduced else None,
            return_recv_hook=True,
        )
        assert hook is not None
        return rows, handle, hook

    def experts(self, rows: torch.Tensor) -> None:
        """The test's experts, into a tensor that stays."""
        self.y.copy_(rows.float() * self._factors[:, None, None])

    def combine(self, buffer: Buffer, handle: Any) -> Callable[[], None]:
        """The hook."""
        _, _, hook = buffer.low_latency_combine(
            self.y, self.ids, self.weights, handle, out=self.out, return_recv_hook=True
        )
        assert hook is not None
        return hook


class Layer:
    """What a graph holds, in one of :data:`FORMS`.

    Args:
        compute: runs what is no kernel of ours, so that a replay runs it again.
    """

    def __init__(
        self,
        buffer: Buffer,
        form: str,
        device: torch.device,
        compute: Callable[[Callable[[], None]], None] = lambda work: work(),
    ) -> None:
        ranks = buffer.group_size
        case = ll_cases.Case(ranks=ranks, tokens=4, experts=2 * ranks, topk=2, hidden=128, counts=(4, 3))
        cases = [case]
        if form == "overlapped":
            cases += [dataclasses.replace(case, reduced=False)]
        elif form == "shapes":
            cases += [ll_cases.Case(ranks=ranks, tokens=3, experts=4 * ranks, topk=3, hidden=256, counts=(1, 3))]
            for one in cases:
                buffer.reserve_low_latency(
                    one.tokens, one.hidden, one.experts, one.topk, use_fp8=False, with_topk_weights=True
                )
        self.batches = [_Batch(one, buffer.rank, device) for one in cases]
        self._buffer, self._form, self._compute = buffer, form, compute

    def run(self) -> None:
        """Launch everything once."""
        if self._form == "shapes":
            for batch in self.batches:
                self._layer(batch)
            return
        if self._form == "twice":
            self.batches[0].dispatch(self._buffer)[2]()
        sent = [batch.dispatch(self._buffer) for batch in self.batches]
        hooks = []
        for batch, (rows, handle, hook) in zip(self.batches, sent, strict=True):
            hook()
            self._compute(lambda batch=batch, rows=rows: batch.experts(rows))  # type: ignore[misc]
            hooks.append(batch.combine(self._buffer, handle))
        for hook in hooks[::-1]:
            hook()

    def _layer(self, batch: _Batch) -> None:
        rows, handle, hook = batch.dispatch(self._buffer)
        hook()
        self._compute(lambda: batch.experts(rows))
        batch.combine(self._buffer, handle)()

    def check(self, replay: Callable[[], None], times: int) -> None:
        """Replay with other tokens each time, and hold every result against the oracle."""
        for turn in range(times):
            inputs = [batch.load(100 * turn + place) for place, batch in enumerate(self.batches)]
            replay()
            for batch, given in zip(self.batches, inputs, strict=True):
                ll_cases.check_combined(batch.case, given, self._buffer.rank, batch.out.cpu())
