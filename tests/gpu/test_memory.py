"""Memory of devices that are not there: the drivers are called as their manuals say, and the pages are right."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from uccl_ep_serving.data_plane.gpu_direct import cuda_writes
from uccl_ep_serving.errors import ConfigError, TransportError
from uccl_ep_serving.gpu import memory as device_memory
from uccl_ep_serving.gpu.memory import CudaMemory, HipMemory, InterpretedMemory
from uccl_ep_serving.gpu.window import _HostPages, _merged
from uccl_ep_serving.native.pages import own_pages

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch without CUDA does not let a device be chosen."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


class Handle:
    """``cudaIpcMemHandle_t`` as every release of cuda-bindings has it: bytes at an address, as long as it lives."""

    #: The bytes of handles that are gone: memory that an allocator has given to others.
    given_back: ClassVar[list[Any]] = []

    def __init__(self, content: bytes = b"") -> None:
        self._bytes = ctypes.create_string_buffer(content, 64)

    def __del__(self) -> None:
        ctypes.memset(self._bytes, 0xEE, 64)
        self.given_back.append(self._bytes)

    def getPtr(self) -> int:
        """Where they are."""
        return ctypes.addressof(self._bytes)

    @property
    def content(self) -> bytes:
        return self._bytes.raw


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A ``cuda.bindings.runtime`` that notes its calls."""
    calls: list[tuple[Any, ...]] = []
    runtime: Any = types.ModuleType("cuda.bindings.runtime")

    def function(name: str, *results: Any) -> None:
        def call(*arguments: Any) -> tuple[Any, ...]:
            calls.append((name, *arguments))
            return (0, *results)

        setattr(runtime, name, call)

    function("cudaHostRegister")
    function("cudaHostGetDevicePointer", 0x7000)
    function("cudaHostUnregister")
    function("cudaMalloc", 0x9000)
    function("cudaMemset")
    function("cudaFree")
    function("cudaIpcGetMemHandle")
    function("cudaIpcOpenMemHandle", 0xA000)
    function("cudaIpcCloseMemHandle")
    # status "active", number 41, and a later release's extra results
    function("cudaStreamGetCaptureInfo", 1, 41, None, None, None, 0)
    note = runtime.cudaIpcGetMemHandle
    # a new object with each call, as the real one has it
    runtime.cudaIpcGetMemHandle = lambda address: (*note(address), Handle(b"h" * 64))
    runtime.cudaIpcMemHandle_t = Handle
    runtime.cudaGetErrorString = lambda code: (0, b"out of memory")
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", runtime)
    return calls


def test_cuda_calls(cuda: list[tuple[Any, ...]]) -> None:
    memory = CudaMemory(GPU)
    assert memory.map_host(4096, 8192) == 0x7000
    assert memory.allocate(100) == 0x9000
    assert memory.export(0x9000) == b"h" * 64
    assert memory.open(b"x" * 64) == 0xA000
    memory.close(0xA000)
    memory.free(0x9000)
    memory.unmap_host(4096)
    assert memory.capture_of(0x5) == 41
    assert [call[0] for call in cuda] == [
        "cudaHostRegister",
        "cudaHostGetDevicePointer",
        "cudaMalloc",
        "cudaMemset",
        "cudaIpcGetMemHandle",
        "cudaIpcOpenMemHandle",
        "cudaIpcCloseMemHandle",
        "cudaFree",
        "cudaHostUnregister",
        "cudaStreamGetCaptureInfo",
    ]
    # whole blocks, so that a peer maps nothing else
    assert cuda[2][1:] == (2 << 20,)
    # portable and mapped
    assert cuda[0][1:] == (4096, 8192, 3)
    assert cuda[5][1].content == b"x" * 64


def test_a_cuda_error_is_named(cuda: list[tuple[Any, ...]]) -> None:
    sys.modules["cuda.bindings.runtime"].cudaMalloc = lambda nbytes: (2, 0)  # type: ignore[attr-defined]
    with pytest.raises(TransportError, match=r"cudaMalloc failed on cuda:0: out of memory \(2\).*UCCL_EP_WINDOW=host"):
        CudaMemory(GPU).allocate(10)


@pytest.mark.parametrize("free", [0, 700])
def test_a_block_that_cannot_be_zeroed_is_given_back(cuda: list[tuple[Any, ...]], free: int) -> None:
    """Also where giving it back fails: what is raised is the first failure."""
    runtime: Any = sys.modules["cuda.bindings.runtime"]
    freed: list[int] = []
    runtime.cudaMemset = lambda *_: (719,)
    runtime.cudaFree = lambda address: (freed.append(address), free)[1:]
    with pytest.raises(TransportError, match=r"cudaMemset failed on cuda:0: .*\(719\)"):
        CudaMemory(GPU).allocate(10)
    assert freed == [0x9000]


