"""What rank processes run on a GPU. They share the device, and each has a context of its own.

With ``{"device": "interpreter"}`` among the overrides the same runs on CPU tensors in Triton's interpreter, but for
what needs streams and graphs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import psutil
import torch

from tests.support import bodies, ll_cases, normal_cases
from tests.support.bits import same_bits
from tests.support.interpreter import interpret
from tests.support.ll_replay import Layer
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.control_plane.bootstrap import StoreExchange
from uccl_ep_serving.errors import UcclEpError

_Result = TypeVar("_Result")

#: Nodes are simulated: proxies copy between them, kernels inside them.
NODES: dict[str, Any] = {"window": "host", "transport": "shm", "proxies": 2, "channels": 2}
#: Waits end before a test's time does, and outlast what one rank compiles longer than another.
SECONDS = 40.0
#: Cycles of the GPU's clock: some milliseconds, longer than what is launched right after takes.
_LATE = 10_000_000


def device_of(overrides: dict[str, Any]) -> torch.device:
    """Where the tensors of a Buffer with these overrides lie."""
    return torch.device("cpu" if overrides.get("device") == "interpreter" else "cuda")


class OnHost:
    """The facade that ``ll_cases.run_rank`` calls with CPU tensors: they go to the GPU, and what returns comes back."""

    def __init__(self, buffer: Buffer, device: torch.device) -> None:
        self._buffer, self._device = buffer, device

    def dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor, tokens: int, experts: int, **options: Any) -> Any:
        """See ``Buffer.low_latency_dispatch``."""
        weights = options.pop("topk_weights", None)
        rows, count, handle, event, hook = self._buffer.low_latency_dispatch(
            x.to(self._device),
            topk_idx.to(self._device),
            tokens,
            experts,
            topk_weights=None if weights is None else weights.to(self._device),
            **options,
        )
        if hook is not None:
            hook()
        back = tuple(one.cpu() for one in rows) if isinstance(rows, tuple) else rows.cpu()
        return back, count.cpu(), HostHandle(handle), event, None

    def combine(self, y: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: HostHandle) -> Any:
        """See ``Buffer.low_latency_combine``."""
        given = (one.to(self._device) for one in (y, topk_idx, topk_weights))
        out, event, _ = self._buffer.low_latency_combine(*given, handle.on_device)
        return out.cpu(), event, None


class HostHandle(tuple[Any, ...]):
    """A handle whose tensors have come back, with the one that combine needs."""

    on_device: Any

    def __new__(cls, handle: Any) -> HostHandle:
        made = super().__new__(cls, (one.cpu() if isinstance(one, torch.Tensor) else one for one in handle))
        made.on_device = handle
        return made


def opened(exchange: StoreExchange, overrides: dict[str, Any]) -> Buffer:
    """A Buffer for CUDA (or ROCm) tensors, or for the interpreter's."""
    if device_of(overrides).type == "cuda":
        torch.cuda.set_device(0)
    else:
        interpret()
    return bodies.opened(exchange, {"device": "cuda", "timeout": SECONDS, "connect_timeout": 120.0, **overrides})


def run_case(buffer: Buffer, device: torch.device, rank: int, case: ll_cases.Case) -> None:
    """A low-latency dispatch and combine, bit-exact."""
    if device.type == "cuda" and torch.version.hip:
        case = replace(case, fnuz=torch.cuda.get_device_properties(0).gcnArchName.startswith("gfx942"))
    inputs = case.inputs()
    combined = ll_cases.run_rank(case, OnHost(buffer, device), rank, inputs)
    ll_cases.check_combined(case, inputs, rank, combined)


def against_the_oracle(exchange: StoreExchange, overrides: dict[str, Any], cases: list[ll_cases.Case]) -> None:
    """Every case twice, bit-exact."""
    buffer = opened(exchange, overrides)
    for case in cases:
        for _ in range(2):
            run_case(buffer, device_of(overrides), exchange.rank, case)
    buffer.destroy()


def captured(step: Callable[[], _Result], warm: int) -> tuple[Callable[[], None], _Result]:
    """(replay, what it writes to) of a CUDA graph that holds ``step``, which runs ``warm`` times before. A replay waits
    for its end."""
    for _ in range(warm):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay, result


def replays(exchange: StoreExchange, overrides: dict[str, Any], form: str, times: int) -> None:
    """A layer captured once in a CUDA graph and replayed with other tokens and routing."""
    buffer = opened(exchange, overrides)
    layer = Layer(buffer, form, device_of(overrides))
    replay, _ = captured(layer.run, warm=3)
    layer.check(replay, times)
    buffer.destroy()


