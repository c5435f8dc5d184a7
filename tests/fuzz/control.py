"""Frames of the control connections: streams of them, changed on their way, over TCP and over a Unix socket.

Over TCP frames have MACs: a field is changed by a peer that has the keys, bytes by who comes between.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.fuzz.change import BYTES, bound, change
from tests.fuzz.subject import Block, Wrong
from tests.fuzz.wire import Wire
from uccl_ep_serving.control_plane import frames as product
from uccl_ep_serving.control_plane.links import Link
from uccl_ep_serving.control_plane.outbox import Outbox
from uccl_ep_serving.control_plane.reports import Note, Promise, Report, Wait
from uccl_ep_serving.control_plane.seal import MAC_BYTES, Seal

__all__ = ["ControlFrames"]

_HEADER = struct.Struct("<IHHQI")
_MAGIC = 0x4345_4355
_MOST = 1 << 20
_KINDS = range(1, 6)
_NOTE, _COUNT = 3, 5
_RANKS = 16
#: Of what was received and is no whole frame yet: a frame, and what one receive brings.
_MOST_KEPT = _MOST + 65536 + _HEADER.size + MAC_BYTES
_MOST_DESCRIPTORS = 8
_OURS, _THEIRS = b"o" * 32, b"t" * 32

KINDS = ("nothing", "a field", *BYTES, "a note", "descriptors")

Frames = list[tuple[int, int, bytes]]


def _note(rng: random.Random) -> bytes:
    some = frozenset(rng.sample(range(_RANKS), 3))
    waits = Wait(rng.randrange(_RANKS), "dispatch", 1, 2, 3)
    report = Report(2, some, frozenset(), some, frozenset(), "", True, waits, False, {3: "it died"})
    return Note(4, some | {1}, {1: report}, {1: 2}, some, (Promise(5, some, some),)).encode()


class _Case:
    def __init__(self, case: int, module: ModuleType, outbox: Callable[..., Outbox]) -> None:
        self.outbox = outbox
        self.rng = rng = random.Random(case)
        self.module = module
        self.kind = rng.choice(KINDS) if rng.random() < 0.3 else rng.choice(KINDS[:-1])
        self.over_tcp = rng.random() < 0.5 and self.kind != "descriptors"
        #: Frames of this rank that the peer has not told to have.
        self.sent = rng.randrange(4)
        self.told = rng.randrange(self.sent + 1)
        frames = [self._frame() for _ in range(1 + rng.randrange(6))]
        if self.kind == "a field":
            frames[0] = self._field(frames[0])
        peer = Seal(_THEIRS, _OURS)
        #: What the peer has sent: headers and payloads, over TCP each with its MAC.
        self.parts: list[bytes] = []
        for sealed in map(peer.seal, frames):
            parts = sealed[: _HEADER.size + MAC_BYTES], sealed[_HEADER.size + MAC_BYTES :]
            self.parts += filter(None, parts)
        self.wire = b"".join(self.parts if self.over_tcp else frames)
        if self.kind in BYTES:
            self.wire = change(rng, self.kind, self.wire)

    def _frame(self) -> bytes:
        rng = self.rng
        kind = rng.choice((1, 2, 3, 4, 5) if self.over_tcp else (1, 2, 3, 4))
        body = b"" if kind in (2, _COUNT) else rng.randbytes(rng.choice((0, 1, 8, 100)))
        if rng.random() < 0.002:
            body = bytes(_MOST - rng.randrange(2))
        if kind == _NOTE:
            body = _note(rng)
            if self.kind == "a note":
                body = change(rng, rng.choice(BYTES), body)
        sequence = self.told if kind == _COUNT else rng.getrandbits(32)
        return _HEADER.pack(_MAGIC, kind, 0, sequence, len(body)) + body

    def _field(self, wire: bytes) -> bytes:
        rng = self.rng
        fields = list(_HEADER.unpack_from(wire))
        place = rng.randrange(5)
        fields[place] = bound(rng, fields[place], (32, 16, 16, 64, 32)[place], (_MOST, _MOST + 1, 5, 6))
        return _HEADER.pack(*fields) + wire[_HEADER.size :]

    def _is_genuine(self, number: int, start: int, end: int) -> bool:
        """Whether bytes [start, end) are the peer's part ``number``; over a Unix socket nobody alters any."""
        return not self.over_tcp or self.parts[number : number + 1] == [self.wire[start:end]]

    def run(self) -> tuple[str, Frames]:
        """How it ended, and the frames before that."""
        socket_like: Any = Wire(self.rng)
        link = Link(1, socket_like, not self.over_tcp)
        if self.over_tcp:
            link.seal = Seal(_OURS, _THEIRS)
            link.outbox = self.outbox(socket_like, self.module.count_frame, link.seal)
            for _ in range(self.sent):
                link.outbox.post(b"frame")
        found: Frames = []
        socket_like.put(self.wire)
        for _ in range(100_000):
            try:
                for frame in self.module.read_frames(link):
                    found.append((frame.kind, frame.sequence, frame.payload))
                    if len(link.buffer) > _MOST_KEPT:
                        return "keeps too much", found
            except self.module.Ended:
                return "ended", found
            except ConnectionError:
                return "altered", found
            except ValueError:
                return "malformed", found
            socket_like.closed = socket_like.empty
        return "never over", found

    def must_be(self) -> tuple[str, Frames]:
        """The same, of the bytes alone."""
        found: Frames = []
        acknowledged, at, number = 0, 0, 0
        behind = MAC_BYTES if self.over_tcp else 0
        while len(self.wire) - at >= _HEADER.size + behind:
            magic, kind, due, sequence, length = _HEADER.unpack_from(self.wire, at)
            at += _HEADER.size + behind
            if not self._is_genuine(number, at - _HEADER.size - behind, at):
                return "altered", found
            number += 1
            if magic != _MAGIC or length > _MOST or kind not in _KINDS:
                return "malformed", found
            behind_it = behind if length else 0
            if len(self.wire) - at < length + behind_it:
                break
            if length:
                if not self._is_genuine(number, at, at + length + behind_it):
                    return "altered", found
                number += 1
            if due:
                return "malformed", found
            if kind == _COUNT and self.over_tcp:
                if not acknowledged <= sequence <= self.sent:
                    return "malformed", found
                acknowledged = sequence
            else:
                found.append((kind, sequence, self.wire[at : at + length]))
            at += length + behind_it
        return "ended", found


