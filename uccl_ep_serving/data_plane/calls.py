"""Whether ranks make the same calls: who waits says in which operation, and the rank that is waited for compares.

Ranks make the same calls in the same order, so operations with the same number in an epoch are of the same mode
everywhere. Where two are not, each waits for messages that the other will never send. Shapes and codings are compared
in the messages; this is for operations that send each other none.
"""

from __future__ import annotations

import time

import msgspec

from ..control_plane.mesh import ControlMesh

__all__ = ["Calls"]

#: Longer than a rank that makes the same call is usually late, and short beside any deadline.
_WAIT_SECONDS = 0.5


class _Doing(msgspec.Struct, frozen=True, array_like=True):
    """The latest operation that a rank has begun: the how-many-th of its epoch, and of which mode."""

    epoch: int
    begun: int
    low_latency: bool

    def __str__(self) -> str:
        return "a low-latency operation" if self.low_latency else "an operation of normal mode"


class Calls:
    """The calls of one rank beside those of its peers."""

    def __init__(self, mesh: ControlMesh) -> None:
        self._mesh = mesh
        self._mine = _Doing(0, 0, False)
        #: By peer, what it does. Writer: the thread that reads the control connections. Reader: the host.
        self._heard: dict[int, _Doing] = {}
        #: The operation in which this rank was seen to wait, until when nothing is said of that, and who was told.
        self._waiting, self._quiet, self._told = self._mine, 0.0, set[int]()
        mesh.on_doing = self._hear

    def begin(self, epoch: int, begun: int, low_latency: bool) -> None:
        """This rank has begun its operation number ``begun`` of ``epoch``."""
        self._mine = _Doing(epoch, begun, low_latency)

    def remind(self, peer: int) -> bool:
        """This rank waits for ``peer``: say so, once, when that lasts; True once it was said. Called often."""
        now = time.monotonic()
        if self._waiting is not self._mine:
            self._waiting, self._quiet = self._mine, now + _WAIT_SECONDS
            self._told.clear()
        elif now >= self._quiet and peer not in self._told:
            self._told.add(peer)
            self._mesh.tell_doing(peer, msgspec.msgpack.encode(self._mine))
        return peer in self._told

    def _hear(self, peer: int, payload: bytes) -> None:
        """What ``peer`` says. Raises ValueError when it is nothing."""
        try:
            self._heard[peer] = msgspec.msgpack.decode(payload, type=_Doing)
        except msgspec.DecodeError as error:
            raise ValueError(f"rank {peer} sent a malformed control frame") from error

    @property
    def difference(self) -> str:
        """In words, that a peer waits for this rank in another operation than that of this rank; else empty."""
        mine, masked = self._mine, self._mesh.liveness.masked
        for peer, theirs in list(self._heard.items()):
            together = (theirs.epoch, theirs.begun) == (mine.epoch, mine.begun)
            if together and theirs.low_latency != mine.low_latency and peer not in masked:
                return f"rank {peer} is in {theirs}, and this rank in {mine}"
        return ""
