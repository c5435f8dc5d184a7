"""What a comparison leaves for ``UCCL_EP_ADVICE``: ours beside what an engine does without a library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uccl_ep_serving.bench.card import DTYPES, UNIFORM
from uccl_ep_serving.compare.plan import Plan
from uccl_ep_serving.compare.results import LAYER
from uccl_ep_serving.compare.statistics import CANNOT_TELL
from uccl_ep_serving.traffic.advice import Shape, Verdict, store

__all__ = ["ENGINES_COLLECTIVES", "keep", "verdicts_to_keep"]

#: What the engines do where no all-to-all is chosen: all-gather, then reduce-scatter.
ENGINES_COLLECTIVES = ("gloo-gather", "nccl-gather")


def verdicts_to_keep(result: Mapping[str, Any]) -> list[Verdict]:
    """A layer through ours beside each of :data:`ENGINES_COLLECTIVES` that was measured. None of a slowed backend, of a
    routing or of settings of the user's own, of figures that are in doubt, and none that cannot tell."""
    card, first = result["plan"]["card"], result["starts"][0]
    own = [name for name in first["environment"] if name.startswith("UCCL_EP_")]
    if result["doubts"] or card["route"] != UNIFORM or own:
        return []
    shape_of = {
        name: Shape(
            mode=card["mode"],
            ranks=card["ranks"],
            hidden=card["hidden"],
            experts=card["experts"],
            topk=card["topk"],
            dtype=DTYPES[card["dtype"]],
            transport=path,
            device=first["device"],
            tokens=card["tokens"],
        )
        for name, path in result["paths"].items()
        if path
    }
    return [
        Verdict(
            shape=shape_of[one["a"]],
            other=Plan.backend_of(one["b"]),
            ratio=one["ratio"],
            low=one["low"],
            high=one["high"],
            commit=first["machines"][0]["commit"],
            when=first["machines"][0]["when"],
        )
        for one in result["verdicts"]
        if one["phase"] == LAYER
        and one["a"] in shape_of
        and one["b"] in ENGINES_COLLECTIVES
        and not one["words"].startswith(CANNOT_TELL)
        and not {one["a"], one["b"]} & set(result["plan"]["slowed"])
    ]


def keep(result: Mapping[str, Any]) -> None:
    """Keep the verdicts of ``result`` on this machine."""
    verdicts = verdicts_to_keep(result)
    if verdicts:
        store(*verdicts)
