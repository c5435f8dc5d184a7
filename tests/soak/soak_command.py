"""``make soak``: adversarial cases, then layers on processes of uneven speed; what was found goes into a JSON file."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tests.soak import soak_adversarial, soak_layers, soak_samples
from tests.soak.soak_samples import Sample
from tests.support.ranks import Ranks
from uccl_ep_serving.bench.machine import describe

__all__ = ["app", "run_cases", "run_layers"]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "soak.json"
#: Seconds without an answer from a stretch, after which it is given up and named.
STRETCH_SECONDS = 900.0
#: Samples from which on resident memory is judged: before, caches are still filling.
WARM = 24
#: Seconds between lines of progress where there is no terminal.
LINE_SECONDS = 20.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()
Advance = Callable[[int, str], None]


class SoakFailed(Exception):
    """Something did not hold; the message ends with the command that runs it again."""


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Advance]:
    """A function that moves the progress bar: (how many more are done, what to say)."""
    if not console.is_terminal:
        done, said, started = 0, 0.0, time.monotonic()

        def line(more: int, text: str) -> None:
            nonlocal done, said
            done += more
            now = time.monotonic()
            if done == total or now - said > LINE_SECONDS:
                said = now
                print(f"soak: {done} of {total} {what} in {now - started:.0f} s; {text}", flush=True)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    clocks = (TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, *clocks, console=console) as bar:
        task = bar.add_task(what, total=total, text="")
        yield lambda more, text: bar.update(task, advance=more, text=text)


def _step(total: int, wanted: int) -> int:
    """Length of a stretch: ``wanted``, or less so that there are enough samples to judge growth by."""
    return max(1, min(wanted, total // 12))


def run_cases(pool: Ranks, seed: int, cases: int, repeat: int, rss_limit: int) -> dict[str, Any]:
    """Cases ``seed`` up to ``seed + cases`` in one process. Raises SoakFailed with the seed."""
    ends: Counter[tuple[str, str]] = Counter()
    slowest, operations, samples = (0.0, 0.0, ""), 0, []
    started, step = time.monotonic(), _step(cases, 20)
    with _progress("adversarial cases", cases) as advance:
        for first in range(seed, seed + cases, step):
            seeds = range(first, min(first + step, seed + cases))
            try:
                (done,) = pool.run(1, soak_adversarial.stretch, seeds, repeat, timeout=STRETCH_SECONDS)
            except AssertionError as error:  # RankFailed is one: the process died, or gave no answer
                raise SoakFailed(f"{error}\n{_again(first, len(seeds), repeat)}") from error
            if done.failure:
                failed = int(done.failure.split(":")[0].removeprefix("seed "))
                raise SoakFailed(f"{done.failure}\n{_again(failed, 1, 20)}")
            ends += done.ends
            operations += done.operations
            slowest = max(slowest, done.slowest)
            samples.append(done.held)
            advance(len(seeds), f"seed {seeds.stop - 1}, {done.held.rss >> 20} MiB")
    _flat("the process of the cases", samples, rss_limit)
    return {
        "cases": cases,
        "seeds": [seed, seed + cases - 1],
        "repeat": repeat,
        "round_trips_of_ranks": operations,
        "ends": {f"{trouble}: {end}": number for (trouble, end), number in sorted(ends.items())},
        "slowest_case": dict(zip(("seconds", "processor_seconds", "case"), slowest, strict=True)),
        "seconds": round(time.monotonic() - started, 1),
        "held": soak_samples.summary(samples),
    }


def _again(seed: int, cases: int, repeat: int) -> str:
    return f'again: make soak ARGS="--layers 0 --seed {seed} --cases {cases} --repeat {repeat}"'


def run_layers(
    pool: Ranks, plan: soak_layers.LayerPlan, layers: int, lives: int, wanted: int, rss_limit: int
) -> dict[str, Any]:
    """``layers`` layers on ``plan.ranks`` processes, over ``lives`` Buffers one after another. Raises SoakFailed."""
    started, step = time.monotonic(), _step(layers, wanted)
    # a stretch that begins in the middle of two overlapped layers would see the second one alone
    step = -(-step // 4) * 4
    starts = list(range(0, layers, step))
    closing = {starts[-1], *(starts[len(starts) * life // lives - 1] for life in range(1, lives))}
    samples: list[list[Sample]] = [[] for _ in range(plan.ranks)]
    moved: list[Counter[str]] = [Counter() for _ in range(plan.ranks)]
    transports: set[str] = set()
    with _progress("layers", layers) as advance:
        for begin in starts:
            end = min(begin + step, layers)
            try:
                results = pool.run(
                    plan.ranks, soak_layers.stretch, plan, begin, end, begin in closing, timeout=STRETCH_SECONDS
                )
            except AssertionError as error:
                layer = plan.first + begin
                raise SoakFailed(
                    f'{error}\nagain: make soak ARGS="--cases 0 --seed {plan.seed} --ranks {plan.ranks} '
                    f'--first-layer {layer} --layers {max(end - begin, 12)}"'
                ) from error
            for rank, (held, stats) in enumerate(results):
                samples[rank].append(held)
                transports |= set(stats.pop("transport_by_peer", {}).values())
                moved[rank].update(stats)
            advance(end - begin, f"rss {' '.join(str(one[-1].rss >> 20) for one in samples)} MiB")
    for rank, one in enumerate(samples):
        _flat(f"rank {rank}", one, rss_limit)
    return {
        "layers": layers,
        "seed": plan.seed,
        "first_layer": plan.first,
        "ranks": plan.ranks,
        "buffers_one_after_another": lives,
        "settings": plan.settings,
        "transports": sorted(transports),
        "seconds": round(time.monotonic() - started, 1),
        "by_rank": [
            {**counted, "held": soak_samples.summary(one)} for counted, one in zip(moved, samples, strict=True)
        ],
    }


def _flat(whose: str, samples: list[Sample], rss_limit: int) -> None:
    """Raise SoakFailed when something grew; too few samples still show threads and descriptors, but not memory."""
    if len(samples) >= 8 and (grew := soak_samples.not_flat(samples, rss_limit if len(samples) >= WARM else 1 << 60)):
        raise SoakFailed(f"{whose}: {'; '.join(grew)}")


def _describe() -> dict[str, Any]:
    """The machine and the commit before a part runs: the checkout may be another one when it ends."""
    machine = describe()
    if not machine["commit"]:
        print("soak: no git checkout holds this source: the figures will name no commit", flush=True)
    return machine


def _record(output: Path, part: str, machine: dict[str, Any], found: dict[str, Any]) -> None:
    """Put one part's figures into the file, beside those that are there."""
    known = json.loads(output.read_text()) if output.exists() else {}
    known[part] = {"machine": {**machine, "load_after": describe()["load"]}, **found}
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(".partial")
    partial.write_text(json.dumps(known, indent=1) + "\n")
    partial.replace(output)


