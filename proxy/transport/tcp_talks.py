"""Handshakes of one tcp endpoint."""

from __future__ import annotations

import selectors
import socket

from ...errors import TransportError
from ...protocol.handshake import Identity
from ...protocol.talks import Talks
from .base import refused

__all__ = ["TcpTalks"]


class TcpTalks(Talks):
    """:class:`Talks` with a selector of their own, and the errors of a transport.

    Raises TransportError when the operating system refuses the selector.
    """

    def __init__(self, me: Identity, listener: socket.socket, room: int) -> None:
        self.me, self.room = me, room
        try:
            selector = selectors.DefaultSelector()
        except OSError as error:
            raise self.unable(error, "cannot watch its connections while they are made") from None
        super().__init__(me, listener, room, selector)

    def unable(self, error: OSError, what: str) -> TransportError:
        """What to raise when the operating system refuses ``what``."""
        less = f" or lower UCCL_EP_TCP_CONNECTIONS: this endpoint needs {self.room} connections"
        return refused(f"rank {self.me.rank}: {what}", error, "tcp", less)
