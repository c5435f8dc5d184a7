"""Windows in device memory over NICs in memory: registered one way or the other, split and used at both ends.

The device is :class:`InterpretedMemory`: memory of its own, exported by a descriptor as a GPU's is.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import ll_cases
from tests.support.contract import Port
from tests.support.memory_endpoints import connect, endpoint
from tests.support.nic_ranks import efa_nics, install, roce_nics, run_ranks
from tests.support.provider import provider_network as net
from tests.support.provider.provider_library import MemoryNetwork
from tests.support.provider.provider_srd_library import SrdNetwork
from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.gpu_direct import Gpu
from uccl_ep_serving.data_plane.kernel_space import KernelSpace
from uccl_ep_serving.data_plane.runtime import Runtime
from uccl_ep_serving.errors import BootstrapError, ConfigError, Evicted, TransportError, after_eviction
from uccl_ep_serving.gpu import context as gpu_context
from uccl_ep_serving.gpu.context import GpuContext
from uccl_ep_serving.gpu.memory import InterpretedMemory
from uccl_ep_serving.gpu.streams import HostOrder
from uccl_ep_serving.gpu.window import DeviceSpace, DeviceWindow
from uccl_ep_serving.modes.low_latency_cpu import LowLatency
from uccl_ep_serving.proxy.transport.base import ACCEPTED, ARRIVED, SENT, DeviceReach
from uccl_ep_serving.proxy.transport.nic import window as nic_window
from uccl_ep_serving.proxy.transport.nic.efa import EfaEndpoint
from uccl_ep_serving.proxy.transport.nic.loopback import flush_by_reading
from uccl_ep_serving.proxy.transport.verbs import codes
from uccl_ep_serving.proxy.transport.verbs.objects import MemoryRegion

HOST_BYTES, SPLIT = 1 << 17, 1 << 16


def bytes_at(address: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


class Pair:
    """Two connected endpoints whose windows begin in device memory."""

    def __init__(self, kind: str, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self.network: Any = SrdNetwork(2, 2) if kind == "efa" else MemoryNetwork(2, rails=2)
        self.memory = InterpretedMemory()
        self.windows = [np.zeros(HOST_BYTES, np.uint8) for _ in range(2)]
        self.device = [self.memory.allocate(SPLIT) for _ in range(2)]
        self.endpoints: list[Any] = [self._endpoint(kind, rank) for rank in range(2)]
        if kind == "efa":
            addresses = [one.address() for one in self.endpoints]
            for rank, one in enumerate(self.endpoints):
                one.connect([None if peer == rank else a for peer, a in enumerate(addresses)], time.monotonic() + 5)
        else:
            connect(self.endpoints)
        self.ports = [Port(self, rank) for rank in range(2)]  # type: ignore[arg-type]

    def _endpoint(self, kind: str, rank: int) -> Any:
        if kind == "roce":
            return endpoint(self.network, rank, self.windows[rank], ranks=2, settings=self._settings)
        return EfaEndpoint(
            rank,
            2,
            0,
            window=self.windows[rank].ctypes.data,
            window_bytes=HOST_BYTES,
            devices=["efa0", "efa1"],
            settings=self._settings,
            library=self.network.library(rank),
        )

    def offer(self, rank: int, export: Callable[[int, int], tuple[int, int]] | None = None) -> bytes:
        given: bytes = self.endpoints[rank].offer_device(self.device[rank], SPLIT, export or self.memory.export_dmabuf)
        return given

    def lend(self) -> None:
        offers = [self.offer(rank) for rank in range(2)]
        self.endpoints[0].accept_device([None, offers[1]])
        self.endpoints[1].accept_device([offers[0], None])

    def write(self, source: int, target: int, nbytes: int, stream: int = 8) -> None:
        assert self.ports[0].post(1, source, target, nbytes, stream << 12, 3, stream) == ACCEPTED
        self.ports[0].flush()
        seen: set[int] = set()
        deadline = time.monotonic() + 5
        while seen != {ARRIVED, SENT}:
            seen |= {event.kind for port in self.ports for event in port.poll()}
            assert time.monotonic() < deadline, seen


@contextlib.contextmanager
def _connected(pair: Pair) -> Iterator[Pair]:
    """Yields ``pair`` and takes it down: nothing of it is left in its network."""
    yield pair
    for one in pair.endpoints:
        one.release_device()
    for address in pair.device:
        pair.memory.free(address)
    for one in pair.endpoints:
        one.close()
    assert not +pair.network.objects


@pytest.fixture(params=["roce", "efa"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with _connected(Pair(request.param)) as pair:
        yield pair


@pytest.mark.parametrize("peer_memory", [True, False], ids=["peer memory", "dma-buf"])
def test_offsets_below_the_split_are_device_memory_at_both_ends(
    pair: Pair, peer_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a chunk is 1 GiB, and a test must not need that much
    monkeypatch.setattr(nic_window, "CHUNK_SHIFT", 14)
    if not peer_memory:
        pair.network.device_memory = [(address, SPLIT) for address in pair.device]
    before = pair.network.objects["mr"]
    pair.lend()
    rails = 2
    assert pair.network.objects["mr"] - before == 2 * rails * (1 if peer_memory else SPLIT >> 14)
    assert isinstance(pair.endpoints[0], DeviceReach)
    here, there = (bytes_at(address, SPLIT) for address in pair.device)
    here[:] = np.arange(SPLIT, dtype=np.uint32).astype(np.uint8)
    for stream in (8, 9):  # one on each rail
        there[:] = 0
        pair.write(100 * 16, 200 * 16, 40000, stream)
        assert np.array_equal(there[3200:43200], here[1600:41600])
    assert not pair.windows[1].any()
    pair.windows[0][SPLIT:] = 7
    pair.write(SPLIT, SPLIT + 64, 4096)
    assert (pair.windows[1][SPLIT + 64 : SPLIT + 64 + 4096] == 7).all()
    for source, target, nbytes in ((0, SPLIT, 64), (SPLIT, 0, 64), (SPLIT - 32, 0, 64), (0, SPLIT - 32, 64)):
        assert pair.ports[0].post(1, source, target, nbytes, 0, 4) == -errno.EINVAL
    pair.write(0, 0, 0)
    pair.write(0, HOST_BYTES, 0)


def test_no_write_into_device_memory_may_pass_another(pair: Pair) -> None:
    """Host windows have relaxed ordering, device windows have not, whichever way they are reached."""
    asked: list[int] = []
    relaxed = codes.ACCESS_RELAXED_ORDERING
    register = MemoryRegion.__init__

    def noted(self: Any, pd: Any, start: int, nbytes: int, access: int, **more: Any) -> None:
        asked.append(access & relaxed)
        register(self, pd, start, nbytes, access, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryRegion, "__init__", noted)
        pair.offer(0)
        pair.network.device_memory = [(pair.device[1], SPLIT)]
        pair.offer(1)
        assert asked
        assert not any(asked)
        nic_window.register_host(pair.endpoints[0]._rails[0].pd, pair.windows[0].ctypes.data, HOST_BYTES).close()
        assert asked[-1] == relaxed


@pytest.mark.parametrize("kind", ["roce", "efa"])
@pytest.mark.parametrize("says", [True, False], ids=["the NIC says so", "of ordinary pages"])
def test_a_long_host_window_is_registered_in_chunks(kind: str, says: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that begins at the end of one lies whole in it; both ends look up the key of its place."""
    monkeypatch.setattr(nic_window, "CHUNK_SHIFT", 14)
    if says:
        query_device = MemoryNetwork._query_device

        def query(self: Any, index: int, context: int, found: int) -> int:
            self.traits[index].max_mr_size = HOST_BYTES - 1
            return query_device(self, index, context, found)

        monkeypatch.setattr(MemoryNetwork, "_query_device", query)
    else:
        monkeypatch.setattr(nic_window, "WHOLE_BYTES", HOST_BYTES - 1)
    with _connected(Pair(kind)) as pair:
        assert [len(rail.region.regions) for one in pair.endpoints for rail in one._rails] == [HOST_BYTES >> 14] * 4
        pair.windows[0][:] = np.arange(HOST_BYTES, dtype=np.uint32).astype(np.uint8)
        for source, target in (((1 << 14) - 16, (3 << 14) - 16), (5 << 14, (2 << 14) - 16)):
            pair.write(source, target, 40000)
            assert np.array_equal(pair.windows[1][target : target + 40000], pair.windows[0][source : source + 40000])
        pair.write(0, HOST_BYTES, 0)


