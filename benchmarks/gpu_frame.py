"""What the figures of a GPU have in common: the parts of a script, what they were measured on, a copy beside them.

Each part prints one JSON object; one that fails says so and the others go on. ``--interpreter`` runs the same with
Triton's interpreter on CPU tensors: everything but the figures, which then mean nothing and say so.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

__all__ = [
    "ROOT",
    "beside_deepep",
    "deepep_group",
    "has_mps",
    "import_deepep",
    "interpreted",
    "kernel_times",
    "machine",
    "reached",
    "run_parts",
    "seconds_of",
    "share_the_cores",
]


def interpreted() -> bool:
    """Kernels run in Triton's interpreter: :func:`run_parts` sets it for this process and the ranks it starts."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def seconds_of(step: Callable[[], Any]) -> float:
    """Time of one call of ``step`` on the current stream, until the device has ended it."""
    import torch

    if interpreted():
        begun = time.perf_counter()
        step()
        return time.perf_counter() - begun
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def kernel_times(step: Callable[[], Any], names: tuple[str, ...], calls: int = 30) -> dict[str, float]:
    """Median microseconds on the device of each kernel whose name begins with one of ``names``."""
    import statistics

    import torch
    from torch.autograd import DeviceType

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            step()
        torch.cuda.synchronize()
    samples: dict[str, list[float]] = {}
    seen = set()
    for event in profile.events():
        if event.device_type == DeviceType.CPU:
            continue
        seen.add(event.name)
        for name in names:
            if event.name.startswith(name):
                samples.setdefault(name, []).append(event.time_range.elapsed_us())
    missing = sorted(set(names) - set(samples))
    assert not missing, f"the profiler has not seen {missing}, but {sorted(seen)[:40]}"
    return {name: statistics.median(values) for name, values in samples.items()}


def share_the_cores(ranks: int) -> None:
    """For the oracle, which ranks compute at the same time."""
    import torch

    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // ranks, 1))


def import_deepep() -> Any:
    """The module ``deep_ep``. Its library finds what it is linked to only once that is loaded."""
    import torch  # noqa: F401  loads the CUDA runtime and NCCL

    spec = importlib.util.find_spec("nvidia.nvshmem") if importlib.util.find_spec("nvidia") else None
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for library in Path(place, "lib").glob("libnvshmem_host.so.*"):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    import deep_ep

    return deep_ep


def deepep_group(exchange: Any) -> Any:
    """The ranks of ``exchange`` as a group for DeepEP, whose NVSHMEM shall look for no NIC: there is one GPU."""
    import torch
    import torch.distributed as dist

    os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
    os.environ.setdefault("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo")
    torch.cuda.set_device(0)
    store = dist.PrefixStore("deepep", exchange._store)
    dist.init_process_group("gloo", store=store, rank=exchange.rank, world_size=exchange.size)
    return dist.group.WORLD


def reached(directory: str, rank: int, call: str) -> str:
    """Note that ``rank`` is about to make ``call``, and return that."""
    Path(directory, str(rank)).write_text(call)
    return call


def beside_deepep(pool: Any, ranks: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``body(exchange, *arguments, directory)`` measures of DeepEP on each rank, which notes each call there
    (:func:`reached`): where a rank does not come back from one, for DeepEP may end the process, that call is named."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            found: list[Any] = pool.run(ranks, body, *arguments, directory, timeout=90)
            return found
        except AssertionError as error:
            calls = {file.name: file.read_text() for file in sorted(Path(directory).iterdir())}
            return [{"rank": int(rank), "failed": call, "error": str(error)[-400:]} for rank, call in calls.items()]


def has_mps() -> bool:
    """Whether kernels of several processes run at the same time. Without it they take turns of milliseconds."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


def machine() -> dict[str, Any]:
    """What figures were measured on."""
    import torch
    import triton

    from uccl_ep_serving.bench.machine import describe

    found = {**describe(), "triton": triton.__version__}
    # a copy of the sources has no git, or another's
    found["commit"] = os.environ.get("COMMIT") or found["commit"]
    if interpreted():
        return {**found, "device": "Triton's interpreter: times mean nothing"}
    properties = torch.cuda.get_device_properties(0)
    return {
        **found,
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda or torch.version.hip,
        "mps": has_mps(),
    }


def run_parts(
    parser: argparse.ArgumentParser,
    names: tuple[str, ...],
    parts: Callable[[Any, argparse.Namespace], Mapping[str, Callable[[], list[Any]]]],
) -> None:
    """Measure, print and perhaps keep: a script's ``main``. Ends with status 1 when a part failed.

    Args:
        parser: with the script's own options; gets ``--only`` and ``--json``.
        names: of all parts, in order.
        parts: from a pool of ranks and the options, what measures each.
    """
    parser.add_argument("--only", default=",".join(names), help="parts, comma-separated")
    parser.add_argument("--json", type=Path, help="write everything there as well")
    options = parser.parse_args()
    unknown = sorted(set(options.only.split(",")) - set(names))
    if unknown:
        parser.error(f"no part is named {', '.join(unknown)}; there are {', '.join(names)}")
    if getattr(options, "interpreter", False):
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not interpreted() and not torch.cuda.is_available():
        parser.exit(1, "no GPU: torch finds no CUDA or ROCm device\n")
    from tests.support.gpu_ranks import GpuRanks

    found: dict[str, Any] = {"machine": machine()}
    pool = GpuRanks()
    try:
        measured = parts(pool, options)
        for name in options.only.split(","):
            begun = time.monotonic()
            try:
                found[name] = measured[name]()
            except Exception as error:
                # the other parts are worth having
                found[name] = {"failed": f"{type(error).__name__}: {error}"[-2000:]}
            print(json.dumps({name: found[name], "seconds": round(time.monotonic() - begun, 1)}), flush=True)
            if options.json is not None:
                # whoever ends this early has what was measured
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        pool.close()
    if any(isinstance(part, dict) and "failed" in part for part in found.values()):
        parser.exit(1, "a part failed\n")
