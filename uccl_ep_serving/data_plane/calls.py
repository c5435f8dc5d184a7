"""Whether ranks make the same calls: who changes from one mode to the other says so, or waits, and others compare.

Ranks make the same calls in the same order, so operations with the same number in an epoch are of the same mode
everywhere. Where two are not, each waits for messages that the other will never send. So it is where one has begun more
low-latency dispatches than the other, and fewer combines: one of them has left out a call. Shapes and codings are
compared in the messages; this is for operations that send each other none.

The thread that reads the control connections tells and compares, from time to time: it costs operations nothing, and
reaches ranks whose hosts wait for no operation, as those of GPUs.
"""

from __future__ import annotations

import sys
from typing import Annotated, NamedTuple

import msgspec

from ..control_plane.mesh import ControlMesh

__all__ = ["Calls"]

#: Operations of which ranks remember the mode. The host of a GPU runs ahead of it by what its stream holds, 1,024
#: launches, and an operation takes several of them.
_REMEMBERED = 1024


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of its operations: a bit each, as of :class:`_Begun`, little-endian."""

    epoch: int
    begun: int
    modes: Annotated[bytes, msgspec.Meta(max_length=_REMEMBERED // 8)]
    combines: int
    dispatches: int


class _Begun(NamedTuple):
    """The operations that a rank has begun in an epoch.

    Attributes:
        epoch: its number.
        begun: how many.
        modes: of the latest ones, a bit each, of the last the lowest: 1 for low latency.
        changed: number of the last one that was of another mode than the one before, or the first.
        combines, dispatches: of low latency, how many.
    """

    epoch: int
    begun: int
    modes: int
    changed: int
    combines: int = 0
    dispatches: int = 0

    def is_low_latency(self, number: int) -> bool:
        """The mode of operation ``number``, one that is remembered."""
        return bool(self.modes >> (self.begun - number) & 1)

    def differs_at(self, other: _Begun) -> int:
        """Number of the first operation, of those remembered, that is of another mode than that of ``other``; 0 for
        none."""
        if self.epoch != other.epoch:
            return 0
        both = min(self.begun, other.begun)
        known = _REMEMBERED - (max(self.begun, other.begun) - both)
        if known <= 0:
            return 0
        apart = (self.modes >> (self.begun - both) ^ other.modes >> (other.begun - both)) & ((1 << known) - 1)
        return both - apart.bit_length() + 1 if apart else 0

    def crosses(self, other: _Begun) -> bool:
        """Whether one of the two has begun more low-latency dispatches, and the other more combines."""
        return self.epoch == other.epoch and (
            (self.dispatches - other.dispatches) * (self.combines - other.combines) < 0
        )

    @property
    def words(self) -> bytes:
        """The same for a peer."""
        modes = self.modes.to_bytes(_REMEMBERED // 8, "little")
        return msgspec.msgpack.encode(_Told(self.epoch, self.begun, modes, self.combines, self.dispatches))

    @property
    def low_latency(self) -> str:
        """How many operations of low latency, in words."""
        return f"{self.dispatches} low-latency dispatches and {self.combines} combines"


def _mode(low_latency: bool) -> str:
    return "a low-latency operation" if low_latency else "an operation of normal mode"


class Calls:
    """The calls of one rank beside those of its peers."""

    def __init__(self, mesh: ControlMesh) -> None:
        self._mesh = mesh
        #: Writer: the host; reader: the thread that reads the control connections. Replaced as a whole.
        self._mine = _Begun(-1, 0, 0, 0)
        #: By peer, what it has begun. Writer: the thread that reads the control connections. Reader: the host.
        self._heard: dict[int, _Begun] = {}
        #: What was told last: an epoch, and the number of the change in it; to whom else, since it differs from them.
        self._told, self._answered = (-1, 0), set[int]()
        #: What stood there at the last look, and when all peers were told last.
        self._seen = self._said = self._mine
        mesh.on_doing = self._hear

    def begin(self, epoch: int, begun: int, low_latency: bool, combines: bool) -> None:
        """This rank has begun its operation number ``begun`` of ``epoch``; of low latency, it ``combines`` or
        dispatches."""
        mine = self._mine if self._mine.epoch == epoch else _Begun(epoch, 0, 0, 0)
        changed = begun if mine.begun == 0 or low_latency != (mine.modes & 1) else mine.changed
        self._mine = _Begun(
            epoch,
            begun,
            (mine.modes << 1 | low_latency) & ((1 << _REMEMBERED) - 1),
            changed,
            mine.combines + (low_latency and combines),
            mine.dispatches + (low_latency and not combines),
        )

    def tell(self) -> None:
        """Tell the peers of a change of mode since the last time, and of low latency where this rank has begun nothing
        since then; and those that differ what this rank has begun.

        Called from time to time, by the thread that reads the control connections. Of two ranks that began operations
        of different modes after the same ones, one has changed: the other hears of it, and answers. Of two that wait in
        a dispatch and in a combine, both stand still, and both tell.
        """
        mine, stands = self._mine, self._mine is self._seen
        self._seen = mine
        news = (mine.epoch, mine.changed) != self._told
        if news or (stands and mine is not self._said and mine.modes & 1):
            self._told, self._said = (mine.epoch, mine.changed), mine
            if news:
                self._answered.clear()
            peers = set(range(self._mesh.ranks)) - {self._mesh.rank}
        else:
            peers = {peer for peer, theirs in self._heard.items() if mine.differs_at(theirs)} - self._answered
            self._answered |= peers
        words = mine.words if peers else b""
        for peer in sorted(peers):
            self._mesh.tell_doing(peer, words)

    @property
    def words(self) -> bytes:
        """What this rank has begun, for a peer."""
        return self._mine.words

    def most_begun(self, peer: int, epoch: int) -> int:
        """How many operations of ``epoch`` ``peer``, which has left, has begun, as it said last."""
        heard = self._heard.get(peer)
        if heard is None:
            return sys.maxsize
        return heard.begun if heard.epoch == epoch else 0

    def _hear(self, peer: int, payload: bytes) -> None:
        """What ``peer`` says. Raises ValueError when it is nothing."""
        try:
            said = msgspec.msgpack.decode(payload, type=_Told)
        except msgspec.DecodeError as error:
            raise ValueError(f"rank {peer} sent a malformed control frame") from error
        modes = int.from_bytes(said.modes, "little")
        self._heard[peer] = _Begun(said.epoch, said.begun, modes, 0, said.combines, said.dispatches)

    def difference(self, epoch: int) -> tuple[int, str]:
        """A peer that has begun an operation of another mode than this rank in ``epoch``, and that in words; (-1, "")
        for none."""
        mine, masked = self._mine, self._mesh.liveness.masked
        if mine.epoch != epoch:
            return -1, ""
        for peer, theirs in sorted(self._heard.items()):
            if peer not in masked and (number := mine.differs_at(theirs)):
                ways = _mode(theirs.is_low_latency(number)), _mode(mine.is_low_latency(number))
                words = f"rank {peer} is in {ways[0]}, and this rank in {ways[1]}"
                return peer, f"{words} (operation {number} of epoch {epoch})"
            if peer not in masked and mine.crosses(theirs):
                words = f"rank {peer} has begun {theirs.low_latency}, and this rank {mine.low_latency}"
                return peer, f"{words} (in epoch {epoch}): one of them has left out a call"
        return -1, ""
