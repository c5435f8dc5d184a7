"""DeepEP's second interface, ``ElasticBuffer``: no layout call, and rows in an order of its own.

Normal mode: a dispatch waits for the counts on the host, as engines do for a prefill, and delivers rows once per
(token, rank) with ids, weights and the rows of each expert as a list. A combine sums rows without weights.

Low-latency mode: as SGLang decodes, without waiting on the host: a dispatch delivers a row once per (token, expert),
each with its weight, expert by expert at multiples of 128 rows, with counts on the device. The experts apply the
weights, and a combine sums a rank's rows of a token before one of them returns.

fp8 rows are quantised by the caller: they come quantised in normal mode, as all backends get them there. In low-latency
mode other backends quantise on the way; this one would need a kernel of the engine, and is not compared.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
import torch.distributed as dist

from uccl_ep_serving.bench import peers
from uccl_ep_serving.bench.any_order import CLOSE, AnyOrderFlat
from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.problem import FlatProblem, LowLatencyProblem, WrongData, compare
from uccl_ep_serving.bench.subjects import EXPERTS, Phases, Subject, finish, read
from uccl_ep_serving.compare.backends.installed import lacks, not_importable

__all__ = ["open_deepep_v2", "why_not_deepep_v2"]

_ALIGNMENT = 128
#: As of DeepEP 2.1.0 (deep_ep/buffers/elastic.py).
SIGNATURES = {
    "ElasticBuffer.__init__": (
        *("group", "num_max_tokens_per_rank", "hidden", "num_topk", "use_fp8_dispatch", "explicitly_destroy"),
    ),
    "ElasticBuffer.dispatch": (
        *("x", "topk_idx", "topk_weights", "num_experts", "expert_alignment", "do_cpu_sync", "do_expand"),
    ),
    "ElasticBuffer.combine": ("x", "handle"),
}


def why_not_deepep_v2(card: Card) -> str:
    """Why DeepEP's second interface cannot run in this process, "" when it can."""
    if importlib.util.find_spec("deep_ep") is None:
        return "deep_ep is not installed"
    if card.dtype not in ("bf16", "fp8"):
        return f"it has no {card.dtype} rows"
    if card.dtype == "fp8" and card.mode == "low-latency":
        return "it does not quantise: compare it with bf16, or fp8 in normal mode"
    return peers.gpus_missing(card) or not_importable("deep_ep") or lacks("deep_ep", SIGNATURES)


class ElasticNormal(AnyOrderFlat):
    """Its normal mode."""

    def __init__(self, name: str, buffer: Any, problem: FlatProblem, device: torch.device) -> None:
        super().__init__(name, problem, device, len(problem.outputs[0]))
        self._buffer, self._handle = buffer, None

    def _dispatch(self, variant: int) -> None:
        x: Any = (self._x[variant], self._x_scales[variant]) if self._x_scales else self._x[variant]
        received, self._chosen, self._told, self._handle, _ = self._buffer.dispatch(
            x,
            topk_idx=self._ids,
            topk_weights=self._weights,
            num_experts=self._problem.card.experts,
            do_cpu_sync=True,
        )
        self._rows, self._scales = received if isinstance(received, tuple) else (received, None)
        finish(self._device)

    def _combine(self, variant: int) -> None:
        self._combined, _, _ = self._buffer.combine(self._out, handle=self._handle)
        finish(self._device)

    def _positions(self) -> torch.Tensor:
        handle: Any = self._handle
        source: torch.Tensor = handle.recv_src_metadata[:, 0]
        return source.cpu().long()

    def check(self, variant: int) -> float:
        handle: Any = self._handle
        self._counts = list(handle.num_recv_tokens_per_expert_list)
        return super().check(variant)

    def close(self) -> None:
        super().close()
        self._handle = None
        self._buffer.destroy()


