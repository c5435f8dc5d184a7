"""What rank processes run on a GPU. They share the device, and each has a context of its own."""

from __future__ import annotations

import time
from typing import Any

import bodies
import ll_cases
import torch

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


def replays(exchange: StoreExchange, overrides: dict[str, Any], times: int) -> None:
    """A dispatch, the experts and a combine, captured once and replayed with other tokens and routing."""
    buffer = opened(exchange, overrides)
    rank = exchange.rank
    case = ll_cases.Case(ranks=exchange.size, hidden=256, topk=4)
    first = case.inputs()[rank]
    x, ids, weights = first.x.cuda(), first.topk_idx.cuda(), first.topk_weights.cuda()
    local = case.experts // exchange.size
    factors = 1 + 0.25 * (torch.arange(local, device="cuda") + rank * local).float()

    def step() -> torch.Tensor:
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, case.tokens, case.experts, use_fp8=False, topk_weights=weights, return_recv_hook=True
        )
        assert hook is not None
        hook()
        y = (rows.float() * factors[:, None, None]).to(rows.dtype)
        out, _, hook = buffer.low_latency_combine(y, ids, weights, handle, return_recv_hook=True)
        assert hook is not None
        hook()
        return out

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(times):
        other = ll_cases.Case(**{**case.__dict__, "seed": seed})
        inputs = other.inputs()
        for kept, new in ((x, inputs[rank].x), (ids, inputs[rank].topk_idx), (weights, inputs[rank].topk_weights)):
            kept.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        ll_cases.check_combined(other, inputs, rank, captured.cpu())
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
    torch.cuda.synchronize()
    works = bool(torch.ones(4, device="cuda").sum().item() == 4)
    buffer.destroy()
    return kind, peer, works
