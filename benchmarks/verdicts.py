"""Whether verdicts of ``uccl-ep compare`` hold: the same comparison again and again, of equals, and of five percent.

    python benchmarks/verdicts.py

Writes results/verdicts.json, a quarter of an hour on a machine with nothing else to do. Ours, gloo and MPI are compared
at 2, 4 and 8 ranks, three times each: no verdict may turn round. Then two backends are opened three times each, the
third made five percent slower; tests/compare/test_statistics.py takes its samples, start by start, from the result.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.bench.report import markdown_table
from uccl_ep_serving.cli.compare import run_standalone
from uccl_ep_serving.compare.directory import read_starts
from uccl_ep_serving.compare.plan import Plan, given
from uccl_ep_serving.compare.results import LAYER, assemble

__all__ = ["markdown", "measure"]

RANKS, TIMES = (2, 4, 8), 3
_REPEATED = ("uccl_ep", "gloo", "mpi")
#: Opened three times each.
EQUALS, PERCENT = ("uccl_ep:shm", "gloo"), 5.0
_RESULT = Path(__file__).parent / "results" / "verdicts.json"
#: Of a start.
_SECONDS = 120.0


def measure() -> dict[str, Any]:
    """Everything. Raises RankFailed, ConfigError."""
    machine = describe()
    repeated = []
    for ranks in RANKS:
        card = Card(name="compare", mode="low-latency", ranks=ranks, tokens=64, iterations=12, warmup=5, repeat=4)
        for time in range(TIMES):
            print(f"verdicts: {ranks} ranks, {time + 1} of {TIMES}", file=sys.stderr, flush=True)
            verdicts = _compared(Plan(card, _REPEATED, starts=3))["verdicts"]
            repeated.append({"ranks": ranks, "verdicts": [one for one in verdicts if one["phase"] == LAYER]})
    print("verdicts: equals, and five percent", file=sys.stderr, flush=True)
    card = Card(
        name="compare", mode="low-latency", ranks=2, tokens=16, hidden=1024, experts=8, topk=2,
        iterations=30, warmup=5, repeat=3,
    )  # fmt: skip
    names = tuple(name for name in EQUALS for _ in range(3))
    plan = Plan(card, names, starts=12, slowed={f"{name}#3": PERCENT for name in EQUALS})
    slowest = _compared(plan)["slowest_us"]
    return {
        "machine": machine,
        "repeated": repeated,
        "equals": {"plan": plan.as_dict(), "us": {name: slowest[name][LAYER] for name in plan.backends}},
    }


def _compared(plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="uccl-ep-verdicts-") as scratch:
        directory = Path(scratch, "starts")
        run_standalone(plan, directory, _SECONDS)
        return assemble(plan, read_starts(directory, plan, given), directory)


def markdown(result: Mapping[str, Any]) -> str:
    """What each comparison said of ours beside each other backend."""
    found: dict[tuple[int, str], list[str]] = {}
    for one in result["repeated"]:
        for verdict in one["verdicts"]:
            found.setdefault((one["ranks"], verdict["b"]), []).append(verdict["words"])
    rows: Sequence[Sequence[str]] = [[str(ranks), other, *words] for (ranks, other), words in found.items()]
    times = ["first", "second", "third"]
    return markdown_table(["ranks", "ours beside", *times], rows)


if __name__ == "__main__":
    _RESULT.write_text(json.dumps(measure(), separators=(",", ":")) + "\n")
