"""From the starts of a comparison of servers to one result: figures, verdicts, whether all answer alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from uccl_ep_serving.compare.directory import lasting
from uccl_ep_serving.compare.plan import Plan
from uccl_ep_serving.compare.results import busy
from uccl_ep_serving.compare.serving.engines import ENGINES
from uccl_ep_serving.compare.serving.plan import ServingPlan
from uccl_ep_serving.compare.statistics import CANNOT_TELL, LEVEL, compare_paired
from uccl_ep_serving.demo.client import Answer, Difference, compare

__all__ = ["COMPARED", "FORMAT", "OURS", "assemble", "given"]

FORMAT = "uccl-ep compare-serving 1"
OURS = "uccl_ep"
"""How the names of our backends begin, in either engine."""

COMPARED = {"tokens_per_second": True, "ttft_ms": False, "tpot_ms": False}
"""The figures that get a verdict, and whether more is better."""


Start = Mapping[str, Any]


def assemble(plan: ServingPlan, starts: Sequence[Start]) -> dict[str, Any]:
    """One result, plain values: ``figures`` by server, ``verdicts`` on the first beside every other, ``answers`` (how
    they differ from those of the yardstick), ``caveats``, and ``starts`` with all that was kept.
    """
    skipped = {name: text for start in reversed(starts) for name, text in start["skipped"].items()}
    measured = [name for name in plan.backends if all(name in start["samples"] for start in starts)]
    yardstick = _yardstick(plan, measured)
    answers = {name: _difference(starts, yardstick, name) for name in measured if name != yardstick}
    wrong = {
        name: _words(one, yardstick)
        for name, one in answers.items()
        # not a number is not within the bound either
        if not one["worst_answer"] <= plan.bound
    }
    names = [name for name in measured if name not in wrong]
    verdicts = [
        {"a": a, "b": b, "figure": figure, **_verdict(starts, a, b, figure, higher)}
        for a, b in _pairs(names)
        for figure, higher in COMPARED.items()
    ]
    return {
        "format": FORMAT,
        "plan": plan.as_dict(),
        "level": LEVEL,
        "yardstick": yardstick,
        "measured": names,
        "skipped": skipped,
        "wrong": wrong,
        "answers": answers,
        "figures": {name: _figures([start["samples"][name] for start in starts]) for name in names},
        "verdicts": verdicts,
        "caveats": _caveats(plan, starts, verdicts, yardstick),
        "starts": list(starts),
    }


def given(start: Start) -> dict[str, Any]:
    """What must be the same in all starts: the machine, versions, variables."""
    return {**lasting(start["machine"]), "versions": start["versions"], "environment": start["environment"]}


def _yardstick(plan: ServingPlan, measured: Sequence[str]) -> str:
    """Whose answers are taken to be right: the engine's own backend where it was measured, else the first that is not
    ours, else the first."""
    own = ENGINES[plan.engine].default[1]
    others = [name for name in measured if not name.startswith(OURS)]
    return next((name for name in (own, *others, *measured) if name in measured), "")


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(names[0], name) for name in names[1:]]


def _verdict(starts: Sequence[Start], a: str, b: str, figure: str, higher: bool) -> dict[str, Any]:
    sides = [[start["samples"][name][figure] for start in starts] for name in (a, b)]
    return compare_paired(sides[0], sides[1], higher_is_better=higher).as_dict()


def _figures(samples: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    """Median, least and most of every round of every start, by figure."""
    found = {}
    for figure in (name for name in samples[0] if all(name in one for one in samples)):
        everything = np.concatenate([np.asarray(one[figure]) for one in samples])
        found[figure] = {
            "median": float(np.median(everything)),
            "least": float(everything.min()),
            "most": float(everything.max()),
        }
    return found


def _answers_of(start: Start, name: str) -> list[Answer]:
    return [
        Answer(one["text"], tuple(one["tokens"]), tuple(one["logprobs"]), tuple(one["top"]))
        for one in start["answers"][name]
    ]


def _difference(starts: Sequence[Start], yardstick: str, name: str) -> dict[str, Any]:
    """How the answers of ``name`` differ from those of ``yardstick``: in the start where they differ most, and, as
    ``worst_answer``, the mean of that answer of any start which differs most, of those whose text does."""
    pairs = [(_answers_of(start, yardstick), _answers_of(start, name)) for start in starts]
    each = [compare([a], [b]) for one, other in pairs for a, b in zip(one, other, strict=True)]
    worst = max((one.mean for one in each if one.equal < one.answers), default=0.0)
    return {**_worst([compare(one, other) for one, other in pairs]), "worst_answer": worst}


def _worst(differences: Sequence[Difference]) -> dict[str, Any]:
    return asdict(max(differences, key=lambda one: (one.answers - one.equal, one.mean)))


def _words(one: Mapping[str, Any], yardstick: str) -> str:
    return (
        f"{one['equal']} of {one['answers']} greedy answers are those of {yardstick}; logprobs of the same tokens "
        f"differ by {one['mean']:.2g} on average, by {one.get('worst_answer', one['mean']):.2g} in the worst answer, "
        f"at most {one['largest']:.2g}"
    )


def _caveats(plan: ServingPlan, starts: Sequence[Start], verdicts: Sequence[Any], yardstick: str) -> list[str]:
    """What a reader would get wrong without being told, one sentence each."""
    said = []
    if not plan.line:
        said.append(
            "A tiny model with random weights on two CPU ranks: this says that everything works, not how fast a model "
            "is served."
        )
    for name, text in plan.extras.items():
        said.append(f"{name} was started with: {text}")
    again = _worst([compare(_answers_of(starts[0], yardstick), _answers_of(start, yardstick)) for start in starts[1:]])
    if again["equal"] < again["answers"] and again["mean"] > plan.bound / 2:
        said.append(f"Two starts of {yardstick} do not answer alike either: {_words(again, 'its first start')}.")
    kept = [start["servers"] for start in starts]
    for name in plan.backends:
        if lines := [line for one in kept if (line := one.get(name, {}).get("fallback"))]:
            said.append(f"The log of {name} speaks of another backend: {lines[0]}")
    ours = [name for name in plan.backends if name.startswith(OURS) and not plan.url]
    silent = [name for name in ours if any(one.get(name, {}).get("buffers") == 0 for one in kept)]
    for name in silent:
        said.append(
            f"No rank of {name} on this host has opened a Buffer: the engine used another all-to-all, or no expert "
            "parallelism at all. Next step: read its log, and the engine's conditions for it (docs/vllm.md)."
        )
    # servers of the start before run on all cores
    machines = [start["machine"] for start in starts]
    said += filter(None, [busy(machines, [0, *(one["cores"] for one in machines[:-1])])])
    if any(start["machine"]["commit"].endswith("+") for start in starts):
        said.append("The sources differed from their commit: nobody else can repeat this.")
    if any(one["direction"] for one in verdicts if Plan.backend_of(one["a"]) == Plan.backend_of(one["b"])):
        unlike = [name for name in plan.extras if "#" in name]
        if not unlike:
            said.append(
                "A direction was seen between a backend and itself: do not trust differences of that size here."
            )
    if any(one["words"].startswith(CANNOT_TELL) for one in verdicts):
        said.append(
            f'Where it says "{CANNOT_TELL}": more --starts, --rounds or --requests, or less that runs beside it.'
        )
    return said
