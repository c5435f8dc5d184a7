"""The picture of a comparison: how long a layer takes through each backend, and how sure the quotients are."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uccl_ep_serving.compare.results import LAYER

__all__ = ["draw"]

_OURS, _OTHER, _FAINT = "#1f6feb", "#8c959f", "#d0d7de"
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def draw(result: Mapping[str, Any], target: Path) -> None:
    """Draw ``result`` into ``target`` (PNG or SVG by its suffix). Needs matplotlib."""
    matplotlib: Any = importlib.import_module("matplotlib")
    figure_module: Any = importlib.import_module("matplotlib.figure")
    names = list(result["measured"])
    verdicts = [one for one in result["verdicts"] if one["phase"] == LAYER and one["a"] == result["reference"]]
    # letters are drawn, since a browser's own would not fit; one result gives one file
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "uccl-ep", "font.size": 9}):
        figure = figure_module.Figure(figsize=(10, 1.6 + 0.42 * len(names)), layout="constrained")
        times, quotients = figure.subplots(1, 2)
        _times(times, result, names)
        _quotients(quotients, result["reference"], verdicts)
        metadata = {"Date": None} if target.suffix == ".svg" else None
        figure.savefig(target, dpi=150, metadata=metadata)


def _times(axes: Any, result: Mapping[str, Any], names: list[str]) -> None:
    figures = [result["us"][name][LAYER] for name in names]
    medians = [one["median"] for one in figures]
    below = [one["median"] - one["p10"] for one in figures]
    above = [one["p90"] - one["median"] for one in figures]
    colours = [_OURS if name.startswith("uccl_ep") else _OTHER for name in names]
    axes.barh(names, medians, xerr=[below, above], color=colours, ecolor="#24292f", capsize=3, height=0.6)
    for row, one in enumerate(figures):
        axes.annotate(
            f"{one['median']:,.0f}", (one["p90"], row), (6, 0), textcoords="offset points", va="center", ha="left"
        )
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(one["p90"] for one in figures))
    axes.set_xlabel("microseconds a layer, slowest rank: median, p10 .. p90")
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
    axes.axvspan(0.95, 1.05, color=_FAINT, alpha=0.4, linewidth=0)
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
