"""What is measured: a Buffer (ours, or DeepEP's, whose interface ours has) in either mode, and bare memory copies."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from uccl_ep_serving.bench.problem import FlatProblem, LowLatencyProblem, WrongData, compare, payload, sent_rows

__all__ = [
    "EXPERTS",
    "LowLatencySubject",
    "MemcpySubject",
    "NormalSubject",
    "Phases",
    "Subject",
    "UnpackSubject",
    "finish",
    "read",
    "timed",
]

Phases = Mapping[str, Callable[[int], None]]
"""By name, what is timed; called with the number of the input variant, in this order."""


#: The phase that stands for the experts: whoever delivers rows in an order of its own has what returns laid out in that
#: order. It is not timed, and runs only before a combine whose result is verified.
EXPERTS = "experts"


class Subject(Protocol):
    """Something to measure on one rank."""

    #: As it is called in tables.
    name: str

    @property
    def phases(self) -> Phases:
        """What is timed."""

    def touch(self, phase: str, variant: int) -> None:
        """Read what ``phase`` will send, as if it had just been computed."""

    def check(self, variant: int) -> float:
        """Compare the results of the latest phases, all called with ``variant``, with the oracle's.

        Returns:
            The largest distance; 0 = every bit agrees.

        Raises:
            WrongData: they differ.
        """

    def close(self) -> None:
        """Release what is held. Collective."""


def timed(subject: Subject) -> list[str]:
    """The phases of ``subject`` that are timed, in their order."""
    return [name for name in subject.phases if name != EXPERTS]


def read(*rows: torch.Tensor) -> None:
    """Bring contiguous rows into the caches, as far as they fit. Rows on a GPU are left where they are."""
    for one in rows:
        if one.device.type == "cpu":
            one.flatten().view(torch.int64).sum()


def _take_apart(rows: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    values, scales = rows if isinstance(rows, tuple) else (rows, None)
    return values.cpu(), None if scales is None else scales.cpu()


def finish(device: torch.device) -> None:
    """Wait for ``device``: a phase is over when its data is there."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _BufferSubject:
    """What both modes share: a DeepEP-compatible ``buffer``, this rank's tensors on ``device``, what came out last."""

    def __init__(self, name: str, buffer: Any, problem: FlatProblem | LowLatencyProblem, device: torch.device) -> None:
        self.name, self.buffer = name, buffer
        self._device = device
        self._y = [one.to(device) for one in problem.outputs]
        self._ids = problem.routing.topk_idx[problem.rank].to(device)
        self._weights = problem.routing.topk_weights[problem.rank].to(device)
        self._received: Any = None
        self._handle: Any = None
        self._combined: Any = None

    def close(self) -> None:
        self._received = self._combined = self._handle = None
        self.buffer.destroy()


