"""From the starts of a comparison to one result: figures, verdicts, and what must be known before they are believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from uccl_ep_serving.compare.directory import start_file
from uccl_ep_serving.compare.names import GIVEN_ROWS
from uccl_ep_serving.compare.plan import Plan
from uccl_ep_serving.compare.statistics import CANNOT_TELL, LEVEL, compare_paired
from uccl_ep_serving.compare.workload_card import workload_card

__all__ = ["FORMAT", "LAYER", "assemble", "busy"]

FORMAT = "uccl-ep compare 1"
#: All phases of a rank together: what a layer of a model waits for.
LAYER = "layer"
#: Load average per core, beyond that of ranks that ran before, above which something else was running.
_BUSY = 0.5

Start = Mapping[str, Any]
_Slowest = dict[str, dict[str, list[list[float]]]]


def _slowest(starts: Sequence[Start], names: Sequence[str]) -> _Slowest:
    """Microseconds of the slowest rank by backend, phase, start and round; :data:`LAYER` first."""
    found: _Slowest = {}
    for name in names:
        by_phase: dict[str, list[list[float]]] = {LAYER: []}
        for start in starts:
            phases = {phase: np.asarray(ranks) for phase, ranks in start["samples_us"][name].items()}
            by_phase[LAYER].append(sum(phases.values()).max(axis=0).tolist())  # type: ignore[union-attr]
            for phase, ranks in phases.items():
                by_phase.setdefault(phase, []).append(ranks.max(axis=0).tolist())
        found[name] = by_phase
    return found


def _figures(samples: Sequence[Sequence[float]]) -> dict[str, float]:
    everything = np.concatenate([np.asarray(one) for one in samples])
    p10, median, p90, p99 = np.percentile(everything, (10, 50, 90, 99))
    return {"median": float(median), "p10": float(p10), "p90": float(p90), "p99": float(p99)}


def _together(starts: Sequence[Start], field: str) -> dict[str, str]:
    """By backend, what any start says of it in ``field``."""
    return {name: text for start in reversed(starts) for name, text in start[field].items()}


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """The first beside every other one, and every backend beside itself where it was opened twice."""
    equals = [(Plan.backend_of(name), name) for name in names[1:] if "#" in name]
    pairs = [(names[0], name) for name in names[1:]] + [pair for pair in equals if pair[0] in names]
    return list(dict.fromkeys(pairs))


def assemble(plan: Plan, starts: Sequence[Start], directory: Path) -> dict[str, Any]:
    """One result, plain values.

    ``verdicts`` compare the first backend that was measured with every other one, phase by phase; ``us`` are of the
    slowest rank; ``doubts`` are those of the caveats for which figures are not kept as advice; ``cards`` are workload
    cards of CCL-Bench; ``starts`` are all that was kept, samples included.
    """
    skipped, wrong = _together(starts, "skipped"), _together(starts, "wrong")
    names = [name for name in plan.backends if all(name in start["samples_us"] for start in starts)]
    slowest = _slowest(starts, names)
    reference = names[0] if names else ""
    verdicts = [
        {"a": a, "b": b, "phase": phase, **compare_paired(slowest[a][phase], theirs).as_dict()}
        for a, b in _pairs(names)
        for phase, theirs in slowest[b].items()
        if phase in slowest[a]
    ]
    doubts = _doubts(plan, starts, verdicts)
    card = plan.as_dict()["card"]
    files = [start_file(directory, number).name for number in range(1, plan.starts + 1)]
    paths = {name: starts[0]["paths"].get(name, "") for name in names}
    us = {name: {phase: _figures(one) for phase, one in slowest[name].items()} for name in names}
    return {
        "format": FORMAT,
        "plan": plan.as_dict(),
        "level": LEVEL,
        "reference": reference,
        "measured": names,
        "skipped": skipped,
        "wrong": wrong,
        "paths": paths,
        "us": us,
        "verdicts": verdicts,
        "caveats": _caveats(plan, starts, verdicts) + doubts,
        "doubts": doubts,
        "moved": {name: starts[0]["moved"][name] for name in names},
        "cards": {name: workload_card(card, starts[0], name, paths[name], files, us[name]) for name in names},
        "slowest_us": slowest,
        "starts": list(starts),
    }


def _wrong_paths(starts: Sequence[Start]) -> list[str]:
    """Where bytes of ours did not go as the name of the backend or its path says, one sentence each."""
    said = []
    for name, path in _together(starts, "paths").items():
        ways = {start["paths"][name] for start in starts if name in start["paths"]}
        if len(ways) > 1:
            said.append(f"{name} went over {' in one start, over '.join(sorted(ways))} in another.")
        wanted = Plan.backend_of(name).partition(":")[2]
        if wanted and path not in (wanted, "alone"):
            said.append(f"{name} went over {path}.")
        sent = [start["moved"][name].get("bytes_sent") for start in starts if name in start["moved"]]
        if any((one == 0) != (path in ("direct", "alone")) for one in sent if one is not None):
            said.append(f"{name} is said to go over {path}, but its proxies sent {sent[0]:,.0f} bytes a layer.")
    return said


def _caveats(plan: Plan, starts: Sequence[Start], verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader would get wrong without being told, one sentence each."""
    said = []
    for name, percent in (plan.slowed or {}).items():
        said.append(f"{name} was made {percent:g} % slower on purpose (--inject): its figures are not its own.")
    machines = starts[0]["machines"]
    if starts[0]["devices"] != ["cuda"]:
        said.append("The ranks were processes on CPUs: this says nothing about GPUs.")
    else:
        said.append(
            "No call was replayed from a CUDA graph, as an engine's decode is: where tokens are few, launching is a "
            "part of every figure."
        )
    if len(machines) == 1:
        said.append("All ranks ran on one host: no network was used, so this says nothing about a cluster.")
    commits = {one["commit"] for start in starts for one in start["machines"]}
    if any(one.endswith("+") for one in commits):
        said.append("The sources differed from their commit: nobody else can repeat this.")
    if len({one["cpu"] for start in starts for one in start["machines"]}) > 1:
        said.append("The hosts differ in their processors.")
    if any(one["phase"] == LAYER and one["words"].startswith(CANNOT_TELL) for one in verdicts):
        said.append(f'Where it says "{CANNOT_TELL}": more --starts or --rounds, or less that runs beside it.')
    return said


