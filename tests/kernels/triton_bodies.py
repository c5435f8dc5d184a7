"""What rank processes run in the tests of the Triton kernels, in Triton's interpreter.

The environment variable must be there before anything imports Triton, so these processes serve no other tests.
"""

from __future__ import annotations

import ctypes
import dataclasses
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import bodies, ll_cases
from tests.support.interpreter import interpret
from tests.support.ll_replay import Layer, RecordingOrder
from uccl_ep_serving.buffer import Backend, Buffer
from uccl_ep_serving.control_plane.bootstrap import StoreExchange
from uccl_ep_serving.errors import ConfigError, TransportError, UcclEpError
from uccl_ep_serving.gpu import context
from uccl_ep_serving.kernels.blocks.low_latency_device import DevicePlan

#: What kernels of two ranks can go through.
PATHS: dict[str, dict[str, Any]] = {
    "mapped": {"window": "host"},
    "shm": {"window": "host", "direct": False, "transport": "shm", "proxies": 2, "channels": 3},
    "tcp": {"window": "host", "direct": False, "transport": "tcp"},
    "ipc": {"window": "device"},
}


def serve_interpreted(buffer: Buffer, order: Any = None) -> Any:
    """Have low latency of ``buffer`` run in Triton's interpreter, in ``order``. Returns its GpuContext."""
    from uccl_ep_serving.gpu.context import GpuContext
    from uccl_ep_serving.modes.low_latency_gpu import LowLatencyGpu

    gpu = GpuContext(buffer.runtime, torch.device("cpu"), order)
    assert buffer._backend is not None
    buffer._backend = Backend(LowLatencyGpu(buffer.runtime, gpu), buffer._backend.normal, gpu)
    return gpu


def opened(exchange: StoreExchange, overrides: dict[str, Any]) -> Buffer:
    """A Buffer whose kernels are Triton's, interpreted."""
    interpret()
    return bodies.opened(exchange, {"device": "interpreter", "timeout": 60.0, "connect_timeout": 60.0, **overrides})


def check_drained(buffer: Buffer) -> None:
    """What the kernels have put into rings, the host sees put, and then taken: else leaving a window takes for ever."""
    plane = buffer.runtime._watch.plane
    assert plane is not None
    assert plane.drain(time.monotonic() + 10.0, buffer.runtime._liveness), plane.stats()


def against_the_oracle(exchange: StoreExchange, overrides: dict[str, Any], cases: list[ll_cases.Case]) -> int:
    """Dispatch bit-exact, combine bit-exact and within DeepEP's tolerances, for every case on one Buffer."""
    buffer = opened(exchange, overrides)
    for case in cases:
        inputs = case.inputs()
        combined = ll_cases.run_rank(case, ll_cases.mode_of(buffer), exchange.rank, inputs)
        ll_cases.check_combined(case, inputs, exchange.rank, combined)
        check_drained(buffer)
    buffer.destroy()
    return len(cases)


