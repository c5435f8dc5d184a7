"""Immediates of RDMA writes: completions as a NIC reports them, through the endpoint and the loop of a rank.

The NICs are in memory, and their completion queue is read by a function of ours. A case lays some good completions in
it, and changes what a peer or a stranger on the network decides: immediate, sender, flags, length.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from tests.fuzz.change import bound
from tests.fuzz.subject import Block, Wrong
from tests.support import efa_endpoints, memory_endpoints
from tests.support.provider.provider_library import MemoryNetwork
from tests.support.provider.provider_srd_library import SrdNetwork
from uccl_ep_serving.config import Settings
from uccl_ep_serving.protocol.context import ERROR_WORDS
from uccl_ep_serving.protocol.imm import Immediate, encode
from uccl_ep_serving.protocol.streams import CREDIT, CREDIT_WRITES, LL_COMBINE, LL_DISPATCH, TRANSPORT
from uccl_ep_serving.proxy import loop
from uccl_ep_serving.proxy import words as proxy_words
from uccl_ep_serving.proxy.sequence import HELD, MESSAGES, PREFIX
from uccl_ep_serving.proxy.service import ProxyService
from uccl_ep_serving.proxy.transport.base import FAULT_BAD_FRAME, FAULT_WRONG_SOURCE
from uccl_ep_serving.proxy.transport.nic import efa_words, roce_words, words
from uccl_ep_serving.proxy.transport.verbs.abi import WC
from uccl_ep_serving.proxy.transport.verbs.codes import WC_RECV_RDMA_WITH_IMM, WC_WITH_IMM, WR_FLUSH_ERR

__all__ = ["Completions"]

_RANKS, _WINDOW = 3, 1 << 14
_POLL_CQ = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_int64)
_MODIFY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_STREAMS = (LL_DISPATCH, LL_COMBINE, CREDIT | LL_DISPATCH)
_FOREVER = 1 << 60
#: What each rank has sent, so that it may be given credits for so much.
_SENT = {1: 1 << 30, 2: 2 * CREDIT_WRITES}

KINDS = ("nothing", "reordered", "repeated", "left out", "a field", "a bit", "another sender", "no immediate", "random")


def _dtype() -> np.dtype[Any]:
    fields = {"wr_id": 8, "status": 4, "opcode": 4, "byte_len": 4, "imm_data": 4, "src_qp": 4, "wc_flags": 4, "slid": 2}
    return np.dtype(
        {
            "names": list(fields),
            "formats": [f"<u{nbytes}" for nbytes in fields.values()],
            "offsets": [WC[name] for name in fields],
            "itemsize": WC.nbytes,
        }
    )


class _Stream:
    """What a receiver knows of a stream: written anew, with sets."""

    def __init__(self, prefix: int) -> None:
        self.prefix, self.messages = prefix, 0
        self.held: dict[int, bool] = {}

    def note(self, sequence: int, last: bool) -> bool:
        """Whether it was the next one."""
        ahead = (sequence - self.prefix) % 2048
        number = self.prefix + ahead
        if ahead >= 1024 or number in self.held:
            return False
        self.held[number] = last
        while self.prefix in self.held:
            self.messages += self.held.pop(self.prefix)
            self.prefix += 1
        return ahead == 0


class _Endpoint:
    """The one of rank 0 and its proxy, and how a completion says who sent it."""

    def __init__(self, is_efa: bool) -> None:
        self.is_efa = is_efa
        self.windows = [np.zeros(_WINDOW, np.uint8) for _ in range(_RANKS)]
        if is_efa:
            self.network: Any = SrdNetwork(_RANKS)
            self.all: list[Any] = efa_endpoints.open_endpoints(self.network, self.windows)
            efa_endpoints.connect(self.all)
        else:
            self.network = MemoryNetwork(_RANKS)
            self.all = [
                memory_endpoints.endpoint(self.network, rank, window, ranks=_RANKS)
                for rank, window in enumerate(self.windows)
            ]
            memory_endpoints.connect(self.all)
        self.one = self.all[0]
        self.memory = self.one._state
        self.is_exact = self.one.capabilities.in_sequence

    def sender(self, rank: int) -> tuple[int, int]:
        """(QP number, address) of the peer."""
        if not self.is_efa:
            return 0, 0
        link = self.memory.links[rank]
        return int(link[efa_words.QPN]), max(int(link[efa_words.AH_NUMBER]), 0)

    def wr_id(self, rank: int) -> int:
        """Of a receive that the peer's write has used."""
        if self.is_efa:
            return 0
        links = int(self.memory.context[roce_words.PEER_LINKS])
        return roce_words.RECEIVE_BIT | rank * links << 32


