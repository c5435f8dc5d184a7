"""What ``make chaos`` (tests/chaos) has found, as tables: its faults by kind and path, and each that did not hold."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from uccl_ep_serving.bench.report import markdown_table

__all__ = ["markdown"]

_HEADINGS = ("fault", "path", "trials", "failed", "raised, ms", "most", "first good operation, ms", "most")


def _figures(values: Sequence[float]) -> list[str]:
    return [f"{statistics.median(values):,.0f}", f"{max(values):,.0f}"] if values else ["", ""]


def _row(kind: str, path: str, trials: Sequence[Mapping[str, Any]]) -> list[str]:
    failed = sum(bool(one["wrong"]) for one in trials)
    figures = [[value for one in trials for value in one[name]] for name in ("raise_ms", "good_ms")]
    return [kind, path, str(len(trials)), str(failed), *_figures(figures[0]), *_figures(figures[1])]


def _failure(one: Mapping[str, Any]) -> str:
    return f"* seed {one['seed']}, {one['kind']}, {one['path']}: {one['wrong'][0].splitlines()[0]}"


def markdown(result: Mapping[str, Any]) -> str:
    """A row per kind and path, then the seeds that failed."""
    trials = result["trials"]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in trials:
        groups.setdefault((one["kind"], one["path"]), []).append(one)
    rows = [_row(kind, path, group) for (kind, path), group in sorted(groups.items())]
    parts = [
        f"{len(trials)} seeded faults of groups of 3 to 6 ranks, with a deadline of 1.5 s. Milliseconds of each "
        "survivor: from the fault to its error, and to its first operation with right data without the lost ranks.",
        markdown_table(_HEADINGS, [*rows, _row("all", "", trials)]),
    ]
    if failed := [one for one in trials if one["wrong"]]:
        parts.append("Did not hold:\n\n" + "\n".join(map(_failure, failed)))
    return "\n\n".join(parts)
