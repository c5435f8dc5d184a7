#!/usr/bin/env python3
"""Low-latency mode on one GPU: checked, then timed. Ranks are processes that share the device.

    benchmarks/gpu_low_latency.py [--only kernels,round_trip,publish,deepep] [--json FILE]

Each part prints one JSON object, with the device, the versions and the commit. ``scripts/gpu-check`` runs all of it
beside the tests. It has not run yet: no machine of the project has had a GPU.

- ``kernels``: one rank sends itself 128 and 4,096 tokens of 7,168 BF16 values as FP8: microseconds of each kernel, by
  the profiler, and the bandwidth of packing and unpacking beside that of a plain copy. Target: 80% of it at 4,096.
- ``round_trip``: two ranks, 128 tokens, FP8 there and BF16 back, windows on the device and in host memory:
  microseconds per replay of a graph that holds dispatch and combine. Target: 40 us of GPU time. On one device the
  ranks' kernels take turns, so these are upper bounds for a rank that has a device of its own.
- ``publish``: two ranks over ``shm``: from the ring's head moving (stored right before the commands) to its tail
  following, as a host thread sees both. Target: p50 under 5 us.
- ``deepep``: the dispatch of ``kernels`` by DeepEP where its package is installed; otherwise which call failed.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from typing import Any

from gpu_frame import copy_bandwidth, run_parts

HIDDEN, TOPK = 7168, 8
#: Local experts of the one rank: enough for top-8, few enough for the worst case of 4,096 tokens to fit (0.9 GiB).
LOCAL_EXPERTS = 32


def kernel_times(step: Callable[[], Any], names: tuple[str, ...], turns: int = 30) -> dict[str, float]:
    """Median microseconds on the device of each kernel whose name begins with one of ``names``."""
    import statistics

    import torch

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(turns):
            step()
        torch.cuda.synchronize()
    samples: dict[str, list[float]] = {}
    for event in profile.events():
        for name in names:
            if event.name.startswith(name):
                samples.setdefault(name, []).append(float(event.device_time))
    return {name: statistics.median(values) for name, values in samples.items()}


def kernels(exchange: Any, tokens: int) -> dict[str, Any]:
    """Times of every kernel of a rank alone, with all its experts chosen evenly."""
    import gpu_bodies
    import ll_cases
    import torch

    from uccl_ep_serving.protocol.message import DTYPE_FP8, row_bytes

    case = ll_cases.Case(
        ranks=1, tokens=tokens, counts=(tokens,), hidden=HIDDEN, experts=LOCAL_EXPERTS, topk=TOPK, fp8=True
    )
    buffer = gpu_bodies.opened(exchange, {"window": "device"})
    given = case.inputs()[0]
    x, ids, weights = given.x.cuda(), given.topk_idx.cuda(), given.topk_weights.cuda()
    y = torch.zeros(LOCAL_EXPERTS, tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        _, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, tokens, LOCAL_EXPERTS, topk_weights=weights)
        buffer.low_latency_combine(y, ids, weights, handle)

    names = ("route", "pack_dispatch", "dispatch_arrival", "count_rows", "unpack_rows")
    names += ("prepare_combine", "pack_combine", "combine_arrival", "sum_rows")
    times = kernel_times(step, names)
    buffer.destroy()
    wire = row_bytes(HIDDEN, DTYPE_FP8)
    moved = {
        "pack_dispatch": tokens * (2 * HIDDEN + wire),
        "unpack_rows": tokens * (1 + TOPK) * wire,
        "pack_combine": tokens * (1 + TOPK) * 2 * HIDDEN,
        "sum_rows": tokens * 2 * 2 * HIDDEN,
    }
    bandwidth = copy_bandwidth()
    return {
        "tokens": tokens,
        "microseconds": times,
        "copy_bytes_per_s": bandwidth,
        "share_of_copy": {name: nbytes / times[name] * 1e6 / bandwidth for name, nbytes in moved.items()},
    }


def round_trip(exchange: Any, overrides: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Microseconds per replay of one rank, after a check against the oracle."""
    import gpu_bodies
    import ll_cases
    import torch

    from uccl_ep_serving.cli.bench_statistics import summary

    experts = 256
    case = ll_cases.Case(
        ranks=exchange.size, tokens=tokens, counts=(tokens,), hidden=HIDDEN, experts=experts, topk=TOPK, fp8=True
    )
    buffer = gpu_bodies.opened(exchange, overrides)
    inputs = case.inputs()
    checked = ll_cases.run_rank(case, gpu_bodies.OnHost(buffer), exchange.rank, inputs)
    ll_cases.check_combined(case, inputs, exchange.rank, checked)
    given = inputs[exchange.rank]
    x, ids, weights = given.x.cuda(), given.topk_idx.cuda(), given.topk_weights.cuda()
    y = torch.randn(experts // exchange.size, exchange.size * tokens, HIDDEN, device="cuda").bfloat16()

    def step() -> None:
        _, _, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, tokens, experts, topk_weights=weights, return_recv_hook=True
        )
        assert hook is not None
        hook()
        _, _, hook = buffer.low_latency_combine(y, ids, weights, handle, return_recv_hook=True)
        assert hook is not None
        hook()

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    samples = []
    for _ in range(200):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(1000 * start.elapsed_time(end))
    buffer.destroy()
    return {"rank": exchange.rank, "ranks": exchange.size, "tokens": tokens, **overrides, "replay_us": summary(samples)}


