"""What rank processes run on a GPU. They share the device, and each has a context of its own."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import bodies
import ll_cases
import normal_cases
import torch
from ll_replay import Layer

from uccl_ep_serving.bootstrap import StoreExchange
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.errors import UcclEpError

PATHS: dict[str, dict[str, Any]] = {
    "mapped host memory": {"window": "host"},
    "shm": {"window": "host", "direct": False, "transport": "shm", "proxies": 2, "channels": 2},
    "tcp": {"window": "host", "direct": False, "transport": "tcp"},
    "ipc": {"window": "device"},
}


class OnHost:
    """The facade that ``ll_cases.run_rank`` calls with CPU tensors: they go to the GPU, and what returns comes back."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor, tokens: int, experts: int, **options: Any) -> Any:
        """See ``Buffer.low_latency_dispatch``."""
        weights = options.pop("topk_weights", None)
        rows, count, handle, event, hook = self._buffer.low_latency_dispatch(
            x.cuda(),
            topk_idx.cuda(),
            tokens,
            experts,
            topk_weights=None if weights is None else weights.cuda(),
            **options,
        )
        if hook is not None:
            hook()
        back = tuple(one.cpu() for one in rows) if isinstance(rows, tuple) else rows.cpu()
        return back, count.cpu(), HostHandle(handle), event, None

    def combine(self, y: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: HostHandle) -> Any:
        """See ``Buffer.low_latency_combine``."""
        out, event, _ = self._buffer.low_latency_combine(
            y.cuda(), topk_idx.cuda(), topk_weights.cuda(), handle.on_device
        )
        return out.cpu(), event, None


class HostHandle(tuple[Any, ...]):
    """A handle whose tensors have come back, with the one that combine needs."""

    on_device: Any

    def __new__(cls, handle: Any) -> HostHandle:
        made = super().__new__(cls, (one.cpu() if isinstance(one, torch.Tensor) else one for one in handle))
        made.on_device = handle
        return made


def synchronize() -> None:
    """Wait until the device has finished what it was given."""
    torch.cuda.synchronize()


def opened(exchange: StoreExchange, overrides: dict[str, Any]) -> Buffer:
    """A Buffer for CUDA (or ROCm) tensors."""
    torch.cuda.set_device(0)
    return bodies.opened(exchange, {"device": "cuda", "timeout": 60.0, "connect_timeout": 120.0, **overrides})


def against_the_oracle(exchange: StoreExchange, overrides: dict[str, Any], cases: list[ll_cases.Case]) -> None:
    """Every case twice, bit-exact."""
    buffer = opened(exchange, overrides)
    for case in cases:
        inputs = case.inputs()
        for _ in range(2):
            combined = ll_cases.run_rank(case, OnHost(buffer), exchange.rank, inputs)
            ll_cases.check_combined(case, inputs, exchange.rank, combined)
    buffer.destroy()


def replays(exchange: StoreExchange, overrides: dict[str, Any], form: str, times: int) -> None:
    """A layer captured once in a CUDA graph and replayed with other tokens and routing."""
    buffer = opened(exchange, overrides)
    layer = Layer(buffer, form, torch.device("cuda"))
    for _ in range(3):
        layer.run()
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run()

    def replay() -> None:
        graph.replay()
        synchronize()

    layer.check(replay, times)
    buffer.destroy()


def _on_device(inputs: normal_cases.Inputs) -> normal_cases.Inputs:
    moved = {
        name: [one.cuda() for one in getattr(inputs, name)] for name in ("x", "scales", "topk_idx", "topk_weights")
    }
    return replace(inputs, **moved)


def _on_host(outcome: normal_cases.Outcome) -> normal_cases.Outcome:
    received = outcome.received
    back = tuple(one.cpu() for one in received) if isinstance(received, tuple) else received.cpu()
    names = ("topk_idx", "topk_weights", "combined", "combined_weights")
    return replace(outcome, received=back, **{name: getattr(outcome, name).cpu() for name in names})


