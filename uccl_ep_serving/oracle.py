"""A torch oracle of both modes: dispatch and combine computed from all ranks' inputs at once, for tests and for doubt.

Nothing here is fast or shares code with the kernels. Orders of summation are the documented ones, so results agree bit
for bit where the kernels promise it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = [
    "LowLatencyInput",
    "LowLatencyReceived",
    "NormalReceived",
    "calc_diff",
    "dequantise_fp8",
    "in_rank",
    "low_latency_combine",
    "low_latency_dispatch",
    "normal_combine",
    "normal_combine_weights",
    "normal_dispatch",
    "quantise_fp8",
    "unpack_ue8m0",
]

#: Values per scale, floor of the largest absolute value, and largest e4m3 value: DeepEP's constants.
_BLOCK, _AMAX_FLOOR, _E4M3_MAX = 128, 1e-4, 448.0


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """``1 - 2<x, y> / (|x|^2 + |y|^2)`` in float64: 0 when equal, the measure of DeepEP's own tests.

    Two tensors of zeros (or of no elements) are equal.
    """
    a, b = x.double(), y.double()
    size = float((a * a + b * b).sum())
    return 1 - 2 * float((a * b).sum()) / size if size else 0.0


def quantise_fp8(x: torch.Tensor, round_scale: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Block-scaled e4m3 of ``x`` [n, H], H a multiple of 128.

    Returns:
        e4m3 values [n, H], and float32 scales [n, H / 128] by which they are multiplied to get ``x`` back. With
        ``round_scale`` scales are powers of two, rounded up.
    """
    blocks = x.float().unflatten(1, (-1, _BLOCK))
    amax = blocks.abs().amax(dim=2).clamp(min=_AMAX_FLOOR)
    scale = amax * (torch.tensor(1.0) / torch.tensor(_E4M3_MAX))
    factor = torch.full_like(amax, _E4M3_MAX) / amax
    if round_scale:
        bits = scale.view(torch.int32)
        bits = torch.where(bits & 0x7FFFFF != 0, ((bits >> 23) + 1) << 23, bits)
        scale = bits.view(torch.float32)
        factor = torch.ones_like(scale) / scale
    values = (blocks * factor.unsqueeze(2)).clamp(-_E4M3_MAX, _E4M3_MAX).flatten(1)
    return values.to(torch.float8_e4m3fn), scale


def unpack_ue8m0(packed: torch.Tensor) -> torch.Tensor:
    """Packed UE8M0 scales int32 [..., H / 512] as float32 [..., H / 128]; the lowest byte is the first scale."""
    exponents = torch.stack([packed >> shift & 0xFF for shift in (0, 8, 16, 24)], dim=-1).flatten(-2)
    return (exponents << 23).to(torch.int32).view(torch.float32)


def dequantise_fp8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 of e4m3 ``values`` [..., H] with ``scales``, float32 [..., H / 128] or packed int32 [..., H / 512]."""
    if scales.dtype == torch.int32:
        scales = unpack_ue8m0(scales.contiguous())
    return values.float() * scales.repeat_interleave(_BLOCK, dim=-1)


# -- low latency ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LowLatencyInput:
    """One rank's tokens.

    Attributes:
        x: [tokens, H]. topk_idx: int64 [tokens, K], -1 = no expert.
        topk_weights: float32 [tokens, K].
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True)
class LowLatencyReceived:
    """What one rank's experts receive.

    Attributes:
        sources: per local expert, the (source rank, token) of each row, in row order.
        x: [L, R * T, H], the rows as they were sent, zero where there is none.
        count: int32 [L]. src_info: int32 [L, R * T], -1 where there is no row.
        layout_range: int64 [L, R], begin << 32 | count.
    """

    sources: list[list[tuple[int, int]]]
    x: torch.Tensor
    count: torch.Tensor
    src_info: torch.Tensor
    layout_range: torch.Tensor


def low_latency_dispatch(inputs: Sequence[LowLatencyInput], rank: int, tokens: int, experts: int) -> LowLatencyReceived:
    """What ``rank`` of ``len(inputs)`` receives, T = ``tokens``: rows by source rank, then token; each token once."""
    ranks = len(inputs)
    local = experts // ranks
    x = torch.zeros(local, ranks * tokens, inputs[0].x.shape[1], dtype=inputs[0].x.dtype)
    src_info = torch.full((local, ranks * tokens), -1, dtype=torch.int32)
    layout_range = torch.zeros(local, ranks, dtype=torch.int64)
    sources: list[list[tuple[int, int]]] = []
    for index in range(local):
        rows: list[tuple[int, int]] = []
        for source, given in enumerate(inputs):
            begin = len(rows)
            chosen = (given.topk_idx == rank * local + index).any(dim=1)
            rows += [(source, int(token)) for token in chosen.nonzero().flatten()]
            layout_range[index, source] = begin << 32 | (len(rows) - begin)
        for place, (source, token) in enumerate(rows):
            x[index, place] = inputs[source].x[token]
            src_info[index, place] = token
        sources.append(rows)
    count = torch.tensor([len(rows) for rows in sources], dtype=torch.int32)
    return LowLatencyReceived(sources, x, count, src_info, layout_range)


