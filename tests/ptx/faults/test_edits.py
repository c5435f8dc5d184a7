"""Kernels of low latency made wrong in their PTX: the model machine notices each fault, or a sentence says why not."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
trials = pytest.importorskip("tests.ptx.product.trials", reason="needs Triton")

from tests.ptx.product.compiled import Compiled  # noqa: E402
from tests.ptx.product.edits import Fault, faults_of  # noqa: E402
from tests.ptx.product.test_low_latency import SHAPES, compiled  # noqa: E402

#: A fault is noticed within so many seeds of a path; the kernels as they are pass ten times as many (SEEDS there).
WITHIN = 3
KERNELS = (
    "route",
    "pack_dispatch",
    "dispatch_arrival",
    "count_rows",
    "unpack_rows",
    "prepare_combine",
    "pack_combine",
    "combine_arrival",
    "sum_rows",
)


def texts(kernel: str) -> Iterator[str]:
    """Those of ``kernel`` that a layer runs."""
    found: dict[str, None] = {}

    def note(name: str, text: str) -> str:
        if name == f"uccl_ep_{kernel}":
            found[text] = None
        return text

    trials.layers(compiled("sequential").edited(note), "sequential", "mapped", SHAPES["bf16"], 0)
    yield from found


def passes(kernels: Compiled, memory: str, seeds: int) -> bool:
    """Nothing is noticed with these kernels, on either path."""
    for seed in range(seeds):
        for path in trials.PATHS:
            try:
                trials.layers(kernels, memory, path, SHAPES["bf16"], seed)
            except Exception:
                return False
    return True


def is_reached(fault: Fault) -> bool:
    """What is wrong is run at all. What only a failure comes to is not."""
    return not passes(compiled("sequential").edited(fault.trap), "sequential", 1)


@pytest.mark.model
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_fault_is_noticed(kernel: str) -> None:
    unnoticed = [
        str(fault)
        for text in texts(kernel)
        for fault in faults_of(text)
        if is_reached(fault) and passes(compiled("weak").edited(fault.edit), "weak", WITHIN)
    ]
    assert unnoticed == []
