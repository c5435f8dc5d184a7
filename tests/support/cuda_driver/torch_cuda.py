"""What a CPU build of torch lacks, on the stub of the driver: the part of ``torch.cuda`` that launches go through.

Each function asks the driver what torch's own asks it through CUDA's runtime library, and keeps what torch keeps: the
current device and stream of a thread, and streams and events that are made when they are first needed. Tensors are the
host's; :meth:`torch.Tensor.record_stream`, which has no meaning for those, is left out.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.cuda_driver.loaded import Driver

__all__ = ["install"]

_MAJOR, _MINOR, _MULTIPROCESSORS = 75, 76, 16
_NON_BLOCKING, _DISABLE_TIMING = 1, 2


class _Stream:
    """``torch.cuda.Stream``."""

    driver: Driver

    def __init__(self, device: Any = None, priority: int = 0, handle: int | None = None) -> None:
        made = self.driver.handle("cuStreamCreateWithPriority", _NON_BLOCKING, priority) if handle is None else handle
        self.cuda_stream = made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return self.cuda_stream

    def wait_event(self, event: _Event) -> None:
        self.driver.call("cuStreamWaitEvent", ctypes.c_void_p(self.cuda_stream), ctypes.c_void_p(event.handle), 0)

    def wait_stream(self, other: _Stream) -> None:
        event = _Event()
        event.record(other)
        self.wait_event(event)


class _Event:
    """``torch.cuda.Event``, which the driver hears of when it is first recorded."""

    driver: Driver

    def __init__(self) -> None:
        self.handle = 0

    def record(self, stream: _Stream | None = None) -> None:
        if not self.handle:
            self.handle = self.driver.handle("cuEventCreate", _DISABLE_TIMING)
        on = (stream or _Current.stream).cuda_stream
        self.driver.call("cuEventRecord", ctypes.c_void_p(self.handle), ctypes.c_void_p(on))

    def wait(self, stream: _Stream | None = None) -> None:
        (stream or _Current.stream).wait_event(self)

    def __del__(self) -> None:
        if self.handle:
            self.driver.call("cuEventDestroy_v2", ctypes.c_void_p(self.handle))


class _Current:
    """The thread's."""

    stream: _Stream


@contextlib.contextmanager
def _on(stream: _Stream) -> Iterator[None]:
    before, _Current.stream = _Current.stream, stream
    try:
        yield
    finally:
        _Current.stream = before


def install(driver: Driver) -> None:
    """``torch.cuda`` has one device, which is the stub's."""
    _Stream.driver = _Event.driver = driver
    driver.call("cuInit", 0)
    driver.call("cuCtxSetCurrent", ctypes.c_void_p(driver.handle("cuDevicePrimaryCtxRetain", 0)))
    _Current.stream = _Stream(handle=0)

    def attribute(number: int) -> int:
        return driver.handle("cuDeviceGetAttribute", number, 0)

    def capturing() -> bool:
        return bool(driver_status(_Current.stream.cuda_stream))

    def driver_status(stream: int) -> int:
        status = ctypes.c_int()
        driver.call("cuStreamIsCapturing", ctypes.c_void_p(stream), ctypes.byref(status))
        return status.value

    cuda: Any = torch.cuda
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.current_device, cuda.set_device = lambda: 0, lambda device: None
    cuda.device = lambda device: contextlib.nullcontext()
    cuda.get_device_capability = lambda device=None: (attribute(_MAJOR), attribute(_MINOR))
    cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=attribute(_MULTIPROCESSORS))
    cuda.Stream, cuda.Event, cuda.stream = _Stream, _Event, _on
    cuda.current_stream = lambda device=None: _Current.stream
    cuda.is_current_stream_capturing = capturing
    cuda.synchronize = lambda device=None: driver.call("cuCtxSynchronize")
    core: Any = torch._C
    # where Triton asks for the current stream
    core._cuda_getCurrentRawStream = lambda device: _Current.stream.cuda_stream
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda self, stream: None
