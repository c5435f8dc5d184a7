"""Handshakes in both roles, over a wire on which somebody changes what the other side says."""

from __future__ import annotations

import hashlib
import hmac
import random
import struct
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.fuzz.change import BYTES, bound, change
from tests.fuzz.subject import Block, Wrong
from tests.fuzz.wire import Wire
from uccl_ep_serving.protocol import handshake as product
from uccl_ep_serving.protocol.command import MAX_WINDOW_BYTES

__all__ = ["Handshakes"]

_VERSION = 3
_SECRET, _OTHER_SECRET = bytes(range(32)), bytes(32)
_JOB = b"a job"
_RANKS, _CONNECTIONS, _WINDOW = 8, 4, 1 << 20
_HELLO, _COUNT, _PREFIX = struct.Struct("<HHHHHHQ16s32s"), struct.Struct("<Q32s"), struct.Struct("<4sBBH")
_BITS = (16, 16, 16, 16, 16, 16, 64)
_DIGEST = hashlib.sha256(b"uccl-ep job\0" + _JOB).digest()[:16]
#: Of both sides in turn; bytes that come one at a time need some hundreds.
_MOST_STEPS = 400

KINDS = ("nothing", "a field", "a field, proven", *BYTES, "spliced", "a verdict", "another secret", "replayed")


def _proof(secret: bytes, role: bytes, hello: bytes, nonce: bytes, count: int) -> bytes:
    return hmac.new(secret, role + hello + nonce + struct.pack("<Q", count), "sha256").digest()


def _keys(hello: bytes, nonce: bytes) -> bytes:
    return hmac.new(_SECRET, b"uccl-ep keys\0" + hello + nonce, "sha512").digest()


def _heads(data: bytes, kind: int, nbytes: int) -> Iterator[tuple[str, int]]:
    """The outcome that the prefix of the next message decides; nothing where the message has to be looked at."""
    if len(data) < 8:
        yield "waits", 0
        return
    magic, version, given, code = _PREFIX.unpack_from(data)
    if magic != b"UEPH" or not 1 <= given <= 5:
        yield "malformed", 0
    elif version != _VERSION:
        yield "refused", 5
    elif given == 4:
        yield ("refused", code) if 1 <= code <= 7 else ("malformed", 0)
    elif given != kind or code != 0:
        yield "malformed", 0
    elif len(data) < 8 + nbytes:
        yield "waits", 0


