"""A thread's current device is not the Buffer's, as in an engine of several GPUs in one process: which one is used."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.device_model import Device, install
from uccl_ep_serving.config import Settings
from uccl_ep_serving.gpu import context as gpu_context
from uccl_ep_serving.gpu.context import GpuContext
from uccl_ep_serving.modes import low_latency_gpu_session as device_session
from uccl_ep_serving.modes import normal_gpu_session as normal_device_session
from uccl_ep_serving.modes.low_latency_arguments import dispatch_coding
from uccl_ep_serving.modes.low_latency_gpu_session import LowLatencyGpuSession
from uccl_ep_serving.modes.normal_gpu_session import NormalGpuSession
from uccl_ep_serving.modes.row_format import RowFormat
from uccl_ep_serving.protocol.layout import LowLatencyPlan, NormalPlan, WindowLayout
from uccl_ep_serving.protocol.message import DTYPE_BF16, NormalNotify

OURS, CURRENT = torch.device("cuda", 1), torch.device("cuda", 0)


class Kernels:
    """Notes the device at each step that has Triton ask for a target, or compile."""

    name = "recorded"

    def __init__(self, *_: Any) -> None:
        self.seen: list[tuple[str, torch.device]] = [("made", Device.chosen)]

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.seen.append((name, Device.chosen))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GpuContext:
    install(monkeypatch)
    memory: Any = SimpleNamespace(device=OURS, capture_of=lambda stream: 0)
    monkeypatch.setattr(gpu_context, "memory_of", lambda device, interpreted: memory)
    runtime: Any = SimpleNamespace()
    return GpuContext(runtime, OURS)


def test_low_latency_kernels_are_compiled_for_the_device_of_the_buffer(
    gpu: GpuContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Enough(Exception):
        pass

    def rebuild(plan: Any, objection: str, compile: Callable[[], object]) -> None:
        assert not objection
        compile()
        raise Enough

    made: list[Kernels] = []
    monkeypatch.setattr(
        device_session,
        "device_low_latency_kernels",
        lambda *_: made.append(Kernels()) or made[-1],  # type: ignore[func-returns-value]
    )
    layout = SimpleNamespace(low_latency=None)
    runtime: Any = SimpleNamespace(
        stale="", epoch=0, layout=layout, rebuild_requested=False, channels=1, settings=Settings(), rebuild=rebuild
    )
    session, x = LowLatencyGpuSession(runtime, gpu), torch.zeros(4, 128, dtype=torch.bfloat16)
    plan, coding = LowLatencyPlan(1, 4, 128, 2, 2, 2), dispatch_coding(x, False, False, False)
    with pytest.raises(Enough):
        session.enter("low-latency dispatch", plan, coding, x, False, True)
    (kernels,) = made
    compiled = [one for one in kernels.seen if one[0] != "check"]
    assert compiled == [("made", OURS), ("warm_dispatch", OURS), ("warm_combine", OURS)]
    assert Device.chosen == CURRENT


def test_what_lasts_is_allocated_in_no_pool_of_the_calling_thread(gpu: GpuContext) -> None:
    """vLLM loads a model in a memory pool of its thread, and takes that away in its deepest sleep."""
    done: list[str] = []
    gpu.memory.synchronize = lambda: done.append("synchronized")  # type: ignore[method-assign]

    def make() -> tuple[int, torch.device, bool]:
        done.append("made")
        return threading.get_ident(), Device.chosen, torch.is_inference_mode_enabled()

    with torch.inference_mode():
        thread, device, inference = gpu.prepare(make)
    assert thread != threading.get_ident()
    assert (device, inference, done) == (OURS, False, ["made", "synchronized"])
    assert Device.chosen == CURRENT


def test_what_is_made_for_an_interrupted_call_is_undone(gpu: GpuContext) -> None:
    undone: list[str] = []
    gpu.memory.synchronize = lambda: None  # type: ignore[method-assign]

    def make() -> str:
        """While the calling thread waits for it."""
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.2)
        return "memory"

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            gpu.prepare(make, undone.append)
    finally:
        signal.signal(signal.SIGINT, before)
    assert undone == ["memory"]


def test_normal_kernels_are_compiled_for_the_device_of_the_buffer(
    gpu: GpuContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(normal_device_session, "device_normal_kernels", Kernels)
    runtime: Any = SimpleNamespace(
        ranks=1,
        epoch=0,
        stale="",
        settings=Settings(),
        layout=WindowLayout(1, None, NormalPlan(1)),
        compile_together=lambda compile: compile(),
    )
    session: Any = NormalGpuSession(runtime, gpu)
    session._present = SimpleNamespace(kernels=session.kernels)
    session.epoch.enter()
    form = RowFormat(NormalNotify.OPERATION_DISPATCH, DTYPE_BF16, 128, 256, 2, 0, 2, channels=1)
    session.enter(form, 0)
    assert [one for one in session.kernels.seen if one[0] != "check"] == [("made", OURS), ("warm", OURS)]
    assert Device.chosen == CURRENT