def _on_device(inputs: normal_cases.Inputs, device: torch.device) -> normal_cases.Inputs:
    moved = {
        name: [one.to(device) for one in getattr(inputs, name)] for name in ("x", "scales", "topk_idx", "topk_weights")
    }
    return replace(inputs, **moved)


def _on_host(outcome: normal_cases.Outcome) -> normal_cases.Outcome:
    received = outcome.received
    back = tuple(one.cpu() for one in received) if isinstance(received, tuple) else received.cpu()
    names = ("topk_idx", "topk_weights", "combined", "combined_weights")
    return replace(outcome, received=back, **{name: getattr(outcome, name).cpu() for name in names})


def _parts(received: Any) -> tuple[torch.Tensor, ...]:
    """Values and, of FP8, scales."""
    return received if isinstance(received, tuple) else (received,)


def checked_round_trip(
    buffer: Buffer, device: torch.device, rank: int, inputs: normal_cases.Inputs, *, worst: int = 0, **options: Any
) -> tuple[normal_cases.Inputs, normal_cases.Outcome]:
    """(``inputs`` on the device; what a rank got of them, verified against the oracle). ``worst`` and ``options`` go to
    dispatch."""
    there = _on_device(inputs, device)
    outcome = normal_cases.round_trip(buffer, there, rank, num_worst_tokens=worst, **options)
    normal_cases.check_rank(inputs, rank, _on_host(outcome), worst=worst)
    return there, outcome


def run_normal_case(
    buffer: Buffer, device: torch.device, rank: int, case: normal_cases.Case, worst: int, crossed: bool = False
) -> None:
    """A dispatch and combine verified against the oracle, and once more from the handle, bit by bit the same.

    Args:
        worst: ``num_worst_tokens``; 0 lets the host look.
        crossed: rows cross once to a node.
    """
    inputs = case.inputs()
    there, outcome = checked_round_trip(buffer, device, rank, inputs, worst=worst)
    assert bool(outcome.handle.about.node_ranks) == crossed
    rows = len(inputs.delivered[rank].source)
    again, *_, handle, _ = buffer.dispatch(there.rows(rank), handle=outcome.handle)
    for cached, first in zip(_parts(again), _parts(outcome.received), strict=True):
        assert same_bits(cached[:rows].cpu(), first[:rows].cpu())
    outputs = normal_cases.expert_outputs(_parts(again)[0], rank)
    back, _, _ = buffer.combine(outputs, handle, topk_weights=outcome.topk_weights)
    assert same_bits(back.cpu(), outcome.combined.cpu())


def normal_against_the_oracle(
    exchange: StoreExchange, overrides: dict[str, Any], cases: list[normal_cases.Case], crossed: bool = False
) -> None:
    """Normal mode: every case with a look of the host, without one, and from the handle of either."""
    buffer = opened(exchange, overrides)
    for case in cases:
        for worst in (0, sum(case.tokens) + 2):
            run_normal_case(buffer, device_of(overrides), exchange.rank, case, worst, crossed)
    buffer.destroy()