class NormalSubject(_BufferSubject):
    """Normal mode of a DeepEP-compatible ``buffer`` on tensors of ``device``.

    The layout is computed outside the timed dispatch and timed as a phase of its own; the exchange of counts is inside.
    A layer begins with the layout, and what the layer before returned is dropped then, as in an engine: the collectives
    write to one place in every call, and so the next call may land where the last one did.
    """

    def __init__(self, name: str, buffer: Any, problem: FlatProblem, device: torch.device) -> None:
        super().__init__(name, buffer, problem, device)
        self._problem = problem
        self._x = [self._rows(variant) for variant in range(len(problem.x))]
        self._layout: tuple[Any, ...] = ()

    def _rows(self, variant: int) -> Any:
        x = self._problem.x[variant].to(self._device)
        return (x, self._problem.scales[variant].to(self._device)) if self._problem.scales else x

    @property
    def phases(self) -> Phases:
        return {"layout": self._count, "dispatch": self._dispatch, "combine": self._combine}

    def _count(self, variant: int) -> None:
        self._received = self._combined = None
        self._layout = self.buffer.get_dispatch_layout(self._ids, self._problem.card.experts)
        finish(self._device)

    def _dispatch(self, variant: int) -> None:
        per_rank, per_node, per_expert, in_rank, _ = self._layout
        self._received, _, _, _, self._handle, _ = self.buffer.dispatch(
            self._x[variant],
            topk_idx=self._ids,
            topk_weights=self._weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        finish(self._device)

    def _combine(self, variant: int) -> None:
        self._combined, _, _ = self.buffer.combine(self._y[variant], self._handle)
        finish(self._device)

    def touch(self, phase: str, variant: int) -> None:
        read(self._problem.x[variant] if phase == "dispatch" else self._y[variant])

    def check(self, variant: int) -> float:
        rows, scales = _take_apart(self._received)
        worst = self._problem.check_dispatch(self.name, variant, rows, scales)
        worst = max(worst, self._problem.check_combine(self.name, variant, self._combined.cpu()))
        # room for the next call: rows are leased from the window for as long as they are kept
        self._received = self._combined = None
        return worst


class LowLatencySubject(_BufferSubject):
    """Low-latency mode of a DeepEP-compatible ``buffer``.

    An expert's rows stand by the order in which sources came, another one in each call: they are brought into the
    oracle's order when they are verified, and what the experts return is laid out in theirs.

    Args:
        weights_at_dispatch: pass ``topk_weights=`` to the dispatch, which only our Buffer takes.
    """

    def __init__(
        self, name: str, buffer: Any, problem: LowLatencyProblem, device: torch.device, weights_at_dispatch: bool
    ) -> None:
        super().__init__(name, buffer, problem, device)
        self._problem = problem
        self._x = [one.to(device) for one in problem.x]
        self._options: dict[str, Any] = {"topk_weights": self._weights} if weights_at_dispatch else {}
        self._counts: Any = None
        # NaN where there is no row, so that reading one shows
        self._out = torch.full_like(self._y[0], math.nan)

    @property
    def phases(self) -> Phases:
        return {"dispatch": self._dispatch, EXPERTS: self._experts, "combine": self._combine}

    def _dispatch(self, variant: int) -> None:
        card = self._problem.card
        self._received, self._counts, self._handle, _, _ = self.buffer.low_latency_dispatch(
            self._x[variant],
            self._ids,
            card.tokens,
            card.experts,
            use_fp8=card.dtype == "fp8",
            **self._options,
        )
        finish(self._device)

    def _order(self) -> list[torch.Tensor]:
        """int64 [n] by local expert: where its rows lie, by source rank, then token."""
        info, ranges = (one.cpu() for one in self._handle[:2])
        tokens, places = self._problem.card.tokens, torch.arange(info.shape[1])
        order = []
        for source, expert in zip(info, ranges.tolist(), strict=True):
            parts = []
            for packed in expert:
                begin, count = packed >> 32, packed & 0xFFFFFFFF
                here = places[begin : begin + count]
                # some count tokens of all ranks on
                parts.append(here[(source[here] % tokens).argsort()])
            order.append(torch.cat(parts))
        return order

    def _experts(self, variant: int) -> None:
        for expert, order in enumerate(self._order()):
            self._out[expert, order.to(self._device)] = self._y[variant][expert, : len(order)]
        finish(self._device)

    def _combine(self, variant: int) -> None:
        self._combined, _, _ = self.buffer.low_latency_combine(self._out, self._ids, self._weights, self._handle)
        finish(self._device)

    def touch(self, phase: str, variant: int) -> None:
        # the experts' output is mostly unused rows: reading all of it would only push other things out
        if phase == "dispatch":
            read(self._x[variant])

    def check(self, variant: int) -> float:
        rows, scales = (None if one is None else one.clone() for one in _take_apart(self._received))
        assert rows is not None
        for expert, order in enumerate(self._order()):
            rows[expert, : len(order)] = rows[expert, order]
            if scales is not None:
                scales[expert, : len(order)] = scales[expert, order]
        worst = self._check_rows(variant, rows, scales, self._counts.cpu())
        worst = max(worst, self._check_combined(variant, self._combined.cpu()))
        self._received = self._combined = None
        return worst

    def _check_rows(self, variant: int, rows: torch.Tensor, scales: torch.Tensor | None, counts: torch.Tensor) -> float:
        return self._problem.check_dispatch(self.name, variant, rows, scales, counts)

    def _check_combined(self, variant: int, combined: torch.Tensor) -> float:
        return self._problem.check_combine(self.name, variant, combined)


class MemcpySubject:
    """The bound: every byte that a rank sends is copied once, by libc's memcpy, all ranks at the same time.

    Dispatch copies the rows for each destination rank (this one included), combine the rows to return. Nothing is
    gathered, waited for or summed.
    """

    name = "memcpy"

    def __init__(self, problem: FlatProblem) -> None:
        self._problem = problem
        width = problem.card.row_bytes
        self._x = sent_rows(problem)
        self._sizes = [len(tokens) * width for tokens in problem.send_tokens]
        # written once: page faults are not part of the bound
        self._sent = torch.zeros(sum(self._sizes), dtype=torch.uint8)
        self._returned = torch.zeros_like(payload(problem.outputs[0]))

    @property
    def phases(self) -> Phases:
        return {"dispatch": self._dispatch, "combine": self._combine}

    def _dispatch(self, variant: int) -> None:
        target, source = self._sent.data_ptr(), self._x[variant].data_ptr()
        for size in self._sizes:
            ctypes.memmove(target, source, size)
            target += size

    def _combine(self, variant: int) -> None:
        ctypes.memmove(self._returned.data_ptr(), self._problem.outputs[variant].data_ptr(), self._returned.numel())

    def touch(self, phase: str, variant: int) -> None:
        read(self._problem.x[variant] if phase == "dispatch" else self._problem.outputs[variant])

    def check(self, variant: int) -> float:
        first = 0
        for size in self._sizes:
            if not torch.equal(self._sent[first : first + size], self._x[variant].flatten()[:size]):
                raise WrongData("memcpy: dispatch: the copy differs from its source")
            first += size
        if not torch.equal(self._returned, payload(self._problem.outputs[variant])):
            raise WrongData("memcpy: combine: the copy differs from its source")
        return 0.0

    def close(self) -> None:
        self._sent = self._returned = torch.empty(0, dtype=torch.uint8)


class UnpackSubject:
    """The bound of DeepEP's low-latency layout: a row stands in it once for each local expert that wants it.

    Dispatch writes those copies of rows that have arrived, combine reads what the experts return for them. Nothing is
    sent, waited for, quantised or summed.
    """

    name = "unpack"

    def __init__(self, flat: FlatProblem, problem: LowLatencyProblem) -> None:
        self._problem = problem
        chosen = flat.delivered[flat.rank].topk_idx
        self._order = torch.cat([(chosen == e).any(dim=1).nonzero().flatten() for e in range(len(problem.counts))])
        self._arrived = [payload(rows) for rows in flat.received]
        self._rows = torch.zeros(len(self._order), self._arrived[0].shape[1], dtype=torch.uint8)

    @property
    def phases(self) -> Phases:
        return {"dispatch": self._dispatch, "combine": self._combine}

    def _dispatch(self, variant: int) -> None:
        torch.index_select(self._arrived[variant], 0, self._order, out=self._rows)

    def _combine(self, variant: int) -> None:
        for expert, count in zip(self._problem.outputs[variant], self._problem.counts.tolist(), strict=True):
            read(expert[:count])

    def touch(self, phase: str, variant: int) -> None:
        if phase == "dispatch":
            read(self._arrived[variant])

    def check(self, variant: int) -> float:
        expected = torch.cat([payload(rows) for rows in self._problem.received[variant]])
        return compare("unpack: dispatch", self._rows, expected)

    def close(self) -> None:
        self._rows = torch.empty(0, dtype=torch.uint8)
