"""How many writes and immediates a low-latency dispatch of DeepSeek-V3 makes, counted by EFA devices in memory.

    python benchmarks/nic_writes.py [--json FILE]

128 tokens a rank, hidden 7168, FP8 with scales, top-8 of 256 experts chosen at random. Production's kernels, proxies
and EFA data path run; the devices count what is posted to them. Beside it stands one write per (token, expert), which
is what UCCL-EP's low-latency dispatch issues, over the same routing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.efa_group import EfaGroup
from tests.support.provider import provider_srd as nic
from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.config import Settings
from uccl_ep_serving.modes.low_latency_cpu import LowLatency
from uccl_ep_serving.protocol.layout import NormalPlan

__all__ = ["count", "markdown", "measure"]

TOKENS, HIDDEN, EXPERTS, TOPK = 128, 7168, 256, 8
#: Ranks, and ranks of one host: those reach each other without a NIC.
GROUPS = ((8, 1), (16, 8), (32, 8), (64, 8))


def count(ranks: int, per_host: int) -> dict[str, Any]:
    """Figures per rank of one dispatch, means over all ranks."""
    generator = torch.Generator().manual_seed(ranks)
    scores = torch.rand(ranks, TOKENS, EXPERTS, generator=generator)
    chosen = scores.topk(TOPK, dim=2).indices
    experts_per_rank = EXPERTS // ranks
    hosts = torch.arange(ranks) // per_host
    remote = hosts[chosen // experts_per_rank] != hosts[:, None, None]
    settings = Settings(timeout=300.0, quantum=16 << 20)
    plan = NormalPlan(ranks, heap=0, rounds=2 * ranks * (64 << 10), chunk=32 << 10)
    group = EfaGroup(
        ranks, normal=plan, settings=settings, mapped=lambda rank, peer: rank // per_host == peer // per_host
    )
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)

    def body(runtime: Any) -> None:
        runtime.group.barrier.wait(300)
        low_latency = LowLatency(runtime)
        *_, hook = low_latency.dispatch(
            x,
            chosen[runtime.rank],
            TOKENS,
            EXPERTS,
            topk_weights=torch.full((TOKENS, TOPK), 0.125),
            use_fp8=True,
            return_recv_hook=True,
        )
        del hook  # the receiving half is not what is counted

    with group:
        group.run(body)
        deadline = time.monotonic() + 300
        while any(not service.drain(time.monotonic() + 1) for service in group.services):
            assert time.monotonic() < deadline
        fabric = group.network.fabric
        writes, nbytes = int(fabric[nic.WRITES]), int(fabric[nic.WRITE_BYTES])
        assert group.network.violation == 0
    per_expert = int(remote.sum())
    return {
        "ranks": ranks,
        "ranks a host": per_host,
        "writes": writes / ranks,
        "immediates": writes / ranks,  # every write carries its own
        "KiB a write": nbytes / max(writes, 1) / 1024,
        "one per (token, expert)": per_expert / ranks,
        "fewer by": per_expert / max(writes, 1),
    }


def measure(ranks: Iterable[int] = tuple(ranks for ranks, _ in GROUPS)) -> dict[str, Any]:
    """:func:`count` for those of ``GROUPS`` that have so many ranks."""
    machine = describe()
    wanted = set(ranks)
    groups = [count(ranks, per_host) for ranks, per_host in GROUPS if ranks in wanted]
    machine["load_after"] = describe()["load"]
    return {"machine": machine, "groups": groups}


def markdown(found: Mapping[str, Any]) -> str:
    """A table of a result."""
    lines = [
        "| ranks | ranks of a host | writes, immediates of a rank | KiB a write | one per (token, expert) | fewer by |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {one['ranks']} | {one['ranks a host']} | {one['writes']:g} | {one['KiB a write']:.0f} | "
        f"{one['one per (token, expert)']:.1f} | {one['fewer by']:.0f} |"
        for one in found["groups"]
    ]
    about = (
        f"{TOKENS} x {HIDDEN} FP8, top-{TOPK} of {EXPERTS} experts; ranks of one host reach each other without a NIC."
    )
    return "\n".join([*lines, "", about])


def main() -> None:
    """Count, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, nargs="*", default=[ranks for ranks, _ in GROUPS])
    arguments = parser.parse_args()
    found = measure(arguments.ranks)
    print(markdown(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
