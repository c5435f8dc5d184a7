#!/usr/bin/env python3
"""Measure the suites of tests: seconds and tests of each go into benchmarks/results/suites.json, and from there into
the table of CONTRIBUTING.md (``make docs``). ``make test`` and ``.ci/run`` have budgets, which a test holds them to.

    make suites                            what has no record of this commit: an interrupted run goes on where it was
    make suites ARGS="tests/kernels lint"  these
    make suites ARGS="--again lint"        also where there is a record
    make suites ARGS=--list                their names
    make suites ARGS="--report FILE"       those of make test from the report of one run of it, which ended well:
                                           make test ARGS=--junitxml=FILE

Seconds are those of a machine with nothing else to do; load averages stand beside them. ``make test`` shares its files
out to three workers on two cores, so that a suite of it takes a third of the sum of its tests. Seconds of a target that
``make test`` and ``.ci/run`` leave out are the sum over its tests, however many runs it took: it goes on with
``--resume`` (tests/support/resume.py). One that was stopped (SIGINT to pytest), or in which a test failed, is kept with
how many tests are left, and what has passed in benchmarks/results/unfinished: from there a run of the same sources goes
on in any checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.resume import UNFINISHED, left, notes, sources
from uccl_ep_serving.bench.machine import describe

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/suites.json"
NOTES = ROOT / ".pytest_cache/d/passed"
TEST, CHECK = "make test", ".ci/run"
#: Seconds on two cores with nothing else to do, once the environments exist.
BUDGETS = {TEST: 540, CHECK: 1800}
#: Of ``make test`` on two cores.
WORKERS = 3


@dataclass(frozen=True)
class Suite:
    """What is measured by itself: the quick tests of a directory, or all that a target of the Makefile runs."""

    name: str
    holds: str
    target: str
    command: tuple[str, ...]
    #: The budgets that its seconds count against. Without one it may take hours, and is resumed.
    within: tuple[str, ...] = ()

    @property
    def is_pytest(self) -> bool:
        """Whether its seconds are those of its tests: starting pytest is a suite of its own."""
        return self.command[0].endswith("/pytest")


def _quick(name: str, holds: str, *paths: str, venv: str = ".venv") -> Suite:
    paths = paths or (name,)
    workers = ("-n", str(WORKERS), "--dist", "loadfile")
    return Suite(name, holds, TEST, (f"{venv}/bin/pytest", "-m", "not slow", *workers, *paths), (TEST, CHECK))


def _target(name: str, holds: str, *within: str) -> Suite:
    return Suite(name, holds, f"make {name}", ("make", name), within)


VLLM = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/engines/test_vllm*.py"))]
LOOSE = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/test_*.py"))]
SUITES = [
    Suite(
        "collecting",
        "pytest imports all tests",
        TEST,
        (".venv/bin/python", "-m", "pytest", "--collect-only", "-qq", "-m", "not slow"),
        (TEST, CHECK),
    ),
    _quick("tests/test_*.py", "the public interface, settings, sizes, counters", *LOOSE),
    _quick("tests/bench", "`uccl-ep bench`"),
    _quick("tests/benchmarks", "what `scripts/gpu-check` measures, on nothing"),
    _quick("tests/chaos", "faults of running groups, one of each quick kind; the judge of all"),
    _quick("tests/check", "`uccl-ep check --gpu` on a stub of the driver, its records, the gate of the engines"),
    _quick("tests/preflight", "`uccl-ep check` on nodes: ways, NICs in memory, broken set-ups"),
    _quick("tests/cli", "`uccl-ep`: doctor, plan, top"),
    _quick("tests/compare", "`uccl-ep compare`: what its statistics claim, what it measures, keeps and says"),
    _quick("tests/control_plane", "meeting, links, failures and their causes"),
    _quick("tests/data_plane", "windows, NICs, rails, topology"),
    _quick("tests/demo", "the demos' servers, refusals, remains"),
    _quick("tests/engines", "the plugin of SGLang in its processes"),
    _quick("vllm", "the plugin of vLLM in its processes", *VLLM, venv=".venv-vllm"),
    _quick("tests/fuzz", "mutated frames and handshakes, some of each; the oracle refuses what is wrong"),
    _quick("tests/gpu", "the host side of a GPU, on stand-ins and on a stub of the driver"),
    _quick("tests/kernels", "kernels of both modes, on CPU and in Triton's interpreter; the compile gate"),
    _quick("tests/modes", "what the host does around an operation"),
    _quick("tests/mutants", "`make mutants` on a tree of two files"),
    _quick("tests/native", "compiled code and its cache"),
    _quick("tests/project", "layout, documentation, scripts, this table"),
    _quick("tests/protocol", "formats and layouts"),
    _quick("tests/proxy", "the proxy over fake, shm and tcp"),
    _quick("tests/ptx", "GPU kernels as PTX: its instructions, the model machine, litmus tests of its memory"),
    _quick("tests/rdma", "NIC transports on devices in memory"),
    _quick("tests/rules", "a scenario of each rule of the proxy; the markers and table of all"),
    _quick("tests/soak", "the soak's own tests, some cases"),
    _quick("tests/system", "whole Buffers of up to eight processes: both modes, failures, losses"),
    _quick("tests/traffic", "recorded routing, and advice from what was measured"),
    _target("lint", "ruff, mypy --strict, import contracts", CHECK),
    _target("demo", "SGLang serves through us", CHECK),
    _target("demo-vllm", "vLLM serves through us", CHECK),
    _target("test-rdma", "RDMA transports on soft-RoCE in a virtual machine", CHECK),
    _target("test-rules", "each rule of proxy, kernels and NICs taken out of a copy of the package"),
    _target("test-combinations", "combinations of which `make test` takes a diagonal"),
    _target("test-interpreter", "GPU kernels in Triton's interpreter: every path, form and failure"),
    _target("test-model", "compiled kernels on the model machine: many seeds of every shape, faults in their source"),
    _target("test-driver", "launches and calls of cuda-bindings on a stub of the driver, in three versions each"),
    _target("test-triton", "the compile gate with three Tritons, every specialization of each kernel"),
    _target(
        "test-long",
        "runs of hundreds of steps, wheels, the training example, largest writes, firewalls and network namespaces",
    ),
    _target("test-engine", "real servers of SGLang and vLLM"),
]


def record(name: str) -> dict[str, Any]:
    """What was found of a suite last, {} without a record."""
    if not RESULTS.exists():
        return {}
    found: dict[str, dict[str, Any]] = {
        suite["name"]: suite["measured"] for suite in json.loads(RESULTS.read_text())["suites"]
    }
    return found.get(name, {})


def keep(name: str, measured: dict[str, Any]) -> None:
    """Write the file anew, with what was ``measured`` of suite ``name`` ("" for none)."""
    suites = [
        {
            "name": suite.name,
            "holds": suite.holds,
            "target": suite.target,
            "within": list(suite.within),
            "measured": measured if suite.name == name else record(suite.name),
        }
        for suite in SUITES
    ]
    RESULTS.write_text(json.dumps({"budgets": BUDGETS, "suites": suites}, indent=1) + "\n")


def counted(report: Path, *, of: Sequence[str] = ("tests",)) -> dict[str, float]:
    """Of a report of pytest and the files and folders ``of``: tests that ran, those that were skipped, and the seconds
    of all, for each worker."""
    modules = [path.removesuffix(".py").replace("/", ".") for path in of]
    cases = [
        case
        for case in ElementTree.parse(report).iter("testcase")
        if any(f"{case.get('classname')}.".startswith(f"{module}.") for module in modules)
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    seconds = sum(float(case.get("time", 0)) for case in cases)
    return {"tests": len(cases) - skipped, "skipped": skipped, "seconds": round(seconds / WORKERS, 1)}


def _processor_seconds() -> float:
    """Of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(suite: Suite) -> dict[str, Any] | None:
    """Run a suite; None when it fails, or cannot run here."""
    program = ROOT / suite.command[0]
    if suite.is_pytest and not program.exists():
        print(f"suites: {suite.name}: there is no {suite.command[0]}", file=sys.stderr)
        return None
    load, machine = os.getloadavg()[0], describe()
    began, used = time.monotonic(), _processor_seconds()
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"] if suite.is_pytest else []
        if not suite.within:
            options = [f"ARGS=--resume={suite.name}"]
            file = NOTES / f"{suite.name}-{sources(suite.name)}.jsonl"
            if not file.exists():
                _copy_notes(file, UNFINISHED, NOTES)
        done = subprocess.run([*suite.command, *options], cwd=ROOT, check=False)
        found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
        if done.returncode != 0 and suite.within:
            return None
        if suite.is_pytest:
            found = counted(report)
    if suite.within:
        found["processor_seconds"] = round(_processor_seconds() - used, 1)
    else:
        noted = notes(file)
        if not noted:
            return None
        found = {"tests": len(noted), "seconds": round(sum(note.seconds for note in noted), 1)}
        for old in UNFINISHED.glob(f"{suite.name}-*"):
            old.unlink()
        if remaining := left(file):
            found["left"] = remaining
            _copy_notes(file, NOTES, UNFINISHED)
    return {**found, "commit": machine["commit"], "when": machine["when"], "load": round(load, 2)}