class _Case:
    """One handshake.

    Attributes:
        role: of the side that is attacked.
        heard: all that it was sent.
        own: what it sends, in a good handshake.
    """

    def __init__(self, case: int, module: ModuleType) -> None:
        self.rng = rng = random.Random(case)
        self.module = module
        module.secrets = SimpleNamespace(token_bytes=rng.randbytes)  # type: ignore[attr-defined]
        self.kind = rng.choice(KINDS)
        self.accepts = rng.random() < 0.5
        self.connector, self.acceptor = rng.sample(range(_RANKS), 2)
        self.connection = rng.randrange(_CONNECTIONS)
        self.counts = {True: rng.getrandbits(rng.choice((3, 40, 63))), False: rng.getrandbits(rng.choice((3, 40, 63)))}
        self.expected = frozenset(rng.sample(range(_RANKS), 4)) | {self.connector}
        self.left = rng.random() < 0.05
        self.wire = Wire(rng)
        self.heard = b""

    def identity(self, rank: int, secret: bytes = _SECRET) -> Any:
        return self.module.Identity(rank, _RANKS, 1, _CONNECTIONS, _WINDOW, _JOB, secret)

    def _side(self, accepts: bool, secret: bytes = _SECRET) -> Any:
        if accepts:
            return self.module.accept(self.identity(self.acceptor, secret), self.expected, self._count(accepts))
        me = self.identity(self.connector, secret)
        return self.module.connect(me, self.acceptor, self.connection, self.counts[False])

    def _count(self, accepts: bool) -> Callable[[int, int], Any]:
        # who has done with its peer says so
        left = self.left and accepts == self.accepts
        return lambda peer, connection: self.module.Verdict.LEFT if left else self.counts[True]

    def run(self) -> tuple[Any, ...]:
        """What came of it."""
        victim = self._side(self.accepts)
        secret = _OTHER_SECRET if self.kind == "another secret" else _SECRET
        other = self._side(not self.accepts, secret)
        talk = self.module.Talk(socket=self.wire, handshake=victim, expires=0.0, connected=False)
        wants: bytes | int | None = next(other)
        told, number, odd = 0, 0, self.rng.randrange(2)
        for _ in range(_MOST_STEPS):
            try:
                if talk.step():
                    return "proven", talk.result
            except self.module.Refused as error:
                return "refused", int(error.verdict)
            except ValueError:
                return ("malformed",)
            except ConnectionResetError:
                return ("waits",)
            # the other side does what it can with what it has heard
            while wants is not None:
                if isinstance(wants, bytes):
                    said = wants if number != odd else self._changed(wants)
                    number += 1
                    self.heard += said
                    self.wire.put(said)
                    wants = self._advance(other, b"")
                elif len(self.wire.sent) - told >= wants:
                    part = bytes(self.wire.sent[told : told + wants])
                    told += wants
                    wants = self._advance(other, part)
                else:
                    break
            if self.wire.empty:
                self.wire.closed = True
        return ("never over",)

    def _advance(self, side: Any, data: bytes) -> bytes | int | None:
        try:
            return side.send(data)  # type: ignore[no-any-return]
        except (StopIteration, ValueError, self.module.Refused):
            return None

    def _changed(self, said: bytes) -> bytes:
        rng, kind = self.rng, self.kind
        if kind == "replayed":
            return next(one for one in self._recorded() if len(one) == len(said))
        if kind in BYTES:
            return change(rng, kind, said)
        if kind == "a verdict":
            return _PREFIX.pack(b"UEPH", _VERSION, 4, rng.choice((*range(9), rng.getrandbits(16))))
        if kind == "spliced":
            return said[:8] + rng.randbytes(len(said) - 8)
        if kind in ("a field", "a field, proven"):
            return self._field(said, proven=kind != "a field")
        return said

    def _recorded(self) -> list[bytes]:
        """What the other side has said in another handshake of the same two ranks."""
        sides = self._side(not self.accepts), self._side(self.accepts)
        wants = [next(sides[0]), next(sides[1])]
        buffers, said = [b"", b""], []
        for turn in [0, 1] * 8:
            want = wants[turn]
            while want is not None and (isinstance(want, bytes) or len(buffers[turn]) >= want):
                if isinstance(want, bytes):
                    buffers[1 - turn] += want
                    said += [want] if turn == 0 else []
                    want = self._advance(sides[turn], b"")
                else:
                    part, buffers[turn] = buffers[turn][:want], buffers[turn][want:]
                    want = self._advance(sides[turn], part)
            wants[turn] = want
        return said

    def _field(self, said: bytes, proven: bool) -> bytes:
        """A field changed; by somebody who knows the secret the proof fits."""
        rng = self.rng
        if rng.random() < 0.2:
            prefix = list(_PREFIX.unpack_from(said))
            place = rng.randrange(1, 4)
            prefix[place] = bound(rng, prefix[place], 16 if place == 3 else 8)
            return _PREFIX.pack(*prefix) + said[8:]
        if len(said) == 8 + _HELLO.size:
            fields = list(_HELLO.unpack_from(said, 8))
            place = rng.randrange(9)
            if place < 7:
                fields[place] = bound(rng, fields[place], _BITS[place], (_RANKS, 16, 17, 4096, 4097, 1 << 40))
            else:
                fields[place] = rng.randbytes(len(fields[place]))
            return said[:8] + _HELLO.pack(*fields)
        if len(said) == 8 + _COUNT.size:
            count, proof = _COUNT.unpack_from(said, 8)
            count = bound(rng, count, 64)
            if proven and count < 1 << 63:
                role = b"uccl-ep welcome\0\0\0" if not self.accepts else b"uccl-ep connector\0"
                proof = _proof(_SECRET, role, *self._said(), count)
            return said[:8] + _COUNT.pack(count, proof)
        return change(rng, "bytes", said)

    def _said(self) -> tuple[bytes, bytes]:
        """HELLO and the acceptor's nonce, as the side that is attacked knows them."""
        first = 8 + _HELLO.size
        if self.accepts:
            return self.heard[:first], bytes(self.wire.sent[8:40])
        return bytes(self.wire.sent[:first]), self.heard[8:40]

    def must_be(self) -> tuple[Any, ...]:
        """The outcome, of the bytes alone."""
        return next(self._acceptor() if self.accepts else self._connector())

    def _acceptor(self) -> Iterator[tuple[Any, ...]]:
        data = self.heard
        yield from _heads(data, 1, _HELLO.size)
        source, target, ranks, proxy, connections, connection, window, job, _ = _HELLO.unpack_from(data, 8)
        good = 1 <= ranks <= 4096 and source < ranks and target < ranks and proxy < 16
        good = good and 1 <= connections <= 16 and connection < connections and window >= 1
        if not good or window > MAX_WINDOW_BYTES:
            yield ("malformed",)
        if job != _DIGEST:
            yield "refused", 2
        if (ranks, proxy, connections, window) != (_RANKS, 1, _CONNECTIONS, _WINDOW):
            yield "refused", 4
        if target != self.acceptor or source not in self.expected:
            yield "refused", 3
        first = 8 + _HELLO.size
        yield from _heads(data[first:], 3, _COUNT.size)
        hello, nonce = self._said()
        count, proof = _COUNT.unpack_from(data, first + 8)
        if count >= 1 << 63:
            yield ("malformed",)
        if proof != _proof(_SECRET, b"uccl-ep connector\0", hello, nonce, count):
            yield "refused", 1
        if self.left:
            yield "refused", 6
        keys = _keys(hello, nonce)
        yield "proven", (source, connection, count, keys[32:], keys[:32])

    def _connector(self) -> Iterator[tuple[Any, ...]]:
        data = self.heard
        yield from _heads(data, 2, 64)
        hello, nonce = self._said()
        if data[40:72] != _proof(_SECRET, b"uccl-ep acceptor\0\0", hello, nonce, 0):
            yield "refused", 1
        yield from _heads(data[72:], 5, _COUNT.size)
        count, proof = _COUNT.unpack_from(data, 80)
        if count >= 1 << 63:
            yield ("malformed",)
        if proof != _proof(_SECRET, b"uccl-ep welcome\0\0\0", hello, nonce, count):
            yield "refused", 1
        keys = _keys(hello, nonce)
        yield "proven", (self.acceptor, self.connection, count, keys[:32], keys[32:])


