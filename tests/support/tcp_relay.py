"""A wire between two tcp endpoints that a test cuts, resets, silences or garbles."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator

from uccl_ep_serving.protocol import frame

__all__ = ["Relay", "garbler", "relays"]


class _Pair:
    """One connection: the end of who came, and the end of who listens."""

    def __init__(self, near: socket.socket, far: socket.socket, alter: Callable[[bytes], bytes]) -> None:
        self.ends = near, far
        self._alter = alter
        self._over = False
        self._threads = [
            threading.Thread(target=self._forward, args=ends, daemon=True) for ends in ((near, far), (far, near))
        ]
        for end in self.ends:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for thread in self._threads:
            thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(1 << 16)) and not self._over:
                sink.sendall(self._alter(data))
            if not self._over:
                sink.shutdown(socket.SHUT_WR)

    def cut(self, how: str) -> list[socket.socket]:
        """See :meth:`Relay.cut`; returns the ends that stay open and hear nothing."""
        self._over = True
        for end in self.ends:
            with contextlib.suppress(OSError):
                # wakes the threads; the other side is told nothing by that
                end.shutdown(socket.SHUT_RD)
        spared = {"near": [self.ends[1]], "far": [self.ends[0]]}.get(how, [])
        for end in self.ends:
            if end not in spared:
                if how != "close":
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                with contextlib.suppress(OSError):
                    if how == "close":
                        end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(0.2)  # one that sends to a peer which does not read ends with the close
        for end in self.ends:
            if end not in spared:
                end.close()
        return spared


class Relay:
    """Forwards each connection that comes to ``address`` to ``target``, both ways, until it is told otherwise.

    Args:
        target: (host, port).
        alter: what becomes of bytes on their way; those of a handshake as well.

    Attributes:
        accepting: what comes is forwarded, and not closed at once.
        connections: how many there were.
    """

    def __init__(self, target: tuple[str, int], alter: Callable[[bytes], bytes] = lambda data: data) -> None:
        self.alter = alter
        self.accepting = True
        self.connections = 0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._where = self._listener.getsockname()
        self._pairs: list[_Pair] = []
        self._deaf: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> bytes:
        """As an endpoint tells its own."""
        return frame.encode_address(*self._where)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self.accepting:
                near.close()
                continue
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._pairs.append(_Pair(near, far, lambda data: self.alter(data)))
                self.connections += 1

    def cut(self, how: str = "reset", count: int = 1 << 30) -> int:
        """Break the ``count`` newest connections; how many there were.

        ``how``: "reset" or "close" at both ends; "near" or "far": a reset at one of them, and the other hears nothing.
        """
        with self._lock:
            taken = [self._pairs.pop() for _ in range(min(count, len(self._pairs)))]
        for pair in taken:
            self._deaf += pair.cut(how)
        return len(taken)

    def close(self) -> None:
        """End all of it."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut("close")
        while self._deaf:
            self._deaf.pop().close()


@contextlib.contextmanager
def relays(addresses: list[bytes], alter: Callable[[bytes], bytes] = lambda data: data) -> Iterator[list[Relay]]:
    """A relay before each of ``addresses``, by rank."""
    made = [Relay(frame.decode_address(address), alter) for address in addresses]
    try:
        yield made
    finally:
        for relay in made:
            relay.close()


def garbler(seed: int, every: int) -> Callable[[bytes], bytes]:
    """Changes a bit in one of ``every`` pieces."""
    dice = random.Random(seed)

    def alter(data: bytes) -> bytes:
        if dice.randrange(every):
            return data
        changed = bytearray(data)
        changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        return bytes(changed)

    return alter
