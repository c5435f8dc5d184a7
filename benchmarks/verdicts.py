"""Whether verdicts of ``uccl-ep compare`` hold: the same comparison again and again, of equals, and of five percent.

    python benchmarks/verdicts.py [repeated] [equals]

Writes both parts, or those that are named, into results/verdicts.json: twelve minutes on a machine with nothing else to
do. ``repeated``: ours, gloo and MPI at 2, 4 and 8 ranks, three times each; no verdict may turn round. ``equals``: two
backends are opened three times each, the third made five percent slower; tests/compare/test_statistics.py takes its
samples, start by start, from the result. Those two need no thread beside the ranks, which have a core each: where
threads share cores, starts differ by more than five percent.
"""

from __future__ import annotations

import argparse
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
from uccl_ep_serving.compare.statistics import compare_paired

__all__ = ["markdown", "measure_equals", "measure_repeated"]

RANKS, TIMES = (2, 4, 8), 3
_REPEATED = ("uccl_ep", "gloo", "mpi")
#: Opened three times each.
EQUALS, PERCENT = ("uccl_ep:direct", "mpi"), 5.0
_RESULT = Path(__file__).parent / "results" / "verdicts.json"
#: Of a start.
_SECONDS = 120.0


def measure_repeated() -> dict[str, Any]:
    """Verdicts on a layer of ours beside the others, by comparison. Raises RankFailed, ConfigError."""
    machine, found = describe(), []
    for ranks in RANKS:
        card = Card(name="compare", mode="low-latency", ranks=ranks, tokens=64, iterations=12, warmup=5, repeat=4)
        for time in range(TIMES):
            print(f"verdicts: {ranks} ranks, {time + 1} of {TIMES}", file=sys.stderr, flush=True)
            verdicts = _compared(Plan(card, _REPEATED, starts=3))["verdicts"]
            found.append({"ranks": ranks, "verdicts": [one for one in verdicts if one["phase"] == LAYER]})
    return {"machine": machine, "comparisons": found}


def measure_equals() -> dict[str, Any]:
    """Microseconds of a layer of the slowest rank, by backend, start and round. Raises RankFailed, ConfigError."""
    machine = describe()
    card = Card(name="compare", mode="low-latency", ranks=2, tokens=64, iterations=40, warmup=5, repeat=4)
    names = tuple(name for name in EQUALS for _ in range(3))
    plan = Plan(card, names, starts=12, slowed={f"{name}#3": PERCENT for name in EQUALS})
    slowest = _compared(plan)["slowest_us"]
    return {
        "machine": machine,
        "plan": plan.as_dict(),
        "us": {name: [[round(us, 1) for us in start] for start in slowest[name][LAYER]] for name in plan.backends},
    }


PARTS = {"repeated": measure_repeated, "equals": measure_equals}


def _compared(plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="uccl-ep-verdicts-") as scratch:
        directory = Path(scratch, "starts")
        run_standalone(plan, directory, _SECONDS)
        return assemble(plan, read_starts(directory, plan, given), directory)


def markdown(result: Mapping[str, Any]) -> str:
    """What each comparison said of ours beside each other backend, and of equals."""
    found: dict[tuple[int, str], list[str]] = {}
    for one in result["repeated"]["comparisons"]:
        for verdict in one["verdicts"]:
            found.setdefault((one["ranks"], verdict["b"]), []).append(verdict["words"])
    rows: Sequence[Sequence[str]] = [[str(ranks), other, *words] for (ranks, other), words in found.items()]
    us = result["equals"]["us"]
    equals = [[name, *(compare_paired(us[name], us[f"{name}#{again}"]).words for again in (2, 3))] for name in EQUALS]
    return "\n\n".join(
        (
            markdown_table(["ranks", "ours beside", "first", "second", "third"], rows),
            f"Opened again, and opened again and made {PERCENT:g} % slower, {len(us[EQUALS[0]])} starts of two ranks:",
            markdown_table(["backend", "beside itself", f"beside itself made {PERCENT:g} % slower"], equals),
        )
    )


def main() -> None:
    """Measure what is named, and keep the rest."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", help="default: both")
    wanted = parser.parse_args().parts or PARTS
    result = json.loads(_RESULT.read_text()) if _RESULT.exists() else {}
    result |= {name: PARTS[name]() for name in wanted}
    # whose commit and load stand over the section
    result["machine"] = result["repeated"]["machine"]
    _RESULT.write_text(json.dumps(result, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
