"""What the end of a control connection means: the peer's process has ended, or only the connection has.

A process keeps its listener until it ends, and the system closes all that it had open before anybody can see it gone.
So whoever is refused where a peer listened knows that the peer has ended; who is let in, or hears nothing, does not.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from dataclasses import dataclass

from .bootstrap import Card

__all__ = ["DEAD", "DOWN", "GONE", "Endings", "answer"]

#: What :meth:`Endings.judged` tells: the process ended, and all that it had sent was heard; it ended, and what it sent
#: last may be missing; the connection failed, and the process may live.
DEAD, GONE, DOWN = "dead", "gone", "down"

#: A process that ends may take this long until its listener is closed, too.
_PROBE_SECONDS = 0.25
_AGAIN_SECONDS = 0.01


@dataclass
class _Ending:
    card: Card
    local: bool
    whole: bool
    reason: str
    deadline: float
    again: float = 0.0
    probe: socket.socket | None = None


class Endings:
    """Connections that have ended and are not judged yet. All of it belongs to the thread that reads them."""

    def __init__(self) -> None:
        self._endings: dict[int, _Ending] = {}

    def __bool__(self) -> bool:
        return bool(self._endings)

    def add(self, card: Card, local: bool, whole: bool, reason: str) -> None:
        """The connection to the rank of ``card`` has ended.

        Args:
            local: it was a Unix socket.
            whole: it ended in order, after a whole frame.
            reason: in words.
        """
        self._endings[card.rank] = _Ending(card, local, whole, reason, time.monotonic() + _PROBE_SECONDS)

    def judged(self) -> list[tuple[int, str, str]]:
        """(peer, DEAD | GONE | DOWN, reason) of those that are known by now."""
        judged = []
        for peer, ending in list(self._endings.items()):
            refused = _probe(ending)
            if refused or time.monotonic() > ending.deadline:
                how = DOWN if not refused else DEAD if ending.whole else GONE
                judged.append((peer, how, ending.reason))
                del self._endings[peer]
                _drop(ending)
        return judged

    def close(self) -> None:
        """Forget them."""
        for ending in self._endings.values():
            _drop(ending)
        self._endings.clear()


def _drop(ending: _Ending) -> None:
    if ending.probe is not None:
        ending.probe.close()
        ending.probe = None


def _probe(ending: _Ending) -> bool:
    """Whether nobody listens for the peer any more."""
    now = time.monotonic()
    if ending.probe is None:
        if now < ending.again:
            return False
        ending.again = now + _AGAIN_SECONDS
        card = ending.card
        family = socket.AF_UNIX if ending.local else socket.AF_INET6 if ":" in card.address else socket.AF_INET
        try:
            ending.probe = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:
            return False
        target = "\0" + card.socket_name if ending.local else (card.address, card.port)
        code = ending.probe.connect_ex(target)
        if code == errno.EINPROGRESS:
            return False
    else:
        poll = select.poll()
        poll.register(ending.probe, select.POLLOUT)
        if not poll.poll(0):
            return False
        code = ending.probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    _drop(ending)
    # one that listens still has lived on, and may have said more than was heard
    ending.whole = ending.whole and code == errno.ECONNREFUSED
    return code == errno.ECONNREFUSED


def answer(listener: socket.socket) -> None:
    """Let in whoever asks whether this process lives, and let go of it again."""
    try:
        connection, _ = listener.accept()
    except OSError:
        time.sleep(_AGAIN_SECONDS)  # no descriptor is left: it is asked again, and others need the processor
        return
    os.close(connection.detach())