class ElasticLowLatency:
    """Its expanded mode, as it decodes."""

    def __init__(self, name: str, buffer: Any, problem: LowLatencyProblem, device: torch.device) -> None:
        self.name = name
        self._problem, self._buffer, self._device = problem, buffer, device
        self._x = [one.to(device) for one in problem.x]
        self._y = [one.to(device) for one in problem.outputs]
        self._ids = problem.routing.topk_idx[problem.rank].to(device)
        self._weights = problem.routing.topk_weights[problem.rank].to(device)
        self._received: Any = None
        self._told: Any = None
        self._handle: Any = None
        self._combined: Any = None
        # as many rows as a dispatch delivers, which is known after the first
        self._out: Any = None

    @property
    def phases(self) -> Phases:
        return {"dispatch": self._dispatch, EXPERTS: self._experts, "combine": self._combine}

    def _dispatch(self, variant: int) -> None:
        self._received, _, self._told, self._handle, _ = self._buffer.dispatch(
            self._x[variant],
            topk_idx=self._ids,
            topk_weights=self._weights,
            num_experts=self._problem.card.experts,
            expert_alignment=_ALIGNMENT,
            do_cpu_sync=False,
            do_expand=True,
        )
        finish(self._device)

    def _order(self) -> list[torch.Tensor]:
        """int64 [n] by local expert: where its rows lie, by source rank, then token."""
        handle = self._handle
        ends = handle.psum_num_recv_tokens_per_expert.tolist()
        rows = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        metadata = handle.recv_src_metadata[:rows].cpu().long()
        places = metadata[:, 2:]
        source = torch.full((len(self._received),), -1)
        source[places[places >= 0]] = metadata[:, :1].expand_as(places)[places >= 0]
        order, begin = [], 0
        for end in ends:
            order.append(begin + source[begin:end].argsort())
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        return order

    def _experts(self, variant: int) -> None:
        if self._out is None:
            self._out = torch.full_like(self._received, torch.nan)
        for expert, order in enumerate(self._order()):
            where = order.to(self._device)
            weighted = self._y[variant][expert, : len(order)].float() * self._told[where][:, None]
            self._out[where] = weighted.to(self._out.dtype)
        finish(self._device)

    def _combine(self, variant: int) -> None:
        self._combined, _, _ = self._buffer.combine(self._out, handle=self._handle)
        finish(self._device)

    def touch(self, phase: str, variant: int) -> None:
        if phase == "dispatch":
            read(self._x[variant])

    def check(self, variant: int) -> float:
        problem, who = self._problem, f"{self.name}: dispatch, local expert"
        order = self._order()
        counts = [len(one) for one in order]
        if counts != problem.counts.tolist():
            raise WrongData(f"{self.name}: dispatch: counts {counts}, the oracle has {problem.counts.tolist()}")
        first = problem.rank * len(order)
        for expert, places in enumerate(order):
            where = places.to(self._device)
            compare(f"{who} {expert}", self._received[where].cpu(), problem.received[variant][expert])
            expected = [
                weights[(ids == first + expert)]
                for ids, weights in zip(problem.routing.topk_idx, problem.routing.topk_weights, strict=True)
            ]
            compare(f"{who} {expert}, weights", self._told[where].cpu()[:, None], torch.cat(expected)[:, None])
        worst = problem.check_combine(self.name, variant, self._combined.cpu(), CLOSE)
        self._received = self._combined = None
        return worst

    def close(self) -> None:
        self._received = self._told = self._handle = self._combined = None
        self._buffer.destroy()


def open_deepep_v2(
    name: str, card: Card, flat: FlatProblem, low_latency: LowLatencyProblem | None, device: torch.device
) -> Subject:
    """Its buffer, sized for the card. Collective."""
    deep_ep: Any = importlib.import_module("deep_ep")
    group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
    buffer = deep_ep.ElasticBuffer(
        group,
        num_max_tokens_per_rank=card.tokens,
        hidden=card.hidden,
        num_topk=card.topk,
        use_fp8_dispatch=card.dtype == "fp8",
        explicitly_destroy=True,
    )
    if low_latency is None:
        return ElasticNormal(name, buffer, flat, device)
    return ElasticLowLatency(name, buffer, low_latency, device)
