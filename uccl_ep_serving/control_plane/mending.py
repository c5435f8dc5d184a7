"""Connects TCP control connections again that broke while both processes live, in the thread that reads them.

Whoever notices a break connects to the peer's listener; where both do, the connection of the higher rank is taken. Both
prove the job's secret again and say, proven, how many frames they have: what the other lacks is sent again. Connections
over Unix sockets carry descriptors and cannot be cut from outside: their end is judged by :mod:`.endings`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import math
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..protocol.frame import Verdict
from ..protocol.handshake import Handshake, Identity, Proven, Refused, accept, connect
from ..protocol.talks import OneTalk, Talks
from .bootstrap import Card
from .endings import DEAD, DOWN, GONE
from .links import Link
from .seal import Seal

__all__ = ["AGAIN_SECONDS", "RECONNECT_SECONDS", "Mending"]

_log = logging.getLogger("uccl_ep_serving.control_plane.mesh")

#: A connection that is not made again after this long is lost.
RECONNECT_SECONDS = 1.0
#: One that breaks again so soon after it was made again is lost at once: the link is bad. Within RECONNECT_SECONDS of
#: the first break it is still the same one: what was made again may have been an attempt that the peer had given up.
AGAIN_SECONDS = 60.0
#: Pauses between two attempts, doubled up to the last.
_PAUSE_SECONDS = (0.01, 0.2)
#: Longest step of the clock that counts: time in which this rank did not run is no time in which a peer could answer.
_MOST_STEP_SECONDS = 0.05


@dataclass
class _Break:
    """``whole``: where the peer's process ended, all that it had said was heard."""

    link: Link
    whole: bool
    reason: str
    since: float
    due: float
    pause: float = _PAUSE_SECONDS[0]