def _descriptors(case: _Case, module: ModuleType) -> str:
    """Frames that name some descriptors and bring others; what was wrong, in words."""
    rng = case.rng
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.ExitStack() as held:
        one = os.eventfd(0)
        held.callback(os.close, one)
        each, balance = True, 0
        for _ in range(1 + rng.randrange(4)):
            named, brought = (rng.randrange(4) for _ in range(2))
            if rng.random() < 0.7:
                named = brought
            frame = _HEADER.pack(_MAGIC, 1, named, 0, 3) + b"abc"
            sent = socket.send_fds(ours, [frame], [one] * brought) if brought else 0
            ours.sendall(frame[sent:])
            each, balance = each and named == brought, balance + brought - named
        ours.close()
        link = Link(1, theirs, True)
        outcome = "ended"
        try:
            while True:
                for frame in module.read_frames(link):
                    module.close_all(frame.descriptors)
        except module.Ended:
            pass
        except ValueError:
            outcome = "malformed"
        kept = len(link.descriptors)
        module.close_all(link.descriptors)
    # frames that are received together hold theirs together: only their sum can be told
    wanted = "ended" if each else "malformed" if balance else outcome
    return "" if outcome == wanted and kept <= 5 * _MOST_DESCRIPTORS else f"it was {outcome} and must be {wanted}"


def _wrong_note(payload: bytes) -> str:
    """A note is refused by name, or names ranks of the group alone."""
    try:
        note = Note.decode(1, payload, _RANKS)
    except ValueError:
        return ""
    named = set(note.members) | set(note.reports) | set(note.known) | set(note.proposal or ())
    return "" if note.members and all(0 <= rank < _RANKS for rank in named) else f"the note {note} was taken"


class ControlFrames:
    """See :class:`.subject.Subject`; ``module`` reads them, ``outbox`` keeps what is sent, or mutants of them do."""

    kinds = KINDS

    def __init__(
        self, say: Callable[[int], None], module: ModuleType = product, outbox: Callable[..., Outbox] = Outbox
    ) -> None:
        self._say, self._module, self._outbox = say, module, outbox

    def run(self, first: int, count: int) -> Block:
        """Cases ``first`` to ``first + count`` - 1. Raises Wrong."""
        rows = {kind: [0, 0, 0, 0] for kind in KINDS}
        for number in range(first, first + count):
            self._say(number)
            case = _Case(number, self._module, self._outbox)
            outcome, found = case.run()
            wanted, frames = case.must_be()
            words = "" if (outcome, found) == (wanted, frames) else f"it was {outcome} and must be {wanted}"
            words = words or next(filter(None, (_wrong_note(body) for kind, _, body in found if kind == _NOTE)), "")
            if case.kind == "descriptors":
                words = words or _descriptors(case, self._module)
            if words:
                raise Wrong(number, f"{case.kind}: {words}")
            row = rows[case.kind]
            row[0] += 1
            row[1] += outcome in ("malformed", "altered")
            row[2] += len(found)
            row[3] += len(found)
        return Block({kind: tuple(row) for kind, row in rows.items()}, count)

    def close(self) -> None:
        """It holds nothing."""
