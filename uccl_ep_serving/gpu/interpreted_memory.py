"""Memory of a device for Triton's interpreter: kernels are Python over host memory, and device memory is a memfd that
peers open through /proc."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from typing import Any, ClassVar

import numpy as np
import torch

from ..data_plane.gpu_direct import NicWrites
from ..errors import TransportError
from ..native.descriptors import memfd
from ..proxy.fence import DriverFlush

__all__ = ["InterpretedMemory"]

_HANDLE_BYTES = 64


class InterpretedMemory:
    """For Triton's interpreter: a kernel reaches all of this process's memory.

    Pages are mapped once at a time, by whichever Buffer, as drivers have it.
    """

    _mapped: ClassVar[dict[int, int]] = {}

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._owned: dict[int, tuple[int, Any]] = {}
        self._opened: dict[int, Any] = {}

    def map_host(self, address: int, nbytes: int) -> int:
        """Raises TransportError for pages that are mapped already."""
        for start, length in self._mapped.items():
            if address < start + length and start < address + nbytes:
                raise TransportError(
                    f"{nbytes} bytes at {address:#x} share pages with {length} at {start:#x}, which are mapped",
                    device="memfd",
                )
        self._mapped[address] = nbytes
        return address

    def unmap_host(self, address: int) -> None:
        del self._mapped[address]

    def allocate(self, nbytes: int) -> int:
        descriptor = memfd("uccl_ep device memory")
        os.ftruncate(descriptor, nbytes)
        pages = np.frombuffer(mmap.mmap(descriptor, nbytes), dtype=np.uint8)
        self._owned[pages.ctypes.data] = (descriptor, pages)
        return int(pages.ctypes.data)

    def free(self, address: int) -> None:
        os.close(self._owned.pop(address)[0])

    def export(self, address: int) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self._owned[address][0]}".encode().ljust(_HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        path = handle.decode().strip()
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(f"cannot open {path}: {error}", device="memfd", errno=error.errno or 0) from error
        with contextlib.closing(os.fdopen(descriptor, "r+b", buffering=0)) as file:
            pages = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)
        self._opened[pages.ctypes.data] = pages
        return int(pages.ctypes.data)

    def close(self, address: int) -> None:
        del self._opened[address]

    def synchronize(self, deadline: float = math.inf) -> bool:
        """A kernel is over when its launch returns."""
        return True

    def capture_of(self, stream: int) -> int:
        """There are no streams."""
        return 0

    def export_dmabuf(self, address: int, nbytes: int) -> tuple[int, int]:
        """The memfd itself."""
        for start, (descriptor, pages) in self._owned.items():
            if start <= address and address + nbytes <= start + pages.nbytes:
                return os.dup(descriptor), address - start
        raise TransportError(f"{address:#x} is no memory of this device", device="memfd")

    def nic_writes(self) -> NicWrites:
        return NicWrites(words="no flush (host memory)")

    def driver_flush(self, scope: int) -> DriverFlush:
        raise TransportError("host memory needs no flush", device="memfd")
