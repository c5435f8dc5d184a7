"""A socket in memory: hands out bytes in chunks, keeps what is sent."""

from __future__ import annotations

import random

__all__ = ["Wire"]


class Wire:
    """What a parser of the product takes for its socket.

    Attributes:
        sent: by the parser.
        closed: the other side has closed.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._coming = bytearray()
        self._open = 0
        self.sent = bytearray()
        self.closed = False

    def put(self, data: bytes) -> None:
        """The other side sends ``data``."""
        self._coming += data

    @property
    def empty(self) -> bool:
        """All that came was taken."""
        return not self._coming

    def recv(self, most: int) -> bytes:
        """Some of the bytes that are there; now and then none has come yet."""
        if not self._coming:
            if self.closed:
                return b""
            raise BlockingIOError
        if self._rng.random() < 0.1:
            raise BlockingIOError
        count = min(most, 1 + self._rng.randrange(len(self._coming)) if self._rng.random() < 0.3 else most)
        part = bytes(self._coming[:count])
        del self._coming[:count]
        return part

    def recvmsg(self, most: int, *_: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, None]:
        """The same, and no descriptors."""
        return self.recv(most), [], 0, None

    def send(self, data: bytes, *_: int) -> int:
        """Take some of ``data``."""
        count = 1 + self._rng.randrange(len(data)) if self._rng.random() < 0.1 else len(data)
        self.sent += data[:count]
        return count

    def getsockopt(self, *_: int) -> int:
        """No error."""
        return 0

    def shutdown(self, *_: int) -> None:
        """Nothing more is sent."""

    def close(self) -> None:
        """Nothing is held."""
