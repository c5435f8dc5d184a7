"""What the proxy loop costs: nanoseconds per command and per immediate, beside a C++ twin in the same rounds.

    python benchmarks/proxy_loop.py [--json FILE] [--rounds N]

Both run over the same memory layout and call the same stub transport, so the figures are the loop's own: ring, checks,
flow control, books, post through a pointer, completion; and the sequence window. The twin is compiled with g++ -O3
where there is one, and left out with the reason where there is none. What both did is checked after every round.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.stub_transport import COUNT, FEED, FEED_END, SLOTS, TAKEN, Stub, proxy_state
from benchmarks.twins import compile_twin, figures, markdown, result
from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.native.atomics import load64, peek, poke, store64
from uccl_ep_serving.native.groups import load
from uccl_ep_serving.native.jit import compiled
from uccl_ep_serving.protocol import command, context, imm, ring, streams
from uccl_ep_serving.proxy import loop as numba_loop
from uccl_ep_serving.proxy import ring as proxy_ring
from uccl_ep_serving.proxy import sequence, words
from uccl_ep_serving.proxy.transport import base

PEERS = 8
TWIN = Path(__file__).with_name("proxy_loop_twin.cpp")
#: Writes of a round's feed per peer: a multiple of the writes that a credit covers.
FEED_WRITES = 512

Until = tuple[Callable[[int, int, int, int], Any], Callable[[int, int], Any]]
"""``until_taken(state, ring, head, stub)`` and ``until_fed(state, stub)``."""


@compiled
def _fill(ring_address: int, head: int, low: int, high: int, rank_step: int, peers: int) -> int:
    """Write a full ring of commands to ``peers`` peers in turn, as kernels would."""
    lap = ((head // 4096) + 1) & 1
    for i in range(4096):
        slot = ring_address + 256 + i * 16
        poke(slot, low | lap)
        store64(slot + 8, (high + (1 + i % peers) * rank_step) | lap)
    poke(ring_address, head + 4096)
    return head + 4096


@compiled
def _until_taken(address: int, ring_address: int, head: int, stub: int) -> int:
    while load64(ring_address + 64) < head or peek(stub + 8) < peek(stub):
        numba_loop.step(address)
    return 0


@compiled
def _until_fed(address: int, stub: int) -> int:
    while peek(stub + 16) < peek(stub + 24):
        numba_loop.step(address)
    return 0


assert SLOTS == 4096
assert (ring.SLOTS, ring.TAIL, COUNT, TAKEN, FEED, FEED_END) == (256, 64, 0, 8, 16, 24)


def _definitions() -> dict[str, int]:
    """Every number of the Python sources that the twin names."""
    found: dict[str, int] = {}
    for module in (words, sequence, proxy_ring, base):
        found |= {name: value for name, value in vars(module).items() if name.isupper() and isinstance(value, int)}
    found |= {
        # two modules have an ARRIVED and a SLOTS of their own
        "ARRIVED": words.ARRIVED,
        "ARRIVED_EVENT": base.ARRIVED,
        "RING_SLOTS": ring.SLOTS,
        "RING_TAIL": ring.TAIL,
        "KIND_WRITE": command.KIND_WRITE,
        "MAX_WRITE_BYTES": command.MAX_WRITE_BYTES,
        "SEQUENCE_WINDOW": imm.SEQUENCE_WINDOW,
        "STREAMS": streams.STREAMS,
        "CREDIT": streams.CREDIT,
        "CREDIT_WRITES": streams.CREDIT_WRITES,
        "STUB_COUNT": COUNT,
        "STUB_TAKEN": TAKEN,
        "STUB_FEED": FEED,
        "STUB_FEED_END": FEED_END,
    }
    for name in ("last", "stream", "source"):
        found[f"IMM_{name.upper()}"] = imm.IMM[name].shift
        found[f"IMM_{name.upper()}_MASK"] = imm.IMM[name].mask
    for name in ("last", "stream", "peer", "length"):
        found[f"TICKET_{name.upper()}"] = sequence.TICKET[name].shift
        found[f"TICKET_{name.upper()}_MASK"] = sequence.TICKET[name].mask
    return found


def twin(directory: Path) -> tuple[Until | None, str]:
    """The C++ loop, compiled into ``directory``, and the compiler's version; or None and the reason why not."""
    # nothing in the twin writes names like RING or STOP but through these
    defines = [f"-D{name}=INT64_C({value})" for name, value in sorted(_definitions().items())]
    loaded, compiler = compile_twin(TWIN, directory, "-fno-strict-aliasing", "-fno-semantic-interposition", *defines)
    if loaded is None:
        return None, compiler
    for name, count in (("until_taken", 4), ("until_fed", 2)):
        function = getattr(loaded, name)
        function.argtypes = [ctypes.c_int64] * count
        function.restype = ctypes.c_int64
    return (loaded.until_taken, loaded.until_fed), compiler


