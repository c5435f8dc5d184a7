"""The 32-bit immediate that travels with every write.

It names the stream and the write's place in it; the receiving proxy needs nothing else to restore order.
``sequence`` counts *writes* of a stream modulo 2048. At most :data:`SEQUENCE_WINDOW` = 1024 writes of a stream are
outstanding (sent, but not yet covered by a returned credit *and* completed locally), which is half the space: a
sequence number is then either in the window ahead of the receiver's prefix or a duplicate behind it, never both.
"""

from __future__ import annotations

from dataclasses import dataclass

from .bitfield import Word

__all__ = ["IMM", "SEQUENCE_SPACE", "SEQUENCE_WINDOW", "Immediate", "decode", "encode"]

IMM = Word(
    "immediate",
    32,
    ("sequence", 11, "number of the write in its stream, modulo 2048"),
    ("last", 1, "1 = last write of its message"),
    ("stream", 8, "stream id; bit 7 set = credits for stream id & 127 of the opposite direction"),
    ("source", 12, "EP rank of the sender"),
)

SEQUENCE_SPACE = 1 << IMM["sequence"].width
SEQUENCE_WINDOW = SEQUENCE_SPACE // 2

assert IMM.used == 32
assert SEQUENCE_WINDOW >= 1024


@dataclass(frozen=True, slots=True)
class Immediate:
    """A decoded immediate."""

    source: int
    stream: int
    sequence: int
    last: bool


def encode(imm: Immediate) -> int:
    """The 32-bit word. Raises ValueError on a misfit."""
    return IMM.pack(source=imm.source, stream=imm.stream, sequence=imm.sequence, last=int(imm.last))


def decode(word: int) -> Immediate:
    """The fields of a 32-bit word. Raises ValueError when it is not one."""
    if not 0 <= word < 1 << 32:
        raise ValueError(f"immediate {word:#x} is not a 32-bit word")
    fields = IMM.unpack(word)
    return Immediate(fields["source"], fields["stream"], fields["sequence"], bool(fields["last"]))