def in_two_windows(exchange: StoreExchange, overrides: dict[str, Any], cases: list[ll_cases.Case]) -> tuple[int, int]:
    """The same, and then where each source's last dispatch has landed: ranks whose messages are in the window in device
    memory, and in that in host memory, as bits."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    for case in cases:
        inputs = case.inputs()
        combined = ll_cases.run_rank(case, ll_cases.mode_of(buffer), rank, inputs)
        ll_cases.check_combined(case, inputs, rank, combined)
        check_drained(buffer)
    runtime, layout = buffer.runtime, buffer.runtime.layout
    plan, space = layout.low_latency, buffer._backend.low_latency._session._gpu.space()  # type: ignore[union-attr]
    assert plan is not None
    assert not space.on_device
    twin = np.frombuffer((ctypes.c_uint8 * space._window.nbytes).from_address(space._window.own), np.uint8)
    found = []
    for window in (twin, runtime.window_bytes):
        slots = (
            (source, layout.ll_dispatch_recv + (parity * runtime.ranks + source) * plan.dispatch_slot)
            for source in range(runtime.ranks)
            for parity in range(2)
        )
        found.append(sum({1 << source for source, at in slots if window[at : at + plan.dispatch_slot].any()}))
    buffer.destroy()
    return found[0], found[1]


def with_programs(exchange: StoreExchange, overrides: dict[str, Any], programs: int, cases: list[ll_cases.Case]) -> int:
    """The same with at most so many programs in a kernel that has one for several rows."""
    interpret()
    from uccl_ep_serving.kernels.triton import low_latency

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_latency, "_PROGRAMS", programs)
        return against_the_oracle(exchange, overrides, cases)


def beside_the_cpu_kernels(exchange: StoreExchange, overrides: dict[str, Any], cases: list[ll_cases.Case]) -> int:
    """Odd ranks run Triton's kernels and even ones Numba's, over one wire and in windows that all have sized ahead."""
    interpret()
    buffer = bodies.opened(exchange, {"device": "cpu", "timeout": 60.0, **overrides})
    if exchange.rank % 2:
        serve_interpreted(buffer)
    for case in cases:
        ll_cases.reserve(ll_cases.mode_of(buffer), case)
    epoch = buffer.runtime.epoch
    for case in cases:
        inputs = case.inputs()
        combined = ll_cases.run_rank(case, ll_cases.mode_of(buffer), exchange.rank, inputs)
        ll_cases.check_combined(case, inputs, exchange.rank, combined)
        check_drained(buffer)
    assert buffer.runtime.epoch == epoch
    buffer.destroy()
    return len(cases)


def overlapped(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """Two micro-batches in flight, hooks in either order, a dispatch that is never combined, one combined twice."""
    buffer = opened(exchange, overrides)
    rank = exchange.rank
    for turn in range(3):
        cases = [
            ll_cases.Case(seed=10 * turn + half, reduced=half == 0, counts=(8, 5) if half else (3, 8), topk=2)
            for half in range(2)
        ]
        given = [case.inputs() for case in cases]
        sent = [
            buffer.low_latency_dispatch(
                one[rank].x,
                one[rank].topk_idx,
                case.tokens,
                case.experts,
                use_fp8=False,
                topk_weights=ll_cases.weights_at_dispatch(case, one[rank]),
                return_recv_hook=True,
            )
            for case, one in zip(cases, given, strict=True)
        ]
        with pytest.raises(ConfigError, match="at most two at a time"):
            dispatch(buffer, cases[0], given[0][rank])
        order = (1, 0) if turn % 2 else (0, 1)
        for half in order:
            hook = sent[half][4]
            assert hook is not None
            hook()
            hook()
        results: dict[int, torch.Tensor] = {}
        hooks = []
        for half in order:
            rows, count, handle, _, _ = sent[half]
            want = ll_cases.low_latency_dispatch(given[half], rank, cases[half].tokens, cases[half].experts)
            ll_cases.check_received(cases[half], rows, count, handle, want)
            y = ll_cases.expert_output(ll_cases.received_values(cases[half], rows, count), rank)
            mine = given[half][rank]
            out, _, hook = buffer.low_latency_combine(
                y, mine.topk_idx, mine.topk_weights, handle, return_recv_hook=True
            )
            results[half] = out
            hooks.append(hook)
        for hook in hooks if turn != 1 else hooks[::-1]:
            assert hook is not None
            hook()
        for half in order:
            ll_cases.check_combined(cases[half], given[half], rank, results[half])
    # dispatches that nobody combines: only notices tell that their slots are free again
    case = ll_cases.Case(seed=99, topk=2)
    inputs = case.inputs()
    for _ in range(4):
        rows, count, handle = dispatch(buffer, case, inputs[rank])
    y = ll_cases.expert_output(ll_cases.received_values(case, rows, count), rank)
    # and combines with no dispatch between them
    for _ in range(4):
        out, _, _ = buffer.low_latency_combine(y, inputs[rank].topk_idx, inputs[rank].topk_weights, handle)
        ll_cases.check_combined(case, inputs, rank, out)
    buffer.destroy()


def dispatch(buffer: Buffer, case: ll_cases.Case, given: ll_cases.LowLatencyInput) -> tuple[Any, torch.Tensor, Any]:
    """(rows, counts, handle) of one dispatch."""
    rows, count, handle, _, _ = buffer.low_latency_dispatch(
        given.x,
        given.topk_idx,
        case.tokens,
        case.experts,
        use_fp8=False,
        topk_weights=ll_cases.weights_at_dispatch(case, given),
    )
    return rows, count, handle


def two_buffers(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """A dispatch of each of two Buffers in flight, then their combines, as in two-batch overlap with a Buffer each."""
    buffers = [opened(exchange, overrides) for _ in range(2)]
    cases = [ll_cases.Case(tokens=4, experts=4, topk=2, seed=seed) for seed in range(2)]
    given = [case.inputs() for case in cases]
    rank = exchange.rank
    sent = [
        buffer.low_latency_dispatch(
            one[rank].x, one[rank].topk_idx, case.tokens, case.experts, use_fp8=False, return_recv_hook=True
        )
        for buffer, case, one in zip(buffers, cases, given, strict=True)
    ]
    for buffer, case, inputs, (rows, count, handle, _, hook) in zip(buffers, cases, given, sent, strict=True):
        assert hook is not None
        hook()
        mine = inputs[rank]
        y = ll_cases.expert_output(ll_cases.received_values(case, rows, count), rank)
        out, _, _ = buffer.low_latency_combine(y, mine.topk_idx, mine.topk_weights, handle)
        expanded = ll_cases.Case(**{**case.__dict__, "reduced": False})
        ll_cases.check_combined(expanded, inputs, rank, out)
    for buffer in buffers:
        buffer.destroy()


def replays(exchange: StoreExchange, overrides: dict[str, Any], form: str, times: int) -> int:
    """What a graph would hold, run once and then replayed without the host."""
    interpret()
    buffer = bodies.opened(exchange, {"device": "cpu", "timeout": 60.0, **overrides})
    order = RecordingOrder()
    serve_interpreted(buffer, order)
    layer = Layer(buffer, form, torch.device("cpu"), order.compute)
    layer.run()
    before = buffer.runtime._watch.begun
    layer.check(order.replay, times)
    # the host has begun nothing: what ran was in device memory
    assert buffer.runtime._watch.begun == before
    check_drained(buffer)
    buffer.destroy()
    return times


def windows_that_one_rank_cannot_open(exchange: StoreExchange, window: str, case: ll_cases.Case) -> str:
    """Rank 1 opens no memory of other devices. What was raised; empty when windows in host memory served instead."""
    interpret()
    from uccl_ep_serving.gpu.memory import InterpretedMemory

    class Apart(InterpretedMemory):
        def open(self, handle: bytes) -> int:
            raise TransportError("peer access is not supported between these two devices", device="cuda:1")

    inputs = case.inputs()
    with pytest.MonkeyPatch.context() as patch:
        if exchange.rank == 1:
            patch.setattr("uccl_ep_serving.gpu.memory.InterpretedMemory", Apart)
        buffer = opened(exchange, {"window": window})
    try:
        combined = ll_cases.run_rank(case, ll_cases.mode_of(buffer), exchange.rank, inputs)
        ll_cases.check_combined(case, inputs, exchange.rank, combined)
        gpu = buffer._backend.low_latency._session._gpu  # type: ignore[union-attr]
        assert gpu.space()._window is None  # type: ignore[union-attr]
    except TransportError as error:
        return str(error)
    finally:
        buffer.destroy()
    return ""


def memory_that_one_rank_cannot_pin(exchange: StoreExchange, overrides: dict[str, Any], mode: str, late: int) -> str:
    """Rank 1 cannot pin its memory for the first operation. Rank ``late`` comes to it when the other has begun, or has
    failed; -1 = neither, since all do it together. What was raised; the second operation and all later ones are right.
    """
    interpret()
    from uccl_ep_serving.gpu.memory import InterpretedMemory

    buffer, rank, store = opened(exchange, overrides), exchange.rank, exchange._store
    trip: Any = bodies.normal_trip if mode == "normal" else bodies.round_trip
    if mode == "reserve":
        trip = lambda buffer, tokens: buffer.reserve_low_latency(tokens, 128, 8, 2, use_fp8=False)  # noqa: E731
    pin, begin = InterpretedMemory.map_host, buffer.runtime.begin_operation

    def refused(memory: InterpretedMemory, address: int, nbytes: int) -> int:
        if late == 1:
            store.wait(["begun"])
        raise TransportError("cannot pin memory: ulimit -l", device="cuda:1")

    def after_it_failed(memory: InterpretedMemory, address: int, nbytes: int) -> int:
        deadline = time.monotonic() + 60.0
        while not buffer.runtime.rebuild_requested and time.monotonic() < deadline:
            time.sleep(0.01)
        return pin(memory, address, nbytes)

    def begun(*given: Any) -> None:
        begin(*given)
        store.set("begun", b"")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(InterpretedMemory, "map_host", refused)
        elif late == 0:
            patch.setattr(InterpretedMemory, "map_host", after_it_failed)
        patch.setattr(buffer.runtime, "begin_operation", begun)
        with pytest.raises(ConfigError) as caught:
            trip(buffer, tokens=4)
    for _ in range(2):
        bodies.round_trip(buffer, tokens=4)
        bodies.normal_trip(buffer, tokens=4)
    buffer.destroy()
    return str(caught.value)


def disagreement(exchange: StoreExchange, overrides: dict[str, Any], mode: str) -> tuple[str, float]:
    """Rank 1 begins low latency with wider rows, the others usual ones or normal mode; then all do the same in both
    modes. With ``mode`` = shapes or modes the windows have room for either. (what was raised, seconds)."""
    buffer = opened(exchange, overrides)
    roomy = mode in ("shapes", "modes")
    bodies.round_trip(buffer, tokens=4, hidden=256 if roomy else 128)
    if mode == "modes":
        bodies.normal_trip(buffer, tokens=4)
    trip = bodies.normal_trip if mode in ("normal", "modes") and exchange.rank == 0 else bodies.round_trip
    exchange.all_gather(b"")
    if exchange.rank == 1:
        # rank 0's kernels wait by then
        time.sleep(2.0)
    started = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        trip(buffer, tokens=4, hidden=256 if exchange.rank else 128)
    seconds = time.monotonic() - started
    bodies.round_trip(buffer, tokens=4)
    bodies.normal_trip(buffer, tokens=4)
    buffer.destroy()
    return str(caught.value), seconds


def captures(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """What a graph cannot capture is refused before anything moves; what has run once is captured."""
    interpret()
    buffer = bodies.opened(exchange, {"device": "cpu", "timeout": 60.0, **overrides})
    order: Any = RecordingOrder()
    serve_interpreted(buffer, order)
    case = ll_cases.Case(ranks=exchange.size, tokens=2, counts=(2,), experts=2, topk=1, dtype=torch.float32)
    narrow = ll_cases.Case(**{**case.__dict__, "dtype": torch.bfloat16})
    given, other = case.inputs()[exchange.rank], narrow.inputs()[exchange.rank]
    refused = pytest.raises(ConfigError, match="before the capture, call Buffer")
    order.capturing = True
    with refused:
        dispatch(buffer, case, given)
    order.capturing = False
    rows, _, handle = dispatch(buffer, case, given)
    buffer.low_latency_combine(rows, given.topk_idx, given.topk_weights, handle)
    order.capturing = True
    rows, _, handle = dispatch(buffer, case, given)
    # the windows have room for another dtype, but its kernels are not there
    with refused:
        dispatch(buffer, narrow, other)
    with refused:
        buffer.low_latency_combine(rows.bfloat16(), given.topk_idx, given.topk_weights, handle)
    out, _, _ = buffer.low_latency_combine(rows, given.topk_idx, given.topk_weights, handle)
    assert torch.allclose(out, given.x * given.topk_weights.sum(dim=1, keepdim=True))
    epoch = buffer.runtime.epoch
    with refused:
        ll_cases.reserve(ll_cases.mode_of(buffer), narrow)
    with pytest.raises(ConfigError, match=r"no room for .*tokens=9.* and a graph is being captured\. Next step"):
        ll_cases.reserve(ll_cases.mode_of(buffer), dataclasses.replace(narrow, tokens=9))
    order.capturing = False
    ll_cases.reserve(ll_cases.mode_of(buffer), narrow)
    order.capturing = True
    # what was reserved is captured without having run, in the windows that are there
    ll_cases.reserve(ll_cases.mode_of(buffer), narrow)
    rows, _, handle = dispatch(buffer, narrow, other)
    out, _, _ = buffer.low_latency_combine(rows, other.topk_idx, other.topk_weights, handle)
    assert torch.allclose(out.float(), other.x.float() * other.topk_weights, rtol=0.02)
    dispatch(buffer, case, given)
    assert buffer.runtime.epoch == epoch
    order.capturing = False
    buffer.destroy()
    # a replay reads its sizes before it finds that the windows are gone
    assert any(isinstance(one, DevicePlan) for one in context._kept)


def combine_buffers(exchange: StoreExchange, overrides: dict[str, Any]) -> None:
    """Experts that write into the Buffer's own tensor answer in the dtype of the tokens."""
    buffer = opened(exchange, overrides)
    seen = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float16):
        case = ll_cases.Case(ranks=exchange.size, tokens=2, counts=(2,), experts=2, topk=1, dtype=dtype)
        given = case.inputs()[exchange.rank]
        rows, _, handle = dispatch(buffer, case, given)
        y = buffer.get_next_low_latency_combine_buffer(handle)
        assert y.dtype == dtype
        assert seen.setdefault(dtype, y.data_ptr()) == y.data_ptr()
        out, _, _ = buffer.low_latency_combine(
            y.copy_(rows), given.topk_idx, given.topk_weights, handle, zero_copy=True
        )
        assert torch.allclose(out, given.x * given.topk_weights.to(dtype), rtol=0.02)
    buffer.destroy()


