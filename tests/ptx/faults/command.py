"""``make kernel-faults``: each order, scope, atomic and barrier of low latency's kernels taken away; who notices.

A run goes on where one of the same commit was interrupted: faults that have a verdict are left out.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.kernel_faults import markdown
from tests.ptx.faults.edits import KINDS, Fault
from tests.ptx.faults.judge import UNEXPLAINED, faults, judge
from tests.support.kept import Kept
from tests.support.source_tree import ROOT
from uccl_ep_serving.bench.machine import describe

__all__ = ["app"]

RESULTS = ROOT / "benchmarks/results/kernel_faults.json"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _judged(fault: Fault) -> dict[str, Any]:
    """The row of a fault."""
    began = time.monotonic()
    found = judge(fault)
    row = {"kernel": fault.short, "kind": fault.kind, "source": fault.source, **vars(found)}
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["kernel"], row["kind"], row["source"]


@app.command()
def kernel_faults(
    kernel: Annotated[str, typer.Option(help="Only this one, by its name in the source.")] = "",
    kind: Annotated[str, typer.Option(help=f"Only this one: {', '.join(KINDS)}.")] = "",
    minutes: Annotated[float, typer.Option(min=0, help="Begin no fault after so long.")] = 600.0,
    dry: Annotated[bool, typer.Option("--dry", help="Write nothing.")] = False,
    output: Annotated[Path, typer.Option(help="Where the verdicts go.")] = RESULTS,
) -> None:
    """Make the kernels of low latency wrong in every way of their PTX, and see what the model machine notices.

    Exit status 1 where a fault is neither noticed nor known to change nothing.
    """
    if kind and kind not in KINDS:
        raise typer.BadParameter(f"no such kind: {kind}; there are {', '.join(KINDS)}")
    machine = describe()
    results = Kept(output, "faults", _key, machine)
    done: dict[Any, dict[str, Any]] = {} if dry else results.rows
    end = time.monotonic() + 60 * minutes
    for fault in faults(kernel, kind):
        if time.monotonic() > end:
            print(f"kernel-faults: {minutes:g} minutes are over: run it again to go on", flush=True)
            break
        if (fault.short, fault.kind, fault.source) in done:
            continue
        row = _judged(fault)
        if row["trials"] or row["end"] in UNEXPLAINED:
            print(f"{fault}: {row['end']} {row['by']}, {row['trials']} runs, {row['seconds']} s", flush=True)
        if dry:
            done[_key(row)] = row
        else:
            results.keep(row)
    print(markdown({"machine": machine, "faults": list(done.values())}), flush=True)
    if any(row["end"] in UNEXPLAINED for row in done.values()):
        raise typer.Exit(1)
