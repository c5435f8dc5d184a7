"""What posting a write costs on ``roce``: nanoseconds from the call of ``post`` to the provider, beside a C++ twin.

    python benchmarks/roce_posting.py [--json FILE] [--rounds N] [--batch N]

Both post the same list to the same stub of ``post_send``, which walks the chain as a provider does and keeps nothing:
what remains is the check of the write, credits, room in the send queue, the work request and its chain. The twin is
compiled with g++ -O3 where there is one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.twins import compile_twin, figures, markdown, result
from tests.support.memory_endpoints import open_endpoints
from tests.support.provider.provider_library import MemoryNetwork
from uccl_ep_serving.bench.machine import describe
from uccl_ep_serving.native.atomics import peek, poke
from uccl_ep_serving.native.calls import call1, call8
from uccl_ep_serving.native.jit import c_function, compiled
from uccl_ep_serving.proxy.transport.nic import roce_words as rc
from uccl_ep_serving.proxy.transport.verbs.abi import SEND_WR

WRITES = 1 << 16
NBYTES = 7168
WINDOW = 1 << 22
TWIN = Path(__file__).with_name("roce_posting_twin.cpp")
_NEXT = SEND_WR["next"]
_POSTED, _RETIRED, _REPORTED = rc.POSTED * 8, rc.RETIRED * 8, rc.REPORTED * 8
_IMMEDIATES, _ALLOWED = rc.IMMEDIATES * 8, rc.ALLOWED * 8


@c_function("int64(int64, int64, int64)")
def post_send(qp: int, first: int, bad: int) -> int:
    """Walk the chain and count it in the word at ``bad``."""
    count = peek(bad)
    while first != 0:
        count += 1
        first = peek(first + _NEXT)
    poke(bad, count)
    return 0


@compiled
def post_list(
    post: int, flush: int, context: int, link: int, window: int, window_bytes: int, count: int, batch: int, nbytes: int
) -> int:
    """Post ``count`` writes in batches; returns how many were not accepted."""
    refused = 0
    for i in range(count):
        offset = (i * nbytes) % (window_bytes - nbytes + 1) & ~15
        if call8(post, context, 1, 8, window + offset, offset, nbytes, i & 2047, i) != 0:
            refused += 1
        if (i + 1) % batch == 0:
            call1(flush, context)
            # as if everything had completed, and the peer had posted receives
            poke(link + _RETIRED, peek(link + _POSTED))
            poke(link + _REPORTED, peek(link + _POSTED))
            poke(link + _ALLOWED, peek(link + _IMMEDIATES) + 512)
    return refused


def measure(rounds: int, batch: int = 32) -> dict[str, Any]:
    """Nanoseconds per write: summaries of the data path, of the twin, and of their quotients round by round.

    Args:
        batch: writes chained before they are handed over.

    Raises:
        AssertionError: a write was refused, or not all were handed over.
    """
    machine = describe()
    with tempfile.TemporaryDirectory() as directory, open_endpoints(MemoryNetwork(2), 2, WINDOW) as (group, ends):
        loaded, compiler = compile_twin(TWIN, Path(directory))
        endpoint, path = ends[0], ends[0].data_path()
        counted = np.zeros(1, np.int64)
        endpoint._state.rails[0, rc.POST_SEND] = post_send.address
        endpoint._state.context[rc.BAD] = counted.ctypes.data
        link = endpoint._state.links[1].ctypes.data
        window = group.windows[0].ctypes.data

        def ours() -> float:
            counted[0] = 0
            start = time.perf_counter_ns()
            refused = post_list(path.post, path.flush, path.context, link, window, WINDOW, WRITES, batch, NBYTES)
            taken = time.perf_counter_ns() - start
            assert refused == 0
            assert counted[0] == WRITES, counted
            return taken / WRITES

        def theirs() -> float:
            assert loaded is not None
            counted[0] = 0
            start = time.perf_counter_ns()
            loaded.post_list(
                WRITES, batch, NBYTES, window, WINDOW, window, 1, 1, 0, post_send.address, counted.ctypes.data
            )  # fmt: skip
            taken = time.perf_counter_ns() - start
            assert counted[0] == WRITES, counted
            return taken / WRITES

        if loaded is not None:
            loaded.post_list.restype, loaded.post_list.argtypes = None, [ctypes.c_int64] * 11
        case = figures(ours, None if loaded is None else theirs, rounds, 3)
    return result(machine, compiler, rounds, {f"a write to one peer, in chains of {batch}": case})


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32)
    arguments = parser.parse_args()
    found = measure(arguments.rounds, arguments.batch)
    print(markdown(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
