"""What this GPU and its driver can do for us, call by call: ``python tests/gpu/probe.py``. A minute; prints JSON.

The first thing to run on a new machine: where a test would say that ranks wait for each other, this says which call of
the driver does not do what it should. Exit status 1 when one does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from uccl_ep_serving.data_plane.segments import Segment
from uccl_ep_serving.gpu.memory import DeviceMemory, memory_of
from uccl_ep_serving.gpu.streams import GpuOrder
from uccl_ep_serving.kernels.triton.launch import Target, present_target
from uccl_ep_serving.kernels.triton.words import acquire, clock_ns, int64s, poke, release_each, settle, uniform
from uccl_ep_serving.native.pages import own_pages

WORD = 0x1234_5678_9ABC_DEF0
#: A window is as large at least.
SEGMENT_BYTES = 4 << 20
#: Nanoseconds that a kernel waits for another process, which first has to start.
PATIENCE = 60_000_000_000


@triton.jit
def store_word(address: tl.int64, sink: tl.int64, value: tl.int64, BACKEND: tl.constexpr) -> None:
    """Store with release, as flags and counts are."""
    words = tl.zeros([2], tl.int64)
    release_each(words + address, words + value, tl.arange(0, 2) == 0, sink, BACKEND)


@triton.jit
def copy_word(source: tl.int64, target: tl.int64, BACKEND: tl.constexpr) -> None:
    """Load with acquire, as waiting kernels do."""
    poke(target, acquire(source, BACKEND))


@triton.jit
def clock_steps(out: tl.int64, looks: tl.int64, BACKEND: tl.constexpr) -> None:
    """Smallest step of the clock that is not 0, and the time that ``looks`` looks take."""
    first = clock_ns(BACKEND)
    before = first
    least = tl.full((), 1 << 60, tl.int64)
    for _ in range(0, looks):
        now = clock_ns(BACKEND)
        least = tl.where(now > before, tl.minimum(least, now - before), least)
        before = now
    settle(BACKEND)
    tl.store(int64s(out), least)
    tl.store(int64s(out + 8), before - first)


@triton.jit
def wait_word(address: tl.int64, value: tl.int64, limit: tl.int64, out: tl.int64, BACKEND: tl.constexpr) -> None:
    """Wait for ``value`` as kernels wait for peers: (1 when it came, nanoseconds)."""
    start = clock_ns(BACKEND)
    now = start
    present = tl.full((), 0, tl.int32)
    while (present == 0) & (now - start < limit):
        present = uniform((acquire(address, BACKEND) == value).to(tl.int32), BACKEND)
        now = clock_ns(BACKEND)
    settle(BACKEND)
    poke(out, present.to(tl.int64))
    poke(out + 8, now - start)


def here() -> tuple[DeviceMemory, Target]:
    """The GPU, or Triton's interpreter where TRITON_INTERPRET=1 says so."""
    target = present_target()
    return memory_of(torch.device("cpu" if target.interpreted else "cuda"), target.interpreted), target


def word_at(memory: DeviceMemory, target: Target, address: int) -> int:
    """What a kernel loads there."""
    found = torch.zeros(2, dtype=torch.int64, device=memory.device)
    copy_word[(1,)](address, found.data_ptr(), BACKEND=target.backend, num_warps=1)
    return int(found[0].item())


def store(memory: DeviceMemory, target: Target, address: int, value: int) -> None:
    """What a kernel stores there is there when this returns."""
    sink = torch.zeros(2, dtype=torch.int64, device=memory.device)
    store_word[(1,)](address, sink.data_ptr(), value, BACKEND=target.backend, num_warps=1)
    memory.synchronize()


def host_memory(memory: DeviceMemory, target: Target) -> str:
    """Pinned pages are written and read by both sides."""
    pages = own_pages(8192)
    address = memory.map_host(pages.ctypes.data, 8192)
    store(memory, target, address + 4096, WORD)
    words = pages.view("int64")
    assert int(words[512]) == WORD, hex(int(words[512]))
    words[513] = 7
    assert word_at(memory, target, address + 4104) == 7
    memory.unmap_host(pages.ctypes.data)
    return f"mapped at {'the same' if address == pages.ctypes.data else 'another'} address"


def device_memory(memory: DeviceMemory, target: Target) -> str:
    """Memory of the driver's own, zeroed."""
    address = memory.allocate(5 << 20)
    assert word_at(memory, target, address + (5 << 20) - 8) == 0
    memory.free(address)
    return "zeroed"


def in_another_process(role: str, argument: str, pass_fds: tuple[int, ...] = ()) -> None:
    """Run one of :data:`ROLES` there, to its end."""
    command = [sys.executable, __file__, role, argument]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, pass_fds=pass_fds)
    assert child.returncode == 0, child.stderr[-2000:]


