"""GPU memory as NICs write it: what a GPU and the NICs of its rank can do, and what all ranks make of it.

A rank tells the others once, before windows are placed; so every rank comes to the same answer, ranks with CPU tensors
included. What a NIC cannot do in spite of it is found when windows are registered, on all ranks as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from ..config import Settings
from ..errors import ProtocolError, in_words
from ..proxy.spin import Cores
from ..proxy.transport.select import DIRECT, NIC_TRANSPORTS, SHM, Offer, Offers
from .nics import HostNics

__all__ = ["FLUSH_FOR_ALL", "FLUSH_FOR_OWNER", "Gpu", "GpuReach", "NicWrites", "cuda_writes", "probe", "settle"]

#: Bytes that a NIC is given to see whether it takes GPU memory.
PROBE_BYTES = 2 << 20
#: ``CUflushGPUDirectRDMAWritesScope``, whose values are those of ``cudaDevAttrGPUDirectRDMAWritesOrdering`` as well.
FLUSH_FOR_OWNER, FLUSH_FOR_ALL = 100, 200
_HOPPER = 9


class NicWrites(NamedTuple):
    """What a NIC's write into a GPU's memory takes before a kernel may be told of it.

    Attributes:
        refusal: why no kernel could ever be told; "" = the memory can be a window.
        across: kernels on other GPUs of the host, which map the memory, see the write as soon as the GPU's own do: rows
            may be forwarded inside a node.
        flush: 0, or the scope of the flush before counts of arrivals are published.
        words: the choice and why, for the log and the doctor.
    """

    refusal: str = ""
    across: bool = True
    flush: int = 0
    words: str = "no flush"


def cuda_writes(device: str, ordering: int, major: int, coherent: bool, flushes: bool) -> NicWrites:
    """The choice for an NVIDIA GPU. NCCL flushes for the same GPUs.

    Args:
        device: its name, for the words.
        ordering: ``cudaDevAttrGPUDirectRDMAWritesOrdering``.
        major: of its compute capability.
        coherent: CPU and GPU share page tables (C2C): counts in host memory reach it by another way than a NIC's write.
        flushes: the driver has ``cuFlushGPUDirectRDMAWrites``.
    """
    said = f"cudaDevAttrGPUDirectRDMAWritesOrdering is {ordering}"
    why = ""
    if ordering < FLUSH_FOR_OWNER:
        why = said
    elif major < _HOPPER:
        why = f"it is older than sm_{_HOPPER}0"
    elif coherent:
        why = "counts reach it over C2C, which passes by its PCIe"
    across = ordering >= FLUSH_FOR_ALL
    shown = "" if across else f"; hierarchy off, because other GPUs may read older bytes ({said})"
    if not why:
        return NicWrites("", across, 0, f"no flush ({said}){shown}")
    if not flushes:
        refusal = f"{device} does not order the writes of NICs ({why}), and its driver offers no flush of them"
        return NicWrites(refusal, False, 0, refusal)
    scope = FLUSH_FOR_ALL if across else FLUSH_FOR_OWNER
    return NicWrites("", across, scope, f"a flush before counts ({why}){shown}")


class GpuMemory(Protocol):
    """What is asked of a GPU's memory here; ``gpu.memory`` has it."""

    def allocate(self, nbytes: int) -> int: ...

    def free(self, address: int) -> None: ...

    def export_dmabuf(self, address: int, nbytes: int) -> tuple[int, int]: ...

    def nic_writes(self) -> NicWrites: ...


class Gpu(NamedTuple):
    """The GPU whose tensors a rank may serve.

    Attributes:
        memory: gives access to its memory; None while the process uses none and may never do.
    """

    memory: Callable[[], GpuMemory] | None


