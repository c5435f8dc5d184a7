"""What a GPU and its NICs can do for windows in GPU memory: asked of NICs in memory, told, and settled by all ranks."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from tests.support.nic_ranks import roce_nics
from tests.support.provider.provider_library import MemoryNetwork
from uccl_ep_serving.cli.doctor.findings import Finding, Status
from uccl_ep_serving.cli.doctor.transports import examine_nic_transports
from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane import gpu_direct
from uccl_ep_serving.data_plane.gpu_direct import Gpu, GpuReach, NicWrites, cuda_writes
from uccl_ep_serving.data_plane.nics import HostNics
from uccl_ep_serving.errors import ProtocolError, TransportError
from uccl_ep_serving.gpu.memory import InterpretedMemory
from uccl_ep_serving.proxy.transport.select import Offer


@pytest.mark.parametrize(
    ("ordering", "major", "coherent", "flushes", "refused", "across", "flush", "words"),
    [
        (200, 9, False, True, False, True, 0, "no flush (cudaDevAttrGPUDirectRDMAWritesOrdering is 200)"),
        (100, 9, False, True, False, False, 0, "hierarchy off, because other GPUs may read older bytes"),
        (200, 8, False, True, False, True, 200, "a flush before counts (it is older than sm_90)"),
        (100, 8, False, True, False, False, 100, "a flush before counts (it is older than sm_90); hierarchy off"),
        (200, 9, True, True, False, True, 200, "a flush before counts (counts reach it over C2C"),
        (100, 10, True, True, False, False, 100, "over C2C"),
        (0, 9, False, True, False, False, 100, "a flush before counts (cudaDevAttrGPUDirectRDMAWritesOrdering is 0)"),
        (0, 8, False, False, True, False, 0, "cuda:0 does not order the writes of NICs"),
        (200, 8, False, False, True, False, 0, "older than sm_90), and its driver offers no flush"),
        # who needs no flush is not asked for one
        (200, 10, False, False, False, True, 0, "no flush"),
    ],
)
def test_what_a_nics_write_takes(
    ordering: int,
    major: int,
    coherent: bool,
    flushes: bool,
    refused: bool,
    across: bool,
    flush: int,
    words: str,
) -> None:
    found = cuda_writes("cuda:0", ordering, major, coherent, flushes)
    assert (bool(found.refusal), found.across, found.flush) == (refused, across, flush)
    assert words in found.words


class Memory(InterpretedMemory):
    """A GPU whose memory NICs reach by dma-buf, or not at all."""

    def __init__(self, network: MemoryNetwork, exports: bool = True, writes: NicWrites | None = None) -> None:
        super().__init__()
        self._network, self._exports, self._writes = network, exports, writes or NicWrites()

    def allocate(self, nbytes: int) -> int:
        address = super().allocate(nbytes)
        self._network.device_memory.append((address, nbytes))
        return address

    def export_dmabuf(self, address: int, nbytes: int) -> tuple[int, int]:
        if not self._exports:
            raise TransportError("cuda:0 exports no dma-buf of its memory: operation not supported (801)")
        return super().export_dmabuf(address, nbytes)

    def nic_writes(self) -> NicWrites:
        return self._writes


def probed(memory: Any, network: MemoryNetwork, rails: int = 2) -> tuple[Offer, NicWrites]:
    libraries: Any = {"roce": lambda: network.library(0)}
    nics = HostNics(Settings(), topology=roce_nics(network, 0), libraries=libraries)
    offers, writes = gpu_direct.probe(nics, nics.offers, memory)
    assert not +network.objects
    assert len(offers["roce"].nics) == rails
    return offers["roce"], writes


def test_each_rail_is_asked_with_a_small_allocation() -> None:
    network = MemoryNetwork(1, rails=2)
    memory = InterpretedMemory()
    offer, _ = probed(Gpu(lambda: memory), network)
    assert (offer.gpu, offer.no_gpu) == ("peer memory", "")
    assert not memory._owned
    offer, _ = probed(Gpu(lambda: Memory(network)), network)
    assert (offer.gpu, offer.no_gpu) == ("dma-buf", "")
    assert network.calls["ibv_reg_dmabuf_mr"] == 2
    assert {nbytes for _, nbytes in network.device_memory} == {2 << 20}


def test_why_not_is_told_of_every_rail() -> None:
    network = MemoryNetwork(1, rails=2)
    offer, _ = probed(Gpu(lambda: Memory(network, exports=False)), network)
    assert offer.gpu == ""
    for rail in range(2):
        assert f"mem0r{rail}: GPUDirect works in no way" in offer.no_gpu
    assert "exports no dma-buf of its memory: operation not supported (801)" in offer.no_gpu


def test_one_rail_that_cannot_is_enough() -> None:
    network = MemoryNetwork(1, rails=2)
    network.refuse = {"ibv_reg_dmabuf_mr": errno.EOPNOTSUPP}
    offer, _ = probed(Gpu(lambda: Memory(network)), network)
    assert (offer.gpu, "mem0r0: GPUDirect" in offer.no_gpu, "mem0r1" in offer.no_gpu) == ("", True, False)


def test_what_cannot_be_asked_is_told_too() -> None:
    network = MemoryNetwork(1, rails=2)

    def fails() -> Any:
        raise RuntimeError("no CUDA-capable device")

    assert probed(Gpu(fails), network)[0].no_gpu == "RuntimeError: no CUDA-capable device"
    assert "torch.cuda.set_device" in probed(Gpu(None), network)[0].no_gpu
    refusing = NicWrites("cuda:0 does not order the writes of NICs (x), and its driver offers no flush of them", False)
    offer, writes = probed(Gpu(lambda: Memory(network, writes=refusing)), network)
    assert (offer.no_gpu, writes) == (refusing.refusal, refusing)
    # a rank with CPU tensors has nothing to ask for
    before = network.calls["ibv_alloc_pd"]
    assert probed(None, network)[0].gpu == ""
    assert network.calls["ibv_alloc_pd"] == before


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        # what cuda-bindings raise where they, or the driver, lack a function
        (
            "export_dmabuf",
            RuntimeError('Function "cuMemGetHandleForAddressRange" not found'),
            'RuntimeError: Function "cu',
        ),
        ("export_dmabuf", AttributeError("CUmemRangeHandleType"), "AttributeError: CUmemRangeHandleType"),
        ("nic_writes", ValueError("118 is not a valid cudaDeviceAttr"), "ValueError: 118 is"),
        # nothing is said, which must not read as if nothing stood in the way
        ("allocate", MemoryError(), "MemoryError"),
        ("free", TransportError("cudaFree failed on cuda:0: misaligned address (716)"), "cudaFree failed"),
    ],
)
def test_whatever_the_bindings_raise_means_no_gpu_memory(call: str, error: Exception, words: str) -> None:
    network = MemoryNetwork(1, rails=2)
    memory = Memory(network)

    def fails(*arguments: Any) -> Any:
        raise error

    setattr(memory, call, fails)
    offer, _ = probed(Gpu(lambda: memory), network)
    assert (offer.gpu, words in offer.no_gpu) == ("", True)
    assert gpu_direct.of_rank(Settings(), GPU, {1: "roce"}, {"roce": offer}, NicWrites()).far == offer.no_gpu


GPU = Gpu(None)
OFFERS = {"roce": Offer(("mlx5_0",), gpu="dma-buf"), "efa": Offer(("efa0",), no_gpu="efa0: GPUDirect works in no way")}


@pytest.mark.parametrize(
    ("settings", "gpu", "routes", "expected"),
    [
        (Settings(), GPU, {1: "direct"}, GpuReach(pairs=True)),
        (Settings(), GPU, {1: "direct", 2: "roce"}, GpuReach(pairs=True)),
        (Settings(), GPU, {2: "efa"}, GpuReach(far="efa0: GPUDirect works in no way")),
        (
            Settings(),
            GPU,
            {1: "direct", 2: "tcp", 3: "tcp"},
            GpuReach(far="it reaches ranks 2, 3 over tcp, which reaches no GPU memory", pairs=True),
        ),
        # demanded, it is mapped whatever the proxies do
        (Settings(window="device"), GPU, {1: "shm"}, GpuReach()),
        (Settings(), GPU, {1: "shm"}, GpuReach(far="it reaches ranks 1 over shm, which reaches no GPU memory")),
        (Settings(direct=False), GPU, {1: "roce"}, GpuReach(near="UCCL_EP_DIRECT=0")),
        (Settings(), None, {1: "direct"}, GpuReach(near="it serves CPU tensors only", pairs=True)),
    ],
)
def test_what_a_rank_tells(settings: Settings, gpu: Gpu | None, routes: dict[int, str], expected: GpuReach) -> None:
    assert gpu_direct.of_rank(settings, gpu, routes, OFFERS, NicWrites()) == expected


def test_all_ranks_come_to_the_first_objection() -> None:
    assert gpu_direct.settle({0: GpuReach(), 2: GpuReach()}) == GpuReach()
    told = [GpuReach(pairs=True), GpuReach(far="no NIC"), GpuReach(near="CPU", far="no GPU", across=False)]
    assert gpu_direct.settle(dict(enumerate(told))) == GpuReach("rank 2: CPU", "rank 1: no NIC", False, True)


def test_what_is_no_answer_names_its_rank() -> None:
    with pytest.raises(ProtocolError, match="rank 3 sent something"):
        gpu_direct.read(3, b"?")


@pytest.mark.parametrize(
    ("offer", "window", "words", "status"),
    [
        (Offer(("mlx5_0",), "Ethernet", "fine", True, gpu="dma-buf"), "auto", "GPU memory: by dma-buf", Status.OK),
        (Offer(("mlx5_0",), "Ethernet", "fine", True, no_gpu="no way"), "auto", "No GPU memory: no way", Status.NOTE),
        (Offer(("mlx5_0",), "Ethernet", "fine", True, no_gpu="no way"), "device", "no way", Status.PROBLEM),
    ],
)
def test_the_doctor_says_it(offer: Offer, window: str, words: str, status: Status) -> None:
    found: list[Finding] = list(examine_nic_transports({"efa": Offer(), "roce": offer}, Settings(window=window)))
    assert words in found[1].value
    assert found[1].status is status
    assert ("nvidia-peermem" in found[1].next_step) == (status is not Status.OK)