def failed_launch(exchange: StoreExchange, overrides: dict[str, Any], phase: str) -> str:
    """A kernel of ``phase`` cannot be launched. What every call after it is told, until there are new windows."""
    interpret()
    from uccl_ep_serving.kernels.triton.launch import Launch

    buffer = opened(exchange, overrides)
    case = ll_cases.Case(ranks=exchange.size, tokens=2, counts=(2,), experts=2, topk=1)
    given = case.inputs()[exchange.rank]
    rows, _, handle = dispatch(buffer, case, given)
    rest = given.topk_idx, given.topk_weights, handle

    def refused(one: Launch) -> None:
        raise RuntimeError("out of resources")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "run", refused)
        with pytest.raises(RuntimeError, match="out of resources"):
            dispatch(buffer, case, given) if phase == "dispatch" else buffer.low_latency_combine(rows, *rest)
    said = set()
    for _ in range(2):
        with pytest.raises(UcclEpError) as caught:
            dispatch(buffer, case, given)
        said.add(str(caught.value).removeprefix("low-latency dispatch: "))
        with pytest.raises(UcclEpError) as caught:
            buffer.low_latency_combine(rows, *rest)
        said.add(str(caught.value).removeprefix("low-latency combine: "))
    # so is the other mode, in which the other ranks are not, and who asks between replays hears it
    for call in (lambda: bodies.normal_trip(buffer, tokens=4), buffer.check):
        with pytest.raises(UcclEpError) as caught:
            call()
        said.add(str(caught.value).partition(": ")[2])
    buffer.destroy()
    (text,) = said
    return text


