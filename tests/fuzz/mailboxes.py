"""Mailboxes of ``shm``: words that a peer writes into its ring, and tails that it claims, at any place of any lap."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable
from types import ModuleType

import numpy as np

from tests.fuzz.change import bound
from tests.fuzz.memory import Guarded
from tests.fuzz.subject import Block, Wrong
from uccl_ep_serving.protocol.imm import Immediate, encode
from uccl_ep_serving.protocol.mailbox import RING_BYTES, SLOTS, SLOTS_OFFSET, TAIL, TAIL_CLOSED, WORD
from uccl_ep_serving.proxy.transport import base, shm_data
from uccl_ep_serving.proxy.transport.shm import ShmEndpoint

__all__ = ["Mailboxes"]

_RANKS, _WINDOW = 3, 4096
_MOST = 1 << 28
_EVENTS = 64
_POLL = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)
_POST = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 8)
_IN_TAIL, _OUT_HEAD, _OUT_TAIL = shm_data._IN_TAIL, shm_data._OUT_HEAD, shm_data._OUT_TAIL

KINDS = ("nothing", "a field", "a bit", "random word", "left out", "another lap", "a tail")

Events = list[tuple[int, int, int, int]]


class Mailboxes:
    """See :class:`.subject.Subject`; ``data`` is the compiled data path, or a mutant of it."""

    kinds = KINDS

    def __init__(self, say: Callable[[int], None], data: ModuleType = shm_data) -> None:
        self._say = say
        self._boxes = [Guarded(-(-_RANKS * RING_BYTES // 4096) * 4096) for _ in range(_RANKS)]
        self._window = Guarded(_WINDOW)
        self._endpoint = ShmEndpoint(
            0,
            _RANKS,
            0,
            mailbox=self._boxes[0].address,
            peer_mailboxes=[0, self._boxes[1].address, self._boxes[2].address],
            peer_windows=[0, self._window.address, self._window.address],
            window_bytes=_WINDOW,
        )
        self._context, self._peers = self._endpoint._context, self._endpoint._peers
        self._endpoint.connect([None, *[self._endpoint.address()] * 2], time.monotonic() + 5)
        post, _, poll, _ = data.FUNCTIONS.addresses
        self._poll, self._post = _POLL(poll), _POST(post)
        self._events = np.zeros((_EVENTS, 4), np.int64)
        self._fresh = self._context.copy(), self._peers.copy()
        self._mine = self._boxes[0].array()[4096:-4096]
        self._theirs = self._boxes[1].array()[4096:-4096]

    def run(self, first: int, count: int) -> Block:
        """Cases ``first`` to ``first + count`` - 1. Raises Wrong."""
        rows = {kind: [0, 0, 0, 0] for kind in KINDS}
        for number in range(first, first + count):
            self._say(number)
            rng = random.Random(number)
            kind = rng.choice(KINDS)
            self._context[:], self._peers[:] = self._fresh
            words, found, wanted = self._tails(rng) if kind == "a tail" else self._words(rng, kind)
            if found != wanted:
                raise Wrong(number, f"{kind}: the events are {found[-4:]} and must be {wanted[-4:]}")
            if self._window.array().any() or self._boxes[0].array()[:4096].any() or self._boxes[2].array().any():
                raise Wrong(number, f"{kind}: something else was written")
            row = rows[kind]
            row[0] += 1
            row[1] += any(event[0] == base.FAULT for event in wanted)
            row[2] += words
            row[3] += len(found)
        return Block({kind: tuple(row) for kind, row in rows.items()}, count)

    def _polled(self) -> Events:
        found: Events = []
        for _ in range(3):
            count = self._poll(self._context.ctypes.data, self._events.ctypes.data, _EVENTS)
            found += [(int(a), int(b), int(c), int(d)) for a, b, c, d in self._events[:count]]
        return found

    def _words(self, rng: random.Random, kind: str) -> tuple[int, Events, Events]:
        peer = rng.choice((1, 2))
        ring = self._mine[peer * RING_BYTES : (peer + 1) * RING_BYTES].view(np.int64)
        ring[:] = 0
        start = rng.choice((0, SLOTS - 2, SLOTS, rng.getrandbits(40)))
        self._peers[peer, _IN_TAIL] = start
        # what the lap before has left
        ring[SLOTS_OFFSET // 8 :] = WORD.pack(lap=(start // SLOTS) & 1)
        count = rng.randrange(1, 12)
        words = []
        for number in range(start, start + count):
            imm = encode(Immediate(peer, rng.randrange(256), number % 2048, bool(number & 1)))
            words.append(WORD.pack(imm=imm, nbytes=rng.randrange(_MOST + 1), lap=(number // SLOTS + 1) & 1))
            ring[SLOTS_OFFSET // 8 + number % SLOTS] = words[-1]
        # the rest of the ring holds the lap before, also where the next lap begins
        for number in range(start + count, start + count + 16):
            ring[SLOTS_OFFSET // 8 + number % SLOTS] = WORD.pack(lap=(number // SLOTS) & 1)
        place = rng.randrange(count)
        words[place] = self._changed(rng, kind, words[place])
        ring[SLOTS_OFFSET // 8 + (start + place) % SLOTS] = words[place] - (words[place] >> 63 << 64)
        wanted, taken = _expected(words, start, peer)
        found = self._polled()
        tail = int(ring[TAIL // 8])
        if taken and tail != start + taken:
            found.append((0, tail, start + taken, 0))
        ring[:] = 0
        return count, found, wanted

    def _changed(self, rng: random.Random, kind: str, word: int) -> int:
        if kind == "a bit":
            return word ^ 1 << rng.randrange(64)
        if kind == "random word":
            return rng.getrandbits(64)
        if kind == "left out":
            return word ^ 1 << WORD["lap"].shift
        if kind == "another lap":
            return word + (rng.randrange(1, 4) << WORD["lap"].shift) & (1 << 64) - 1
        if kind == "a field":
            name = rng.choice(("imm", "nbytes", "source"))
            shift, width = (20, 12) if name == "source" else (WORD[name].shift, WORD[name].width)
            new = bound(rng, word >> shift & (1 << width) - 1, width, (_MOST, _MOST + 1, 0, 1, 2, 3))
            return word & ~((1 << width) - 1 << shift) | new << shift
        return word

    def _tails(self, rng: random.Random) -> tuple[int, Events, Events]:
        """The peer says how much of what this rank has put into its ring it has taken."""
        ring = self._theirs[:RING_BYTES].view(np.int64)
        known = rng.choice((0, 5, rng.getrandbits(40)))
        head = known + SLOTS
        tail = bound(rng, rng.choice((known, head)), 64, (known + 1, head, head - 1, (1 << 64) - 1, (1 << 63)))
        tail -= tail >> 63 << 64
        self._peers[1, _OUT_HEAD], self._peers[1, _OUT_TAIL] = head, known
        ring[TAIL // 8] = tail
        status = self._post(self._context.ctypes.data, 1, 8, self._window.address, 0, 0, 1, 7)
        found = [(0, status, 1, 0), *self._polled()]
        wanted: Events = [(0, base.BUSY, 1, 0)]
        if tail != TAIL_CLOSED and not known <= tail <= head:
            wanted.append((base.FAULT, tail, 1, base.FAULT_NUMBER | head << base.FAULT_BITS))
        elif tail != TAIL_CLOSED and tail > known:
            wanted = [(0, base.ACCEPTED, 1, 0), (base.SENT, 7, 1, 0)]
        wanted = [(a, b, c, _signed(d)) for a, b, c, d in wanted]
        ring[:] = 0
        return 1, found, wanted

    def close(self) -> None:
        """Close the endpoint."""
        self._endpoint.close()


def _signed(value: int) -> int:
    value %= 1 << 64
    return value - (value >> 63 << 64)


def _expected(words: list[int], start: int, peer: int) -> tuple[Events, int]:
    """What must be reported, and how many words are taken."""
    events: Events = []
    for taken, word in enumerate(words):
        if word >> WORD["lap"].shift & 1 != ((start + taken) // SLOTS + 1) & 1:
            return events, taken
        imm, nbytes = word & (1 << 32) - 1, word >> 32 & (1 << 29) - 1
        fault = 0
        if word >> WORD.used:
            fault, value = base.FAULT_BAD_FRAME, _signed(word)
        elif nbytes > _MOST:
            fault, value = base.FAULT_TOO_LONG | _MOST << base.FAULT_BITS, nbytes
        elif imm >> 20 != peer:
            fault, value = base.FAULT_WRONG_SOURCE | peer << base.FAULT_BITS, imm
        if fault:
            return [*events, (base.FAULT, value, peer, fault)], taken
        events.append((base.ARRIVED, imm, peer, nbytes))
    return events, len(words)
