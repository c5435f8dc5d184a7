"""Compiled codecs: the immediate of a write, and the ticket by which its completion is recognised.

A *ticket* is the ``wr_id`` that a proxy gives to a transport. It holds everything that the SENT event needs (which
stream, which write, how many bytes), so no table of writes in flight exists, nothing is allocated per write, and a
NIC's queue depth is the only limit of its own. It never leaves the process.
"""

from __future__ import annotations

from ..native.jit import inlined
from ..protocol.bitfield import Word
from ..protocol.command import HIGH, LOW, UNIT
from ..protocol.imm import IMM, SEQUENCE_SPACE
from ..protocol.streams import STREAMS

__all__ = [
    "COMMAND_KIND_MASK",
    "COMMAND_KIND_SHIFT",
    "COMMAND_LAST_SHIFT",
    "COMMAND_RANK_MASK",
    "COMMAND_RANK_SHIFT",
    "COMMAND_STREAM_MASK",
    "COMMAND_STREAM_SHIFT",
    "LENGTH_MASK",
    "LENGTH_SHIFT",
    "LENGTH_STEP",
    "OFFSET_MASK",
    "OFFSET_SHIFT",
    "OFFSET_STEP",
    "SEQUENCE_MASK",
    "STREAM_SHIFT",
    "TICKET",
    "UNIT_SHIFT",
    "imm_last",
    "imm_source",
    "imm_stream",
    "immediate",
    "ticket",
    "ticket_bytes",
    "ticket_last",
    "ticket_peer",
    "ticket_stream",
]

TICKET = Word(
    "ticket",
    64,
    ("sequence", 11, "number of the write in its stream, modulo 2048"),
    ("last", 1, "1 = last write of its message"),
    ("stream", 8, "stream id"),
    ("peer", 12, "destination EP rank"),
    ("length", 25, "length, 16-byte units"),
)

# Plain integers: compiled code cannot call methods of a Word.
UNIT_SHIFT = UNIT.bit_length() - 1
STREAM_SHIFT = STREAMS.bit_length() - 1
SEQUENCE_MASK = SEQUENCE_SPACE - 1

OFFSET_SHIFT = LOW["source"].shift
OFFSET_MASK = LOW["source"].mask
OFFSET_STEP = 1 << OFFSET_SHIFT
LENGTH_SHIFT = LOW["length"].shift
LENGTH_MASK = LOW["length"].mask
LENGTH_STEP = 1 << LENGTH_SHIFT
COMMAND_RANK_SHIFT, COMMAND_RANK_MASK = HIGH["rank"].shift, HIGH["rank"].mask
COMMAND_STREAM_SHIFT, COMMAND_STREAM_MASK = HIGH["stream"].shift, HIGH["stream"].mask
COMMAND_KIND_SHIFT, COMMAND_KIND_MASK = HIGH["kind"].shift, HIGH["kind"].mask
COMMAND_LAST_SHIFT = HIGH["last"].shift

assert HIGH["target"].shift == OFFSET_SHIFT
assert HIGH["target"].mask == OFFSET_MASK
assert 1 << UNIT_SHIFT == UNIT
# A split command advances source, target and length by whole units inside its two words, so both share a unit.
assert all(TICKET[name].width == IMM[name].width for name in ("sequence", "last", "stream"))
assert TICKET["peer"].width == IMM["source"].width
assert TICKET["length"].width == LOW["length"].width

_IMM_LAST, _IMM_STREAM, _IMM_SOURCE = IMM["last"].shift, IMM["stream"].shift, IMM["source"].shift
_IMM_STREAM_MASK, _IMM_SOURCE_MASK = IMM["stream"].mask, IMM["source"].mask
_LAST, _STREAM, _PEER, _LENGTH = (TICKET[name].shift for name in ("last", "stream", "peer", "length"))
_STREAM_MASK, _PEER_MASK, _LENGTH_MASK = (TICKET[name].mask for name in ("stream", "peer", "length"))


@inlined
def immediate(source: int, stream: int, sequence: int, last: int) -> int:
    """The 32-bit immediate; ``sequence`` may be the 64-bit count, it is reduced here."""
    return source << _IMM_SOURCE | stream << _IMM_STREAM | last << _IMM_LAST | (sequence & SEQUENCE_MASK)


@inlined
def imm_source(imm: int) -> int:
    """EP rank of the sender."""
    return (imm >> _IMM_SOURCE) & _IMM_SOURCE_MASK


@inlined
def imm_stream(imm: int) -> int:
    """Stream id."""
    return (imm >> _IMM_STREAM) & _IMM_STREAM_MASK


@inlined
def imm_last(imm: int) -> int:
    """1 for the last write of a message."""
    return (imm >> _IMM_LAST) & 1


@inlined
def ticket(peer: int, stream: int, sequence: int, last: int, nbytes: int) -> int:
    """The ticket of a write; ``nbytes`` is a multiple of 16."""
    return (
        nbytes >> UNIT_SHIFT << _LENGTH | peer << _PEER | stream << _STREAM | last << _LAST | (sequence & SEQUENCE_MASK)
    )


@inlined
def ticket_peer(word: int) -> int:
    """Destination EP rank."""
    return (word >> _PEER) & _PEER_MASK


@inlined
def ticket_stream(word: int) -> int:
    """Stream id."""
    return (word >> _STREAM) & _STREAM_MASK


@inlined
def ticket_last(word: int) -> int:
    """1 for the last write of a message."""
    return (word >> _LAST) & 1


@inlined
def ticket_bytes(word: int) -> int:
    """Length of the write in bytes."""
    return ((word >> _LENGTH) & _LENGTH_MASK) << UNIT_SHIFT