class Sender:
    """Commands to 8 peers in turn, 64 bytes each: ring to completion."""

    def __init__(self, until: Until) -> None:
        self.stub, self.error = Stub(), np.zeros(context.ERROR_WORDS, np.int64)
        self.state = proxy_state(self.stub, self.error, PEERS)
        self._until = until
        self._low = command.LOW.pack(length=4)
        self._high = command.HIGH.pack(stream=streams.LL_DISPATCH, kind=command.KIND_WRITE, last=1)
        self.head = self._covered = 0

    def round(self) -> float:
        """Nanoseconds per command of one full ring. Raises AssertionError when the loop did something else."""
        taken, fed = self._until
        step = 1 << command.HIGH["rank"].shift
        self.head = int(_fill(self.state.ring, self.head, self._low, self._high, step, PEERS))
        begin = time.perf_counter_ns()
        status = taken(self.state.address, self.state.ring, self.head, self.stub.address)
        nanoseconds = time.perf_counter_ns() - begin
        assert status == 0, f"the twin departed from its path: {status}"
        # the peers' credits, outside the measured time
        sent = self.head // PEERS
        immediates = [
            peer << 20 | (streams.CREDIT | streams.LL_DISPATCH) << 12 | 1 << 11 | k % imm.SEQUENCE_SPACE
            for peer in range(1, 1 + PEERS)
            for k in range(self._covered // streams.CREDIT_WRITES, sent // streams.CREDIT_WRITES)
        ]
        self._covered = sent
        feed = np.array(immediates, np.int64)
        self.stub.feed(feed)
        assert fed(self.state.address, self.stub.address) == 0
        self.check()
        return nanoseconds / SLOTS

    def check(self) -> None:
        """Every command was posted once and completed, none through a queue."""
        assert self.error[0] == 0
        assert self.stub.posted == self.head
        assert (self.state.completed[1:, streams.LL_DISPATCH] == self.head // PEERS).all()
        assert not self.state.counters[words.C_QUEUED // 8], "commands were queued: the fast path was not measured"


class Receiver:
    """Immediates of 8 peers in turn; each peer's come shuffled within groups of ``shuffle``."""

    def __init__(self, until: Until, shuffle: int) -> None:
        self.stub, self.error = Stub(), np.zeros(context.ERROR_WORDS, np.int64)
        self.state = proxy_state(self.stub, self.error, PEERS)
        self._until, self._shuffle = until, shuffle
        self._random = np.random.default_rng(1)
        self.number = 0

    def round(self) -> float:
        """Nanoseconds per immediate. Raises AssertionError when the counts are wrong afterwards."""
        groups = np.arange(FEED_WRITES).reshape(-1, self._shuffle)
        order = self._random.permuted(groups, axis=1).reshape(-1)
        numbers = (self.number + order)[:, None] % imm.SEQUENCE_SPACE
        peers = np.arange(1, 1 + PEERS)[None, :]
        feed = (peers << 20 | streams.LL_DISPATCH << 12 | 1 << 11 | numbers).astype(np.int64).reshape(-1)
        self.stub.feed(feed)
        begin = time.perf_counter_ns()
        status = self._until[1](self.state.address, self.stub.address)
        nanoseconds = time.perf_counter_ns() - begin
        assert status == 0, f"the twin departed from its path: {status}"
        self.number += FEED_WRITES
        assert self.error[0] == 0
        assert (self.state.arrived[1:, streams.LL_DISPATCH] == self.number).all()
        return nanoseconds / len(feed)


def measure(rounds: int) -> dict[str, Any]:
    """Nanoseconds by case: summaries of the Numba loop, of the twin, and of their quotients round by round."""
    machine = describe()
    load(numba_loop.LOOP)
    ours: Until = (_until_taken, _until_fed)
    cases: dict[str, Callable[[Until], Sender | Receiver]] = {
        "command, ring to completion": Sender,
        "immediate, in order": lambda until: Receiver(until, 1),
        "immediate, shuffled in groups of 16": lambda until: Receiver(until, 16),
    }
    with tempfile.TemporaryDirectory() as directory:
        theirs, compiler = twin(Path(directory))
        found = {
            name: figures(make(ours).round, make(theirs).round if theirs else None, rounds, 10)
            for name, make in cases.items()
        }
    return result(machine, compiler, rounds, found)


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", default="", help="write the result to this file")
    parser.add_argument("--rounds", type=int, default=200, help="rounds of 4,096 commands or immediates")
    options = parser.parse_args()
    found = measure(options.rounds)
    print(markdown(found))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
