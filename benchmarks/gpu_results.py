#!/usr/bin/env python3
"""Puts what the parts of ``scripts/gpu-check`` have left in a directory into one file of results.

    benchmarks/gpu_results.py LOGS RESULTS

A part that left nothing keeps what it said last, with the commit and the time that it is from (``found``). Figures that
were taken while NVIDIA's Multi-Process Service ran (``MPS=1``) stand beside those without it, under ``with_mps``.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree


def suites(report: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, counts, and the last words of each test that failed) of every module in a report of pytest: a run of some
    modules leaves what is known of the others."""
    cases: dict[str, list[ElementTree.Element]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if module := case.get("classname", "").rpartition(".")[2]:  # a run that is interrupted leaves a case of none
            cases.setdefault(module, []).append(case)
    for module, found in sorted(cases.items()):
        failed = {
            case.get("name", "?"): str(fault.get("message"))[-400:]
            for case in found
            for fault in case
            if fault.tag in ("failure", "error")
        }
        skipped = [case.get("name", "?") for case in found if case.find("skipped") is not None]
        seconds = round(sum(float(case.get("time", 0)) for case in found), 1)
        passed = len(found) - len(failed) - len(skipped)
        yield f"tests of {module}", {"passed": passed, "failed": failed, "skipped": skipped, "seconds": seconds}


def parts(logs: Path) -> Iterator[tuple[str, Any]]:
    """(name, result) of every part that has left one; a result cut short is none."""
    for name in ("probe", "first", "soak"):
        if (said := _text(logs / f"{name}.json")).strip().endswith("}"):
            yield name, json.loads(said)
    if _text(logs / "tests.xml"):
        yield from suites(logs / "tests.xml")
    for name in ("memcheck", "racecheck"):
        if said := _text(logs / name).strip():
            yield name, said


#: Scripts of figures.
_FIGURES = ("low_latency", "normal")


def figures(logs: Path) -> dict[str, Any]:
    """What the scripts of figures have measured; by a script's name that it has failed as a whole."""
    found: dict[str, Any] = {}
    for name in _FIGURES:
        if said := _text(logs / f"{name}.json"):
            measured = json.loads(said)
            found |= {name: measured} if "failed" in measured else measured
    return found


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _without(names: set[str], found: dict[str, Any]) -> dict[str, Any]:
    return {name: result for name, result in found.items() if name not in names}


def merged(before: dict[str, Any], logs: Path, mps: bool, stamp: dict[str, str]) -> dict[str, Any]:
    """``before`` with what is in ``logs``, all of one run, which ``stamp`` marks."""
    new, measured = dict(parts(logs)), figures(logs)
    again = {name for name in _FIGURES if _text(logs / f"{name}.json")}
    if mps and measured:
        new["with_mps"] = {**_without(again, before.get("with_mps", {})), **measured}
    else:
        before, new = _without(again, before), new | measured
    return {**before, **new, "found": {**before.get("found", {}), **dict.fromkeys(new, stamp)}}


def main() -> None:
    from uccl_ep_serving.bench.machine import describe

    logs, target = map(Path, sys.argv[1:])
    commit = describe()["commit"] or os.environ.get("COMMIT", "")
    stamp = {"commit": commit, "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    before = json.loads(target.read_text()) if target.exists() else {}
    found = merged(before, logs, os.environ.get("MPS") == "1", stamp)
    target.parent.mkdir(parents=True, exist_ok=True)
    # whoever ends this half-way leaves the results of before
    written = target.with_suffix(".part")
    written.write_text(json.dumps(found, indent=1) + "\n")
    written.replace(target)


if __name__ == "__main__":
    main()
