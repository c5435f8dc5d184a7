"""``python -m tests.gpu.driver_bodies BODY[:ARGUMENT,...] ...``: launches of the product in a process whose driver is
the stub (:mod:`tests.support.cuda_driver`). Prints a JSON value for each body, a line each.

What is replaced there: the driver; ``torch.cuda``, which a CPU build of torch lacks, by functions that ask the stub;
and for whole Buffers the memory of the device, which is the host's (:class:`HostMemory`). Triton's launcher and its
module of the driver, the cubins, and all of the product are the real ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import triton

from tests.kernels.compiled_kernels import is_usual, normal_launches
from tests.support import bodies
from tests.support.control_threads import ThreadExchange
from tests.support.cuda_driver import torch_cuda
from tests.support.cuda_driver.loaded import Driver
from uccl_ep_serving import buffer as facade
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.gpu import context
from uccl_ep_serving.gpu.interpreted_memory import InterpretedMemory
from uccl_ep_serving.gpu.memory import CudaMemory
from uccl_ep_serving.kernels.triton import launch as launch_module
from uccl_ep_serving.kernels.triton.launch import Launch
from uccl_ep_serving.modes.ahead import low_latency_launches
from uccl_ep_serving.protocol.layout import LowLatencyPlan

#: That the compile gate compiles for as well, so that Triton's cache serves both.
PLAN = LowLatencyPlan(8, 128, 7168, 256, 8, 2)
#: Where arguments are made to differ: device memory above all that a number of tokens or bytes comes to.
_ADDRESSES = 1 << 40
GPU = torch.device("cuda", 0)
#: So that operations launch the same kernels.
_TOKENS, _HIDDEN, _EXPERTS, _TOPK = 8, PLAN.hidden, 16, 8

_LOAD = "cuModuleLoadData"

#: The process's driver.
DRIVER = Driver()


class HostMemory(InterpretedMemory):
    """Memory of the host, where the device's would be; the driver is asked what it is asked on a GPU."""

    def synchronize(self, deadline: float = math.inf) -> bool:
        memory: Any = self
        return CudaMemory.synchronize(memory, deadline)

    def capture_of(self, stream: int) -> int:
        status, number = ctypes.c_int(), ctypes.c_uint64()
        DRIVER.call(
            "cuStreamGetCaptureInfo_v2",
            ctypes.c_void_p(stream),
            ctypes.byref(status),
            ctypes.byref(number),
            None,
            None,
            None,
        )
        return number.value


def told_apart(launch: Launch) -> Launch:
    """The same launch, each address another one, so that their order shows."""
    given = enumerate(launch.arguments)
    apart = tuple(value + 4096 * place if value >= _ADDRESSES else value for place, value in given)
    return launch._replace(arguments=apart)


def _unique(kind: str) -> list[Launch]:
    """One of each kernel of a mode."""
    of_a_mode = {"low_latency": lambda: low_latency_launches(PLAN, ("fp8",)), "normal": normal_launches}
    found = {one.kernel.__name__: told_apart(one) for one in of_a_mode[kind]() if is_usual(one)}
    return list(found.values())


