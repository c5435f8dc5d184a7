"""Measure everything and write it down: ``results/*.json`` and ``RESULTS.md``.

    python benchmarks/run.py [--only NAME,NAME] [--render]

Cards are measured one after another, then the proxy loop and the idle proxies. ``--only`` measures some of them and
keeps the other results; ``--render`` measures nothing. A benchmark whose data is wrong ends the run with status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import proxy_idle
import proxy_loop

from uccl_ep_serving.cli.bench import run_standalone
from uccl_ep_serving.cli.bench_card import Card, load_cards
from uccl_ep_serving.cli.bench_launch import RankFailed
from uccl_ep_serving.cli.bench_report import markdown, markdown_table
from uccl_ep_serving.cli.bench_target import load_targets, target_rows

HERE = Path(__file__).resolve().parent
CARDS, RESULTS, REPORT = HERE / "cards.toml", HERE / "results", HERE / "RESULTS.md"
#: Seconds for one card.
CARD_SECONDS = 900.0
#: From this load average on (of the last minute, before anything was started) a figure says more about the machine.
BUSY = 1.0

HEAD = """# Results

Written by `make bench` (`benchmarks/run.py`) from `results/*.json`, which hold every sample and setting; change
nothing here by hand. `make bench ARGS="--only prefill"` measures one card again.

Times are those of the slowest rank, medians with p10 - p90. A ratio is theirs over ours, taken round by round from
calls measured right after one another: 2.00 means that the other takes twice as long. `memcpy` is the bound: every
byte that a rank sends is copied once, without gathering, waiting or summing. `gloo` and `mpi` gather rows once per
(token, rank), exchange them with counts known beforehand, and sum what returns in float32; they carry no expert ids,
weights or counts and unpack nothing per expert. Every measured call was held against the oracle.
"""


def _card(card: Card, target: Path) -> None:
    # complete or not at all: a run that fails leaves the result before it
    partial = target.with_suffix(".partial")
    try:
        run_standalone(card, str(partial), timeout=CARD_SECONDS)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _part(measure: Callable[[], Any], target: Path) -> None:
    target.write_text(json.dumps(measure(), indent=1) + "\n")


def jobs() -> dict[str, Callable[[Path], None]]:
    """What can be measured, by name of its result, in order."""
    found: dict[str, Callable[[Path], None]] = {
        card.name: lambda target, card=card: _card(card, target)  # type: ignore[misc]
        for card in load_cards(CARDS)
    }
    found["proxy_loop"] = lambda target: _part(lambda: proxy_loop.measure(400), target)
    found["proxy_idle"] = lambda target: _part(proxy_idle.measure, target)
    return found


def render(results: dict[str, Any]) -> str:
    """The whole report. Each result says which commit and machine it is from: they may differ."""
    parts = [HEAD, "## Targets\n", markdown_table(*target_rows(load_targets(CARDS), results)) + "\n"]
    cards = [name for name in jobs() if name in results and "card" in results[name]]
    if cards:
        parts += ["## Dispatch and combine\n", *(markdown(results[name]) for name in cards)]
    for name, title, module in (
        ("proxy_loop", "The proxy loop", proxy_loop),
        ("proxy_idle", "Idle proxies, and picking up a command", proxy_idle),
    ):
        if name in results:
            machine = results[name]["machine"]
            load = " ".join(f"{value:.2f}" for value in machine["load"])
            where = (
                f"Commit {machine['commit'] or 'unknown'}; {machine['cpu']}, {machine['cores']} cores, load {load}; "
            )
            where += f"{machine['when']}."
            parts.append(f"## {title}\n\n{where}\n\n{module.markdown(results[name])}\n")
    return "\n".join(parts)


def main() -> int:
    """Measure what was asked for and write the report; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of results, by commas")
    parser.add_argument("--render", action="store_true", help="only write RESULTS.md from the results that are there")
    options = parser.parse_args()
    every = jobs()
    wanted = [name for name in options.only.split(",") if name] or list(every)
    unknown = sorted(set(wanted) - set(every))
    if unknown:
        parser.error(f"no such result: {', '.join(unknown)}; there are {', '.join(every)}")
    RESULTS.mkdir(exist_ok=True)
    if not options.render:
        if os.getloadavg()[0] >= BUSY:
            print(
                f"bench: this machine is busy (load {os.getloadavg()[0]:.2f}): figures will be worse", file=sys.stderr
            )
        for name in wanted:
            print(f"bench: {name}", file=sys.stderr, flush=True)
            try:
                every[name](RESULTS / f"{name}.json")
            except RankFailed as error:
                print(f"bench: {name}: {error}", file=sys.stderr)
                return 1
    results = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    REPORT.write_text(render(results))
    print(f"bench: wrote {REPORT.relative_to(Path.cwd()) if REPORT.is_relative_to(Path.cwd()) else REPORT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