def test_a_host_window_that_is_let_go_is_registered_no_more(pair: Pair) -> None:
    before = pair.network.objects["mr"]
    pair.lend()
    lent = pair.network.objects["mr"] - before
    for one in pair.endpoints:
        one.release_host()
    assert pair.network.objects["mr"] == before + lent - 4
    here, there = (bytes_at(address, SPLIT) for address in pair.device)
    here[:] = 9
    pair.write(0, 64, 4096)
    assert (there[64 : 64 + 4096] == 9).all()
    # nothing of it is asked for by a write that carries nothing
    pair.write(0, 0, 0)
    assert {one.device_way() for one in pair.endpoints} == {"peer memory"}


def test_before_and_after_everything_is_host_memory(pair: Pair) -> None:
    pair.windows[0][:] = 5
    pair.write(0, 0, 64)
    pair.lend()
    for one in pair.endpoints:
        one.release_device()
    pair.write(64, 64, 64)
    assert (pair.windows[1][:128] == 5).all()


def test_no_way_is_refused_with_every_attempt(pair: Pair) -> None:
    pair.network.device_memory = [(pair.device[0], SPLIT)]

    def export(start: int, nbytes: int) -> tuple[int, int]:
        raise TransportError("cuda:0 exports no dma-buf of its memory: operation not supported (801)")

    with pytest.raises(TransportError, match=r"GPUDirect works in no way.*nvidia-peermem.*exports no dma-buf"):
        pair.offer(0, export)


