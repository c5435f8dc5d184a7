"""Segments leave nothing behind; the heap leases ranges to tensors and gets them back."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
import select
import subprocess
import weakref
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from uccl_ep_serving.data_plane.segments import HeapAllocator, Segment
from uccl_ep_serving.errors import ConfigError, TransportError
from uccl_ep_serving.native import descriptors


def test_segment_is_shared_and_has_no_name() -> None:
    name = f"test_segment_{os.getpid()}"
    one = Segment.create(name, 8192)
    two = Segment.attach(os.dup(one.fd), 8192)
    one.bytes[5] = 7
    assert two.bytes[5] == 7
    assert not [found for found in os.listdir("/dev/shm") if name in found]
    one.close()
    two.close()
    assert one.fd == two.fd == -1


def test_a_short_segment_is_refused() -> None:
    one = Segment.create("test", 4096)
    with pytest.raises(ConfigError, match="4096 bytes where 8192"):
        Segment.attach(os.dup(one.fd), 8192)


def test_a_segment_cannot_be_shortened_under_those_who_map_it() -> None:
    one = Segment.create("test", 8192)
    with pytest.raises(PermissionError):
        os.ftruncate(one.fd, 4096)
    plain = os.memfd_create("test")
    os.ftruncate(plain, 8192)
    with pytest.raises(ConfigError, match="not sealed"):
        Segment.attach(plain, 8192)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(plain)
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(ConfigError, match="not sealed"):
        Segment.attach(reader, 1)


@pytest.mark.parametrize(
    ("number", "step"),
    [
        (errno.EPERM, "seccomp profile"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EMFILE, "open files"),
        (errno.ENOMEM, "memory limit"),
    ],
)
def test_memory_that_is_refused_is_a_transport_error(number: int, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "memfd", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(TransportError, match=rf"{os.strerror(number)}\. Next step: .*{step}"):
        Segment.create("test", 4096)


def test_a_python_that_knows_neither_memfds_nor_pidfds_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built against an old C library, as conda's are."""
    for name in [name for name in dir(os) if name.startswith("MFD_")] + ["memfd_create", "pidfd_open"]:
        monkeypatch.delattr(os, name)
    for name in [name for name in dir(fcntl) if "SEAL" in name]:
        monkeypatch.delattr(fcntl, name)
    segment = Segment.create("test", 4096)
    Segment.attach(os.dup(segment.fd), 4096).close()
    segment.close()
    child = subprocess.Popen(["true"])
    ended = descriptors.open_process(child.pid)
    assert select.select([ended], [], [], 10)[0] == [ended]
    os.close(ended)
    child.wait()
    with pytest.raises(ProcessLookupError):
        descriptors.open_process(child.pid)


def test_memory_stays_mapped_while_a_tensor_lives() -> None:
    segment = Segment.create("test", 8192)
    heap = HeapAllocator(segment.bytes, 0, 8192)
    offset = heap.take(100)
    assert offset is not None
    tensor = heap.tensor(offset, 10, 10, torch.uint8)
    segment.close()
    tensor.fill_(3)
    assert int(tensor.sum()) == 300


def test_a_lease_ends_with_the_last_view() -> None:
    segment = Segment.create("test", 1 << 20)
    heap = HeapAllocator(segment.bytes, 4096, 1 << 16)
    offset = heap.take(1 << 16)
    assert offset == 4096
    assert heap.take(1) is None
    tensor = heap.tensor(offset, 4, 1 << 13, torch.bfloat16)
    assert tensor.shape == (4, 1 << 13)
    view = tensor.view(torch.uint8)[2:, 10:20]
    del tensor
    gc.collect()
    assert heap.take(1) is None
    del view
    gc.collect()
    assert heap.free_bytes == 1 << 16


