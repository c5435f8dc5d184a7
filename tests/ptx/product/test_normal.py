"""Kernels of normal mode as Triton compiles them for a GPU, on the model machine: every shape equal to the oracle."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from dataclasses import replace

import pytest
import torch

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
trials = pytest.importorskip("tests.ptx.product.trials", reason="needs Triton")

from tests.ptx.product.compiled import Compiled  # noqa: E402
from tests.support.normal_cases import Case  # noqa: E402
from tests.support.nvrtc import needs_nvrtc  # noqa: E402
from uccl_ep_serving.config import Settings  # noqa: E402
from uccl_ep_serving.protocol.streams import NORMAL_CHANNELS  # noqa: E402

SHAPES: dict[str, Case] = {
    "bf16": Case(tokens=(5, 3), experts=4, topk=2),
    "fp8": Case(tokens=(4, 6), experts=4, topk=2, dtype=torch.float8_e4m3fn, seed=1),
    "fp32, an empty rank": Case(tokens=(0, 7), experts=8, topk=3, dtype=torch.float32, seed=2),
    "one rank is chosen": Case(tokens=(20, 13), experts=4, topk=2, hot=1, lost=0.0, seed=5),
    "three ranks": Case(tokens=(6, 0, 9), experts=6, topk=3, hidden=136, seed=6),
    "hardly any ids": Case(tokens=(7, 5), experts=4, topk=2, lost=0.8, seed=1),
}
#: Nodes of two ranks.
BETWEEN_NODES: dict[str, Case] = {
    "bf16": Case(tokens=(5, 3, 0, 4), experts=8, topk=3),
    "fp8": Case(tokens=(4, 6, 3, 5), experts=4, topk=2, dtype=torch.float8_e4m3fn, seed=1),
    "one rank is chosen": Case(tokens=(9, 7, 8, 6), experts=8, topk=2, hot=1, lost=0.0, hidden=136, seed=3),
    "three nodes": Case(tokens=(3, 2, 0, 4, 1, 2), experts=6, topk=3, seed=4),
}
#: Seeds of each shape and path in the long run.
SEEDS = {"sequential": 5, "weak": 2}
#: The same one by one: between nodes a seed of six ranks takes two million steps, five to ten minutes.
EACH_SEED = [(memory, seed) for memory, seeds in SEEDS.items() for seed in range(seeds)]


@functools.cache
def compiled(memory: str, gpu: str = "sm_90") -> Compiled:
    """The kernels for all tests of this process."""
    return Compiled(memory == "weak", gpu)


@pytest.mark.parametrize(
    ("memory", "path", "shape"),
    [
        ("sequential", "mapped", "fp8"),
        ("sequential", "proxied", "fp8"),
        ("weak", "mapped", "fp8"),
    ],
)
def test_a_seed_of_a_quick_shape(memory: str, path: str, shape: str) -> None:
    trials.exchange(compiled(memory), memory, path, SHAPES[shape], 2)


@pytest.mark.model
@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
@pytest.mark.parametrize(("memory", "path", "shape"), list(itertools.product(trials.MEMORIES, trials.PATHS, SHAPES)))
def test_many_seeds(memory: str, path: str, shape: str, narrow: bool) -> None:
    for seed in range(SEEDS[memory]):
        trials.exchange(compiled(memory), memory, path, SHAPES[shape], seed, narrow)


@needs_nvrtc
def test_a_seed_of_bulk_copies() -> None:
    trials.exchange(compiled("sequential"), "sequential", "mapped", SHAPES["fp8"], 1, copies=["tma"])


@needs_nvrtc
@pytest.mark.model
@pytest.mark.parametrize("copies", trials.COPIES)
def test_turns_of_as_many_rows_as_they_may_have(copies: str) -> None:
    settings = Settings(timeout=trials.TIMEOUT, window="host", programs=1)
    case = Case(tokens=(140, 3), hidden=128, experts=4, topk=2, seed=7)
    trials.exchange(compiled("sequential"), "sequential", "mapped", case, 0, settings=settings, copies=[copies])


@needs_nvrtc
@pytest.mark.model
@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
@pytest.mark.parametrize("copies", [["tma"], ["tma", "triton"]], ids=["alone", "beside Triton's"])
@pytest.mark.parametrize(("memory", "shape"), list(itertools.product(trials.MEMORIES, SHAPES)))
def test_many_seeds_of_bulk_copies(memory: str, shape: str, copies: list[str], narrow: bool) -> None:
    for seed in range(SEEDS[memory]):
        trials.exchange(compiled(memory), memory, "mapped", SHAPES[shape], seed, narrow, copies=copies)


@pytest.mark.model
@pytest.mark.timeout(2700)
@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
@pytest.mark.parametrize("shape", BETWEEN_NODES)
@pytest.mark.parametrize(("memory", "seed"), EACH_SEED)
def test_many_seeds_between_nodes(memory: str, seed: int, shape: str, narrow: bool) -> None:
    trials.exchange(compiled(memory), memory, "proxied", BETWEEN_NODES[shape], seed, narrow, node_ranks=2)


@needs_nvrtc
@pytest.mark.model
@pytest.mark.parametrize("copies", trials.COPIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_seed_for_another_gpu(shape: str, copies: str) -> None:
    trials.exchange(compiled("weak", "sm_100"), "weak", "mapped", SHAPES[shape], 3, narrow=True, copies=[copies])


@pytest.mark.model
@pytest.mark.timeout(2700)
@pytest.mark.parametrize("shape", BETWEEN_NODES)
def test_a_seed_between_nodes_for_another_gpu(shape: str) -> None:
    trials.exchange(compiled("weak", "sm_100"), "weak", "proxied", BETWEEN_NODES[shape], 3, narrow=True, node_ranks=2)


@pytest.mark.model
@pytest.mark.parametrize("path", trials.PATHS)
def test_as_many_channels_as_there_are(path: str) -> None:
    """Of 33 tokens two each, and none for the last ones."""
    settings = Settings(timeout=trials.TIMEOUT, window="host", programs=NORMAL_CHANNELS)
    for seed in range(2):
        trials.exchange(
            compiled("sequential"),
            "sequential",
            path,
            replace(SHAPES["one rank is chosen"], tokens=(33, 2)),
            seed,
            settings=settings,
        )


@pytest.mark.model
@pytest.mark.parametrize("memory", trials.MEMORIES)
def test_rings_of_commands_that_fill(memory: str) -> None:
    """Programs of all channels put more into the ring of the one proxy than that holds."""
    settings = Settings(timeout=trials.TIMEOUT, window="host", programs=4, ring_slots=4, proxies=1)
    for seed in range(SEEDS[memory]):
        trials.exchange(
            compiled(memory), memory, "proxied", SHAPES["one rank is chosen"], seed, narrow=True, settings=settings
        )
