"""Control connections: one per pair of ranks, for agreement, liveness, goodbye and handing over descriptors.

Ranks on one host (same kernel, same network namespace) talk over abstract Unix sockets, which leave no file behind and
carry the descriptors of shared segments; others over TCP. Both ends prove the job's secret. One thread per Buffer reads
all of them: a connection that closes without a goodbye is a lost peer, seen as soon as the kernel closes the sockets of
a killed process. Frames are a fixed header and a bounded payload.

Steps on which ranks agree (gathers) are numbered. Survivors of a lost peer may have come to different numbers, so the
numbers start anew, above all earlier ones, each time a peer is masked: ranks with the same mask meet again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

from ..config import Settings
from ..errors import ConfigError, PeerLost, PeerTimeout, ProtocolError, UcclEpError
from ..native.background import start_thread
from ..protocol.handshake import tune
from .blame import Blame
from .bootstrap import Introduction
from .failures import Absences, Verdict
from .frames import GATHER, GOODBYE, MASKED, MOST_PAYLOAD, Frame, close_all, read_frames, send_frame
from .links import Link, Listeners, meet, waking_selector

__all__ = ["CLOSE", "ControlMesh"]

_log = logging.getLogger("uccl_ep_serving.control_plane.mesh")

#: Name of the step in which ranks wait for each other before they let go of their memory.
CLOSE = "close"
#: Steps numbered between two maskings, as a shift.
_EPOCH_SHIFT = 32

#: Open meshes, so that a forked child can let go of their sockets (peers must see a dead parent's connections close).
_open_meshes: weakref.WeakSet[ControlMesh] = weakref.WeakSet()


class ControlMesh:
    """Connections of one rank to all others.

    Args:
        rank, ranks: of the group.
        settings: interface and deadlines.

    Attributes:
        socket_name, address, port: where this rank listens; goes into its card.
        absences: who is gone or has given up.
        blame: finds out because of whom.
        on_lost, on_goodbye: called from the reader thread with the peer's rank.
        on_masked: called from the reader thread with the rank that masked and the rank that was masked.
        on_asked: called from the reader thread with a peer that takes part in a step (:meth:`asked`).
    """

    def __init__(self, rank: int, ranks: int, settings: Settings) -> None:
        self.rank = rank
        self.ranks = ranks
        self.absences = Absences(rank, ranks)
        self.blame = Blame(rank, ranks, self.absences)
        self.blame.waits_for = self.waits_for
        self.on_lost: Callable[[int], None] = lambda peer: None
        self.on_goodbye: Callable[[int], None] = lambda peer: None
        self.on_masked: Callable[[int, int], None] = lambda by, peer: None
        self.on_asked: Callable[[int], None] = lambda peer: None
        self._settings = settings
        self._selector, self._wake, self._waker = waking_selector(rank)
        with contextlib.ExitStack() as undo:
            for one in (self._selector, self._wake, self._waker):
                undo.callback(one.close)
            self._listeners = Listeners(rank, settings)
            undo.pop_all()
        self.socket_name = self._listeners.socket_name
        self.address, self.port = self._listeners.address, self._listeners.port
        self._links: dict[int, Link] = {}
        self._changed = self.absences.changed
        self._inbox: dict[int, dict[int, tuple[bytes, list[int]]]] = {}
        #: Number of the next step, and of the oldest one that somebody here may still wait for.
        self._sequence = self._oldest = 0
        #: Name of the step in which this rank is, and the peers of which nothing has come; the reader answers from it.
        self._step: tuple[str, Callable[[], list[int]]] = "", list
        self._closing = False
        #: When the reader does what for :meth:`limit`. Writer: the host; reader: the reader.
        self._limit: tuple[float, Callable[[], None]] | None = None
        self._reader: threading.Thread | None = None
        _open_meshes.add(self)

    # -- connecting ---------------------------------------------------------------------------------------------

    def connect(self, introduction: Introduction) -> None:
        """Connect to every other rank: to lower ones actively, higher ones connect to us.

        Raises BootstrapError naming the ranks that are missing at the deadline, that are gone, or that do not prove
        the secret.
        """
        try:
            self._links = meet(self.rank, self.ranks, self._listeners, introduction, self._settings.connect_timeout)
        finally:
            self._listeners.close()
        self.blame.links = self._links
        self._start_reader()

    def _start_reader(self) -> None:
        for link in self._links.values():
            seconds = int(self._settings.connect_timeout) + 1
            link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))
            if not link.local:
                tune(link.socket)
            self._selector.register(link.socket, selectors.EVENT_READ, link)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._reader = start_thread(f"uccl-ep control {self.rank}", self._read)

    # -- reading ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def limit(self, deadline: float, act: Callable[[], None]) -> Iterator[None]:
        """A limit for a block that waits for something which has none: ``act``, called by the thread that reads unless
        the block has ended by ``deadline``, a ``time.monotonic()`` instant, makes its wait end."""
        self._limit = deadline, act
        try:
            self._wake_reader()
            yield
        finally:
            self._limit = None

    def _wake_reader(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def _read(self) -> None:
        acted = None
        while not self._closing:
            limit = self._limit
            if limit is not None and limit is not acted and time.monotonic() >= limit[0]:
                acted = limit
                limit[1]()
            patience = None if limit is None or limit is acted else max(limit[0] - time.monotonic(), 0.0)
            try:
                ready = self._selector.select(patience)
            except (OSError, ValueError):
                # abandon(), in another thread, closed the selector
                return
            for key, _ in ready:
                link: Link | None = key.data
                if link is None:
                    with contextlib.suppress(OSError):
                        self._wake.recv(64)
                    continue
                try:
                    self._read_link(link)
                except Exception as error:
                    # whatever it is, the other connections are read on; abandon(), in another thread, may have closed
                    # both of these
                    with contextlib.suppress(KeyError, ValueError):
                        self._selector.unregister(link.socket)
                    close_all(link.descriptors)  # of a frame that did not arrive whole
                    self._lose(link, error)

    def _read_link(self, link: Link) -> None:
        """Take what is there. Raises when the connection is over."""
        for frame in read_frames(link):
            try:
                if frame.kind == GATHER:
                    self._keep(link.peer, frame)
                elif frame.kind == GOODBYE:
                    self._note_goodbye(link)
                elif frame.kind == MASKED:
                    self._note_masked(link.peer, int.from_bytes(frame.payload, "little"))
                else:
                    self.blame.note(link, frame)
            finally:
                # what was not kept for a step nobody will take
                close_all(frame.descriptors)

    def _keep(self, peer: int, frame: Frame) -> None:
        """Keep a part of a step, its descriptors too, for :meth:`gather`, unless this rank has left that step.

        Raises ValueError when the peer has given its part of the step before.
        """
        with self._changed:
            self.absences.verdicts.pop(peer, None)  # it takes part in steps again
            if frame.sequence < self._oldest:
                return
            received = self._inbox.setdefault(frame.sequence, {})
            if peer in received:
                raise ValueError(f"rank {peer} sent its part of step {frame.sequence} twice")
            received[peer] = (frame.payload, frame.descriptors[:])
            frame.descriptors.clear()
            self._changed.notify_all()
        self._tell(self.on_asked, peer)

    def _note_goodbye(self, link: Link) -> None:
        link.said_goodbye = True
        with self._changed:
            self.absences.departed[link.peer] = time.monotonic()
            self._changed.notify_all()
        self._tell(self.on_goodbye, link.peer)

    def _note_masked(self, by: int, peer: int) -> None:
        if not 0 <= peer < self.ranks:
            raise ValueError(f"rank {by} sent a malformed control frame")
        with self._changed:
            self.absences.accused.setdefault(peer, []).append(by)
            self._changed.notify_all()
        self._tell(self.on_masked, by, peer)

    def _lose(self, link: Link, error: Exception) -> None:
        if link.said_goodbye or self._closing:
            return
        expected = isinstance(error, (OSError, ValueError))
        # what _read_link does not promise to raise is a fault of this rank: its words alone may say nothing
        reason = str(error) if expected else f"{type(error).__name__}: {error}"
        with self._changed:
            if not isinstance(error, ConnectionError):
                # not the usual end of a process, and maybe of this rank's own making
                self.absences.endings[link.peer] = reason
            self.absences.lost.append(link.peer)
            self._changed.notify_all()
        _log.error(
            "rank %d lost rank %d: its control connection ended (%s)",
            self.rank,
            link.peer,
            reason,
            exc_info=None if expected else error,
        )
        self._tell(self.on_lost, link.peer)

    def _tell(self, callback: Callable[..., None], *ranks: int) -> None:
        """Whatever a callback raises, the other connections are read on."""
        try:
            callback(*ranks)
        except Exception:
            _log.exception("rank %d could not act on what it heard of ranks %s", self.rank, ranks)

    # -- agreeing -----------------------------------------------------------------------------------------------

    @property
    def local_peers(self) -> frozenset[int]:
        """Peers on this host, which can be handed descriptors."""
        return frozenset(peer for peer, link in self._links.items() if link.local)

    def gather(
        self,
        name: str,
        payload: bytes = b"",
        *,
        descriptors: Sequence[int] = (),
        without: frozenset[int] = frozenset(),
        timeout: float | None = None,
    ) -> list[tuple[bytes, list[int]]]:
        """All-gather of small payloads; all ranks call it in the same order with the same ``name``.

        Args:
            name: of the step, checked against the peers'.
            payload: at most 1 MiB.
            descriptors: handed to peers on this host, at most 8; the receiver owns what it gets.
            without: peers that do not take part (masked ones); their entry is ``(b"", [])``.
            timeout: seconds, by default the connect timeout.

        Returns:
            (payload, descriptors) by rank; own payload with no descriptors.

        Raises:
            PeerLost, PeerTimeout: naming a missing peer, or one that has closed its Buffer. ProtocolError: a peer is in
            another step.
            UcclEpError: :meth:`close` was called meanwhile.
        """
        label = name.encode()
        if len(payload) + len(label) > MOST_PAYLOAD - 2:
            raise ConfigError(f"control payload of {len(payload)} bytes for {name!r} exceeds {MOST_PAYLOAD}")
        sequence, self._sequence = self._sequence, self._sequence + 1
        body = len(label).to_bytes(2, "little") + label + payload
        expected = self._links.keys() - without
        for peer in expected:
            link = self._links[peer]
            send_frame(link, GATHER, sequence, body, descriptors if link.local else ())
        seconds = self._settings.connect_timeout if timeout is None else timeout
        received: dict[int, tuple[bytes, list[int]]] = {}
        try:
            with self._changed:
                received = self._inbox.setdefault(sequence, received)
                self._step = name, lambda: sorted(expected - received.keys())
                self._changed.wait_for(
                    lambda: (
                        self._closing
                        or expected <= received.keys()
                        or self.absences.hindrances(expected, received.keys())
                    ),
                    seconds,
                )
                missing = sorted(expected - received.keys())
                hindrances = self.absences.hindrances(expected, received.keys())
            if missing:
                if self._closing:
                    raise UcclEpError(f"{name}, rank {self.rank}: this Buffer was closed meanwhile")
                self.absences.raise_absent(name, without, among=hindrances)
                raise PeerTimeout(
                    f"{name}, rank {self.rank}: no answer from ranks {missing} within {seconds:g} s ({len(received)} "
                    f"of {len(expected)} arrived). Likely cause: they have not made the same call, or are stuck",
                    peer=missing[0],
                    phase=name,
                    arrived=len(received),
                    expected=len(expected),
                )
            return self._result(label, payload, {peer: received.pop(peer) for peer in expected})
        finally:
            with self._changed:
                self._step = "", list
                self._oldest = sequence + 1
                self._inbox.pop(sequence, None)
            # what nobody takes: parts of a step that failed, or from peers that were left out
            for _, taken in received.values():
                close_all(taken)

    def waits_for(self) -> Verdict | None:
        """For whom a step of this rank waits, None when it is in none; for :class:`Blame`."""
        with self._changed:
            name, missing = self._step
            return next((Verdict(self.rank, peer, True, phase=name) for peer in missing()), None)

    def _result(
        self, label: bytes, payload: bytes, received: dict[int, tuple[bytes, list[int]]]
    ) -> list[tuple[bytes, list[int]]]:
        """Everybody's part of a step by rank. Raises PeerLost when one of the ranks was closing its Buffer instead,
        ProtocolError when a peer was in a step of any other name."""
        result: list[tuple[bytes, list[int]]] = [(b"", []) for _ in range(self.ranks)]
        result[self.rank] = (payload, [])
        for peer, (data, taken) in received.items():
            end = 2 + int.from_bytes(data[:2], "little")
            if data[2:end] != label:
                for _, others in received.values():
                    close_all(others)
                raise self._astray(label.decode(), peer, data[2:end].decode(errors="replace"))
            result[peer] = (data[end:], taken)
        return result

    def _astray(self, mine: str, peer: int, theirs: str) -> UcclEpError:
        """What to raise in step ``mine`` when ``peer`` is in step ``theirs``."""
        cause = "the ranks have not made the same calls"
        if theirs == CLOSE:
            words = f"{mine}, rank {self.rank}: rank {peer} has closed its Buffer. Likely cause: {cause}"
        elif mine == CLOSE:
            words = f"rank {peer} has begun another step ({theirs}): {cause}"
        else:
            return ProtocolError(f"rank {self.rank} is in step {mine!r}, rank {peer} in {theirs!r}: {cause}")
        return PeerLost(words, peer=peer, phase=mine)

    # -- masking ------------------------------------------------------------------------------------------------

    def restart(self, masked: frozenset[int]) -> None:
        """Ranks ``masked`` are masked: the numbers of steps start anew, above all that were used with fewer masked."""
        with self._changed:
            self.absences.masked = masked
            self.absences.verdicts.pop(self.rank, None)
            self._sequence = self._oldest = len(masked) << _EPOCH_SHIFT
            stale = [self._inbox.pop(sequence) for sequence in list(self._inbox) if sequence < self._oldest]
        for received in stale:
            for _, taken in received.values():
                close_all(taken)

    def announce_mask(self, masked: int) -> None:
        """Tell every peer, the masked one too, that this rank has masked rank ``masked``."""
        for link in list(self._links.values()):
            if link.peer not in self.absences.lost and link.peer not in self.absences.departed:
                send_frame(link, MASKED, body=masked.to_bytes(4, "little"))

    def asked(self, name: str) -> dict[int, bytes]:
        """By peer, what came from peers that are in this rank's next step already, when that step is ``name``."""
        if self._sequence not in self._inbox:
            return {}  # the usual answer, given many times a second
        label = len(name.encode()).to_bytes(2, "little") + name.encode()
        with self._changed:
            waiting = self._inbox.get(self._sequence, {})
            return {peer: data[len(label) :] for peer, (data, _) in waiting.items() if data.startswith(label)}

    # -- closing ------------------------------------------------------------------------------------------------

    def goodbye(self) -> None:
        """Tell every peer that this rank leaves in good order; from then on its silence is no error."""
        for link in self._links.values():
            send_frame(link, GOODBYE)

    def close(self) -> None:
        """Stop reading and close all connections; a gather in another thread ends. May be called twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._wake_reader()
            self._reader.join(5.0)
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors and nothing else: what a forked child must do."""
        _open_meshes.discard(self)
        self._closing = True
        for one in (self._wake, self._waker, *(link.socket for link in self._links.values())):
            one.close()
        self._listeners.close()
        for link in self._links.values():
            close_all(link.descriptors)
        for received in self._inbox.values():
            for _, taken in received.values():
                close_all(taken)
        self._selector.close()


def _abandon_in_child() -> None:
    for mesh in list(_open_meshes):
        mesh.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