def normal_against_the_oracle(
    exchange: StoreExchange, overrides: dict[str, Any], cases: list[normal_cases.Case]
) -> None:
    """Normal mode: every case with a look of the host, without one, and from the handle of either."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    for case in cases:
        inputs = case.inputs()
        there = _on_device(inputs)
        for worst in (0, sum(case.tokens) + 2):
            outcome = normal_cases.round_trip(buffer, there, rank, num_worst_tokens=worst)
            normal_cases.check_rank(inputs, rank, _on_host(outcome), worst=worst)
            rows = len(inputs.delivered()[rank].source)
            again, *_ = buffer.dispatch(there.rows(rank), handle=outcome.handle)
            again = again[0] if isinstance(again, tuple) else again
            assert normal_cases.same_bits(again[:rows].cpu(), outcome.rows[:rows].cpu())
    buffer.destroy()


def normal_replays(exchange: StoreExchange, overrides: dict[str, Any], times: int) -> None:
    """Layout, dispatch and combine of normal mode in a CUDA graph, replayed with other tokens and routing."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    case = normal_cases.Case(tokens=(40, 33, 7, 0)[: exchange.size], experts=4 * exchange.size)
    fixed = _on_device(case.inputs())
    worst = sum(case.tokens)

    def step() -> normal_cases.Outcome:
        return normal_cases.round_trip(buffer, fixed, rank, num_worst_tokens=worst)

    for _ in range(2):
        step()
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outcome = step()
    for turn in range(times):
        inputs = replace(case, seed=turn + 1).inputs()
        for name in ("x", "topk_idx", "topk_weights"):
            getattr(fixed, name)[rank].copy_(getattr(inputs, name)[rank])
        graph.replay()
        synchronize()
        normal_cases.check_rank(inputs, rank, _on_host(outcome), worst=worst)
    buffer.destroy()


def streams(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """Two Buffers in flight on streams of their own, operations that nobody waits for until their result is used, and
    a hook that is called on another stream than its dispatch."""
    buffers = [opened(exchange, overrides) for _ in range(2)]
    case = ll_cases.Case(ranks=exchange.size, experts=4 * exchange.size)
    rank = exchange.rank
    for turn in range(4):
        cases = [ll_cases.Case(**{**case.__dict__, "seed": 2 * turn + half}) for half in range(2)]
        given = [one.inputs() for one in cases]
        results = []
        for buffer, inputs in zip(buffers, given, strict=True):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                mine = [one.cuda() for one in (inputs[rank].x, inputs[rank].topk_idx, inputs[rank].topk_weights)]
                rows, _, handle, event, _ = buffer.low_latency_dispatch(
                    mine[0], mine[1], case.tokens, case.experts, use_fp8=False, topk_weights=mine[2], async_finish=True
                )
            other = torch.cuda.Stream()
            with torch.cuda.stream(other):
                event.current_stream_wait()
                local = case.experts // exchange.size
                factors = 1 + 0.25 * (torch.arange(local, device="cuda") + rank * local).float()
                y = (rows.float() * factors[:, None, None]).to(rows.dtype)
                out, _, hook = buffer.low_latency_combine(y, mine[1], mine[2], handle, return_recv_hook=True)
            results.append((out, hook))
        for (out, hook), one, inputs in zip(results, cases, given, strict=True):
            assert hook is not None
            hook()
            ll_cases.check_combined(one, inputs, rank, out.cpu())
    for buffer in buffers:
        buffer.destroy()


def silent_peer(exchange: StoreExchange, overrides: dict[str, Any]) -> tuple[str, int, bool]:
    """Rank 1 stops; rank 0's kernels end by themselves, the next call names it, and the GPU works on."""
    buffer = opened(exchange, {**overrides, "timeout": 3.0})
    case = ll_cases.Case(ranks=exchange.size)
    given = case.inputs()[exchange.rank]
    host = OnHost(buffer)
    host.dispatch(given.x, given.topk_idx, case.tokens, case.experts, use_fp8=False)
    if exchange.rank == 1:
        time.sleep(10)
        buffer.runtime.close(0.1)
        return "", -1, True
    kind, peer = "", -1
    try:
        for _ in range(2):
            host.dispatch(given.x, given.topk_idx, case.tokens, case.experts, use_fp8=False)
    except UcclEpError as error:
        kind, peer = type(error).__name__, getattr(error, "peer", -1)
    synchronize()
    works = bool(torch.ones(4, device="cuda").sum().item() == 4)
    buffer.destroy()
    return kind, peer, works
