"""``make fuzz``: mutated frames and handshakes, ten million of them, each a function of its number.

A run goes on where one of the same commit was interrupted: each subject with the case after the last one that was kept.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tests.fuzz.parent import blocks
from tests.fuzz.subject import Wrong
from tests.fuzz.subjects import SUBJECTS
from tests.soak.soak_samples import Sample, not_flat
from tests.support.kept import same_commit, write
from uccl_ep_serving.bench.machine import describe

__all__ = ["Results", "app", "wrongs"]

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "fuzz.json"
#: Growth of resident memory that is allowed, from the second quarter of the blocks to the last.
_MOST_GROWTH = 4 << 20
#: Samples that say something about growth.
_SAMPLES = 16
_LINE_SECONDS = 20.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Results:
    """What has been run at one commit, in a file that is whole at any time.

    Args:
        file: of an earlier run; subjects of another commit stay in it until they are run at this one.
        machine: what runs now.

    Attributes:
        subjects: by name: commit, cases, sampled, seconds, processor_seconds, rows by kind, held by process.
    """

    def __init__(self, file: Path, machine: dict[str, Any]) -> None:
        self._file, self._machine = file, machine
        self.subjects: dict[str, dict[str, Any]] = json.loads(file.read_text())["subjects"] if file.exists() else {}

    def cases(self, name: str) -> int:
        """How many of a subject have been run at this commit: those from 0 on."""
        one, commit = self.subjects.get(name), self._machine["commit"]
        return int(one["cases"]) if one is not None and same_commit(one["commit"], commit) else 0

    def begin(self, name: str) -> None:
        """A process begins: what it holds is a list of its own."""
        if not self.cases(name):
            figures = {"cases": 0, "sampled": 0, "seconds": 0.0, "processor_seconds": 0.0, "rows": {}, "held": []}
            self.subjects[name] = {"commit": self._machine["commit"], **figures}
        self.subjects[name]["held"].append([])

    def keep(self, name: str, block: dict[str, Any]) -> None:
        """Add a block, and write the file."""
        one = self.subjects[name]
        one["cases"] = block["first"] + block["cases"]
        one["sampled"] += block["sampled"]
        one["seconds"] = round(one["seconds"] + block["seconds"], 3)
        one["processor_seconds"] = round(one["processor_seconds"] + block["processor"], 3)
        for kind, row in block["rows"].items():
            before = one["rows"].get(kind, [0] * len(row))
            one["rows"][kind] = [a + b for a, b in zip(before, row, strict=True)]
        one["held"][-1].append(block["held"])
        write(self._file, self._machine, "subjects", self.subjects)


def wrongs(held: list[list[int]]) -> list[str]:
    """What has grown in a process, in words; nothing is said of one that has run few blocks."""
    samples = [Sample(*one) for one in held]
    return not_flat(samples, _MOST_GROWTH) if len(samples) >= _SAMPLES else []


def _run(name: str, first: int, count: int, results: Results | None, until: float) -> list[str]:
    """Run cases of one subject; what went wrong."""
    held: list[list[int]] = []
    said = time.monotonic()
    if results is not None:
        results.begin(name)
    try:
        for block in blocks(name, first, count):
            held.append(block["held"])
            if results is not None:
                results.keep(name, block)
            now, done = time.monotonic(), block["first"] + block["cases"]
            if now > said + _LINE_SECONDS or done == first + count:
                said = now
                print(f"fuzz: {name}: {done - first:,} of {count:,} cases", flush=True)
            if now > until:
                print(f"fuzz: {name}: the minutes are over: run it again to go on", flush=True)
                break
    except Wrong as wrong:
        again = f'make fuzz ARGS="--dry --subject {name} --first {wrong.case} --cases 1"'
        return [f"{name}, case {wrong.case}: {wrong.words}\n  again: {again}"]
    return [f"{name}: {words}" for words in wrongs(held)]


@app.command()
def fuzz(
    subject: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(SUBJECTS)}.")] = None,
    cases: Annotated[
        int, typer.Option(min=1, help="Cases in all, shared out; of a run with --first, of each.")
    ] = 10_000_000,
    first: Annotated[int, typer.Option(help="First case of each subject; -1 goes on after the last one kept.")] = -1,
    minutes: Annotated[float, typer.Option(min=0, help="Begin no block after so long.")] = 600.0,
    dry: Annotated[bool, typer.Option("--dry", help="Write nothing.")] = False,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = RESULTS,
) -> None:
    """Send changed frames and handshakes to the parsers of the product, and judge all that they do.

    Exit status 1 when a case did not end as it must, or a process grew; each is named with the command that repeats it.
    """
    names = subject or list(SUBJECTS)
    if unknown := sorted(set(names) - SUBJECTS.keys()):
        raise typer.BadParameter(f"no such subject: {', '.join(unknown)}; there are {', '.join(SUBJECTS)}")
    results = Results(output, describe())
    until = time.monotonic() + 60 * minutes
    failed: list[str] = []
    for name in names:
        begin, count = first, cases
        if first < 0:
            begin = 0 if dry else results.cases(name)
            count = round(SUBJECTS[name].share * cases / 10_000_000) - begin
        if count > 0 and time.monotonic() < until:
            wrong = _run(name, begin, count, None if dry or first >= 0 else results, until)
            failed += wrong
            for words in wrong:
                print(f"fuzz: FAILED: {words}", flush=True)
    total = sum(results.cases(name) for name in SUBJECTS)
    print(f"fuzz: {len(failed)} failures; {total:,} cases are kept at this commit", flush=True)
    if failed:
        raise typer.Exit(1)