def normal_replays(exchange: StoreExchange, overrides: dict[str, Any], times: int) -> None:
    """Layout, dispatch and combine of normal mode in a CUDA graph, replayed with other tokens and routing."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    case = normal_cases.Case(tokens=(40, 33, 7, 0)[: exchange.size], experts=4 * exchange.size)
    fixed = _on_device(case.inputs(), device_of(overrides))
    worst = sum(case.tokens)

    def step() -> normal_cases.Outcome:
        return normal_cases.round_trip(buffer, fixed, rank, num_worst_tokens=worst)

    replay, outcome = captured(step, warm=2)
    for turn in range(times):
        inputs = replace(case, seed=turn + 1).inputs()
        for name in ("x", "topk_idx", "topk_weights"):
            getattr(fixed, name)[rank].copy_(getattr(inputs, name)[rank])
        replay()
        normal_cases.check_rank(inputs, rank, _on_host(outcome), worst=worst)
    buffer.destroy()


def streams(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """Two Buffers in flight on streams of their own, operations that nobody waits for until their result is used, and
    a hook that is called on another stream than its dispatch."""
    buffers = [opened(exchange, overrides) for _ in range(2)]
    case = ll_cases.Case(ranks=exchange.size, experts=4 * exchange.size)
    rank, device = exchange.rank, device_of(overrides)
    for turn in range(4):
        cases = [ll_cases.Case(**{**case.__dict__, "seed": 2 * turn + half}) for half in range(2)]
        given = [one.inputs() for one in cases]
        results = []
        for buffer, inputs in zip(buffers, given, strict=True):
            given_here = (inputs[rank].x, inputs[rank].topk_idx, inputs[rank].topk_weights)
            staged = [one.to(device) for one in given_here]
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(_LATE)
                mine = [one.clone() for one in staged]
                rows, _, handle, event, _ = buffer.low_latency_dispatch(
                    mine[0], mine[1], case.tokens, case.experts, use_fp8=False, topk_weights=mine[2], async_finish=True
                )
            other = torch.cuda.Stream()
            with torch.cuda.stream(other):
                event.current_stream_wait()
                local = case.experts // exchange.size
                factors = 1 + 0.25 * (torch.arange(local, device=device) + rank * local).float()
                y = (rows.float() * factors[:, None, None]).to(rows.dtype)
                out, _, hook = buffer.low_latency_combine(y, mine[1], mine[2], handle, return_recv_hook=True)
            results.append((out, hook))
        for (out, hook), one, inputs in zip(results, cases, given, strict=True):
            assert hook is not None
            hook()
            ll_cases.check_combined(one, inputs, rank, out.cpu())
    for buffer in buffers:
        buffer.destroy()


def normal_streams(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """Two Buffers in flight whose operations only events order: tokens that a stream writes late (previous_event),
    results that another stream uses once the event was waited for (async_finish), outputs of either stream's memory,
    and inputs that are given back as soon as they were handed over."""
    buffers, rank = [opened(exchange, overrides) for _ in range(2)], exchange.rank
    device = device_of(overrides)
    case = normal_cases.Case(tokens=(40, 33), experts=8)
    worst = sum(case.tokens)
    for turn in range(4):
        options: dict[str, Any] = {"async_finish": True, "allocate_on_comm_stream": turn % 2 == 1}
        given = [replace(case, seed=2 * turn + half).inputs() for half in range(2)]
        staged = [_on_device(inputs, device_of(overrides)) for inputs in given]
        torch.cuda.synchronize()
        sent = []
        for buffer, there in zip(buffers, staged, strict=True):
            writer = torch.cuda.Stream()
            with torch.cuda.stream(writer):
                torch.cuda._sleep(_LATE)
                x, ids, weights = (one[rank].clone() for one in (there.x, there.topk_idx, there.topk_weights))
                written = Buffer.capture()
            per_rank, _, per_expert, in_rank, laid_out = buffer.get_dispatch_layout(
                ids, case.experts, previous_event=written, **options
            )
            received, local_ids, local_weights, counts, handle, event = buffer.dispatch(
                x,
                topk_idx=ids,
                topk_weights=weights,
                num_tokens_per_rank=per_rank,
                num_tokens_per_expert=per_expert,
                is_token_in_rank=in_rank,
                num_worst_tokens=worst,
                previous_event=laid_out,
                **options,
            )
            like = [(one.shape, one.dtype) for one in (x, ids, weights)]
            # to the allocator, which must know that another stream reads them still
            del x, ids, weights
            with torch.cuda.stream(writer):
                spoilt = [torch.full(shape, -1, dtype=dtype, device=device) for shape, dtype in like]
            sent.append((received, local_ids, local_weights, counts, handle, event, spoilt))
        returned = []
        for buffer, (received, _, local_weights, _, handle, event, _) in zip(buffers, sent, strict=True):
            with torch.cuda.stream(torch.cuda.Stream()):
                event.current_stream_wait()
                torch.cuda._sleep(_LATE)
                outputs = normal_cases.expert_outputs(received, rank)
                returned.append(
                    buffer.combine(
                        outputs, handle, topk_weights=local_weights, previous_event=Buffer.capture(), **options
                    )
                )
                del outputs
        for inputs, (received, ids, weights, counts, handle, _, _), (combined, back, event) in zip(
            given, sent, returned, strict=True
        ):
            event.current_stream_wait()
            outcome = normal_cases.Outcome(received, ids, weights, counts, handle, combined, back)
            normal_cases.check_rank(inputs, rank, _on_host(outcome), worst=worst)
    for buffer in buffers:
        buffer.destroy()


def _of_a_silent_peer(buffer: Buffer, call: Any) -> tuple[str, int, bool]:
    """What ``call`` raises, whom that names, and whether the GPU works afterwards."""
    kind, peer = "", -1
    try:
        call()
    except UcclEpError as error:
        kind, peer = type(error).__name__, getattr(error, "peer", -1)
    torch.cuda.synchronize()
    works = bool(torch.ones(4, device="cuda").sum().item() == 4)
    buffer.destroy()
    return kind, peer, works


def _fall_silent(buffer: Buffer) -> tuple[str, int, bool]:
    # twice as long as the others wait
    time.sleep(6)
    buffer.runtime.close(0.1)
    return "", -1, True


def silent_peer(exchange: StoreExchange, overrides: dict[str, Any]) -> tuple[str, int, bool]:
    """Rank 1 stops; rank 0's kernels end by themselves, the next call names it, and the GPU works on."""
    buffer = opened(exchange, {**overrides, "timeout": 3.0})
    case = ll_cases.Case(ranks=exchange.size)
    given = case.inputs()[exchange.rank]
    host = OnHost(buffer, device_of(overrides))

    def dispatch() -> None:
        host.dispatch(given.x, given.topk_idx, case.tokens, case.experts, use_fp8=False)

    dispatch()
    if exchange.rank == 1:
        return _fall_silent(buffer)
    return _of_a_silent_peer(buffer, lambda: [dispatch() for _ in range(2)])