def probe(nics: HostNics, offers: Offers, gpu: Gpu | None) -> tuple[dict[str, Offer], NicWrites]:
    """``offers`` with how each rail reaches this rank's GPU, or why it does not; and what NICs' writes into it take.
    Never raises.

    Each NIC registers a small allocation for a moment.
    """
    offered = [transport for transport in NIC_TRANSPORTS if offers.get(transport, Offer()).nics]
    if gpu is None or not offered:
        return dict(offers), NicWrites()
    why = "no GPU is in use yet (call torch.cuda.set_device before the Buffer is made)"
    if gpu.memory is not None:
        try:
            memory = gpu.memory()
            writes = memory.nic_writes()
            start = memory.allocate(PROBE_BYTES)
            try:
                found = {one: _probe_rails(nics, one, offers[one], memory, start, writes) for one in offered}
            finally:
                memory.free(start)
            return {**offers, **found}, writes
        # whatever the driver's bindings raise: a Buffer whose windows lie in host memory needs none of it
        except Exception as error:
            why = in_words(error)
    return {**offers, **{one: dataclasses.replace(offers[one], no_gpu=why) for one in offered}}, NicWrites()


def _probe_rails(
    nics: HostNics, transport: str, offer: Offer, memory: GpuMemory, start: int, writes: NicWrites
) -> Offer:
    ways: list[str] = []
    failures: list[str] = [writes.refusal] if writes.refusal else []
    for nic in nics.rails[transport].nics:
        try:
            ways.append(nics.reach_gpu(transport, nic, start, PROBE_BYTES, memory.export_dmabuf))
        # bindings raise RuntimeError for a function that the driver lacks, AttributeError for one that they lack
        except Exception as error:
            failures.append(in_words(error))
    if failures:
        return dataclasses.replace(offer, no_gpu="; ".join(dict.fromkeys(failures)))
    return dataclasses.replace(offer, gpu=" and ".join(dict.fromkeys(ways)))


class GpuReach(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells, and then what all come to: "" where nothing stands in the way.

    Attributes:
        near: why kernels of ranks on one host cannot share windows in GPU memory.
        far: why other ranks cannot reach each other's GPU memory.
        across: as in :class:`NicWrites`.
        pairs: some kernels write another rank's window themselves.
    """

    near: str = ""
    far: str = ""
    across: bool = True
    pairs: bool = False


def of_rank(
    settings: Settings, gpu: Gpu | None, routes: Mapping[int, str], offers: Offers, writes: NicWrites
) -> GpuReach:
    """What this rank tells the others.

    Args:
        routes: the way to each peer that is not masked.
        offers, writes: of :func:`probe`.
    """
    # over shm a peer is on this host: a window that is demanded in GPU memory is mapped all the same
    mapped = (DIRECT, SHM) if settings.window == "device" else (DIRECT,)
    far = {peer: way for peer, way in routes.items() if way not in mapped}
    pairs = DIRECT in routes.values()
    if gpu is None:
        cpu = "it serves CPU tensors only"
        return GpuReach(cpu, cpu if far else "", pairs=pairs)
    reasons = []
    for way in sorted(set(far.values())):
        peers = ", ".join(str(peer) for peer, one in sorted(far.items()) if one == way)
        if way not in NIC_TRANSPORTS:
            reasons.append(f"it reaches ranks {peers} over {way}, which reaches no GPU memory")
        elif no_gpu := offers[way].no_gpu:
            reasons.append(no_gpu)
    off = "" if settings.direct else "UCCL_EP_DIRECT=0"
    return GpuReach(off, "; ".join(reasons), writes.across, pairs)


def settle(told: Mapping[int, GpuReach]) -> GpuReach:
    """What all ranks come to from what each told, by rank: the first objection, with its rank."""

    def first(name: str) -> str:
        return next((f"rank {rank}: {why}" for rank, one in sorted(told.items()) if (why := getattr(one, name))), "")

    ranks = told.values()
    return GpuReach(first("near"), first("far"), all(one.across for one in ranks), any(one.pairs for one in ranks))


class Paths(NamedTuple):
    """What a rank tells when paths are agreed on: whose windows its kernels write, most rails to a peer, its GPU, and
    what its proxies run on."""

    direct: list[int]
    rails: int
    reach: GpuReach
    cores: Cores


def read(peer: int, payload: bytes) -> Paths:
    """What a rank told."""
    try:
        return msgspec.msgpack.decode(payload, type=Paths)
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            f"rank {peer} sent something that is no list of ranks, rails, GPU and cores: {error}"
        ) from error
