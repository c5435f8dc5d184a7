#!/usr/bin/env python3
"""Low-latency mode on one GPU: checked, then timed. Ranks are processes that share the device.

    benchmarks/gpu_low_latency.py [--only kernels,alone,publish,round_trip,deepep,deepep_round_trip] [--json FILE]

Each part prints one JSON object, with the device, the versions and the commit. ``scripts/gpu-check`` runs all of it
beside the tests.

- ``kernels``: one rank sends itself 128 and 4,096 tokens of 7,168 BF16 values as FP8: microseconds of each kernel, by
  the profiler, and the bandwidth of packing and unpacking beside a plain copy that moves as many bytes. Target: 80% of
  it at 4,096.
- ``alone``: the same rank and 128 tokens, FP8 there and BF16 back: microseconds per replay of a graph that holds
  dispatch and combine. Target: 40 us of GPU time.
- ``publish``: two ranks over ``shm``: from a command in its slot of the ring to the tail passing it, as a host thread
  sees both. Target: p50 under 5 us.
- ``round_trip``: two ranks, 128 tokens, windows on the device and in host memory: microseconds per replay. Without MPS
  (``machine.mps``) kernels of two processes take turns of milliseconds on one device: these are then upper bounds for a
  rank that has a device of its own.
- ``deepep``: what ``kernels`` and ``alone`` measure, and ``deepep_round_trip`` what ``round_trip`` does, by DeepEP
  where its package is installed; otherwise which call failed. Each of its operations is one kernel.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_frame import (
    beside_deepep,
    deepep_group,
    import_deepep,
    kernel_times,
    reached,
    run_parts,
    share_the_cores,
)

HIDDEN, TOPK = 7168, 8
#: Local experts of the one rank: enough for top-8, few enough for the worst case of 4,096 tokens to fit (0.9 GiB).
LOCAL_EXPERTS = 32
#: Of several ranks together, as in DeepSeek-V3.
EXPERTS = 256
#: Cycles of the GPU's clock, some milliseconds: longer than the host takes to launch an operation.
_HELD_UP = 5_000_000
#: Of the speed of a copy; microseconds of a round trip, and from publishing to taking.
COPY_TARGET, ROUND_TRIP_TARGET, PUBLISH_TARGET = 0.8, 40.0, 5.0


def copy_microseconds(nbytes: int) -> float:
    """Of a copy on the device that reads and writes ``nbytes`` together, as a kernel that takes turns with others."""
    import torch

    source = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    # what a copy is called differs between CUDA and ROCm, and nothing else runs
    return kernel_times(lambda: target.copy_(source), ("",))[""]


def check_dispatched(x: Any, ids: Any, rows: Any, count: Any, handle: Any) -> None:
    """Every row that a rank alone has received is the quantised row of its token, once for each expert of it."""
    import torch

    from tests.support import ll_cases

    values, scales = rows
    fnuz = values.dtype == torch.float8_e4m3fnuz
    fine, factors = (one.to(values.device) for one in ll_cases.quantised(ll_cases.Case(fnuz=fnuz), x.cpu()))
    chosen = torch.bincount(ids.flatten(), minlength=len(count))
    assert torch.equal(count.long(), chosen), (count.tolist(), chosen.tolist())
    for expert, number in enumerate(count.tolist()):
        token = handle.src_info[expert, :number].long()
        assert torch.equal(token.sort().values, (ids == expert).any(dim=1).nonzero().flatten())
        assert torch.equal(values[expert, :number].view(torch.uint8), fine.view(torch.uint8)[token])
        assert torch.equal(scales[expert, :number], factors[token])


def one_row_each(experts: int) -> Any:
    """BF16 [experts, HIDDEN], random."""
    import torch

    return torch.randn(experts, HIDDEN, device="cuda").bfloat16()


def alone(exchange: Any, tokens: int) -> tuple[Any, Any, Any]:
    """(its Buffer, the dispatch and combine of a rank that sends itself ``tokens`` tokens, combined tokens), after both
    were checked: every expert doubled its rows. What it combines from then on is one row for each expert, so that no
    result depends on the order in which rows have come."""
    import torch

    from tests.support import gpu_bodies, ll_cases
    from uccl_ep_serving.oracle import calc_diff, dequantise_fp8

    share_the_cores(1)
    case = ll_cases.Case(
        ranks=1, tokens=tokens, counts=(tokens,), hidden=HIDDEN, experts=LOCAL_EXPERTS, topk=TOPK, fp8=True
    )
    buffer = gpu_bodies.opened(exchange, {"window": "device"})
    given = case.inputs()[0]
    x, ids, weights = given.x.cuda(), given.topk_idx.cuda(), given.topk_weights.cuda()
    y = torch.zeros(LOCAL_EXPERTS, tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)

    def step() -> Any:
        rows, count, handle, _, _ = buffer.low_latency_dispatch(x, ids, tokens, LOCAL_EXPERTS, topk_weights=weights)
        buffer.low_latency_combine(y, ids, weights, handle, out=out)
        return rows, count, handle

    rows, count, handle = step()
    check_dispatched(x, ids, rows, count, handle)
    for expert, number in enumerate(count.tolist()):
        y[expert, :number] = 2 * dequantise_fp8(rows[0][expert, :number], rows[1][expert, :number])
    buffer.low_latency_combine(y, ids, weights, handle, out=out)
    expected = 2 * x.double() * weights.double().sum(dim=1, keepdim=True)
    difference = calc_diff(out, expected)
    assert difference < 9e-4, difference
    y.copy_(one_row_each(LOCAL_EXPERTS)[:, None])
    step()
    return buffer, step, out


def kernels(exchange: Any, tokens: int) -> dict[str, Any]:
    """Times of every kernel of a rank alone, with all its experts chosen evenly."""
    from uccl_ep_serving.kernels.triton.kernel import PREFIX
    from uccl_ep_serving.protocol.message import DTYPE_FP8, row_bytes

    buffer, step, _ = alone(exchange, tokens)
    names = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
    found = kernel_times(step, tuple(PREFIX + name for name in names))
    times = {name: found[PREFIX + name] for name in names}
    buffer.destroy()
    wire = row_bytes(HIDDEN, DTYPE_FP8)
    moved = {
        "dispatch_send": tokens * (2 * HIDDEN + wire),
        "dispatch_recv": tokens * (1 + TOPK) * wire,
        "combine_send": tokens * (1 + TOPK) * 2 * HIDDEN,
        "combine_recv": tokens * 2 * 2 * HIDDEN,
    }
    shares = {name: copy_microseconds(nbytes) / times[name] for name, nbytes in moved.items()}
    return {
        "tokens": tokens,
        "microseconds": times,
        "microseconds_together": sum(times.values()),
        "gb_per_s": {name: nbytes / times[name] / 1e3 for name, nbytes in moved.items()},
        "share_of_copy": shares,
        "target_met": min(shares["dispatch_send"], shares["dispatch_recv"]) >= COPY_TARGET,
    }


def replay_microseconds(step: Callable[[], Any], calls: int = 200) -> dict[str, float]:
    """Of a replay of a graph that holds ``step``, as events of the stream have it."""
    import torch

    from uccl_ep_serving.bench.statistics import summary

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    samples = []
    for _ in range(10 + calls):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(1000 * start.elapsed_time(end))
    # the first ones load the graph
    return summary(samples[10:])


def checked_replays(buffer: Any, step: Callable[[], Any], out: Any) -> dict[str, float]:
    """The same of a step that has run: what the last replay writes to ``out`` is what that wrote. Ends the Buffer."""
    import torch

    torch.cuda.synchronize()
    before = out.clone()
    out.zero_()
    found = replay_microseconds(step)
    assert torch.equal(out, before), "a replay combined something else"
    buffer.check()
    buffer.destroy()
    return found


def replays(exchange: Any, tokens: int) -> dict[str, Any]:
    """Microseconds per replay of a rank that sends to itself."""
    found = checked_replays(*alone(exchange, tokens))
    return {"tokens": tokens, "replay_us": found, "target_met": found["median"] < ROUND_TRIP_TARGET}


def round_trip(exchange: Any, overrides: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Microseconds per replay of one rank, after a check against the oracle, and with the same result at the end."""
    import torch

    from tests.support import gpu_bodies, ll_cases

    share_the_cores(exchange.size)
    case = ll_cases.Case(
        ranks=exchange.size, tokens=tokens, counts=(tokens,), hidden=HIDDEN, experts=EXPERTS, topk=TOPK, fp8=True
    )
    buffer = gpu_bodies.opened(exchange, overrides)
    gpu_bodies.run_case(buffer, torch.device("cuda"), exchange.rank, case)
    given = case.inputs()[exchange.rank]
    x, ids, weights = given.x.cuda(), given.topk_idx.cuda(), given.topk_weights.cuda()
    local = EXPERTS // exchange.size
    y = one_row_each(local)[:, None].expand(-1, exchange.size * tokens, -1).contiguous()
    out = torch.empty_like(x)

    def step() -> None:
        _, _, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, tokens, EXPERTS, topk_weights=weights, return_recv_hook=True
        )
        assert hook is not None
        hook()
        _, _, hook = buffer.low_latency_combine(y, ids, weights, handle, out=out, return_recv_hook=True)
        assert hook is not None
        hook()

    step()
    found = checked_replays(buffer, step, out)
    return {"rank": exchange.rank, "ranks": exchange.size, "tokens": tokens, **overrides, "replay_us": found}