def replay_in_windows_that_are_gone(exchange: StoreExchange, overrides: dict[str, Any]) -> str:
    """A graph is replayed after other sizes were dispatched: it moves nothing and touches nothing, and a check between
    replays says that it must be captured again, until one is. Returns what was raised."""
    interpret()
    buffer = bodies.opened(exchange, {"device": "cpu", "timeout": 60.0, **overrides})
    order = RecordingOrder()
    gpu = serve_interpreted(buffer, order)
    layer = Layer(buffer, "plain", torch.device("cpu"), order.compute)
    layer.run()
    buffer.check()
    state: Any = buffer._backend.low_latency._session._shared[0]  # type: ignore[union-attr]
    looked_at = [weakref.ref(one) for one in (*gpu.space()._tensors, state.words)]
    del state
    order.eager = True
    bodies.round_trip(buffer, tokens=4, hidden=256)
    with pytest.raises(ConfigError) as caught:
        buffer.check()
    # neither unmapped nor given to others
    assert all(one() is not None for one in looked_at)
    layer.batches[0].load(7)
    layer.batches[0].out.fill_(3.0)
    order.replay()
    assert not layer.batches[0].out.any()
    bodies.round_trip(buffer, tokens=4, hidden=256)
    order.launches.clear()
    order.eager = False
    again = Layer(buffer, "plain", torch.device("cpu"), order.compute)
    again.run()
    buffer.check()
    again.check(order.replay, 1)
    buffer.destroy()
    return str(caught.value)


