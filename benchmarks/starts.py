"""How long it takes to start: the import, the commands, and the first Buffer with nothing compiled and with everything.

    python benchmarks/starts.py [--json FILE] [--times 5] [--cold 1] [--ranks 1 2 4 8]

Every sample is a fresh process (of a Buffer: fresh ranks). One start of each comes before those that are measured, so
that files are in memory and Python's own bytecode is written. A cold Buffer finds an empty UCCL_EP_CACHE_DIR each time,
a warm one what a start before it has compiled. The time of a Buffer begins after the imports and a barrier, and is that
of the slowest rank; the data of its first operation is compared with the oracle's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.launch import run_ranks
from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.bench.statistics import summary

__all__ = ["commands", "first_buffers", "imports", "markdown", "measure", "run_rank", "start_buffer"]

TIMES, COLD, RANKS = 5, 1, (1, 2, 4, 8)
MODES = ("low-latency", "normal")
#: Seconds that a start of ranks may take: 8 ranks on two cores, nothing compiled.
RANK_SECONDS = 900.0
#: By the word of a result: what follows `uccl-ep`, and the exit statuses that it may have.
COMMANDS: Mapping[str, tuple[Sequence[str], Sequence[int]]] = {
    "--help": (("--help",), (0,)),
    "plan": (("plan", "--ranks", "8", "--experts", "64"), (0,)),
    "top": (("top", "--once", "--pid", "999999999"), (1,)),
    "doctor": (("doctor",), (0, 1)),
}
_IMPORT = """
import time
begin = time.perf_counter()
import torch
between = time.perf_counter()
import uccl_ep_serving.buffer
print(between - begin, time.perf_counter() - between)
"""
_RANK_PROGRAM = "import sys; from benchmarks import starts; starts.run_rank(*sys.argv[1:])"


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """``values`` for the processes that are started meanwhile, which also keep the bytecode of what they import."""
    before = dict(os.environ)
    os.environ.update(values, PYTHONSAFEPATH="1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(arguments: Sequence[str], allowed: Sequence[int] = (0,)) -> str:
    """Standard output of a Python process. Raises CalledProcessError for a status that is not ``allowed``."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode not in allowed:
        print(done.stderr, file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, command)
    return done.stdout


def imports(times: int) -> dict[str, dict[str, float]]:
    """Seconds of importing torch, and then ``uccl_ep_serving.buffer``."""
    with _environment():
        samples = [[float(one) for one in _run(("-c", _IMPORT)).split()] for _ in range(1 + times)][1:]
    names = ("torch", "uccl_ep_serving.buffer")
    return {name: summary(values) for name, values in zip(names, zip(*samples, strict=True), strict=True)}


def commands(times: int) -> dict[str, dict[str, float]]:
    """Seconds of each of ``COMMANDS``, from the start of its process to its end."""
    found = {}
    with _environment():
        for name, (arguments, allowed) in COMMANDS.items():
            samples = []
            for _ in range(1 + times):
                begin = time.monotonic()
                _run(("-m", "uccl_ep_serving.cli.main", *arguments), allowed)
                samples.append(time.monotonic() - begin)
            found[name] = summary(samples[1:])
    return found


def _card(mode: str, ranks: int) -> Card:
    return Card(name="starts", mode=mode, ranks=ranks, tokens=16, hidden=512, experts=16, topk=4)


def run_rank(mode: str, directory: str) -> None:
    """Body of a rank: a Buffer and its first operation; when what happened goes into ``directory``.

    Raises WrongData when what came is not what the oracle says.
    """
    import torch
    import torch.distributed as dist

    from uccl_ep_serving.bench.problem import FlatProblem, LowLatencyProblem
    from uccl_ep_serving.bench.routing import Routing
    from uccl_ep_serving.bench.subjects import LowLatencySubject, NormalSubject
    from uccl_ep_serving.buffer import Buffer
    from uccl_ep_serving.config import Settings

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    card, rank, cpu = _card(mode, group.size()), group.rank(), torch.device("cpu")
    low_latency, routing = mode == "low-latency", Routing.draw(card)
    problem: Any = LowLatencyProblem(card, routing, rank) if low_latency else FlatProblem(card, routing, rank)
    dist.barrier()
    begin = time.monotonic()
    buffer = Buffer(group, low_latency_mode=low_latency, settings=Settings.from_environment(device="cpu"))
    built = time.monotonic()
    if low_latency:
        subject: Any = LowLatencySubject(mode, buffer, problem, cpu, weights_at_dispatch=True)
    else:
        subject = NormalSubject(mode, buffer, problem, cpu)
    for phase in subject.phases.values():
        phase(0)
    done = time.monotonic()
    subject.check(0)
    Path(directory, f"{rank}.json").write_text(json.dumps({"begin": begin, "built": built, "done": done}))
    subject.close()
    dist.destroy_process_group()