def test_torch_gives_back_what_it_keeps_before_an_allocation_fails(
    cuda: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    sys.modules["cuda.bindings.runtime"].cudaMalloc = lambda nbytes: (0, 0x9000) if emptied else (2, None)  # type: ignore[attr-defined]
    assert CudaMemory(GPU).allocate(10) == 0x9000
    assert emptied == [True]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("HostRegister", "permission to pin memory.*UCCL_EP_HEAP_BYTES"),
        ("IpcOpenMemHandle", "CUDA_VISIBLE_DEVICES.*UCCL_EP_WINDOW=host on all ranks"),
        ("Malloc", "memory is taken.*memory fraction"),
        ("Memset", "has failed before"),
        ("StreamGetCaptureInfo", "out of memory.*has failed before"),
    ],
)
def test_each_call_has_its_cause(cuda: list[tuple[Any, ...]], call: str, words: str) -> None:
    setattr(sys.modules["cuda.bindings.runtime"], f"cuda{call}", lambda *_: (1, None))
    memory = CudaMemory(GPU)
    steps = {
        "HostRegister": lambda: memory.map_host(4096, 4096),
        "IpcOpenMemHandle": lambda: memory.open(b"x" * 64),
        "StreamGetCaptureInfo": lambda: memory.capture_of(0),
    }
    with pytest.raises(TransportError, match=f"cuda{call} failed.*{words}"):
        steps.get(call, lambda: memory.allocate(16))()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A ``cuda.bindings.driver`` that exports descriptor 77."""
    module: Any = types.ModuleType("cuda.bindings.driver")
    module.asked = []

    def export(*arguments: Any) -> tuple[int, int]:
        module.asked.append(arguments)
        return module.code, 77

    module.code = 0
    module.CUmemRangeHandleType = lambda value: ("dma-buf", value)
    module.cuMemGetHandleForAddressRange = export
    module.cuGetErrorString = lambda code: (0, b"operation not supported")
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", module)
    return module


@pytest.mark.usefixtures("cuda")
def test_cuda_exports_whole_pages_as_dma_buf(driver: Any) -> None:
    page = mmap.PAGESIZE
    assert CudaMemory(GPU).export_dmabuf(8 * page + 16, page) == (77, 16)
    assert driver.asked == [(8 * page, 2 * page, ("dma-buf", 1), 0)]
    driver.code = 801
    with pytest.raises(
        TransportError, match=r"cuda:0 exports no dma-buf.*operation not supported \(801\).*UCCL_EP_WINDOW=host"
    ):
        CudaMemory(GPU).export_dmabuf(0, page)


def test_cuda_tells_how_it_orders_the_writes_of_nics(cuda: list[tuple[Any, ...]]) -> None:
    runtime: Any = sys.modules["cuda.bindings.runtime"]
    values = {75: 8, 100: 0, 117: 3, 118: 100}
    runtime.cudaDeviceAttr = lambda value: value
    runtime.cudaDeviceGetAttribute = lambda number, device: (cuda.append((number, device)), (0, values[number]))[1]  # type: ignore[func-returns-value]
    assert CudaMemory(GPU).nic_writes() == cuda_writes("cuda:0", 100, 8, coherent=False, flushes=True)
    assert sorted(cuda) == [(number, 0) for number in values]
    # memory operations of a stream are no use to a proxy
    values[117] = 2
    assert CudaMemory(GPU).nic_writes().refusal
    values.update({75: 9, 100: 1, 117: 1, 118: 200})
    assert CudaMemory(GPU).nic_writes() == cuda_writes("cuda:0", 200, 9, coherent=True, flushes=True)


class Driver:
    """``libcuda`` as ctypes presents it."""

    def __init__(self, context: int = 0x77, code: int = 0) -> None:
        self._context, self._code = context, code
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
        self.cuCtxSetCurrent, self.cuFlushGPUDirectRDMAWrites = kind(lambda _: 0), kind(lambda _: 0)

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self._context
        return self._code


def test_the_flush_of_the_driver_is_called_by_address(
    cuda: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, library = CudaMemory(GPU), Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    select, flush = (
        ctypes.cast(function, ctypes.c_void_p).value
        for function in (library.cuCtxSetCurrent, library.cuFlushGPUDirectRDMAWrites)
    )
    assert memory.driver_flush(200) == (select, 0x77, flush, 0, 200)
    # the context is there before it is asked for
    assert cuda == [("cudaFree", 0)]
    for broken in (Driver(context=0), Driver(code=4), object()):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, library=broken: library)
        with pytest.raises(TransportError, match="failed on cuda:0"):
            memory.driver_flush(200)


def test_rocm_exports_through_its_runtime() -> None:
    class Hsa:
        code = 0

        def hsa_amd_portable_export_dmabuf(self, address: Any, nbytes: Any, descriptor: Any, offset: Any) -> int:
            assert (address.value, nbytes.value) == (0xB010, 1 << 33)
            descriptor._obj.value, offset._obj.value = 55, 0x10
            return self.code

    hsa = Hsa()
    memory = HipMemory(GPU, Hip(), hsa)
    assert memory.export_dmabuf(0xB010, 1 << 33) == (55, 0x10)
    assert memory.nic_writes() == (  # uncached: nothing is flushed, rows are forwarded
        "",
        True,
        0,
        "no flush (uncached memory)",
    )
    with pytest.raises(TransportError, match="ROCm has no flush"):
        memory.driver_flush(100)
    hsa.code = 4096
    with pytest.raises(TransportError, match=r"cuda:0 exports no dma-buf.*4096"):
        memory.export_dmabuf(0xB010, 1 << 33)
    with pytest.raises(TransportError, match="exports no dma-buf"):
        HipMemory(GPU, Hip(), object()).export_dmabuf(0xB010, 16)


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    with pytest.raises(ConfigError, match=r'pip install "cuda-bindings==12\.\*"'):
        CudaMemory(GPU)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError("no such file")))
    with pytest.raises(ConfigError, match=r"libamdhip64\.so"):
        HipMemory(GPU)


def test_rocm_libraries_are_those_that_torch_has_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another copy of them would know nothing of torch's memory."""
    maps, asked = tmp_path / "maps", []
    monkeypatch.setattr(device_memory, "_MAPS", maps)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: asked.append(name) or Hip())  # type: ignore[func-returns-value]
    maps.write_text("7f00-7f01 r--p 00000000 00:00 0\n7f02-7f03 r-xp 00000000 08:01 5    /usr/lib/libc.so.6\n")
    HipMemory(GPU)
    with maps.open("a") as file:
        file.write("7f04-7f05 r-xp 00001000 08:01 9    /opt/my env/torch/lib/libamdhip64.so\n")
        file.write("7f06-7f07 r-xp 00001000 08:01 9    /opt/my env/torch/lib/libhsa-runtime64.so.1.15\n")
    HipMemory(GPU).export_dmabuf(0xB000, 4096)
    assert asked == [
        "libamdhip64.so",
        "/opt/my env/torch/lib/libamdhip64.so",
        "/opt/my env/torch/lib/libhsa-runtime64.so.1.15",
    ]