@contextlib.contextmanager
def not_by_triton(launch: Launch) -> Iterator[None]:
    """Inside, Triton's own way of launching this kernel raises."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError(f"{launch.kernel.__name__} was launched Triton's own way")

    launch.kernel.run = refuse
    try:
        yield
    finally:
        del launch.kernel.run


def launches(kind: str) -> dict[str, Any]:
    """Each launch of a mode, loaded and then run on two streams, at once and Triton's own way: what it means, and what
    the driver was told."""
    streams = [torch.cuda.Stream(GPU) for _ in range(2)]
    said = []
    # events of what earlier bodies made would be given back, and counted, at any time
    gc.collect()
    for one in _unique(kind):
        # operations may have loaded the same
        one.kernel.device_caches.clear()
        DRIVER.forget()
        one.compile()
        loaded = DRIVER.counts
        one.compile()
        both = DRIVER.counts
        found, counts = {}, {}
        for way, run in {"at once": one.run, "by Triton": one.run_by_triton}.items():
            DRIVER.forget()
            with not_by_triton(one) if way == "at once" else contextlib.nullcontext():
                for stream in streams:
                    with torch.cuda.stream(stream):
                        run()
            found[way], counts[way] = [asdict(call) for call in DRIVER.launched], DRIVER.counts
        parameters = [parameter for parameter in one.kernel.params if not parameter.is_constexpr]
        said.append(
            {
                "kernel": one.kernel.__name__,
                "grid": one.grid,
                "warps": one.variant.warps,
                "arguments": one.arguments,
                "specialized": [not parameter.do_not_specialize for parameter in parameters],
                "shared": one.build().metadata.shared,
                "loaded": loaded.get(_LOAD, 0),
                "loaded_twice": both.get(_LOAD, 0),
                "counts": counts,
                "launched": found,
            }
        )
    return {"launches": said, "streams": [stream.cuda_stream for stream in streams]}


def by_triton() -> dict[str, Any]:
    """What a launch that was loaded does not fit, and so goes Triton's own way: for each such case the arguments and
    what the driver was told, and what a profiler and the log were told."""
    launch, log = _unique("low_latency")[0], []
    driver: Any = triton.runtime.driver.active
    named, knobs = launch.kernel.__name__, triton.knobs.runtime
    found: dict[str, Any] = {"profiled": []}

    def note(case: str, one: Launch) -> None:
        DRIVER.forget()
        one.run()
        launched = [asdict(call) for call in DRIVER.launched]
        found[case] = {"arguments": one.arguments, "loaded": DRIVER.counts.get(_LOAD, 0), "launched": launched}

    launch.compile()
    with not_by_triton(launch):
        note("as it was loaded", launch)
    context, state, *rest = launch.arguments
    note("not aligned", launch._replace(arguments=(context, state + 8, *rest)))
    note("a one", launch._replace(arguments=(context, 1, *rest)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "get_current_device", lambda: 1)
        note("another device", launch)

    def listener(metadata: Any) -> None:
        found["profiled"].append(metadata.get()["name"].removeprefix("uccl_ep_"))

    knobs.launch_enter_hook.add(listener)
    note("profiled launch", launch)
    knobs.launch_enter_hook.remove(listener)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_module, "_KNOWN", frozenset({"0.1"}))
        patch.setattr(launch_module._log, "warning", lambda text, *words: log.append(text % words))
        launch_module._launcher_is_known.cache_clear()
        unknown = launch._replace(variant=replace(launch.variant))
        for _ in range(2):
            unknown.compile()
        note("an unknown Triton", unknown)
    launch_module._launcher_is_known.cache_clear()
    with not_by_triton(launch):
        note("as it was loaded, again", launch)
    return {"kernel": named, "log": log, **found}


def refused() -> dict[str, str]:
    """What the stub says to what no driver does: launches beyond its limits or on a stream that is none, and a function
    that it has not."""
    launch, said = _unique("low_latency")[0], {}
    launch.compile()
    nowhere = torch.cuda.Stream(GPU)
    nowhere.cuda_stream += 16
    for name, one, stream in (
        ("grid", launch._replace(grid=(1, 65536, 1)), torch.cuda.current_stream()),
        ("stream", launch, nowhere),
    ):
        with torch.cuda.stream(stream):
            try:
                one.run()
            except RuntimeError as error:
                said[name] = str(error)
    function = ctypes.c_void_p()
    DRIVER.call("cuGetProcAddress_v2", b"cuNotThere", ctypes.byref(function), 13000, ctypes.c_uint64(0), None)
    DRIVER.forget()
    code = ctypes.CFUNCTYPE(ctypes.c_int)(function.value or 0)()
    said["function"] = f"{code}: {' '.join([DRIVER.calls[0].function, *DRIVER.calls[0].arguments])}"
    return said


def opened() -> Buffer:
    """A Buffer of one rank for tensors on the device."""
    context.memory_of = lambda device, interpreted: HostMemory()
    buffer = Buffer(
        ThreadExchange(0, threading.Barrier(1), [b""]), settings=bodies.settings(device="cpu", window="host")
    )
    buffer._backend = facade.gpu_backend(buffer.runtime, GPU)
    return buffer


class Layer:
    """Dispatch and combine of one layer, operation by operation."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.x, self.ids, self.weights = bodies.tokens_of(0, _TOKENS, _HIDDEN, _EXPERTS, _TOPK)

    def dispatch(self, **options: Any) -> Any:
        return self.buffer.low_latency_dispatch(
            self.x, self.ids, _TOKENS, _EXPERTS, use_fp8=True, topk_weights=self.weights, **options
        )

    def combine(self, rows: tuple[torch.Tensor, torch.Tensor], handle: Any, **options: Any) -> Any:
        return self.buffer.low_latency_combine(rows[0].bfloat16(), self.ids, self.weights, handle, **options)


