"""The shared-memory mailbox: how the immediates of ``shm`` writes reach the proxy of a rank on the same host.

Every rank has one mailbox segment, mapped by its peers. It holds one ring per (receiving proxy, source rank), each with
one producer (that proxy's twin in the source process) and one consumer (the receiving proxy):

    byte   0  tail   int64, immediates taken;    writer: the receiving proxy (release); reader: the producer (acquire)
                     TAIL_CLOSED = dropped
    byte 128  slots  SLOTS x 8-byte words        writer: the producer (release); reader: the receiving proxy (acquire)

A slot's word is an immediate, the bytes of the write it belongs to, and a lap bit. Immediate number i of a ring goes to
slot ``i % SLOTS`` with lap bit ``lap_of(i)``; the release store that publishes it comes after the payload's bytes, and
the consumer's acquire load makes those bytes visible. Fresh memory is zero and lap 0 writes ones, so an unwritten slot
is never taken.

Peers can write this memory, so nothing in it is trusted: each side keeps its own position in private memory, the
consumer reads a word once and refuses one that is not an immediate of the ring's source or that claims more bytes than
a write may have (they are only counted, never used as a length), the producer refuses a tail outside
[its position - SLOTS, its position].
"""

from __future__ import annotations

from .bitfield import Word
from .command import MAX_RANKS, MAX_WRITE_BYTES
from .frame import MAX_PROXIES
from .imm import IMM

__all__ = [
    "RING_BYTES",
    "SLOTS",
    "SLOTS_OFFSET",
    "TAIL",
    "TAIL_CLOSED",
    "WORD",
    "lap_of",
    "mailbox_bytes",
    "ring_offset",
]

WORD = Word(
    "mailbox word",
    64,
    ("imm", IMM.bits, "the immediate"),
    ("nbytes", MAX_WRITE_BYTES.bit_length(), "bytes of the write, for the receiver's counters"),
    ("lap", 1, "lap of the ring in which the slot was written"),
)

#: Immediates in flight from one source to one proxy; more get BUSY. One sequence window of a stream.
SLOTS = 1024

TAIL = 0
#: Value of the tail once the receiving proxy has dropped the source: nothing more is taken, ever.
TAIL_CLOSED = -1
#: Two cache lines after the tail: the producer's stores and the consumer's do not share a prefetched pair of lines.
SLOTS_OFFSET = 128
RING_BYTES = SLOTS_OFFSET + SLOTS * 8

assert RING_BYTES % 128 == 0
assert WORD.used < 64  # compiled code holds a word in an int64: the sign bit stays clear


def lap_of(number: int) -> int:
    """Lap bit of immediate ``number``: 1 on the first pass through the slots, then alternating."""
    return ((number // SLOTS) + 1) & 1


def ring_offset(ranks: int, proxy: int, source: int) -> int:
    """Byte offset of the ring from ``source`` to the segment owner's ``proxy``. Raises ValueError out of range."""
    if not 0 <= source < ranks <= MAX_RANKS:
        raise ValueError(f"source rank {source} is not one of {ranks} ranks (at most {MAX_RANKS})")
    if not 0 <= proxy < MAX_PROXIES:
        raise ValueError(f"proxy {proxy} is outside 0..{MAX_PROXIES - 1}")
    return (proxy * ranks + source) * RING_BYTES


def mailbox_bytes(ranks: int, proxies: int) -> int:
    """Bytes of the segment of one rank; it must be zero-initialised. Raises ValueError out of range."""
    return ring_offset(ranks, proxies - 1, ranks - 1) + RING_BYTES