class Hip:
    """``libamdhip64`` as ctypes presents it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            if name in ("hipHostGetDevicePointer", "hipExtMallocWithFlags", "hipIpcOpenMemHandle"):
                arguments[0]._obj.value = 0xB000
            if name == "hipStreamGetCaptureInfo":
                arguments[2]._obj.value = 41
            if name == "hipIpcGetMemHandle":
                ctypes.memmove(arguments[0], b"\0h" * 32, 64)
            return 0

        return call


def test_hip_calls() -> None:
    library = Hip()
    memory = HipMemory(GPU, library)
    assert memory.map_host(4096, 8192) == 0xB000
    assert memory.allocate(1 << 33) == 0xB000
    # a handle may hold zero bytes
    assert memory.export(0xB000) == b"\0h" * 32
    assert memory.open(b"\0x" * 32) == 0xB000
    assert memory.capture_of(0x5) == 41
    names = [call[0] for call in library.calls]
    assert names == [
        "hipHostRegister",
        "hipHostGetDevicePointer",
        "hipExtMallocWithFlags",
        "hipMemset",
        "hipIpcGetMemHandle",
        "hipIpcOpenMemHandle",
        "hipStreamGetCaptureInfo",
    ]
    _, size, flags = library.calls[2][1:]
    assert (size.value, flags.value) == (1 << 33, 3)
    assert isinstance(library.calls[0][1], ctypes.c_size_t)
    assert bytes(memoryview(library.calls[5][2]).cast("B")) == b"\0x" * 32


def test_pages_are_mapped_once() -> None:
    page = mmap.PAGESIZE
    assert _merged([(page + 8, 8), (page + 16, 8), (3 * page - 4, 8)]) == [(page, 2 * page), (2 * page, 4 * page)]
    assert _merged([(0, 2 * page), (page, 2 * page)]) == [(0, 3 * page)]


def test_addresses_are_translated(cuda: list[tuple[Any, ...]]) -> None:
    page = mmap.PAGESIZE
    pages = _HostPages(CudaMemory(GPU))
    pages.map([(5 * page + 24, 8)])
    assert pages(5 * page + 24) == 0x7000 + 24
    assert pages(0) == 0
    with pytest.raises(AssertionError, match="not mapped"):
        pages(page)
    pages.unmap()
    assert cuda[-1] == ("cudaHostUnregister", 5 * page)


def test_what_kernels_of_old_graphs_look_at_stays_mapped(cuda: list[tuple[Any, ...]]) -> None:
    page = mmap.PAGESIZE
    pages = _HostPages(CudaMemory(GPU))
    pages.map([(5 * page, 8), (8 * page + 64, 8), (9 * page, 8)])
    pages.unmap(but=8 * page + 64)
    assert [call for call in cuda if call[0] == "cudaHostUnregister"] == [
        ("cudaHostUnregister", 9 * page),
        ("cudaHostUnregister", 5 * page),
    ]


@pytest.fixture
def interpreted() -> Iterator[InterpretedMemory]:
    before = len(os.listdir("/proc/self/fd"))
    yield InterpretedMemory()
    assert len(os.listdir("/proc/self/fd")) == before


def test_interpreted_memory_is_shared(interpreted: InterpretedMemory) -> None:
    own = interpreted.allocate(8192)
    other = interpreted.open(interpreted.export(own))
    assert other != own
    np.frombuffer((ctypes.c_uint8 * 8192).from_address(own), dtype=np.uint8)[100] = 7
    assert (ctypes.c_uint8 * 8192).from_address(other)[100] == 7
    interpreted.close(other)
    interpreted.free(own)
    with pytest.raises(TransportError, match="cannot open"):
        interpreted.open(b"/proc/self/fd/9999".ljust(64))


def test_pages_are_mapped_by_one_buffer(interpreted: InterpretedMemory) -> None:
    page = mmap.PAGESIZE
    interpreted.map_host(page, 2 * page)
    with pytest.raises(TransportError, match="which are mapped"):
        InterpretedMemory().map_host(2 * page, page)
    interpreted.unmap_host(page)
    InterpretedMemory().map_host(2 * page, page)
    interpreted.unmap_host(2 * page)


def test_memory_that_devices_map_shares_no_page() -> None:
    """Two Buffers of a process would otherwise map a page twice, which drivers refuse."""
    blocks = [own_pages(nbytes) for nbytes in (8, 4096, 4097, 40)]
    pages = [
        page
        for block in blocks
        for page in range(block.ctypes.data // mmap.PAGESIZE, -(-(block.ctypes.data + block.size) // mmap.PAGESIZE))
    ]
    assert len(set(pages)) == len(pages) == 5
    assert not any(block.any() for block in blocks)
    assert all(block.ctypes.data % mmap.PAGESIZE == 0 for block in blocks)


def test_interpreted_memory_is_exported_by_descriptor(interpreted: InterpretedMemory) -> None:
    own = interpreted.allocate(8192)
    descriptor, offset = interpreted.export_dmabuf(own + 4096, 4096)
    assert (os.fstat(descriptor).st_size, offset) == (8192, 4096)
    os.close(descriptor)
    with pytest.raises(TransportError, match="no memory of this device"):
        interpreted.export_dmabuf(own + 4096, 8192)
    interpreted.free(own)


def test_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(device_memory.memory_of(torch.device("cpu"), True), InterpretedMemory)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", types.ModuleType("cuda.bindings.runtime"))
    assert isinstance(device_memory.memory_of(GPU, False), CudaMemory)


def test_a_wait_for_a_device_that_hangs_is_limited(
    cuda: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    release, memory = threading.Event(), CudaMemory(GPU)
    assert memory.synchronize()
    assert memory.synchronize(time.monotonic() + 10.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: release.wait(20))
    try:
        assert not memory.synchronize(time.monotonic() + 0.1)
        assert not memory.synchronize(time.monotonic() - 1.0)
    finally:
        release.set()

    def fails(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    with pytest.raises(TransportError, match="cuda:0 has failed: an illegal memory access"):
        memory.synchronize(time.monotonic() + 10.0)


def test_a_wait_for_a_device_without_a_thread_is_made_all_the_same(
    cuda: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.12 starts none while the interpreter ends: the device has not failed for that."""
    waited: list[torch.device] = []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    memory = CudaMemory(GPU)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    assert memory.synchronize(time.monotonic() + 10.0)
    assert waited == [GPU]


def test_what_a_failed_wait_raises_keeps_nothing_alive(
    cuda: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cycle would keep windows mapped."""

    class Window:
        pass

    def fails(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def wait() -> weakref.ref[Window]:
        window = Window()
        with contextlib.suppress(TransportError):
            CudaMemory(GPU).synchronize(time.monotonic() + 10.0)
        return weakref.ref(window)

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    gc.disable()
    try:
        assert wait()() is None
    finally:
        gc.enable()
