"""What rank processes run in the system tests: module-level functions, so that they travel by name."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import torch

from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.config import Settings
from uccl_ep_serving.control_plane.bootstrap import StoreExchange
from uccl_ep_serving.errors import UcclEpError
from uccl_ep_serving.protocol.command import COMMAND_BYTES, Command, encode
from uccl_ep_serving.protocol.context import WINDOW_BYTES
from uccl_ep_serving.protocol.ring import CAPACITY, HEAD, SLOTS, TAIL, lap_of
from uccl_ep_serving.protocol.streams import HOST, LL_DISPATCH, NORMAL_NOTIFY


def settings(**overrides: Any) -> Settings:
    """Small windows and short deadlines, whatever the environment says."""
    chosen = {
        "heap_bytes": 32 << 20,
        "round_bytes": 4 << 20,
        "chunk_bytes": 64 << 10,
        "timeout": 20.0,
        "connect_timeout": 20.0,
    }
    return Settings.from_environment({}, **{**chosen, **overrides})


def opened(exchange: StoreExchange, overrides: dict[str, Any]) -> Buffer:
    return Buffer(exchange, settings=settings(**overrides))


def tokens_of(rank: int, tokens: int, hidden: int, experts: int, topk: int, seed: int = 0) -> Any:
    """(x bf16 [tokens, hidden], topk_idx int64 [tokens, topk], weights float32 [tokens, topk]) of a rank."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    scores = torch.rand(tokens, experts, generator=generator)
    weights, topk_idx = scores.topk(topk, dim=1)
    return x, topk_idx, weights


