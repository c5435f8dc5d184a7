"""What a GPU and its driver do for us, call by call: where an operation would say that ranks wait for each other, these
say which call of the driver does not do what it should.

Each part runs on both ranks, which may share the GPU, and returns what it has to say.
"""

from __future__ import annotations

import contextlib
import os

import torch
import triton
import triton.language as tl

from ..control_plane.bootstrap import Exchange
from ..data_plane.segments import Segment
from ..gpu.streams import GpuOrder
from ..kernels.triton.words import acquire, clock_ns, int64s, poke, release_each, settle, uniform
from ..native.pages import own_pages
from .faults import expect
from .place import Place, driver_call
from .workers import note

__all__ = ["captures", "clock", "device_memory", "dma_buf", "host_memory", "peers", "segments", "waiting"]

_WORD = 0x1234_5678_9ABC_DEF0
#: A window is as large at least.
_SEGMENT_BYTES = 4 << 20
#: Nanoseconds that a kernel waits for the other rank.
_PATIENCE = 10_000_000_000


@triton.jit
def store_word(address: tl.int64, sink: tl.int64, value: tl.int64) -> None:
    """Store with release, as flags and counts are."""
    words = tl.zeros([2], tl.int64)
    release_each(words + address, words + value, tl.arange(0, 2) == 0, sink)


@triton.jit
def copy_word(source: tl.int64, target: tl.int64) -> None:
    """Load with acquire, as waiting kernels do."""
    poke(target, acquire(source))


@triton.jit
def clock_steps(out: tl.int64, looks: tl.int64) -> None:
    """Smallest step of the clock that is not 0, and the time that ``looks`` looks take."""
    first = clock_ns()
    before = first
    least = tl.full((), 1 << 60, tl.int64)
    for _ in range(0, looks):
        now = clock_ns()
        least = tl.where(now > before, tl.minimum(least, now - before), least)
        before = now
    settle()
    tl.store(int64s(out), least)
    tl.store(int64s(out + 8), before - first)


@triton.jit
def wait_word(address: tl.int64, value: tl.int64, limit: tl.int64, out: tl.int64) -> None:
    """Wait for ``value`` as kernels wait for peers: (1 when it came, nanoseconds)."""
    start = clock_ns()
    now = start
    present = tl.full((), 0, tl.int32)
    while (present == 0) & (now - start < limit):
        present = uniform((acquire(address) == value).to(tl.int32))
        now = clock_ns()
    settle()
    poke(out, present.to(tl.int64))
    poke(out + 8, now - start)


def _load(place: Place, address: int) -> int:
    """What a kernel loads there."""
    note("kernel copy_word")
    found = torch.zeros(2, dtype=torch.int64, device=place.device)
    copy_word[(1,)](address, found.data_ptr(), num_warps=1)
    return int(found[0].item())


def _store(place: Place, address: int, value: int) -> None:
    """What a kernel stores there is there when this returns."""
    note("kernel store_word")
    sink = torch.zeros(2, dtype=torch.int64, device=place.device)
    store_word[(1,)](address, sink.data_ptr(), value, num_warps=1)
    place.memory.synchronize()


def _expect_word(found: int, wanted: int, where: str, what: str) -> None:
    expect(found == wanted, where, f"{wanted:#x}, {what}", f"{found:#x}")


def clock(place: Place, exchange: Exchange) -> str:
    """How fine the clock of the deadlines is."""
    note("kernel clock_steps")
    found = torch.zeros(2, dtype=torch.int64, device=place.device)
    looks = 200 if place.target.interpreted else 200_000
    clock_steps[(1,)](found.data_ptr(), looks, num_warps=1)
    least, total = found.tolist()
    expect(total > 0, "the clock of the GPU (globaltimer)", "a clock that runs", "one that stands still")
    return f"steps of {least} ns, a look takes {total / looks:.1f} ns"


def host_memory(place: Place, exchange: Exchange) -> str:
    """Pinned pages are written and read by both sides."""
    pages = own_pages(8192)
    address = place.memory.map_host(pages.ctypes.data, 8192)
    _store(place, address + 4096, _WORD)
    words = pages.view("int64")
    where = f"{driver_call('HostRegister')} (pinned host memory)"
    _expect_word(int(words[512]), _WORD, where, "which a kernel has stored")
    words[513] = 7
    _expect_word(_load(place, address + 4104), 7, where, "which the host has stored")
    place.memory.unmap_host(pages.ctypes.data)
    return f"mapped at {'the same' if address == pages.ctypes.data else 'another'} address"


