"""Handshakes side by side in one thread: connections that a rank asks for, and those that come to its listener.

Whatever else reaches the listening socket (a port scanner, garbage, silence, another job) is dropped and counted, and
delays nobody.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import socket
import time
from dataclasses import dataclass

from .handshake import Handshake, Identity, Proven, Refused, Talk, tune

__all__ = ["NO_DESCRIPTORS", "Key", "OneTalk", "Talks"]

#: The process, or the whole system, has as many files open as it may.
NO_DESCRIPTORS = frozenset((errno.EMFILE, errno.ENFILE))

#: A connection that was accepted and does not finish its handshake in this time is dropped. A real peer that was merely
#: slow connects again.
ACCEPT_SECONDS = 10.0
#: Unproven connections kept at once beyond the expected ones. One that has not even greeted gives way first: a real
#: peer greets at once, so a thousand silent strangers push out each other and never a peer.
MAX_STRANGERS = 64
#: Connections accepted before anybody else is served, however many strangers come.
ACCEPTS_AT_ONCE = 32

#: (peer, connection index)
Key = tuple[int, int]


@dataclass(eq=False, kw_only=True)
class OneTalk(Talk):
    """One connection in its handshake; ``wanted`` = (peer, connection) that this rank asked for, None = accepted."""

    wanted: Key | None
    where: str


class Talks:
    """What a first meeting and a later one have in common.

    Args:
        me: what this rank says and proves.
        listener: a listening socket, non-blocking.
        room: connections expected at most.
        selector: in which the talks are watched, with each :class:`OneTalk` as its data.

    Attributes:
        talks: those that are not over, in the order in which they began.
        strangers, last_stranger: how many accepted connections were dropped, and why the last one was.
    """

    def __init__(self, me: Identity, listener: socket.socket, room: int, selector: selectors.BaseSelector) -> None:
        self.me = me
        self.listener = listener
        self.room = room
        self.selector = selector
        self.talks: dict[OneTalk, None] = {}
        self.strangers = 0
        self.last_stranger = ""

    # -- what a subclass says -------------------------------------------------------------------------------------

    def greeting(self) -> Handshake:
        """The handshake of a connection that was accepted."""
        raise NotImplementedError

    def proven(self, talk: OneTalk, proven: Proven) -> None:
        """``talk`` is over: its socket is tuned, and watched no more."""
        raise NotImplementedError

    def refusal(self, talk: OneTalk, refused: Refused) -> None:
        """The other side refused, or was refused."""
        raise NotImplementedError

    def failed(self, talk: OneTalk, words: str, code: int = 0) -> None:
        """The connection came to nothing, for a reason that lies in the network or in who is there."""
        raise NotImplementedError

    def unable(self, error: OSError, what: str) -> Exception:
        """What to raise when the operating system refuses ``what``."""
        raise NotImplementedError

    # -- what it does ---------------------------------------------------------------------------------------------

    def dial(self, key: Key, where: tuple[str, int], handshake: Handshake, expires: float) -> bool:
        """Ask for connection ``key`` at (host, port); False when a stranger had to give way: ask again.

        Raises what ``unable`` says when the operating system refuses a socket.
        """
        host, port = where
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            family, kind, protocol, _, sockaddr = found[0]
            connection = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
        except OSError as error:
            if error.errno in NO_DESCRIPTORS and self.push_out("no descriptors are left"):
                return False
            raise self.unable(error, f"socket for rank {key[0]} at [{host}]:{port}") from None
        code = connection.connect_ex(sockaddr)
        talk = OneTalk(
            socket=connection,
            handshake=handshake,
            expires=expires,
            wanted=key,
            where=f"[{host}]:{port}",
            connected=code == 0,
        )
        self.talks[talk] = None
        if code not in (0, errno.EINPROGRESS):
            self.failed(talk, os.strerror(code), code)
        else:
            self.observe(connection, talk.events, talk)
        return True

    def answer(self, deadline: float = float("inf")) -> None:
        """Accept who waits, ACCEPTS_AT_ONCE at most: the listener stays readable.

        Raises what ``unable`` says when the operating system refuses a socket.
        """
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
                    if self.push_out("no descriptors are left"):
                        continue
                raise self.unable(error, "accept") from None
            connection.setblocking(False)
            talk = OneTalk(
                socket=connection,
                handshake=self.greeting(),
                expires=min(time.monotonic() + ACCEPT_SECONDS, deadline),
                wanted=None,
                where=f"[{sockaddr[0]}]:{sockaddr[1]}",
                connected=True,
            )
            if len(self.talks) >= self.room + MAX_STRANGERS:
                self.push_out("too many silent connections")
            self.talks[talk] = None
            self.observe(connection, selectors.EVENT_READ, talk)
            self.step(talk)

    def push_out(self, why: str) -> bool:
        """Drop the accepted connection that least seems to be a peer: silent before greeted, then the oldest."""
        accepted = [talk for talk in self.talks if talk.wanted is None]
        if accepted:
            self.failed(min(accepted, key=lambda talk: talk.greeted), why)  # of equals, the first that came
        return bool(accepted)

    def _somebody_waits(self) -> bool:
        """Whether the listener has a connection to accept (Linux takes a descriptor before it looks)."""
        poll = select.poll()  # needs no descriptor of its own
        poll.register(self.listener, select.POLLIN)
        return bool(poll.poll(0))

    def step(self, talk: OneTalk) -> None:
        """Go on with ``talk`` as far as its socket allows."""
        try:
            finished = talk.step()
        except Refused as refused:
            self.refusal(talk, refused)
            return
        except ValueError as error:
            self.failed(talk, str(error))
            return
        except OSError as error:
            self.failed(talk, error.strerror or str(error), error.errno or 0)
            return
        if not finished:
            self.selector.modify(talk.socket, talk.events, talk)
            return
        assert talk.result is not None
        self.talks.pop(talk, None)
        self.selector.unregister(talk.socket)
        with contextlib.suppress(OSError):  # it failed since: whoever uses it learns that
            tune(talk.socket)
        self.proven(talk, talk.result)

    def drop_late(self, now: float) -> None:
        """End the talks whose time is over."""
        for talk in [talk for talk in self.talks if now >= talk.expires]:
            self.failed(talk, "no answer to the handshake" if talk.connected else "no answer to connect")

    def note_stranger(self, talk: OneTalk, words: str) -> None:
        """Nobody that this rank expects: count it."""
        self.strangers += 1
        self.last_stranger = f"{talk.where}: {words}"

    def forget(self, talk: OneTalk) -> None:
        """Close the connection of ``talk``."""
        self.talks.pop(talk, None)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(talk.socket)
        talk.close()

    def observe(self, connection: socket.socket, events: int, talk: OneTalk | None) -> None:
        """Wait for ``events`` of a socket. Raises what ``unable`` says when it cannot."""
        try:
            self.selector.register(connection, events, talk)
        except OSError as error:
            raise self.unable(error, "cannot watch a connection while it is made") from None
