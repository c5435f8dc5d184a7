"""Control connections: one per pair of ranks, read by one thread per Buffer.

Ranks on one host (same kernel, same network namespace) talk over abstract Unix sockets, which leave no file behind and
carry the descriptors of shared segments; others over TCP, each frame with a MAC (:mod:`.seal`). Both ends prove the
job's secret. A connection that closes without a goodbye is the end of a process or of a connection: :mod:`.endings`
tells which, and over TCP :mod:`.mending`, which connects again where both processes live. What the frames say goes to
who is concerned: parts of steps to :class:`.steps.Steps`, who leaves and who goes on to :class:`.failures.Liveness`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from ..config import Settings
from ..errors import TransportError, in_words
from ..native.background import start_thread
from ..protocol.handshake import tune
from ..protocol.talks import OneTalk
from .bootstrap import Card, Introduction
from .endings import DOWN, GONE, Endings, answer
from .failures import Liveness
from .frames import DOING, GATHER, GOODBYE, NOTE, Ended, close_all, count_frame, read_frames, send_frame, send_now
from .links import NO_ROOM, Link, Listeners, identity_of, meet, waking_selector
from .mending import Mending
from .outbox import Outbox
from .reports import Report
from .steps import CLOSE, Steps

__all__ = ["ControlMesh"]

_log = logging.getLogger("uccl_ep_serving.control_plane.mesh")

#: The thread that reads looks this often while something is being decided, and else, to notice that it did not run.
_TICK_SECONDS, _IDLE_SECONDS = 0.01, 0.5
#: Who closes waits so long for peers that take nothing.
_FLUSH_SECONDS = 1.0


def _seen(how: str, peer: int, cause: str) -> Callable[[Report], Report]:
    """What a rank has seen when the connection to ``peer`` ended in the way ``how``."""
    one, causes = {peer}, {peer: cause}
    if how == DOWN:
        return lambda report: report.grown(down=one, causes=causes)
    if how == GONE:
        return lambda report: report.grown(gone=one, causes=causes)
    return lambda report: report.grown(dead=one, causes=causes)


#: Open meshes, so that a forked child can let go of their sockets (peers must see a dead parent's connections close).
_open_meshes: weakref.WeakSet[ControlMesh] = weakref.WeakSet()


class ControlMesh:
    """Connections of one rank to all others.

    Args:
        rank, ranks: of the group.
        settings: interface and deadlines.
        store_host: host of the TCPStore under the process group, "" where there is none.

    Attributes:
        socket_name, address, port, chosen: where this rank listens, and why there; goes into its card.
        liveness: who takes part.
        steps: the all-gathers on which ranks agree.
        on_lost: called from the reader thread with a rank that all that go on have agreed is lost.
        on_goodbye: called from the reader thread with the peer's rank.
        on_stopped: called from the reader thread when this rank takes part no more.
        on_part: called from the reader thread with a peer that takes part in a step.
        on_shortage: called from the reader thread with why this rank itself cannot go on; the peers have been told.
        on_doing: called from the reader thread with a peer, and what it says of its operations; raises ValueError when
            that is nothing.
        on_tick: called from the reader thread about twice a second.
    """

    def __init__(self, rank: int, ranks: int, settings: Settings, store_host: str = "") -> None:
        self.rank = rank
        self.ranks = ranks
        self.liveness = Liveness(rank, ranks, self._wake_reader)
        self.steps = Steps(rank, ranks, self.liveness, settings.connect_timeout)
        self.liveness.waits_for = lambda: (self.steps.waits_for(), self.stood_still)
        self.liveness.leaves = self.leaves
        self.on_lost: Callable[[int], None] = lambda peer: None
        self.on_goodbye: Callable[[int], None] = lambda peer: None
        self.on_stopped: Callable[[], None] = lambda: None
        self.on_part: Callable[[int], None] = lambda peer: None
        self.on_shortage: Callable[[str], None] = lambda why: None
        self.on_doing: Callable[[int, bytes], None] = lambda peer, what: None
        self.on_tick: Callable[[], None] = lambda: None
        self._settings = settings
        self._selector, self._wake, self._waker = waking_selector(rank)
        with contextlib.ExitStack() as undo:
            for one in (self._selector, self._wake, self._waker):
                undo.callback(one.close)
            self._listeners = Listeners(rank, ranks, settings, store_host)
            undo.pop_all()
        self.socket_name = self._listeners.socket_name
        self.address, self.port = self._listeners.address, self._listeners.port
        self.chosen = self._listeners.chosen
        self._links: dict[int, Link] = {}
        self._cards: Sequence[Card] = ()
        self._endings = Endings()
        self._mending: Mending | None = None
        #: Connections whose socket took no more. Writer: whoever sends; the reader takes them out.
        self._full: deque[Link] = deque()
        self._closing = self._short = False
        #: When this process last ran again after it had not for half a deadline, a ``time.monotonic()`` instant.
        self._stood_still = -math.inf
        #: When the reader does what for :meth:`limit`. Writer: the host; reader: the reader.
        self._limit: tuple[float, Callable[[], None]] | None = None
        self._reader: threading.Thread | None = None
        _open_meshes.add(self)

    def leaves(self) -> str:
        """In words, that this rank closes its Buffer; "" while it does not."""
        return "it closes its Buffer" if self.steps.present == CLOSE else ""

    # -- connecting ---------------------------------------------------------------------------------------------

    def connect(self, introduction: Introduction) -> None:
        """Connect to every other rank: to lower ones actively, higher ones connect to us.

        Raises BootstrapError naming the ranks that are missing at the deadline, that are gone, or that do not prove
        the secret.
        """
        self._say_address(introduction)
        self._cards = introduction.cards
        self._links = meet(self.rank, self.ranks, self._listeners, introduction, self._settings.connect_timeout)
        self.steps.links = self._links
        identity = identity_of(self.rank, self.ranks, introduction)
        listener, is_left = self._listeners.tcp, self._has_done_with
        self._mending = Mending(identity, listener, self._selector, self._cards, self._links, is_left)
        self._mending.restored = self._watch_link
        self._start_reader()

    @property
    def reconnections(self) -> int:
        """Control connections that broke and were made again; for any thread."""
        return 0 if self._mending is None else self._mending.reconnections

    def _say_address(self, introduction: Introduction) -> None:
        """Where this rank listens and why; what may be wrong with it matters to ranks on other hosts only."""
        several = len({card.host for card in introduction.cards}) > 1
        if self._listeners.overruled and several:
            _log.warning("rank %d: %s", self.rank, self._listeners.overruled)
        elif self._listeners.guessed and several:
            _log.warning(
                "rank %d: other hosts connect to %s (%s): neither the process group's store nor a variable "
                "says which network leads to them. If that is the wrong one, set UCCL_EP_SOCKET_IFNAME",
                self.rank,
                self.address,
                self.chosen,
            )
        else:
            _log.info("rank %d listens on %s (%s)", self.rank, self.address, self.chosen)

    def _start_reader(self) -> None:
        for link in self._links.values():
            if link.local:
                seconds = int(self._settings.connect_timeout) + 1
                link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))
            else:
                assert link.seal is not None
                tune(link.socket)
                link.outbox = Outbox(link.socket, count_frame, link.seal)
                link.outbox.blocked = functools.partial(self._await_room, link)
            self._selector.register(link.socket, selectors.EVENT_READ, link)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        # a listener that is open says that this process lives, and lets in who connects again
        for listener in (self._listeners.unix, self._listeners.tcp):
            self._selector.register(listener, selectors.EVENT_READ, listener)
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
        acted, due = None, 0.0
        while not self._closing:
            limit = self._limit
            if limit is not None and limit is not acted and time.monotonic() >= limit[0]:
                acted = limit
                self._tell(limit[1])
            begun = time.monotonic()
            is_busy = self.liveness.deciding or self._endings or self._mending
            patience = _TICK_SECONDS if is_busy else _IDLE_SECONDS
            if limit is not None and limit is not acted:
                patience = min(patience, max(limit[0] - begun, 0.0))
            try:
                ready = self._selector.select(patience)
            except (OSError, ValueError):
                # abandon(), in another thread, closed the selector
                return
            now = time.monotonic()
            if (still := now - begun - patience) > self._settings.timeout / 2:
                self._stood_still = now
                _log.warning("rank %d did not run for %.1f s", self.rank, still)
            for key, events in ready:
                try:
                    self._serve(key, events)
                except Exception as error:
                    with contextlib.suppress(KeyError, ValueError):
                        self._selector.unregister(key.fileobj)
                    self._give_up(error)
            if now >= due:
                due = now + _IDLE_SECONDS / 2
                self._tell(self.on_tick)
            try:
                while self._full:
                    self._watch_link(self._full.popleft())
                self._go_on()
            except Exception as error:
                if not (self._short or self._closing):
                    self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """A fault of this rank, not foreseen: the thread lives to tell the others that it cannot go on."""
        _log.error("rank %d could not serve a control connection", self.rank, exc_info=error)
        self._stop(
            f"rank {self.rank} could not serve a control connection: {type(error).__name__}: {error}. Next step: "
            "report this with its log, and build the group again"
        )

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        """Something is ready."""
        mending = self._mending
        assert mending is not None
        if isinstance(key.data, Link):
            if key.fileobj is not key.data.socket:
                return  # it was mended since
            if events & selectors.EVENT_READ:
                self._read_some(key.data)
            if events & selectors.EVENT_WRITE:
                self._watch_link(key.data)
        elif isinstance(key.data, OneTalk):
            if key.data in mending.talks:
                mending.step(key.data)
        elif key.data is None:
            with contextlib.suppress(OSError):
                self._wake.recv(64)
        elif key.data is self._listeners.tcp:
            mending.let_in()
        else:
            answer(key.data)

    def _await_room(self, link: Link) -> None:
        """Have the reader send the rest, when there is room: from whichever thread found none."""
        self._full.append(link)
        if threading.current_thread() is not self._reader:
            self._wake_reader()

    def _watch_link(self, link: Link) -> None:
        """Send what waits, and watch the connection for what it needs next."""
        outbox = link.outbox
        if outbox is None:
            return
        # one that broke again at once is watched, too: its end is still to be read
        outbox.pump()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if outbox.wants_room else 0)
        with contextlib.suppress(ValueError, OSError):
            try:
                self._selector.modify(link.socket, events, link)
            except KeyError:
                self._selector.register(link.socket, events, link)

    def _has_done_with(self, peer: int) -> bool:
        return self._closing or self._links[peer].said_goodbye or peer in self.liveness.absent

    def _read_some(self, link: Link) -> None:
        try:
            self._read_link(link)
        except Exception as error:
            # whatever it is, the other connections are read on; abandon(), in another thread, may have closed both of
            # these
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(link.socket)
            close_all(link.descriptors)  # of a frame that did not arrive whole
            self._lose(link, error)
        else:
            if link.outbox is not None and not link.said_goodbye:
                # tells what has arrived
                link.outbox.pump()

    def _go_on(self) -> None:
        """What follows from what was read, and from the time that has passed, for who goes on."""
        assert self._mending is not None
        judged = [
            *(self._endings.judged() if self._endings else ()),
            *(self._mending.advance() if self._mending else ()),
        ]
        for peer, how, reason in judged:
            _log.error("rank %d lost rank %d: its control connection ended (%s: %s)", self.rank, peer, reason, how)
            self.liveness.observe(_seen(how, peer, f"its control connection ended ({reason})"))
        if not self.liveness.has_to_say:
            return
        for peer, note in self.liveness.advance():
            self._say(peer, NOTE, note)
        stopped = self.liveness.stopped
        for peer in self.liveness.publish():
            _log.error("rank %d: the group goes on without rank %d: %s", self.rank, peer, self.liveness.how_gone(peer))
            self._tell(self.on_lost, peer)
        if self.liveness.stopped and not stopped:
            _log.error("rank %d takes part no more: %s", self.rank, self.liveness.stopped)
            self._tell(self.on_stopped)

    def _say(self, peer: int, kind: int, body: bytes) -> None:
        """Send ``peer`` a frame, from the reader thread."""
        if peer not in self.liveness.departed and not send_now(self._links[peer], kind, body):
            self.liveness.observe(_seen(DOWN, peer, "its control connection takes nothing more"))

    def _read_link(self, link: Link) -> None:
        """Take what is there. Raises when the connection is over."""
        for frame in read_frames(link):
            try:
                if frame.kind == GATHER:
                    self.steps.keep(link.peer, frame)
                    self._tell(self.on_part, link.peer)
                elif frame.kind == GOODBYE:
                    self._note_goodbye(link)
                elif frame.kind == DOING:
                    self.on_doing(link.peer, frame.payload)
                else:
                    self.liveness.hear(link.peer, frame.payload)
            finally:
                # what was not kept for a step nobody will take
                close_all(frame.descriptors)

    def _note_goodbye(self, link: Link) -> None:
        link.said_goodbye = True
        self.liveness.note_departed(link.peer)
        self._tell(self.on_goodbye, link.peer)

    def _lose(self, link: Link, error: Exception) -> None:
        if link.said_goodbye or self._closing:
            return
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in NO_ROOM):
            self._run_short(link.peer, error)
            return
        expected = isinstance(error, (OSError, ValueError))
        # what _read_link does not promise to raise is a fault of this rank: its words alone may say nothing
        reason = str(error) if expected else f"{type(error).__name__}: {error}"
        if not expected:
            _log.error("rank %d could not read what rank %d sent", self.rank, link.peer, exc_info=error)
        if link.outbox is not None:
            link.outbox.break_off()
            link.socket.close()
        else:
            with contextlib.suppress(OSError):
                link.socket.shutdown(socket.SHUT_RDWR)
        if isinstance(error, ValueError):
            _log.error("rank %d lost rank %d: %s", self.rank, link.peer, reason)
            cause = f"got what the formats forbid: {reason}"
            self.liveness.observe(lambda report: report.grown(accused={link.peer}, causes={link.peer: cause}))
            return
        failed = link.outbox is not None and link.outbox.failed
        whole = isinstance(error, Ended) and not link.buffer and not failed
        if link.outbox is not None and self._mending is not None and self._mending.add(link, whole, reason):
            return
        self._endings.add(self._cards[link.peer], link.local, whole, reason)

    def _run_short(self, peer: int, error: Exception) -> None:
        """The system gives this rank no room for what ``peer`` hands it: that is nobody else's fault, and told once."""
        self._stop(
            f"rank {self.rank} has no room for what rank {peer} hands it: {in_words(error)}. Next step: raise the "
            f"limit on open files (ulimit -n) or on memory of rank {self.rank}, and build the group again"
        )

    def _stop(self, why: str) -> None:
        """This rank cannot go on: it tells the others, once."""
        if self._short:
            return
        self._short = True
        _log.error("%s", why)
        self.liveness.fail(why)
        self.steps.end(why, TransportError)
        self._tell(self.on_shortage, why)

    def _tell(self, callback: Callable[..., None], *heard: object) -> None:
        """Whatever a callback raises, the other connections are read on."""
        try:
            callback(*heard)
        except Exception:
            _log.exception("rank %d could not act on what it heard: %s", self.rank, heard)

    @property
    def local_peers(self) -> frozenset[int]:
        """Peers on this host, which can be handed descriptors."""
        return frozenset(peer for peer, link in self._links.items() if link.local)

    # -- masking ------------------------------------------------------------------------------------------------

    def mask_out(self, masked: int) -> None:
        """Leave rank ``masked`` out of everything. One that is not lost becomes so by that, on every rank."""
        self.liveness.mask_out(masked)
        self.steps.renumber()

    @property
    def stood_still(self) -> bool:
        """Whether this process did not run (stopped, frozen, its host paused) for half of a deadline not long ago."""
        return time.monotonic() - self._stood_still < self._settings.timeout

    def tell_doing(self, peer: int, what: bytes) -> None:
        """Tell ``peer`` which operations this rank has begun; from the reader thread."""
        if peer not in self.liveness.absent:
            self._say(peer, DOING, what)

    # -- closing ------------------------------------------------------------------------------------------------

    def goodbye(self, doing: bytes = b"") -> None:
        """Tell every peer that this rank leaves in good order, and ``doing``, which operations it has begun; from then
        on its silence is no error."""
        for link in self._links.values():
            if doing:
                send_frame(link, DOING, body=doing)
            send_frame(link, GOODBYE)

    def close(self) -> None:
        """Stop reading and close all connections; a gather in another thread ends. May be called twice."""
        self._flush()
        interrupted = self._interrupted()
        self._closing = True
        self.steps.end()
        self.liveness.end()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._wake_reader()
            # which may wait for a lock of the frame that this thread has interrupted
            self._reader.join(0.1 if interrupted else 5.0)
        for outbox in interrupted:
            outbox.break_off()  # its end must be a reset: the peer has not heard all
        self.abandon()

    def _flush(self) -> None:
        """Wait a moment until what was said last is on its way to whoever still listens."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        outboxes = {peer: link.outbox for peer, link in self._links.items() if link.outbox is not None}
        while time.monotonic() < deadline:
            if all(one.idle or one.interrupted or self._has_done_with(peer) for peer, one in outboxes.items()):
                return
            time.sleep(_TICK_SECONDS)

    def _interrupted(self) -> list[Outbox]:
        """Those in which a handler, from which this is called, has interrupted a send of this thread. Their peers are
        not told that this rank leaves, and take it for lost."""
        outboxes = (link.outbox for link in self._links.values())
        return [outbox for outbox in outboxes if outbox is not None and outbox.interrupted]

    def abandon(self) -> None:
        """Close the descriptors and nothing else: what a forked child must do."""
        _open_meshes.discard(self)
        self._closing = True
        for one in (self._wake, self._waker, *(link.socket for link in self._links.values())):
            one.close()
        self._listeners.close()
        self._endings.close()
        if self._mending is not None:
            self._mending.close()
        for link in self._links.values():
            close_all(link.descriptors)
        self.steps.close()
        self._selector.close()


def _abandon_in_child() -> None:
    for mesh in list(_open_meshes):
        mesh.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
