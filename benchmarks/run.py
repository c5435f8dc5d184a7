"""Measure everything and write it down: ``results/*.json``, a picture of each card that has peers, and ``RESULTS.md``.

    python benchmarks/run.py [--only NAME,NAME] [--render]

Cards are measured one after another, then the parts: more ranks, the proxy loop, posting to NICs, idle proxies, starts.
``--only`` measures some of them and keeps the other results; ``--render`` measures nothing. A benchmark that fails, or
whose data is wrong, leaves the result of an earlier run in place and makes the exit status 1; the others are measured
all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import (
    chaos,
    ep_sizes,
    fuzz,
    gpu_results,
    host_time,
    kernel_counts,
    kernel_faults,
    nic_posting,
    nic_writes,
    node_crossings,
    normal_counts,
    proxy_idle,
    proxy_loop,
    roce_posting,
    serving,
    starts,
    twins,
    verdicts,
)
from benchmarks.cards import load_cards, load_targets, missed_reasons, target_rows
from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.launch import RankFailed, mpi_missing
from uccl_ep_serving.bench.report import markdown, markdown_table, plot
from uccl_ep_serving.cli.bench import run_standalone
from uccl_ep_serving.errors import UcclEpError

HERE = Path(__file__).resolve().parent
CARDS, RESULTS, REPORT = HERE / "cards.toml", HERE / "results", HERE / "RESULTS.md"
#: Seconds for one card: none takes more than two minutes on two cores.
CARD_SECONDS = 300.0
MPI_STEP = "to have them: scripts/install bench"
#: From this load average on (of the last minute, before anything was started) a figure says more about the machine.
BUSY = 1.0

HEAD = """# Results

Written by `make bench` (`benchmarks/run.py`) from `results/*.json`, which hold every sample and setting; change
nothing here by hand. `make bench ARGS="--only prefill"` measures one card again.

Times are those of the slowest rank, medians with p10 - p90. A ratio is theirs over ours, taken round by round from
calls measured right after one another: 2.00 means that the other takes twice as long. `memcpy` is a reference: every
byte that a rank sends is copied once, without gathering, waiting or summing, by the library's copy, which caches what
it writes (ours does not, and may be faster). `gloo` and `mpi` gather rows once per (token, rank), exchange them with
counts known beforehand, and sum what returns in float32; they carry no expert ids, weights or counts and unpack
nothing per expert. Every sample was verified against the oracle; in back-to-back runs (`small-steady`) only the last.

