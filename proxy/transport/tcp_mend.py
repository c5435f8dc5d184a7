"""Connects what broke again: a connection that ends while both processes live costs neither of them anything.

Each endpoint has one thread for it, which sleeps until a connection breaks or somebody comes to the listener. Whoever
notices a break connects, so that one which only one side sees is mended as well; where both connect, the connection of
the higher rank is taken. Both prove the job's secret again and say, proven, how many frames they have whole: the stream
goes on there. A peer that cannot be reached in time, whose process has ended, or that has done with this rank, is DOWN.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import TransportError
from ...native.background import start_thread
from ...protocol.frame import Verdict
from ...protocol.handshake import Handshake, Identity, Proven, Refused, accept, connect
from ...protocol.talks import Key, OneTalk
from . import tcp_words as tcp
from .tcp_data import order, pending, state_of
from .tcp_talks import TcpTalks

__all__ = ["AGAIN_SECONDS", "RECONNECT_SECONDS", "Mender"]

_log = logging.getLogger("uccl_ep_serving")

#: A connection that is not mended after this long is lost.
RECONNECT_SECONDS = 1.0
#: One that breaks again so soon after it was mended is lost at once: the link is bad, and the ranks agree on its price.
#: Within RECONNECT_SECONDS of the first break it is still the same one: what was connected again may have been an
#: attempt that the peer had given up.
AGAIN_SECONDS = 60.0
#: Pauses between two attempts, doubled up to the last.
_PAUSE_SECONDS = (0.01, 0.2)
#: The proxy thread obeys in its next iteration. One that does not is itself in trouble, which others notice.
_OBEY_SECONDS = 0.5
#: Pauses in which it is waited for, before that time is over and after.
_OBEY_PAUSES = (0.0001, 0.02)
_TICK_SECONDS = 0.05
#: That nobody can be let in is told once in so long.
_QUIET_SECONDS = 60.0
#: Time in which this process did not run is no time in which a peer could have answered.
_STOOD_STILL_SECONDS = 0.5


@dataclass
class _Break:
    since: float
    why: int
    due: float
    pause: float = _PAUSE_SECONDS[0]


class Mender(TcpTalks):
    """Mends the connections of one endpoint.

    Args:
        me: what this endpoint says and proves.
        listener: listening since before the peers knew its address.
        where: (host, port) by peer.
        context: address of the endpoint's context.
        links: its connection records.
        descriptors: of the connections, by (peer, connection); owned by the endpoint, which closes them at the end.
        set_keys: called with a link's index and what its new handshake came to, before the link goes on.

    Attributes:
        reconnections: how many were made again. Reader: any thread.

    Raises:
        TransportError: the operating system refuses a descriptor or the thread.
    """

    def __init__(
        self,
        me: Identity,
        listener: socket.socket,
        *,
        where: Mapping[int, tuple[str, int]],
        context: npt.NDArray[np.int64],
        links: npt.NDArray[np.int64],
        descriptors: dict[Key, int],
        set_keys: Callable[[int, Proven], None],
    ) -> None:
        super().__init__(me, listener, len(descriptors))
        self.reconnections = 0
        self._where = where
        self._context = context
        self._links = links
        self._descriptors = descriptors
        self._set_keys = set_keys
        self._peers = frozenset(where)
        self._breaks: dict[Key, _Break] = {}
        #: When each broke, a ``time.monotonic()`` instant, but for what is still the same break.
        self._broke: dict[Key, float] = {}
        #: When each was connected again last, a ``time.monotonic()`` instant.
        self._mended: dict[Key, float] = {}
        #: That nobody could be let in is not told before, a ``time.monotonic()`` instant.
        self._quiet_until = 0.0
        self._stopping = self._all_started = False
        with contextlib.ExitStack() as undo:
            undo.callback(self.selector.close)
            try:
                self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            except OSError as error:
                raise self.unable(error, "no way to learn that a connection breaks") from None
            undo.callback(os.close, self._bell)
            listener.setblocking(False)
            self.observe(listener, selectors.EVENT_READ, None)
            try:
                self.selector.register(self._bell, selectors.EVENT_READ, None)
            except OSError as error:
                raise self.unable(error, "no way to learn that a connection breaks") from None
            context[tcp.BELL] = self._bell
            self._thread = start_thread(f"uccl-ep tcp {me.rank}.{me.proxy}", self._run)
            undo.pop_all()

    def established(self) -> None:
        """The proxies of all ranks run: from now on a connection that is not made again in time is lost. Until then a
        peer cannot let go of its end."""
        self._all_started = True

    def close(self) -> None:
        """End the thread and close what it uses. Never raises."""
        self._stopping = True
        with contextlib.suppress(OSError):
            os.eventfd_write(self._bell, 1)
        if self._thread is not threading.current_thread():  # where a Buffer is collected
            self._thread.join(5.0)
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors and nothing else: what a forked child must do. May be called twice."""
        self._context[tcp.BELL] = -1
        for talk in list(self.talks):
            talk.socket.close()
        self.selector.close()
        bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            if not self._stopping:  # else what it watches may have been closed under it
                _log.exception("rank %d mends tcp connections no more", self.me.rank)
        finally:
            # from here on the loop itself gives up what breaks
            self._context[tcp.BELL] = -1
            for key in self._descriptors:
                if not self._stopping and state_of(self._address(key)) == tcp.BROKEN:
                    self._order(key, tcp.GIVE_UP)

    def _serve(self) -> None:
        before = time.monotonic()
        while not self._stopping:
            now = time.monotonic()
            if not self._all_started or now - before > _STOOD_STILL_SECONDS:
                for broken in self._breaks.values():
                    broken.since += now - before
            self._collect(now)
            self._look_at_the_time(now)
            before = time.monotonic()
            due = min((broken.due for broken in self._breaks.values()), default=math.inf)
            wait = min(max(due - before, 0.0), _TICK_SECONDS) if self._breaks or self.talks else None
            for key, _ in self.selector.select(wait):
                if key.fileobj is self.listener:
                    self._let_in()
                elif key.fileobj == self._bell:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._bell)
                elif key.data in self.talks:
                    self.step(key.data)
            if wait is None:
                before = time.monotonic()

    def _let_in(self) -> None:
        try:
            self.answer()
        except TransportError as error:
            now = time.monotonic()
            if now >= self._quiet_until:
                self._quiet_until = now + _QUIET_SECONDS
                _log.warning("%s", error)
            time.sleep(_TICK_SECONDS)  # who waits is still there, and others need the processor

    def _address(self, key: Key) -> int:
        return int(self._links.ctypes.data) + self._index(key) * 8 * tcp.LINK_WORDS

    def _index(self, key: Key) -> int:
        return key[0] * self.me.connections + key[1]

    def _word(self, key: Key, word: int) -> int:
        return int(self._links[self._index(key), word])

    def _order(self, key: Key, what: int) -> bool:
        """Have the proxy thread do something with a connection; False when it does not in time.

        An order stays until it is obeyed. So for a TAKE there is no such time: the descriptor in it must stay open, or
        its number is another one's by then. While the endpoint is closed the proxy has stopped already.
        """
        link = self._address(key)
        order(int(self._context.ctypes.data), link, what)
        deadline = time.monotonic() + _OBEY_SECONDS
        while pending(link) != tcp.NO_ORDER:
            late = time.monotonic() > deadline
            if self._stopping or (late and what != tcp.TAKE):
                return False
            time.sleep(_OBEY_PAUSES[late])
        return True

    # -- breaks ---------------------------------------------------------------------------------------------------

    def _collect(self, now: float) -> None:
        """Begin with what broke, and leave what is over."""
        broken = {key for key in self._descriptors if state_of(self._address(key)) == tcp.BROKEN}
        for key in self._breaks.keys() - broken:
            self._leave(key)
        # in the order in which they broke: a rank that dies makes others give up and close as well
        for key in sorted(broken - self._breaks.keys(), key=lambda key: self._word(key, tcp.BROKE_AT)):
            if self._begin(key, now, now) and now - self._mended.get(key, -math.inf) < AGAIN_SECONDS:
                self._give_up(key, f"it was connected again {now - self._mended[key]:.1f} s ago")

    def _begin(self, key: Key, now: float, due: float) -> bool:
        """Begin with one that broke; whether that is a new break."""
        self._breaks[key] = _Break(now, self._word(key, tcp.REASON), due)
        is_new = now - self._broke.get(key, -math.inf) > RECONNECT_SECONDS
        if is_new:
            self._broke[key] = now
        return is_new

    def _look_at_the_time(self, now: float) -> None:
        self.drop_late(now)
        for key, broken in list(self._breaks.items()):
            if now - broken.since > RECONNECT_SECONDS:
                self._give_up(key, f"it could not be connected again in {RECONNECT_SECONDS:g} s")
            elif now >= broken.due:
                broken.due = math.inf  # until this attempt has failed
                try:
                    asked = self.dial(key, self._where[key[0]], self._ask(key), now + _PAUSE_SECONDS[1])
                except TransportError as error:
                    _log.warning("%s", error)
                    asked = False
                if not asked:
                    self._later(key)

    def _ask(self, key: Key) -> Handshake:
        return connect(self.me, *key, self._word(key, tcp.IN_NUMBER))

    def _later(self, key: Key, pause: float = 0.0) -> None:
        if broken := self._breaks.get(key):
            broken.due = time.monotonic() + max(pause, broken.pause)
            broken.pause = min(2 * broken.pause, _PAUSE_SECONDS[1])

    def _give_up(self, key: Key, why: str, level: int = logging.WARNING) -> None:
        said = os.strerror(self._word(key, tcp.REASON) or errno.ECONNRESET)
        _log.log(level, "rank %d lost a tcp connection to rank %d (%s): %s", self.me.rank, key[0], said, why)
        self._order(key, tcp.GIVE_UP)
        self._leave(key)

    def _leave(self, key: Key) -> None:
        self._breaks.pop(key, None)
        for talk in [talk for talk in self.talks if talk.wanted == key]:
            self.forget(talk)

    # -- handshakes -----------------------------------------------------------------------------------------------

    def greeting(self) -> Handshake:
        return accept(self.me, self._peers, functools.partial(self._count, time.monotonic()))

    def _count(self, begun: float, peer: int, connection: int) -> int | Verdict:
        """A proven peer connects: it has noticed a break, which this rank may not have."""
        key = peer, connection
        if self._stopping or state_of(self._address(key)) in (tcp.NONE, tcp.OVER):
            return Verdict.LEFT
        if peer < self.me.rank and any(talk.wanted == key for talk in self.talks):
            return Verdict.CROSSED
        if begun < self._mended.get(key, -math.inf):
            return Verdict.CROSSED  # asked for before the present connection was made: its count is an old one
        if not self._order(key, tcp.LET_GO):
            raise ValueError("the proxy of that connection does not answer")
        if state_of(self._address(key)) != tcp.BROKEN:
            return Verdict.LEFT
        if key not in self._breaks:
            now = time.monotonic()
            self._begin(key, now, now + _PAUSE_SECONDS[1])
        # nothing is taken of the old connection from here on
        return self._word(key, tcp.IN_NUMBER)

    def proven(self, talk: OneTalk, proven: Proven) -> None:
        key = proven.key
        if state_of(self._address(key)) != tcp.BROKEN:
            # another one was faster, or the peer is dropped: whoever is at the other end connects again, or learns it
            talk.socket.close()
            return
        old, index = self._descriptors[key], self._index(key)
        self._set_keys(index, proven)
        missing = self._word(key, tcp.SENT_FRAMES) - proven.count
        self._links[index, tcp.NEW_FD] = talk.socket.fileno()
        self._links[index, tcp.NEW_COUNT] = proven.count
        if not self._order(key, tcp.TAKE) or state_of(self._address(key)) == tcp.BROKEN:
            talk.socket.close()
            self._later(key)
            return
        self._descriptors[key] = talk.socket.detach()
        os.close(old)
        now = time.monotonic()
        broken = self._breaks.get(key)
        self._leave(key)
        self._mended[key] = now
        self.reconnections += 1
        _log.warning(
            "rank %d: tcp connection %d to rank %d, %s, broke (%s) and was connected again after %.0f ms; "
            "%d frames are sent again",
            self.me.rank,
            key[1],
            key[0],
            talk.where,
            "the peer noticed it" if broken is None or not broken.why else os.strerror(broken.why),
            0.0 if broken is None else 1e3 * (now - broken.since),
            missing,
        )

    def refusal(self, talk: OneTalk, refused: Refused) -> None:
        self.forget(talk)
        if talk.wanted is None:
            self.note_stranger(talk, refused.verdict.words)
        elif refused.verdict is Verdict.CROSSED:
            self._later(talk.wanted, _PAUSE_SECONDS[1])
        elif refused.verdict is Verdict.LEFT and talk.wanted in self._breaks:
            self._give_up(talk.wanted, refused.verdict.words, logging.INFO)
        else:
            # the two have fitted before: what was heard was garbled, or somebody else listens there
            self._later(talk.wanted)

    def failed(self, talk: OneTalk, words: str, code: int = 0) -> None:
        self.forget(talk)
        if talk.wanted is None:
            self.note_stranger(talk, words)
        elif code == errno.ECONNREFUSED and talk.wanted in self._breaks:
            # a rank listens for as long as its Buffer is open: it has closed that, which it says itself, or it is dead,
            # which its control connection tells
            self._give_up(talk.wanted, "nobody listens for that rank any more", logging.INFO)
        else:
            self._later(talk.wanted)