def assert_close(combined: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((combined.float() - expected).abs().max() / expected.abs().max())
    assert error < 0.02, error


def round_trip(
    buffer: Buffer, seed: int = 0, tokens: int = 8, hidden: int = 128, experts: int = 8, topk: int = 2
) -> None:
    """One low-latency dispatch and combine with identity experts, whose result must be right."""
    experts = max(experts, buffer.group_size)
    experts -= experts % buffer.group_size
    x, topk_idx, weights = tokens_of(buffer.rank, tokens, hidden, experts, topk, seed)
    received, _, handle, _, _ = buffer.low_latency_dispatch(
        x, topk_idx, tokens, experts, use_fp8=False, topk_weights=weights
    )
    combined, _, _ = buffer.low_latency_combine(received, topk_idx, weights, handle)
    assert_close(combined, x.float() * weights.sum(dim=1, keepdim=True))


def normal_trip(
    buffer: Buffer,
    seed: int = 0,
    tokens: int = 40,
    hidden: int = 128,
    experts: int = 8,
    topk: int = 2,
    lost: frozenset[int] = frozenset(),
) -> None:
    """One normal dispatch and combine with identity experts, whose result must be right.

    ``lost``: ranks that are masked, whose share of a token is missing.
    """
    experts = max(experts, buffer.group_size)
    experts -= experts % buffer.group_size
    x, topk_idx, weights = tokens_of(buffer.rank, tokens, hidden, experts, topk, seed)
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(topk_idx, experts)
    received, _, _, _, handle, _ = buffer.dispatch(
        x,
        topk_idx=topk_idx,
        topk_weights=weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=event,
    )
    combined, _, _ = buffer.combine(received, handle)
    in_rank[:, sorted(lost)] = False
    assert_close(combined, x.float() * in_rank.sum(dim=1, keepdim=True))


def both_modes(exchange: StoreExchange, overrides: dict[str, Any], rounds: int = 5) -> dict[str, Any]:
    """Both modes a few times on one Buffer; returns its counters."""
    buffer = opened(exchange, overrides)
    for seed in range(rounds):
        round_trip(buffer, seed)
        normal_trip(buffer, seed)
    stats = buffer.stats()
    buffer.destroy()
    return stats


def leftovers(exchange: StoreExchange, overrides: dict[str, Any]) -> tuple[int, int]:
    """Open and close Buffers; returns (threads, descriptors) that there are more afterwards."""
    both_modes(exchange, overrides, 1)
    before = settled()
    for number in range(3):
        again = StoreExchange(exchange._store, exchange.rank, exchange.size, f"again{number}")
        both_modes(again, overrides, 1)
    return left_over(before)


def settled() -> tuple[int, int]:
    """Threads and descriptors of this process, once their numbers stay: a joined thread leaves /proc a moment after it
    is gone for Python."""
    before, deadline = _population(), time.monotonic() + 3.0
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if before == (before := _population()):
            break
    return before


def left_over(before: tuple[int, int], seconds: float = 3.0) -> tuple[int, int]:
    """(threads, descriptors) that there are more than ``before``, after a moment."""
    deadline = time.monotonic() + seconds
    while True:
        threads, descriptors = (max(now - then, 0) for now, then in zip(_population(), before, strict=True))
        if not threads | descriptors or time.monotonic() > deadline:
            return threads, descriptors
        time.sleep(0.02)


def _population() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def until_it_fails(
    exchange: StoreExchange, overrides: dict[str, Any], mode: str, victim: int, stall: bool, marker: str
) -> dict[str, Any]:
    """Work until the victim is killed (by the test) or, with ``stall``, falls silent; returns what was raised, when."""
    buffer = opened(exchange, overrides)
    trip = round_trip if mode == "low_latency" else normal_trip
    trip(buffer)
    Path(f"{marker}.{exchange.rank}").touch()
    if stall and exchange.rank == victim:
        exchange.all_gather(b"")
        buffer.runtime.close(0.1)
        return {}
    try:
        for seed in range(1_000_000):
            trip(buffer, seed)
    except UcclEpError as error:
        when = time.time()
        again = ""
        try:
            trip(buffer)
        except UcclEpError as second:
            again = type(second).__name__
        if stall:
            exchange.all_gather(b"")
        buffer.destroy()
        return {
            "kind": type(error).__name__,
            "peer": getattr(error, "peer", None),
            "text": str(error),
            "when": when,
            "again": again,
        }
    return {}


def refused(exchange: StoreExchange, overrides: dict[str, Any]) -> list[str]:
    """Every kind of bad low-latency and normal input; the Buffer works after each. Returns the messages."""
    buffer = opened(exchange, overrides)
    rank, size = buffer.rank, buffer.group_size
    x, topk_idx, weights = tokens_of(rank, 8, 128, 4 * size, 2)
    experts = 4 * size
    round_trip(buffer, experts=experts)
    dispatch = buffer.low_latency_dispatch
    bad = topk_idx.clone()
    bad[0, 0] = experts
    negative = topk_idx.clone()
    negative[0, 0] = -2
    attempts: list[Any] = [
        lambda: dispatch(x[:, :100], topk_idx, 8, experts, use_fp8=False),
        lambda: dispatch(x.to(torch.float64), topk_idx, 8, experts, use_fp8=False),
        lambda: dispatch(x, bad, 8, experts, use_fp8=False),
        lambda: dispatch(x, negative, 8, experts, use_fp8=False),
        lambda: dispatch(x, topk_idx, 4, experts, use_fp8=False),
        lambda: dispatch(x, topk_idx.int(), 8, experts, use_fp8=False),
        lambda: dispatch(x, topk_idx[:3], 8, experts, use_fp8=False),
        lambda: dispatch(x, topk_idx, 8, experts + 1, use_fp8=False),
        lambda: dispatch(x, topk_idx, 8, experts, use_fp8=False, topk_weights=weights[:, :1]),
        lambda: dispatch(x, topk_idx, 100_000, experts, use_fp8=False),
        lambda: buffer.get_dispatch_layout(bad, experts),
        lambda: buffer.get_dispatch_layout(topk_idx, experts + 1),
        lambda: buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights),
        lambda: buffer.combine(x, None),  # type: ignore[arg-type]
    ]
    messages = []
    for number, attempt in enumerate(attempts):
        try:
            attempt()
        except UcclEpError as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            raise AssertionError(f"attempt {number} was accepted")
        round_trip(buffer, number, experts=experts)
        normal_trip(buffer, number, experts=experts)
    buffer.destroy()
    return messages


def stray_command(exchange: StoreExchange, overrides: dict[str, Any]) -> list[str]:
    """Somebody on rank 0 enqueues a write outside the window that no operation waits for.

    Rank 0's next operation says so, once, before anything moves; the group goes on. Returns what was raised.
    """
    buffer = opened(exchange, overrides)
    round_trip(buffer)
    texts = []
    if exchange.rank == 0:
        put_command(buffer, HOST, buffer.runtime.layout.nbytes)
        try:
            round_trip(buffer, 1)
        except UcclEpError as error:
            texts.append(f"{type(error).__name__}: {error}")
    for seed in range(3):
        round_trip(buffer, seed)
        normal_trip(buffer, seed)
    buffer.destroy()
    return texts


