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
from collections.abc import Iterator, Mapping
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


def _low_latency(found: Mapping[str, Any]) -> Iterator[str]:
    """Tables of ``gpu_low_latency.py``."""
    sizes = [one for one in found.get("kernels", ()) if "microseconds" in one]
    if sizes:
        cells = "".join(f" {one['tokens']} tokens: us | GB/s | of a copy |" for one in sizes)
        yield f"| a rank alone, kernel |{cells}\n|---|" + "---:|" * (3 * len(sizes))
        for name in sizes[0]["microseconds"]:
            row = (
                f" {one['microseconds'][name]:.1f} | {one['gb_per_s'][name]:.0f} | {one['share_of_copy'][name]:.0%} |"
                for one in sizes
            )
            yield f"| `{name}` |" + "".join(row)
        yield "| together |" + "".join(f" {one['microseconds_together']:.0f} | | |" for one in sizes)
        for beside in (one for one in found.get("deepep", ()) if "microseconds" in one):
            for name, took in beside["microseconds"].items():
                cells = (f" {took:.1f} |" if one["tokens"] == beside["tokens"] else " |" for one in sizes)
                yield f"| DeepEP's `{name}` |" + "".join(cell + " | |" for cell in cells)
    rows = [(f"{one['tokens']} tokens, a rank alone", one["replay_us"]) for one in found.get("alone", ())]
    rows += [
        (f"{one['tokens']} tokens, a rank alone, DeepEP", one["replay_us"])
        for one in found.get("deepep", ())
        if "replay_us" in one
    ]
    for words, measured in (("", found), (", MPS", found.get("with_mps", {}))):
        for part, whose in (("round_trip", ""), ("deepep_round_trip", ", DeepEP")):
            rows += [
                (
                    f"{one['tokens']} tokens, rank {one['rank']} of {one['ranks']}"
                    + (f", {one['window']} windows" if "window" in one else "")
                    + whose
                    + words,
                    one["replay_us"],
                )
                for one in measured.get(part, ())
                if "replay_us" in one
            ]
    rows += [
        (f"from a command to its proxy, rank {one['rank']}", one["publish_to_pop_us"])
        for one in found.get("publish", ())
        if "publish_to_pop_us" in one
    ]
    if rows:
        yield "\n| dispatch and combine, from a captured graph | us | p10 - p90 |\n|---|---:|---:|"
        yield from (f"| {name} | {one['median']:.1f} | {one['p10']:.1f} - {one['p90']:.1f} |" for name, one in rows)


#: Columns of :func:`_normal`.
_STEPS = ("first_dispatch", "dispatch", "combine")


def _moved(one: Mapping[str, Any]) -> str:
    """Cells of what a rank's rows took, empty for a step that was not measured."""
    cells = (one.get(name) for name in _STEPS)
    return "".join(
        f" {cell['microseconds']['median']:.0f} | {cell['gb_per_s']['median']:.0f} |" if cell else " | |"
        for cell in cells
    )


def _normal(found: Mapping[str, Any]) -> Iterator[str]:
    """Tables of ``gpu_normal.py``: a rank alone, and two ranks while MPS runs; without it they take turns."""
    titles = "".join(f" {name.replace('_', ' ')}: us | GB/s |" for name in _STEPS)
    rows = [one for one in found.get("normal_alone", ()) if "dispatch" in one]
    if rows:
        yield f"\n| {rows[0]['tokens']} x {rows[0]['hidden']}, a rank alone | programs |{titles} a copy: GB/s |"
        yield "|---|---:|" + "---:|" * (2 * len(_STEPS) + 1)
        for one in rows:
            copied = one["dispatch"]["copy_gb_per_s"]["median"]
            yield f"| {one['format']}, {one['copy']} | {one['programs_allowed']} |{_moved(one)} {copied:.0f} |"
    beside = found.get("with_mps", {})
    rows = [one for one in beside.get("normal_exchange", ()) if "dispatch" in one]
    if rows:
        yield f"\n| {rows[0]['tokens']} x {rows[0]['hidden']}, two ranks, MPS | programs |{titles}"
        yield "|---|---:|" + "---:|" * (2 * len(_STEPS))
        for one in rows:
            yield f"| {one['format']}, {one['copy']}, rank {one['rank']} | {one['programs_allowed']} |{_moved(one)}"
        for one in beside.get("normal_deepep", ()):
            if "dispatch" in one:
                yield f"| bf16, DeepEP, rank {one['rank']} | {one['programs']} |{_moved(one)}"


def _soaked(found: Any) -> str:
    """Of a path: operations of each rank, or that it failed."""
    return "failed" if "failed" in found else f"{'+'.join(str(rank['steps']) for rank in found)} operations"


def markdown(found: Mapping[str, Any]) -> str:
    """What has run, and tables of the figures."""
    machine = found["machine"]
    versions = f"Triton {machine['triton']}, torch {machine['versions']['torch']}, CUDA {machine['cuda']}"
    lines = [f"{machine['device']}, {versions}.\n", "| part | found | commit |\n|---|---|---|"]
    for name, stamp in found["found"].items():
        one = found.get(name)
        if name.startswith("tests of "):
            counts = one["passed"], len(one["failed"]), len(one["skipped"])
            said = f"{counts[0]} passed, {counts[1]} failed, {counts[2]} skipped, {one['seconds']:.0f} s"
        elif name in ("probe", "first"):
            said = f"{sum(part['passed'] for part in one['parts'])} of {len(one['parts'])} passed"
        elif name in ("memcheck", "racecheck"):
            said = one
        elif name == "soak":
            said = one.get("failed") or "; ".join(f"{path}: {_soaked(one[path])}" for path in ("ipc", "shm"))
        else:
            continue
        lines.append(f"| {name} | {said} | {stamp['commit']} |")
    return "\n".join([*lines, "", *_low_latency(found), *_normal(found)])


def main() -> None:
    from uccl_ep_serving.bench.machine import describe

    logs, target = map(Path, sys.argv[1:])
    commit = os.environ.get("COMMIT") or describe()["commit"]
    stamp = {"commit": commit, "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    before = json.loads(target.read_text()) if target.exists() else {}
    found = merged(before, logs, os.environ.get("MPS") == "1", stamp)
    target.parent.mkdir(parents=True, exist_ok=True)
    # whoever ends this half-way leaves the results of before
    written = target.with_suffix(".part")
    # an error of a part may name files of this checkout
    written.write_text(json.dumps(found, indent=1).replace(f"{Path(__file__).parents[1]}/", "") + "\n")
    written.replace(target)


if __name__ == "__main__":
    main()