def test_an_offer_of_another_size_names_its_rank(pair: Pair) -> None:
    pair.offer(0)
    strange = pair.endpoints[1].offer_device(pair.device[1], SPLIT // 2, pair.memory.export_dmabuf)
    with pytest.raises(BootstrapError, match=r"device window of rank 1.*32768 bytes over 2 rails, 65536 over 2"):
        pair.endpoints[0].accept_device([None, strange])
    with pytest.raises(BootstrapError, match=r"device window of rank 1.*offers no device memory"):
        pair.endpoints[0].accept_device([None, b"?"])


def test_a_second_window_is_refused_by_name(pair: Pair) -> None:
    pair.lend()
    held = pair.network.objects["mr"]
    with pytest.raises(TransportError, match=r"0: a window in device memory is registered already\. Likely cause"):
        pair.offer(0)
    assert pair.network.objects["mr"] == held
    pair.endpoints[0].release_device()
    pair.offer(0)


class SpaceOver:
    """A KernelSpace whose kernels see another context block."""

    def __init__(self, space: KernelSpace, context: int) -> None:
        self._space, self.context = space, context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._space, name)


class OnDevice:
    """A Runtime as low-latency mode of CPU kernels sees it, over the tables of a space whose window is device memory,
    made as ``GpuContext`` makes them."""

    def __init__(self, runtime: Runtime, memory: InterpretedMemory) -> None:
        self._runtime, self._memory = runtime, memory
        self._epoch, self._space = -1, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    @property
    def space(self) -> Any:
        runtime = self._runtime
        if self._epoch != runtime.epoch:
            window = DeviceWindow(self._memory, runtime.layout, runtime.rank, runtime.exchange, runtime.nic_peers)
            runtime.before_unmapping(window.close)
            runtime.register_device_window(window.own, window.nbytes, self._memory.export_dmabuf)
            self._space = DeviceSpace(runtime.space, self._memory, window)
            runtime.before_unmapping(self._space.close)
            self._epoch = runtime.epoch
        assert self._space is not None
        return SpaceOver(runtime.space, self._space.context)


@contextlib.contextmanager
def host(kind: str, monkeypatch: pytest.MonkeyPatch, ranks: int) -> Iterator[tuple[Any, Any]]:
    if kind == "efa":
        network: Any = SrdNetwork(ranks, 2, seed=3)
        topology: Any = efa_nics(2)
    else:
        network = MemoryNetwork(ranks, rails=2, half=0.2)
        topology = lambda rank: roce_nics(network, rank)  # noqa: E731
    with install(network, monkeypatch, topology, kind) as here:
        yield network, here


