"""The number of a write: how the immediate and the ticket carry it, and which numbered writes have happened.

An *immediate* travels with the write and names its source, its stream and its number. A *ticket* is the ``wr_id`` that
a proxy gives to a transport. It holds everything that the SENT event needs (which stream, which write, how many bytes),
so no table of writes in flight exists, nothing is allocated per write, and a NIC's queue depth is the only limit of its
own. It never leaves the process.

The *sequence window* says which writes of a stream have happened, and how many messages that makes without a gap. One
algorithm, used twice for every stream: by the receiver for writes that have *arrived*, by the sender for writes that
have *completed* locally. Both may come in any order; both are published as the count of messages whose writes, and all
before them, have happened.

Memory of one window (owned by one proxy thread, nobody else reads or writes it):

    byte  0  PREFIX    int64, writes that have happened without a gap (never wraps)
    byte  8  MESSAGES  int64, messages among them, that is: ends of messages
    byte 16  HELD      int64, writes that have happened behind a gap
    byte 24  PAIRS     2 bits for each of the 1,024 sequence numbers from PREFIX on, at sequence % 1024:
                       1 = happened, 2 = it ends a message; all zero in order, so the fast path never touches them

A number is 11 bits. Because at most 1,024 writes are outstanding, one that lies 0..1023 ahead of PREFIX is new (or a
repeat of a held one), and one that lies 1024..2047 ahead is really behind: a repeat.
"""

from __future__ import annotations

from ..native.atomics import peek, poke, store64
from ..native.jit import compiled, inlined
from ..protocol.bitfield import Word
from ..protocol.command import LOW, UNIT
from ..protocol.imm import IMM, SEQUENCE_SPACE, SEQUENCE_WINDOW

TICKET = Word(
    "ticket",
    64,
    ("sequence", 11, "number of the write in its stream, modulo 2048"),
    ("last", 1, "1 = last write of its message"),
    ("stream", 8, "stream id"),
    ("peer", 12, "destination EP rank"),
    ("length", 25, "length, 16-byte units"),
)

assert all(TICKET[name].width == IMM[name].width for name in ("sequence", "last", "stream"))
assert TICKET["peer"].width == IMM["source"].width
assert TICKET["length"].width == LOW["length"].width

# Plain integers: compiled code cannot call methods of a Word.
UNIT_SHIFT = UNIT.bit_length() - 1
SEQUENCE_MASK = SEQUENCE_SPACE - 1
_WINDOW_MASK = SEQUENCE_WINDOW - 1
assert 1 << UNIT_SHIFT == UNIT

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


# --- the sequence window ----------------------------------------------------------------------------------------------
PREFIX, MESSAGES, HELD, PAIRS = 0, 8, 16, 24
#: One int64 of PAIRS holds 32 sequence numbers.
WINDOW_STATE_BYTES = PAIRS + SEQUENCE_WINDOW // 32 * 8

#: What :func:`note` found. REPEATED changes nothing.
REPEATED, IN_ORDER, HELD_BACK = 0, 1, 2


@inlined
def _pair_address(window: int, sequence: int) -> int:
    return window + PAIRS + ((sequence & _WINDOW_MASK) >> 5) * 8


@compiled
def _close_gap(window: int, published: int, prefix: int, last: int) -> None:
    """The write at ``prefix`` happened: take it and everything held directly behind it."""
    messages = peek(window + MESSAGES) + last
    held = peek(window + HELD)
    prefix += 1
    while held:
        address = _pair_address(window, prefix)
        shift = 2 * (prefix & 31)
        word = peek(address)
        pair = (word >> shift) & 3
        if pair == 0:
            break
        poke(address, word & ~(3 << shift))
        messages += pair >> 1
        prefix += 1
        held -= 1
    poke(window + PREFIX, prefix)
    poke(window + HELD, held)
    poke(window + MESSAGES, messages)
    store64(published, messages)


@inlined
def note(window: int, published: int, sequence: int, last: int) -> int:
    """Write ``sequence`` (modulo 2048) has happened; ``last`` is 1 when it ends a message.

    Stores the gap-free message count at address ``published`` with release, so that whoever loads it with acquire
    sees the payloads it covers. Returns IN_ORDER, HELD_BACK or REPEATED.
    """
    prefix = peek(window + PREFIX)
    ahead = (sequence - prefix) & SEQUENCE_MASK
    if ahead == 0:
        if peek(window + HELD) == 0:
            poke(window + PREFIX, prefix + 1)
            if last:
                messages = peek(window + MESSAGES) + 1
                poke(window + MESSAGES, messages)
                store64(published, messages)
        else:
            _close_gap(window, published, prefix, last)
        return IN_ORDER
    # rule: a repeat behind the prefix changes nothing
    if ahead > _WINDOW_MASK:
        return REPEATED
    address = _pair_address(window, sequence)
    shift = 2 * (sequence & 31)
    word = peek(address)
    # rule: a repeat of a held write changes nothing
    if (word >> shift) & 1:
        return REPEATED
    poke(address, word | (1 | last << 1) << shift)
    poke(window + HELD, peek(window + HELD) + 1)
    # rule: only a prefix is published
    return HELD_BACK
