"""A comparison of backends for people: what was found in sentences, and tables of the figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uccl_ep_serving.compare.page import Page, Rows, sentence, verdict_rows, write_page
from uccl_ep_serving.compare.plot import draw
from uccl_ep_serving.compare.results import LAYER

__all__ = ["page_of", "write_reports"]

Result = Mapping[str, Any]


def workload_line(result: Result) -> str:
    """What was done, in one line."""
    card = result["plan"]["card"]
    return (
        f"{card['mode']}, {card['ranks']} ranks, {card['tokens']} tokens a rank, {card['hidden']} {card['dtype']}, "
        f"top-{card['topk']} of {card['experts']} experts, routing {card.get('route', 'uniform')}"
    )


def method_line(result: Result) -> str:
    """How it was measured, in one line."""
    plan = result["plan"]
    card = plan["card"]
    return (
        f"{plan['starts']} starts of {card['iterations']} rounds; a sample is the mean of {card['repeat']} layers "
        f"without a pause on the slowest rank; intervals of {result['level']} % over starts and rounds"
    )


def machine_line(result: Result) -> str:
    """Where, in one line."""
    hosts = result["starts"][0]["machines"]
    first = hosts[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    what = f"{first['gpu']}, " if first.get("gpu") else ""
    place = f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}, {what}{first['cpu']}, {first['cores']} cores"
    return f"{place}, Linux {first['kernel']}; commit {first['commit'] or 'unknown'}; {versions}; {first['when']}"


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def time_rows(result: Result) -> Rows:
    """Headings and rows: by phase and backend, microseconds of the slowest rank."""
    repeat = result["plan"]["card"]["repeat"]
    # a stall of one layer shows in such a mean with so much less
    means = f" of means of {repeat}" if repeat > 1 else ""
    headings = ["phase", "backend", "median us", "p10 - p90 us", f"p99 us{means}"]
    phases = list(dict.fromkeys(phase for by_phase in result["us"].values() for phase in by_phase))
    rows = []
    for phase in phases:
        for name, by_phase in result["us"].items():
            if phase in by_phase:
                one = by_phase[phase]
                spread = f"{_us(one['p10'])} - {_us(one['p90'])}"
                rows.append([phase, name, _us(one["median"]), spread, _us(one["p99"])])
    return headings, rows


def moved_rows(result: Result) -> Rows:
    """Headings and rows: how each backend's bytes went, as its counters say."""
    rows = []
    for name in result["measured"]:
        counters = ", ".join(f"{key} {value:,.0f}" for key, value in result["moved"][name].items() if value)
        what = counters or ("all counters stayed 0" if result["moved"][name] else "it has no counters")
        rows.append([name, result["paths"].get(name, "") or "-", what])
    return ["backend", "path", "all ranks, one layer"], rows


def left_out(result: Result) -> list[str]:
    """Who was not measured and why, one sentence each."""
    wrong = [f"{name} delivered wrong data and has no figures: {text}" for name, text in result["wrong"].items()]
    return wrong + [f"{name} was skipped: {text}" for name, text in result["skipped"].items()]


def findings(result: Result) -> list[str]:
    """The verdicts on a whole layer."""
    found = [sentence("", one) for one in result["verdicts"] if one["phase"] == LAYER]
    return found or ["Nothing could be compared."]


def page_of(result: Result) -> Page:
    """The report of ``result``."""
    return Page(
        command="uccl-ep compare",
        workload=workload_line(result),
        method=method_line(result),
        machine=machine_line(result),
        findings=findings(result),
        told=result["caveats"] + left_out(result),
        tables=[
            ("Microseconds of the slowest rank", *time_rows(result), 2),
            ("Verdicts", *verdict_rows(result["verdicts"], "phase", "its time / the other's"), 3),
            ("What moved, and how", *moved_rows(result), 3),
        ],
        environment=result["starts"][0]["environment"],
        template="report.html.j2",
        values={"result": result, "layer": LAYER},
    )


def write_reports(result: Result, directory: Path) -> list[Path]:
    """Write compare.json, compare.html and, where matplotlib is installed, compare.png and compare.svg.

    Returns:
        What was written, the page first.
    """
    drawn = (lambda path: draw(result, path)) if result["measured"] else None
    return write_page(page_of(result), result, directory / "compare", drawn)