A byte for another rank is copied once on the direct path (gathered into the peer's memory), twice through proxies
over shm (gathered for the proxy, then by it), three times over tcp (gathered, into the socket, out of it into place),
and a combine reads what came once more to sum it. So normal mode moves about 1, 1.5 and 2 times as much as `memcpy`
for two ranks, where half of the rows stay. A low-latency dispatch also writes each row once per expert that wants it,
as DeepEP's layout asks, and a combine reads as many: with top-8 on two ranks four per row received. `unpack` is the
reference for that: it writes those rows from memory of the rank itself, with no peer at all, and reads them.
"""


def _card(card: Card, target: Path) -> None:
    # complete or not at all: a run that fails leaves the result before it
    partial = target.with_suffix(".partial")
    try:
        run_standalone(card, str(partial), timeout=CARD_SECONDS)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


class _Part(NamedTuple):
    """Something measured beside the cards.

    Attributes:
        title: of its section in the report.
        measure: returns its result, which has the key ``machine``; None for what is run by itself: in the
            environment of an engine, beside an earlier commit, or for twelve minutes.
        markdown: a result as a table.
    """

    title: str
    measure: Callable[[], Mapping[str, Any]] | None
    markdown: Callable[[Mapping[str, Any]], str]


PARTS = {
    "ep_sizes": _Part("More ranks: time of a layer, memory of a rank", ep_sizes.measure, ep_sizes.markdown),
    "proxy_loop": _Part("The proxy loop", lambda: proxy_loop.measure(400), twins.markdown),
    "nic_posting": _Part("Posting over efa, to a queue in memory", lambda: nic_posting.measure(200), twins.markdown),
    "roce_posting": _Part(
        "Posting over roce, to a provider in memory", lambda: roce_posting.measure(100), twins.markdown
    ),
    "nic_writes": _Part(
        "Writes of a low-latency dispatch, by EFA devices in memory", nic_writes.measure, nic_writes.markdown
    ),
    "node_crossings": _Part(
        "Normal mode between nodes: bytes that leave a node", node_crossings.measure, node_crossings.markdown
    ),
    "proxy_idle": _Part("Idle proxies, and picking up a command", proxy_idle.measure, proxy_idle.markdown),
    "starts": _Part("Starts: the import, the commands, the first Buffer", starts.measure, starts.markdown),
    "host_time": _Part("The host of a GPU: a launch, an operation", None, host_time.markdown),
    "kernel_counts": _Part("Low latency's kernels for a GPU, counted", None, kernel_counts.markdown),
    "normal_counts": _Part("Normal mode's kernels for a GPU, counted", None, normal_counts.markdown),
    "gpu": _Part("On a GPU", None, gpu_results.markdown),
    "chaos": _Part("Faults of a running group, and how the survivors go on", None, chaos.markdown),
    "fuzz": _Part("Mutated frames and handshakes", None, fuzz.markdown),
    "kernel_faults": _Part("Faults in compiled kernels, on the model machine", None, kernel_faults.markdown),
    "verdicts": _Part("Verdicts of uccl-ep compare, three times in one sitting", None, verdicts.markdown),
    "serving-sglang": _Part("SGLang, serving over each all-to-all", None, serving.markdown),
    "serving-vllm": _Part("vLLM, serving over each all-to-all", None, serving.markdown),
}


def _part(measure: Callable[[], Mapping[str, Any]], target: Path) -> None:
    target.write_text(json.dumps(measure(), indent=1) + "\n")


def jobs() -> dict[str, Callable[[Path], None]]:
    """What can be measured, by name of its result, in order."""
    found: dict[str, Callable[[Path], None]] = {
        card.name: lambda target, card=card: _card(card, target)  # type: ignore[misc]
        for card in load_cards(CARDS)
    }
    for name, part in PARTS.items():
        if part.measure is not None:
            found[name] = lambda target, measure=part.measure: _part(measure, target)  # type: ignore[misc]
    return found


def render(results: dict[str, Any]) -> str:
    """The whole report. Each result says which commit and machine it is from: they may differ."""
    targets = load_targets(CARDS)
    parts = [HEAD, "## Targets\n", markdown_table(*target_rows(targets, results)) + "\n"]
    if missed := missed_reasons(targets, results):
        parts.append("Missed, and why:\n\n" + "\n".join(f"* {line}" for line in missed) + "\n")
    cards = [name for name in jobs() if name in results and "card" in results[name]]
    if cards:
        parts.append("## Dispatch and combine\n")
    for name in cards:
        picture = f"\n![{name}](results/{name}.png)\n" if _beside_others(results[name]) else ""
        parts.append(markdown(results[name]) + picture)
    for name, part in PARTS.items():
        if name in results:
            machine = results[name]["machine"]
            load = " ".join(f"{value:.2f}" for value in machine["load"])
            where = (
                f"Commit {machine['commit'] or 'unknown'}; {machine['cpu']}, {machine['cores']} cores, load {load}; "
            )
            where += f"{machine['when']}."
            parts.append(f"## {part.title}\n\n{where}\n\n{part.markdown(results[name])}\n")
    return "\n".join(parts)


def _beside_others(result: Mapping[str, Any]) -> bool:
    """True for a card with peers, which is worth a picture."""
    return bool(result.get("card", {}).get("against"))


def draw(results: Mapping[str, Any]) -> None:
    """A picture of every card that has peers, beside its result. Raises ConfigError without matplotlib."""
    for name, result in results.items():
        if _beside_others(result):
            plot(result, RESULTS / f"{name}.png")


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
    failed: list[str] = []
    if not options.render:
        if os.getloadavg()[0] >= BUSY:
            print(
                f"bench: this machine is busy (load {os.getloadavg()[0]:.2f}): figures will be worse", file=sys.stderr
            )
        if reason := mpi_missing():
            print(f"bench: no figures beside MPI ({reason}); {MPI_STEP}", file=sys.stderr)
        for name in wanted:
            print(f"bench: {name}", file=sys.stderr, flush=True)
            begin = time.monotonic()
            try:
                every[name](RESULTS / f"{name}.json")
            except (RankFailed, UcclEpError, AssertionError, OSError, subprocess.SubprocessError) as error:
                # the others are still worth having; this one keeps the result of an earlier run
                print(f"bench: {name}: {type(error).__name__}: {error}", file=sys.stderr)
                failed.append(name)
            print(f"bench: {name} took {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    results = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    draw(results)
    REPORT.write_text(render(results))
    print(f"bench: wrote {REPORT.relative_to(Path.cwd()) if REPORT.is_relative_to(Path.cwd()) else REPORT}")
    if failed:
        print(f"bench: not measured this time: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