def _show_cases(found: dict[str, Any]) -> None:
    table = Table("wire", "what the ranks raised", "cases", title=f"{found['cases']} adversarial cases")
    for name, number in found["ends"].items():
        trouble, _, end = name.partition(": ")
        table.add_row(trouble, end, str(number))
    console.print(table)
    slow = found["slowest_case"]
    console.print(f"slowest {slow['seconds']:.1f} s ({slow['processor_seconds']:.1f} s of processors): {slow['case']}")


def _show_layers(found: dict[str, Any]) -> None:
    title = f"{found['layers']} layers over {', '.join(found['transports'])}, {found['seconds']:.0f} s"
    table = Table("rank", "GiB sent", "messages", "rss first", "rss last", "growth MiB", "threads", "fds", title=title)
    for rank, one in enumerate(found["by_rank"]):
        held = one["held"]
        table.add_row(
            str(rank),
            f"{one['bytes_sent'] / 2**30:.2f}",
            f"{one['messages_sent']:,}",
            f"{held['rss_mib_first_sample']:.0f}",
            f"{held['rss_mib_last_sample']:.0f}",
            str(held["rss_mib_median_of_last_quarter_less_that_of_second"]),
            str(held["threads"]),
            str(held["descriptors"]),
        )
    console.print(table)


@app.command()
def soak(
    cases: Annotated[int, typer.Option(min=0, help="Adversarial cases, one per seed from --seed on.")] = 2000,
    layers: Annotated[int, typer.Option(min=0, help="Layers (dispatch and combine), both modes in turn.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="First seed of the cases; seed of the layers.")] = 0,
    repeat: Annotated[int, typer.Option(min=1, help="Run each case so often: threads interleave anew.")] = 1,
    ranks: Annotated[int, typer.Option(min=2, max=8, help="Processes of the layers.")] = 3,
    first_layer: Annotated[int, typer.Option(min=0, help="Number of the first layer.")] = 0,
    lives: Annotated[int, typer.Option(min=1, help="Buffers opened and closed one after another.")] = 10,
    transport: Annotated[str, typer.Option(help="tcp, shm, or direct.")] = "tcp",
    proxies: Annotated[int, typer.Option(min=1, max=16, help="Proxy threads per rank.")] = 2,
    stretch: Annotated[int, typer.Option(min=4, help="Layers between two looks at memory.")] = 100,
    rss_limit_mib: Annotated[float, typer.Option(min=0, help="Growth of resident memory that is allowed.")] = 4.0,
    output: Annotated[Path, typer.Option(help="Where the figures go; parts not run keep theirs.")] = RESULTS,
) -> None:
    """Run adversarial cases on the fake transport, then layers on processes of uneven speed, all against the oracle.

    Exit status 1, with the command that repeats it, as soon as something does not hold: data that differs, an error
    that the wire does not explain, a wait without end, memory or threads or descriptors that grow.
    """
    rss_limit = int(rss_limit_mib * 2**20)
    first_layer -= first_layer % 4
    pool = Ranks()
    try:
        if cases:
            print(f"soak: seeds {seed} to {seed + cases - 1}", flush=True)
            machine = _describe()
            found = run_cases(pool, seed, cases, repeat, rss_limit)
            _record(output, "adversarial", machine, found)
            _show_cases(found)
            pool.close()
        if layers:
            print(f"soak: layers {first_layer} to {first_layer + layers - 1} of seed {seed}", flush=True)
            settings: dict[str, Any] = {"proxies": proxies, "channels": proxies, "heap_bytes": 8 << 20}
            settings |= {"timeout": 60.0, "round_bytes": 1 << 20, "chunk_bytes": 64 << 10}
            if transport != "direct":
                settings |= {"direct": False, "transport": transport}
            plan = soak_layers.LayerPlan(seed, ranks, first_layer, settings)
            machine = _describe()
            found = run_layers(pool, plan, layers, min(lives, max(1, layers // 100)), stretch, rss_limit)
            _record(output, "layers", machine, found)
            _show_layers(found)
    except SoakFailed as error:
        print(f"soak: FAILED: {error}", flush=True)
        raise typer.Exit(1) from error
    finally:
        pool.close()
    left = [name for name in os.listdir("/dev/shm") if name.startswith("uccl_ep")]
    if left:
        print(f"soak: FAILED: left in shared memory: {left}", flush=True)
        raise typer.Exit(1)
    print("soak: everything held", flush=True)
