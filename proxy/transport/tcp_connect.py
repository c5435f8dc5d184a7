"""Connects one endpoint to its peers: many handshakes side by side in one thread, up to a deadline.

Of each pair the higher rank connects and the lower one accepts, ``connections`` times. Whatever else reaches the
listening socket (a port scanner, garbage, silence, another job) is dropped and counted, and delays nobody. A peer that
speaks the handshake, claims a rank of this job and fails it is named: to itself at once, here when the time is over.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import select
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...errors import BootstrapError, TransportError
from ...protocol.frame import Verdict
from ...protocol.handshake import Identity, Refused, Talk, accept, connect, tune
from .base import NO_DESCRIPTORS, refused

#: A connection that was accepted and does not finish its handshake in this time is dropped. A real peer that was merely
#: slow connects again.
ACCEPT_SECONDS = 10.0
#: After this long without an answer to a SYN, start anew: the kernel's own retries become rare.
CONNECT_SECONDS = 5.0
#: Pause before connecting again, doubled up to the last value.
RETRY_SECONDS = (0.02, 1.0)
#: Times are looked at this often: a deadline is kept this well.
TICK_SECONDS = 0.05
#: Unproven connections kept at once beyond the expected ones. One that has not even greeted gives way first: a real
#: peer greets at once, so a thousand silent strangers push out each other and never a peer.
MAX_STRANGERS = 64
#: Connections accepted before anybody else is served, however many strangers come.
ACCEPTS_AT_ONCE = 32

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

Key = tuple[int, int]


@dataclass(eq=False, kw_only=True)
class _Talk(Talk):
    """One connection in its handshake; ``wanted`` = (peer, connection) that this rank asked for, None = accepted."""

    wanted: Key | None
    where: str


@dataclass
class _Meeting:
    me: Identity
    listener: socket.socket
    targets: Mapping[int, tuple[str, int]]  # lower ranks, to connect to
    sources: frozenset[int]  # higher ranks, that connect to us
    deadline: float
    watch: Callable[[], None]
    selector: selectors.BaseSelector = field(init=False)
    done: dict[Key, socket.socket] = field(default_factory=dict)
    talks: dict[_Talk, None] = field(default_factory=dict)  # a set in the order of arrival
    retries: list[tuple[float, Key]] = field(default_factory=list)
    pauses: dict[Key, float] = field(default_factory=dict)
    last_words: dict[int, str] = field(default_factory=dict)  # by target rank: why the last attempt failed
    refused: dict[int, str] = field(default_factory=dict)  # by claimed source rank: what was wrong with the last claim
    strangers: int = 0
    last_stranger: str = ""

    def __post_init__(self) -> None:
        try:
            self.selector = selectors.DefaultSelector()
        except OSError as error:
            raise self._transport_error(error, "cannot watch its connections while they are made") from None

    @property
    def wanted(self) -> int:
        """Connections in all."""
        return (len(self.targets) + len(self.sources)) * self.me.connections

    def run(self) -> dict[Key, socket.socket]:
        """Until every connection is proven; see :func:`meet`."""
        self.listener.setblocking(False)
        tick = time.monotonic()
        self.retries = [(tick, (peer, number)) for peer in self.targets for number in range(self.me.connections)]
        heapq.heapify(self.retries)
        try:
            self._observe(self.listener, selectors.EVENT_READ, None)
            while len(self.done) < self.wanted:
                now = time.monotonic()
                if now >= tick:
                    tick = now + TICK_SECONDS
                    self.watch()
                    self._check_time(now)
                while self.retries and self.retries[0][0] <= now:
                    self._dial(heapq.heappop(self.retries)[1], now)
                until = min(tick, self.retries[0][0]) if self.retries else tick
                for key, _ in self.selector.select(until - now):
                    if key.data is None:
                        self._answer()
                    elif key.data in self.talks:
                        self._step(key.data)
        except BaseException:
            for connection in self.done.values():
                connection.close()
            raise
        finally:
            for talk in list(self.talks):
                self._forget(talk)
            self.selector.close()
        return self.done

    def _check_time(self, now: float) -> None:
        for talk in [talk for talk in self.talks if now >= talk.expires]:
            self._failed(talk, "no answer to the handshake" if talk.connected else "no answer to connect")
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

    def _dial(self, key: Key, now: float) -> None:
        host, port = self.targets[key[0]]
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            family, kind, protocol, _, sockaddr = found[0]
            connection = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
        except OSError as error:
            if error.errno in NO_DESCRIPTORS and self._push_out("no descriptors are left"):
                heapq.heappush(self.retries, (now, key))
                return
            raise self._transport_error(error, f"socket for rank {key[0]} at [{host}]:{port}") from None
        code = connection.connect_ex(sockaddr)
        talk = _Talk(
            socket=connection,
            handshake=connect(self.me, *key),
            expires=now + CONNECT_SECONDS,
            wanted=key,
            where=f"[{host}]:{port}",
            connected=code == 0,
        )
        self.talks[talk] = None
        if code not in (0, errno.EINPROGRESS):
            self._failed(talk, os.strerror(code), code)
            return
        self._observe(connection, talk.events, talk)

    def _answer(self) -> None:
        """Accept who waits, ACCEPTS_AT_ONCE at most: the listener stays readable."""
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                connection, sockaddr = self.listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.ECONNABORTED, errno.EINTR, errno.EPROTO, errno.ENETDOWN):
                    continue
                if error.errno in NO_DESCRIPTORS:
                    if not self._somebody_waits():
                        return
                    if self._push_out("no descriptors are left"):
                        continue
                raise self._transport_error(error, "accept") from None
            connection.setblocking(False)
            talk = _Talk(
                socket=connection,
                handshake=accept(self.me, self.sources),
                expires=min(time.monotonic() + ACCEPT_SECONDS, self.deadline),
                wanted=None,
                where=f"[{sockaddr[0]}]:{sockaddr[1]}",
                connected=True,
            )
            if len(self.talks) >= self.wanted + MAX_STRANGERS:
                self._push_out("too many silent connections")
            self.talks[talk] = None
            self._observe(connection, selectors.EVENT_READ, talk)
            self._step(talk)

    def _push_out(self, why: str) -> bool:
        """Drop the accepted connection that least seems to be a peer: silent before greeted, then the oldest."""
        accepted = [talk for talk in self.talks if talk.wanted is None]
        if accepted:
            self._failed(min(accepted, key=lambda talk: talk.greeted), why)  # of equals, the first that came
        return bool(accepted)

    def _somebody_waits(self) -> bool:
        """Whether the listener has a connection to accept (Linux takes a descriptor before it looks)."""
        poll = select.poll()  # needs no descriptor of its own
        poll.register(self.listener, select.POLLIN)
        return bool(poll.poll(0))

    def _step(self, talk: _Talk) -> None:
        was_connected = talk.connected
        try:
            finished = talk.step()
        except Refused as refusal:
            self._refusal(talk, refusal)
            return
        except ValueError as error:
            self._failed(talk, str(error))
            return
        except OSError as error:
            self._failed(talk, error.strerror or str(error), error.errno or 0)
            return
        if not finished:
            if talk.wanted is not None and not was_connected and talk.connected:
                # The connection stands in the peer's backlog; the peer may come to it late.
                talk.expires = self.deadline
            self.selector.modify(talk.socket, talk.events, talk)
            return
        assert talk.result is not None
        self.talks.pop(talk, None)
        self.selector.unregister(talk.socket)
        tune(talk.socket)
        stale = self.done.pop(talk.result.key, None)
        if stale is not None:
            # The same peer, proven again: it did not see our welcome on the first one.
            stale.close()
        self.done[talk.result.key] = talk.socket
        self.refused.pop(talk.result.peer, None)

    def _refusal(self, talk: _Talk, refusal: Refused) -> None:
        words = f"{refusal.verdict.words} ({talk.where})"
        if talk.wanted is not None:
            self._forget(talk)
            raise BootstrapError(
                f"rank {self.me.rank}: connecting to rank {talk.wanted[0]} over tcp was refused: {words}. "
                "Check that all ranks were started by the same launcher with the same settings"
            )
        # Only noted: whoever reaches the port can claim to be a rank, and must not stop the group. A rank with another
        # secret or shape learns it at once, and is named here when the time is over.
        if refusal.verdict in (Verdict.WRONG_SECRET, Verdict.OTHER_SHAPE) and refusal.claimed in self.sources:
            self.refused[refusal.claimed] = words
        self._failed(talk, words)

    def _failed(self, talk: _Talk, words: str, code: int = 0) -> None:
        """Drop a connection; connect again where this rank had asked for it."""
        self._forget(talk)
        if talk.wanted is None:
            self.strangers += 1
            self.last_stranger = f"{talk.where}: {words}"
            return
        peer = talk.wanted[0]
        self.last_words[peer] = words
        if code and code not in _RETRY_ERRNO:
            raise self._transport_error(OSError(code, words), f"connection to rank {peer} at {talk.where}")
        pause = self.pauses.get(talk.wanted, RETRY_SECONDS[0])
        self.pauses[talk.wanted] = min(2 * pause, RETRY_SECONDS[1])
        heapq.heappush(self.retries, (time.monotonic() + pause, talk.wanted))

    def _forget(self, talk: _Talk) -> None:
        self.talks.pop(talk, None)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(talk.socket)
        talk.close()

    def _observe(self, connection: socket.socket, events: int, talk: _Talk | None) -> None:
        try:
            self.selector.register(connection, events, talk)
        except OSError as error:
            raise self._transport_error(error, "cannot watch a connection while it is made") from None

    def _transport_error(self, error: OSError, what: str) -> TransportError:
        less = f" or lower UCCL_EP_TCP_CONNECTIONS: this endpoint needs {self.wanted} connections"
        return refused(f"rank {self.me.rank}: {what}", error, "tcp", less)


def meet(
    me: Identity,
    listener: socket.socket,
    targets: Mapping[int, tuple[str, int]],
    sources: frozenset[int],
    deadline: float,
    watch: Callable[[], None],
) -> dict[Key, socket.socket]:
    """Connect to all ``targets`` and wait for all ``sources``.

    Args:
        me: what this endpoint says and proves.
        listener: a listening socket whose address the sources know.
        targets: (host, port) by rank, to connect to.
        sources: ranks that connect to the listener.
        deadline: ``time.monotonic()`` instant.
        watch: called every :data:`TICK_SECONDS`; raises when somebody will never come.

    Returns:
        By (peer, connection index): a proven, non-blocking, tuned socket.

    Raises:
        BootstrapError: somebody did not come in time, or refused, or was refused; the peer is named.
        TransportError: the operating system refused a socket.
        Whatever ``watch`` raises. No connection is left open.
    """
    return _Meeting(me, listener, targets, sources, deadline, watch).run()
