"""What an idle proxy costs, and how soon it picks a command up.

    python benchmarks/proxy_idle.py [--json FILE]

Idle: two ranks with real Buffers exchange something, then rest; after one second all proxy threads of a rank are
watched for two. Pick-up: a command is put into the ring of a running proxy after a pause; the time until its slot is
consumed is taken, for pauses from "traffic is recent" to "long idle".
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.stub_transport import SLOTS, Stub
from uccl_ep_serving.bench.card import PATHS
from uccl_ep_serving.bench.launch import run_ranks
from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.bench.statistics import summary
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.config import Settings
from uccl_ep_serving.native.atomics import load64, pause, poke, store64
from uccl_ep_serving.native.calls import monotonic_ns
from uccl_ep_serving.native.jit import compiled
from uccl_ep_serving.protocol import command, context, ring, streams
from uccl_ep_serving.proxy.service import ProxyService

PEERS = 8
#: Pauses before a command, seconds, and how often each is tried.
PAUSES = ((20e-6, 400), (100e-6, 400), (1e-3, 400), (5e-3, 200), (10e-3, 100), (1.0, 16))
#: Pauses up to this one are spun: a sleep would end late by more than what is measured.
SPUN = 2e-3
SPIN = 10_000_000
IDLE_AFTER, WATCHED = 1.0, 2.0
#: Proxies per rank that are watched.
PROXIES = (1, 4)
_RANK_PROGRAM = "import sys; from benchmarks import proxy_idle; proxy_idle.run_rank(sys.argv[1])"


@compiled
def _pick_up(ring_address: int, index: int, mask: int, low: int, high: int, wait_until: int, give_up: int) -> int:
    """Nanoseconds from publishing command ``index`` at instant ``wait_until`` until its slot is consumed, or -1."""
    while monotonic_ns() < wait_until:
        pause()
    lap = ((index // (mask + 1)) + 1) & 1
    slot = ring_address + 256 + (index & mask) * 16
    begin = monotonic_ns()
    poke(ring_address, index + 1)
    poke(slot, low | lap)
    store64(slot + 8, high | lap)
    while load64(ring_address + 64) <= index:
        if monotonic_ns() - begin > give_up:
            return -1
    return monotonic_ns() - begin


assert (ring.SLOTS, ring.TAIL) == (256, 64)


def pick_up(proxies: int, spin: int = 0) -> dict[str, Any]:
    """Microseconds by pause: summary and maximum; the commands go to the proxies of a rank in turn.

    Args:
        spin: nanoseconds that an idle proxy keeps its core.

    Raises AssertionError when a command is not picked up in a second.
    """
    stubs, error = [Stub() for _ in range(proxies)], np.zeros(context.ERROR_WORDS, np.int64)
    window = np.zeros(1 << 20, np.uint8)
    service = ProxyService(
        rank=0,
        ranks=1 + PEERS,
        window=int(window.ctypes.data),
        window_bytes=len(window),
        settings=Settings(ring_slots=SLOTS, proxies=proxies, channels=max(proxies, 2)),
        error=int(error.ctypes.data),
        endpoints=[[stub] for stub in stubs],  # type: ignore[list-item]  # of an endpoint, only its data path is used
        route=[-1] + [0] * PEERS,
        spin=spin,
    )
    low = command.LOW.pack(length=4)
    choices = random.Random(1)
    result = {}
    put = [0] * proxies
    service.start()
    try:
        for length, times in PAUSES:
            samples = []
            for number in range(times):
                # not always the same pause: it would fall into step with the proxy's sleeps
                duration = length * choices.uniform(0.75, 1.25)
                until = time.monotonic_ns() + int(duration * 1e9)
                if duration > SPUN:
                    time.sleep(duration)
                channel = number % proxies
                stream, index = streams.LL_DISPATCH + channel, put[channel]
                put[channel] += 1
                high = command.HIGH.pack(stream=stream, kind=command.KIND_WRITE, last=1, rank=1 + index % PEERS)
                taken = int(_pick_up(service.ring(stream), index, SLOTS - 1, low, high, until, 1_000_000_000))
                assert taken >= 0, f"a command was not picked up within a second after a pause of {duration} s"
                samples.append(taken / 1000)
            result[f"{length * 1e3:g} ms"] = {**summary(samples), "max": max(samples), "samples": len(samples)}
        assert service.drain(time.monotonic() + 5)
        assert sum(stub.posted for stub in stubs) == sum(put)
    finally:
        service.stop(time.monotonic() + 5)
    return result


def _proxy_cpu() -> tuple[int, int]:
    """(proxy threads of this process, nanoseconds that they have run), from the scheduler's own account."""
    threads, total = 0, 0
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith("uccl-ep ") and name[8:9].isdigit():
            threads += 1
            total += int((task / "schedstat").read_text().split()[0])
    return threads, total


