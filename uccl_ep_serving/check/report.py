"""Runs the check of GPUs for the command line: says what begins, prints what was found, and keeps it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import gpu, stamp
from .machine import Machine, present
from .place import interpreting

__all__ = ["run"]


def run(
    groups: Sequence[str],
    seconds: float,
    as_json: bool,
    machine: Callable[[], Machine] = present,
    check: Callable[..., gpu.Report] = gpu.run,
) -> int:
    """Check, print and keep. Returns the exit status.

    Args:
        groups: of ``gpu.GROUPS``.
        seconds: that the check may take.
        machine: says what is checked.
        check: the check itself.
    """
    try:
        checked = None if interpreting() else machine()
    except RuntimeError as error:
        print(f"check: {error}. Next step: uccl-ep doctor, and nvidia-smi or rocm-smi", file=sys.stderr)
        return 2
    if checked is not None and not checked.gpus:
        step = "uccl-ep doctor says more; in a container, is the GPU passed to it (--gpus all)?"
        print(f"check: no GPU is visible to this process. Next step: {step}", file=sys.stderr)
        return 2
    report = check(groups, seconds, lambda name: print(f"check: {name}", file=sys.stderr, flush=True))
    kept, lost = "", ""
    if checked is not None and report.complete:
        try:
            kept = str(stamp.write(checked, report.passed, report.plain()))
        except OSError as error:
            lost = f"what was found could not be kept: {error}"
    if as_json:
        of = checked._asdict() if checked is not None else None
        print(json.dumps({"passed": report.passed, "machine": of, "record": kept, **report.plain()}, indent=1))
    else:
        _print(report, kept)
    if lost:
        print(f"check: {lost}", file=sys.stderr)
    return 0 if report.passed and not lost else 1


def _print(report: gpu.Report, kept: str) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False, title_justify="left")
    for name in ("part", "result", "seconds", ""):
        table.add_column(name, justify="right" if name == "seconds" else "left", overflow="fold")
    for one in report.results:
        mark = "[green]ok[/]" if one.passed else "[red]FAILED[/]"
        table.add_row(Text(one.name), mark, f"{one.seconds:.1f}", Text(one.said))
    console.print(table)
    for one in report.results:
        if one.fault is not None:
            console.print(Text.assemble("\n", (one.name, "bold"), f": {one.fault.lines}"), soft_wrap=True)
    failed = sum(not one.passed for one in report.results)
    verdict = f"{failed} of {len(report.results)} parts failed" if failed else "every part passed"
    where = f"; the record is {kept}" if kept else ""
    words = f"\n{report.device or 'no device'}: {verdict} in {report.seconds:.0f} s{where}"
    console.print(words, markup=False, soft_wrap=True)
