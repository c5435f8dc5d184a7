"""Pictures of comparisons: bars with their spread, and how sure quotients are."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uccl_ep_serving.compare.results import LAYER

__all__ = ["Bars", "draw", "draw_bars"]

_OURS, _OTHER, _FAINT = "#1f6feb", "#8c959f", "#d0d7de"
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True)
class Bars:
    """One panel of :func:`draw_bars`: by name, what stands where the bar ends, and both ends of its spread."""

    title: str
    values: Mapping[str, tuple[float, ...]]


def draw(result: Mapping[str, Any], target: Path) -> None:
    """Draw ``result`` into ``target`` (PNG or SVG by its suffix). Needs matplotlib."""
    names = list(result["measured"])
    verdicts = [one for one in result["verdicts"] if one["phase"] == LAYER and one["a"] == result["reference"]]
    with _figure(target, len(names), 2) as (times, quotients):
        layers = {name: result["us"][name][LAYER] for name in names}
        values = {name: (one["median"], one["p10"], one["p90"]) for name, one in layers.items()}
        _bars(times, Bars("microseconds a layer, slowest rank: median, p10 .. p90", values))
        _quotients(quotients, result["reference"], verdicts)


def draw_bars(panels: Sequence[Bars], target: Path) -> None:
    """Draw ``panels`` side by side into ``target`` (PNG or SVG by its suffix). Needs matplotlib."""
    with _figure(target, max(len(one.values) for one in panels), len(panels)) as axes:
        for index, (one, bars) in enumerate(zip(axes, panels, strict=True)):
            _bars(one, bars)
            if index:
                one.set_yticklabels([])


@contextlib.contextmanager
def _figure(target: Path, rows: int, panels: int) -> Iterator[Any]:
    """Axes of a figure, which is saved into ``target``."""
    matplotlib: Any = importlib.import_module("matplotlib")
    figure_module: Any = importlib.import_module("matplotlib.figure")
    # letters are drawn, since a browser's own would not fit; one result gives one file
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "uccl-ep", "font.size": 9}):
        figure = figure_module.Figure(figsize=(10, 1.6 + 0.42 * rows), layout="constrained")
        yield figure.subplots(1, panels)
        metadata = {"Date": None} if target.suffix == ".svg" else None
        figure.savefig(target, dpi=150, metadata=metadata)


def _bars(axes: Any, bars: Bars) -> None:
    names, values = list(bars.values), list(bars.values.values())
    medians = [one[0] for one in values]
    spread = [[one[0] - one[1] for one in values], [one[2] - one[0] for one in values]]
    colours = [_OURS if name.startswith("uccl_ep") else _OTHER for name in names]
    axes.barh(names, medians, xerr=spread, color=colours, ecolor="#24292f", capsize=3, height=0.6)
    for row, (median, _, high) in enumerate(values):
        digits = 0 if median >= 100 else 1
        axes.annotate(f"{median:,.{digits}f}", (high, row), (6, 0), textcoords="offset points", va="center", ha="left")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(one[2] for one in values))
    axes.set_xlabel(bars.title)
    axes.spines[["top", "right"]].set_visible(False)


def _quotients(axes: Any, reference: str, verdicts: list[Mapping[str, Any]]) -> None:
    ends = [1.0]
    for row, one in enumerate(verdicts):
        # the other's time divided by the reference's: to the right the reference is faster
        low, middle, high = 1 / one["high"], 1 / one["ratio"], 1 / one["low"]
        starts = [1 / start for start in one["by_start"]]
        colour = "#24292f" if one["direction"] else _OTHER
        axes.plot(starts, [row] * len(starts), "|", color=_OURS, markersize=9, alpha=0.6)
        axes.errorbar(
            middle, row, xerr=[[middle - low], [high - middle]], fmt="o", color=colour, capsize=4,
            markerfacecolor=colour if one["direction"] else "white",
        )  # fmt: skip
        ends += [low, high, *starts]
    axes.axvline(1, color="#24292f", linewidth=0.8)
    axes.axvspan(0.9, 1.1, color=_FAINT, alpha=0.4, linewidth=0)
    axes.set_xscale("log")
    reach = max(max(ends), 1 / min(ends), 1.1) ** 1.15
    axes.set_xlim(1 / reach, reach)
    fine = (0.67, 0.8, 0.9, 1.1, 1.25, 1.5) if reach < 3 else ()
    ticks = sorted(tick for tick in (*_TICKS, *fine) if 1 / reach <= tick <= reach)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(verdicts)), [one["b"] for one in verdicts])
    axes.set_ylim(len(verdicts) - 0.4, -0.6)
    axes.set_xlabel(
        f"its time / {reference}'s, 95 % interval; strokes: starts\n"
        f"right of 1: {reference} is faster; hollow: no direction"
    )
    axes.spines[["top", "right"]].set_visible(False)
