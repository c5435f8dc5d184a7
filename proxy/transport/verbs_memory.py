"""Registration of a window with a NIC: one region, or chunks where the memory is a GPU's and goes by dma-buf.

Host and shared windows are registered as they are. A device window is tried the same way first: that works where a
peer-memory module (nvidia-peermem, amdgpu's) is loaded. Otherwise it is exported as dma-buf and registered in chunks of
1 GiB, because with a full IOMMU a single dma-buf region above 2 GiB can fail with ENOMEM (kernel 5.12 or newer and
rdma-core 34 are needed). Both ways are tried at run time; what was found is reported by :attr:`WindowRegion.how`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...errors import TransportError
from . import verbs_codes as codes
from .verbs import MemoryRegion, ProtectionDomain

__all__ = ["CHUNK_SHIFT", "WHOLE_SHIFT", "DmaBuf", "WindowRegion", "register_window"]

#: log2 of the bytes of a dma-buf chunk.
CHUNK_SHIFT = 30
#: Chunk shift of a window that is one region: every offset lies in chunk 0.
WHOLE_SHIFT = 62


class DmaBuf(NamedTuple):
    """A dma-buf over some device memory: its descriptor, owned by whoever receives it, and where the memory starts."""

    descriptor: int
    offset: int


class WindowRegion(NamedTuple):
    """A registered window.

    Attributes:
        shift: offset >> shift is the chunk that an offset lies in.
        regions: of the chunks.
        how: in words.
    """

    shift: int
    regions: Sequence[MemoryRegion]
    how: str


def register_window(
    pd: ProtectionDomain,
    start: int,
    nbytes: int,
    kind: str = "shared",
    export: Callable[[int, int], DmaBuf] | None = None,
    overlap: int = 0,
) -> WindowRegion:
    """Register [start, start + nbytes) so that peers may write it and the NIC may read it.

    Args:
        pd: protection domain; the regions end with it.
        start, nbytes: the window.
        kind: "shared", "host" or "device".
        export: makes a dma-buf of a range (address, bytes) of device memory.
        overlap: bytes that a chunk reaches into the next one: a transport whose writes cannot be cut in two wants each
            of them whole in the chunk in which it starts.

    Raises:
        TransportError: the NIC takes the memory in no way; every attempt is named.
    """
    # Completions still order everything: only writes among themselves may pass each other.
    access = codes.ACCESS_LOCAL_WRITE | codes.ACCESS_REMOTE_WRITE
    try:
        region = MemoryRegion(pd, start, nbytes, access | codes.ACCESS_RELAXED_ORDERING)
        words = {"device": "device memory through a peer-memory module"}.get(kind, f"{kind} memory")
        return WindowRegion(WHOLE_SHIFT, [region], words)
    except TransportError as error:
        if kind != "device" or export is None:
            raise
        refusal = error
    try:
        regions = _register_chunks(pd, start, nbytes, access, export, overlap)
    except TransportError as error:
        raise TransportError(
            f"{pd.device}: GPUDirect works in no way. Directly (needs nvidia-peermem or AMD's peer-memory module): "
            f"{refusal}. By dma-buf (kernel 5.12, rdma-core 34, a driver that exports): {error}. Use a host window",
            device=pd.device,
            errno=error.errno,
        ) from error
    return WindowRegion(CHUNK_SHIFT, regions, f"device memory by dma-buf, {len(regions)} chunks")


def _register_chunks(
    pd: ProtectionDomain, start: int, nbytes: int, access: int, export: Callable[[int, int], DmaBuf], overlap: int
) -> list[MemoryRegion]:
    """Regions of 1 GiB and the overlap each; all or none."""
    regions: list[MemoryRegion] = []
    try:
        for offset in range(0, nbytes, 1 << CHUNK_SHIFT):
            part = min(nbytes - offset, (1 << CHUNK_SHIFT) + overlap)
            buffer = export(start + offset, part)
            try:
                regions.append(MemoryRegion(pd, start + offset, part, access, dmabuf=buffer))
            finally:
                # The region holds the buffer; the descriptor is needed no more.
                os.close(buffer.descriptor)
    except BaseException:
        for region in reversed(regions):
            region.close()
        raise
    return regions
