"""Connects one endpoint to its peers: many handshakes side by side in one thread, up to a deadline.

Of each pair the higher rank connects and the lower one accepts, ``connections`` times. A peer that speaks the
handshake, claims a rank of this job and fails it is named: to itself at once, here when the time is over.
"""

from __future__ import annotations

import errno
import heapq
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping

from ...errors import BootstrapError
from ...protocol.frame import Verdict
from ...protocol.handshake import Handshake, Identity, Proven, Refused, accept, connect
from ...protocol.talks import Key, OneTalk
from .tcp_talks import TcpTalks

#: After this long without an answer to a SYN, start anew: the kernel's own retries become rare.
CONNECT_SECONDS = 5.0
#: Pause before connecting again, doubled up to the last value.
RETRY_SECONDS = (0.02, 1.0)
#: Times are looked at this often: a deadline is kept this well.
TICK_SECONDS = 0.05

_RETRY_ERRNO = frozenset(
    (
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.ETIMEDOUT,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.EADDRNOTAVAIL,
        errno.EAGAIN,
        errno.EPIPE,
    )
)

#: By (peer, connection): a proven socket, and what its handshake came to.
Met = dict[Key, tuple[socket.socket, Proven]]


class _Meeting(TcpTalks):
    def __init__(
        self,
        me: Identity,
        listener: socket.socket,
        targets: Mapping[int, tuple[str, int]],
        sources: frozenset[int],
        deadline: float,
        watch: Callable[[], None],
    ) -> None:
        super().__init__(me, listener, (len(targets) + len(sources)) * me.connections)
        self.targets = targets  # lower ranks, to connect to
        self.sources = sources  # higher ranks, that connect to us
        self.deadline = deadline
        self.watch = watch
        self.done: Met = {}
        self.retries: list[tuple[float, Key]] = []
        self.pauses: dict[Key, float] = {}
        self.last_words: dict[int, str] = {}  # by target rank: why the last attempt failed
        self.refused: dict[int, str] = {}  # by claimed source rank: what was wrong with the last claim

    def run(self) -> Met:
        """Until every connection is proven; see :func:`meet`."""
        self.listener.setblocking(False)
        tick = time.monotonic()
        self.retries = [(tick, (peer, number)) for peer in self.targets for number in range(self.me.connections)]
        heapq.heapify(self.retries)
        try:
            self.observe(self.listener, selectors.EVENT_READ, None)
            while len(self.done) < self.room:
                now = time.monotonic()
                if now >= tick:
                    tick = now + TICK_SECONDS
                    self.watch()
                    self._check_time(now)
                while self.retries and self.retries[0][0] <= now:
                    self._ask(heapq.heappop(self.retries)[1], now)
                until = min(tick, self.retries[0][0]) if self.retries else tick
                for key, _ in self.selector.select(until - now):
                    if key.data is None:
                        self.answer(self.deadline)
                    elif key.data in self.talks:
                        self._go_on(key.data)
        except BaseException:
            for connection, _ in self.done.values():
                connection.close()
            raise
        finally:
            for talk in list(self.talks):
                self.forget(talk)
            self.selector.close()
        return self.done

    def _check_time(self, now: float) -> None:
        self.drop_late(now)
        if now >= self.deadline:
            raise BootstrapError(self._report())

    def _report(self) -> str:
        made = Counter(peer for peer, _ in self.done)
        peers = {peer: self.me.connections - made[peer] for peer in sorted((*self.targets, *self.sources))}
        peers = {peer: count for peer, count in peers.items() if count}
        words = []
        for peer, count in list(peers.items())[:8]:
            if peer in self.targets:
                host, port = self.targets[peer]
                why = self.last_words.get(peer, "no answer yet")
                words.append(f"rank {peer}: {count} connections to [{host}]:{port} not made ({why})")
            else:
                words.append(f"rank {peer}: {count} connections from it did not come")
                if peer in self.refused:
                    words[-1] += f", one that claims to be it was refused: {self.refused[peer]}"
        if len(peers) > 8:
            words.append(f"and {len(peers) - 8} more ranks")
        if self.strangers:
            words.append(f"{self.strangers} other connections were dropped, the last {self.last_stranger}")
        host, port = self.listener.getsockname()[:2]
        return (
            f"rank {self.me.rank}, proxy {self.me.proxy}: connecting over tcp did not finish in time. "
            f"{'; '.join(words)}. This rank listens on [{host}]:{port}; check that the peers run, that "
            "UCCL_EP_SOCKET_IFNAME names an interface they can reach, and that no firewall is between"
        )

    def _ask(self, key: Key, now: float) -> None:
        if not self.dial(key, self.targets[key[0]], connect(self.me, *key), now + CONNECT_SECONDS):
            heapq.heappush(self.retries, (now, key))

    def _go_on(self, talk: OneTalk) -> None:
        was_connected = talk.connected
        self.step(talk)
        if talk in self.talks and talk.wanted is not None and not was_connected and talk.connected:
            # The connection stands in the peer's backlog; the peer may come to it late.
            talk.expires = self.deadline

    def greeting(self) -> Handshake:
        return accept(self.me, self.sources)

    def proven(self, talk: OneTalk, proven: Proven) -> None:
        stale = self.done.pop(proven.key, None)
        if stale is not None:
            # The same peer, proven again: it did not see our welcome on the first one.
            stale[0].close()
        self.done[proven.key] = talk.socket, proven
        self.refused.pop(proven.peer, None)

    def refusal(self, talk: OneTalk, refused: Refused) -> None:
        words = f"{refused.verdict.words} ({talk.where})"
        if talk.wanted is not None:
            self.forget(talk)
            raise BootstrapError(
                f"rank {self.me.rank}: connecting to rank {talk.wanted[0]} over tcp was refused: {words}. "
                "Check that all ranks were started by the same launcher with the same settings"
            )
        # Only noted: whoever reaches the port can claim to be a rank, and must not stop the group. A rank with another
        # secret or shape learns it at once, and is named here when the time is over.
        if refused.verdict in (Verdict.WRONG_SECRET, Verdict.OTHER_SHAPE) and refused.claimed in self.sources:
            self.refused[refused.claimed] = words
        self.failed(talk, words)

    def failed(self, talk: OneTalk, words: str, code: int = 0) -> None:
        """Drop a connection; connect again where this rank had asked for it."""
        self.forget(talk)
        if talk.wanted is None:
            self.note_stranger(talk, words)
            return
        peer = talk.wanted[0]
        self.last_words[peer] = words
        if code and code not in _RETRY_ERRNO:
            raise self.unable(OSError(code, words), f"connection to rank {peer} at {talk.where}")
        pause = self.pauses.get(talk.wanted, RETRY_SECONDS[0])
        self.pauses[talk.wanted] = min(2 * pause, RETRY_SECONDS[1])
        heapq.heappush(self.retries, (time.monotonic() + pause, talk.wanted))


def meet(
    me: Identity,
    listener: socket.socket,
    targets: Mapping[int, tuple[str, int]],
    sources: frozenset[int],
    deadline: float,
    watch: Callable[[], None],
) -> Met:
    """Connect to all ``targets`` and wait for all ``sources``.

    Args:
        me: what this endpoint says and proves.
        listener: a listening socket whose address the sources know.
        targets: (host, port) by rank, to connect to.
        sources: ranks that connect to the listener.
        deadline: ``time.monotonic()`` instant.
        watch: called every :data:`TICK_SECONDS`; raises when somebody will never come.

    Returns:
        By (peer, connection index): a proven, non-blocking, tuned socket, and what its handshake came to.

    Raises:
        BootstrapError: somebody did not come in time, or refused, or was refused; the peer is named.
        TransportError: the operating system refused a socket.
        Whatever ``watch`` raises. No connection is left open.
    """
    return _Meeting(me, listener, targets, sources, deadline, watch).run()
