"""Control connections: one per pair of ranks, for agreement, liveness, goodbye and handing over descriptors.

Ranks on one host (same kernel, same network namespace) talk over abstract Unix sockets, which leave no file behind and
carry the descriptors of shared segments; others over TCP. Both ends prove the job's secret. One thread per Buffer reads
all of them: a connection that closes without a goodbye is a lost peer, seen as soon as the kernel closes the sockets of
a killed process. Frames are a fixed header and a bounded payload.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from .bootstrap import Card, Introduction, local_host
from .config import Settings
from .errors import BootstrapError, ConfigError, PeerLost, PeerTimeout, ProtocolError

__all__ = ["ControlMesh"]

_log = logging.getLogger("uccl_ep_serving.control")

#: magic, kind, number of descriptors that come with it, sequence of the gather, payload bytes
_HEADER = struct.Struct("<IHHQI")
_MAGIC = 0x4345_4355
_GATHER, _GOODBYE = 1, 2
_MOST_PAYLOAD = 1 << 20
_MOST_DESCRIPTORS = 8

#: magic, connecting rank, accepting rank, nonce
_HELLO = struct.Struct("<III32s")
_PROOF_BYTES = 32
#: Seconds that one stranger may take for the handshake; several are served at once.
_HANDSHAKE_SECONDS = 10.0

#: Open meshes, so that a forked child can let go of their sockets (peers must see a dead parent's connections close).
_open_meshes: weakref.WeakSet[ControlMesh] = weakref.WeakSet()


def _proof(secret: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    """HMAC-SHA256 over who proves (role) and both nonces."""
    return hmac.new(secret, role + hello + nonce, hashlib.sha256).digest()


def _receive_exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        piece = connection.recv(nbytes - len(data))
        if not piece:
            raise ConnectionError("the connection closed during the handshake")
        data += piece
    return bytes(data)


def _receive_some(connection: socket.socket) -> tuple[bytes, list[int]]:
    """What is there, with the descriptors that came along. Raises BlockingIOError when there is nothing.

    ``socket.recv_fds`` of Python 3.11 ignores its flags and would block.
    """
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    data, ancillary, _, _ = connection.recvmsg(65536, socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4), flags)
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) // 4 * 4])
    return data, list(descriptors)


@dataclass(eq=False)
class _Link:
    """Connection to one peer. ``buffer`` and ``descriptors`` belong to the reader thread."""

    peer: int
    socket: socket.socket
    local: bool
    sending: threading.Lock = field(default_factory=threading.Lock)
    buffer: bytearray = field(default_factory=bytearray)
    descriptors: list[int] = field(default_factory=list)
    said_goodbye: bool = False


class ControlMesh:
    """Connections of one rank to all others.

    Args:
        rank, ranks: of the group.
        settings: interface and deadlines.

    Attributes:
        socket_name, address, port: where this rank listens; goes into its card.
        lost: peers whose connection closed without a goodbye, in the order in which that was seen.
        on_lost, on_goodbye: called from the reader thread with the peer's rank.
    """

    def __init__(self, rank: int, ranks: int, settings: Settings) -> None:
        self.rank = rank
        self.ranks = ranks
        self.lost: list[int] = []
        self.on_lost: Callable[[int], None] = lambda peer: None
        self.on_goodbye: Callable[[int], None] = lambda peer: None
        self._settings = settings
        self._links: dict[int, _Link] = {}
        self._gone: set[int] = set()
        self._changed = threading.Condition()
        self._inbox: dict[int, dict[int, tuple[bytes, list[int]]]] = {}
        self._sequence = 0
        self._closing = False
        self._reader: threading.Thread | None = None
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self.socket_name = f"uccl_ep_control.{os.getpid()}.{secrets.token_hex(8)}"
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unix.bind("\0" + self.socket_name)
        self._unix.listen(min(ranks, 4096))
        self.address = local_host(settings)
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self._tcp = socket.socket(family, socket.SOCK_STREAM)
        self._tcp.bind((self.address, 0))
        self._tcp.listen(min(ranks, 4096))
        self.port: int = self._tcp.getsockname()[1]
        _open_meshes.add(self)

    # -- connecting ---------------------------------------------------------------------------------------------

    def connect(self, introduction: Introduction) -> None:
        """Connect to every other rank: to lower ones actively, higher ones connect to us.

        Raises BootstrapError naming the ranks that are missing at the deadline, or that do not prove the secret.
        """
        deadline = time.monotonic() + self._settings.connect_timeout
        mine = introduction.cards[self.rank]
        expected = set(range(self.rank + 1, self.ranks))
        done: dict[int, _Link] = {}
        lock = threading.Lock()

        def welcome(connection: socket.socket, local: bool) -> None:
            try:
                peer = self._accept_one(connection, introduction.secret)
            except (OSError, ValueError, ConnectionError) as error:
                # Anybody can connect to a listening port; a stranger must not disturb the group.
                _log.warning(
                    "rank %d dropped a connection that did not prove to belong to the job: %s", self.rank, error
                )
                connection.close()
                return
            with lock:
                if peer in expected and peer not in done:
                    done[peer] = _Link(peer, connection, local)
                else:
                    connection.close()

        listeners = selectors.DefaultSelector()
        listeners.register(self._unix, selectors.EVENT_READ, True)
        listeners.register(self._tcp, selectors.EVENT_READ, False)
        try:
            with ThreadPoolExecutor(8, thread_name_prefix="uccl-ep handshake") as pool:
                for peer in range(self.rank):
                    self._links[peer] = self._connect_one(introduction.cards[peer], mine, introduction.secret, deadline)
                while True:
                    with lock:
                        if done.keys() == expected:
                            break
                    if time.monotonic() > deadline:
                        missing = sorted(expected - done.keys())
                        raise BootstrapError(
                            f"rank {self.rank}: ranks {missing} have not connected within "
                            f"{self._settings.connect_timeout:g} s to {self.address}:{self.port}. Likely cause: a "
                            f"firewall, "
                            "or the wrong interface. Next step: set UCCL_EP_SOCKET_IFNAME, raise "
                            "UCCL_EP_CONNECT_TIMEOUT"
                        )
                    for key, _ in listeners.select(0.05):
                        listener: socket.socket = key.fileobj  # type: ignore[assignment]
                        connection, _ = listener.accept()
                        pool.submit(welcome, connection, bool(key.data))
        except BaseException:
            for link in (*self._links.values(), *done.values()):
                link.socket.close()
            self._links.clear()
            raise
        finally:
            listeners.close()
            self._unix.close()
            self._tcp.close()
        self._links.update(done)
        self._start_reader()

    def _connect_one(self, card: Card, mine: Card, secret: bytes, deadline: float) -> _Link:
        local = card.host == mine.host
        target = "\0" + card.socket_name if local else (card.address, card.port)
        while True:
            family = socket.AF_UNIX if local else (socket.AF_INET6 if ":" in card.address else socket.AF_INET)
            connection = socket.socket(family, socket.SOCK_STREAM)
            connection.settimeout(max(deadline - time.monotonic(), 0.05))
            try:
                connection.connect(target)
                hello = _HELLO.pack(_MAGIC, self.rank, card.rank, secrets.token_bytes(32))
                connection.sendall(hello)
                answer = _receive_exactly(connection, 32 + _PROOF_BYTES)
                nonce, proof = answer[:32], answer[32:]
                if not hmac.compare_digest(proof, _proof(secret, b"accept", hello, nonce)):
                    raise BootstrapError(
                        f"rank {self.rank}: whoever answers for rank {card.rank} at {card.address}:{card.port} does "
                        f"not "
                        "know the job's secret. Likely cause: another job on the same port"
                    )
                connection.sendall(_proof(secret, b"connect", hello, nonce))
                return _Link(card.rank, connection, local)
            except OSError as error:
                connection.close()
                if time.monotonic() > deadline:
                    raise BootstrapError(
                        f"rank {self.rank} cannot connect to rank {card.rank} on {card.host_name} "
                        f"({card.address}:{card.port}): {error}. Likely cause: a firewall, the wrong interface, or "
                        f"that "
                        "rank died. Next step: check that rank's log, set UCCL_EP_SOCKET_IFNAME"
                    ) from error
                time.sleep(0.05)
            except BaseException:
                connection.close()
                raise

    def _accept_one(self, connection: socket.socket, secret: bytes) -> int:
        """Handshake with whoever connected; returns its rank. Raises ValueError or OSError."""
        connection.settimeout(_HANDSHAKE_SECONDS)
        hello = _receive_exactly(connection, _HELLO.size)
        magic, peer, target, _ = _HELLO.unpack(hello)
        if magic != _MAGIC or target != self.rank or not 0 <= peer < self.ranks:
            raise ValueError("not a greeting of this protocol")
        nonce = secrets.token_bytes(32)
        connection.sendall(nonce + _proof(secret, b"accept", hello, nonce))
        if not hmac.compare_digest(
            _receive_exactly(connection, _PROOF_BYTES), _proof(secret, b"connect", hello, nonce)
        ):
            raise ValueError(f"it claims to be rank {peer} and has the wrong secret")
        return int(peer)

    def _start_reader(self) -> None:
        for link in self._links.values():
            link.socket.settimeout(None)
            seconds = int(self._settings.connect_timeout) + 1
            link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))
            if not link.local:
                link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._selector.register(link.socket, selectors.EVENT_READ, link)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._reader = threading.Thread(target=self._read, name=f"uccl-ep control {self.rank}", daemon=True)
        self._reader.start()

    # -- reading ------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        while not self._closing:
            try:
                ready = self._selector.select()
            except (OSError, ValueError):
                # abandon(), in another thread, closed the selector
                return
            for key, _ in ready:
                link: _Link | None = key.data
                if link is None:
                    continue
                try:
                    self._read_link(link)
                except (OSError, ValueError, ConnectionError) as error:
                    self._selector.unregister(link.socket)
                    self._lose(link, error)

    def _read_link(self, link: _Link) -> None:
        """Take what is there. Raises when the connection is over."""
        while True:
            try:
                data, descriptors = _receive_some(link.socket)
            except BlockingIOError:
                return
            link.descriptors += descriptors
            if not data:
                raise ConnectionError("closed")
            link.buffer += data
            while len(link.buffer) >= _HEADER.size:
                magic, kind, descriptors_due, sequence, length = _HEADER.unpack_from(link.buffer)
                if magic != _MAGIC or length > _MOST_PAYLOAD or kind not in (_GATHER, _GOODBYE):
                    raise ValueError(f"rank {link.peer} sent a malformed control frame")
                if len(link.buffer) < _HEADER.size + length:
                    break
                payload = bytes(link.buffer[_HEADER.size : _HEADER.size + length])
                del link.buffer[: _HEADER.size + length]
                if kind == _GOODBYE:
                    self._note_goodbye(link)
                    continue
                taken, link.descriptors = link.descriptors[:descriptors_due], link.descriptors[descriptors_due:]
                with self._changed:
                    self._inbox.setdefault(sequence, {})[link.peer] = (payload, taken)
                    self._changed.notify_all()

    def _note_goodbye(self, link: _Link) -> None:
        link.said_goodbye = True
        with self._changed:
            self._gone.add(link.peer)
            self._changed.notify_all()
        self.on_goodbye(link.peer)

    def _lose(self, link: _Link, error: Exception) -> None:
        if link.said_goodbye or self._closing:
            return
        with self._changed:
            self._gone.add(link.peer)
            self.lost.append(link.peer)
            self._changed.notify_all()
        _log.error("rank %d lost rank %d: its control connection ended (%s)", self.rank, link.peer, error)
        self.on_lost(link.peer)

    # -- agreeing -----------------------------------------------------------------------------------------------

    @property
    def local_peers(self) -> frozenset[int]:
        """Peers on this host, which can be handed descriptors."""
        return frozenset(peer for peer, link in self._links.items() if link.local)

    def gather(
        self,
        name: str,
        payload: bytes = b"",
        *,
        descriptors: Sequence[int] = (),
        without: frozenset[int] = frozenset(),
        timeout: float | None = None,
    ) -> list[tuple[bytes, list[int]]]:
        """All-gather of small payloads; all ranks call it in the same order with the same ``name``.

        Args:
            name: of the step, checked against the peers'.
            payload: at most 1 MiB.
            descriptors: handed to peers on this host, at most 8; the receiver owns what it gets.
            without: peers that do not take part (masked ones); their entry is ``(b"", [])``.
            timeout: seconds, by default the connect timeout.

        Returns:
            (payload, descriptors) by rank; own payload with no descriptors.

        Raises:
            PeerLost, PeerTimeout: naming the first missing peer. ProtocolError: a peer is in another step.
        """
        label = name.encode()
        if len(payload) + len(label) > _MOST_PAYLOAD - 2:
            raise ConfigError(f"control payload of {len(payload)} bytes for {name!r} exceeds {_MOST_PAYLOAD}")
        sequence, self._sequence = self._sequence, self._sequence + 1
        body = len(label).to_bytes(2, "little") + label + payload
        expected = self._links.keys() - without
        for peer in expected:
            link = self._links[peer]
            self._send(link, _GATHER, sequence, body, descriptors if link.local else ())
        seconds = self._settings.connect_timeout if timeout is None else timeout
        with self._changed:
            received = self._inbox.setdefault(sequence, {})
            self._changed.wait_for(
                lambda: expected <= received.keys() or (expected - received.keys()) & self._gone, seconds
            )
            missing = sorted(expected - received.keys())
            del self._inbox[sequence]
        if missing:
            self._raise_missing(name, missing, len(received), len(expected), seconds)
        result: list[tuple[bytes, list[int]]] = [(b"", []) for _ in range(self.ranks)]
        result[self.rank] = (payload, [])
        for peer in expected:
            data, taken = received[peer]
            end = 2 + int.from_bytes(data[:2], "little")
            if data[2:end] != label:
                raise ProtocolError(
                    f"rank {self.rank} is in step {name!r}, rank {peer} in {data[2:end].decode(errors='replace')!r}: "
                    f"the "
                    "ranks have not made the same calls"
                )
            result[peer] = (data[end:], taken)
        return result

    def _raise_missing(self, name: str, missing: list[int], arrived: int, expected: int, seconds: float) -> None:
        peer = next((peer for peer in missing if peer in self._gone), missing[0])
        if peer in self._gone:
            raise PeerLost(
                f"{name}, rank {self.rank}: rank {peer} is gone (its control connection closed). Read its log",
                peer=peer,
                phase=name,
            )
        raise PeerTimeout(
            f"{name}, rank {self.rank}: no answer from ranks {missing} within {seconds:g} s ({arrived} of {expected} "
            "arrived). Likely cause: they have not made the same call, or are stuck",
            peer=peer,
            phase=name,
            arrived=arrived,
            expected=expected,
        )

    def _send(self, link: _Link, kind: int, sequence: int, body: bytes, descriptors: Sequence[int]) -> None:
        frame = _HEADER.pack(_MAGIC, kind, len(descriptors), sequence, len(body)) + body
        # A peer that is gone is reported by whoever waits for its answer, by name.
        with link.sending, contextlib.suppress(OSError):
            sent = socket.send_fds(link.socket, [frame], list(descriptors)) if descriptors else 0
            link.socket.sendall(frame[sent:])

    # -- closing ------------------------------------------------------------------------------------------------

    def goodbye(self) -> None:
        """Tell every peer that this rank leaves in good order; from then on its silence is no error."""
        for link in self._links.values():
            self._send(link, _GOODBYE, 0, b"", ())

    def close(self) -> None:
        """Stop reading and close all connections. May be called twice."""
        self._closing = True
        if self._reader is not None and self._reader is not threading.current_thread():
            with contextlib.suppress(OSError):
                self._waker.send(b"x")
            self._reader.join(5.0)
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors and nothing else: what a forked child must do."""
        _open_meshes.discard(self)
        self._closing = True
        for one in (self._unix, self._tcp, self._wake, self._waker, *(link.socket for link in self._links.values())):
            one.close()
        for link in self._links.values():
            for descriptor in link.descriptors:
                os.close(descriptor)
            link.descriptors.clear()
        self._selector.close()


def _abandon_in_child() -> None:
    for mesh in list(_open_meshes):
        mesh.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
