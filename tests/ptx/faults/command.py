"""``make kernel-faults``: each order, scope, atomic and barrier of low latency's kernels taken away; who notices.

A run goes on where another one was interrupted: faults that have a verdict are left out, as long as the kernel's PTX is
the same.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.kernel_faults import UNEXPLAINED, markdown
from tests.ptx.faults.edits import KINDS, Fault
from tests.ptx.faults.judge import faults, judge
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
    row = {"kernel": fault.short, "kind": fault.kind, "source": fault.source, "of": fault.version, **vars(found)}
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def _in_time(fault: Fault, end: float) -> dict[str, Any] | None:
    """:func:`_judged`, in a process of its own; None where it is too late to begin."""
    return _judged(fault) if time.time() < end else None


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["kernel"], row["kind"], row["source"]


@app.command()
def kernel_faults(
    kernel: Annotated[str, typer.Option(help="Only this one, by its name in the source.")] = "",
    kind: Annotated[str, typer.Option(help=f"Only this one: {', '.join(KINDS)}.")] = "",
    minutes: Annotated[float, typer.Option(min=0, help="Begin no fault after so long.")] = 600.0,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: one for each core.")] = 0,
    dry: Annotated[bool, typer.Option("--dry", help="Write nothing.")] = False,
    output: Annotated[Path, typer.Option(help="Where the verdicts go.")] = RESULTS,
) -> None:
    """Make the kernels of low latency wrong in every way of their PTX, and see what the model machine notices.

    Exit status 1 where a fault is neither noticed nor known to change nothing.
    """
    if kind and kind not in KINDS:
        raise typer.BadParameter(f"no such kind: {kind}; there are {', '.join(KINDS)}")
    machine = describe()
    wanted = {(one.short, one.kind, one.source): one for one in faults(kernel, kind)}
    versions = {one.short: one.version for one in faults()}
    results = Kept(output, "faults", _key, machine, lambda row: row.get("of") == versions.get(row["kernel"]))
    # one without an end may have got a scene or a sentence since
    for key in [key for key, row in results.rows.items() if row["end"] in UNEXPLAINED]:
        del results.rows[key]
    done: dict[Any, dict[str, Any]] = {} if dry else results.rows

    def is_left(key: tuple[str, str, str]) -> bool:
        # a sentence is a verdict, but only what is played can refute it
        return key not in done or done[key]["seed"] < 0

    todo = [fault for key, fault in wanted.items() if is_left(key)]
    end = time.time() + 60 * minutes
    print(f"kernel-faults: {len(todo)} of {len(wanted)} faults have no verdict, or one that was not played", flush=True)
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers or os.cpu_count(), fresh) as pool:
        judging = {pool.submit(_in_time, fault, end): fault for fault in todo}
        for one in as_completed(judging):
            row = one.result()
            if row is None:
                continue
            if row["trials"] or row["end"] in UNEXPLAINED:
                print(f"{judging[one]}: {row['end']} {row['by']}, {row['trials']} runs, {row['seconds']} s", flush=True)
            if dry:
                done[_key(row)] = row
            else:
                results.keep(row)
    if left := sum(map(is_left, wanted)):
        print(f"kernel-faults: {minutes:g} minutes are over, {left} are left: run it again to go on", flush=True)
    print(markdown({"machine": machine, "faults": list(done.values())}), flush=True)
    if any(row["end"] in UNEXPLAINED for row in done.values()):
        raise typer.Exit(1)