def segments(place: Place, exchange: Exchange) -> str:
    """Memory that two processes share, pinned by both: what a kernel of one stores, one of the other sees."""
    memory, where = place.memory, f"{driver_call('HostRegister')} (memory that two processes share)"
    if exchange.rank > 0:
        descriptor = os.open(exchange.all_gather(b"")[0].decode(), os.O_RDWR | os.O_CLOEXEC)
        segment = Segment.attach(descriptor, _SEGMENT_BYTES)
        address = memory.map_host(segment.address, _SEGMENT_BYTES)
        _store(place, address + 8, _load(place, address) + 1)
        exchange.all_gather(b"")
    else:
        segment = Segment.create("uccl_ep check", _SEGMENT_BYTES)
        address = memory.map_host(segment.address, _SEGMENT_BYTES)
        _store(place, address, _WORD)
        exchange.all_gather(f"/proc/{os.getpid()}/fd/{segment.fd}".encode())
        exchange.all_gather(b"")
        words = segment.bytes.view("int64")
        _expect_word(_load(place, address + 8), _WORD + 1, where, "which the other process's kernel has stored")
        _expect_word(int(words[1]), _WORD + 1, where, "which the other process's kernel has stored")
    memory.unmap_host(segment.address)
    segment.close()
    return f"{_SEGMENT_BYTES >> 20} MiB, by two processes"


def device_memory(place: Place, exchange: Exchange) -> str:
    """Memory of the driver's own, zeroed."""
    address = place.memory.allocate(5 << 20)
    _expect_word(_load(place, address + (5 << 20) - 8), 0, f"{driver_call('Memset')} (new device memory)", "zeroed")
    place.memory.free(address)
    return "zeroed"


def _add_one(place: Place, exchange: Exchange) -> None:
    """The other process: open what rank 0 has exported, and store one more than its first word beside it."""
    address = place.memory.open(exchange.all_gather(b"")[0])
    _store(place, address + 8, _load(place, address) + 1)
    place.memory.close(address)
    exchange.all_gather(b"")


def peers(place: Place, exchange: Exchange) -> str:
    """Another process opens the memory, and each sees what the other's kernel has stored."""
    if exchange.rank > 0:
        _add_one(place, exchange)
        return ""
    address = place.memory.allocate(4096)
    _store(place, address, _WORD)
    exchange.all_gather(place.memory.export(address))
    exchange.all_gather(b"")
    where = f"{driver_call('IpcOpenMemHandle')} (device memory that another process maps)"
    _expect_word(_load(place, address + 8), _WORD + 1, where, "which the other process's kernel has stored")
    place.memory.free(address)
    return "opened by another process"


def waiting(place: Place, exchange: Exchange) -> str:
    """A kernel waits, and a kernel of another process, which the device must let run meanwhile, ends that."""
    if place.target.interpreted:
        return "a launch waits for its kernel in the interpreter"
    if exchange.rank > 0:
        _add_one(place, exchange)
        return ""
    address = place.memory.allocate(4096)
    _store(place, address, _WORD)
    note("kernel wait_word")
    found = torch.zeros(2, dtype=torch.int64, device=place.device)
    wait_word[(1,)](address + 8, _WORD + 1, _PATIENCE, found.data_ptr(), num_warps=1)
    exchange.all_gather(place.memory.export(address))
    exchange.all_gather(b"")
    came, waited = found.tolist()
    expect(came == 1, "kernel wait_word", "the other process's store", f"nothing within {waited * 1e-9:.0f} s")
    place.memory.free(address)
    return f"ended after {waited * 1e-9:.1f} s, by another process"


def captures(place: Place, exchange: Exchange) -> str:
    """Two captures in a row on one order, replayed."""
    if place.target.interpreted:
        return "no streams in the interpreter"
    note(driver_call("GraphLaunch"))
    order = GpuOrder(place.device, place.memory.capture_of)
    words = torch.zeros(4, dtype=torch.int64, device=place.device)

    def launch() -> None:
        store_word[(1,)](words.data_ptr(), words.data_ptr() + 16, _WORD, num_warps=1)

    def run() -> None:
        order.run(launch, [words], own_stream=True, finish=True)

    run()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph):
            run()
    for graph in graphs:
        words.zero_()
        graph.replay()
        _expect_word(int(words[0].item()), _WORD, driver_call("GraphLaunch"), "which the captured kernel stores")
    return "two graphs"


def dma_buf(place: Place, exchange: Exchange) -> str:
    """What NICs need. That it is missing is no fault where there are none."""
    address = place.memory.allocate(4 << 20)
    try:
        note("the export of a dma-buf")
        descriptor, offset = place.memory.export_dmabuf(address, 4 << 20)
        with contextlib.closing(os.fdopen(descriptor, "rb", buffering=0)):
            writes = place.memory.nic_writes().words
        return f"exported, at offset {offset}; writes of NICs: {writes}"
    except Exception as error:
        return f"not exported: {error}"
    finally:
        place.memory.free(address)
