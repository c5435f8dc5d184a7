"""Makes the kernels of low latency wrong in every way of their PTX, and sees what the model machine notices.

    make kernel-faults
    make kernel-faults ARGS="--kernel route --kind barrier --dry"

Writes benchmarks/results/kernel_faults.json after each fault; a run goes on where one of the same commit was
interrupted. Exit status 1 where a fault is neither noticed nor known to change nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernel_faults import markdown
from tests.ptx.faults.edits import KINDS, Fault
from tests.ptx.faults.judge import UNEXPLAINED, faults, judge
from tests.support.source_tree import ROOT
from uccl_ep_serving.bench.machine import describe

RESULTS = ROOT / "benchmarks/results/kernel_faults.json"


class Results:
    """The verdicts of one commit, in a file that is whole at any time.

    Args:
        file: of an earlier run; its verdicts are kept where they are of the commit of ``machine``, and that is known.
        machine: what runs now.
    """

    def __init__(self, file: Path, machine: dict[str, Any]) -> None:
        self._file, self._machine = file, machine
        known = json.loads(file.read_text()) if file.exists() else {"machine": {"commit": ""}}
        commit = machine["commit"]
        # "+" stands for sources that differ from the commit
        same = known["machine"]["commit"] == commit and bool(commit) and not commit.endswith("+")
        self.rows: list[dict[str, Any]] = known["faults"] if same else []

    def has(self, fault: Fault) -> bool:
        """Whether there is a verdict of ``fault``."""
        return any((one["kernel"], one["kind"], one["source"]) == _name(fault) for one in self.rows)

    def keep(self, row: dict[str, Any]) -> None:
        """Add a verdict and write the file, a line for each."""
        self.rows.append(row)
        rows = ",\n".join(map(json.dumps, self.rows))
        partial = self._file.with_suffix(".partial")
        partial.write_text(f'{{"machine": {json.dumps(self._machine)},\n"faults": [\n{rows}\n]}}\n')
        partial.replace(self._file)

    @property
    def result(self) -> dict[str, Any]:
        """What the file holds."""
        return {"machine": self._machine, "faults": self.rows}


def _name(fault: Fault) -> tuple[str, str, str]:
    return fault.short, fault.kind, fault.source


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make kernel-faults ARGS=", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--kernel", default="", help="only this one, by its name in the source")
    parser.add_argument("--kind", default="", choices=["", *KINDS], help="only this one")
    parser.add_argument("--minutes", type=float, default=600.0, help="no fault is begun after these")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the verdicts go")
    return parser


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    options = _options().parse_args(arguments)
    results = Results(options.output, describe())
    end = time.monotonic() + 60 * options.minutes
    failed = 0
    for fault in faults(options.kernel, options.kind):
        if time.monotonic() > end:
            print(f"kernel-faults: {options.minutes:g} minutes are over: run it again to go on", flush=True)
            break
        if not options.dry and results.has(fault):
            continue
        began = time.monotonic()
        found = judge(fault)
        kernel, kind, source = _name(fault)
        row = {"kernel": kernel, "kind": kind, "source": source, **vars(found)}
        row["seconds"] = round(time.monotonic() - began, 1)
        failed += found.end in UNEXPLAINED
        if found.trials:
            print(f"{fault}: {found.end} {found.by}, {found.trials} runs, {row['seconds']} s", flush=True)
        if options.dry:
            results.rows.append(row)
        else:
            results.keep(row)
    print(markdown(results.result), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