def busy(machines: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> str:
    """Whether something else was running before a start, in words; "" where not.

    Args:
        machines: by start, what it was on.
        ranks: by start, how many had run there before: a later start finds what they have left in the average.
    """
    loads = [one["load"][0] / one["cores"] for one in machines]
    over = [load - before / one["cores"] for load, before, one in zip(loads, ranks, machines, strict=True)]
    number = int(np.argmax(over))
    if over[number] <= _BUSY:
        return ""
    return f"The load before start {number + 1} was {loads[number]:.1f} per core: something else was running."


def _doubts(plan: Plan, starts: Sequence[Start], verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why figures speak of something else than the backends by themselves, one sentence each."""
    said = _wrong_paths(starts)
    machines = starts[0]["machines"]
    crowded = [one for one in machines if len(one["ranks"]) > one["cores"] and starts[0]["devices"] != ["cuda"]]
    if crowded:
        said.append(
            f"{len(crowded[0]['ranks'])} ranks shared {crowded[0]['cores']} cores: these are times of waiting for a "
            "core, which differ from those of ranks with cores of their own in size and in order."
        )
    for number in range(len(machines)):
        here = [start["machines"][number] for start in starts]
        said += filter(None, [busy(here, [0, *(len(one["ranks"]) for one in here[:-1])])])
    again = [one for one in verdicts if Plan.backend_of(one["b"]) == Plan.backend_of(one["a"])]
    if any(one["direction"] for one in again if not {one["a"], one["b"]} & set(plan.slowed or {})):
        said.append("A direction was seen between a backend and itself: do not trust differences of that size here.")
    others = sorted(name for name in starts[0]["samples_us"] if Plan.backend_of(name) in GIVEN_ROWS)
    if others and plan.card.mode == "low-latency" and plan.card.dtype == "fp8":
        said.append(f"{', '.join(others)} got rows in FP8; the others quantise them inside of what is timed.")
    return said
