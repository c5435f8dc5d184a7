"""Who chose which expert: drawn evenly, with a skew, or from what an engine was seen to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from uccl_ep_serving.bench.card import TRACE, ZIPF, Card
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.traffic import trace
from uccl_ep_serving.traffic.replay import replay

__all__ = ["Routing", "check_trace", "trace_digest"]


@dataclass(frozen=True)
class Routing:
    """Who chose what. topk_idx[r] int64 [T, K], topk_weights[r] float32 [T, K], for every rank r."""

    topk_idx: list[torch.Tensor]
    topk_weights: list[torch.Tensor]

    @classmethod
    def draw(cls, card: Card) -> Routing:
        """By ``card.route``: drawn for each rank with a generator of its own, or replayed for all together.

        Raises:
            ConfigError: a trace that cannot be read, or of other experts or another top-k than the card's.
        """
        ids, weights = [], []
        kind, _, what = card.route.partition(":")
        recorded = _replayed(card, what) if kind == TRACE else None
        # of expert e, before the noise that makes a draw of K without replacement (the Gumbel trick)
        popularity = _zipf(card, float(what)) if kind == ZIPF else torch.zeros(card.experts)
        for rank in range(card.ranks):
            generator = torch.Generator().manual_seed(card.seed * 4096 + rank)
            if recorded is not None:
                ids.append(recorded[rank])
                scores = torch.rand(card.tokens, card.topk, generator=generator).sort(dim=1, descending=True).values
            elif kind == ZIPF:
                uniform = torch.rand(card.tokens, card.experts, generator=generator).clamp_(1e-12, 1 - 1e-7)
                top = (popularity - torch.log(-torch.log(uniform))).topk(card.topk, dim=1)
                ids.append(top.indices)
                scores = top.values
            else:
                top = torch.rand(card.tokens, card.experts, generator=generator).topk(card.topk, dim=1)
                ids.append(top.indices)
                scores = top.values
            weights.append(torch.softmax(scores, dim=1))
        return cls(ids, weights)


def _zipf(card: Card, exponent: float) -> torch.Tensor:
    """float32 [E], logarithms of popularity: that of the i-th most popular expert falls as i to the ``exponent``.

    Which expert is the i-th is drawn with the card's seed, as a model spreads its hot experts over the ranks.
    """
    order = torch.randperm(card.experts, generator=torch.Generator().manual_seed(card.seed * 4096 + (1 << 41)))
    popularity = torch.empty(card.experts)
    popularity[order] = -exponent * torch.log(torch.arange(1, card.experts + 1).float())
    return popularity


def _named(what: str) -> tuple[str, int | None]:
    """The path and the layer of ``FILE[:LAYER]``."""
    path, _, layer = what.rpartition(":")
    # a file may have a colon in its name, and a layer is a number
    return (path, int(layer)) if path and layer.isdigit() and not Path(what).exists() else (what, None)


def trace_digest(card: Card) -> str:
    """Of the files that ``card.route`` names; "" for a route that is no trace. Raises ConfigError."""
    kind, _, what = card.route.partition(":")
    return trace.digest(_named(what)[0]) if kind == TRACE else ""


def check_trace(card: Card) -> None:
    """Raise ConfigError where ``card.route`` is a trace that :meth:`Routing.draw` cannot replay."""
    kind, _, what = card.route.partition(":")
    if kind == TRACE:
        _replayed(card, what)


def _replayed(card: Card, what: str) -> list[torch.Tensor]:
    """By rank, what ``trace:FILE[:LAYER]`` names. Raises ConfigError."""
    found = trace.load(*_named(what))
    if (found.experts, found.topk) != (card.experts, card.topk):
        raise ConfigError(
            f"card {card.name}: the trace {what} is of top-{found.topk} of {found.experts} experts, the card of "
            f"top-{card.topk} of {card.experts}. Next step: --experts {found.experts} --topk {found.topk}"
        )
    return replay(found, card.ranks, card.tokens, card.mode, card.seed)
