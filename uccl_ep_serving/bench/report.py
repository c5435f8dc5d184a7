"""Results for people: tables on a terminal, Markdown, a picture."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.variables import SETTINGS

__all__ = [
    "machine_line",
    "markdown",
    "markdown_table",
    "plot",
    "require_matplotlib",
    "tables",
    "time_rows",
    "wire_rows",
]

Result = Mapping[str, Any]


def _us(value: float) -> str:
    """Microseconds with three digits that mean something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _spread(figures: Mapping[str, float]) -> str:
    return f"{_us(figures['p10'])} - {_us(figures['p90'])}"


def machine_line(result: Result) -> str:
    """One line on what ran where."""
    machine, card = result["machine"], result["card"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    load = " ".join(f"{value:.2f}" for value in machine["load"])
    work = (
        f"{card['mode']}, {card['ranks']} ranks, {card['tokens']} x {card['hidden']} {card['dtype']}, "
        f"top-{card['topk']} of {card['experts']} experts"
    )
    place = f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, load {load}"
    # ranks of several hosts, or more than cores: the time until the last has left the barrier is in each sample
    start = "" if result["common_start"] else "; ranks start after a barrier, not at one instant"
    return f"{work}; commit {machine['commit'] or 'unknown'}; {place}; {versions}; {machine['when']}{start}"


def _changed(settings: Mapping[str, Any]) -> str:
    """Settings that are not the default, as variables; a result file has all of them."""
    defaults = {variable.name: getattr(Settings(), variable.field) for variable in SETTINGS}
    return " ".join(f"{name}={value}" for name, value in settings.items() if value != defaults[name]) or "defaults"


def time_rows(result: Result) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: by phase and subject, median, spread, and for each path how many times longer it takes."""
    paths = list(result["card"]["paths"])
    headings = ["phase", "who", "median us", "p10 - p90 us", *(f"x {path}" for path in paths)]
    phases: list[str] = []
    for by_phase in result["us"].values():
        phases += [phase for phase in by_phase if phase not in phases]
    rows = []
    for phase in phases:
        for who, by_phase in result["us"].items():
            if phase not in by_phase:
                continue
            quotients = [result["ratio"][path].get(who, {}).get(phase) for path in paths]
            words = [f"{one['median']:.2f} ({one['p10']:.2f} - {one['p90']:.2f})" if one else "" for one in quotients]
            rows.append([phase, who, _us(by_phase[phase]["median"]), _spread(by_phase[phase]), *words])
    return headings, rows


def wire_rows(result: Result) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: by phase and path, what all ranks sent per call, beside one message per (token, expert)."""
    wire = result["wire"]
    theirs = wire["one per (token, expert)"]
    rows = []
    for who, phases in wire.items():
        for phase, sent in phases.items():
            if phase not in theirs:
                continue
            messages, nbytes = theirs[phase]["messages"], theirs[phase]["nbytes"]
            fewer = messages / sent["messages"] if sent["messages"] else 0.0
            rows.append(
                [
                    phase,
                    who,
                    f"{sent['messages']:,.1f}",
                    f"{sent['writes']:,.1f}",
                    f"{sent['nbytes']:,.0f}",
                    _quotient(fewer),
                    f"{sent['nbytes'] / nbytes:.3f}" if sent["nbytes"] and nbytes else "-",
                ]
            )
    rows.sort(key=lambda row: list(theirs).index(row[0]))
    return ["phase", "who", "messages", "writes", "bytes", "messages, of theirs", "bytes, of theirs"], rows


def _quotient(fewer: float) -> str:
    """How many messages are ours for one of theirs, of which there are ``fewer`` for one of ours; 0 = nobody knows."""
    if not fewer:
        return "-"
    return f"1 / {fewer:,.0f}" if fewer >= 1 else f"{1 / fewer:,.1f}"


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < 2 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _verified(result: Result) -> str:
    card = result["card"]
    calls = sum(int(one["calls"]) for one in result["verified"].values())
    worst = max(float(one["distance"]) for one in result["verified"].values())
    exact = "bit for bit" if worst == 0 else f"calc_diff at most {worst:.1e}"
    notes = [f"the last of each {card['repeat']} without a pause"] if card["repeat"] > 1 else []
    notes += ["warm-ups included"] if card["warmup"] else []
    which = f" ({', '.join(notes)})" if notes else ""
    return f"{calls:,} calls{which} verified against the oracle on every rank, {exact}"


def tables(result: Result) -> RenderableType:
    """Everything about one result, for a terminal."""
    parts: list[RenderableType] = [Text(machine_line(result))]
    parts += [Text(f"{path}: {_changed(settings)}") for path, settings in result["settings"].items()]
    parts.append(_table(f"{result['card']['name']}: time of the slowest rank", *time_rows(result)))
    parts.append(_table("Sent by all ranks per call", *wire_rows(result)))
    parts += [Text(f"{name} skipped: {reason}") for name, reason in result["skipped"].items()]
    parts.append(Text(_verified(result)))
    return Group(*parts)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first two columns are words and the others numbers."""
    lines = ["| " + " | ".join(headings) + " |", "|---|---|" + "---:|" * (len(headings) - 2)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def markdown(result: Result) -> str:
    """Everything about one result, as Markdown."""
    skipped = "".join(f"\n{name} skipped: {reason}.\n" for name, reason in result["skipped"].items())
    return (
        f"### {result['card']['name']}\n\n{machine_line(result)}.\n\n{markdown_table(*time_rows(result))}\n\n"
        f"Sent by all ranks per call:\n\n{markdown_table(*wire_rows(result))}\n{skipped}\n{_verified(result)}.\n"
    )


def require_matplotlib() -> None:
    """Raises ConfigError, with the next step, when matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed. Next step: pip install matplotlib")


def plot(result: Result, target: Path) -> None:
    """Draw medians with their p10 - p90 spread into ``target`` (PNG by its suffix). Raises ConfigError."""
    require_matplotlib()
    figure_module: Any = importlib.import_module("matplotlib.figure")
    names = list(result["us"])
    phases = [phase for phase in ("dispatch", "combine") if all(phase in result["us"][name] for name in names)]
    figure = figure_module.Figure(figsize=(1.2 * len(names) + 2.5, 4), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / max(len(phases), 1)
    for number, phase in enumerate(phases):
        figures = [result["us"][name][phase] for name in names]
        medians = [one["median"] for one in figures]
        below = [one["median"] - one["p10"] for one in figures]
        above = [one["p90"] - one["median"] for one in figures]
        places = [index + (number - (len(phases) - 1) / 2) * width for index in range(len(names))]
        axes.bar(places, medians, width, yerr=[below, above], capsize=3, label=phase)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("microseconds, slowest rank")
    axes.set_yscale("log")
    card = result["card"]
    axes.set_title(f"{card['mode']}, {card['ranks']} ranks, {card['tokens']} x {card['hidden']} {card['dtype']}")
    axes.legend()
    figure.savefig(target, dpi=150)
