"""What ``make kernel-faults`` (tests/ptx/faults) has found, as tables: faults by kind, and what nothing notices."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from uccl_ep_serving.bench.report import markdown_table

__all__ = ["EQUIVALENT", "NOTICED", "REFUTED", "UNEXPLAINED", "UNNOTICED", "UNREACHED", "markdown"]

#: How a fault ends.
NOTICED, EQUIVALENT = "noticed", "equivalent"
UNREACHED, UNNOTICED, REFUTED = "NOT REACHED", "UNNOTICED", "REFUTED"
#: Those that are a failure of the proof: no run comes to it, or none fails, or one does against a sentence.
UNEXPLAINED = (UNREACHED, UNNOTICED, REFUTED)
_HEADINGS = ("taken away", "faults", "change nothing", "noticed", "by the first run", "UNNOTICED")


def _row(kind: str, faults: Sequence[Mapping[str, Any]]) -> list[str]:
    ends = collections.Counter(one["end"] for one in faults)
    first = sum(one["end"] == NOTICED and one["trials"] == 1 for one in faults)
    unexplained = sum(ends[end] for end in UNEXPLAINED)
    counts = (len(faults), ends[EQUIVALENT], ends[NOTICED], first, unexplained)
    return [kind, *map(str, counts)]


def markdown(result: Mapping[str, Any]) -> str:
    """A row per kind, then why some change nothing, and what nothing has noticed."""
    faults = result["faults"]
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for one in faults:
        kinds.setdefault(one["kind"], []).append(one)
    rows = [_row(kind, group) for kind, group in sorted(kinds.items())]
    parts = [
        f"{len(faults)} faults in the PTX of low latency's kernels, each what one line of the source became, on the "
        "model machine with weak memory.",
        markdown_table(_HEADINGS, [*rows, _row("all", faults)]),
    ]
    reasons = collections.Counter(one["by"] for one in faults if one["end"] == EQUIVALENT)
    if reasons:
        parts.append("Change nothing:\n\n" + "\n".join(f"* {count}: {why}" for why, count in reasons.most_common()))
    errors = collections.Counter(one["by"] for one in faults if one["end"] == NOTICED)
    if errors:
        parts.append("Noticed as: " + ", ".join(f"{error} {count}" for error, count in errors.most_common()) + ".")
    if left := [one for one in faults if one["end"] in UNEXPLAINED]:
        lines = [f"* {one['kernel']}: the {one['kind']} of {one['source']}" for one in left]
        parts.append("UNNOTICED:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)
