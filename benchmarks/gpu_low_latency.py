#!/usr/bin/env python3
"""Low-latency mode on one GPU: checks it, then times it. Ranks are processes that share the device.

``benchmarks/gpu_low_latency.py [--ranks 2] [--tokens 128] [--window device]`` prints one JSON object per rank, with the
device, the versions and the commit. It has not run yet: no machine of the project has had a GPU.

Figures, in microseconds: ``graph``, dispatch and combine (FP8 there, BF16 back) replayed from one CUDA graph, per
replay; ``send`` and ``receive``, the two halves of a dispatch alone, by events. On one device the ranks' kernels take
turns, so these are upper bounds for a rank that has a device of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for place in ("kernels", "system", "gpu"):
    sys.path.insert(0, str(ROOT / "tests" / place))


def measure(exchange: Any, overrides: dict[str, Any], tokens: int, hidden: int, experts: int, topk: int) -> Any:
    """Medians of one rank, after a check against the oracle."""
    import gpu_bodies
    import ll_cases
    import torch

    case = ll_cases.Case(
        ranks=exchange.size, tokens=tokens, counts=(tokens,), hidden=hidden, experts=experts, topk=topk, fp8=True
    )
    buffer = gpu_bodies.opened(exchange, overrides)
    inputs = case.inputs()
    checked = ll_cases.run_rank(case, gpu_bodies.OnHost(buffer), exchange.rank, inputs)
    ll_cases.check_combined(case, inputs, exchange.rank, checked)
    given = inputs[exchange.rank]
    x, ids, weights = given.x.cuda(), given.topk_idx.cuda(), given.topk_weights.cuda()
    y = torch.randn(experts // exchange.size, exchange.size * tokens, hidden, device="cuda").bfloat16()

    def step(marks: list[Any] | None = None) -> None:
        def mark() -> None:
            if marks is not None:
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()

        mark()
        _, _, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, tokens, experts, topk_weights=weights, return_recv_hook=True
        )
        mark()
        hook()
        mark()
        _, _, hook = buffer.low_latency_combine(y, ids, weights, handle, return_recv_hook=True)
        hook()

    for _ in range(5):
        step()
    sends, receives = [], []
    for _ in range(100):
        marks: list[Any] = []
        step(marks)
        torch.cuda.synchronize()
        sends.append(1000 * marks[0].elapsed_time(marks[1]))
        receives.append(1000 * marks[1].elapsed_time(marks[2]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replays = []
    for _ in range(100):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        replays.append(1000 * start.elapsed_time(end))
    buffer.destroy()
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "graph": statistics.median(replays),
        "send": statistics.median(sends),
        "receive": statistics.median(receives),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("tokens", 128), ("hidden", 7168), ("experts", 256), ("topk", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--window", choices=("device", "host"), default="device")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        parser.exit(1, "no GPU: torch finds no CUDA or ROCm device\n")
    from ranks import Ranks

    pool = Ranks()
    shape = (options.tokens, options.hidden, options.experts, options.topk)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        for rank, found in enumerate(pool.run(options.ranks, measure, {"window": options.window}, *shape, timeout=600)):
            print(json.dumps({"rank": rank, **vars(options), **found, "commit": commit.stdout.strip()}))
    finally:
        pool.close()


if __name__ == "__main__":
    main()
