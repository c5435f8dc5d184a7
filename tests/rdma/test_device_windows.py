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

from tests.support import ll_cases
from tests.support.contract import Port
from tests.support.memory_endpoints import connect, endpoint
from tests.support.nic_ranks import efa_nics, install, roce_nics, run_ranks
from tests.support.provider.provider_library import MemoryNetwork
from tests.support.provider.provider_srd_library import SrdNetwork
from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.runtime import Runtime
from uccl_ep_serving.errors import BootstrapError, TransportError
from uccl_ep_serving.gpu.memory import InterpretedMemory
from uccl_ep_serving.gpu.window import DeviceSpace, DeviceWindow
from uccl_ep_serving.modes.low_latency_cpu import LowLatency
from uccl_ep_serving.proxy.transport.base import ACCEPTED, ARRIVED, SENT, DeviceReach
from uccl_ep_serving.proxy.transport.nic import window as nic_window
from uccl_ep_serving.proxy.transport.nic.efa import EfaEndpoint

HOST_BYTES, SPLIT = 1 << 17, 1 << 16


def bytes_at(address: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


class Pair:
    """Two connected endpoints whose windows begin in device memory."""

    def __init__(self, kind: str) -> None:
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
            return endpoint(self.network, rank, self.windows[rank], ranks=2)
        return EfaEndpoint(
            rank,
            2,
            0,
            window=self.windows[rank].ctypes.data,
            window_bytes=HOST_BYTES,
            devices=["efa0", "efa1"],
            settings=Settings(),
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


@pytest.fixture(params=["roce", "efa"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    for one in pair.endpoints:
        one.release_device()
    for address in pair.device:
        pair.memory.free(address)
    for one in pair.endpoints:
        one.close()
    assert not +pair.network.objects


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


class OnDevice:
    """A Runtime as low-latency mode sees it, with the tables of a space whose window is device memory."""

    def __init__(self, runtime: Runtime, memory: InterpretedMemory) -> None:
        self._runtime, self._memory = runtime, memory
        self._epoch, self._space = -1, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    @property
    def context(self) -> int:
        """The device's context block of the present epoch, made as ``LowLatencyGpu`` makes it."""
        runtime = self._runtime
        if self._epoch != runtime.epoch:
            window = DeviceWindow(
                self._memory,
                runtime.layout,
                runtime.rank,
                runtime.exchange,
                runtime.nic_peers,
            )
            self._space = DeviceSpace(runtime.space, self._memory, window)
            runtime.before_unmapping(self._space.close)
            runtime.register_device_window(
                window.own, window.nbytes, self._memory.export_dmabuf, self._memory.unordered(False)
            )
            self._epoch = runtime.epoch
            self.window_address = window.own
        assert self._space is not None
        return self._space.context

    @property
    def window(self) -> int:
        """Address of the window that kernels work on."""
        assert self.context
        return self.window_address


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
        assert not runtime.window_bytes[: runtime.layout.direct_flags].any(), "host memory was used"
        return len(cases)

    with host(kind, monkeypatch, 2) as (network, here):
        assert run_ranks(network, here, settings, body) == [3, 3]


def test_a_rank_whose_memory_no_nic_takes_is_named_on_all_and_the_group_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings(transport="roce", direct=False, timeout=30.0, heap_bytes=8 << 20, round_bytes=1 << 20)
    case = ll_cases.Case(ranks=2, experts=8, counts=(8, 3))
    given = case.inputs()

    def body(runtime: Runtime) -> str:
        memory = InterpretedMemory()
        address = memory.allocate(4096)
        objection = "cuda:0 does not order the writes of NICs" if runtime.rank == 1 else ""
        with pytest.raises(TransportError) as caught:
            runtime.register_device_window(address, 4096, memory.export_dmabuf, objection)
        memory.free(address)
        low_latency = LowLatency(runtime)
        ll_cases.check_combined(case, given, runtime.rank, ll_cases.run_rank(case, low_latency, runtime.rank, given))
        return str(caught.value)

    with host("roce", monkeypatch, 2) as (network, here):
        for words in run_ranks(network, here, settings, body):
            assert "rank 1: cuda:0 does not order the writes of NICs. Use UCCL_EP_WINDOW=host" in words
