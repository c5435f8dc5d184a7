"""What ``Buffer`` and ``Config`` take and refuse by themselves, on a group of one rank."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.alone import Alone
from tests.support.source_tree import ROOT
from uccl_ep_serving.buffer import Buffer, Config
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError, UcclEpError

GPU = torch.device("cuda", 0)


def opened(**settings: Any) -> Buffer:
    return Buffer(Alone(), settings=Settings(heap_bytes=1 << 20, **settings))


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    one = opened()
    yield one
    one.destroy()


def dispatch(buffer: Buffer, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Any:
    """Two tokens to one of two experts."""
    x = torch.ones(2, 128, dtype=dtype, device=device)
    ids = torch.zeros(2, 1, dtype=torch.int64, device=device)
    return buffer.low_latency_dispatch(x, ids, 2, 2, use_fp8=False)


#: What a backend of a GPU is built of.
GPU_PARTS = ["gpu.context.GpuContext", "modes.low_latency_gpu.LowLatencyGpu", "modes.normal_gpu.NormalGpu"]


def replace_parts(monkeypatch: pytest.MonkeyPatch, made: Callable[..., Any]) -> None:
    """What a backend of a GPU is built of is what ``made`` makes."""
    for part in GPU_PARTS:
        monkeypatch.setattr(f"uccl_ep_serving.{part}", made)


@pytest.mark.parametrize("missing", GPU_PARTS)
def test_a_device_that_cannot_be_served_leaves_the_buffer_as_it_was(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """A package is missing: every call on a GPU says so, and CPU tensors are served."""
    replace_parts(monkeypatch, lambda *_, **__: None)

    def refused(*_: Any, **__: Any) -> None:
        raise ConfigError("pip install it")

    monkeypatch.setattr(f"uccl_ep_serving.{missing}", refused)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for _ in range(2):
        with pytest.raises(ConfigError, match="pip install it"):
            buffer.get_comm_stream()
    assert dispatch(buffer)[1].tolist() == [2, 0]


def test_a_second_call_at_the_same_time_is_refused(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call that moves something, and the hook of one that has; what runs goes on."""
    *_, hook = dispatch_with_hook(buffer)
    inside, until = threading.Event(), threading.Event()
    low_latency = buffer._serving(torch.ones(1)).low_latency
    real = low_latency.dispatch

    def slow(*arguments: Any, **options: Any) -> Any:
        inside.set()
        assert until.wait(20)
        return real(*arguments, **options)

    monkeypatch.setattr(low_latency, "dispatch", slow)
    found = list[list[int]]()
    thread = threading.Thread(target=lambda: found.append(dispatch(buffer)[1].tolist()), name="other")
    thread.start()
    assert inside.wait(20)
    x = torch.ones(1, 128, dtype=torch.bfloat16)
    calls: list[Callable[[], Any]] = [
        lambda: dispatch(buffer),
        lambda: buffer.low_latency_combine(x, x, x, None),  # type: ignore[arg-type]
        lambda: buffer.dispatch(x),
        lambda: buffer.combine(x, None),  # type: ignore[arg-type]
        lambda: buffer.reserve_low_latency(2, 128, 2, 1),
        lambda: buffer.low_latency_update_mask_buffer(0, True),
        hook,
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="this Buffer is in low_latency_dispatch of thread other"):
            call()
    buffer.check()
    until.set()
    thread.join(20)
    assert found == [[2, 0]]
    hook()