@pytest.mark.parametrize("kind", ["roce", "efa"])
def test_low_latency_from_device_window_to_device_window(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole ranks: kernels fill and read device memory, NICs move it, the host windows stay untouched."""
    settings = Settings(transport=kind, direct=False, timeout=30.0, heap_bytes=8 << 20, round_bytes=1 << 20)
    cases = [ll_cases.Case(ranks=2, experts=8, counts=(8, 3), seed=seed) for seed in range(3)]
    inputs = [case.inputs() for case in cases]

    def body(runtime: Runtime) -> int:
        memory = InterpretedMemory()
        allocate = memory.allocate

        def noted(nbytes: int) -> int:
            address = allocate(nbytes)
            network.device_memory.append((address, nbytes))
            return address

        memory.allocate = noted  # type: ignore[method-assign]
        low_latency = LowLatency(OnDevice(runtime, memory))  # type: ignore[arg-type]
        for case, given in zip(cases, inputs, strict=True):
            combined = ll_cases.run_rank(case, low_latency, runtime.rank, given)
            ll_cases.check_combined(case, given, runtime.rank, combined)
        assert not runtime.window_bytes.any(), "host memory was used"
        return len(cases)

    with host(kind, monkeypatch, 2) as (network, here):
        assert run_ranks(network, here, settings, body) == [3, 3]


@pytest.fixture
def reading() -> Iterator[Pair]:
    """Two connected endpoints whose NICs read device memory back."""
    with _connected(Pair("roce", Settings(nic_flush="read"))) as pair:
        yield pair


def test_each_nic_reads_a_word_of_device_memory_back(reading: Pair) -> None:
    before = +reading.network.objects
    assert reading.endpoints[0].fence == 0
    reading.lend()
    fence = reading.endpoints[0].fence
    reads = reading.network.word(net.READS)
    assert flush_by_reading(fence) == 0
    assert reading.network.word(net.READS) - reads == 2
    # its completions are not those of the data path, which goes on
    here, there = (bytes_at(address, SPLIT) for address in reading.device)
    here[:] = 3
    reading.write(0, 64, 4096)
    assert (there[64 : 64 + 4096] == 3).all()
    reading.endpoints[0].release_device()
    reading.endpoints[1].release_device()
    assert reading.endpoints[0].fence == 0
    assert +reading.network.objects == before


def test_a_read_that_fails_is_the_fences_result(reading: Pair) -> None:
    reading.lend()
    fence = reading.endpoints[1].fence
    loopback = reading.endpoints[1]._loopbacks[1]
    reading.network.fail(loopback._qp.address, 1, codes.REM_ACCESS_ERR)
    assert flush_by_reading(fence) == 0
    assert flush_by_reading(fence) == codes.REM_ACCESS_ERR
    # and one that can be posted no more
    assert flush_by_reading(fence) != 0


def test_efa_says_that_it_reads_nothing_back() -> None:
    pair = Pair("efa", Settings(nic_flush="read"))
    with pytest.raises(TransportError, match="UCCL_EP_NIC_FLUSH=read: efa has no such flush"):
        pair.offer(0)
    for one in pair.endpoints:
        one.release_device()
        one.close()
    for address in pair.device:
        pair.memory.free(address)


class Refusing(InterpretedMemory):
    """Device memory that NICs take up to ``most`` bytes of, by dma-buf only."""

    def __init__(self, network: Any, most: int) -> None:
        super().__init__()
        self._network, self._most = network, most

    def allocate(self, nbytes: int) -> int:
        address = super().allocate(nbytes)
        self._network.device_memory.append((address, nbytes))
        return address

    def free(self, address: int) -> None:
        # other memory may lie there next
        self._network.device_memory[:] = [one for one in self._network.device_memory if one[0] != address]
        super().free(address)

    def export_dmabuf(self, address: int, nbytes: int) -> tuple[int, int]:
        if nbytes > self._most:
            raise TransportError("cuda:0 exports no dma-buf of its memory: out of memory (2)")
        return super().export_dmabuf(address, nbytes)


def test_a_rank_whose_memory_no_nic_takes_is_named_on_all_and_the_group_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings(transport="roce", direct=False, timeout=30.0, heap_bytes=8 << 20, round_bytes=1 << 20)
    case = ll_cases.Case(ranks=2, experts=8, counts=(8, 3))
    given = case.inputs()

    def body(runtime: Runtime) -> str:
        memory = Refusing(network, 0 if runtime.rank == 1 else 1 << 30)
        address = memory.allocate(4096)
        with pytest.raises(TransportError) as caught:
            runtime.register_device_window(address, 4096, memory.export_dmabuf)
        memory.free(address)
        low_latency = LowLatency(runtime)
        ll_cases.check_combined(case, given, runtime.rank, ll_cases.run_rank(case, low_latency, runtime.rank, given))
        return str(caught.value)

    with host("roce", monkeypatch, 2) as (network, here):
        for words in run_ranks(network, here, settings, body):
            assert "rank 1: mem1r1: GPUDirect works in no way" in words
            assert "exports no dma-buf of its memory: out of memory (2)" in words


class Placed(OnDevice):
    """The same over what a GpuContext has placed."""

    def __init__(self, runtime: Runtime, gpu: GpuContext) -> None:
        self._runtime, self._gpu = runtime, gpu

    @property
    def space(self) -> Any:
        return SpaceOver(self._runtime.space, self._gpu.space().context)


@pytest.mark.parametrize("kind", ["roce", "efa"])
@pytest.mark.parametrize("most", [1 << 40, 4 << 20, 0], ids=["all", "only a probe", "none"])
def test_auto_asks_the_nics_and_goes_on_with_what_they_do(
    kind: str, most: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks that only NICs connect: device memory, or host memory with one warning for all of them, and right rows."""
    settings = Settings(transport=kind, node_ranks=1, timeout=30.0, heap_bytes=8 << 20, round_bytes=1 << 20)
    cases = [ll_cases.Case(ranks=2, experts=8, counts=(8, 3), seed=seed) for seed in range(2)]
    inputs = [case.inputs() for case in cases]
    monkeypatch.setattr(gpu_context, "memory_of", lambda *_: memories[here.rank])
    memories: list[Any] = []

    def body(runtime: Runtime) -> tuple[bool, int]:
        gpu = GpuContext(runtime, torch.device("cpu"), HostOrder())
        low_latency = LowLatency(Placed(runtime, gpu))  # type: ignore[arg-type]
        for case, given in zip(cases, inputs, strict=True):
            combined = ll_cases.run_rank(case, low_latency, runtime.rank, given)
            ll_cases.check_combined(case, given, runtime.rank, combined)
        plane = runtime._watch.present
        registered = sum(rail.region.regions[0].address != 0 for row in plane.endpoints for rail in row[0]._rails)
        return bool(runtime.window_bytes.any()), registered

    with host(kind, monkeypatch, 2) as (network, here):
        memories += [Refusing(network, most) for _ in range(2)]
        gpus = [Gpu(lambda rank=rank: memories[rank]) for rank in range(2)]  # type: ignore[misc]
        for used, registered in run_ranks(network, here, settings, body, gpus=gpus):
            # only the window in use is registered
            assert (used, registered) == ((False, 0) if most > 1 << 30 else (True, 1))
    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    if most > 1 << 30:
        assert not warned
    else:
        (words,) = warned
        assert "windows lie in host memory" in words
        assert "GPUDirect works in no way" in words
        assert ("registering device windows" in words) == (most > 0)


def test_whole_ranks_read_back_before_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(
        transport="roce", node_ranks=1, timeout=30.0, heap_bytes=8 << 20, round_bytes=1 << 20, nic_flush="read"
    )
    case = ll_cases.Case(ranks=2, experts=8, counts=(8, 3))
    given = case.inputs()
    monkeypatch.setattr(gpu_context, "memory_of", lambda *_: InterpretedMemory())

    def body(runtime: Runtime) -> None:
        low_latency = LowLatency(Placed(runtime, GpuContext(runtime, torch.device("cpu"), HostOrder())))  # type: ignore[arg-type]
        ll_cases.check_combined(case, given, runtime.rank, ll_cases.run_rank(case, low_latency, runtime.rank, given))

    with host("roce", monkeypatch, 2) as (network, here):
        run_ranks(network, here, settings, body, gpus=[Gpu(InterpretedMemory)] * 2)
        assert network.word(net.READS) >= 2


class Once(Refusing):
    """Device memory whose driver fails once, in ``fails``, with what ends nothing but this call."""

    def __init__(self, network: Any, fails: str) -> None:
        super().__init__(network, 1 << 40)
        self._fails = fails

    def map_host(self, address: int, nbytes: int) -> int:
        if self._fails:
            self._fails = ""
            raise RuntimeError("CUDA error: unspecified launch failure")
        return super().map_host(address, nbytes)


def test_a_rank_that_cannot_set_up_its_gpu_is_named_on_all_and_nothing_is_registered_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the windows were shared and registered: all ranks leave them, and begin a new epoch together."""
    settings = Settings(transport="roce", node_ranks=1, timeout=20.0, heap_bytes=8 << 20, round_bytes=1 << 20)
    monkeypatch.setattr(gpu_context, "memory_of", lambda *_: memories[here.rank])
    memories: list[Any] = []

    def body(runtime: Runtime) -> tuple[str, str, int]:
        gpu = GpuContext(runtime, torch.device("cpu"), HostOrder())
        began = time.monotonic()
        with pytest.raises(ConfigError) as caught:
            gpu.space()
        assert time.monotonic() - began < settings.timeout / 2
        stale = runtime.stale
        runtime.rebuild(None)
        assert gpu.space().on_device
        assert gpu.space() is gpu.space()
        assert runtime._watch.present.device_window
        return str(caught.value), stale, runtime.epoch

    with host("roce", monkeypatch, 2) as (network, here):
        memories += [Once(network, "map_host" if rank == 1 else "") for rank in range(2)]
        gpus = [Gpu(lambda rank=rank: memories[rank]) for rank in range(2)]  # type: ignore[misc]
        for words, stale, epoch in run_ranks(network, here, settings, body, gpus=gpus):
            assert "rank 1 could not set up its GPU's memory: RuntimeError: CUDA error: unspecified launch" in words
            assert "The group stays usable" in words
            assert (stale, epoch) == ("not all ranks could set up their GPU's memory", 1)
        # of the epochs that are gone, and of this one, which its Runtime has closed
        assert not any(memory._owned or memory._opened for memory in memories)


def test_a_rank_that_is_interrupted_while_all_set_up_their_gpus_takes_part_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings(transport="roce", node_ranks=1, timeout=20.0, heap_bytes=8 << 20, round_bytes=1 << 20)
    monkeypatch.setattr(gpu_context, "memory_of", lambda *_: memories[here.rank])
    memories: list[Any] = []

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    def body(runtime: Runtime) -> str:
        gpu = GpuContext(runtime, torch.device("cpu"), HostOrder())
        with pytest.raises(KeyboardInterrupt if runtime.rank == 1 else ConfigError) as caught:
            gpu.space()
        if runtime.rank != 1:
            return str(caught.value)
        with pytest.raises(Evicted) as later:
            runtime.check("dispatch")
        return str(later.value)

    with host("roce", monkeypatch, 2) as (network, here):
        memories += [Refusing(network, 1 << 40) for _ in range(2)]
        monkeypatch.setattr(memories[1], "map_host", interrupted)
        gpus = [Gpu(lambda rank=rank: memories[rank]) for rank in range(2)]  # type: ignore[misc]
        told, broken = run_ranks(network, here, settings, body, gpus=gpus)
    assert "rank 1 could not set up its GPU's memory: KeyboardInterrupt" in told
    # it knows that by itself, or it has heard of it from rank 0 before
    own = "it failed (KeyboardInterrupt)"
    assert broken in {
        f"dispatch, rank 1: this rank takes part no more: {why}. {after_eviction()}"
        for why in (own, f"ranks [0] have gone on without it ({own})")
    }
