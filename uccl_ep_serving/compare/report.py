"""A comparison for people: what was found in sentences, tables for a terminal, an HTML page that needs no network."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from uccl_ep_serving.compare.plan import write_json
from uccl_ep_serving.compare.plot import draw
from uccl_ep_serving.compare.results import LAYER

__all__ = ["render", "sentence", "tables", "time_rows", "verdict_rows", "workload_line", "write_reports"]

Result = Mapping[str, Any]
_TEMPLATE = "report.html.j2"


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


def sentence(verdict: Mapping[str, Any]) -> str:
    """A verdict as a sentence about a layer or one phase."""
    phase = "" if verdict["phase"] == LAYER else f"{verdict['phase']}: "
    direction, words = verdict["direction"], verdict["words"]
    if direction:
        return f"{phase}{verdict['a']} is {direction} than {verdict['b']}: {words.removeprefix(direction + ': ')}"
    return f"{phase}{verdict['a']} and {verdict['b']}: {words}"


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def time_rows(result: Result) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: by phase and backend, microseconds of the slowest rank."""
    headings = ["phase", "backend", "median us", "p10 - p90 us", "p99 us"]
    phases = list(dict.fromkeys(phase for by_phase in result["us"].values() for phase in by_phase))
    rows = []
    for phase in phases:
        for name, by_phase in result["us"].items():
            if phase in by_phase:
                one = by_phase[phase]
                spread = f"{_us(one['p10'])} - {_us(one['p90'])}"
                rows.append([phase, name, _us(one["median"]), spread, _us(one["p99"])])
    return headings, rows


def verdict_rows(result: Result) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: every verdict, and the quotient of each start."""
    headings = ["phase", "backends", "verdict on the first", "its time / the other's", "each start"]
    rows = [
        [
            one["phase"],
            f"{one['a']} beside {one['b']}",
            one["words"],
            f"{one['ratio']:.3f} ({one['low']:.3f} .. {one['high']:.3f})",
            " ".join(f"{start:.2f}" for start in one["by_start"]),
        ]
        for one in result["verdicts"]
    ]
    return headings, rows


def moved_rows(result: Result) -> tuple[list[str], list[list[str]]]:
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
    found = [sentence(one) for one in result["verdicts"] if one["phase"] == LAYER]
    return found or ["Nothing could be compared."]


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> Table:
    table = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < words else "right")
    for row in rows:
        table.add_row(*row)
    return table


def tables(result: Result) -> RenderableType:
    """Everything for a terminal; what was found comes last, where eyes are."""
    parts: list[RenderableType] = [Text(workload_line(result)), Text(method_line(result)), Text(machine_line(result))]
    parts.append(_table("Microseconds of the slowest rank", *time_rows(result), words=2))
    parts.append(_table("Verdicts", *verdict_rows(result), words=3))
    parts.append(_table("What moved, and how", *moved_rows(result), words=3))
    parts += [Text(one, style="yellow") for one in [*left_out(result), *result["caveats"]]]
    parts.append(Text(""))
    parts += [Text(one, style="bold") for one in findings(result)]
    return Group(*parts)


def render(result: Result, picture: str) -> str:
    """The HTML page; ``picture`` is inline SVG, or ""."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    # every name and reason comes from outside: nothing but the picture may be markup
    page = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined).get_template(_TEMPLATE)
    return page.render(
        result=result,
        workload=workload_line(result),
        method=method_line(result),
        machine=machine_line(result),
        findings=findings(result),
        tables=[
            ("Microseconds of the slowest rank", *time_rows(result), 2),
            ("Verdicts", *verdict_rows(result), 3),
            ("What moved, and how", *moved_rows(result), 3),
        ],
        left_out=left_out(result),
        picture=picture,
        layer=LAYER,
    )


def write_reports(result: Result, directory: Path) -> list[Path]:
    """Write compare.json, compare.html and, where matplotlib is installed, compare.png and compare.svg.

    Returns:
        What was written, the page first.
    """
    drawn = []
    picture = ""
    if result["measured"] and importlib.util.find_spec("matplotlib") is not None:
        drawn = [directory / "compare.png", directory / "compare.svg"]
        for path in drawn:
            draw(result, path)
        svg = drawn[1].read_text()
        picture = svg[svg.index("<svg") :]
    page, data = directory / "compare.html", directory / "compare.json"
    page.write_text(render(result, picture))
    write_json(data, result)
    return [page, data, *drawn]
