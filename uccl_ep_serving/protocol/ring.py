"""The command ring: many kernels put commands in, one proxy takes them out.

    byte   0  head      next index to reserve         writer and reader: CPU kernels (compare-and-exchange)
    byte  64  tail      indices consumed              writer: the proxy (release); readers: producers (acquire)
    byte 128  capacity  slots, a power of two         writer: whoever creates the ring, before it is used
    byte 256  slots     capacity x 16-byte commands   writer: the producer that reserved the index

A producer reserves n consecutive indices by compare-and-exchange of ``head``, and only when ``head + n - tail <=
capacity``: it never holds an index that it must wait to fill. For each index i it then stores both words of slot
``i % capacity`` with lap bit ``lap_of(i)``; the second store is a release. The proxy loads both words (acquire) and
takes the command when both lap bits equal ``lap_of(tail)``. Fresh memory is zero and lap 0 writes ones, so an unwritten
slot is never taken. ``head`` and ``tail`` are 64-bit and never wrap. Kernels of a device reserve in a head of their
own, in device memory, and ``head`` stays 0; they may reserve a slot before it is free, and wait then.
"""

from __future__ import annotations

from .command import COMMAND_BYTES

__all__ = ["CAPACITY", "HEAD", "SLOTS", "TAIL", "lap_of", "ring_bytes"]

HEAD = 0
TAIL = 64
CAPACITY = 128
SLOTS = 256


def lap_of(index: int, capacity: int) -> int:
    """Lap bit of index ``index``: 1 on the first pass through the slots, then alternating."""
    return ((index // capacity) + 1) & 1


def ring_bytes(capacity: int) -> int:
    """Bytes of a ring. Raises ValueError unless ``capacity`` is a power of two of at least 2."""
    if capacity < 2 or capacity & (capacity - 1):
        raise ValueError(f"ring capacity {capacity} must be a power of two, at least 2")
    return SLOTS + capacity * COMMAND_BYTES
