"""What a benchmark moves and what must come out: inputs of every rank, and the oracle's answer for this one.

Each call of a benchmark gets one of :data:`VARIANTS` inputs with the same routing. Three of them against buffers that
alternate between two parities: data left over from an earlier call never looks like this call's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from uccl_ep_serving import oracle as reference
from uccl_ep_serving.bench.card import DTYPES, Card
from uccl_ep_serving.bench.routing import Routing

__all__ = ["TOLERANCE", "VARIANTS", "FlatProblem", "LowLatencyProblem", "WrongData", "compare", "payload", "sent_rows"]

VARIANTS = 3
#: Largest calc_diff of a combine against the oracle, as in DeepEP's own tests of normal mode.
TOLERANCE = 5e-6
#: Bytes of oracle rows held at once; the oracle works on slices of the hidden size that keep to it.
_ORACLE_BYTES = 256 << 20
_SLICE_STEP = 512


class WrongData(AssertionError):
    """What came out is not what the oracle says."""


def compare(what: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.0) -> float:
    """Distance of ``actual`` from ``expected``: 0 when all bits agree, else their calc_diff.

    Raises:
        WrongData: another shape or dtype, or a distance above ``tolerance``; names the first row that differs.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise WrongData(
            f"{what}: got {actual.dtype}{list(actual.shape)}, the oracle has {expected.dtype}{list(expected.shape)}"
        )
    bits, wanted = payload(actual), payload(expected)
    if torch.equal(bits, wanted):
        return 0.0
    difference = reference.calc_diff(actual.float(), expected.float()) if tolerance else math.inf
    if not difference <= tolerance:  # also when it is not a number
        row = int((bits != wanted).any(dim=1).nonzero()[0, 0])
        raise WrongData(f"{what}: row {row} of {len(bits)} is not the oracle's (distance {difference:.3g})")
    return difference


def payload(rows: torch.Tensor) -> torch.Tensor:
    """Rows [n, ...] as bytes, uint8 [n, bytes of a row]."""
    return rows.contiguous().view(torch.uint8).flatten(1)


def sent_rows(problem: FlatProblem) -> list[torch.Tensor]:
    """By variant, a dispatch's rows as they travel: the bytes of the values, then of the scales if there are any."""
    rows = [payload(x) for x in problem.x]
    scales = [payload(one) for one in problem.scales]
    return [torch.cat(both, dim=1) for both in zip(rows, scales, strict=True)] if scales else rows


def _tokens(card: Card, rank: int, variant: int) -> torch.Tensor:
    """Unquantised tokens [T, H] of a rank: bfloat16 where the card says fp8."""
    generator = torch.Generator().manual_seed(card.seed * 4096 + rank + (1 << 40))
    dtype = torch.bfloat16 if card.dtype == "fp8" else getattr(torch, DTYPES[card.dtype])
    x = torch.randn(card.tokens, card.hidden, generator=generator).to(dtype)
    return x.roll(variant, dims=1).contiguous()


class FlatProblem:
    """Rows once per (token, rank), sorted by source rank and token: normal mode, and what the peers move.

    Attributes:
        x[v]: [T, H] of this rank, in the card's dtype (fp8: e4m3 codes). scales[v]: float32 [T, H / 128], fp8 only.
        received[v]: the rows that must arrive, received_scales[v] theirs.
        outputs[v]: [N, H] what this rank's experts return for them.
        combined[v]: [T, H] what must come back.
        delivered: the oracle's routing, by destination rank.
        send_tokens[r]: int64, tokens that go to rank r. recv_rows[r]: rows that come from it.
    """

    def __init__(self, card: Card, routing: Routing, rank: int) -> None:
        self.card, self.routing, self.rank = card, routing, rank
        self.delivered = reference.normal_dispatch(routing.topk_idx, routing.topk_weights, card.experts)
        self.send_tokens = [there.token[there.source == rank] for there in self.delivered]
        self.recv_rows = [int((self.delivered[rank].source == source).sum()) for source in range(card.ranks)]
        self.x: list[torch.Tensor] = []
        self.scales: list[torch.Tensor] = []
        self.received: list[torch.Tensor] = []
        self.received_scales: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.combined: list[torch.Tensor] = []
        for variant in range(VARIANTS):
            self._add(variant)

    def _add(self, variant: int) -> None:
        tokens = [_tokens(self.card, rank, variant) for rank in range(self.card.ranks)]
        here = self.delivered[self.rank]
        if self.card.dtype == "fp8":
            quantised = [reference.quantise_fp8(one) for one in tokens]
            self.x.append(quantised[self.rank][0])
            self.scales.append(quantised[self.rank][1])
            codes = here.rows([one.view(torch.uint8) for one, _ in quantised])
            self.received.append(codes.view(torch.float8_e4m3fn))
            self.received_scales.append(here.rows([scales for _, scales in quantised]))
        else:
            self.x.append(tokens[self.rank])
            self.received.append(here.rows(tokens))
        outputs = [self._expert(there.rows(tokens), peer) for peer, there in enumerate(self.delivered)]
        self.outputs.append(outputs[self.rank])
        self.combined.append(reference.normal_combine(outputs, self.delivered, self.rank, self.card.tokens))

    @staticmethod
    def _expert(rows: torch.Tensor, rank: int) -> torch.Tensor:
        """What the experts of ``rank`` make of their rows: something that tells ranks apart."""
        return rows.mul_(1 + 0.5 * rank)

    def check_dispatch(self, who: str, variant: int, rows: torch.Tensor, scales: torch.Tensor | None) -> float:
        """Compare received rows and scales with the oracle's, bit for bit."""
        if self.card.dtype == "fp8":
            if scales is None:
                raise WrongData(f"{who}: dispatch: fp8 rows came without scales")
            compare(f"{who}: dispatch, scales", scales, self.received_scales[variant])
        return compare(f"{who}: dispatch", rows, self.received[variant])

    def check_combine(self, who: str, variant: int, combined: torch.Tensor) -> float:
        """Compare combined tokens with the oracle's."""
        return compare(f"{who}: combine", combined, self.combined[variant], TOLERANCE)