def dispatch_with_hook(buffer: Buffer) -> Any:
    x, ids = torch.ones(2, 128, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
    return buffer.low_latency_dispatch(x, ids, 2, 2, use_fp8=False, return_recv_hook=True)


@pytest.mark.parametrize("group", [object(), SimpleNamespace(rank=0), SimpleNamespace(rank=lambda: 0, size=lambda: 1)])
def test_what_is_no_group_is_refused(group: Any) -> None:
    with pytest.raises(ConfigError, match="group must be a process group"):
        Buffer(group)


def test_events_of_others_and_a_closed_buffer_are_refused() -> None:
    buffer = opened()
    x, ids = torch.ones(2, 128, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"previous_event must be an EventOverlap .* not 3"):
        buffer.get_dispatch_layout(ids, 2, previous_event=3)  # type: ignore[arg-type]
    counts = buffer.get_dispatch_layout(ids, 2)
    with pytest.raises(ConfigError, match="previous_event"):
        buffer.dispatch(x, None, counts[0], None, counts[3], counts[2], previous_event=3)  # type: ignore[arg-type]
    buffer.destroy()
    with pytest.raises(UcclEpError, match="this Buffer is closed"):
        buffer.low_latency_query_mask_buffer(torch.zeros(1, dtype=torch.int32))


def test_rows_that_no_memory_can_hold_are_refused_before_anything_moves(buffer: Buffer) -> None:
    x, ids = torch.ones(2, 128, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
    counts = buffer.get_dispatch_layout(ids, 2)
    given = x, None, counts[0], None, counts[3], counts[2], ids, torch.ones(2, 1)
    with pytest.raises(ConfigError, match=f"num_worst_tokens = {1 << 40} rows of 256 bytes cannot be allocated"):
        buffer.dispatch(*given, num_worst_tokens=1 << 40)
    assert buffer.dispatch(*given, num_worst_tokens=4)[0].shape == (4, 128)


def test_tensors_of_devices_that_nobody_serves_decide_nothing(buffer: Buffer) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match="a tensor is on meta: a Buffer serves tensors on cpu or cuda"):
            dispatch(buffer, device="meta")
    assert dispatch(buffer)[1].tolist() == [2, 0]


BAD_CALLS: dict[str, tuple[Callable[[Buffer], object], str]] = {
    "sms are a word": (lambda _: Buffer.set_num_sms("a"), "num_sms = 'a' is no integer"),  # type: ignore[arg-type]
    "sms are odd": (lambda _: Buffer.set_num_sms(3), "num_sms = 3 must be even"),
    "config of words": (lambda _: Config("20"), "num_sms = '20' is no integer"),  # type: ignore[arg-type]
    "config of fractions": (
        lambda _: Config(20, 6.5),  # type: ignore[arg-type]
        "num_max_nvl_chunked_send_tokens = 6.5 is no integer",
    ),
    "config that receives less than it sends": (
        lambda _: Config(20, 6, 5),
        "send tokens 6 must be in 1..recv tokens 5",
    ),
    "hint of a word": (
        lambda _: Config().get_nvl_buffer_size_hint("7168", 8),  # type: ignore[arg-type]
        "hidden_bytes = '7168' is no integer",
    ),
    "hint for nobody": (lambda _: Config().get_rdma_buffer_size_hint(7168, 0), "num_ranks = 0 must be at least 1"),
    "low-latency hint without experts": (
        lambda _: Buffer.get_low_latency_rdma_size_hint(8, 128, 2, None),  # type: ignore[arg-type]
        "experts = None is no integer",
    ),
    "rank to mask is a word": (
        lambda buffer: buffer.low_latency_update_mask_buffer("x"),  # type: ignore[arg-type]
        "rank_to_mask = 'x' is no integer",
    ),
    "mask is a list": (
        lambda buffer: buffer.low_latency_query_mask_buffer([0]),  # type: ignore[arg-type]
        r"mask_status must be int32\[1\], not list",
    ),
    "mask is int64": (
        lambda buffer: buffer.low_latency_query_mask_buffer(torch.zeros(1, dtype=torch.int64)),
        r"mask_status must be int32\[1\], not torch.int64\[1\]",
    ),
    "dtype is a word": (
        lambda buffer: buffer.get_local_buffer_tensor("uint8"),  # type: ignore[arg-type]
        "dtype must be a torch.dtype, not 'uint8'",
    ),
    "size is a number": (
        lambda buffer: buffer.get_local_buffer_tensor(torch.uint8, 4),  # type: ignore[arg-type]
        "size must be a torch.Size or None, not 4",
    ),
    "size is negative": (
        lambda buffer: buffer.get_local_buffer_tensor(torch.uint8, [-1]),  # type: ignore[arg-type]
        "size = -1 must be at least 0",
    ),
    "size is negative twice": (
        lambda buffer: buffer.get_local_buffer_tensor(torch.uint8, torch.Size((-2, -2))),
        "size = -2 must be at least 0",
    ),
    "offset is a fraction": (
        lambda buffer: buffer.get_local_buffer_tensor(torch.uint8, None, 0.5),  # type: ignore[arg-type]
        "offset = 0.5 is no integer",
    ),
}


def test_what_is_wrong_is_refused_by_name_and_the_buffer_goes_on(buffer: Buffer) -> None:
    for call, words in BAD_CALLS.values():
        with pytest.raises(ConfigError, match=words):
            call(buffer)
    assert dispatch(buffer)[1].tolist() == [2, 0]


@pytest.mark.parametrize("name", ["num_nvl_bytes", "num_rdma_bytes"])
@pytest.mark.parametrize(
    ("value", "words"), [("1", "'1' is no integer"), (-1, "-1 must be at least 0"), (1 << 70, ".* 64 bits")]
)
def test_sizes_of_a_buffer_are_checked(name: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} = {words}"):
        Buffer(Alone(), **{name: value})  # type: ignore[arg-type]


def test_integers_of_numpy_are_integers(buffer: Buffer) -> None:
    config = Config(np.int32(20), 6, np.int32(1 << 20))  # type: ignore[arg-type]
    assert config.get_nvl_buffer_size_hint(np.int32(1 << 14), 8) == 8 * (1 << 20) * ((1 << 14) + 1024)  # type: ignore[arg-type]
    part = buffer.get_local_buffer_tensor(torch.int32, [np.int64(2), 3], np.int64(16))  # type: ignore[list-item, arg-type]
    assert part.shape == (2, 3)


@pytest.mark.parametrize(("window", "shown"), [("host", True), ("auto", False), ("device", False)])
def test_a_window_that_may_lie_in_gpu_memory_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, window: str, shown: bool
) -> None:
    """There is one in host memory beside it, which kernels do not use."""
    replace_parts(monkeypatch, lambda *_, **__: SimpleNamespace(comm_stream="theirs"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    buffer = opened(window=window)
    try:
        assert buffer.get_local_buffer_tensor(torch.uint8, torch.Size((16,))).shape == (16,)
        assert buffer.get_comm_stream() == "theirs"
        if shown:
            assert buffer.get_local_buffer_tensor(torch.uint8, torch.Size((16,))).shape == (16,)
        else:
            with pytest.raises(ConfigError, match=f"UCCL_EP_WINDOW={window}, so .* Next step: UCCL_EP_WINDOW=host"):
                buffer.get_local_buffer_tensor(torch.uint8)
    finally:
        buffer.destroy()


def imported_by(device: str) -> set[str]:
    """Modules of this package in a process that has opened one Buffer for ``device`` and dispatched with it."""
    code = """
import sys
from tests.system.test_facade import dispatch, opened
buffer = opened(device=sys.argv[1])
assert dispatch(buffer)[1].tolist() == [2, 0]
buffer.destroy()
print(*(name for name in sys.modules if name.startswith("uccl_ep_serving.")))
"""
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if device == "interpreter" else {})
    done = subprocess.run(
        [sys.executable, "-c", code, device], check=True, capture_output=True, text=True, cwd=ROOT, env=environment
    )
    return {name.removeprefix("uccl_ep_serving.") for name in done.stdout.split()}


def test_a_buffer_of_cpu_tensors_imports_nothing_of_a_gpu() -> None:
    found = imported_by("cpu")
    assert {"modes.low_latency_cpu", "modes.normal_cpu", "kernels.cpu.normal"} <= found
    assert not {name for name in found if name.startswith("kernels.triton") or "_gpu" in name}
    assert "gpu.context" not in found


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_buffer_of_a_device_neither_imports_nor_compiles_the_kernels_of_cpu_tensors() -> None:
    found = imported_by("interpreter")
    assert {"modes.low_latency_gpu", "modes.normal_gpu", "kernels.triton.low_latency", "kernels.triton.normal"} <= found
    assert not {name for name in found if name.startswith("kernels.cpu") or name.endswith("_cpu")}
