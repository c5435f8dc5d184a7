"""Steps on which ranks agree: numbered all-gathers of small payloads over the control connections.

All ranks take the same steps in the same order. Survivors of a lost peer may have come to different numbers, so the
numbers start again above all earlier ones, each time a peer is masked: ranks with the same mask meet again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ..errors import ConfigError, PeerLost, PeerTimeout, ProtocolError, UcclEpError, after_loss, after_silence
from .failures import Liveness
from .frames import GATHER, MOST_PAYLOAD, Frame, close_all, send_frame
from .links import Link
from .reports import Wait

__all__ = ["CLOSE", "Steps"]

#: Name of the step in which ranks wait for each other before they let go of their memory.
CLOSE = "close"
#: Who wakes so much later than at the end of a step did not run until then, and waits this long again.
_STILL_SECONDS, _AGAIN_SECONDS = 0.1, 0.5
#: Steps numbered between two maskings, as a shift.
_MASK_SHIFT = 32

#: By peer: payload and descriptors of its part.
Parts = dict[int, tuple[bytes, list[int]]]


class Steps:
    """The steps of one rank.

    Args:
        rank, ranks: of the group.
        liveness: who takes part; its lock guards everything here.
        timeout: seconds that a step may last by default.

    Attributes:
        links: connections by peer. Writer: the mesh, once connected.
    """

    def __init__(self, rank: int, ranks: int, liveness: Liveness, timeout: float) -> None:
        self.links: Mapping[int, Link] = {}
        self._rank = rank
        self._ranks = ranks
        self._liveness = liveness
        self._timeout = timeout
        self._changed = liveness.changed
        #: Why no step goes on, "" while they do.
        self._ended = ""
        self._end_kind = UcclEpError
        #: By number of the step, what has come, maybe before this rank takes the step. Writer: the reader thread.
        self._inbox: dict[int, Parts] = {}
        #: Number of the next step, and of the oldest one that somebody here may still wait for.
        self._next = self._oldest = 0
        #: Name of the step in which this rank is, and the peers of which nothing has come; the reader answers from it.
        self._present: tuple[str, Callable[[], list[int]]] = "", list

    def keep(self, peer: int, frame: Frame) -> None:
        """Keep a part of a step, its descriptors too, for :meth:`gather`, unless this rank has left that step.

        Raises ValueError when the peer has given its part of the step before.
        """
        with self._changed:
            if frame.sequence < self._oldest:
                return
            received = self._inbox.setdefault(frame.sequence, {})
            if peer in received:
                raise ValueError(f"rank {peer} sent its part of step {frame.sequence} twice")
            received[peer] = (frame.payload, frame.descriptors[:])
            frame.descriptors.clear()
            self._changed.notify_all()

    def gather(
        self, name: str, payload: bytes = b"", *, descriptors: Sequence[int] = (), timeout: float | None = None
    ) -> list[tuple[bytes, list[int]]]:
        """All-gather among the ranks that are not masked; all of them call it in the same order with the same ``name``.

        Args:
            name: of the step, checked against the peers'.
            payload: at most 1 MiB.
            descriptors: handed to peers on this host, at most 8; the receiver owns what it gets.
            timeout: seconds.

        Returns:
            (payload, descriptors) by rank; own payload with no descriptors, ``(b"", [])`` for masked ranks.

        Raises:
            PeerLost, PeerTimeout: naming the lost ranks, a missing peer, or one that has closed its Buffer.
            ProtocolError: a peer is in another step. Evicted: this rank takes part no more.
            UcclEpError: :meth:`end` was called meanwhile.
        """
        label = name.encode()
        if len(payload) + len(label) > MOST_PAYLOAD - 2:
            raise ConfigError(f"control payload of {len(payload)} bytes for {name!r} exceeds {MOST_PAYLOAD}")
        if self._ended:
            # nobody may take what this rank says now for a part of a step
            raise self._end_kind(f"{name}, rank {self._rank}: {self._ended}")
        number, self._next = self._next, self._next + 1
        expected = self.links.keys() - self._liveness.masked
        for peer in expected:
            link = self.links[peer]
            send_frame(link, GATHER, number, _prefix(name) + payload, descriptors if link.local else ())
        received: Parts = {}
        try:
            received = self._await(name, number, expected, self._timeout if timeout is None else timeout)
            return self._result(name, payload, {peer: received.pop(peer) for peer in expected})
        finally:
            with self._changed:
                self._present = "", list
                self._oldest = number + 1
                received = self._inbox.pop(number, received)
            # what nobody takes: parts of a step that failed, or from peers that were left out
            _close_parts(received)

    def _await(self, name: str, number: int, expected: frozenset[int] | set[int], seconds: float) -> Parts:
        """The parts of step ``number``, once all that are ``expected`` are there."""
        liveness, end, again = self._liveness, time.monotonic() + seconds, False
        with self._changed:
            received = self._inbox.setdefault(number, {})
            self._present = name, lambda: sorted(expected - received.keys())
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        bool(self._ended)
                        or expected <= received.keys()
                        or liveness.is_hopeless(expected - received.keys())
                    ),
                    max(end - time.monotonic(), 0.0),
                )
                missing = sorted(expected - received.keys())
            if not missing:
                return received
            if not again and time.monotonic() > end + _STILL_SECONDS:
                # this rank did not run when its time was over: what came meanwhile is not read yet
                again, end = True, time.monotonic() + _AGAIN_SECONDS
            if self._ended:
                raise self._end_kind(f"{name}, rank {self._rank}: {self._ended}")
            # nothing of this step is lost where that has to do with masked ranks alone
            liveness.check(name)
            if left := sorted(liveness.departed.keys() & missing):
                how = liveness.how_gone(left[0])
                raise PeerLost(
                    f"{name}, rank {self._rank}: rank {left[0]} is gone ({how}). {after_loss(left[0])}",
                    peer=left[0],
                    phase=name,
                )
            if time.monotonic() >= end:
                break
        raise PeerTimeout(
            f"{name}, rank {self._rank}: no answer from ranks {missing} within {seconds:g} s ({len(received)} "
            f"of {len(expected)} arrived). Likely cause: they have not made the same call, or are stuck. "
            f"{after_silence(missing[0])}",
            peer=missing[0],
            phase=name,
            arrived=len(received),
            expected=len(expected),
        )

    def _result(self, name: str, payload: bytes, received: Parts) -> list[tuple[bytes, list[int]]]:
        """Everybody's part of a step by rank. Raises PeerLost when one of the ranks was closing its Buffer instead,
        ProtocolError when a peer was in a step of any other name."""
        result: list[tuple[bytes, list[int]]] = [(b"", []) for _ in range(self._ranks)]
        result[self._rank] = (payload, [])
        prefix = _prefix(name)
        for peer, (data, taken) in received.items():
            if not data.startswith(prefix):
                _close_parts(received)
                theirs = data[2 : 2 + int.from_bytes(data[:2], "little")].decode(errors="replace")
                raise self._other_step(name, peer, theirs)
            result[peer] = (data[len(prefix) :], taken)
        return result

    def _other_step(self, mine: str, peer: int, theirs: str) -> UcclEpError:
        """What to raise in step ``mine`` when ``peer`` is in step ``theirs``."""
        cause = "the ranks have not made the same calls"
        if theirs == CLOSE:
            words = f"{mine}, rank {self._rank}: rank {peer} has closed its Buffer. Likely cause: {cause}"
        elif mine == CLOSE:
            words = f"rank {peer} has begun another step ({theirs}): {cause}"
        else:
            return ProtocolError(f"rank {self._rank} is in step {mine!r}, rank {peer} in {theirs!r}: {cause}")
        return PeerLost(words, peer=peer, phase=mine)

    @property
    def present(self) -> str:
        """Name of the step in which this rank is, "" while it is in none."""
        return self._present[0]

    def waits_for(self) -> Wait | None:
        """For whom a step of this rank waits, None when it is in none."""
        with self._changed:
            name, missing = self._present
            if name == CLOSE:
                return None  # nobody owes a rank that leaves anything
            return next((Wait(peer, name) for peer in missing()), None)

    def requested(self, name: str) -> dict[int, bytes]:
        """By peer, what came from peers that are in this rank's next step already, when that step is ``name``."""
        if self._next not in self._inbox:
            return {}  # the usual answer, given many times a second
        prefix = _prefix(name)
        with self._changed:
            waiting = self._inbox.get(self._next, {})
            return {peer: data[len(prefix) :] for peer, (data, _) in waiting.items() if data.startswith(prefix)}

    def renumber(self) -> None:
        """A rank was masked: numbers start again above all that were used with fewer masked."""
        with self._changed:
            self._next = self._oldest = len(self._liveness.masked) << _MASK_SHIFT
            stale = [self._inbox.pop(number) for number in list(self._inbox) if number < self._oldest]
        for received in stale:
            _close_parts(received)

    def end(self, because: str = "this Buffer was closed meanwhile", kind: type[UcclEpError] = UcclEpError) -> None:
        """A gather in another thread ends, and any later one, with an error of ``kind``."""
        with self._changed:
            if not self._ended:
                self._ended, self._end_kind = because, kind
            self._changed.notify_all()

    def close(self) -> None:
        """Close the descriptors that nobody took."""
        for received in self._inbox.values():
            _close_parts(received)


def _prefix(name: str) -> bytes:
    """What the payload of every part of step ``name`` begins with."""
    label = name.encode()
    return len(label).to_bytes(2, "little") + label


def _close_parts(parts: Parts) -> None:
    for _, descriptors in parts.values():
        close_all(descriptors)