class Completions:
    """See :class:`.subject.Subject`.

    Args:
        nic: "efa" or "roce".
        step: the compiled loop; a mutant of it in a test.
        data: the compiled data path, likewise; None for the endpoint's own.
    """

    kinds = KINDS

    def __init__(
        self,
        say: Callable[[int], None],
        nic: str = "efa",
        *,
        step: Callable[[int], int] | None = None,
        data: ModuleType | None = None,
    ) -> None:
        self._say, self._step = say, step or loop.step
        self._endpoint = _Endpoint(nic == "efa")
        self._error = np.zeros(ERROR_WORDS, np.int64)
        self._entries = np.zeros(64, _dtype())
        self._waiting = 0
        memory = self._endpoint.memory
        self._poll = _POLL_CQ(self._hand_over)
        memory.rails[:, words.POLL_CQ] = ctypes.cast(self._poll, ctypes.c_void_p).value or 0
        # nothing is posted anew: no write of the case has used a real receive
        if nic == "efa":
            memory.rails[:, efa_words.STEP] = memory.rails[:, efa_words.RECEIVES] = 0
        else:
            self._modify = _MODIFY(lambda *_: 0)
            memory.context[roce_words.MODIFY_QP] = ctypes.cast(self._modify, ctypes.c_void_p).value or 0
            memory.context[roce_words.WATCH_TIME] = 1 << 62
            memory.links[:, roce_words.RECEIVED] = -_FOREVER
        self._service = ProxyService(
            rank=0,
            ranks=_RANKS,
            window=self._endpoint.windows[0].ctypes.data,
            window_bytes=_WINDOW,
            settings=Settings(),
            error=self._error.ctypes.data,
            endpoints=[[self._endpoint.one]],
            route=[-1, 0, 0],
        )
        self._state = self._service.states[0]
        if data is not None:
            self._state._endpoints.view(np.int64)[proxy_words.EP_POLL // 8] = data.FUNCTIONS.addresses[2]
        kept = (memory.context, memory.rails, memory.peers, memory.links, self._state.header, self._state.peers)
        self._kept = [(array, array.copy()) for array in kept]

    def _hand_over(self, queue: int, most: int, place: int) -> int:
        count = min(most, self._waiting)
        ctypes.memmove(place, self._entries.ctypes.data, count * WC.nbytes)
        self._entries[: self._waiting - count] = self._entries[count : self._waiting]
        self._waiting -= count
        return count

    def _reset(self, prefixes: dict[tuple[int, int], int]) -> None:
        for array, fresh in self._kept:
            array[:] = fresh
        state = self._state
        state.receive[:] = 0
        state.receive[:, :, proxy_words.GRANTED // 8] = _FOREVER
        state.arrived[:] = 0
        state.counters[:] = 0
        self._error[:] = 0
        for source, sent in _SENT.items():
            state.send[source, :, proxy_words.NEXT // 8] = sent
            state.send[source, :, proxy_words.CREDITED // 8] = 0
        for (source, stream), prefix in prefixes.items():
            state.receive[source, stream, (proxy_words.SEEN + PREFIX) // 8] = prefix

    def run(self, first: int, count: int) -> Block:
        """Cases ``first`` to ``first + count`` - 1. Raises Wrong."""
        rows = {kind: [0, 0, 0, 0] for kind in KINDS}
        for number in range(first, first + count):
            self._say(number)
            kind, entries, refused, words_ = self._one(number)
            if words_:
                raise Wrong(number, f"{kind}: {words_}")
            row = rows[kind]
            row[0] += 1
            row[1] += refused
            row[2] += entries
            row[3] += entries
        return Block({kind: tuple(row) for kind, row in rows.items()}, count)

    def _one(self, number: int) -> tuple[str, int, bool, str]:
        rng = random.Random(number)
        kind = rng.choice(KINDS)
        flows = [(rng.choice((1, 2)), rng.choice(_STREAMS)) for _ in range(rng.randrange(1, 3))]
        prefixes = {flow: 0 if flow[1] >= CREDIT else rng.randrange(5000) for flow in flows}
        self._reset(prefixes)
        rows = [
            (source, stream, prefixes[source, stream] + place)
            for source, stream in prefixes
            for place in range(rng.randrange(1, 6))
        ]
        if kind == "reordered":
            rng.shuffle(rows)
        elif kind == "repeated":
            rows += rng.choices(rows, k=3)
        elif kind == "left out":
            del rows[rng.randrange(len(rows))]
        entries = self._entries[: len(rows)]
        entries[:] = 0
        for entry, (source, stream, sequence) in zip(entries, rows, strict=True):
            entry["wr_id"] = self._endpoint.wr_id(source)
            entry["opcode"] = WC_RECV_RDMA_WITH_IMM
            entry["imm_data"] = _swapped(encode(Immediate(source, stream, sequence % 2048, rng.random() < 0.5)))
            entry["src_qp"], entry["slid"] = self._endpoint.sender(source)
            entry["wc_flags"], entry["byte_len"] = WC_WITH_IMM, rng.randrange(1 << 16)
        if rows and kind not in KINDS[:4]:
            self._change(rng, kind, entries[rng.randrange(len(rows))])
        return kind, len(rows), *self._judge(entries.copy(), prefixes)

    def _change(self, rng: random.Random, kind: str, entry: Any) -> None:
        imm = _swapped(int(entry["imm_data"]))
        if kind == "a field":
            shift, bits = rng.choice(((0, 11), (11, 1), (12, 8), (20, 12)))
            old = imm >> shift & (1 << bits) - 1
            new = bound(rng, old, bits, (0, 1, 2, 3, TRANSPORT, old + 1024, old + 1023, 4095))
            entry["imm_data"] = _swapped(imm & ~((1 << bits) - 1 << shift) | new << shift)
        elif kind == "a bit":
            entry["imm_data"] = int(entry["imm_data"]) ^ 1 << rng.randrange(32)
        elif kind == "another sender":
            name = rng.choice(("src_qp", "slid"))
            entry[name] = rng.choice((int(entry[name]) + 1, self._endpoint.sender(3 - (imm >> 20))[name == "slid"], 0))
        elif kind == "no immediate":
            entry["wc_flags"] = 0
            entry["opcode"] = rng.choice((0, 1, 128, WC_RECV_RDMA_WITH_IMM))
        else:
            entry["imm_data"], entry["byte_len"] = rng.getrandbits(32), rng.getrandbits(32)
            entry["src_qp"] = rng.choice((int(entry["src_qp"]), rng.getrandbits(32)))
        if self._endpoint.is_efa and rng.random() < 0.1:
            entry["status"] = WR_FLUSH_ERR

    def _judge(self, entries: Any, prefixes: dict[tuple[int, int], int]) -> tuple[bool, str]:
        """Whether something is refused, and what is wrong."""
        model = {flow: _Stream(prefix) for flow, prefix in prefixes.items()}
        lost: dict[int, int] = {}
        strangers = 0
        for entry in entries:
            source, stream, what = self._source(entry)
            strangers += what == "stranger"
            if what in (FAULT_BAD_FRAME, FAULT_WRONG_SOURCE):
                lost.setdefault(source, int(what))
            elif what == "arrived" and source not in lost:
                imm = _swapped(int(entry["imm_data"]))
                one = model.setdefault((source, stream), _Stream(0))
                if not self._taken(one, source, stream, imm):
                    lost[source] = 0
        self._waiting = len(entries)
        for _ in range(2):
            self._step(self._state.address)
        return bool(lost or strangers), self._difference(model, lost, strangers)

    def _source(self, entry: Any) -> tuple[int, int, str | int]:
        """Rank, stream, and what the endpoint makes of it: a FAULT_* where it ends its peer itself."""
        imm = _swapped(int(entry["imm_data"]))
        source, stream = imm >> 20, imm >> 12 & 255
        if self._endpoint.is_efa:
            if entry["status"]:
                return source, stream, "nothing"
            known = source in (1, 2) and int(entry["wc_flags"]) & WC_WITH_IMM
            if not known or self._endpoint.sender(source) != (int(entry["src_qp"]), int(entry["slid"])):
                return source, stream, "stranger"
            return source, stream, "nothing" if stream == TRANSPORT else "arrived"
        peer = next(rank for rank in (1, 2) if self._endpoint.wr_id(rank) == int(entry["wr_id"]))
        if int(entry["opcode"]) != WC_RECV_RDMA_WITH_IMM:
            return peer, stream, FAULT_BAD_FRAME
        if source != peer:
            return peer, stream, FAULT_WRONG_SOURCE
        return peer, stream, "arrived"

    def _taken(self, one: _Stream, source: int, stream: int, imm: int) -> bool:
        """Whether the receiver goes on with that peer."""
        if not self._state._owned.view(np.int64)[stream]:
            return False
        was_next = one.note(imm & 2047, bool(imm >> 11 & 1))
        if not was_next and self._endpoint.is_exact:
            return False
        return stream < CREDIT or one.prefix * CREDIT_WRITES <= _SENT[source]

    def _difference(self, model: dict[tuple[int, int], _Stream], lost: dict[int, int], strangers: int) -> str:
        state = self._state
        counts = np.zeros_like(state.arrived)
        for (source, stream), one in model.items():
            counts[source, stream] = one.messages
            seen = state.receive[source, stream, proxy_words.SEEN // 8 :]
            found = int(seen[PREFIX // 8]), int(seen[MESSAGES // 8]), int(seen[HELD // 8])
            known = one.prefix, one.messages, len(one.held)
            # of a peer that is lost, what was in the write that ended it may be noted or not
            if source not in lost and found != known:
                return f"stream {stream} of rank {source} is at {found} and must be at {known}"
        for source in lost:
            counts[source] = np.minimum(counts[source], state.arrived[source])
        if not np.array_equal(counts, state.arrived):
            return f"arrived {state.arrived[counts != state.arrived]} must be {counts[counts != state.arrived]}"
        gone = {rank for rank in (1, 2) if state.peers[rank, proxy_words.PEER_STATE // 8] != proxy_words.UP}
        if gone != lost.keys():
            return f"ranks {gone} are lost and {lost} must be"
        for rank, fault in lost.items():
            found_fault = int(state.peers[rank, proxy_words.PEER_FAULT // 8]) & 255
            if fault not in (0, found_fault):
                return f"rank {rank} is lost for fault {found_fault} and must be for {fault}"
        if bool(self._error[0]) != bool(lost):
            return f"the sticky error is {self._error.tolist()}"
        if self._endpoint.is_efa and self._endpoint.memory.context[efa_words.STRANGERS] != strangers:
            return f"{self._endpoint.memory.context[efa_words.STRANGERS]} strangers and not {strangers}"
        if any(window.any() for window in self._endpoint.windows):
            return "a window was written"
        return ""

    def close(self) -> None:
        """Close the endpoints."""
        for endpoint in self._endpoint.all:
            endpoint.close()


def _swapped(word: int) -> int:
    return int.from_bytes(word.to_bytes(4, "little"), "big")
