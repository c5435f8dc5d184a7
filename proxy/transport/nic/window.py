"""Registration of a window with a NIC: one region, or chunks where that would be too large for it.

Host windows are registered with relaxed ordering, in chunks of 1 GiB where they are longer than 2 GiB or than the NIC
says a region may be (:data:`WHOLE_BYTES`). A device window is tried by its address first: that works where a
peer-memory module (nvidia-peermem, amdgpu's) is loaded. Otherwise it is exported as dma-buf and registered in chunks of
1 GiB, because with a full IOMMU a single dma-buf region above 2 GiB can fail with ENOMEM (kernel 5.12 or newer and
rdma-core 34 are needed). Writes into GPU memory never have relaxed ordering: a GPU promises nothing of writes that may
pass each other on the way to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from ....errors import TransportError
from ....protocol.command import MAX_WRITE_BYTES
from ..verbs import codes
from ..verbs.device import open_device
from ..verbs.library import VerbsLibrary, load_libibverbs
from ..verbs.objects import MemoryRegion, ProtectionDomain

#: log2 of the bytes of a chunk, and bytes that it reaches into the next one: a write cannot be cut in two, and must lie
#: whole in the chunk in which it starts. That of a peer may be longer than any of this rank.
CHUNK_SHIFT, OVERLAP_BYTES = 30, MAX_WRITE_BYTES
#: Most bytes of host memory in one region: a NIC has a table entry for each page, and so many of 4 KiB. ofiwg/libfabric
#: issue 10402 (EFA: 4 GiB), SemiAnalysisAI/InferenceX pull request 3330 (Pollara takes 2 GiB and refuses 3).
WHOLE_BYTES = 2 << 30
# Completions still order everything: only writes among themselves may pass each other.
ACCESS = codes.ACCESS_LOCAL_WRITE | codes.ACCESS_REMOTE_WRITE
#: Makes a dma-buf of a range (address, bytes) of device memory: a descriptor, owned by whoever receives it, and the
#: offset at which the range starts in it.
Export = Callable[[int, int], tuple[int, int]]
#: Chunk shift of a window that is one region: every offset lies in chunk 0.
WHOLE_SHIFT = 62


class KeyTable(msgspec.Struct, frozen=True):
    """What a NIC calls a window: offset >> ``shift`` is the chunk that an offset lies in, ``keys`` are the chunks'."""

    shift: int
    keys: tuple[int, ...]

    def cover(self, nbytes: int) -> bool:
        """Whether there is a key for each of the first ``nbytes`` bytes."""
        return bool(self.keys) and self.shift >= 0 and len(self.keys) << min(self.shift, 40) >= nbytes


class DeviceOffer(msgspec.Struct, frozen=True, tag="device window 1"):
    """What peers must know of a rank's window in device memory: where it starts there, its bytes, its keys by rail."""

    start: int
    nbytes: int
    rails: tuple[KeyTable, ...]

    def encode(self) -> bytes:
        """For the bootstrap."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, text: bytes, nbytes: int, rails: int) -> DeviceOffer:
        """Raises ValueError when ``text`` is none, or does not fit windows of ``nbytes`` bytes over ``rails`` rails."""
        try:
            found = msgspec.msgpack.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{text[:16]!r} offers no device memory ({error})") from None
        if found.nbytes != nbytes or len(found.rails) < rails or not all(one.cover(nbytes) for one in found.rails):
            raise ValueError(f"{found.nbytes} bytes over {len(found.rails)} rails, {nbytes} over {rails} were expected")
        return found


class WindowRegion(NamedTuple):
    """A registered window.

    Attributes:
        shift: offset >> shift is the chunk that an offset lies in.
        regions: of the chunks.
        way: how the NIC reaches the memory, in words.
    """

    shift: int
    regions: Sequence[MemoryRegion]
    way: str

    @property
    def local(self) -> KeyTable:
        """Keys for this rank's work requests."""
        return KeyTable(self.shift, tuple(region.lkey for region in self.regions))

    @property
    def remote(self) -> KeyTable:
        """Keys for the work requests of peers."""
        return KeyTable(self.shift, tuple(region.rkey for region in self.regions))

    def close(self) -> None:
        """Take the keys back."""
        for region in reversed(self.regions):
            region.close()


def register_host(pd: ProtectionDomain, start: int, nbytes: int) -> WindowRegion:
    """Register [start, start + nbytes) of host memory so that peers may write it and the NIC may read it.

    Args:
        pd: protection domain; the regions end with it.
        start, nbytes: the memory.

    Raises:
        TransportError: the NIC refuses the memory.
    """
    access = ACCESS | codes.ACCESS_RELAXED_ORDERING
    # 0: the device does not say
    if nbytes <= min(pd.context.limits.max_mr_size or nbytes, WHOLE_BYTES):
        return WindowRegion(WHOLE_SHIFT, [MemoryRegion(pd, start, nbytes, access)], "host memory")
    return WindowRegion(CHUNK_SHIFT, _register_chunks(pd, start, nbytes, access), "host memory")


def register_device(
    pd: ProtectionDomain, start: int, nbytes: int, export: Export, access: int = ACCESS
) -> WindowRegion:
    """Register device memory [start, start + nbytes) in the same way.

    Args:
        pd: protection domain; the regions end with it.
        start, nbytes: the memory.
        export: makes a dma-buf of a part of it.
        access: ``ACCESS_*`` of the regions.

    Raises:
        TransportError: the NIC takes the memory in no way; every attempt is named.
    """
    try:
        return WindowRegion(WHOLE_SHIFT, [MemoryRegion(pd, start, nbytes, access)], "peer memory")
    except TransportError as error:
        refusal = error
    try:
        return WindowRegion(CHUNK_SHIFT, _register_chunks(pd, start, nbytes, access, export), "dma-buf")
    except TransportError as error:
        raise TransportError(
            f"{pd.device}: GPUDirect works in no way. Directly (needs nvidia-peermem or AMD's peer-memory module): "
            f"{refusal}. By dma-buf (kernel 5.12, rdma-core 34, a driver that exports): {error}",
            device=pd.device,
            errno=error.errno,
        ) from error


def reach(library: VerbsLibrary | None, device: str, start: int, nbytes: int, export: Export) -> str:
    """How ``device`` reaches device memory, in words. Opens it for a moment; arguments and errors are those of
    :func:`register_device`, and None is this machine's library."""
    with open_device(library or load_libibverbs(), device) as context:
        return register_device(ProtectionDomain(context), start, nbytes, export).way


def _register_chunks(
    pd: ProtectionDomain, start: int, nbytes: int, access: int, export: Export | None = None
) -> list[MemoryRegion]:
    """Regions of 1 GiB and the overlap each; all or none."""
    regions: list[MemoryRegion] = []
    try:
        for offset in range(0, nbytes, 1 << CHUNK_SHIFT):
            part = min(nbytes - offset, (1 << CHUNK_SHIFT) + OVERLAP_BYTES)
            if export is None:
                regions.append(MemoryRegion(pd, start + offset, part, access))
                continue
            descriptor, place = export(start + offset, part)
            try:
                regions.append(MemoryRegion(pd, start + offset, part, access, dmabuf=(descriptor, place)))
            finally:
                # The region holds the buffer; the descriptor is needed no more.
                os.close(descriptor)
    except BaseException:
        for region in reversed(regions):
            region.close()
        raise
    return regions