def publish(exchange: Any, calls: int) -> dict[str, Any]:
    """Microseconds from a dispatch's first command to the tail of its ring, as this rank's host sees them."""
    import torch

    from tests.support import gpu_bodies, ll_cases
    from uccl_ep_serving.bench.statistics import summary
    from uccl_ep_serving.protocol.command import COMMAND_BYTES
    from uccl_ep_serving.protocol.ring import CAPACITY, SLOTS, TAIL

    case = ll_cases.Case(ranks=exchange.size, experts=8 * exchange.size)
    buffer = gpu_bodies.opened(exchange, {"window": "host", "direct": False, "transport": "shm", "channels": 1})
    given = case.inputs()[exchange.rank]
    x, ids = given.x.cuda(), given.topk_idx.cuda()

    def dispatch() -> Callable[[], None]:
        hook = buffer.low_latency_dispatch(x, ids, case.tokens, case.experts, use_fp8=False, return_recv_hook=True)[4]
        assert hook is not None
        return hook

    dispatch()()
    plane = buffer.runtime._watch.plane
    assert plane is not None
    assert plane.service is not None
    (ring,) = {state.ring for state in plane.service.states if state.ring}
    tail, capacity = (ctypes.c_int64.from_address(ring + offset) for offset in (TAIL, CAPACITY))
    samples = []
    for _ in range(calls):
        torch.cuda.synchronize()
        exchange.all_gather(b"")
        before, deadline = tail.value, time.monotonic() + 10.0
        slot = ctypes.c_int64.from_address(ring + SLOTS + before % capacity.value * COMMAND_BYTES)
        empty = slot.value
        # the kernels begin when this thread looks already
        torch.cuda._sleep(_HELD_UP)
        hook = dispatch()
        looked = slot.value == empty
        while slot.value == empty and time.monotonic() < deadline:
            pass
        seen = time.perf_counter_ns()
        while tail.value == before and time.monotonic() < deadline:
            pass
        taken = time.perf_counter_ns()
        assert time.monotonic() < deadline, "no kernel has published, or no proxy has taken, a command for 10 s"
        if looked:
            samples.append((taken - seen) / 1e3)
        hook()
    assert len(samples) > calls / 2, f"of {calls} dispatches {len(samples)} were published after the first look"
    buffer.destroy()
    found = summary(samples)
    return {"rank": exchange.rank, "publish_to_pop_us": found, "target_met": found["median"] < PUBLISH_TARGET}


