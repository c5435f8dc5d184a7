"""The handshake of every connection of a job: both sides prove that they know its secret, in bounded steps.

Control connections and the data connections of ``tcp`` speak it alike and differ in the job that they name. A handshake
is a generator that yields ``bytes`` to send, or the ``int`` number of bytes that it must receive next (and is sent
them); a :class:`Talk` drives it over a non-blocking socket, so one thread runs many of them side by side. It never asks
for more bytes than its frames have, so what follows at once stays in the socket. The frames are those of
:mod:`uccl_ep_serving.protocol.frame`.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from .frame import (
    CHALLENGE_BYTES,
    HANDSHAKE_VERSION,
    HELLO_BYTES,
    KIND_CHALLENGE,
    KIND_HELLO,
    KIND_PROOF,
    KIND_VERDICT,
    KIND_WELCOME,
    NONCE_BYTES,
    PREFIX_BYTES,
    PROOF_BYTES,
    ROLE_ACCEPTOR,
    ROLE_CONNECTOR,
    ROLE_WELCOME,
    WELCOME_BYTES,
    Hello,
    Verdict,
    decode_challenge,
    decode_counted,
    decode_hello,
    decode_prefix,
    encode_challenge,
    encode_hello,
    encode_proof,
    encode_verdict,
    encode_welcome,
    job_digest,
    keys_of,
    proof_of,
)

__all__ = ["Handshake", "Identity", "Proven", "Refused", "Talk", "accept", "connect", "tune"]


@dataclass(frozen=True, slots=True)
class Proven:
    """What a handshake came to.

    Attributes:
        peer: rank at the other end.
        connection: index of the connection.
        count: frames that the peer has taken of this connection, before it broke; 0 for one that is made first.
        send_key, receive_key: of the MACs in each direction, KEY_BYTES; not shown.
    """

    peer: int
    connection: int
    count: int
    send_key: bytes = field(repr=False)
    receive_key: bytes = field(repr=False)

    @property
    def key(self) -> tuple[int, int]:
        """(peer, connection)."""
        return self.peer, self.connection


#: Yields bytes to send or a number of bytes to receive.
Handshake = Generator[bytes | int, bytes, Proven]


#: A peer whose host is gone without a word (power, cable) ends an idle connection after 25 s: probes from 10 s on,
#: every 5 s, three times. While something is under way to it the deadline of the wait is the bound.
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


def tune(connection: socket.socket) -> None:
    """Options of every proven TCP connection. Buffer sizes stay with the kernel's autotuning."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


@dataclass(frozen=True, slots=True)
class Identity:
    """What one endpoint brings to its handshakes; ``secret`` never leaves the process and is not shown.

    Attributes: see :class:`uccl_ep_serving.protocol.frame.Hello`.
    """

    rank: int
    ranks: int
    proxy: int
    connections: int
    window_bytes: int
    job: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"Identity(rank={self.rank}, ranks={self.ranks}, proxy={self.proxy})"

    def hello(self, target: int, connection: int) -> Hello:
        """A HELLO with a fresh nonce."""
        return Hello(
            source=self.rank,
            target=target,
            ranks=self.ranks,
            proxy=self.proxy,
            connections=self.connections,
            connection=connection,
            window_bytes=self.window_bytes,
            job=job_digest(self.job),
            nonce=secrets.token_bytes(NONCE_BYTES),
        )


class Refused(Exception):
    """A handshake in the right language came to a refusal.

    Attributes:
        verdict: why.
        claimed: rank that the other side says it is (the one asked for, at the connector); not proven.
    """

    def __init__(self, verdict: Verdict, claimed: int) -> None:
        super().__init__(verdict.words)
        self.verdict = verdict
        self.claimed = claimed


def _receive(wanted: int, nbytes: int, claimed: int) -> Generator[bytes | int, bytes, bytes]:
    """The body of the frame of kind ``wanted``.

    Raises:
        ValueError: what came is no handshake, or another kind than a refusal.
        Refused: the other side refused, or speaks another version.
    """
    version, kind, code = decode_prefix((yield PREFIX_BYTES))
    # rule: handshake: the version is this one
    if version != HANDSHAKE_VERSION:
        yield encode_verdict(Verdict.OTHER_VERSION)
        raise Refused(Verdict.OTHER_VERSION, claimed)
    if kind == KIND_VERDICT:
        raise Refused(Verdict(code), claimed)
    # rule: handshake: a frame is the one that is due
    if kind != wanted:
        raise ValueError(f"handshake frame of kind {kind} instead of {wanted}")
    return (yield nbytes)


def connect(me: Identity, target: int, connection: int, count: int = 0) -> Handshake:
    """The connecting side. Raises ValueError or Refused.

    Args:
        count: frames that this rank has taken of the same connection before it broke.
    """
    hello = me.hello(target, connection)
    yield encode_hello(hello)
    body = yield from _receive(KIND_CHALLENGE, CHALLENGE_BYTES, target)
    nonce, proof = decode_challenge(body)
    # rule: handshake: the acceptor proves the secret
    if not hmac.compare_digest(proof, proof_of(me.secret, ROLE_ACCEPTOR, hello, nonce)):
        yield encode_verdict(Verdict.WRONG_SECRET)
        raise Refused(Verdict.WRONG_SECRET, target)
    yield encode_proof(count, proof_of(me.secret, ROLE_CONNECTOR, hello, nonce, count))
    theirs, proof = decode_counted((yield from _receive(KIND_WELCOME, WELCOME_BYTES, target)))
    # rule: handshake: the welcome is proven, with its count
    if not hmac.compare_digest(proof, proof_of(me.secret, ROLE_WELCOME, hello, nonce, theirs)):
        raise Refused(Verdict.WRONG_SECRET, target)
    mine, other = keys_of(me.secret, hello, nonce)
    return Proven(target, connection, theirs, mine, other)