def segments(memory: DeviceMemory, target: Target) -> str:
    """Memory that two processes share, pinned by both: what a kernel of one stores, one of the other sees."""
    segment = Segment.create("uccl_ep probe", SEGMENT_BYTES)
    address = memory.map_host(segment.address, SEGMENT_BYTES)
    store(memory, target, address, WORD)
    in_another_process("segment", str(segment.fd), (segment.fd,))
    assert word_at(memory, target, address + 8) == WORD + 1
    assert int(segment.bytes.view("int64")[1]) == WORD + 1
    memory.unmap_host(segment.address)
    segment.close()
    return f"{SEGMENT_BYTES >> 20} MiB, by two processes"


def as_segment(memory: DeviceMemory, target: Target, descriptor: str) -> None:
    """The other process of :func:`segments`."""
    segment = Segment.attach(int(descriptor), SEGMENT_BYTES)
    address = memory.map_host(segment.address, SEGMENT_BYTES)
    store(memory, target, address + 8, word_at(memory, target, address) + 1)
    memory.unmap_host(segment.address)
    segment.close()


def peers(memory: DeviceMemory, target: Target) -> str:
    """Another process opens the memory, and each sees what the other's kernel has stored."""
    address = memory.allocate(4096)
    store(memory, target, address, WORD)
    in_another_process("peer", memory.export(address).hex())
    assert word_at(memory, target, address + 8) == WORD + 1
    memory.free(address)
    return "opened by another process on this device"


def as_peer(memory: DeviceMemory, target: Target, handle: str) -> None:
    """The other process of :func:`peers` and :func:`waiting`."""
    address = memory.open(bytes.fromhex(handle))
    store(memory, target, address + 8, word_at(memory, target, address) + 1)
    memory.close(address)


def waiting(memory: DeviceMemory, target: Target) -> str:
    """A kernel waits, and a kernel of another process, which the device must let run meanwhile, ends that."""
    if target.interpreted:
        return "a launch waits for its kernel in the interpreter"
    address = memory.allocate(4096)
    store(memory, target, address, WORD)
    found = torch.zeros(2, dtype=torch.int64, device=memory.device)
    wait_word[(1,)](address + 8, WORD + 1, PATIENCE, found.data_ptr(), BACKEND=target.backend, num_warps=1)
    in_another_process("peer", memory.export(address).hex())
    came, waited = found.tolist()
    assert came == 1, f"nothing came within {waited * 1e-9:.0f} s"
    memory.free(address)
    return f"ended after {waited * 1e-9:.1f} s, by another process"


def captures(memory: DeviceMemory, target: Target) -> str:
    """Two captures in a row on one order, replayed."""
    if target.interpreted:
        return "no streams in the interpreter"
    order = GpuOrder(memory.device, memory.capture_of)
    words = torch.zeros(4, dtype=torch.int64, device=memory.device)

    def launch() -> None:
        store_word[(1,)](words.data_ptr(), words.data_ptr() + 16, WORD, BACKEND=target.backend, num_warps=1)

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
        assert int(words[0].item()) == WORD
    return "two graphs"


def clock(memory: DeviceMemory, target: Target) -> str:
    """How fine the clock of the deadlines is."""
    found = torch.zeros(2, dtype=torch.int64, device=memory.device)
    looks = 200 if target.interpreted else 200_000
    clock_steps[(1,)](found.data_ptr(), looks, BACKEND=target.backend, num_warps=1)
    least, total = found.tolist()
    assert total > 0, "the clock stands still"
    return f"steps of {least} ns, a look takes {total / looks:.1f} ns"


def dma_buf(memory: DeviceMemory, target: Target) -> str:
    """What NICs need. That it is missing is no fault where there are none."""
    address = memory.allocate(4 << 20)
    try:
        descriptor, offset = memory.export_dmabuf(address, 4 << 20)
        os.close(descriptor)
        return f"exported, at offset {offset}; {memory.unordered(shown=True) or 'writes of NICs are ordered'}"
    except Exception as error:
        return f"not exported: {error}"
    finally:
        memory.free(address)


#: What another process does for a check, by its first argument.
ROLES: dict[str, Callable[[DeviceMemory, Target, str], None]] = {"peer": as_peer, "segment": as_segment}


def main() -> int:
    """0 when everything does what it should."""
    memory, target = here()
    if len(sys.argv) > 1:
        ROLES[sys.argv[1]](memory, target, sys.argv[2])
        return 0
    checks: tuple[Callable[[DeviceMemory, Target], str], ...] = (
        clock,
        host_memory,
        segments,
        device_memory,
        peers,
        waiting,
        captures,
        dma_buf,
    )
    name = "interpreter" if target.interpreted else torch.cuda.get_device_name(memory.device)
    found: dict[str, Any] = {"device": name, "triton": triton.__version__}
    failed = 0
    for check in checks:
        started = time.monotonic()
        # where one never ends, this says which
        print(f"probe: {check.__name__}", file=sys.stderr, flush=True)
        try:
            said = check(memory, target)
        except Exception as error:
            failed += 1
            said = f"FAILED: {type(error).__name__}: {error}"
            traceback.print_exc()
        found[check.__name__] = f"{said} ({time.monotonic() - started:.1f} s)"
    print(json.dumps(found, indent=1))
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
