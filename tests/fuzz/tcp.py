"""Frames of ``tcp``, with and without MACs: the endpoint's real memory and code, and a peer that sends anything."""

from __future__ import annotations

import os
import select
import socket
from types import ModuleType
from typing import Any

import numpy as np

from tests.fuzz import tcp_words as fuzz
from tests.fuzz.memory import CANARY_BYTES, Guarded
from tests.fuzz.subject import Block, Wrong
from tests.fuzz.tcp_cases import KINDS
from tests.fuzz.tcp_driver import run_cases
from tests.fuzz.tcp_oracle import check
from uccl_ep_serving.protocol.handshake import Proven
from uccl_ep_serving.proxy.transport import tcp_auth, tcp_data
from uccl_ep_serving.proxy.transport import tcp_words as tcp
from uccl_ep_serving.proxy.transport.tcp import _State

__all__ = ["TcpFrames"]

_RANKS = 3
#: With MACs a frame can be too long for them and still lie in the window.
_WINDOW_BYTES = {False: 16 << 10, True: 96 << 10}
_LOOSE = (
    *(tcp.EVENTS_HEAD, tcp.EVENTS_TAIL, tcp.READY_HEAD, tcp.READY_TAIL),
    *(tcp.OWING, tcp.BELL),
)


class TcpFrames:
    """See :class:`.subject.Subject`.

    Args:
        case: address of the word that says which case runs.
        auth: frames carry MACs.
        sample: the oracle in Python looks at one case in so many.
        data: the compiled data path; a mutant of it in a test.
    """

    kinds = KINDS

    def __init__(self, case: int, *, auth: bool, sample: int = 500, data: ModuleType = tcp_data) -> None:
        window_bytes = _WINDOW_BYTES[auth]
        self._auth, self._sample = auth, sample
        self._window = Guarded(window_bytes)
        self._state = _State(
            ranks=_RANKS, connections=1, window=self._window.address, window_bytes=window_bytes, auth=auth
        )
        # what arrives is staged, and held back, between guard pages as well
        self._rooms = [Guarded(nbytes, 0) for nbytes in (tcp.STAGING_BYTES, *[tcp_auth.MAX_SEALED_BYTES] * _RANKS)]
        self._state.context[tcp.STAGING] = self._rooms[0].address
        self._epoll = select.epoll()
        self._state.context[tcp.EPOLL] = self._epoll.fileno()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        key, other = bytes(range(32)), bytes(range(1, 33))
        for rank in (1, 2):
            ours, theirs = socket.socketpair()
            self._state.attach(rank, ours.fileno(), Proven(rank, 0, 0, other, key))
            ours.close()
            theirs.close()
            self._state.links[rank, tcp.HELD] = self._rooms[1 + rank].address if auth else 0
        self._senders = np.zeros((2, tcp.LINK_WORDS), np.int64)
        self._sender_context = np.zeros(tcp.CONTEXT_WORDS, np.int64)
        if auth:
            self._functions = tcp_auth.functions()
            self._sender_context[tcp.AUTH] = self._functions.ctypes.data
            self._keys = [tcp_auth.Key(), tcp_auth.Key()]
            for place, value in enumerate((key, bytes(32))):
                tcp_auth.set_key(self._keys[place].address, value)
                self._senders[place, tcp.SEND_KEY] = self._keys[place].address
        self._fill(case, data)

    def _fill(self, case: int, data: ModuleType) -> None:
        state = self._state
        state.context[[tcp.READY_HEAD, tcp.READY_TAIL]] = 0
        state.links[:, tcp.FLAGS] = 0
        fresh = np.concatenate([state.context, state.links.ravel(), state.peers.ravel()])
        loose = np.zeros(tcp.CONTEXT_WORDS, np.int64)
        loose[list(_LOOSE)] = 1
        self._work = np.zeros(fuzz.WORK_WORDS, np.int64)
        self._counts = np.zeros((len(KINDS), fuzz.COLUMNS), np.int64)
        self._shadow = self._window.array().copy()
        self._stream, self._wire = (np.zeros(fuzz.ROOM, np.uint8) for _ in range(2))
        self._events, self._expected = (np.zeros((fuzz.MOST_EVENTS, 4), np.int64) for _ in range(2))
        rooms = {
            fuzz.STREAM: self._stream,
            fuzz.WIRE: self._wire,
            fuzz.EVENTS: self._events,
            fuzz.EXPECTED: self._expected,
            fuzz.SHADOW: self._shadow,
            fuzz.RNG: np.zeros(1, np.int64),
            fuzz.PAIR: np.zeros(1, np.int64),
            fuzz.SCRATCH: np.zeros(fuzz.HEADER_ROOM // 8, np.int64),
            fuzz.STARTS: np.zeros(fuzz.MOST_FRAMES, np.int64),
            fuzz.COUNTS: self._counts,
            fuzz.FRESH: fresh,
            fuzz.LOOSE: loose,
            fuzz.CONTEXT: state.context,
            fuzz.NOW_LINKS: state.links,
            fuzz.NOW_PEERS: state.peers,
            fuzz.SENDER: self._senders[:1],
            fuzz.STRANGER: self._senders[1:],
            fuzz.SENDER_CONTEXT: self._sender_context,
        }
        self._rooms_of_work = rooms
        for word, array in rooms.items():
            self._work[word] = array.ctypes.data
        for word, value in {
            fuzz.POLL: data.FUNCTIONS.addresses[2],
            fuzz.TAKE_OVER: data.take_over.address,
            fuzz.WINDOW: self._window.address,
            fuzz.WINDOW_BYTES: self._window.nbytes,
            fuzz.CANARY: CANARY_BYTES,
            fuzz.AUTH: int(self._auth),
            fuzz.BELL: self._bell,
            fuzz.CASE: case,
        }.items():
            self._work[word] = value

    def run(self, first: int, count: int) -> Block:
        """Cases ``first`` to ``first + count`` - 1. Raises Wrong."""
        self._counts[:] = 0
        sampled = [case for case in range(first, first + count) if case % self._sample == 0]
        at = first
        for case in sampled:
            self._some(at, case - at)
            before = self._shadow.copy()
            self._some(case, 1)
            self._ask_oracle(case, before)
            at = case + 1
        self._some(at, first + count - at)
        rows = {kind: tuple(map(int, row)) for kind, row in zip(KINDS, self._counts, strict=True)}
        return Block(rows, len(sampled))

    def _some(self, first: int, count: int) -> None:
        done = run_cases(self._work.ctypes.data, first, count)
        if done < count:
            raise Wrong(first + done, self._story())

    def _word(self, word: int) -> int:
        return int(self._work[word])

    def _story(self) -> str:
        """What was found, and what was expected."""
        what, at = self._word(fuzz.WRONG), self._word(fuzz.WRONG_AT)
        events = self._events[: self._word(fuzz.EVENT_COUNT)].tolist()
        expected = self._expected[: self._word(fuzz.EXPECTED_COUNT)].tolist()
        ends = self._work[fuzz.END_STATE : fuzz.END_STANDING + 1].tolist()
        return (
            f"{KINDS[self._word(fuzz.KIND)]}: {fuzz.WORDS[what]}, WRONG_AT {at}\n"
            f"  events   {events[-6:]}\n  expected {expected[-6:]}\n"
            f"  expected state, number, acked, standing {ends}"
        )

    def _ask_oracle(self, case: int, before: Any) -> None:
        words = check(
            wire=self._wire[: self._word(fuzz.WIRE_BYTES)].tobytes(),
            sealed=self._stream[: min(self._word(fuzz.STREAM_BYTES), self._word(fuzz.GENUINE))].tobytes(),
            auth=self._auth,
            peer=self._word(fuzz.PEER),
            number=self._word(fuzz.NUMBER),
            counts=(self._word(fuzz.ACKED), self._word(fuzz.SENT)),
            ends=(bool(self._word(fuzz.CLOSES)), bool(self._word(fuzz.MENDED))),
            windows=(before[CANARY_BYTES:-CANARY_BYTES].tobytes(), self._window.array()[CANARY_BYTES:-CANARY_BYTES]),
            events=self._events[: self._word(fuzz.EVENT_COUNT)].tolist(),
        )
        if words:
            raise Wrong(case, f"{KINDS[self._word(fuzz.KIND)]}: the oracle says: {words}\n  {self._story()}")

    def close(self) -> None:
        """Close its descriptors."""
        self._epoll.close()
        os.close(self._bell)
