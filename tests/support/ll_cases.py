"""Low-latency cases: random routing of every awkward kind, run on a group of ranks and verified against the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.bits import check_bits
from uccl_ep_serving.modes.low_latency_cpu import LowLatency
from uccl_ep_serving.oracle import (
    LowLatencyInput,
    LowLatencyReceived,
    calc_diff,
    dequantise_fp8,
    low_latency_combine,
    low_latency_dispatch,
    quantise_fp8,
    unpack_ue8m0,
)


@dataclass(frozen=True)
class Case:
    """Sizes and formats of one dispatch and combine.

    ``counts``: tokens per rank, cycled. ``routing``: "random", "none" (all -1), "holes" (some -1), "one" (everybody
    chooses expert 0), "last" (the last one), "far" (only experts of the next rank), "twice" (an expert named twice),
    "same" (one expert in every slot).
    ``fnuz``: FP8 as gfx942 has it, whose largest value is 240. ``deterministic``: an expert's rows by source rank.
    """

    ranks: int = 2
    tokens: int = 8
    hidden: int = 128
    experts: int = 8
    topk: int = 4
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    round_scale: bool = False
    ue8m0: bool = False
    reduced: bool = True
    counts: tuple[int, ...] = (8,)
    routing: str = "random"
    seed: int = 0
    fnuz: bool = False
    deterministic: bool = False

    def inputs(self) -> list[LowLatencyInput]:
        """Every rank's tokens."""
        generator = torch.Generator().manual_seed(self.seed)
        return [self._input(rank, generator) for rank in range(self.ranks)]

    def _input(self, rank: int, generator: torch.Generator) -> LowLatencyInput:
        count = min(self.counts[rank % len(self.counts)], self.tokens)
        x = torch.randn(count, self.hidden, generator=generator)
        x = (x * torch.exp(2 * torch.randn(count, 1, generator=generator))).to(self.dtype)
        scores = torch.rand(count, self.experts, generator=generator)
        local = self.experts // self.ranks
        if self.routing == "far":
            first = (rank + 1) % self.ranks * local
            scores[:, first : first + local] += 2
        ids = scores.topk(self.topk, dim=1).indices
        if self.routing == "holes":
            ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
        elif self.routing == "none":
            ids[:] = -1
        elif self.routing == "one":
            ids[:] = -1
            ids[:, self.topk - 1] = 0
        elif self.routing == "last":
            ids[:] = -1
            ids[:, 0] = self.experts - 1
        elif self.routing == "twice" and self.topk > 1:
            ids[:, -1] = ids[:, 0]
        elif self.routing == "same":
            ids[:] = ids[:, :1]
        return LowLatencyInput(x, ids, torch.rand(count, self.topk, generator=generator))

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of the dispatch."""
        return {
            "use_fp8": self.fp8,
            "round_scale": self.round_scale or self.ue8m0,
            "use_ue8m0": self.ue8m0,
        }


CASE = Case(ranks=2, tokens=8, hidden=128, experts=8, topk=4)


def arguments(case: Case = CASE, rank: int = 0) -> dict[str, Any]:
    """Arguments of a good dispatch."""
    given = case.inputs()[rank]
    return {
        "x": given.x,
        "topk_idx": given.topk_idx,
        "num_max_dispatch_tokens_per_rank": case.tokens,
        "num_experts": case.experts,
        "topk_weights": given.topk_weights,
        "use_fp8": False,
    }


def quantised(case: Case, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values and scales of rows, as the case's device has them."""
    rounded = case.round_scale or case.ue8m0
    if not case.fnuz:
        return quantise_fp8(x, rounded)
    blocks = x.float().unflatten(1, (-1, 128))
    amax = blocks.abs().amax(dim=2).clamp(min=1e-4)
    scale = amax * (torch.tensor(1.0) / torch.tensor(240.0))
    factor = torch.tensor(240.0) / amax
    if rounded:
        scale = torch.exp2(torch.log2(scale.double()).ceil()).float()
        factor = 1 / scale
    return (blocks * factor.unsqueeze(2)).clamp(-240, 240).flatten(1).to(torch.float8_e4m3fnuz), scale


def expert_output(x: torch.Tensor, rank: int) -> torch.Tensor:
    """What the test's experts make of their rows: each expert scales by a factor of its own."""
    factors = 1 + 0.25 * (torch.arange(x.shape[0]) + rank * x.shape[0]).float()
    return (x.float() * factors[:, None, None]).to(x.dtype)


def row_order(
    case: Case, src_info: torch.Tensor, layout_range: torch.Tensor, want: LowLatencyReceived
) -> list[torch.Tensor]:
    """For each local expert, where the rows stand that the oracle has by source rank and token: each source's are
    together, and nothing is between or in both of two."""
    ends, counts = (layout_range & 0xFFFFFFFF) + (layout_range >> 32), layout_range & 0xFFFFFFFF
    assert torch.equal(counts, want.layout_range & 0xFFFFFFFF)
    order = []
    for expert, number in enumerate(want.count.tolist()):
        parts = [
            torch.arange(int(end - count), int(end)) for end, count in zip(ends[expert], counts[expert], strict=True)
        ]
        if not case.deterministic:
            parts = [part[src_info[expert, part].argsort(stable=True)] for part in parts]
        order.append(torch.cat(parts))
        assert torch.equal(order[-1].sort().values, torch.arange(number))
    return order


