"""What peers must know of a ``roce`` endpoint to connect to it: the address that the bootstrap carries."""

from __future__ import annotations

import msgspec

from .window import KeyTable

__all__ = ["RailAddress", "RoceAddress"]


class RailAddress(msgspec.Struct, frozen=True):
    """One NIC of an endpoint.

    Attributes:
        gid, lid: of its port.
        mtu: of its path, the verbs number.
        keys: of the window.
        credit_key: rkey of the credit words.
        numbers: by rank, the queue pairs that wait for it.
    """

    gid: bytes
    lid: int
    mtu: int
    keys: KeyTable
    credit_key: int
    numbers: dict[int, tuple[int, ...]]


class RoceAddress(msgspec.Struct, frozen=True, tag="roce 2"):
    """An endpoint.

    Attributes:
        rank, ranks, proxy, qps: whose it is; ``qps`` are the queue pairs per peer and rail.
        window, window_bytes: where its window lies in its process.
        receives: posted per queue pair.
        credits: address of its credit words, [rank][rail][queue pair].
        rails: its NICs, in rail order.
    """

    rank: int
    ranks: int
    proxy: int
    qps: int
    window: int
    window_bytes: int
    receives: int
    credits: int
    rails: tuple[RailAddress, ...]

    @property
    def group(self) -> tuple[int, ...]:
        """What all ranks must have alike: ranks, proxy, queue pairs and window bytes."""
        return self.ranks, self.proxy, self.qps, self.window_bytes

    def encode(self) -> bytes:
        """For the bootstrap."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, text: bytes) -> RoceAddress:
        """Raises ValueError when ``text`` is no address of this transport."""
        try:
            found = msgspec.msgpack.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{text[:16]!r} is not the address of a roce endpoint ({error})") from None
        for rail in found.rails:
            if len(rail.gid) != 16 or not rail.keys.cover(found.window_bytes):
                raise ValueError(f"a GID of {len(rail.gid)} bytes, {len(rail.keys.keys)} keys of a window")
        return found
