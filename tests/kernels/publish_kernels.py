"""Publishing alone, with stores that no lane can leave out, as on ROCm. Imported only where Triton is the interpreter.

The interpreter knows no assembly: :func:`_assembly` does what its loads and stores do, and passes over what only orders
them. A program has one thread there.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl

from uccl_ep_serving.kernels.blocks import low_latency_device as blocks
from uccl_ep_serving.kernels.blocks import normal_device
from uccl_ep_serving.kernels.triton import target, words
from uccl_ep_serving.kernels.triton.ll_message import publish_message
from uccl_ep_serving.kernels.triton.programs import Message
from uccl_ep_serving.kernels.triton.publish import put_batch, store_flags
from uccl_ep_serving.kernels.triton.words import int64s
from uccl_ep_serving.protocol import context as ctx
from uccl_ep_serving.protocol.command import Command, decode
from uccl_ep_serving.protocol.ring import SLOTS, lap_of, ring_bytes
from uccl_ep_serving.protocol.streams import STREAMS

RANKS, LANES, SLOTS_OF_RING = 5, 8, 16
#: What stands in every word of the state block, and must still stand there.
UNTOUCHED = 0x5A5A5A5A
_LOAD = re.compile(r"global_load_dwordx2 \$0, \$1, off")
_STORE = re.compile(r"global_store_dwordx2 \$(\d+), \$(\d+), off(?: offset:(\d+))?")


def _assembly(
    text: str, constraints: str, values: list[tl.tensor], dtype: tl.dtype, is_pure: bool, pack: int
) -> tl.tensor | None:
    for address, value, offset in _STORE.findall(text):
        where, what = (np.ravel(values[int(place) - 1].handle.data) for place in (address, value))
        for at, word in np.broadcast(where, what):
            ctypes.c_int64.from_address(int(at) + int(offset or 0)).value = int(word)
    if _LOAD.search(text):
        return tl.load(int64s(values[0]))
    return values[0] if values else None


@contextlib.contextmanager
def _assembling() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tl, "inline_asm_elementwise", _assembly)
        patch.setattr(target, "present_target", lambda: target.Target(int(target.HIP.value), LANES))
        patch.setattr(words, "_threads", lambda lanes: tl.constexpr(1))
        yield


@triton.jit
def put(context: tl.int64, state: tl.int64) -> None:
    """The message for the peer that this program serves."""
    none = tl.full((), 0, tl.int64)
    publish_message(Message(context, state, none, tl.program_id(0).to(tl.int64), none), 0, none)


@triton.jit
def publish(
    context: tl.int64,
    state: tl.int64,
    chosen: tl.int64,
    stream: tl.int64,
    FLAGS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Flags of 7 messages, or a write, for each peer whose word of ``chosen`` is not 0."""
    peers = tl.arange(0, LANES).to(tl.int64)
    take = tl.load(int64s(chosen + 8 * peers)) != 0
    zero = tl.zeros_like(peers)
    stream = stream.to(tl.int64)
    if FLAGS:
        store_flags(context, state, peers, take, stream, zero + 7)
    else:
        start = tl.full((), 0, tl.int64)
        put_batch(context, state, peers, stream, take, zero + 64, zero + 128 * peers, zero + 32, start)


class _Bench:
    """A context whose rings and flags the test reads, and a state block of which only the sink may change."""

    def __init__(self) -> None:
        words = max(normal_device.STATE_WORDS, blocks.state_word(blocks.STATE_TABLES[0], RANKS))
        self.state = np.full(words, UNTOUCHED, dtype=np.int64)
        # of each peer's message in low latency
        messages = {"MESSAGE_FROM": 64, "MESSAGE_TO": 128, "MESSAGE_BYTES": 32}
        for table, value in messages.items():
            for peer in range(RANKS):
                self.state[blocks.state_word(table, peer)] = value
        self.state[blocks.PARTS] = 1
        self.before = self.state.copy()
        self.ring = np.zeros(ring_bytes(SLOTS_OF_RING) // 8, dtype=np.int64)
        self.head = np.array([0, 0, SLOTS_OF_RING], dtype=np.int64)
        self.flags = np.zeros(RANKS, dtype=np.int64)
        rings = np.full(STREAMS, self.ring.ctypes.data, dtype=np.int64)
        heads = np.full(STREAMS, self.head.ctypes.data, dtype=np.int64)
        places = (self.flags.ctypes.data + 8 * np.arange(RANKS, dtype=np.int64)).repeat(STREAMS)
        self.context = np.zeros(ctx.CONTEXT_WORDS, dtype=np.int64)
        self.context[ctx.RANKS], self.context[ctx.FLAG] = RANKS, places.ctypes.data
        self.context[ctx.CHANNELS] = 1
        self.context[ctx.RING], self.context[ctx.HEADS] = rings.ctypes.data, heads.ctypes.data
        self.no_error = np.zeros(8, dtype=np.int64)
        self.context[ctx.ERROR] = self.no_error.ctypes.data
        self.kept = (rings, heads, places)

    def publish(self, peers: list[int], flags: bool) -> None:
        chosen = np.zeros(LANES, dtype=np.int64)
        chosen[peers] = 1
        arguments: tuple[Any, ...] = (self.context.ctypes.data, self.state.ctypes.data, chosen.ctypes.data, 3)
        with _assembling():
            publish[(1,)](*arguments, FLAGS=flags, LANES=LANES)

    def put(self, mapped: list[int]) -> None:
        """A message to every rank, of which the kernel writes the window of those that are ``mapped`` itself."""
        windows = np.zeros(RANKS, dtype=np.int64)
        windows[mapped] = 1 << 40
        self.context[ctx.PEER_WINDOW] = windows.ctypes.data
        with _assembling():
            put[(RANKS,)](self.context.ctypes.data, self.state.ctypes.data)

    def commands(self) -> list[Command]:
        found = []
        for index in range(int(self.head[0])):
            low, high = (int(word) for word in self.ring[SLOTS // 8 + 2 * index :][:2])
            assert low & 1 == high & 1 == lap_of(index, SLOTS_OF_RING)
            found.append(decode(low, high))
        return found

    def changed(self) -> list[int]:
        """Words of the state block that something was stored to."""
        return [int(word) for word in np.flatnonzero(self.state != self.before)]


def run() -> tuple[list[Command], list[int], list[int]]:
    """The commands to ranks 1, 2 and 4 of 5, the flags of ranks 0 and 3, and words of the state block that changed."""
    bench = _Bench()
    bench.publish([1, 4], flags=False)
    bench.publish([2], flags=False)
    bench.publish([0, 3], flags=True)
    assert not bench.ring[SLOTS // 8 + 2 * 3 :].any()
    return bench.commands(), bench.flags.tolist(), bench.changed()


def run_messages() -> tuple[list[int], list[int], list[int]]:
    """Ranks that commands name and flags, of messages of which two and then none go through proxies. For the latter no
    byte of the ring can be touched."""
    bench = _Bench()
    bench.put([0, 2, 4])
    named = [command.rank for command in bench.commands()]
    # nothing is mapped there
    bench.kept[0][:] = 16
    bench.put(list(range(RANKS)))
    return named, bench.flags.tolist(), bench.head.tolist()