def start_buffer(mode: str, ranks: int, cache: Path | None = None) -> dict[str, float]:
    """Seconds of one start of the slowest of ``ranks`` ranks: ``buffer`` = its construction, ``operation`` = that and
    the first dispatch and combine, ``whole`` = from before the processes to the same instant.

    Args:
        mode: one of ``MODES``.
        cache: where compiled code is kept; None: where it usually is.

    Raises RankFailed when a rank failed or its data was wrong.
    """
    chosen = {} if cache is None else {"UCCL_EP_CACHE_DIR": str(cache)}
    with tempfile.TemporaryDirectory() as directory, _environment(**chosen):
        start = time.monotonic()
        run_ranks([sys.executable, "-c", _RANK_PROGRAM, mode, directory], ranks, RANK_SECONDS)
        instants = [json.loads(Path(directory, f"{rank}.json").read_text()) for rank in range(ranks)]
    return {
        "buffer": max(one["built"] - one["begin"] for one in instants),
        "operation": max(one["done"] - one["begin"] for one in instants),
        "whole": max(one["done"] for one in instants) - start,
    }


def _summaries(starts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    return {name: summary([one[name] for one in starts]) for name in starts[0]} | {"samples": len(starts)}


def _cold(mode: str, ranks: int, times: int) -> dict[str, Any]:
    """Starts with nothing compiled, and what the last one left in the cache."""
    starts, kept = [], []
    for number in range(times):
        print(f"starts: cold, {mode}, {_words(ranks)}: {number + 1} of {times}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as cache:
            starts.append(start_buffer(mode, ranks, Path(cache)))
            kept = [path.stat().st_size for path in Path(cache).rglob("*") if path.is_file()]
    return _summaries(starts) | {"cache_bytes": sum(kept), "cache_files": len(kept)}


def _words(ranks: int) -> str:
    return f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"


def first_buffers(times: int, cold: int, ranks: Sequence[int]) -> dict[str, dict[str, Any]]:
    """First Buffers by what they find compiled, mode and ranks: of each, ``times`` warm or ``cold`` cold starts."""
    found = {}
    for mode in MODES:
        start_buffer(mode, 2)
        found[f"warm, {mode}, 2 ranks"] = _summaries([start_buffer(mode, 2) for _ in range(times)])
    if cold:
        found |= {f"cold, {MODES[0]}, {_words(one)}": _cold(MODES[0], one, cold) for one in ranks}
        found[f"cold, {MODES[1]}, 2 ranks"] = _cold(MODES[1], 2, cold)
    return found


def measure(times: int = TIMES, cold: int = COLD, ranks: Sequence[int] = RANKS) -> dict[str, Any]:
    """All of it, in seconds."""
    machine = describe()
    result = {
        "machine": machine,
        "times": times,
        "import_s": imports(times),
        "command_s": commands(times),
        "first_buffer_s": first_buffers(times, cold, ranks),
    }
    machine["load_after"] = describe()["load"]
    return result


def _cells(one: Mapping[str, float]) -> str:
    return f"{one['median']:.2f} | {one['p10']:.2f} - {one['p90']:.2f}"


def markdown(result: Mapping[str, Any]) -> str:
    """Two tables."""
    lines = [
        f"Medians and p10 - p90 of {result['times']} fresh processes each.",
        "",
        "| start | s | p10 - p90 |",
        "|---|---:|---:|",
        f"| `import torch` | {_cells(result['import_s']['torch'])} |",
        f"| then `import uccl_ep_serving.buffer` | {_cells(result['import_s']['uccl_ep_serving.buffer'])} |",
    ]
    lines += [f"| `uccl-ep {name}` | {_cells(one)} |" for name, one in result["command_s"].items()]
    lines += [
        "",
        "The first Buffer, of the slowest rank: warm finds everything compiled, cold nothing. From the processes' "
        "start on it includes the interpreter, importing torch, and joining the process group.",
        "",
        "| first Buffer | s | with its first dispatch and combine | p10 - p90 | from the processes' start on | starts "
        "| compiled code |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, one in result["first_buffer_s"].items():
        files = f"{one['cache_bytes'] / 1024:,.0f} KiB in {one['cache_files']} files" if "cache_bytes" in one else ""
        lines.append(
            f"| {name} | {one['buffer']['median']:.2f} | {_cells(one['operation'])} | {one['whole']['median']:.2f} | "
            f"{one['samples']} | {files} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--times", type=int, default=TIMES, help="samples of everything but cold Buffers")
    parser.add_argument("--cold", type=int, default=COLD, help="cold Buffers of each kind; 0: none")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="ranks of a cold Buffer")
    options = parser.parse_args()
    result = measure(options.times, options.cold, options.ranks)
    print(markdown(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
