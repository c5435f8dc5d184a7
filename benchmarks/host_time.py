"""What the host of a GPU spends on a launch and on an operation, in eager mode, on a stub of the CUDA driver.

    python benchmarks/host_time.py [--json FILE] [--before COMMIT]

Python, Triton's launcher and cuda-bindings are the real ones; the driver is one that executes nothing, and streams and
events are made by calls of it from Python (``tests/support/cuda_driver``), which cost more than torch's own. One rank,
few small tensors in memory of the host: what an operation costs the host does not depend on their sizes.

Two ways of launching take turns, each time in a new process: what was loaded ahead at once, and Triton's own way, which
finds the code of each launch by its arguments. ``--before``: a third, an earlier commit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.source_tree import ROOT
from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.bench.statistics import summary

__all__ = ["markdown", "measure"]

AT_ONCE, BY_TRITON, BEFORE = "at once", "Triton's own way", "before"
#: Processes of each way, and calls of each kind in one, after a tenth as many of which nothing is taken.
ROUNDS, CALLS = 5, 300
#: A cold process compiles the kernels of normal mode.
SECONDS = 600.0
_TOKENS, _EXPERTS, _WORST = 8, 4, 64


def _samples(call: Callable[[], object], times: int) -> list[float]:
    """Microseconds of each of ``times`` calls."""
    taken = []
    for turn in range(times + times // 10):
        started = time.perf_counter_ns()
        call()
        if turn >= times // 10:
            taken.append((time.perf_counter_ns() - started) / 1e3)
    return taken


def run_here(way: str, times: int, normal: bool) -> dict[str, list[float]]:
    """Body of a process whose driver is the stub: samples by what was called. Of the product and the stub it uses what
    earlier commits have as well.

    Args:
        normal: normal mode too, whose kernels take a minute to compile where they have not been.
    """
    from tests.gpu import driver_bodies as bodies
    from tests.support.cuda_driver import torch_cuda
    from uccl_ep_serving.kernels.triton.launch import Launch

    torch_cuda.install(bodies.DRIVER)
    bodies.DRIVER.record(on=False)
    if way == BY_TRITON:
        Launch.run = Launch.run_by_triton  # type: ignore[method-assign]
    found: dict[str, list[float]] = {}
    for one in bodies._unique("low_latency"):
        one.compile()
        found[one.kernel.__name__] = _samples(one.run, times)
    return found | _operations(bodies, times, normal)


def _operations(bodies: Any, times: int, normal: bool) -> dict[str, list[float]]:
    buffer = bodies.opened()
    layer = bodies.Layer(buffer)
    rows, _, handle, _, _ = layer.dispatch()
    outputs = (rows[0] if isinstance(rows, tuple) else rows).bfloat16()  # the experts', whose time is not ours

    def combine() -> Any:
        return buffer.low_latency_combine(outputs, layer.ids, layer.weights, handle)

    found = {
        "low-latency dispatch": _samples(layer.dispatch, times),
        "low-latency combine": _samples(combine, times),
    }
    order = buffer._backend.gpu.order
    found["streams and events of an operation"] = _samples(
        lambda: order.run(lambda: None, [*rows] * 5, own_stream=True, finish=True), times
    )
    if not normal:
        buffer.destroy()
        return found
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(layer.ids, _EXPERTS)

    def dispatch() -> Any:
        # the host waits for nothing, as nothing runs that could answer
        return buffer.dispatch(
            layer.x,
            topk_idx=layer.ids,
            topk_weights=layer.weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            num_worst_tokens=_WORST,
        )

    received, _, _, _, given, _ = dispatch()
    found["normal dispatch"] = _samples(dispatch, times)
    found["normal combine"] = _samples(lambda: buffer.combine(received, given), times)
    buffer.destroy()
    return found


def _process(way: str, times: int, normal: bool, *paths: str) -> dict[str, list[float]]:
    """:func:`run_here` in a process of its own, for which ``paths`` come first on ``sys.path``."""
    from tests.support.cuda_driver.build import environment

    done = subprocess.run(
        [sys.executable, "-P", __file__, "--body", way, str(times), str(int(normal))],
        env=environment(*paths),
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_out(commit: str, folder: Path) -> None:
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit], stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)


def measure(rounds: int = ROUNDS, times: int = CALLS, before: str = "", normal: bool = True) -> dict[str, Any]:
    """Microseconds by way and by what was called, summaries of all rounds.

    Args:
        before: an earlier commit.
        normal: normal mode too.
    """
    machine = describe()
    ways: dict[str, tuple[str, ...]] = {AT_ONCE: (), BY_TRITON: ()}
    samples: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if before:
            check_out(before, Path(folder))
            ways[BEFORE] = (folder,)
        for _ in range(rounds):
            for way, paths in ways.items():
                for name, taken in _process(way, times, normal, *paths).items():
                    samples.setdefault(way, {}).setdefault(name, []).extend(taken)
    result: dict[str, Any] = {
        "machine": machine,
        "triton": importlib.metadata.version("triton"),
        "rounds": rounds,
        "calls": times,
        "us": {way: {name: summary(taken) for name, taken in found.items()} for way, found in samples.items()},
    }
    if before:
        result["before"] = before
    machine["load_after"] = describe()["load"]
    return result


_LAUNCH = "a launch of low latency"


def _of_row(taken: Mapping[str, Any], row: str) -> list[Any]:
    """What a row of the table is the mean of: every launch, else one operation."""
    return [one for name, one in taken.items() if " " not in name] if row == _LAUNCH else [taken[row]]


def markdown(found: Mapping[str, Any]) -> str:
    """A table of a result."""
    ways = [way for way in (BEFORE, BY_TRITON, AT_ONCE) if way in found["us"]]
    words = {BEFORE: f"commit {found.get('before', '')}", BY_TRITON: f"now, {BY_TRITON}", AT_ONCE: f"now, {AT_ONCE}"}
    lines = [
        "| microseconds of the host | " + " | ".join(words[way] for way in ways) + " | of the first |",
        "|---|" + "---:|" * (len(ways) + 1),
    ]
    kernels = {way: len(_of_row(found["us"][way], _LAUNCH)) for way in ways}
    for row in (_LAUNCH, *(name for name in found["us"][AT_ONCE] if " " in name)):
        medians = []
        cells = []
        for way in ways:
            taken = _of_row(found["us"][way], row)
            one = {key: statistics.fmean(each[key] for each in taken) for key in ("median", "p10", "p90")}
            medians.append(one["median"])
            cells.append(f"{one['median']:.1f} ({one['p10']:.1f} - {one['p90']:.1f})")
        lines.append(f"| {row} | " + " | ".join(cells) + f" | {medians[-1] / medians[0]:.0%} |")
    about = (
        f"Triton {found['triton']} on a stub of the driver; medians with p10 - p90 of {found['rounds']} x "
        f"{found['calls']} calls, of launches the mean over the kernels of a dispatch and a combine: "
        f"{kernels[ways[0]]} of the first column, {kernels[AT_ONCE]} now. Each operation has the streams "
        "and events of one as well, which the stub makes by calls from Python."
    )
    return "\n".join([*lines, "", about])


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--before", default="", help="an earlier commit, measured in the same rounds")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--body", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.body:
        way, times, normal = options.body
        print(json.dumps(run_here(way, int(times), normal == "1")))
        return
    found = measure(options.rounds, before=options.before)
    print(markdown(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
