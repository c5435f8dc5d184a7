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
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from uccl_ep_serving.native.atomics import peek, poke
from uccl_ep_serving.native.calls import call1, call8
from uccl_ep_serving.native.jit import c_function, compiled
from uccl_ep_serving.proxy.transport import roce_state as words
from uccl_ep_serving.proxy.transport.verbs_abi import SEND_WR

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / name) for name in ("rdma/provider", "rdma", "proxy")]

from memory_endpoints import open_endpoints  # noqa: E402
from provider_library import MemoryNetwork  # noqa: E402

WRITES = 1 << 16
NBYTES = 7168
WINDOW = 1 << 22
#: Nanoseconds a write that the design allows.
TARGET = 25.0
_NEXT = SEND_WR["next"]
_POSTED, _RETIRED, _TOLD = words.POSTED * 8, words.RETIRED * 8, words.TOLD * 8
_IMMEDIATES, _ALLOWED = words.IMMEDIATES * 8, words.ALLOWED * 8


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
            poke(link + _TOLD, peek(link + _POSTED))
            poke(link + _ALLOWED, peek(link + _IMMEDIATES) + 512)
    return refused


def twin(directory: Path) -> Any | None:
    """The C++ function, None where there is no compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    library = directory / "twin.so"
    source = Path(__file__).with_name("roce_posting_twin.cpp")
    command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=120)
    function = ctypes.CDLL(str(library)).post_list
    function.restype, function.argtypes = None, [ctypes.c_int64] * 11
    return function


def measure(rounds: int, batch: int) -> dict[str, Any]:
    """Rounds in turn; nanoseconds a write of each."""
    figures: dict[str, list[float]] = {"numba": [], "c++": []}
    with tempfile.TemporaryDirectory() as directory, open_endpoints(MemoryNetwork(2), 2, WINDOW) as (group, ends):
        compare = twin(Path(directory))
        endpoint, path = ends[0], ends[0].data_path()
        endpoint._state.context[words.POST_SEND] = post_send.address
        counted = np.zeros(1, np.int64)
        endpoint._state.context[words.BAD] = counted.ctypes.data
        link = endpoint._state.links[1].ctypes.data
        window = group.windows[0].ctypes.data
        for round_number in range(rounds + 1):
            counted[0] = 0
            start = time.perf_counter_ns()
            refused = post_list(path.post, path.flush, path.context, link, window, WINDOW, WRITES, batch, NBYTES)
            spent = time.perf_counter_ns() - start
            assert refused == 0
            assert counted[0] == WRITES, counted
            if round_number:
                figures["numba"].append(spent / WRITES)
            if compare is None:
                continue
            counted[0] = 0
            start = time.perf_counter_ns()
            compare(
                WRITES, batch, NBYTES, window, WINDOW, window, 1, 1, 0, post_send.address, counted.ctypes.data
            )  # fmt: skip
            spent = time.perf_counter_ns() - start
            assert counted[0] == WRITES, counted
            if round_number:
                figures["c++"].append(spent / WRITES)
    return {
        "writes": WRITES,
        "batch": batch,
        "rounds": rounds,
        "target_ns": TARGET,
        "ns_per_write": {
            name: {"median": statistics.median(values), "least": min(values), "most": max(values)}
            for name, values in figures.items()
            if values
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--batch", type=int, default=32)
    arguments = parser.parse_args()
    found = measure(arguments.rounds, arguments.batch)
    for name, figure in found["ns_per_write"].items():
        spread = f"{figure['least']:.1f} to {figure['most']:.1f}"
        print(f"{name:6} {figure['median']:6.1f} ns a write (median; {spread})")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