def check_received(case: Case, rows: Any, count: torch.Tensor, handle: Any, want: LowLatencyReceived) -> None:
    """Dispatch must be bit-exact, its FP8 values and scales included."""
    assert torch.equal(count, want.count)
    src_info, layout_range, tokens, hidden, experts = handle
    assert (tokens, hidden, experts) == (case.tokens, case.hidden, case.experts)
    if case.deterministic:
        assert torch.equal(layout_range, want.layout_range)
    order = row_order(case, src_info, layout_range, want)
    capacity = case.ranks * case.tokens
    if case.fp8:
        values, scales = rows
        groups = case.hidden // (512 if case.ue8m0 else 128)
        assert scales.shape == (want.x.shape[0], capacity, groups)
        assert scales.stride() == (groups * capacity, 1, capacity)
        assert scales.dtype == (torch.int32 if case.ue8m0 else torch.float32)
    else:
        values = rows
        assert values.dtype == case.dtype
    assert values.shape == (want.x.shape[0], capacity, case.hidden)
    for expert, rows_here in enumerate(want.sources):
        number = len(rows_here)
        at = order[expert]
        assert torch.equal(src_info[expert, at], want.src_info[expert, :number])
        sent = want.x[expert, :number]
        if not case.fp8:
            check_bits(f"rows of local expert {expert}", values[expert], sent, at)
            continue
        codes, factors = quantised(case, sent)
        check_bits(f"rows of local expert {expert}", values[expert], codes, at)
        got = scales[expert, at]
        assert torch.equal(unpack_ue8m0(got.contiguous()) if case.ue8m0 else got, factors)


def received_values(case: Case, rows: Any, count: torch.Tensor) -> torch.Tensor:
    """Rows as the experts see them, in the case's dtype; unused rows are NaN so that reading one shows."""
    values = (dequantise_fp8(*rows) if case.fp8 else rows).to(case.dtype)
    result = torch.full_like(values, float("nan"))
    for expert, number in enumerate(count.tolist()):
        result[expert, :number] = values[expert, :number]
    return result


def weights_at_dispatch(case: Case, given: LowLatencyInput) -> torch.Tensor | None:
    """The weights, when the case returns reduced rows."""
    return given.topk_weights if case.reduced else None


def mode_of(buffer: Any) -> Any:
    """Low latency of a ``Buffer``, under the names that are called here."""
    return SimpleNamespace(
        reserve=buffer.reserve_low_latency, dispatch=buffer.low_latency_dispatch, combine=buffer.low_latency_combine
    )


def run_rank(case: Case, low_latency: LowLatency, rank: int, inputs: list[LowLatencyInput]) -> torch.Tensor:
    """One dispatch and combine of ``rank``; dispatch is checked here, the combined tokens are returned."""
    given = inputs[rank]
    rows, count, handle, event, hook = low_latency.dispatch(
        given.x,
        given.topk_idx,
        case.tokens,
        case.experts,
        topk_weights=weights_at_dispatch(case, given),
        deterministic=case.deterministic,
        **case.options,
    )
    assert hook is None
    event.current_stream_wait()
    check_received(case, rows, count, handle, low_latency_dispatch(inputs, rank, case.tokens, case.experts))
    y = expert_output(received_values(case, rows, count), rank)
    combined, _, _ = low_latency.combine(y, given.topk_idx, given.topk_weights, handle)
    return combined


def expected_combined(case: Case, inputs: list[LowLatencyInput], rank: int) -> torch.Tensor:
    """The oracle's combined tokens of ``rank``, from what FP8 leaves of the inputs."""
    if case.fp8:
        seen = [
            LowLatencyInput(
                dequantise_fp8(*quantised(case, given.x)).to(case.dtype),
                given.topk_idx,
                given.topk_weights,
            )
            for given in inputs
        ]
    else:
        seen = inputs
    received = [low_latency_dispatch(seen, peer, case.tokens, case.experts) for peer in range(case.ranks)]
    outputs = [expert_output(one.x, peer) for peer, one in enumerate(received)]
    return low_latency_combine(seen[rank], rank, outputs, received, case.reduced)


def exact_combined(case: Case, given: LowLatencyInput) -> torch.Tensor:
    """float64 of what combine approximates: the unquantised tokens through the experts."""
    factors = (1 + 0.25 * given.topk_idx.double()) * (given.topk_idx >= 0)
    return given.x.double() * (factors * given.topk_weights.double()).sum(dim=1, keepdim=True)


def check_combined(case: Case, inputs: list[LowLatencyInput], rank: int, combined: torch.Tensor) -> None:
    """Bit-exact against the oracle's order of summation, and within DeepEP's tolerances of the exact value."""
    check_bits(f"combined tokens of rank {rank}", combined, expected_combined(case, inputs, rank))
    tolerance = 9e-4 if case.fp8 else 1e-5
    assert calc_diff(combined, exact_combined(case, inputs[rank])) < tolerance


def reserve(low_latency: Any, case: Case) -> None:
    """Room for ``case`` in the windows, and its kernels: nothing is rebuilt while something is in flight."""
    low_latency.reserve(
        case.tokens,
        case.hidden,
        case.experts,
        case.topk,
        dtype=case.dtype,
        with_topk_weights=case.reduced,
        **case.options,
    )
