"""A CUDA runtime that answers as the real one over memory of the host, for kernels in Triton's interpreter; what it is
told to get wrong it gets wrong."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
import types
from typing import Any

import torch

from uccl_ep_serving.check import driver
from uccl_ep_serving.check.place import Place, noting
from uccl_ep_serving.control_plane.bootstrap import Exchange
from uccl_ep_serving.gpu.memory import CudaMemory, InterpretedMemory
from uccl_ep_serving.kernels.triton.target import present_target

_REFUSED = 801
_ERRORS = {2: b"out of memory", _REFUSED: b"operation not supported"}


class Handle:
    """``cudaIpcMemHandle_t``: bytes at an address."""

    def __init__(self, content: bytes = b"") -> None:
        self._bytes = ctypes.create_string_buffer(content, 64)

    def getPtr(self) -> int:
        """Where they are."""
        return ctypes.addressof(self._bytes)

    @property
    def content(self) -> bytes:
        return self._bytes.raw


class Runtime(types.ModuleType):
    """``cuda.bindings.runtime``.

    Attributes:
        fault: (function, "refuses", "hangs" or "lies") that is wrong with it, ("", "") for nothing.
    """

    cudaIpcMemHandle_t = Handle
    cudaDeviceAttr = int

    def __init__(self) -> None:
        super().__init__("cuda.bindings.runtime")
        self._memory = InterpretedMemory()
        self.fault = ("", "")

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        plain = name.removeprefix("cuda")
        function = getattr(self, f"do{plain}")

        def call(*arguments: Any) -> tuple[Any, ...]:
            wrong = self.fault[1] if self.fault[0] == plain else ""
            if wrong == "hangs":
                time.sleep(600)
            if wrong == "refuses":
                return (_REFUSED, None)
            return (0, *function(*arguments, lies=wrong == "lies"))

        return call

    def cudaGetErrorString(self, code: int) -> tuple[int, bytes]:
        return 0, _ERRORS[code]

    def doHostRegister(self, address: int, nbytes: int, flags: int, lies: bool) -> tuple[()]:
        return ()

    def doHostUnregister(self, address: int, lies: bool) -> tuple[()]:
        return ()

    def doHostGetDevicePointer(self, address: int, flags: int, lies: bool) -> tuple[int]:
        # to other memory
        return (self._memory.allocate(4 << 20) if lies else address,)

    def doMalloc(self, nbytes: int, lies: bool) -> tuple[int]:
        address = self._memory.allocate(nbytes)
        ctypes.memset(address, 0xEE, nbytes)
        return (address,)

    def doMemset(self, address: int, value: int, nbytes: int, lies: bool) -> tuple[()]:
        if not lies:
            ctypes.memset(address, value, nbytes)
        return ()

    def doFree(self, address: int, lies: bool) -> tuple[()]:
        self._memory.free(address)
        return ()

    def doIpcGetMemHandle(self, address: int, lies: bool) -> tuple[Handle]:
        return (Handle(self._memory.export(address)),)

    def doIpcOpenMemHandle(self, handle: Handle, flags: int, lies: bool) -> tuple[int]:
        return (self._memory.allocate(4096) if lies else self._memory.open(handle.content.strip(b"\0")),)

    def doIpcCloseMemHandle(self, address: int, lies: bool) -> tuple[()]:
        if address in self._memory._opened:
            self._memory.close(address)
        return ()

    def doDeviceGetAttribute(self, attribute: int, device: int, lies: bool) -> tuple[int]:
        return (200,)


def place(index: int) -> Place:
    """The place of a rank on the stub."""
    sys.modules["cuda.bindings.runtime"] = Runtime()
    cuda: Any = torch.cuda
    cuda.device = lambda device: contextlib.nullcontext()
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = lambda: None
    memory = CudaMemory(torch.device("cuda", 0))
    memory.device = torch.device("cpu")
    return Place(noting(memory), present_target())


def with_fault(at: Place, exchange: Exchange, function: str, wrong: str, body: str) -> str:
    """``driver.<body>`` while ``function`` of the driver is wrong."""
    runtime: Any = sys.modules["cuda.bindings.runtime"]
    runtime.fault = (function, wrong)
    try:
        return str(getattr(driver, body)(at, exchange))
    finally:
        runtime.fault = ("", "")