def low_latency_combine(
    given: LowLatencyInput,
    rank: int,
    outputs: Sequence[torch.Tensor],
    received: Sequence[LowLatencyReceived],
    reduced: bool,
) -> torch.Tensor:
    """Combined tokens of ``rank``.

    Args:
        outputs: of every rank, the experts' output [L, R * T, H] in the layout of what they received.
        reduced: True when the weights were given at dispatch: each rank sums its experts' rows of a token in slot
            order and rounds to the rows' dtype, then ranks are summed in ascending order. False: one sum over slots.

    Returns:
        [tokens, H] in the outputs' dtype.
    """
    dtype, local = outputs[0].dtype, outputs[0].shape[0]
    places = [
        {key: place for place, key in enumerate(rows)} for one in received for rows in one.sources
    ]  # by global expert
    result = torch.zeros_like(given.x, dtype=dtype)
    for token, ids in enumerate(given.topk_idx.tolist()):
        partial: dict[int, torch.Tensor] = {}
        for slot, expert in enumerate(ids):
            if expert < 0:
                continue
            owner = expert // local
            row = outputs[owner][expert % local, places[expert][rank, token]].float()
            group = owner if reduced else 0
            before = partial.get(group, torch.zeros_like(row))
            partial[group] = before + given.topk_weights[token, slot] * row
        total = torch.zeros(result.shape[1])
        for group in sorted(partial):
            total = total + (partial[group].to(dtype).float() if reduced else partial[group])
        result[token] = total.to(dtype)
    return result


# -- normal mode ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NormalReceived:
    """What one rank receives from a dispatch: its rows sorted by source rank, then by token.

    Attributes:
        source: int64 [N], source rank of each row.
        token: int64 [N], token index at the source.
        topk_idx: int64 [N, K], local expert ids, -1 for experts elsewhere.
        topk_weights: float32 [N, K], 0 where the id is -1.
        expert_counts: rows per local expert, a row counted once for each of its slots there.
    """

    source: torch.Tensor
    token: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    expert_counts: list[int]

    def rows(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """[N, ...]: the rows of ``tensors`` (one per source rank, indexed by token) that arrive."""
        parts = [tensors[rank][self.token[self.source == rank]] for rank in range(len(tensors))]
        return torch.cat(parts)


def in_rank(topk_idx: torch.Tensor, experts: int, ranks: int) -> torch.Tensor:
    """bool [T, R]: the token has an expert on the rank. ``topk_idx`` int64 [T, K], -1 = none."""
    owner = torch.where(topk_idx < 0, -1, topk_idx // (experts // ranks))
    return (owner.unsqueeze(2) == torch.arange(ranks)).any(dim=1)


def normal_dispatch(
    topk_idx: Sequence[torch.Tensor], topk_weights: Sequence[torch.Tensor], experts: int
) -> list[NormalReceived]:
    """What each rank receives when rank r dispatches ``topk_idx[r]`` int64 [T_r, K] and ``topk_weights[r]``."""
    ranks = len(topk_idx)
    local = experts // ranks
    received = []
    for rank in range(ranks):
        sources, tokens, ids, weights = [], [], [], []
        for source in range(ranks):
            chosen = torch.nonzero(in_rank(topk_idx[source], experts, ranks)[:, rank]).flatten()
            local_ids = topk_idx[source][chosen] - rank * local
            mine = (local_ids >= 0) & (local_ids < local) & (topk_idx[source][chosen] >= 0)
            sources.append(torch.full_like(chosen, source))
            tokens.append(chosen)
            ids.append(torch.where(mine, local_ids, -1))
            weights.append(torch.where(mine, topk_weights[source][chosen], 0.0))
        all_ids = torch.cat(ids)
        counts = torch.bincount(all_ids[all_ids >= 0], minlength=local).tolist()
        received.append(NormalReceived(torch.cat(sources), torch.cat(tokens), all_ids, torch.cat(weights), counts))
    return received


def _sum_back(
    parts: Sequence[torch.Tensor], received: Sequence[NormalReceived], source: int, tokens: int
) -> torch.Tensor:
    total = torch.zeros(tokens, parts[0].shape[1], dtype=torch.float32)
    for part, there in zip(parts, received, strict=True):
        back = there.source == source
        total[there.token[back]] += part[: len(there.source)][back].float()
    return total


def normal_combine(
    rows: Sequence[torch.Tensor],
    received: Sequence[NormalReceived],
    source: int,
    tokens: int,
    bias: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """[T, H] that rank ``source`` gets back when rank r returns ``rows[r]`` [N_r, H]: float32 sum, rounded once."""
    total = _sum_back(rows, received, source, tokens)
    for one in bias:
        total += one.float()
    return total.to(rows[0].dtype)


def normal_combine_weights(
    weights: Sequence[torch.Tensor], received: Sequence[NormalReceived], source: int, tokens: int
) -> torch.Tensor:
    """float32 [T, K]: the router weights ``weights[r]`` [N_r, K] summed back at rank ``source``."""
    return _sum_back(weights, received, source, tokens)