def checked_again() -> dict[str, str]:
    """What dispatches raise that differ in one thing from one that went well, "" for nothing, and in that of "launched"
    how often a kernel was launched by those that raised."""
    buffer, found = opened(), {}
    layer = Layer(buffer)
    ok: dict[str, Any] = {"x": layer.x, "topk_idx": layer.ids, "topk_weights": layer.weights, "use_fp8": True}
    ok |= {"num_max_dispatch_tokens_per_rank": _TOKENS, "num_experts": _EXPERTS}
    apart = torch.empty(layer.x.numel() + 4, dtype=layer.x.dtype)[4:].view(layer.x.shape)
    changes: dict[str, dict[str, Any]] = {
        "strides": {"x": torch.empty(_HIDDEN, _TOKENS, dtype=torch.bfloat16).T},
        "start": {"x": apart},
        "no tensor": {"x": layer.x.tolist()},
        "dtype": {"x": layer.x.double()},
        "ids' dtype": {"topk_idx": layer.ids.int()},
        "ids' rows": {"topk_idx": layer.ids[1:]},
        "no ids": {"topk_idx": layer.ids.tolist()},
        "weights' dtype": {"topk_weights": layer.weights.double()},
        "weights' shape": {"topk_weights": layer.weights[:, :1]},
        "no weights": {"topk_weights": layer.weights.tolist()},
        "tokens": {"num_max_dispatch_tokens_per_rank": _TOKENS - 1},
        "tokens' type": {"num_max_dispatch_tokens_per_rank": float(_TOKENS)},
        "experts": {"num_experts": 0},
        "experts' type": {"num_experts": float(_EXPERTS)},
        "flags": {"use_ue8m0": True},
        "meta": {"x": layer.x.to("meta")},
    }
    for _ in range(2):
        buffer.low_latency_dispatch(**ok)
    DRIVER.forget()
    for name, change in changes.items():
        try:
            buffer.low_latency_dispatch(**{**ok, **change})
        # whatever it is, the test says which
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = ""
    found["launched"] = str(len(DRIVER.launched))
    buffer.low_latency_dispatch(**ok)
    buffer.destroy()
    return found


def _reserve(buffer: Buffer) -> None:
    buffer.reserve_low_latency(
        _TOKENS, _HIDDEN, _EXPERTS, _TOPK, dtype=torch.bfloat16, use_fp8=True, with_topk_weights=True
    )


def operations() -> dict[str, Any]:
    """What the driver is asked by each operation of a layer: how often each function, and the launches with their
    streams, by name."""
    buffer = opened()
    own, other = buffer.get_comm_stream(), torch.cuda.Stream(GPU)
    names = {0: "current", own.cuda_stream: "own", other.cuda_stream: "other"}
    layer, found = Layer(buffer), {}

    def note(name: str) -> None:
        launched = [f"{one.kernel.removeprefix('uccl_ep_')} on {names[one.stream]}" for one in DRIVER.launched]
        found[name] = {"counts": DRIVER.counts, "launched": launched}
        DRIVER.forget()

    DRIVER.forget()
    _reserve(buffer)
    note("reserve")
    for turn in ("first", "later"):
        rows, _, handle, _, _ = layer.dispatch()
        note(f"{turn} dispatch")
        layer.combine(rows, handle)
        note(f"{turn} combine")
    rows, _, handle, _, hook = layer.dispatch(return_recv_hook=True)
    note("dispatch, sent")
    with torch.cuda.stream(other):
        hook()
    note("dispatch, received")
    with torch.cuda.stream(other):
        _, _, hook = layer.combine(rows, handle, return_recv_hook=True)
        note("combine, sent")
    hook()
    note("combine, received")
    rows, _, handle, event, _ = layer.dispatch(async_finish=True)
    note("dispatch that nobody waits for")
    event.current_stream_wait()
    note("its event is waited for")
    layer.combine(rows, handle)
    _capture(layer, other)
    note("a captured layer")
    buffer.destroy()
    return found


def _capture(layer: Layer, stream: Any) -> None:
    DRIVER.forget()
    DRIVER.call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream.cuda_stream), 0)
    with torch.cuda.stream(stream):
        rows, _, handle, _, _ = layer.dispatch()
        layer.combine(rows, handle)
    graph = ctypes.c_void_p()
    DRIVER.call("cuStreamEndCapture", ctypes.c_void_p(stream.cuda_stream), ctypes.byref(graph))


def failures(function: str, code: str, operation: str) -> list[str]:
    """What calls raise, one after the other, once ``function`` of the driver ends with ``code``: the operation, a
    dispatch after that, a wait for the device, the Buffer's end. "" for nothing."""
    buffer, said = opened(), []
    layer = Layer(buffer)
    if operation != "reserve":
        rows, _, handle, _, _ = layer.dispatch()
        *_, hook = layer.dispatch(return_recv_hook=True)
    calls = {
        "reserve": lambda: _reserve(buffer),
        "dispatch": layer.dispatch,
        "dispatch with a hook": lambda: layer.dispatch(return_recv_hook=True),
        "dispatch recv": lambda: hook(),
        "combine": lambda: layer.combine(rows, handle),
    }
    DRIVER.fail(function, int(code))
    gpu: Any = buffer._gpu
    for call in (calls[operation], layer.dispatch, gpu.memory.synchronize, buffer.destroy):
        try:
            call()
        # whatever it is, the test says which
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("")
    # as a new process would find things: what was mapped when the context was lost stays so until the process ends
    DRIVER.mend()
    InterpretedMemory._mapped.clear()
    return said


def main(*wanted: str) -> None:
    torch_cuda.install(DRIVER)
    for one in wanted:
        body, _, arguments = one.partition(":")
        print(json.dumps(globals()[body](*filter(None, arguments.split(",")))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
