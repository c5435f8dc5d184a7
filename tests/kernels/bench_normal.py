"""How long normal-mode dispatch and combine take between ranks of one process (a script, not a test).

Ranks are threads that map each other's windows, so this measures kernels, copies and host code, no transport. "cpu" is
the time a rank's thread computes: what the wall time would come to on a machine with a core for every rank.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from direct_ranks import DirectGroup

from uccl_ep_serving.config import Settings
from uccl_ep_serving.normal import Normal
from uccl_ep_serving.protocol.layout import NormalPlan


def measure(group: DirectGroup, options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Median wall and CPU milliseconds of rank 0 by operation."""
    barrier = threading.Barrier(group.ranks)
    samples: dict[str, list[tuple[float, float]]] = {"layout": [], "dispatch": [], "combine": []}

    def timed(rank: int, name: str, call: Callable[[], Any]) -> Any:
        barrier.wait()
        wall, cpu = time.perf_counter(), time.thread_time()
        result = call()
        if rank == 0:
            samples[name].append(((time.perf_counter() - wall) * 1e3, (time.thread_time() - cpu) * 1e3))
        return result

    def body(runtime: Any) -> None:
        generator = torch.Generator().manual_seed(runtime.rank)
        normal, rank = Normal(runtime), runtime.rank
        x = torch.randn(options.tokens, options.hidden, generator=generator).bfloat16()
        topk_idx = torch.rand(options.tokens, options.experts, generator=generator).topk(options.topk, dim=1).indices
        weights = torch.rand(options.tokens, options.topk, generator=generator)
        for _ in range(options.repeats):
            per_rank, _, per_expert, in_rank, _ = timed(
                rank, "layout", lambda: normal.get_dispatch_layout(topk_idx, options.experts)
            )
            layout = {
                "num_tokens_per_rank": per_rank,
                "num_tokens_per_expert": per_expert,
                "is_token_in_rank": in_rank,
            }
            received, *_, handle, _ = timed(
                rank,
                "dispatch",
                lambda layout=layout: normal.dispatch(x, topk_idx=topk_idx, topk_weights=weights, **layout),
            )
            timed(rank, "combine", lambda rows=received, handle=handle: normal.combine(rows, handle))

    group.run(body)
    return {
        name: (statistics.median(wall for wall, _ in some[1:]), statistics.median(cpu for _, cpu in some[1:]))
        for name, some in samples.items()
    }


def main() -> None:
    """Parse the shape, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = {"ranks": 2, "tokens": 4096, "hidden": 7168, "experts": 64, "topk": 8, "repeats": 12}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plan = NormalPlan(options.ranks, 4096, heap=1 << 30, rounds=64 << 20)
    for name, (wall, cpu) in measure(DirectGroup(options.ranks, plan, Settings(timeout=60.0)), options).items():
        print(f"{name:10} wall {wall:9.3f} ms   cpu {cpu:9.3f} ms")


if __name__ == "__main__":
    main()
