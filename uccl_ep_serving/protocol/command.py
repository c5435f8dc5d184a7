"""The 16-byte command a kernel puts into a ring: one one-sided write, told in window offsets.

Two 64-bit words, bit 63 of each unused so that the words stay non-negative as int64 in Numba and Triton.
The lap bit stands in *both* words: a reader that sees the current lap in both has seen the whole command,
in whatever order the two halves became visible, and a slot never needs clearing.

Offsets and lengths are in units of 16 bytes (``UNIT``): 36 bits of offset reach a window of 1 TiB, 25 bits of
length hold 0 .. 2**24 units, that is 256 MiB inclusive. Writer: a kernel. Reader: the proxy that owns the ring.
"""

from __future__ import annotations

from dataclasses import dataclass

from .bitfield import Word

__all__ = [
    "COMMAND_BYTES",
    "HIGH",
    "KIND_WRITE",
    "LOW",
    "MAX_RANKS",
    "MAX_WINDOW_BYTES",
    "MAX_WRITE_BYTES",
    "UNIT",
    "Command",
    "decode",
    "encode",
]

UNIT = 16
COMMAND_BYTES = 16
MAX_WINDOW_BYTES = 1 << 40
MAX_WRITE_BYTES = 256 << 20
MAX_RANKS = 4096

#: The only kind so far; 0 is not a kind, so a zeroed slot can never be taken for a command.
KIND_WRITE = 1

LOW = Word(
    "command word 0",
    64,
    ("lap", 1, "lap of the ring in which the slot was written"),
    ("source", 36, "offset in the sender's window, 16-byte units"),
    ("length", 25, "length, 16-byte units; 0 is a message without payload"),
)
HIGH = Word(
    "command word 1",
    64,
    ("lap", 1, "the same lap bit again"),
    ("target", 36, "offset in the destination's window, 16-byte units"),
    ("rank", 12, "destination EP rank"),
    ("stream", 8, "stream id"),
    ("kind", 4, "1 = write"),
    ("last", 1, "1 = last write of its message"),
)

assert LOW.used <= 63
assert HIGH.used <= 63
assert LOW["lap"].shift == HIGH["lap"].shift == 0
assert LOW["source"].limit * UNIT + UNIT >= MAX_WINDOW_BYTES
assert LOW["length"].limit * UNIT >= MAX_WRITE_BYTES
assert HIGH["rank"].limit + 1 >= MAX_RANKS


@dataclass(frozen=True, slots=True)
class Command:
    """A decoded command. Offsets and length in bytes, multiples of 16."""

    rank: int
    stream: int
    source: int
    target: int
    length: int
    last: bool
    kind: int = KIND_WRITE


def _units(name: str, nbytes: int, limit: int) -> int:
    if nbytes % UNIT or not 0 <= nbytes <= limit:
        raise ValueError(f"{name} = {nbytes} must be a multiple of {UNIT} in 0..{limit}")
    return nbytes // UNIT


def encode(command: Command, lap: int, *, window_bytes: int = MAX_WINDOW_BYTES) -> tuple[int, int]:
    """Both words of ``command`` for a slot of lap parity ``lap`` (0 or 1).

    Raises ValueError on any misfit, bytes outside a window of ``window_bytes`` at either end included.
    """
    if command.kind != KIND_WRITE:
        raise ValueError(f"unknown command kind {command.kind}")
    low = LOW.pack(
        lap=lap,
        source=_units("source", command.source, MAX_WINDOW_BYTES - UNIT),
        length=_units("length", command.length, MAX_WRITE_BYTES),
    )
    high = HIGH.pack(
        lap=lap,
        target=_units("target", command.target, MAX_WINDOW_BYTES - UNIT),
        rank=command.rank,
        stream=command.stream,
        kind=command.kind,
        last=int(command.last),
    )
    for name, offset in (("source", command.source), ("target", command.target)):
        if offset + command.length > window_bytes:
            raise ValueError(
                f"{name} = {offset} with {command.length} bytes ends outside a window of {window_bytes} bytes"
            )
    return low, high


def decode(low: int, high: int) -> Command:
    """The command in two words. Raises ValueError when the lap bits differ, the kind is unknown or it is too long."""
    if LOW["lap"].get(low) != HIGH["lap"].get(high):
        raise ValueError("the two lap bits differ: the slot is being written")
    kind = HIGH["kind"].get(high)
    length = LOW["length"].get(low) * UNIT
    if kind != KIND_WRITE:
        raise ValueError(f"unknown command kind {kind}")
    if length > MAX_WRITE_BYTES:
        raise ValueError(f"length {length} exceeds {MAX_WRITE_BYTES}")
    return Command(
        rank=HIGH["rank"].get(high),
        stream=HIGH["stream"].get(high),
        source=LOW["source"].get(low) * UNIT,
        target=HIGH["target"].get(high) * UNIT,
        length=length,
        last=bool(HIGH["last"].get(high)),
        kind=kind,
    )