def silent_peer_of_replays(exchange: StoreExchange, overrides: dict[str, Any]) -> tuple[str, int, bool]:
    """Rank 1 does not replay: rank 0's kernels end at their deadline, and a check between replays names it."""
    buffer = opened(exchange, {**overrides, "timeout": 3.0})
    layer = Layer(buffer, "plain", device_of(overrides))
    replay, _ = captured(layer.run, warm=2)

    def step() -> None:
        replay()
        buffer.check()

    step()
    if exchange.rank == 1:
        return _fall_silent(buffer)
    return _of_a_silent_peer(buffer, step)


def normal_silent_peer(exchange: StoreExchange, overrides: dict[str, Any]) -> tuple[str, int, bool]:
    """Rank 1 does not make the second dispatch of normal mode: the host that waits for its size is told."""
    rank = exchange.rank
    inputs = _on_device(normal_cases.Case(tokens=(40, 33), experts=8).inputs(), device_of(overrides))
    # compiling would eat into a deadline this short
    buffer = opened(exchange, overrides)
    normal_cases.dispatch(buffer, inputs, rank)
    buffer.destroy()
    buffer = opened(exchange, {**overrides, "timeout": 3.0})
    normal_cases.dispatch(buffer, inputs, rank)
    if rank == 1:
        return _fall_silent(buffer)
    return _of_a_silent_peer(buffer, lambda: normal_cases.dispatch(buffer, inputs, rank))


def soak(exchange: StoreExchange, overrides: dict[str, Any], seconds: float, seed: int) -> dict[str, Any]:
    """Random operations of both modes on one Buffer until the time is over, each verified against the oracle; what the
    GPU's memory holds afterwards is what it held after the first round."""
    device, rank, size = device_of(overrides), exchange.rank, exchange.size
    buffer = opened(exchange, overrides)
    # few shapes, for each is compiled; whatever else differs is drawn for each step
    shapes: list[Any] = [
        ll_cases.Case(ranks=size, experts=4 * size, counts=(8, 0, 3), routing="holes"),
        ll_cases.Case(ranks=size, experts=4 * size, hidden=256, fp8=True, reduced=False),
        normal_cases.Case(tokens=(0,) * size, experts=4 * size),
        normal_cases.Case(tokens=(0,) * size, experts=4 * size, dtype=torch.float8_e4m3fn),
    ]
    dice = random.Random(seed)
    steps, before, deadline = 0, (0, 0), 0.0
    while True:
        if steps % len(shapes) == 0:
            if steps == len(shapes):
                before = _held(device)
                deadline = time.monotonic() + seconds
            over = steps > len(shapes) and time.monotonic() > deadline
            # all ranks stop where rank 0 does
            if exchange.all_gather(b"over" if over else b"")[0]:
                break
        case = replace(shapes[steps % len(shapes)], seed=dice.randrange(1 << 30))
        if isinstance(case, ll_cases.Case):
            run_case(buffer, device, rank, replace(case, routing=dice.choice(("random", "holes", "one", "far"))))
        else:
            tokens = tuple(dice.choice((0, 1, dice.randint(2, 200))) for _ in range(size))
            case = replace(case, tokens=tokens, lost=dice.choice((0.0, 0.2, 0.9)))
            worst = dice.choice((0, sum(tokens) + dice.randrange(1, 4)))
            run_normal_case(buffer, device, rank, case, worst)
        steps += 1
    after = _held(device)
    buffer.destroy()
    assert after[0] <= before[0], f"tensors: {before[0]} bytes of GPU memory after a round, {after[0]} at the end"
    assert after[1] - before[1] < 64 << 20, f"this process held {before[1]} bytes after a round, {after[1]} at the end"
    return {"rank": rank, "steps": steps, "gpu_bytes": after[0], "rss_growth": after[1] - before[1]}


def _held(device: torch.device) -> tuple[int, int]:
    """Bytes of tensors on the device, and of this process's memory."""
    on_device = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        on_device = torch.cuda.memory_allocated()
    return on_device, psutil.Process().memory_info().rss
