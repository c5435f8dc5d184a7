"""Handshake of a TCP connection: both sides prove that they know the job's secret, in bounded steps.

A handshake is a generator that yields ``bytes`` to send, or the ``int`` number of bytes that it must receive next (and
is sent them); the event loop in :mod:`.tcp_connect` runs many of them side by side. It never asks for more bytes than
its frames have, so data frames that follow at once stay in the socket. The frames are those of
:mod:`uccl_ep_serving.protocol.frame`.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Generator
from dataclasses import dataclass

from ...protocol.frame import (
    CHALLENGE_BYTES,
    HANDSHAKE_VERSION,
    HELLO_BYTES,
    KIND_CHALLENGE,
    KIND_HELLO,
    KIND_PROOF,
    KIND_VERDICT,
    NONCE_BYTES,
    PREFIX_BYTES,
    PROOF_BYTES,
    ROLE_ACCEPTOR,
    ROLE_CONNECTOR,
    Hello,
    Verdict,
    decode_challenge,
    decode_hello,
    decode_prefix,
    encode_challenge,
    encode_hello,
    encode_proof,
    encode_verdict,
    job_digest,
    proof_of,
)

__all__ = ["Handshake", "Identity", "Refused", "accept", "connect"]

#: Yields bytes to send or a number of bytes to receive; returns (peer rank, connection index).
Handshake = Generator[bytes | int, bytes, tuple[int, int]]


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
    if version != HANDSHAKE_VERSION:
        yield encode_verdict(Verdict.OTHER_VERSION)
        raise Refused(Verdict.OTHER_VERSION, claimed)
    if kind == KIND_VERDICT and code != Verdict.WELCOME:
        raise Refused(Verdict(code), claimed)
    if kind != wanted:
        raise ValueError(f"handshake frame of kind {kind} instead of {wanted}")
    if nbytes == 0:
        return b""
    return (yield nbytes)


def connect(me: Identity, target: int, connection: int) -> Handshake:
    """The connecting side. Raises ValueError or Refused."""
    hello = me.hello(target, connection)
    yield encode_hello(hello)
    body = yield from _receive(KIND_CHALLENGE, CHALLENGE_BYTES, target)
    nonce, proof = decode_challenge(body)
    if not hmac.compare_digest(proof, proof_of(me.secret, ROLE_ACCEPTOR, hello, nonce)):
        yield encode_verdict(Verdict.WRONG_SECRET)
        raise Refused(Verdict.WRONG_SECRET, target)
    yield encode_proof(proof_of(me.secret, ROLE_CONNECTOR, hello, nonce))
    yield from _receive(KIND_VERDICT, 0, target)
    return target, connection


def _objection(me: Identity, hello: Hello, expected: frozenset[int]) -> Verdict:
    """Why ``hello`` cannot be right, or WELCOME."""
    if hello.job != job_digest(me.job):
        return Verdict.OTHER_JOB
    shape = (me.ranks, me.proxy, me.connections, me.window_bytes)
    if (hello.ranks, hello.proxy, hello.connections, hello.window_bytes) != shape:
        return Verdict.OTHER_SHAPE
    if hello.target != me.rank or hello.source not in expected:
        return Verdict.OTHER_RANK
    return Verdict.WELCOME


def accept(me: Identity, expected: frozenset[int]) -> Handshake:
    """The accepting side; ``expected`` are the ranks that may connect. Raises ValueError or Refused."""
    body = yield from _receive(KIND_HELLO, HELLO_BYTES, -1)
    hello = decode_hello(body)
    verdict = _objection(me, hello, expected)
    if verdict is not Verdict.WELCOME:
        yield encode_verdict(verdict)
        raise Refused(verdict, hello.source)
    nonce = secrets.token_bytes(NONCE_BYTES)
    yield encode_challenge(nonce, proof_of(me.secret, ROLE_ACCEPTOR, hello, nonce))
    proof = yield from _receive(KIND_PROOF, PROOF_BYTES, hello.source)
    if not hmac.compare_digest(proof, proof_of(me.secret, ROLE_CONNECTOR, hello, nonce)):
        yield encode_verdict(Verdict.WRONG_SECRET)
        raise Refused(Verdict.WRONG_SECRET, hello.source)
    yield encode_verdict(Verdict.WELCOME)
    return hello.source, hello.connection