def _copy_notes(file: Path, source: Path, target: Path) -> None:
    """All that stands under this name in one directory, into another."""
    for one in source.glob(f"{file.stem}.*"):
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(one, target)


def take(report: Path) -> None:
    """Keep what the report of one run of ``make test`` says of its suites; vLLM's tests run by themselves."""
    machine = describe()
    for suite in SUITES:
        paths = [part for part in suite.command if part.startswith("tests/")]
        if suite.is_pytest and suite.command[0].startswith(".venv/"):
            found = {"commit": machine["commit"], "when": machine["when"], "load": round(os.getloadavg()[0], 2)}
            keep(suite.name, {**counted(report, of=paths), **found})


def main(arguments: Sequence[str]) -> int:
    """Measure what is asked for; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("names", nargs="*", help="suites, all without any")
    parser.add_argument("--again", action="store_true", help="also those with a record of this commit")
    parser.add_argument("--list", action="store_true", help="names of all suites")
    parser.add_argument("--report", type=Path, help="of one run of make test: its suites are taken from there")
    options = parser.parse_args(arguments)
    if options.report is not None:
        take(options.report)
        return 0
    known = {suite.name: suite for suite in SUITES}
    if options.list:
        print("\n".join(known))
        return 0
    if unknown := sorted(set(options.names) - set(known)):
        parser.error(f"no such suite: {', '.join(unknown)}; there are {', '.join(known)}")
    failed = []
    for suite in (known[name] for name in options.names or known):
        before, commit = record(suite.name), describe()["commit"]
        # "+" stands for sources that differ from the commit
        if before.get("commit") == commit and not commit.endswith("+") and not options.again:
            print(f"suites: {suite.name}: {before['seconds']} s, measured at {commit}", flush=True)
            continue
        print(f"suites: {suite.name}: {' '.join(suite.command)}", flush=True)
        found = measure(suite)
        if found is None:
            failed.append(suite.name)
            continue
        keep(suite.name, found)
        print(f"suites: {suite.name}: {found['seconds']} s", flush=True)
    if failed:
        print(f"suites: failed or not to be had here, and their records kept: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