def deepep(exchange: Any, tokens: int, directory: str) -> dict[str, Any]:
    """DeepEP's dispatch and combine of ``tokens`` tokens, checked: times of its kernels where a rank is alone, and per
    replay. Or the call that failed."""
    import torch
    import torch.distributed as dist

    from uccl_ep_serving.oracle import calc_diff, dequantise_fp8

    rank, ranks = exchange.rank, exchange.size
    local = LOCAL_EXPERTS if ranks == 1 else EXPERTS // ranks
    found: dict[str, Any] = {"rank": rank, "ranks": ranks, "tokens": tokens}
    stage = reached(directory, rank, "import deep_ep")
    try:
        deep_ep = import_deepep()
        stage = reached(directory, rank, "init_process_group")
        group = deepep_group(exchange)
        stage = reached(directory, rank, "get_low_latency_rdma_size_hint")
        nbytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(tokens, HIDDEN, ranks, ranks * local)
        stage = reached(directory, rank, "Buffer")
        buffer = deep_ep.Buffer(
            group, 0, nbytes, low_latency_mode=True, num_qps_per_rank=local, explicitly_destroy=True
        )
        torch.manual_seed(rank)
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        ids = torch.rand(tokens, ranks * local, device="cuda").topk(TOPK, dim=1).indices
        weights = torch.rand(tokens, TOPK, device="cuda")
        y = torch.zeros(local, ranks * tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(x)

        def step() -> Any:
            rows, count, handle, _, _ = buffer.low_latency_dispatch(x, ids, tokens, ranks * local, use_fp8=True)
            buffer.low_latency_combine(y, ids, weights, handle, out=out)
            return rows, count, handle

        stage = reached(directory, rank, "low_latency_dispatch and low_latency_combine")
        rows, count, handle = step()
        for expert, number in enumerate(count.tolist()):
            y[expert, :number] = dequantise_fp8(rows[0][expert, :number], rows[1][expert, :number])
        buffer.low_latency_combine(y, ids, weights, handle, out=out)
        difference = calc_diff(out, x.double() * weights.double().sum(dim=1, keepdim=True))
        assert difference < 9e-4, difference
        y.copy_(one_row_each(local)[:, None])
        if ranks == 1:
            stage = reached(directory, rank, "timing of kernels")
            names = ("dispatch", "combine")
            prefix = "void deep_ep::internode_ll::"
            times = kernel_times(step, tuple(prefix + name for name in names))
            found["microseconds"] = {name: times[prefix + name] for name in names}
        stage = reached(directory, rank, "timing of replays")
        found["replay_us"] = replay_microseconds(step)
        buffer.destroy()
        return found
    except Exception as error:
        return {**found, "failed": stage, "error": f"{type(error).__name__}: {error}"[:400]}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def parts(pool: Any, _options: argparse.Namespace) -> dict[str, Callable[[], list[Any]]]:
    """What can be measured, by name."""
    return {
        "kernels": lambda: [pool.run(1, kernels, tokens, timeout=120)[0] for tokens in (128, 4096)],
        "alone": lambda: pool.run(1, replays, 128, timeout=120),
        "publish": lambda: pool.run(2, publish, 300, timeout=120),
        "round_trip": lambda: [
            one
            for window in ("device", "host")
            for one in pool.run(2, round_trip, {"window": window}, 128, timeout=120)
        ],
        "deepep": lambda: beside_deepep(pool, 1, deepep, 128),
        "deepep_round_trip": lambda: beside_deepep(pool, 2, deepep, 128),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    run_parts(parser, ("kernels", "alone", "publish", "round_trip", "deepep", "deepep_round_trip"), parts)


if __name__ == "__main__":
    main()