def _watch(transport: str, proxies: int) -> dict[str, float]:
    """Share of a core that the proxies of this rank use while nothing is sent."""
    settings = Settings.from_environment(**PATHS[transport], proxies=proxies)
    group = dist.group.WORLD
    assert group is not None
    buffer = Buffer(group, low_latency_mode=True, settings=settings)
    x = torch.randn(16, 256).bfloat16()
    ids = torch.rand(16, 8).topk(4, dim=1).indices
    weights = torch.rand(16, 4)
    for _ in range(50):
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 16, 8, use_fp8=False, topk_weights=weights)
        buffer.low_latency_combine(rows, ids, weights, handle)
    dist.barrier()
    time.sleep(IDLE_AFTER)
    threads, before = _proxy_cpu()
    begin = time.monotonic_ns()
    time.sleep(WATCHED)
    share = (_proxy_cpu()[1] - before) / (time.monotonic_ns() - begin)
    assert threads == proxies, f"{threads} proxy threads where {proxies} were asked for"
    others = threading.active_count()
    dist.barrier()
    buffer.destroy()
    return {"share_of_a_core": share, "proxy_threads": threads, "python_threads": others}


def _words(proxies: int) -> str:
    return f"{proxies} {'proxy' if proxies == 1 else 'proxies'}"


def run_rank(target: str) -> None:
    """Body of one of the two ranks; rank 0 writes what it found into ``target``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {
        f"{transport}, {_words(proxies)}": _watch(transport, proxies)
        for transport in ("shm", "tcp")
        for proxies in PROXIES
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        # the busier rank counts
        worst = {name: max((one[name] for one in every), key=lambda one: one["share_of_a_core"]) for name in found}
        Path(target).write_text(json.dumps(worst))
    dist.destroy_process_group()


def measure() -> dict[str, Any]:
    """Both measurements."""
    machine = describe()
    with tempfile.TemporaryDirectory() as directory:
        target = str(Path(directory) / "idle.json")
        run_ranks([sys.executable, "-c", _RANK_PROGRAM, target], 2, 120.0)
        idle = json.loads(Path(target).read_text())
    picked = {_words(proxies): pick_up(proxies) for proxies in PROXIES}
    # as where cores allow it; the kernel that publishes needs the other of two
    picked[f"1 proxy, spinning for {SPIN // 1_000_000} ms"] = pick_up(1, SPIN)
    result = {"machine": machine, "idle": idle, "pick_up_us": picked}
    result["machine"]["load_after"] = describe()["load"]
    return result


def markdown(result: dict[str, Any]) -> str:
    """Two tables."""
    lines = ["| all proxies of a rank, one second after the last traffic | % of a core |", "|---|---:|"]
    lines += [f"| {name} | {100 * one['share_of_a_core']:.2f} |" for name, one in result["idle"].items()]
    lines += [
        "",
        "Traffic is recent up to a pause of 0.05 ms, while a proxy spins up to 10 ms; after 26 ms it is long idle.",
        "",
        "| proxies of a rank | pause before a command | pick-up us, median | p10 - p90 | max | samples |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {proxies} | {pause} | {one['median']:.1f} | {one['p10']:.1f} - {one['p90']:.1f} | {one['max']:.0f} | "
        f"{one['samples']} |"
        for proxies, pauses in result["pick_up_us"].items()
        for pause, one in pauses.items()
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", default="", help="write the result to this file")
    options = parser.parse_args()
    result = measure()
    print(markdown(result))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
