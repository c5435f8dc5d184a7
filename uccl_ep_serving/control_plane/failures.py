"""Who of a group is gone or has given up, and whom to blame: what a rank has heard over its control connections."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Set
from typing import NamedTuple

from ..errors import PeerError, PeerLost, PeerTimeout

__all__ = ["Absences", "Verdict"]

#: A rank that leaves is often one that noticed the loss of another: this long the lost one is looked for.
_ROOT_SECONDS = 0.3
#: peer, silent, channel, arrived, expected, bytes of the phase, which follows; the cause is the rest
_VERDICT = struct.Struct("<i?iqqH")
_MOST_PHASE, _MOST_CAUSE = 256, 2048


class Verdict(NamedTuple):
    """For which peer an operation of a rank waits, or because of which one it has failed.

    Attributes:
        by: the rank whose operation it is.
        peer: the other one; ``by`` itself when something of its own failed, a NIC or a proxy thread.
        silent: nothing came of ``peer`` (PeerTimeout), rather than that it is gone (PeerLost).
        channel, arrived, expected: as in PeerTimeout.
        phase: the operation, in words.
        cause: what a transport said, in words; "" when it said nothing.
        heard: ``time.monotonic()`` instant at which this rank learned of it.
    """

    by: int
    peer: int
    silent: bool
    channel: int = -1
    arrived: int = -1
    expected: int = -1
    phase: str = ""
    cause: str = ""
    heard: float = 0.0

    @classmethod
    def of(cls, by: int, error: PeerError) -> Verdict:
        """What ``error``, raised on rank ``by``, says."""
        arrived, expected = (error.arrived, error.expected) if isinstance(error, PeerTimeout) else (-1, -1)
        cause = error.cause if isinstance(error, PeerLost) else ""
        return cls(by, error.peer, isinstance(error, PeerTimeout), error.channel, arrived, expected, error.phase, cause)

    def encode(self) -> bytes:
        """Payload of a control frame; its sender is ``by``."""
        phase, cause = self.phase.encode()[:_MOST_PHASE], self.cause.encode()[:_MOST_CAUSE]
        head = _VERDICT.pack(self.peer, self.silent, self.channel, self.arrived, self.expected, len(phase))
        return head + phase + cause

    @classmethod
    def decode(cls, by: int, payload: bytes, ranks: int) -> Verdict:
        """Of rank ``by``. Raises ValueError when it is none."""
        if not _VERDICT.size <= len(payload) <= _VERDICT.size + _MOST_PHASE + _MOST_CAUSE:
            raise ValueError(f"rank {by} sent a malformed control frame")
        peer, silent, channel, arrived, expected, length = _VERDICT.unpack_from(payload)
        if not 0 <= peer < ranks or (peer == by and silent) or length > _MOST_PHASE:
            raise ValueError(f"rank {by} sent a malformed control frame")
        words = payload[_VERDICT.size :]
        phase, cause = (part.decode(errors="replace") for part in (words[:length], words[length:]))
        return cls(by, peer, silent, channel, arrived, expected, phase, cause, time.monotonic())

    def error(self, error: PeerError, rank: int) -> PeerError:
        """What rank ``rank`` raises in place of ``error``, which names a rank that is not to blame."""
        where = f"{error.phase}, rank {rank}"
        phase = f" in {self.phase}" if self.phase else ""
        if not self.silent:
            cause = f" ({self.cause})" if self.cause else ""
            how = f"rank {self.by} lost it{phase}{cause} and has stopped for that reason"
            if self.by == self.peer:
                how = f"it failed{phase}{cause} and has stopped"
            return PeerLost(
                f"{where}: rank {self.peer} is gone: {how}. "
                f"Next step: read rank {self.peer}'s log; then mask it on every rank that is left, or close this "
                "Buffer on all of them and build the group again",
                peer=self.peer,
                phase=error.phase,
                channel=self.channel,
                cause=self.cause,
            )
        counts = f": {self.arrived} messages arrived, {self.expected} expected" if self.arrived >= 0 else ""
        return PeerTimeout(
            f"{where}: rank {self.peer} is silent: rank {self.by} waits for it or has given up{phase}{counts}. Likely "
            f"cause: rank {self.peer} has not made the same call, is stuck, or the network drops its traffic. Next "
            f"step: look at what rank {self.peer} does; then mask it on every rank that is left, or close this Buffer "
            "on all of them and build the group again",
            peer=self.peer,
            phase=error.phase,
            channel=self.channel,
            arrived=self.arrived,
            expected=self.expected,
        )


class Absences:
    """What a rank has heard of peers that are gone or have given up.

    Args:
        rank, ranks: of the group.

    Attributes:
        changed: held while anything here changes, and notified then.
        lost: peers whose connection closed without a goodbye, in the order in which that was seen.
        endings: of lost peers, why their connections ended, where that says more than that they did.
        departed: peers that said goodbye, and the ``time.monotonic()`` instant.
        accused: peers that others have masked, and who did; this rank itself may be among them.
        verdicts: by rank, whom it blames for the failure of its present operation; for this rank, why it does.
            Writer of all of these: the thread that reads the control connections, and for the own verdict the caller
            of an operation. Readers: any.
        masked: peers that this rank has masked: what they say of others does not count. Writer: the host, between
            operations.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.changed = threading.Condition()
        self.lost: list[int] = []
        self.endings: dict[int, str] = {}
        self.departed: dict[int, float] = {}
        self.accused: dict[int, list[int]] = {}
        self.verdicts: dict[int, Verdict] = {}
        self.masked: frozenset[int] = frozenset()
        self._rank = rank
        self._ranks = ranks

    @property
    def any_heard(self) -> bool:
        """True once anything was heard; cheap, for who asks before every operation."""
        return bool(self.lost or self.departed or self.accused or self.verdicts)

    def accused_by_others(self) -> list[int]:
        """Peers that ranks which take part have masked, and this one has not."""
        masked = self.masked
        return [
            peer
            for peer, judges in list(self.accused.items())
            if peer != self._rank and peer not in masked and not masked.issuperset(judges)
        ]

    def verdict_of(self, peer: int) -> Verdict | None:
        """Whom ``peer`` blames, unless one of the two is masked."""
        verdict = self.verdicts.get(peer)
        return None if verdict is None or {peer, verdict.peer} & self.masked else verdict

    def given_up(self) -> list[int]:
        """Peers that have stopped because they blame a rank that is not masked."""
        return [peer for peer in list(self.verdicts) if peer != self._rank and self.verdict_of(peer)]

    def quiet_since(self, peer: int) -> float | None:
        """``time.monotonic()`` instant from which on ``peer``, which is not lost, has sent nothing for an operation."""
        verdict = self.verdict_of(peer)
        return self.departed.get(peer) if verdict is None else verdict.heard

    def broken_off(self) -> frozenset[int]:
        """Peers that are lost, that others have masked, or that have masked this rank."""
        return frozenset({*self.lost, *self.accused_by_others(), *self.accused.get(self._rank, ())} - {self._rank})

    def absent(self) -> frozenset[int]:
        """Peers that take part in no step any more."""
        return self.broken_off() | self.departed.keys() | frozenset(self.given_up())

    def hindrances(self, expected: Set[int], received: Set[int]) -> frozenset[int]:
        """Peers because of which a step with ``expected`` may never end; none when all of them have been received."""
        missing = expected - received
        if not missing:
            return frozenset()
        # A peer that was lost after its own part keeps the others away all the same: they may have noticed before they
        # came here. One that said goodbye has seen the step to its end.
        return frozenset(missing & self.absent() | expected & self.broken_off())

    def raise_absent(
        self, phase: str, without: frozenset[int], *, among: frozenset[int] | None = None, patience: float = 0.0
    ) -> None:
        """Raise PeerLost when a peer takes part no more: a lost one is named before one that others have masked, that
        before one that has given up, and that before one that left in good order.

        Args:
            phase: words for the message.
            without: peers that do not count (masked ones).
            among: only when one of these is absent; by default any.
            patience: seconds for which an absence that is not known yet is waited for.
        """
        with self.changed:
            candidates = (frozenset(range(self._ranks)) if among is None else among) - without
            self.changed.wait_for(lambda: self.absent() & candidates, patience)
            if not self.absent() & candidates:
                return
            self.changed.wait_for(lambda: (self.broken_off() | {*self.given_up()}) - without, _ROOT_SECONDS)
            ranked = [*self.lost, *self.accused_by_others(), *sorted(self.broken_off()), *self.given_up()]
            peer = next((peer for peer in ranked if peer not in without), -1)
            peer = peer if peer >= 0 else min(self.absent() & candidates)
            how = self.how_gone(peer)
        raise PeerLost(
            f"{phase}, rank {self._rank}: rank {peer} is gone ({how}). Next step: read its log; then mask it on every "
            "rank that is left, or close this Buffer on all of them and build the group again",
            peer=peer,
            phase=phase,
        )

    def how_gone(self, peer: int) -> str:
        """In words how ``peer`` came to be absent, "" when nothing is known of that."""
        judges = [judge for judge in list(self.accused.get(peer, ())) if judge not in self.masked]
        verdict = self.verdict_of(peer)
        if peer in self.lost:
            ending = self.endings.get(peer, "")
            return f"its control connection closed without a goodbye{ending and ': '}{ending}"
        if peer in self.accused.get(self._rank, ()):
            return "it has masked this rank"
        if judges:
            return f"rank {judges[0]} has masked it"
        if verdict is not None:
            cause = f" ({verdict.cause})" if verdict.cause else ""
            whom = "this rank" if verdict.peer == self._rank else f"rank {verdict.peer}"
            return f"it failed{cause}" if verdict.peer == peer else f"it has given up, because of {whom}{cause}"
        return "it closed its Buffer" if peer in self.departed else ""

    def news_of(self, peer: int) -> Verdict | None:
        """Whom ``peer``, of which something else says that it is gone, blames; waits a moment for it to say so."""
        with self.changed:
            self.changed.wait_for(lambda: peer in self.absent(), _ROOT_SECONDS)
            return self.verdict_of(peer)