def put_command(buffer: Buffer, stream: int, target: int) -> None:
    """Put a write of 16 bytes to rank 1 into the ring of ``stream``, and wait until the proxy has taken it."""
    service = buffer.runtime._watch.plane.service
    ring = service.ring(stream)
    head, tail, capacity = (ctypes.c_int64.from_address(ring + word) for word in (HEAD, TAIL, CAPACITY))
    index = head.value
    head.value = index + 1
    low, high = encode(
        Command(rank=1, stream=stream, source=0, target=target, length=16, last=True), lap_of(index, capacity.value)
    )
    slot = ring + SLOTS + index % capacity.value * COMMAND_BYTES
    ctypes.c_int64.from_address(slot).value = low
    ctypes.c_int64.from_address(slot + 8).value = high
    deadline = time.monotonic() + 5
    while tail.value <= index:
        assert time.monotonic() < deadline, "the proxy takes no commands"
        time.sleep(0.001)


def operation_hit(exchange: StoreExchange, overrides: dict[str, Any], mode: str, kernel: bool) -> dict[str, Any]:
    """A write of rank 0's operation to rank 1 lies outside the window: noticed by its kernel, or by its proxy.

    Returns what was raised, and after how many seconds.
    """
    buffer = opened(exchange, overrides)
    trip = round_trip if mode == "low_latency" else normal_trip
    trip(buffer)
    # a slower rank may still be in the operation that is not to be hit
    exchange.all_gather(b"")
    if exchange.rank == 0 and kernel:
        # as if the kernels' idea of the window were another one than the proxies'
        buffer.runtime.space._context[WINDOW_BYTES] = 4096
    elif exchange.rank == 0:
        put_command(buffer, LL_DISPATCH if mode == "low_latency" else NORMAL_NOTIFY, buffer.runtime.layout.nbytes)
    started = time.monotonic()
    result: dict[str, Any] = {}
    try:
        for seed in range(10):
            trip(buffer, seed)
    except UcclEpError as error:
        result = {
            "kind": type(error).__name__,
            "peer": getattr(error, "peer", None),
            "text": str(error),
            "seconds": time.monotonic() - started,
        }
        # it must be the severed connection that tells the other one, not this Buffer's end
        time.sleep(1.5)
    buffer.destroy()
    return result


def disagree_on_shape(exchange: StoreExchange, overrides: dict[str, Any]) -> str:
    """Rank 1 asks for another hidden size; every rank is told, and the group works afterwards."""
    buffer = opened(exchange, overrides)
    hidden = 256 if exchange.rank == 1 else 128
    try:
        round_trip(buffer, hidden=hidden)
    except UcclEpError as error:
        text = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("different hidden sizes were accepted")
    round_trip(buffer)
    buffer.destroy()
    return text


def disagree_on_settings(exchange: StoreExchange, overrides: dict[str, Any], own: list[dict[str, Any]]) -> str:
    """Ranks start with different settings."""
    try:
        opened(exchange, {**overrides, **own[exchange.rank]})
    except UcclEpError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("different settings were accepted")


def proxy_dies(exchange: StoreExchange, overrides: dict[str, Any]) -> list[str]:
    """Rank 0's proxy dies after a while: its next operation says so, the others time out or lose it by name."""
    own = {"fault_proxy_after": 20} if exchange.rank == 0 else {}
    buffer = opened(exchange, {**overrides, **own})
    texts = []
    try:
        for seed in range(100_000):
            round_trip(buffer, seed)
    except UcclEpError as error:
        texts.append(f"{type(error).__name__}: {error}")
    try:
        round_trip(buffer)
    except UcclEpError as error:
        texts.append(f"{type(error).__name__}: {error}")
    buffer.destroy()
    return texts


def pinned(exchange: StoreExchange, overrides: dict[str, Any]) -> list[list[int]]:
    """Cores that each proxy thread of this rank may run on, in thread order."""
    buffer = opened(exchange, overrides)
    round_trip(buffer)
    found = {}
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith(f"uccl-ep {exchange.rank}."):
            found[name] = sorted(os.sched_getaffinity(int(task.name)))
    buffer.destroy()
    return [found[name] for name in sorted(found)]
