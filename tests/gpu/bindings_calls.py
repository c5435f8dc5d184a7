"""``python -m tests.gpu.bindings_calls``: all that the product asks of cuda-bindings, of the release that PYTHONPATH
chooses, in a process whose driver is the stub (:mod:`tests.support.cuda_driver`).

CUDA's runtime library, which is inside cuda-bindings, serves no driver but NVIDIA's: before anything else it asks for
tables of functions that have no names. So each of its calls ends with ``cudaErrorNotSupported``; what is tried is that
it is called as its release has it, and that the product names the error. Calls of the driver itself succeed.

Prints a JSON object: the release, each name that was used, what each method of ``CudaMemory`` said, and what the driver
was asked.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from tests.support.cuda_driver import torch_cuda
from tests.support.cuda_driver.loaded import Driver
from uccl_ep_serving.gpu.memory import CudaMemory

#: All that a handle may hold, a zero byte too.
HANDLE = bytes(range(64))


class Noting(ModuleType):
    """A module of cuda-bindings that notes what of it is used.

    Attributes:
        used: by name, results of each call beside the code; None for what is no function.
        instead: by name, what a call returns in place of what the real function has returned.
        given: by name, the arguments of the last call.
    """

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module.__name__)
        self._module = module
        self.used: dict[str, int | None] = {}
        self.instead: dict[str, Callable[[], tuple[Any, ...]]] = {}
        self.given: dict[str, tuple[Any, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if isinstance(found, type):
            self.used[name] = None
            return found

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.given[name] = arguments
            returned = found(*arguments)
            self.used[name] = len(returned) - 1
            return self.instead[name]() if name in self.instead else returned

        return call


class Attempts:
    """What calls have said: the error, or "done"."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            result = call()
        # whatever it is, the test says which
        except Exception as error:
            self.said[name] = f"{type(error).__name__}: {error}"
            return None
        self.said[name] = "done"
        return result


def refused(memory: CudaMemory, address: int, attempt: Attempts) -> None:
    """Every method, while the runtime library refuses all that it is asked."""
    page = mmap.PAGESIZE
    attempt("map_host", lambda: memory.map_host(page, page))
    attempt("unmap_host", lambda: memory.unmap_host(page))
    attempt("allocate", lambda: memory.allocate(100))
    attempt("free", lambda: memory.free(address))
    attempt("export", lambda: memory.export(address))
    attempt("open", lambda: memory.open(HANDLE))
    attempt("close", lambda: memory.close(address))
    attempt("capture_of", lambda: memory.capture_of(1))
    attempt("nic_writes", memory.nic_writes)
    attempt("driver_flush", lambda: memory.driver_flush(200))
    attempt("export_dmabuf", lambda: memory.export_dmabuf(page, page))


def done(memory: CudaMemory, runtime: Noting, address: int, attempt: Attempts) -> dict[str, Any]:
    """What there is beyond a call of the runtime library, as if it had done what it was asked."""

    def handle() -> tuple[Any, ...]:
        opaque = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(opaque.getPtr(), HANDLE, len(HANDLE))
        return 0, opaque

    runtime.instead = {
        "cudaMalloc": lambda: (0, address),
        "cudaIpcGetMemHandle": handle,
        "cudaFree": lambda: (0,),
        "cudaHostRegister": lambda: (0,),
    }
    attempt("memset", lambda: memory.allocate(100))
    attempt("device pointer", lambda: memory.map_host(mmap.PAGESIZE, mmap.PAGESIZE))
    exported = attempt("handle", lambda: memory.export(address))
    descriptor, offset = attempt("dma-buf", lambda: memory.export_dmabuf(address + 16, 100))
    os.close(descriptor)
    flush = attempt("flush", lambda: memory.driver_flush(200))
    # as a proxy's thread calls them
    select = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(flush.select)
    write = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int)(flush.flush)
    flushed = [select(flush.context), write(flush.target, flush.scope)]
    return {"exported": exported == HANDLE, "offset": offset, "flushed": flushed}


def main() -> None:
    own = Driver()
    torch_cuda.install(own)
    runtime, driver = (Noting(importlib.import_module(f"cuda.bindings.{name}")) for name in ("runtime", "driver"))
    sys.modules |= {"cuda.bindings.runtime": runtime, "cuda.bindings.driver": driver}
    code, address = driver.cuMemAlloc(1 << 20)
    assert int(code) == 0
    driver.used.clear()
    memory, attempt = CudaMemory(torch.device("cuda", 0)), Attempts()
    refused(memory, int(address), attempt)
    opaque, _ = runtime.given["cudaIpcOpenMemHandle"]
    found = {"opened": ctypes.string_at(opaque.getPtr(), len(HANDLE)) == HANDLE}
    own.forget()
    found |= done(memory, runtime, int(address), attempt)
    release = importlib.import_module("cuda.bindings").__version__
    calls = [[call.function, *call.arguments] for call in own.calls]
    used = {**driver.used, **runtime.used}
    print(json.dumps({"release": release, "used": used, "said": attempt.said, "calls": calls, **found}))


if __name__ == "__main__":
    main()