class Mending(Talks):
    """Connections over TCP that broke and are not judged yet. All of it belongs to the thread that reads them.

    Args:
        me: what this rank says and proves.
        listener: where its peers connect.
        selector: in which the reader watches its connections.
        cards: of all ranks.
        links: the connections, by peer.
        is_left: whether this rank has done with a peer.

    Attributes:
        restored: called with a link that goes on with another socket.
        reconnections: how many were made again. Reader: any thread.
    """

    def __init__(
        self,
        me: Identity,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        cards: Sequence[Card],
        links: Mapping[int, Link],
        is_left: Callable[[int], bool],
    ) -> None:
        super().__init__(me, listener, len(links), selector)
        self.restored: Callable[[Link], None] = lambda link: None
        self.reconnections = 0
        self._cards = cards
        self._links = links
        self._is_left = is_left
        self._peers = frozenset(links)
        self._breaks: dict[int, _Break] = {}
        #: How long the next attempt waits where what was made again breaks again, while it is the same break.
        self._pauses: dict[int, float] = {}
        #: When each broke, a ``time.monotonic()`` instant, but for what is still the same break.
        self._broke: dict[int, float] = {}
        self._looked = time.monotonic()
        #: When each was made again last, a ``time.monotonic()`` instant.
        self._mended: dict[int, float] = {}
        self._judged: list[tuple[int, str, str]] = []
        #: Peers whose connection is lost for good.
        self._over: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._breaks or self.talks or self._judged)

    def add(self, link: Link, whole: bool, reason: str) -> bool:
        """The connection has ended; False when it is not made again, and only its end is to be judged.

        Args:
            whole: in order, after a whole frame.
            reason: in words.
        """
        assert link.outbox is not None
        now, peer = time.monotonic(), link.peer
        if peer in self._breaks or peer in self._over:
            return True
        link.outbox.break_off()
        is_new = self._is_new(peer, now)
        if is_new and now - self._mended.get(peer, -math.inf) < AGAIN_SECONDS:
            self._over.add(peer)
            link.outbox.over = True
            return False
        pause = 0.0 if is_new else self._pauses.get(peer, _PAUSE_SECONDS[0])
        self._pauses[peer] = _PAUSE_SECONDS[0] if is_new else min(2 * pause, _PAUSE_SECONDS[1])
        self._begin(_Break(link, whole and is_new, reason, now, now + pause))
        return True

    def advance(self) -> list[tuple[int, str, str]]:
        """Connect where it is time to; (peer, DEAD | GONE | DOWN, reason) of those that are known to be lost by now."""
        now = time.monotonic()
        still = max(now - self._looked - _MOST_STEP_SECONDS, 0.0)
        self._looked = now
        self.drop_late(now)
        for peer, broken in list(self._breaks.items()):
            broken.since = min(broken.since + still, now)
            if now - broken.since > RECONNECT_SECONDS:
                self._lose(peer, DOWN, f"{broken.reason}, and not connected again in {RECONNECT_SECONDS:g} s")
            elif now >= broken.due:
                self._ask(peer, broken, now)
        judged, self._judged = self._judged, []
        return judged

    def close(self) -> None:
        """Forget them."""
        self._breaks.clear()
        for talk in list(self.talks):
            self.talks.pop(talk)
            talk.socket.close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _is_new(self, peer: int, now: float) -> bool:
        return now - self._broke.get(peer, -math.inf) > RECONNECT_SECONDS

    def _begin(self, broken: _Break) -> None:
        """Nothing more comes from the old socket; what is not whole of it is sent again."""
        link, now = broken.link, broken.since
        if self._is_new(link.peer, now):
            self._broke[link.peer] = now
        if not self._breaks:
            self._looked = now
        self._breaks[link.peer] = broken
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(link.socket)
        link.socket.close()
        link.buffer.clear()
        link.has_header = False

    def _ask(self, peer: int, broken: _Break, now: float) -> None:
        card, outbox = self._cards[peer], broken.link.outbox
        assert outbox is not None
        broken.due = math.inf  # until this attempt has failed
        handshake = connect(self.me, peer, 0, outbox.taken)
        try:
            asked = self.dial((peer, 0), (card.address, card.port), handshake, now + _PAUSE_SECONDS[1])
        except OSError:
            asked = False  # no descriptor, or no room to watch it: until the time is over
        if not asked:
            self._later(peer)

    def _later(self, peer: int, pause: float = 0.0) -> None:
        if broken := self._breaks.get(peer):
            broken.whole = False  # its process may have lived on, and kept what it had to say
            broken.due = time.monotonic() + max(pause, broken.pause)
            broken.pause = min(2 * broken.pause, _PAUSE_SECONDS[1])

    def _lose(self, peer: int, how: str, reason: str) -> None:
        self._over.add(peer)
        if (outbox := self._links[peer].outbox) is not None:
            outbox.over = True
        self._leave(peer)
        self._judged.append((peer, how, reason))

    def _leave(self, peer: int) -> _Break | None:
        for talk in [talk for talk in self.talks if talk.wanted == (peer, 0)]:
            self.forget(talk)
        return self._breaks.pop(peer, None)

    # -- handshakes ---------------------------------------------------------------------------------------------

    def let_in(self) -> None:
        """Somebody is at the listener."""
        try:
            self.answer()
        except OSError:
            # no descriptor is left: it is asked again, and others need the processor
            time.sleep(_PAUSE_SECONDS[0])

    def greeting(self) -> Handshake:
        return accept(self.me, self._peers, functools.partial(self._count, time.monotonic()))

    def _count(self, begun: float, peer: int, connection: int) -> int | Verdict:
        """A proven peer connects: it has noticed a break, which this rank may not have."""
        link = self._links[peer]
        if self._is_left(peer) or peer in self._over or link.outbox is None:
            return Verdict.LEFT
        if peer < self.me.rank and any(talk.wanted == (peer, 0) for talk in self.talks):
            return Verdict.CROSSED
        if begun < self._mended.get(peer, -math.inf):
            return Verdict.CROSSED  # asked for before the present connection was made: its count is an old one
        if peer not in self._breaks:
            link.outbox.break_off()
            now = time.monotonic()
            self._begin(_Break(link, False, "the peer noticed it", now, now + _PAUSE_SECONDS[1]))
        return link.outbox.taken

    def proven(self, talk: OneTalk, proven: Proven) -> None:
        broken = self._breaks.get(proven.peer)
        if broken is None:
            # another one was faster, or the peer is lost: whoever is at the other end connects again, or learns it
            talk.socket.close()
            return
        link = broken.link
        assert link.outbox is not None
        self._leave(proven.peer)
        link.socket, link.seal = talk.socket, Seal(proven.send_key, proven.receive_key)
        self._mended[proven.peer] = time.monotonic()
        self.reconnections += 1
        try:
            again = link.outbox.resume(link.socket, proven.count, link.seal)
        except ValueError as error:
            link.socket.close()
            self._lose(proven.peer, DOWN, str(error))
            return
        _log.warning(
            "rank %d: the control connection to rank %d (%s) broke (%s) and was connected again after %.0f ms; "
            "%d frames are sent again",
            self.me.rank,
            proven.peer,
            talk.where,
            broken.reason,
            1e3 * (self._mended[proven.peer] - broken.since),
            again,
        )
        self.restored(link)

    def refusal(self, talk: OneTalk, refused: Refused) -> None:
        self.forget(talk)
        if talk.wanted is None:
            self.note_stranger(talk, refused.verdict.words)
            return
        peer = talk.wanted[0]
        if refused.verdict is Verdict.CROSSED:
            self._later(peer, _PAUSE_SECONDS[1])
        elif refused.verdict is Verdict.LEFT and peer in self._breaks:
            self._lose(peer, DOWN, f"{self._breaks[peer].reason}, and {refused.verdict.words}")
        else:
            self._later(peer)

    def failed(self, talk: OneTalk, words: str, code: int = 0) -> None:
        self.forget(talk)
        if talk.wanted is None:
            self.note_stranger(talk, words)
            return
        peer = talk.wanted[0]
        broken = self._breaks.get(peer)
        if code == errno.ECONNREFUSED and broken is not None:
            # a process listens until it ends, and has closed all that it had open before anybody can see it gone
            self._lose(peer, DEAD if broken.whole else GONE, broken.reason)
        else:
            self._later(peer)

    def unable(self, error: OSError, what: str) -> OSError:
        return error