def test_leases_keep_neither_the_heap_nor_its_window() -> None:
    segment = Segment.create("test", 8192)
    heap = HeapAllocator(segment.bytes, 0, 8192)
    offset = heap.take(4096)
    assert offset is not None
    tensor = heap.tensor(offset, 64, 64, torch.uint8)
    seen = weakref.ref(heap)
    gc.disable()  # a cycle would end with the next collection only
    try:
        del heap
        assert seen() is None
    finally:
        gc.enable()
    del tensor
    gc.collect()


def test_heap_merges_whatever_the_order_of_return() -> None:
    segment = Segment.create("test", 1 << 20)
    for seed in range(20):
        heap = HeapAllocator(segment.bytes, 0, 1 << 20)
        rng = random.Random(seed)
        taken: dict[int, int] = {}
        for _ in range(200):
            if taken and rng.random() < 0.5:
                offset = rng.choice(list(taken))
                heap.give(offset)
                del taken[offset]
            else:
                size = rng.randrange(1, 40000)
                offset = heap.take(size)
                if offset is not None:
                    assert all(offset + size <= o or offset >= o + s for o, s in taken.items())
                    taken[offset] = size
        for offset in list(taken):
            heap.give(offset)
        assert heap.free_bytes == 1 << 20
        assert heap.take(1 << 20) == 0


def mapping(address: int, file: str) -> dict[str, str]:
    """What /proc/self/``file`` (smaps, numa_maps) says of the mapping that begins at ``address``, by name."""
    lines = Path("/proc/self", file).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{address:x}"))
    if file == "numa_maps":
        return {"policy": lines[start].split()[1]}
    rest = (line.split(":", 1) for line in lines[start + 1 : start + 25] if ":" in line)
    return {name: value.strip() for name, value in rest}


def test_a_window_prefers_the_memory_of_a_node() -> None:
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("a kernel without NUMA")
    one = Segment.create("test", 1 << 20, huge=True, node=0)
    assert one.pages.endswith("on NUMA node 0")
    assert mapping(one.address, "numa_maps")["policy"].startswith("prefer")
    one.bytes[:] = 1
    # a node that is not there is done without
    other = Segment.create("test", 4096, node=1000)
    assert other.pages == ""
    other.bytes[:] = 1


def test_huge_pages_are_done_without_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    one = Segment.create("test", 1 << 40, huge=True)
    assert one.pages == ""
    one.bytes[:4096] = 1
    one.close()
    # a container may have fewer than the system
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "no space")))
    two = Segment.create("test", 5 << 20, huge=True)
    assert two.pages == ""
    two.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_huge_pages_where_the_system_has_set_some_aside() -> None:
    if int(Path("/proc/sys/vm/nr_hugepages").read_text()) < 8:
        pytest.skip("vm.nr_hugepages is below 8")
    one = Segment.create("test", (4 << 20) + 4096, huge=True)
    assert one.pages == "of 2 MiB pages"
    two = Segment.attach(os.dup(one.fd), (4 << 20) + 4096)
    for segment in (one, two):
        assert mapping(segment.address, "smaps")["KernelPageSize"] == "2048 kB"
        assert segment.bytes.nbytes == (4 << 20) + 4096
    one.bytes[-1] = 7
    assert two.bytes[-1] == 7
    with pytest.raises(PermissionError):
        os.ftruncate(one.fd, 2 << 20)
    address = one.address
    one.close()
    two.close()
    del one, two, segment
    gc.collect()
    assert not [line for line in Path("/proc/self/smaps").read_text().splitlines() if line.startswith(f"{address:x}-")]


@pytest.mark.parametrize("huge", [False, True])
def test_what_is_forgotten_returns_to_the_system(huge: bool) -> None:
    one = Segment.create("test", 4 << 20, huge=huge)
    two = Segment.attach(os.dup(one.fd), 4 << 20)
    one.bytes[:] = 7
    assert os.fstat(one.fd).st_blocks >= (4 << 20) // 512
    one.forget()
    assert os.fstat(one.fd).st_blocks == 0
    assert not two.bytes.any()
