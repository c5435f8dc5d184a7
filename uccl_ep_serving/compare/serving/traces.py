"""What share of its steps an engine spends in communication, from the traces of the engine's own profiler.

It says the same of every backend, ours included. A kernel that another one hides behind (two streams) counts as well:
it is the time in which something communicates, not the time that would be saved without.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["communicates", "share_of_steps"]

#: Ours (``kernels.triton.kernel``), DeepEP's, collectives' of NCCL, RCCL and the engines, and those of other backends.
_KERNELS = re.compile(
    r"^uccl_ep_|nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|all2all|a2a|dispatch|combine|deep_?ep"
    r"|nixl|mori|nvshmem|cross_device",
    re.IGNORECASE,
)
#: Attention that is split over its keys combines partial results, and computes.
_COMPUTES = re.compile(r"(mla|split_?kv|atte?n|flash_fwd).*combine", re.IGNORECASE)
#: torch.distributed's name of an operation of CPU ranks, from its call to its end.
_CPU_COLLECTIVE = re.compile(r"^(gloo|mpi|ucc):")
#: SGLang and vLLM put each step of the model into a span of this name.
_STEP = re.compile(r"^(step\[|execute_)")
#: Kept by name.
_LISTED = 8

_Span = tuple[float, float]


def communicates(kernel: str) -> bool:
    """Whether a GPU kernel of this name moves data between ranks, or prepares that."""
    return bool(_KERNELS.search(kernel)) and (kernel.startswith("uccl_ep_") or not _COMPUTES.search(kernel))


def share_of_steps(directory: Path) -> dict[str, Any]:
    """Read every trace below ``directory``, one of each rank.

    Returns:
        ``share`` of the steps' time, over all ranks; ``steps`` and ``ranks``, how many; ``kernels``, the share of the
        largest by name. Empty without a trace that holds a step or a kernel.

    Raises:
        OSError, ValueError: a trace cannot be read.
    """
    whole = busy = 0.0
    steps = ranks = 0
    by_name: dict[str, float] = {}
    for path in sorted(directory.rglob("*.json*")):
        found = _steps_and_operations(_events(path))
        if found is None:
            continue
        spans, operations = found
        whole += sum(end - begin for begin, end in spans)
        busy += _length(_clipped(_union(span for many in operations.values() for span in many), spans))
        for name, many in operations.items():
            by_name[name] = by_name.get(name, 0.0) + _length(_clipped(_union(many), spans))
        steps, ranks = steps + len(spans), ranks + 1
    if not whole:
        return {}
    largest = sorted(((time, name) for name, time in by_name.items() if time), reverse=True)[:_LISTED]
    return {
        "share": busy / whole,
        "steps": steps,
        "ranks": ranks,
        "kernels": {name[:120]: time / whole for time, name in largest},
    }


def _events(path: Path) -> list[Mapping[str, Any]]:
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    document = json.loads(data)
    events = document.get("traceEvents", []) if isinstance(document, dict) else []
    return [one for one in events if one.get("ph") == "X" and "dur" in one]


def _steps_and_operations(events: list[Mapping[str, Any]]) -> tuple[list[_Span], dict[str, list[_Span]]] | None:
    """Disjoint spans of the steps, and by name those of what communicates; None where nothing of both is there."""
    on_gpu = any(one.get("cat") == "kernel" for one in events)
    # torch.distributed records what gloo does as an annotation
    kind, marks = ("kernel", "gpu_user_annotation") if on_gpu else ("user_annotation", "user_annotation")
    wanted = communicates if on_gpu else _CPU_COLLECTIVE.match
    operations: dict[str, list[_Span]] = {}
    for one in events:
        if one.get("cat") == kind and wanted(one["name"]):
            operations.setdefault(one["name"], []).append(_span(one))
    steps = _union(_span(one) for one in events if one.get("cat") == marks and _STEP.match(one["name"]))
    if not steps and on_gpu:
        # an engine whose steps carry no name: from the first kernel to the last
        kernels = [_span(one) for one in events if one.get("cat") == kind]
        steps = [(min(begin for begin, _ in kernels), max(end for _, end in kernels))]
    return (steps, operations) if steps else None


def _span(event: Mapping[str, Any]) -> _Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _union(spans: Iterable[_Span]) -> list[_Span]:
    """The same time as disjoint spans in order."""
    found: list[_Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _clipped(spans: list[_Span], within: list[_Span]) -> list[_Span]:
    """The parts of ``spans`` inside ``within``; both disjoint and in order."""
    found, at = [], 0
    for begin, end in spans:
        while at < len(within) and within[at][1] <= begin:
            at += 1
        index = at
        while index < len(within) and within[index][0] < end:
            found.append((max(begin, within[index][0]), min(end, within[index][1])))
            index += 1
    return found


def _length(spans: list[_Span]) -> float:
    return sum(end - begin for begin, end in spans)
