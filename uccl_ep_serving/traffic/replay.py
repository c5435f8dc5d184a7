"""Routing for other ranks and numbers of tokens out of a trace: of one moment of one layer, on all ranks together.

What makes a route heavy for a rank is that all ranks choose its experts at once. So every rank of a replay gets what
was chosen in the same step of the same layer, which is drawn; another seed draws another one.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

from ..errors import ConfigError
from .trace import MODES, Ids, Trace

__all__ = ["replay"]


def replay(trace: Trace, ranks: int, tokens: int, mode: str, seed: int) -> list[torch.Tensor]:
    """Routing int64 [tokens, K] for each of ``ranks``; the same for the same ``seed``.

    From whole dispatches of ``mode``: rank i takes consecutive tokens of recorded rank i (modulo the recorded ones,
    then the tokens after those), from the step that is drawn on, through later ones of the same layer, and over the end
    to the beginning. Tokens that chose fewer than K experts are padding and left out. From histograms, which do not
    tell modes apart: K different experts for each token, by the counts of a layer that is drawn.

    Raises:
        ConfigError: the trace has nothing of ``mode``, no token of a rank, or fewer than K experts that were chosen.
    """
    generator = torch.Generator().manual_seed(seed)
    if not trace.counts:
        raise ConfigError(
            "the routing trace holds no dispatch, so there is nothing to replay. Next step: record while requests are "
            "served"
        )
    if not trace.steps:
        layer = sorted(trace.counts)[_one_of(len(trace.counts), generator)]
        return [_drawn(trace, layer, tokens, generator) for _ in range(ranks)]
    recorded = sorted(trace.steps)
    rows = _moments(trace, mode)
    most = max(sum(map(len, by_rank.values())) for by_rank in rows.values())
    # a step in which ranks idled, or whose file was cut off, says less than one in which all took part
    full = [moment for moment, by_rank in rows.items() if len(by_rank) == len(recorded)]
    moments = sorted(full or [one for one, by_rank in rows.items() if sum(map(len, by_rank.values())) == most])
    layer, step = moments[_one_of(len(moments), generator)]
    return [
        _consecutive(rows, layer, step, recorded[rank % len(recorded)], rank // len(recorded), tokens)
        for rank in range(ranks)
    ]


def _one_of(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (1,), generator=generator))


def _moments(trace: Trace, mode: str) -> dict[tuple[int, int], dict[int, Ids]]:
    """Tokens of dispatches in ``mode`` by (layer, step) and recording rank, none without any. Raises ConfigError."""
    found: dict[tuple[int, int], dict[int, Ids]] = defaultdict(dict)
    of_mode = False
    for rank, records in trace.steps.items():
        for one in records:
            if MODES[one.mode] == mode:
                of_mode = True
                if len(ids := one.ids[(one.ids >= 0).all(axis=1)]):
                    found[one.layer, one.step][rank] = ids
    if not of_mode:
        raise ConfigError(
            f"the routing trace has no dispatch in {mode} mode. Next step: --mode of the one that was recorded, or "
            "record while requests are served in this one"
        )
    if not found:
        raise ConfigError(
            f"the routing trace has no token with all its {trace.topk} experts, so there is nothing to replay. Next "
            "step: record while requests are served"
        )
    return found


def _consecutive(
    rows: dict[tuple[int, int], dict[int, Ids]], layer: int, step: int, rank: int, turn: int, tokens: int
) -> torch.Tensor:
    """The ``turn``-th ``tokens`` of recorded ``rank`` from ``step`` of ``layer`` on."""
    mine = sorted(moment for moment, by_rank in rows.items() if moment[0] == layer and rank in by_rank)
    if not mine:
        raise ConfigError(
            f"the routing trace has no token of rank {rank} in layer {layer}, so there is nothing to replay there. "
            "Next step: record while requests are served"
        )
    order = [moment for moment in mine if moment[1] >= step] + [moment for moment in mine if moment[1] < step]
    whole = np.concatenate([rows[moment][rank] for moment in order]).astype(np.int64)
    return torch.from_numpy(whole[(np.arange(tokens) + turn * tokens) % len(whole)])


def _drawn(trace: Trace, layer: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    counts = trace.counts[layer]
    chosen = int((counts > 0).sum())
    if chosen < trace.topk:
        raise ConfigError(
            f"the routing trace counts {chosen} experts that layer {layer} ever chose, and each token needs "
            f"{trace.topk}. Next step: record while requests are served"
        )
    if not tokens:
        return torch.empty(0, trace.topk, dtype=torch.int64)
    weights = torch.from_numpy(counts).double().expand(tokens, -1)
    return torch.multinomial(weights, trace.topk, generator=generator)
