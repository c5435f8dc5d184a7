"""Memory that kernels on a device reach: pinned host memory, device memory, and device memory of peers on this host.

Nothing here is imported before a Buffer serves tensors of a device. CUDA is driven through ``cuda-bindings`` (which
CUDA builds of torch bring from 2.10 on, our extra ``cuda`` for older ones), ROCm through its C library.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from ..data_plane.gpu_direct import NicWrites, cuda_writes
from ..errors import ConfigError, TransportError
from ..native.background import start_thread
from ..proxy.fence import DriverFlush
from .interpreted_memory import InterpretedMemory

__all__ = ["CudaMemory", "DeviceMemory", "HipMemory", "InterpretedMemory", "memory_of"]

_HANDLE_BYTES = 64
_REGISTER_PORTABLE, _REGISTER_MAPPED = 1, 2
_IPC_LAZY_PEER_ACCESS = 1
#: ``cudaErrorMemoryAllocation``, ``hipErrorOutOfMemory``.
_OUT_OF_MEMORY = 2
#: Smaller allocations may share a block of this size, and IPC hands whole blocks over (CUDA's manual of
#: ``cudaIpcGetMemHandle``).
_BLOCK_BYTES = 2 << 20
_MAPS = Path("/proc/self/maps")
_HOST_WINDOWS = "UCCL_EP_WINDOW=host on all ranks"
#: By function: the likely cause of its failure, and the next step.
_CAUSES = {
    "Malloc": ("the GPU's memory is taken", "give the engine less of it (its memory fraction), or " + _HOST_WINDOWS),
    "HostRegister": (
        "no permission to pin memory (ulimit -l, the container's limits), or not enough of it",
        "raise the limit, or smaller windows (UCCL_EP_HEAP_BYTES, UCCL_EP_ROUND_BYTES)",
    ),
    "IpcOpenMemHandle": (
        "GPUs without peer access to each other, a process that sees its own GPU only (CUDA_VISIBLE_DEVICES), or a "
        "container that hides the peer's process (--ipc=host)",
        _HOST_WINDOWS,
    ),
    "": ("a driver that lacks it, or a GPU that has failed before", "the driver's log, or " + _HOST_WINDOWS),
}
_CAUSES["ExtMallocWithFlags"] = _CAUSES["Malloc"]


class DeviceMemory(Protocol):
    """Every address is as the kernels see it, except for ``map_host``'s argument.

    Attributes:
        device: of the tensors that kernels work on.
    """

    device: torch.device

    def map_host(self, address: int, nbytes: int) -> int:
        """Pin host memory (whole pages) and map it into the device: the device's address of it."""

    def unmap_host(self, address: int) -> None:
        """Undo :meth:`map_host`, told the host's address."""

    def allocate(self, nbytes: int) -> int:
        """Zeroed device memory that peers may open."""

    def free(self, address: int) -> None:
        """Undo :meth:`allocate`; no peer has it open any more."""

    def export(self, address: int) -> bytes:
        """What a peer on this host opens an allocation with."""

    def open(self, handle: bytes) -> int:
        """Map a peer's allocation."""

    def close(self, address: int) -> None:
        """Undo :meth:`open`."""

    def synchronize(self, deadline: float = math.inf) -> bool:
        """Wait until the device has finished what it was given, by whomever; False when it has not at ``deadline``, a
        ``time.monotonic()`` instant. Raises TransportError when it has failed."""

    def capture_of(self, stream: int) -> int:
        """Number of the graph capture that the stream with this handle takes part in; it must be capturing."""

    def export_dmabuf(self, address: int, nbytes: int) -> tuple[int, int]:
        """A dma-buf over [address, address + nbytes) of an allocation, for a NIC: its descriptor, which the caller
        closes, and where the memory starts in it."""

    def nic_writes(self) -> NicWrites:
        """What a NIC's write into device memory takes before a kernel may be told of it."""

    def driver_flush(self, scope: int) -> DriverFlush:
        """The driver's flush that :meth:`nic_writes` asks for. Raises TransportError where it cannot be called."""


