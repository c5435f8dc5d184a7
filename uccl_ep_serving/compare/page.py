"""What a comparison says, for a terminal and as an HTML page that opens without a network."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from uccl_ep_serving.compare.directory import write_json

__all__ = ["Page", "Rows", "sentence", "verdict_rows", "write_page"]

Rows = tuple[list[str], list[list[str]]]
"""Headings, and rows of as many cells."""


@dataclass(frozen=True)
class Page:
    """One report.

    Attributes:
        command: the command that made it. workload, method, machine: a line each.
        findings: sentences, the most important first. told: what a reader must know before believing them.
        tables: title, headings, rows, and how many columns from the left hold words.
        environment: variables that act on what was measured.
        template: of the HTML page, beside this module; it extends page.html.j2. values: what it needs beside the above.
    """

    command: str
    workload: str
    method: str
    machine: str
    findings: Sequence[str]
    told: Sequence[str]
    tables: Sequence[tuple[str, list[str], list[list[str]], int]]
    environment: Mapping[str, str]
    template: str
    values: Mapping[str, Any]

    def console(self) -> RenderableType:
        """Everything for a terminal; what was found comes last, where eyes are."""
        parts: list[RenderableType] = [Text(self.workload), Text(self.method), Text(self.machine)]
        parts += [_table(*one) for one in self.tables]
        parts += [Text(one, style="yellow") for one in self.told]
        parts.append(Text(""))
        parts += [Text(one, style="bold") for one in self.findings]
        return Group(*parts)

    def html(self, picture: str) -> str:
        """The HTML page; ``picture`` is inline SVG, or ""."""
        loader = jinja2.FileSystemLoader(Path(__file__).parent)
        # every name and reason comes from outside: nothing but the picture may be markup
        environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return environment.get_template(self.template).render(**fields, **self.values, picture=picture)


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> Table:
    table = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < words else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def sentence(of: str, verdict: Mapping[str, Any]) -> str:
    """A verdict as a sentence about ``of``, "" for the whole."""
    begin, direction, words = f"{of}: " if of else "", verdict["direction"], verdict["words"]
    if direction:
        return f"{begin}{verdict['a']} is {direction} than {verdict['b']}: {words.removeprefix(direction + ': ')}"
    return f"{begin}{verdict['a']} and {verdict['b']}: {words}"


def verdict_rows(verdicts: Sequence[Mapping[str, Any]], of: str, quotient: str) -> Rows:
    """Every verdict, and the quotient of each start.

    Args:
        of: the field that says what was compared, and its heading. quotient: heading of the quotients.
    """
    rows = [
        [
            one[of],
            f"{one['a']} beside {one['b']}",
            one["words"],
            f"{one['ratio']:.3f} ({one['low']:.3f} .. {one['high']:.3f})",
            " ".join(f"{start:.2f}" for start in one["by_start"]),
        ]
        for one in verdicts
    ]
    return [of, "backends", "verdict on the first", quotient, "each start"], rows


def write_page(page: Page, result: Mapping[str, Any], stem: Path, draw: Callable[[Path], None] | None) -> list[Path]:
    """Write ``stem`` with .json and .html and, where matplotlib is installed, .png and .svg.

    Args:
        result: plain values, all that is known.
        draw: draws the picture into a file by its suffix; None when there is nothing to draw.

    Returns:
        What was written, the page first.
    """
    drawn: list[Path] = []
    picture = ""
    if draw is not None and importlib.util.find_spec("matplotlib") is not None:
        drawn = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
        for path in drawn:
            draw(path)
        svg = drawn[1].read_text()
        picture = svg[svg.index("<svg") :]
    html, data = stem.with_suffix(".html"), stem.with_suffix(".json")
    html.write_text(page.html(picture))
    write_json(data, result)
    return [html, data, *drawn]
