"""How control connections come to be: listeners, mutual proof of the job's secret, one connection per pair of ranks.

Of each pair the higher rank connects and the lower one accepts. All handshakes run side by side in the calling thread,
without blocking: whoever else reaches a listener (a port scanner, silence, another job) costs a descriptor for a few
seconds and delays nobody. A peer that is gone is named as soon as the kernel says so, not at the deadline.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from ..config import Settings
from ..errors import BootstrapError
from ..protocol.handshake import Identity, Refused, Talk, accept, connect
from ..protocol.listener import BACKLOG, PortsTaken, listen, ports_needed
from .addresses import choose_address
from .bootstrap import Card, Introduction
from .outbox import Outbox
from .seal import Seal

__all__ = ["MAGIC", "NO_ROOM", "Link", "Listeners", "identity_of", "meet", "waking_selector"]

_log = logging.getLogger("uccl_ep_serving.control_plane.mesh")

MAGIC = 0x4345_4355

#: What control connections name in their handshake: never taken for a data connection.
_JOB = b"control connections"
#: An accepted connection that has not proved itself after this long is dropped.
_ACCEPT_SECONDS = 10.0
#: Unproven connections kept at once; one that has not even greeted gives way first.
_MOST_STRANGERS = 64
#: A listener is open before its address is told to anybody, so one that refuses belongs to a rank that is gone. It is
#: asked again for this long, because a host under load may refuse a connection it would take a moment later.
_REFUSED_SECONDS = 1.0
#: The system gives no further socket.
NO_ROOM = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_RETRY_SECONDS = 0.05


@dataclass(eq=False)
class Link:
    """Connection to one peer. ``buffer``, ``descriptors`` and ``has_header``, which says that the first header of the
    buffer is the peer's, belong to the thread that reads it.

    Attributes:
        local: a Unix socket, over which descriptors travel.
        sending: held while a frame is written. A signal handler that closes the Buffer may interrupt who holds it.
        writing: part of a frame may be out. Writer and reader: who holds ``sending``.
        said_goodbye: the peer leaves in good order.
        seal, outbox: of a connection over TCP. Over a Unix socket nobody comes between, and frames are written by
            whoever sends them.
    """

    peer: int
    socket: socket.socket
    local: bool
    sending: threading.RLock = field(default_factory=threading.RLock)
    writing: bool = False
    buffer: bytearray = field(default_factory=bytearray)
    descriptors: list[int] = field(default_factory=list)
    has_header: bool = False
    said_goodbye: bool = False
    seal: Seal | None = None
    outbox: Outbox | None = None


def waking_selector(rank: int) -> tuple[selectors.BaseSelector, socket.socket, socket.socket]:
    """A selector, and a pair of sockets by which another thread can wake whoever waits in it.

    Raises:
        BootstrapError: the system refuses one of them; nothing is left open.
    """
    with contextlib.ExitStack() as undo:
        try:
            selector = undo.enter_context(selectors.DefaultSelector())
            wake, waker = socket.socketpair()
        except OSError as error:
            raise _no_descriptor(f"rank {rank} cannot watch its control connections", error) from error
        undo.pop_all()
    return selector, wake, waker


def _no_descriptor(what: str, error: OSError) -> BootstrapError:
    return BootstrapError(f"{what}: {error}. Next step: raise the limit on open files (ulimit -n)")


def identity_of(rank: int, ranks: int, introduction: Introduction) -> Identity:
    """What a rank says and proves on its control connections."""
    return Identity(
        rank=rank, ranks=ranks, proxy=0, connections=1, window_bytes=1, job=_JOB, secret=introduction.secret
    )


class Listeners:
    """Where a rank can be reached: an abstract Unix socket for ranks on this host, a TCP port for others.

    Attributes:
        socket_name: of the Unix socket, without the leading NUL. It holds 64 random bits; a name that somebody guessed
            would still not hold the job's secret.
        address, port: of the TCP socket.
        chosen: interface of the address, and what decided.
        guessed: nothing that the user or the launcher has said decided.
        overruled: a variable that asks for another interface, in words; "" where there is none.

    Raises:
        ConfigError: ``UCCL_EP_SOCKET_IFNAME`` names no interface.
        BootstrapError: the system refuses a socket, or no port of ``UCCL_EP_PORT_RANGE`` is free.
    """

    def __init__(self, rank: int, ranks: int, settings: Settings, store_host: str = "") -> None:
        self.socket_name = f"uccl_ep_control.{os.getpid()}.{secrets.token_hex(8)}"
        self.address = "any interface"
        with contextlib.ExitStack() as undo:
            try:
                choice = choose_address(settings, store_host)
                self.address, self.chosen = choice.address, choice.reason
                self.guessed, self.overruled = choice.guessed, choice.overruled
                self.unix = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                self.unix.bind("\0" + self.socket_name)
                self.unix.listen(BACKLOG)
                self.tcp = undo.enter_context(listen(self.address, settings.port_range))
                for listener in (self.unix, self.tcp):
                    listener.setblocking(False)
            except OSError as error:
                what = f"rank {rank} cannot listen for its peers on {self.address}"
                if error.errno in NO_ROOM:
                    raise _no_descriptor(what, error) from error
                if isinstance(error, PortsTaken):
                    raise BootstrapError(f"{what}: {error}. {ports_needed(ranks, settings.proxies)}") from error
                raise BootstrapError(
                    f"{what}: {error}. Next step: choose an interface with UCCL_EP_SOCKET_IFNAME"
                ) from error
            undo.pop_all()
        self.port: int = self.tcp.getsockname()[1]
        for words in choice.ignored:
            _log.warning("rank %d: %s: it is passed over", rank, words)

    def close(self) -> None:
        """Close both. May be called twice."""
        self.unix.close()
        self.tcp.close()


@dataclass(eq=False, kw_only=True)
class _Talk(Talk):
    """One connection in its handshake; ``card`` is None when it was accepted."""

    local: bool
    card: Card | None


def meet(rank: int, ranks: int, listeners: Listeners, introduction: Introduction, timeout: float) -> dict[int, Link]:
    """Connect to every other rank; blocking connections by peer.

    Raises:
        BootstrapError: naming the ranks that are missing after ``timeout`` seconds, that are gone, or that do not
            prove the secret. No connection is left open.
    """
    meeting = _Meeting(rank, ranks, listeners, introduction, timeout)
    try:
        meeting.run()
    except BaseException:
        for link in meeting.links.values():
            link.socket.close()
        raise
    finally:
        meeting.close()
    for link in meeting.links.values():
        link.socket.setblocking(True)
    return meeting.links


class _Meeting:
    def __init__(self, rank: int, ranks: int, listeners: Listeners, introduction: Introduction, timeout: float) -> None:
        self.rank = rank
        self.ranks = ranks
        self.cards = introduction.cards
        self.identity = identity_of(rank, ranks, introduction)
        self.timeout = timeout
        self.address = f"{listeners.address}:{listeners.port} ({listeners.chosen})"
        self.deadline = time.monotonic() + timeout
        self.links: dict[int, Link] = {}
        self.talks: dict[_Talk, None] = {}
        #: Lower ranks to connect to: when, and over which kind of socket.
        self.due = {peer: (0.0, self.cards[peer].host == self.cards[rank].host) for peer in range(rank)}
        self.refused_since: dict[int, float] = {}
        #: How many unproven connections were dropped, and why the last one was.
        self.strangers = 0
        self.stranger = ""
        try:
            self.selector = selectors.DefaultSelector()
        except OSError as error:
            raise _no_descriptor(f"rank {rank} cannot watch its connections while they are made", error) from error
        self.selector.register(listeners.unix, selectors.EVENT_READ, (listeners.unix, True))
        self.selector.register(listeners.tcp, selectors.EVENT_READ, (listeners.tcp, False))

    def run(self) -> None:
        while len(self.links) < self.ranks - 1:
            now = time.monotonic()
            if now > self.deadline:
                self._raise_missing()
            for peer in [peer for peer, (when, _) in self.due.items() if when <= now]:
                self._connect(peer, self.due.pop(peer)[1])
            for talk in [talk for talk in self.talks if talk.expires < now]:
                self._drop(talk, TimeoutError("it said nothing"))
            for key, _ in self.selector.select(_RETRY_SECONDS):
                if isinstance(key.data, _Talk):
                    if key.data in self.talks:
                        self._step(key.data)
                elif isinstance(key.data, Link):
                    self._look_at(key.data)
                else:
                    self._accept(*key.data)

    def _connect(self, peer: int, local: bool) -> None:
        card = self.cards[peer]
        family = socket.AF_UNIX if local else (socket.AF_INET6 if ":" in card.address else socket.AF_INET)
        connection = self._socket(family)
        connection.setblocking(False)
        talk = _Talk(
            socket=connection,
            handshake=connect(self.identity, peer, 0),
            expires=self.deadline + 1,
            connected=False,
            local=local,
            card=card,
        )
        self.talks[talk] = None
        code = connection.connect_ex("\0" + card.socket_name if local else (card.address, card.port))
        if code in (0, errno.EINPROGRESS):
            self.selector.register(connection, talk.events, talk)
        else:
            self._drop(talk, OSError(code, os.strerror(code)))

    def _socket(self, family: int) -> socket.socket:
        try:
            return socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise self._no_socket(error) from error

    def _no_socket(self, error: OSError) -> BootstrapError:
        have = f"{len(self.links)} of {self.ranks - 1} control connections"
        return _no_descriptor(f"rank {self.rank} has {have} and gets no more", error)

    def _accept(self, listener: socket.socket, local: bool) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in NO_ROOM and not self._push_out("no descriptors are left"):
                raise self._no_socket(error) from error
            return  # gone again, not there after all, or still there when it is asked again
        connection.setblocking(False)
        expires = time.monotonic() + _ACCEPT_SECONDS
        talk = _Talk(
            socket=connection,
            handshake=accept(self.identity, frozenset(range(self.rank + 1, self.ranks))),
            expires=expires,
            connected=True,
            local=local,
            card=None,
        )
        if len(self.talks) >= self.ranks + _MOST_STRANGERS:
            self._push_out("too many unproven connections")
        self.talks[talk] = None
        self.selector.register(connection, selectors.EVENT_READ, talk)

    def _push_out(self, why: str) -> bool:
        """Drop the accepted connection that least seems to be a peer: silent before greeted, then the oldest."""
        guests = [talk for talk in self.talks if talk.card is None]
        if guests:
            self._drop(min(guests, key=lambda talk: (talk.greeted, talk.expires)), TimeoutError(why))
        return bool(guests)

    def _step(self, talk: _Talk) -> None:
        try:
            talk.step()
        except OSError as error:
            self._drop(talk, error)
            return
        except (ValueError, Refused) as error:
            if talk.card is not None:
                raise BootstrapError(
                    f"rank {self.rank}: whoever answers for rank {talk.card.rank} at {talk.card.address}:"
                    f"{talk.card.port} does not belong to the job: {error}. Likely cause: another job on the same port"
                ) from error
            self._drop(talk, error)
            return
        if talk.result is None:
            self.selector.modify(talk.socket, talk.events, talk)
            return
        peer = talk.result.peer
        del self.talks[talk]
        self.selector.unregister(talk.socket)
        if peer in self.links:
            talk.socket.close()
            return
        seal = None if talk.local else Seal(talk.result.send_key, talk.result.receive_key)
        link = self.links[peer] = Link(peer, talk.socket, talk.local, seal=seal)
        self.selector.register(link.socket, selectors.EVENT_READ, link)

    def _look_at(self, link: Link) -> None:
        """A proven peer that leaves while others are still awaited will not come back: say so now."""
        with contextlib.suppress(OSError):
            if link.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                self.selector.unregister(link.socket)  # an early frame, for whoever reads the link later
                return
        raise BootstrapError(
            f"rank {self.rank}: rank {link.peer} on {self.cards[link.peer].host_name} left while the ranks were "
            "connecting. Likely cause: it died, or could not reach another rank. Next step: read its log"
        )

    def _drop(self, talk: _Talk, error: Exception) -> None:
        del self.talks[talk]
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(talk.socket)
        talk.close()
        if talk.card is None:
            # Anybody can connect to a listening port; a stranger must not disturb the group.
            self.strangers += 1
            self.stranger = str(error)
            return
        peer, now = talk.card.rank, time.monotonic()
        local = talk.local
        if getattr(error, "errno", 0) == errno.ECONNREFUSED:
            # Equal host identities and no such socket: two machines started from one snapshot. TCP tells them apart.
            local = False
            if now - self.refused_since.setdefault(peer, now) > _REFUSED_SECONDS:
                raise BootstrapError(
                    f"rank {self.rank}: nobody listens for rank {peer} on {talk.card.host_name} "
                    f"({talk.card.address}:{talk.card.port}) any more. Likely cause: rank {peer} died or gave up, or "
                    "a firewall rejects the connection. Next step: read that rank's log"
                ) from error
        if now > self.deadline:
            self._raise_missing(error)
        self.due[peer] = (now + _RETRY_SECONDS, local)

    def _raise_missing(self, error: Exception | None = None) -> None:
        missing = sorted(set(range(self.ranks)) - {self.rank} - self.links.keys())
        lower = [peer for peer in missing if peer < self.rank]
        ways = [
            f"rank {self.rank} cannot connect to rank {peer} on {self.cards[peer].host_name} "
            f"({self.cards[peer].address}:{self.cards[peer].port})"
            for peer in lower[:3]
        ]
        strangers = (
            f" {self.strangers} strangers were dropped, the last one: {self.stranger}." if self.strangers else ""
        )
        raise BootstrapError(
            f"rank {self.rank}: ranks {missing} have not connected within {self.timeout:g} s to {self.address}. "
            + "".join(f"{way}. " for way in ways)
            + f"Likely cause: a firewall, or the wrong interface.{strangers} Next step: set UCCL_EP_SOCKET_IFNAME, "
            "raise UCCL_EP_CONNECT_TIMEOUT"
        ) from error

    def close(self) -> None:
        if self.strangers:
            _log.warning(
                "rank %d dropped %d connections that did not prove to belong to the job, the last one: %s",
                self.rank,
                self.strangers,
                self.stranger,
            )
        for talk in self.talks:
            talk.close()
        self.selector.close()
