"""Bytes that leave a node in normal mode, a row once to each node against once to each rank, by the proxies' counters.

    python benchmarks/node_crossings.py [--json FILE] [--nodes 2 4 8]

Nodes of 8 ranks, hidden 7168, FP8 with scales out and BF16 back, top-8 of 256 experts chosen at random. Production's
kernels and proxies run, all ranks as threads of one process, over the fake transport: what is counted does not depend
on the wire. Control messages are counted too, so few tokens show them large: see ``TOKENS``.

Beside the bytes stand times on this machine, where they cost the least that they ever do: ranks as processes in two
simulated nodes, between which proxies copy through shared memory. Both ways take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.fake_ranks import FakeGroup
from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.cli.bench import run_standalone
from uccl_ep_serving.config import Settings
from uccl_ep_serving.modes.normal_cpu import Normal
from uccl_ep_serving.protocol.layout import NormalPlan

__all__ = ["count", "latency", "markdown", "measure"]

TOKENS, HIDDEN, EXPERTS, TOPK = 64, 7168, 256, 8
NODES, NODE_RANKS = (2, 4, 8), 8
#: Of which the times are taken: four ranks, two to a node.
TIMED = Card(name="nodes", paths=("direct",), against=(), ranks=4, tokens=512, iterations=10)
TIMED_NODE_RANKS, TIMED_TURNS = 2, 3
#: By the word of a result: UCCL_EP_HIERARCHY.
WAYS = {"to nodes": "auto", "to ranks": "off"}


def _sent(group: FakeGroup) -> int:
    return sum(int(service.counters()["total"]["bytes_sent"]) for service in group.services)


def count(nodes: int, hierarchy: str) -> dict[str, float]:
    """MB that leave a node, means over all nodes, in a dispatch and in its combine."""
    ranks = nodes * NODE_RANKS
    generator = torch.Generator().manual_seed(ranks)
    chosen = torch.rand(ranks, TOKENS, EXPERTS, generator=generator).topk(TOPK, dim=2).indices
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.float8_e4m3fn)
    scales = torch.ones(TOKENS, HIDDEN // 128)
    weights = torch.full((TOKENS, TOPK), 0.125)
    plan = NormalPlan(ranks, EXPERTS // ranks, heap=16 << 20, rounds=2 * ranks * (64 << 10), chunk=64 << 10, depth=2)
    settings = Settings(timeout=300.0, hierarchy=hierarchy)
    sent: list[int] = []

    def body(runtime: Any) -> None:
        normal, ids = Normal(runtime), chosen[runtime.rank]
        per_rank, _, per_expert, in_rank, _ = normal.get_dispatch_layout(ids, EXPERTS)
        layout = {
            "num_tokens_per_rank": per_rank,
            "num_tokens_per_expert": per_expert,
            "is_token_in_rank": in_rank,
        }
        received, *_, handle, _ = normal.dispatch((x, scales), topk_idx=ids, topk_weights=weights, **layout)
        # an operation returns when its writes are over
        if group.barrier.wait(300) == 0:
            sent.append(_sent(group))
        group.barrier.wait(300)
        assert isinstance(received, tuple)
        normal.combine(received[0].bfloat16(), handle)
        if group.barrier.wait(300) == 0:
            sent.append(_sent(group))

    with FakeGroup(ranks, normal=plan, settings=settings, node_ranks=NODE_RANKS) as group:
        group.run(body)
    return {"dispatch": sent[0] / nodes / 1e6, "combine": (sent[1] - sent[0]) / nodes / 1e6}


def _timed(hierarchy: str, folder: Path) -> dict[str, float]:
    """Median microseconds of ``TIMED``, by phase."""
    before = dict(os.environ)
    os.environ.update(UCCL_EP_HIERARCHY=hierarchy, UCCL_EP_NODE_RANKS=str(TIMED_NODE_RANKS))
    try:
        run_standalone(TIMED, str(folder / "timed.json"))
    finally:
        os.environ.clear()
        os.environ.update(before)
    found = json.loads((folder / "timed.json").read_text())["us"]["direct"]
    return {phase: float(found[phase]["median"]) for phase in ("dispatch", "combine")}


def latency() -> dict[str, dict[str, float]]:
    """Microseconds of a dispatch and of a combine, by way: medians over runs that take turns."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(TIMED_TURNS):
            for way, hierarchy in WAYS.items():
                runs[way].append(_timed(hierarchy, Path(folder)))
    return {
        way: {phase: statistics.median(run[phase] for run in found) for phase in ("dispatch", "combine")}
        for way, found in runs.items()
    }


def measure(nodes: Iterable[int] = NODES) -> dict[str, Any]:
    """:func:`count` of both ways, for so many nodes, and :func:`latency`."""
    machine = describe()
    times = latency()
    groups = [{"nodes": n, **{way: count(n, hierarchy) for way, hierarchy in WAYS.items()}} for n in nodes]
    machine["load_after"] = describe()["load"]
    return {"machine": machine, "groups": groups, "us": times}


def markdown(found: Mapping[str, Any]) -> str:
    """A table of a result."""
    lines = [
        "| nodes | dispatch, once to each rank | to each node | combine, once from each rank | from each node |",
        "|---:|---:|---:|---:|---:|",
    ]
    for one in found["groups"]:
        cells = [str(one["nodes"])]
        for phase in ("dispatch", "combine"):
            ranks, nodes = one["to ranks"][phase], one["to nodes"][phase]
            cells += [f"{ranks:.2f} MB", f"{nodes:.2f} MB ({nodes / ranks:.0%})"]
        lines.append("| " + " | ".join(cells) + " |")
    about = (
        f"Per node of {NODE_RANKS} ranks, {TOKENS} tokens a rank x {HIDDEN}, FP8 out and BF16 back, top-{TOPK} of "
        f"{EXPERTS} experts at random."
    )
    times = found["us"]
    lines += ["", about, "", "| us on this machine | dispatch | combine |", "|---|---:|---:|"]
    lines += [
        f"| {words} | {times[way]['dispatch']:.0f} | {times[way]['combine']:.0f} |"
        for way, words in (("to ranks", "once to, and from, each rank"), ("to nodes", "once to, and from, each node"))
    ]
    about = (
        f"{TIMED.ranks} ranks as processes in simulated nodes of {TIMED_NODE_RANKS}, shm between nodes, {TIMED.tokens} "
        f"tokens x {TIMED.hidden} {TIMED.dtype.upper()}, top-{TIMED.topk} of {TIMED.experts}."
    )
    return "\n".join([*lines, "", about])


def main() -> None:
    """Count, print, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--nodes", type=int, nargs="*", default=NODES)
    arguments = parser.parse_args()
    found = measure(arguments.nodes)
    print(markdown(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