class _Driver:
    """What CUDA and ROCm have in common: functions of the same meaning whose first result is an error code."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)

    def _call(self, name: str, *arguments: Any) -> Any:
        raise NotImplementedError

    def _failed(self, name: str, code: int, text: str) -> TransportError:
        cause, step = _CAUSES.get(name.removeprefix("cuda").removeprefix("hip"), _CAUSES[""])
        return TransportError(
            f"{name} failed on {self.device}: {text} ({code}). Likely cause: {cause}. Next step: {step}",
            device=str(self.device),
            status=code,
        )

    def map_host(self, address: int, nbytes: int) -> int:
        with torch.cuda.device(self.device):
            self._call("HostRegister", address, nbytes, _REGISTER_PORTABLE | _REGISTER_MAPPED)
            return int(self._call("HostGetDevicePointer", address, 0))

    def unmap_host(self, address: int) -> None:
        with torch.cuda.device(self.device):
            self._call("HostUnregister", address)

    def allocate(self, nbytes: int) -> int:
        # whole blocks of the driver: what peers open is then nobody else's memory
        nbytes = -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES
        with torch.cuda.device(self.device):
            try:
                address = int(self._allocate(nbytes))
            except TransportError as error:
                if error.status != _OUT_OF_MEMORY:
                    raise
                # what torch keeps for later allocations of its own may be enough
                torch.cuda.empty_cache()
                address = int(self._allocate(nbytes))
            try:
                self._call("Memset", address, 0, nbytes)
                torch.cuda.synchronize(self.device)
            except BaseException:
                # where the device has failed this does too, and what has ended the allocation says why
                with contextlib.suppress(TransportError):
                    self._call("Free", address)
                raise
        return address

    def _allocate(self, nbytes: int) -> int:
        return int(self._call("Malloc", nbytes))

    def free(self, address: int) -> None:
        with torch.cuda.device(self.device):
            self._call("Free", address)

    def close(self, address: int) -> None:
        with torch.cuda.device(self.device):
            self._call("IpcCloseMemHandle", address)

    def synchronize(self, deadline: float = math.inf) -> bool:
        failures: list[Exception] = []
        waiter = None if deadline == math.inf else _start_waiter(self.device, failures)
        if waiter is None:
            _wait(self.device, failures)
        else:
            waiter.join(max(deadline - time.monotonic(), 0.0))
            if waiter.is_alive():
                return False
        if failures:
            raise TransportError(
                f"{self.device} has failed: {failures[0]}. Every call of this process to it fails from now on. Next "
                "step: find the first kernel that failed (compute-sanitizer, CUDA_LAUNCH_BLOCKING=1) and start the "
                "process again",
                device=str(self.device),
            ) from failures.pop()  # this frame is in the traceback, and must not keep it
        return True

    def _no_dmabuf(self, text: str, code: int) -> TransportError:
        return TransportError(
            f"{self.device} exports no dma-buf of its memory: {text} ({code}). Next step: a driver and kernel (5.12 or "
            "newer) that do, or a peer-memory module (nvidia-peermem; AMD has its own), or UCCL_EP_WINDOW=host",
            device=str(self.device),
            status=code,
        )


def _start_waiter(device: torch.device, failures: list[Exception]) -> threading.Thread | None:
    """A thread in the wait, which has no limit in the driver; events tell nothing of graphs that are replayed. None
    where the system gives no thread, as while the interpreter ends."""
    try:
        return start_thread(f"uccl_ep waits for {device}", _wait, device, failures)
    except TransportError:
        return None


def _wait(device: torch.device, failures: list[Exception]) -> None:
    """Wait for the device; what that raises goes into ``failures``."""
    try:
        torch.cuda.synchronize(device)
    except Exception as error:
        failures.append(error)


class CudaMemory(_Driver):
    """NVIDIA GPUs, through ``cuda.bindings.runtime``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        try:
            self._runtime: Any = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            major = (torch.version.cuda or "").partition(".")[0]
            raise ConfigError(
                f"tensors on {device} need the package cuda-bindings: {error}. Next step: "
                f'pip install "cuda-bindings=={major}.*", which is for the CUDA of this torch'
            ) from error

    def _call(self, name: str, *arguments: Any) -> Any:
        results = self._results(name, *arguments)
        return results[0] if results else None

    def _results(self, name: str, *arguments: Any) -> list[Any]:
        results: list[Any]
        code, *results = getattr(self._runtime, f"cuda{name}")(*arguments)
        if int(code) != 0:
            _, text = self._runtime.cudaGetErrorString(code)
            raise self._failed(f"cuda{name}", int(code), text.decode() if isinstance(text, bytes) else str(text))
        return results

    def export(self, address: int) -> bytes:
        # By address, since later releases of cuda-bindings 13 have no attribute for the bytes. They go with the object,
        # so it must have a name while they are read.
        with torch.cuda.device(self.device):
            opaque = self._call("IpcGetMemHandle", address)
        return ctypes.string_at(opaque.getPtr(), _HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        opaque = self._runtime.cudaIpcMemHandle_t()
        ctypes.memmove(opaque.getPtr(), handle, _HANDLE_BYTES)
        with torch.cuda.device(self.device):
            return int(self._call("IpcOpenMemHandle", opaque, _IPC_LAZY_PEER_ACCESS))

    def capture_of(self, stream: int) -> int:
        """Allowed in a capture, by the manual of ``cudaStreamGetCaptureInfo``."""
        # (status, number, ...), of which later versions have more
        return int(self._results("StreamGetCaptureInfo", stream)[1])

    #: ``cudaDevAttr``: ComputeCapabilityMajor, PageableMemoryAccessUsesHostPageTables (only where CPU and GPU are
    #: coherent), GPUDirectRDMAFlushWritesOptions, GPUDirectRDMAWritesOrdering.
    _MAJOR, _HOST_PAGE_TABLES, _FLUSHES, _ORDERING = 75, 100, 117, 118
    #: ``cudaFlushGPUDirectRDMAWritesOptionHost``: the CPU may flush. ``...TargetCurrentDevice``.
    _FLUSH_BY_HOST, _CURRENT = 1, 0
    #: ``CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD``
    _DMA_BUF = 1

    def export_dmabuf(self, address: int, nbytes: int) -> tuple[int, int]:
        """The driver takes whole pages of the host only."""
        driver: Any = importlib.import_module("cuda.bindings.driver")
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        kind = driver.CUmemRangeHandleType(self._DMA_BUF)
        with torch.cuda.device(self.device):
            code, descriptor = driver.cuMemGetHandleForAddressRange(start, end - start, kind, 0)
        if int(code) != 0:
            _, text = driver.cuGetErrorString(code)
            raise self._no_dmabuf(text.decode() if isinstance(text, bytes) else str(text), int(code))
        return int(descriptor), address - start

    def _attribute(self, number: int) -> int:
        return int(self._call("DeviceGetAttribute", self._runtime.cudaDeviceAttr(number), self.device.index))

    def nic_writes(self) -> NicWrites:
        return cuda_writes(
            str(self.device),
            ordering=self._attribute(self._ORDERING),
            major=self._attribute(self._MAJOR),
            coherent=bool(self._attribute(self._HOST_PAGE_TABLES)),
            flushes=bool(self._attribute(self._FLUSHES) & self._FLUSH_BY_HOST),
        )

    def driver_flush(self, scope: int) -> DriverFlush:
        """``cuFlushGPUDirectRDMAWrites`` flushes the calling thread's context: this process's of the device."""
        try:
            library = ctypes.CDLL(_loaded("libcuda.so.1"))
            ask, select, flush = library.cuCtxGetCurrent, library.cuCtxSetCurrent, library.cuFlushGPUDirectRDMAWrites
        except (OSError, AttributeError) as error:
            raise self._failed("cuFlushGPUDirectRDMAWrites", 0, str(error)) from error
        context = ctypes.c_void_p()
        with torch.cuda.device(self.device):
            # the runtime's context becomes current with its first call
            self._call("Free", 0)
            code = int(ask(ctypes.byref(context)))
        if code != 0 or not context.value:
            raise self._failed("cuCtxGetCurrent", code, "there is no context")
        addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (select, flush)]
        return DriverFlush(addresses[0], context.value, addresses[1], self._CURRENT, scope)


