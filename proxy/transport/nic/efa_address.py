"""What peers must know of an ``efa`` endpoint to write to it: the address that the bootstrap carries."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["EfaAddress", "RailAddress"]

_MAGIC = b"UEEF"
_HEAD = struct.Struct("<4sHHHHHHQQ")  # magic, rank, ranks, proxy, rails, chunk shift, chunks, window bytes, address
_RAIL = struct.Struct("<16sIIB")  # GID, QP number, QKEY, unsolicited


class RailAddress(NamedTuple):
    """One NIC of an endpoint.

    Attributes:
        gid, number, qkey: of its queue pair.
        unsolicited: that one takes writes without receives. Both ends must: a write is marked by its sender, and only
            a queue pair of the same kind takes it.
    """

    gid: bytes
    number: int
    qkey: int
    unsolicited: bool


@dataclass(frozen=True, slots=True)
class EfaAddress:
    """An endpoint.

    Attributes:
        rank, ranks, proxy: whose it is.
        shift: of its windows' chunks, see :func:`.window.register_window`.
        window, window_bytes: where its window lies in its process.
        rails: its NICs, in rail order.
        keys: of the window, by rail and chunk.
    """

    rank: int
    ranks: int
    proxy: int
    shift: int
    window_bytes: int
    window: int
    rails: tuple[RailAddress, ...]
    keys: tuple[tuple[int, ...], ...]

    @property
    def group(self) -> tuple[int, ...]:
        """What all ranks must have alike: ranks, proxy, window bytes, chunk shift and chunks."""
        return self.ranks, self.proxy, self.window_bytes, self.shift, len(self.keys[0])

    def encode(self) -> bytes:
        """For the bootstrap."""
        chunks = len(self.keys[0])
        parts = [
            _HEAD.pack(
                _MAGIC,
                self.rank,
                self.ranks,
                self.proxy,
                len(self.rails),
                self.shift,
                chunks,
                self.window_bytes,
                self.window,
            )
        ]
        for rail, keys in zip(self.rails, self.keys, strict=True):
            parts += [_RAIL.pack(*rail), struct.pack(f"<{chunks}I", *keys)]
        return b"".join(parts)

    @classmethod
    def decode(cls, text: bytes) -> EfaAddress:
        """Raises ValueError when ``text`` is no address of this transport."""
        if len(text) < _HEAD.size or not text.startswith(_MAGIC):
            raise ValueError(f"{text[:16]!r} is not the address of an efa endpoint")
        _, rank, ranks, proxy, count, shift, chunks, window_bytes, window = _HEAD.unpack_from(text)
        step = _RAIL.size + 4 * chunks
        if not count or not chunks or len(text) != _HEAD.size + count * step:
            raise ValueError(f"{len(text)} bytes for {count} rails with {chunks} keys each")
        rails, keys = [], []
        for at in range(_HEAD.size, len(text), step):
            gid, number, qkey, unsolicited = _RAIL.unpack_from(text, at)
            rails.append(RailAddress(gid, number, qkey, bool(unsolicited)))
            keys.append(struct.unpack_from(f"<{chunks}I", text, at + _RAIL.size))
        return cls(rank, ranks, proxy, shift, window_bytes, window, tuple(rails), tuple(keys))