class Handshakes:
    """See :class:`.subject.Subject`; ``module`` is the one that speaks them, or a mutant of it."""

    kinds = KINDS

    def __init__(self, say: Callable[[int], None], module: ModuleType = product) -> None:
        self._say, self._module, self._secrets = say, module, module.secrets  # type: ignore[attr-defined]

    def run(self, first: int, count: int) -> Block:
        """Cases ``first`` to ``first + count`` - 1. Raises Wrong."""
        rows = {kind: [0, 0, 0, 0] for kind in KINDS}
        for number in range(first, first + count):
            self._say(number)
            case = _Case(number, self._module)
            outcome = case.run()
            if outcome[0] == "proven":
                one = outcome[1]
                outcome = "proven", (one.peer, one.connection, one.count, one.send_key, one.receive_key)
            wanted = case.must_be()
            if outcome[0] != wanted[0] or (outcome[0] != "waits" and outcome[0] != "malformed" and outcome != wanted):
                raise Wrong(number, f"{case.kind}: it was {outcome} and must be {wanted}")
            row = rows[case.kind]
            row[0] += 1
            row[1] += outcome[0] != "proven"
        return Block({kind: tuple(row) for kind, row in rows.items()}, count)

    def close(self) -> None:
        """Numbers that nobody can guess again."""
        self._module.secrets = self._secrets  # type: ignore[attr-defined]
