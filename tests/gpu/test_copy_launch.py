"""What CuPy is asked for by a launch of bulk copies: a stand-in takes its place, and looks at what code it gets."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.nvrtc import needs_nvrtc

pytestmark = [
    needs_nvrtc,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
normal = pytest.importorskip("uccl_ep_serving.kernels.cuda.normal", reason="needs Triton")

from uccl_ep_serving.errors import ConfigError, TransportError  # noqa: E402
from uccl_ep_serving.kernels.blocks.normal_device import NormalFormat, NormalOpening, NormalTensors  # noqa: E402
from uccl_ep_serving.kernels.triton.target import Target  # noqa: E402
from uccl_ep_serving.protocol.message import DTYPE_BF16, NormalNotify  # noqa: E402

STREAM, DEVICE = 0x5EED, 3


class _Kernel:
    max_dynamic_shared_size_bytes = 0

    def __init__(self, calls: list[Any], name: str) -> None:
        self._calls, self._name = calls, name

    def __call__(self, grid: Any, block: Any, arguments: Any, *, shared_mem: int) -> None:
        assert shared_mem == self.max_dynamic_shared_size_bytes
        self._calls.append((self._name, grid, block, arguments))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Calls of kernels and, as ints, streams that are entered, of a CuPy on a GPU of sm_90."""
    found: list[Any] = []

    class Module:
        def __init__(self, *, path: str) -> None:
            self._code = Path(path).read_bytes()
            assert self._code.startswith(b"\x7fELF")

        def get_function(self, name: str) -> _Kernel:
            assert name.encode() in self._code
            return _Kernel(found, name)

    class Stream:
        def __init__(self, other: Any) -> None:
            self._named = other.__cuda_stream__()

        from_external = classmethod(lambda cls, other: cls(other))

        def __enter__(self) -> None:
            found.append(self._named)

        def __exit__(self, *error: Any) -> None:
            pass

    class Device:
        compute_capability, attributes = "90", {"MaxSharedMemoryPerBlockOptin": 227 << 10}

        def __init__(self, number: int) -> None:
            assert number == DEVICE

        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: Any) -> None:
            pass

    cuda = SimpleNamespace(Device=Device, Stream=Stream)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, RawModule=Module))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(device_index=DEVICE, cuda_stream=STREAM))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE)
    for cached in (normal._loaded, normal._stream):
        cached.cache_clear()
    yield found
    for cached in (normal._loaded, normal._stream):
        cached.cache_clear()


def _moving(kind: int) -> normal.CopyLaunch:
    kernels = normal.CopyNormalKernels(2, Target(1, 32))
    form = NormalFormat(kind, DTYPE_BF16, 272, 32, 0, 2, 2, 0, 0, 0, 5)
    opening, tensors = NormalOpening(16, 1, 16, 16, 16, 16, 1), NormalTensors(*range(16, 144, 16))
    if kind == NormalNotify.OPERATION_COMBINE:
        return kernels.combine(16, 16, form, opening, tensors, 1, 16, 1, ())[-1]
    return kernels.dispatch(16, 16, form, opening, tensors, 1, 16, 1, True)[-1]


@pytest.mark.parametrize("kind", [NormalNotify.OPERATION_DISPATCH, NormalNotify.OPERATION_COMBINE])
def test_a_launch_is_what_the_machine_code_takes(kind: int, calls: list[Any]) -> None:
    launch = _moving(kind)
    launch.compile()
    launch.run()
    stream, (name, grid, block, arguments) = calls
    assert stream == (0, STREAM)
    assert (name, grid, block) == (launch.code.function, (5, 1, 1), (launch.code.threads,))
    text = launch.code.compiled("sm_90").ptx
    parameters = re.findall(r"\.param \.(?:u64|b64)(?: \.ptr \.align \d+)? \w+_param_\d+", text)
    assert len(arguments) == len(parameters) == len(set(re.findall(r"\w+_param_\d+", text)))
    assert all(argument.dtype == "uint64" for argument in arguments)
    assert [int(argument) for argument in arguments] == list(launch.arguments)


def test_what_the_gpu_does_not_load_is_named(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: Any) -> None:
        raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(sys.modules["cupy"], "RawModule", refused)
    with pytest.raises(TransportError, match=r"uccl_ep_copy_dispatch .*OUT_OF_MEMORY.*UCCL_EP_COPY=triton"):
        _moving(NormalNotify.OPERATION_DISPATCH).compile()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match="pip install cupy"):
        normal.check_copies(2)


@pytest.mark.parametrize(
    ("ranks", "capability", "said"), [(2, "80", "this is sm_80"), (300, "90", "256 ranks, not 300")]
)
def test_what_cannot_have_them_is_refused(
    ranks: int, capability: str, said: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys.modules["cupy"].cuda.Device, "compute_capability", capability)
    with pytest.raises(ConfigError, match=said):
        normal.check_copies(ranks)


def test_without_a_gpu_they_are_refused(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="there is none"):
        normal.check_copies(2)


def test_a_gpu_with_little_shared_memory_is_refused(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device = sys.modules["cupy"].cuda.Device
    monkeypatch.setattr(device, "compute_capability", "120")
    monkeypatch.setattr(device, "attributes", {"MaxSharedMemoryPerBlockOptin": 99 << 10})
    with pytest.raises(ConfigError, match="this is sm_120, a block of which has 99 KiB"):
        normal.check_copies(2)
