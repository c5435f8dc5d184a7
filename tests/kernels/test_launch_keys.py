"""A step never waits for a compiler: whatever changes between steps, kernels run what was compiled ahead for them.

What an operation passes is taken from real operations, in Triton's interpreter; the key under which a GPU's kernels are
kept is made of it by Triton itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernels import launch_bodies
from tests.kernels.launch_bodies import Seen
from tests.kernels.other_tritons import other_tritons
from tests.support.ranks import Ranks

pytestmark = [
    pytest.mark.triton,
    pytest.mark.timeout(600),
    # not imported here: whether it is the interpreter is decided when it is imported
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

HERE = Path(__file__).parent
#: Directories that hold a Triton; "" is the installed one.
TRITONS = [pytest.param("", id="installed"), *other_tritons()]
ALONE: dict[str, Any] = {"window": "host"}
NODES: dict[str, Any] = {"window": "host", "transport": "shm", "node_ranks": 2, "proxies": 2, "channels": 2}
LOW_LATENCY = {
    *("dispatch_send", "dispatch_recv", "combine_send", "combine_recv"),
}
NORMAL = {"mark_tokens", "open_rows", "dispatch_rows", "combine_rows"}


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Ranks]:
    """Rank processes whose Triton is the interpreter."""
    pool = Ranks()
    yield pool
    pool.close()


def compiling(triton: str) -> dict[str, str]:
    """The environment of a process whose Triton is that below ``triton``, or the installed one, not the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    places = (triton, environment.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    return environment


def keys_of(launches: list[Seen], triton: str = "") -> list[str]:
    """Triton's key of each, for CUDA."""
    done = subprocess.run(
        [sys.executable, "-P", str(HERE / "launch_keys.py")],
        input=json.dumps([launch[1:] for launch in launches]),
        env=compiling(triton),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    keys: list[str] = json.loads(done.stdout)
    return keys


def check(launches: list[Seen], kernels: set[str], triton: str) -> None:
    """Each kernel has one key for the same constants, and it is one of those compiled ahead."""
    keys = keys_of(launches, triton)
    ahead = {key for key, launch in zip(keys, launches, strict=True) if launch[0]}
    late = {key: launch[2:4] for key, launch in zip(keys, launches, strict=True) if key not in ahead}
    assert late == {}
    variants: dict[str, set[str]] = defaultdict(set)
    arguments: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for key, (_, _, name, given, constants, warps, fused) in zip(keys, launches, strict=True):
        variants[repr((name, sorted(constants.items()), warps, fused))].add(key)
        arguments[name].add(tuple(given))
    assert {kind: found for kind, found in variants.items() if len(found) > 1} == {}
    # of each kernel there is something to compare
    assert {name for name, found in arguments.items() if len(found) > 1} == kernels


@pytest.fixture(scope="module")
def of_low_latency(interpreted: Ranks) -> list[Seen]:
    """Launches of one rank."""
    (launches,) = interpreted.run(1, launch_bodies.low_latency, ALONE, timeout=300)
    return launches


@pytest.fixture(scope="module")
def of_normal_mode(interpreted: Ranks) -> list[Seen]:
    """Launches of one rank."""
    (launches,) = interpreted.run(1, launch_bodies.normal, ALONE, timeout=300)
    return launches


@pytest.fixture(scope="module")
def between_nodes(interpreted: Ranks) -> list[Seen]:
    """Launches of one of four ranks, on two nodes."""
    launches: list[Seen] = interpreted.run(4, launch_bodies.normal, NODES, timeout=500)[0]
    return launches


@pytest.mark.parametrize("triton", TRITONS)
def test_low_latency_runs_what_was_compiled_ahead(of_low_latency: list[Seen], triton: str) -> None:
    check(of_low_latency, LOW_LATENCY, triton)


@pytest.mark.parametrize("triton", TRITONS)
def test_normal_mode_runs_what_was_compiled_ahead(of_normal_mode: list[Seen], triton: str) -> None:
    check(of_normal_mode, NORMAL, triton)


@pytest.mark.parametrize("triton", TRITONS)
def test_normal_mode_between_nodes_runs_what_was_compiled_ahead(between_nodes: list[Seen], triton: str) -> None:
    check(between_nodes, NORMAL, triton)


NO_GLOBALS = """
from uccl_ep_serving.kernels.triton.launch import Launch, Variant
from uccl_ep_serving.kernels.triton.ll_combine_recv import combine_recv

def warmup(*arguments, grid, **constants):
    assert combine_recv.cache_key
    read.append(len(combine_recv.used_global_vals))

read = []
combine_recv.warmup = warmup
Launch(Variant(combine_recv, {}), (1, 1, 1), (0, 0)).build()
assert read[0] > 0
assert len(combine_recv.used_global_vals) == 0
"""


MOVED = """
from uccl_ep_serving.kernels.triton import blocks, ll_message

def key(**moved):
    ll_message.S = blocks.Words(numbers | moved)
    ll_message.put_message.hash = None  # Triton keeps it otherwise
    return ll_message.put_message.cache_key

numbers = {name: word.value for name, word in vars(blocks.S.value).items()}
assert numbers["PARTS"] != 8000
key()  # Triton 3.6 takes in what a callee reads only once that has a key
assert key() == key()
assert key(PARTS=8000) != key()
"""


@pytest.mark.parametrize("triton", TRITONS)
def test_what_read_a_word_before_it_moved_is_not_taken(triton: str) -> None:
    done = subprocess.run([sys.executable, "-P", "-c", MOVED], env=compiling(triton), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


HOOKED = """
import triton
from uccl_ep_serving.kernels.triton.ahead import GPUS, compiling_for
from uccl_ep_serving.kernels.triton.normal import TritonNormalKernels

told = []
triton.knobs.runtime.jit_post_compile_hook = lambda **about: told.append(about)
with compiling_for(GPUS["sm_90"]):
    (launch,) = TritonNormalKernels(2).mark(1 << 40, 8, 2, 8, 1 << 40, 1 << 40, 1 << 40, 1 << 40)
    launch.build()
assert '"RANKS": 2' in told[0]["compile"]["specialization_data"]
"""


@pytest.mark.parametrize("triton", TRITONS)
def test_who_listens_to_compilations_is_told(triton: str) -> None:
    """Triton gives a hook what a kernel is compiled for as JSON; vLLM and torch set one."""
    done = subprocess.run([sys.executable, "-P", "-c", HOOKED], env=compiling(triton), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("triton", TRITONS)
def test_no_launch_compares_global_names(triton: str) -> None:
    """Triton compares all that a kernel reads, at every launch, unless it has none of them."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", NO_GLOBALS], env=compiling(triton), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_what_a_value_changes_is_seen() -> None:
    """Triton compiles 1 and multiples of 16 apart from other values, unless it is told not to."""
    shape = {"PAYLOAD": 512, "ROW_BYTES": 512, "CODING": 0, "TOPK": 2, "SLOTS": 2, "ROWS": 1, "BLOCK": 128}
    constants = {"SHAPE": {**shape, "STARTS_IN_ORDER": True}}
    # of `dispatch_recv` with other values of the argument at each of two places
    launches: list[Seen] = []
    for place in (8, 7):
        for value in (1, 16, 17):
            given = tuple(value if one == place else 0 for one in range(11))
            module = "uccl_ep_serving.kernels.triton.ll_dispatch_recv"
            launches.append((False, module, "dispatch_recv", given, constants, 1, True))
    keys = keys_of(launches)
    assert len(set(keys[:3])) == 1
    assert len(set(keys[3:])) == 3