def replay_beside_a_silent_peer(exchange: StoreExchange, overrides: dict[str, Any]) -> tuple[str, int]:
    """Rank 1 does not replay: rank 0's kernels end at their deadline, and a check between replays names it."""
    interpret()
    buffer = bodies.opened(exchange, {"device": "cpu", "timeout": 3.0, **overrides})
    order = RecordingOrder()
    serve_interpreted(buffer, order)
    Layer(buffer, "plain", torch.device("cpu"), order.compute).run()
    buffer.check()
    if exchange.rank == 1:
        time.sleep(8)
        buffer.runtime.close(0.1)
        return "", -1
    order.replay()
    with pytest.raises(UcclEpError) as caught:
        buffer.check()
    buffer.destroy()
    return type(caught.value).__name__, getattr(caught.value, "peer", -1)


def silent_peer(exchange: StoreExchange, overrides: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 does not make the second dispatch; the others are told whom they wait for, and leave nothing behind."""
    buffer = opened(exchange, {**overrides, "timeout": 3.0})
    case = ll_cases.Case(ranks=exchange.size, topk=2)
    given = case.inputs()[exchange.rank]
    dispatch(buffer, case, given)
    if exchange.rank == 1:
        time.sleep(8)
        buffer.runtime.close(0.1)
        return {}
    started = time.monotonic()
    found: dict[str, Any] = {}
    try:
        dispatch(buffer, case, given)
    except UcclEpError as error:
        found = {"kind": type(error).__name__, "peer": getattr(error, "peer", None), "text": str(error)}
    found["seconds"] = time.monotonic() - started
    before = buffer.stats().get("commands", 0)
    try:
        dispatch(buffer, case, given)
    except UcclEpError as error:
        found["again"] = type(error).__name__
    found["published"] = buffer.stats().get("commands", 0) - before
    buffer.destroy()
    return found


def bad_ids(exchange: StoreExchange, overrides: dict[str, Any]) -> str:
    """Rank 0 has expert ids that do not exist, which count as -1. What was raised; everybody goes on."""
    buffer, rank = opened(exchange, overrides), exchange.rank
    case = ll_cases.Case(ranks=exchange.size, topk=2, tokens=4, counts=(4,))
    inputs = case.inputs()
    given = inputs[rank]
    # beside an id that is an expert of the same rank when it is cut to 32 bits
    inputs[0].topk_idx[0, 1] = 2
    ids = given.topk_idx.clone()
    if rank == 0:
        ids[0, 0], ids[1, 0], ids[1, 1] = (1 << 33) + 1, case.experts, -(1 << 40) + case.experts - 1
    inputs[0].topk_idx[0, 0] = -1
    inputs[0].topk_idx[1] = -1
    text = ""
    hook = None
    try:
        rows, count, handle, _, hook = buffer.low_latency_dispatch(
            given.x,
            ids,
            case.tokens,
            case.experts,
            use_fp8=False,
            topk_weights=given.topk_weights,
            return_recv_hook=True,
        )
        assert hook is not None
        hook()
    except ConfigError as error:
        text = str(error)
        assert hook is not None
        hook()
    want = ll_cases.low_latency_dispatch(inputs, rank, case.tokens, case.experts)
    ll_cases.check_received(case, rows, count, handle, want)
    y = ll_cases.expert_output(ll_cases.received_values(case, rows, count), rank)
    out, _, _ = buffer.low_latency_combine(y, ids, given.topk_weights, handle)
    ll_cases.check_combined(case, inputs, rank, out)
    check_drained(buffer)
    buffer.destroy()
    return text


def stats_of(exchange: StoreExchange, overrides: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """(expert counts, added counts, nanoseconds waited) of two dispatches; one rank comes late."""
    buffer = opened(exchange, overrides)
    case = ll_cases.Case(ranks=exchange.size, tokens=4, topk=2)
    given = case.inputs()[exchange.rank]
    added = torch.zeros(case.experts // exchange.size, dtype=torch.int32)
    waited = torch.zeros(exchange.size, dtype=torch.int64)
    total = torch.zeros_like(added)
    for turn in range(2):
        exchange.all_gather(b"")
        if turn and exchange.rank == 1:
            # rank 0's interpreter has begun to wait by then
            time.sleep(3.0)
        _, count, _, _, _ = buffer.low_latency_dispatch(
            given.x,
            given.topk_idx,
            case.tokens,
            case.experts,
            use_fp8=False,
            cumulative_local_expert_recv_stats=added,
            dispatch_wait_recv_cost_stats=waited,
        )
        total += count
    buffer.destroy()
    return total.tolist(), added.tolist(), waited.tolist()
