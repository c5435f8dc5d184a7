"""C++ twins: the same work over the same memory, compiled where there is a g++, measured in the same rounds."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.bench.statistics import ratios, summary

__all__ = ["compile_twin", "figures", "markdown", "result"]

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC")
_COMPILE_SECONDS = 120


def compile_twin(source: Path, directory: Path, *options: str) -> tuple[ctypes.CDLL | None, str]:
    """``source`` compiled into ``directory``, and the compiler's version; or None and the reason why not."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None, "no g++ on PATH"
    library = directory / f"{source.stem}.so"
    command = [compiler, *_FLAGS, *options, "-o", str(library), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMPILE_SECONDS)
    if done.returncode:
        return None, f"g++ failed: {done.stderr.strip()[:2000]}"
    version = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
    return ctypes.CDLL(str(library)), f"g++ {version} {' '.join(_FLAGS[1:3])}"


def figures(
    numba: Callable[[], float], twin: Callable[[], float] | None, rounds: int, warmup: int
) -> dict[str, dict[str, float]]:
    """Nanoseconds that each round of both returns, taken in turn: summaries, and that of their quotients."""
    samples: dict[str, list[float]] = {"numba": [], "c++": []}
    for number in range(warmup + rounds):
        values = {"numba": numba()}
        if twin is not None:
            values["c++"] = twin()
        if number >= warmup:  # the first rounds touch pages and caches for the first time
            for who, value in values.items():
                samples[who].append(value)
    found: dict[str, dict[str, float]] = {who: summary(values) for who, values in samples.items() if values}
    if samples["c++"]:
        found["numba over c++"] = ratios(samples["c++"], samples["numba"])
    return found


def result(machine: dict[str, Any], compiler: str, rounds: int, cases: Mapping[str, Any]) -> dict[str, Any]:
    """What goes into a result's file. ``machine``: as it was described before anything was measured."""
    machine["load_after"] = describe()["load"]
    return {"machine": machine, "rounds": rounds, "twin": compiler, "ns": dict(cases)}


def markdown(found: Mapping[str, Any]) -> str:
    """A table of a result."""
    lines = ["| case | Numba ns (p10 - p90) | C++ ns (p10 - p90) | Numba / C++ (p10 - p90) |", "|---|---:|---:|---:|"]
    for name, case in found["ns"].items():
        cells = [
            f"{one['median']:.2f} ({one['p10']:.2f} - {one['p90']:.2f})" if (one := case.get(who)) else "-"
            for who in ("numba", "c++", "numba over c++")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"C++ twin: {found['twin']}. Rounds: {found['rounds']}."])