def publish(exchange: Any, turns: int) -> dict[str, Any]:
    """Microseconds from a ring's head to its tail, as this rank's host sees them."""
    import gpu_bodies
    import ll_cases

    from uccl_ep_serving.cli.bench_statistics import summary
    from uccl_ep_serving.protocol.ring import HEAD, TAIL

    case = ll_cases.Case(ranks=exchange.size, experts=8 * exchange.size)
    buffer = gpu_bodies.opened(exchange, {"window": "host", "direct": False, "transport": "shm", "channels": 1})
    given = case.inputs()[exchange.rank]
    x, ids = given.x.cuda(), given.topk_idx.cuda()

    def dispatch() -> Callable[[], None]:
        hook = buffer.low_latency_dispatch(x, ids, case.tokens, case.experts, use_fp8=False, return_recv_hook=True)[4]
        assert hook is not None
        return hook

    dispatch()()
    plane = buffer.runtime._plane
    assert plane is not None
    assert plane.service is not None
    (ring,) = {state.ring for state in plane.service.states if state.ring}
    head, tail = (ctypes.c_int64.from_address(ring + offset) for offset in (HEAD, TAIL))
    samples = []
    for _ in range(turns):
        gpu_bodies.synchronize()
        exchange.all_gather(b"")
        before, deadline = head.value, time.monotonic() + 10.0
        hook = dispatch()
        while head.value == before and time.monotonic() < deadline:
            pass
        seen = time.perf_counter_ns()
        while tail.value < head.value and time.monotonic() < deadline:
            pass
        samples.append((time.perf_counter_ns() - seen) / 1e3)
        hook()
    buffer.destroy()
    return {"rank": exchange.rank, "publish_to_pop_us": summary(samples)}


def deepep(exchange: Any, tokens: int) -> dict[str, Any]:
    """DeepEP's low-latency dispatch of a rank alone, or the call that failed."""
    import torch
    import torch.distributed as dist

    stage = "import deep_ep"
    try:
        import deep_ep

        stage = "init_process_group"
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        stage = "get_low_latency_rdma_size_hint"
        nbytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, HIDDEN, 1, LOCAL_EXPERTS)
        stage = "Buffer"
        buffer = deep_ep.Buffer(
            dist.group.WORLD, 0, nbytes, low_latency_mode=True, num_qps_per_rank=LOCAL_EXPERTS, explicitly_destroy=True
        )
        stage = "low_latency_dispatch"
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        ids = torch.rand(tokens, LOCAL_EXPERTS, device="cuda").topk(TOPK, dim=1).indices
        times = kernel_times(
            lambda: buffer.low_latency_dispatch(x, ids, tokens, LOCAL_EXPERTS, use_fp8=True),
            ("void deep_ep::internode_ll::dispatch",),
        )
        return {"tokens": tokens, "microseconds": times}
    except Exception as error:
        return {"tokens": tokens, "failed": stage, "error": f"{type(error).__name__}: {error}"[:400]}


def parts(pool: Any, _options: argparse.Namespace) -> dict[str, Callable[[], list[Any]]]:
    """What can be measured, by name."""
    return {
        "kernels": lambda: [pool.run(1, kernels, tokens, timeout=300)[0] for tokens in (128, 4096)],
        "round_trip": lambda: [
            one
            for window in ("device", "host")
            for one in pool.run(2, round_trip, {"window": window}, 128, timeout=300)
        ],
        "publish": lambda: pool.run(2, publish, 300, timeout=300),
        "deepep": lambda: [pool.run(1, deepep, 128, timeout=120)[0]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    run_parts(parser, ("kernels", "round_trip", "publish", "deepep"), parts)


if __name__ == "__main__":
    main()
