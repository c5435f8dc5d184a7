"""What goes out over a TCP control connection: kept until the peer has it whole, and sent without ever waiting.

Frames are counted at both ends. The peer says how many it has (a frame of its own, which is not counted); a connection
that is made again goes on behind those. Any thread may post; the thread that reads the connections does the rest.

A connection that ends in order tells the peer that it has heard all that this process said (``endings.DEAD``). So while
something is kept that the system has not taken, its end is a reset, also where this process is killed.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable

from .seal import Seal

__all__ = ["Outbox"]

#: Bytes kept for a peer that takes nothing. Frames have 1 MiB at most, and few are under way.
_MOST_BYTES = 64 << 20


#: struct linger: what the end of a socket is, a reset or in order.
_RESET, _IN_ORDER = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)


class Outbox:
    """Of one connection.

    Args:
        connection: a socket; not blocked on, whatever its mode.
        acknowledge: makes the frame that says how many frames of the peer have arrived.
        seal: makes the MAC of each frame, when it is sent.

    Attributes:
        taken: frames of the peer that arrived whole. Writer and reader: the thread that reads.
        broken: nothing is sent until the connection is made again.
        failed: sending has met a failure, which the system tells once: whoever reads then finds an end like any other.
        over: it will not be.
        blocked: called, with the lock held, when the socket takes no more: see :attr:`wants_room`.
    """

    def __init__(self, connection: socket.socket, acknowledge: Callable[[int], bytes], seal: Seal) -> None:
        self._connection = connection
        self._seal = seal
        self.taken = 0
        self.broken = self.failed = self.over = False
        self.blocked: Callable[[], None] = lambda: None
        self._acknowledge = acknowledge
        # a signal handler that closes the Buffer may interrupt who holds it
        self._lock = threading.RLock()
        self._pumping = False
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        #: Number of the first frame that is kept, and how many of them have been sent, or begun.
        self._first = self._sent = 0
        #: What is left of the frame that is being sent.
        self._current = memoryview(b"")
        self._told = 0
        self._ends_by_reset = False

    def post(self, frame: bytes) -> bool:
        """Keep ``frame``, and send what can be sent; False when the peer has taken nothing for too long."""
        with self._lock:
            if self._bytes + len(frame) > _MOST_BYTES:
                return False
            self._frames.append(frame)
            self._bytes += len(frame)
            self._pump()
        return True

    def pump(self) -> None:
        """Send what can be sent: frames, and how many have arrived."""
        with self._lock:
            self._pump()

    @property
    def wants_room(self) -> bool:
        """Whether something waits until the socket takes more."""
        with self._lock:
            return not self.broken and bool(self._current or self._sent < len(self._frames))

    @property
    def idle(self) -> bool:
        """Whether all has been handed to the system, or will not be."""
        with self._lock:
            return self.over or not (self.broken or self._current or self._sent < len(self._frames))

    def forget(self, count: int) -> None:
        """The peer has ``count`` frames. Raises ValueError when it cannot have."""
        with self._lock:
            self._forget(count)

    def break_off(self) -> None:
        """The connection failed."""
        with self._lock:
            self._end_by_reset(True)
            self.broken = True
            self._current = memoryview(b"")

    def resume(self, connection: socket.socket, count: int, seal: Seal) -> int:
        """Go on with ``connection``, of whose other end the peer has ``count`` frames, and knows :attr:`taken`; returns
        how many are sent again, all with MACs of its own. Raises ValueError when the peer cannot have so many."""
        with self._lock:
            self._forget(count)
            again, self._sent = self._sent, 0
            self._told = self.taken
            self._connection, self._seal = connection, seal
            self.broken = self.failed = self._ends_by_reset = False
            self._pump()
        return again

    def _end_by_reset(self, yes: bool) -> None:
        if yes != self._ends_by_reset:
            self._ends_by_reset = yes
            with contextlib.suppress(OSError):
                self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET if yes else _IN_ORDER)

    def _forget(self, count: int) -> None:
        # rule: control: a count lies between what was known and what was sent
        if not self._first <= count <= self._first + self._sent:
            raise ValueError(
                f"the peer says that it has {count} control frames, of {self._first + self._sent} that were sent and "
                f"{self._first} that it had before"
            )
        while self._first < count:
            self._bytes -= len(self._frames.popleft())
            self._first += 1
            self._sent -= 1

    @property
    def interrupted(self) -> bool:
        """Whether the calling thread is in a handler that has interrupted its own sending: nothing goes out before it
        returns."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread sends
        try:
            return self._pumping
        finally:
            self._lock.release()

    def _pump(self) -> None:
        if self._pumping:
            return  # called from a handler: what it has interrupted goes on with this frame, unless it closes
        more = True
        while more:
            self._pumping = True
            try:
                self._send_all()
            finally:
                self._pumping = False
            # a handler may have posted behind its last look
            more = not (self.broken or self._current) and self._sent < len(self._frames)

    def _send_all(self) -> None:
        while not self.broken:
            if not self._current:
                if self._told < self.taken:
                    self._told = self.taken
                    self._current = memoryview(self._seal.seal(self._acknowledge(self.taken)))
                elif self._sent < len(self._frames):
                    self._current = memoryview(self._seal.seal(self._frames[self._sent]))
                    self._sent += 1
                else:
                    self._end_by_reset(False)
                    return
            try:
                sent = self._connection.send(self._current, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                self._current = self._current[sent:]
            except BlockingIOError:
                self._end_by_reset(True)
                self.blocked()
                return
            except OSError as error:
                # the thread that reads finds the end of it, and mends it. A broken pipe: the peer had ended in order.
                self.failed = not isinstance(error, BrokenPipeError)
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
                self._current = memoryview(b"")
                self.broken = True
                return
