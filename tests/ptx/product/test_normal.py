"""Kernels of normal mode as Triton compiles them for a GPU, on the model machine: every shape equal to the oracle."""

from __future__ import annotations

import functools
import importlib.util

import pytest
import torch

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
trials = pytest.importorskip("tests.ptx.product.trials", reason="needs Triton")

from tests.ptx.product.compiled import Compiled  # noqa: E402
from tests.support.normal_cases import Case  # noqa: E402

SHAPES: dict[str, Case] = {
    "bf16": Case(tokens=(5, 3), experts=4, topk=2),
    "fp8": Case(tokens=(4, 6), experts=4, topk=2, dtype=torch.float8_e4m3fn, seed=1),
    "fp32, an empty rank": Case(tokens=(0, 7), experts=8, topk=3, dtype=torch.float32, seed=2),
}


@functools.cache
def compiled(memory: str, gpu: str = "sm_90") -> Compiled:
    """The kernels for all tests of this process."""
    return Compiled(memory == "weak", gpu)


@pytest.mark.parametrize(
    ("memory", "path", "shape"),
    [
        ("sequential", "mapped", "bf16"),
        ("sequential", "proxied", "fp8"),
        ("weak", "mapped", "fp32, an empty rank"),
    ],
)
def test_a_seed_of_each_quick_shape(memory: str, path: str, shape: str) -> None:
    trials.exchange(compiled(memory), memory, path, SHAPES[shape], 2)