def _objection(me: Identity, hello: Hello, expected: frozenset[int]) -> Verdict | None:
    """Why ``hello`` cannot be right."""
    # rule: handshake: the job is the same
    if hello.job != job_digest(me.job):
        return Verdict.OTHER_JOB
    shape = (me.ranks, me.proxy, me.connections, me.window_bytes)
    # rule: handshake: the shape of the group is the same
    if (hello.ranks, hello.proxy, hello.connections, hello.window_bytes) != shape:
        return Verdict.OTHER_SHAPE
    # rule: handshake: the two ranks are those that are meant
    if hello.target != me.rank or hello.source not in expected:
        return Verdict.OTHER_RANK
    return None


def _from_nothing(peer: int, connection: int) -> int:
    """What has been taken of a connection that is made for the first time."""
    return 0


def accept(
    me: Identity, expected: frozenset[int], count: Callable[[int, int], int | Verdict] = _from_nothing
) -> Handshake:
    """The accepting side. Raises ValueError or Refused.

    Args:
        expected: ranks that may connect.
        count: called with (peer, connection) once that peer is proven: frames that this rank has taken of the same
            connection, and takes from nowhere else from then on; or why the peer is refused.
    """
    body = yield from _receive(KIND_HELLO, HELLO_BYTES, -1)
    hello = decode_hello(body)
    verdict = _objection(me, hello, expected)
    if verdict is not None:
        yield encode_verdict(verdict)
        raise Refused(verdict, hello.source)
    nonce = secrets.token_bytes(NONCE_BYTES)
    yield encode_challenge(nonce, proof_of(me.secret, ROLE_ACCEPTOR, hello, nonce))
    theirs, proof = decode_counted((yield from _receive(KIND_PROOF, PROOF_BYTES, hello.source)))
    # rule: handshake: the connector proves the secret, and its count
    if not hmac.compare_digest(proof, proof_of(me.secret, ROLE_CONNECTOR, hello, nonce, theirs)):
        yield encode_verdict(Verdict.WRONG_SECRET)
        raise Refused(Verdict.WRONG_SECRET, hello.source)
    taken = count(hello.source, hello.connection)
    if isinstance(taken, Verdict):
        yield encode_verdict(taken)
        raise Refused(taken, hello.source)
    yield encode_welcome(taken, proof_of(me.secret, ROLE_WELCOME, hello, nonce, taken))
    other, mine = keys_of(me.secret, hello, nonce)
    return Proven(hello.source, hello.connection, theirs, mine, other)


@dataclass(eq=False, kw_only=True)
class Talk:
    """One connection in its handshake.

    Attributes:
        expires: ``time.monotonic()`` instant at which its owner gives it up.
        connected: the TCP connection stands.
        greeted: something valid was received and answered; a real peer gets there at once.
        result: once proven.
    """

    socket: socket.socket
    handshake: Handshake
    expires: float
    connected: bool
    sending: bytes = b""
    receiving: int = 0
    received: bytes = b""
    started: bool = False
    greeted: bool = False
    result: Proven | None = None

    def step(self) -> bool:
        """Go as far as the socket allows; True when ``result`` is set.

        Raises:
            OSError: the connection failed.
            ValueError: the other side does not speak the handshake.
            Refused: it does, and the two do not fit.
        """
        if not self.connected:
            code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            self.connected = True
        if not self.started:
            self.started = True
            self._take(next(self.handshake))
        while True:
            if self.sending:
                try:
                    self.sending = self.sending[self.socket.send(self.sending, socket.MSG_NOSIGNAL) :]
                except BlockingIOError:
                    return False
                if self.sending:
                    return False
            elif len(self.received) < self.receiving:
                try:
                    part = self.socket.recv(self.receiving - len(self.received))
                except BlockingIOError:
                    return False
                if not part:
                    raise ConnectionResetError(errno.ECONNRESET, "closed during the handshake")
                self.received += part
            else:
                received, self.received, self.receiving = self.received, b"", 0
                try:
                    self._take(self.handshake.send(received))
                except StopIteration as end:
                    self.result = end.value
                    return True

    def _take(self, request: bytes | int) -> None:
        if isinstance(request, bytes):
            self.sending = request
            self.greeted = True
        else:
            self.receiving = request

    @property
    def events(self) -> int:
        """What to wait for."""
        waits_to_write = not self.connected or bool(self.sending)
        return selectors.EVENT_WRITE if waits_to_write else selectors.EVENT_READ

    def close(self) -> None:
        """Close the socket, unread input first: closing over it would reset the connection under our last frame."""
        self.handshake.close()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            self.socket.recv(4096)
        self.socket.close()