class LowLatencyProblem:
    """Rows once per (token, expert) in DeepEP's layout [L, R * T, H].

    Attributes:
        x[v]: [T, H] of this rank, unquantised. counts: int32 [L], rows of each local expert.
        received[v]: one tensor per local expert: the rows that must arrive, codes with fp8; received_scales[v] theirs.
        outputs[v]: [L, R * T, H] what the experts return; NaN where there is no row, so that reading one shows.
        combined[v]: [T, H] what must come back.
    """

    def __init__(self, card: Card, routing: Routing, rank: int) -> None:
        self.card, self.routing, self.rank = card, routing, rank
        self.counts = torch.empty(0, dtype=torch.int32)
        self.x: list[torch.Tensor] = []
        self.received: list[list[torch.Tensor]] = []
        self.received_scales: list[list[torch.Tensor]] = []
        self.outputs: list[torch.Tensor] = []
        self.combined: list[torch.Tensor] = []
        for variant in range(VARIANTS):
            self._add(variant)

    def _add(self, variant: int) -> None:
        card, rank = self.card, self.rank
        given = [
            reference.LowLatencyInput(_tokens(card, peer, variant), ids, weights)
            for peer, (ids, weights) in enumerate(zip(self.routing.topk_idx, self.routing.topk_weights, strict=True))
        ]
        self.x.append(given[rank].x)
        arrived = reference.low_latency_dispatch(given, rank, card.tokens, card.experts)
        self.counts = arrived.count
        rows = [arrived.x[expert, :count] for expert, count in enumerate(arrived.count.tolist())]
        if card.dtype == "fp8":
            coded = [reference.quantise_fp8(one) for one in rows]
            self.received.append([codes for codes, _ in coded])
            self.received_scales.append([scales for _, scales in coded])
            rows = [reference.dequantise_fp8(*one).to(arrived.x.dtype) for one in coded]
        else:
            self.received.append([one.clone() for one in rows])
        outputs = torch.full_like(arrived.x, math.nan)
        factors = self._factors(rank)
        for expert, one in enumerate(rows):
            outputs[expert, : len(one)] = (one.float() * factors[expert]).to(outputs.dtype)
        self.outputs.append(outputs)
        self.combined.append(self._combine(given))

    def _factors(self, rank: int) -> torch.Tensor:
        """float32 [L]: what each expert of ``rank`` multiplies by."""
        local = self.card.experts // self.card.ranks
        return 1 + 0.125 * (torch.arange(local) + rank * local).float()

    def _combine(self, given: Sequence[reference.LowLatencyInput]) -> torch.Tensor:
        """The oracle's combined tokens, computed slice by slice of the hidden size to bound memory."""
        card = self.card
        column = card.ranks * card.experts * card.tokens * given[0].x.element_size()
        width = max(_ORACLE_BYTES // column // _SLICE_STEP, 1) * _SLICE_STEP
        slices = []
        for first in range(0, card.hidden, width):
            part = [
                reference.LowLatencyInput(self._seen(one.x[:, first : first + width]), one.topk_idx, one.topk_weights)
                for one in given
            ]
            received = [
                reference.low_latency_dispatch(part, peer, card.tokens, card.experts) for peer in range(card.ranks)
            ]
            outputs = [
                (one.x.float() * self._factors(peer)[:, None, None]).to(one.x.dtype)
                for peer, one in enumerate(received)
            ]
            slices.append(
                reference.low_latency_combine(
                    part[self.rank], self.rank, outputs, received, reduced=card.weights_at_dispatch
                )
            )
        return torch.cat(slices, dim=1)

    def _seen(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` as the experts see it: with fp8, what quantising leaves."""
        if self.card.dtype != "fp8":
            return x
        return reference.dequantise_fp8(*reference.quantise_fp8(x.contiguous())).to(x.dtype)

    def check_dispatch(
        self, who: str, variant: int, rows: torch.Tensor, scales: torch.Tensor | None, counts: torch.Tensor
    ) -> float:
        """Compare received rows [L, R * T, H], scales and counts with the oracle's, bit for bit."""
        if not torch.equal(counts, self.counts):
            raise WrongData(f"{who}: dispatch: counts {counts.tolist()}, the oracle has {self.counts.tolist()}")
        for expert, expected in enumerate(self.received[variant]):
            compare(f"{who}: dispatch, local expert {expert}", rows[expert, : len(expected)], expected)
            if self.card.dtype == "fp8":
                if scales is None:
                    raise WrongData(f"{who}: dispatch: fp8 rows came without scales")
                there = self.received_scales[variant][expert]
                compare(f"{who}: dispatch, scales of local expert {expert}", scales[expert, : len(there)], there)
        return 0.0

    def check_combine(self, who: str, variant: int, combined: torch.Tensor, tolerance: float = 0.0) -> float:
        """Compare combined tokens with the oracle's, bit for bit: its order of summation is ours, and documented.

        Args:
            tolerance: of who sums in another order: the largest calc_diff.
        """
        return compare(f"{who}: combine", combined, self.combined[variant], tolerance)