def _loaded(name: str) -> str:
    """Path of the library ``name`` that this process has loaded, else ``name``.

    Wheels of torch bring ROCm's libraries with them. Another copy, from where the system has one, would know nothing of
    torch's devices, streams and memory.
    """
    for line in _MAPS.read_text(errors="surrogateescape").splitlines():
        # address, permissions, offset, device, inode, path
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and os.path.basename(fields[5]).startswith(name):
            return fields[5]
    return name


class _HipHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class HipMemory(_Driver):
    """AMD GPUs, through the C interface of ``libamdhip64``, which torch has loaded.

    Device memory is allocated uncached (``hipDeviceMallocUncached``): a peer's or a NIC's writes are seen by a kernel
    that runs already, and its own are seen by them.
    """

    _UNCACHED = 3
    #: Functions that hand a pointer back, and how many arguments precede nothing but it.
    _RESULTS = frozenset({"HostGetDevicePointer", "ExtMallocWithFlags"})

    def __init__(self, device: torch.device, library: Any = None, hsa: Any = None) -> None:
        super().__init__(device)
        self._hsa = hsa
        try:
            self._library = library or ctypes.CDLL(_loaded("libamdhip64.so"))
        except OSError as error:
            raise ConfigError(f"tensors on {device} need ROCm's libamdhip64.so: {error}") from error

    def _call(self, name: str, *arguments: Any) -> Any:
        plain = [
            argument if not isinstance(argument, int) else _c_argument(name, place, argument)
            for place, argument in enumerate(arguments)
        ]
        result = ctypes.c_void_p()
        if name in self._RESULTS:
            plain.insert(0, ctypes.byref(result))
        code = int(getattr(self._library, f"hip{name}")(*plain))
        if code != 0:
            describe = self._library.hipGetErrorString
            describe.restype = ctypes.c_char_p
            text = describe(code)
            # else torch's next check would raise it once more, of a call that went well
            self._library.hipGetLastError()
            raise self._failed(f"hip{name}", code, text.decode() if isinstance(text, bytes) else str(text))
        return result.value or 0

    def _allocate(self, nbytes: int) -> int:
        return int(self._call("ExtMallocWithFlags", nbytes, self._UNCACHED))

    def export(self, address: int) -> bytes:
        handle = _HipHandle()
        with torch.cuda.device(self.device):
            self._call("IpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(memoryview(handle).cast("B"))

    def open(self, handle: bytes) -> int:
        result = ctypes.c_void_p()
        opaque = _HipHandle.from_buffer_copy(handle)
        with torch.cuda.device(self.device):
            self._call("IpcOpenMemHandle", ctypes.byref(result), opaque, _IPC_LAZY_PEER_ACCESS)
        return int(result.value or 0)

    def capture_of(self, stream: int) -> int:
        status, number = ctypes.c_int(), ctypes.c_uint64()
        self._call("StreamGetCaptureInfo", stream, ctypes.byref(status), ctypes.byref(number))
        return number.value

    def export_dmabuf(self, address: int, nbytes: int) -> tuple[int, int]:
        """ROCm's runtime below HIP does it (``hsa_amd_portable_export_dmabuf``)."""
        descriptor, offset = ctypes.c_int(-1), ctypes.c_uint64(0)
        try:
            export = (self._hsa or ctypes.CDLL(_loaded("libhsa-runtime64.so.1"))).hsa_amd_portable_export_dmabuf
        except (OSError, AttributeError) as error:
            raise self._no_dmabuf(str(error), 0) from error
        code = int(
            export(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.byref(descriptor), ctypes.byref(offset))
        )
        if code != 0:
            raise self._no_dmabuf("hsa_amd_portable_export_dmabuf failed", code)
        return descriptor.value, offset.value

    def nic_writes(self) -> NicWrites:
        """The memory is allocated uncached, so that nothing older is kept anywhere."""
        return NicWrites(words="no flush (uncached memory)")

    def driver_flush(self, scope: int) -> DriverFlush:
        raise self._failed("hipFlush", 0, "ROCm has no flush of what NICs write")


def _c_argument(name: str, place: int, value: int) -> Any:
    """The C type of an integer argument: flags are unsigned, everything else a pointer or a size."""
    flags = {"HostRegister": 2, "HostGetDevicePointer": 1, "ExtMallocWithFlags": 1, "IpcOpenMemHandle": 2, "Memset": 1}
    return ctypes.c_uint(value) if flags.get(name) == place else ctypes.c_size_t(value)


def memory_of(device: torch.device, interpreted: bool) -> DeviceMemory:
    """The implementation for ``device``. Raises ConfigError where its libraries are missing."""
    if interpreted:
        return InterpretedMemory()
    return HipMemory(device) if torch.version.hip else CudaMemory(device)
