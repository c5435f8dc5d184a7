"""Gradients through dispatch and combine: equal to those of a dense layer, on both kinds of kernels, between nodes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels import training_bodies
from tests.support.ranks import Ranks

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)
INTERPRETED = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
#: Nodes of two ranks, between which proxies copy.
NODES: dict[str, Any] = {"transport": "shm", "node_ranks": 2}
DEVICE: dict[str, Any] = {"device": "interpreter", "window": "host"}


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Rank processes for the CPU kernels."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Ranks]:
    """Rank processes whose Triton is the interpreter."""
    pool = Ranks()
    yield pool
    pool.close()


def check(
    pool: Ranks, ranks: int, overrides: dict[str, Any], crossed: bool, dtype: torch.dtype = torch.float32
) -> None:
    most = 1e-5 if dtype == torch.float32 else 0.02
    for found in pool.run(ranks, training_bodies.gradients, overrides, crossed, dtype, timeout=580):
        assert set(found) == {"output", "x", "scores", "experts"}
        assert all(error < most for error in found.values()), found


@pytest.mark.parametrize("transport", ["direct", "tcp"])
def test_gradients_of_cpu_tensors(pool: Ranks, transport: str) -> None:
    overrides = {} if transport == "direct" else {"direct": False, "transport": transport}
    check(pool, 3, overrides, crossed=False)


def test_gradients_in_bfloat16(pool: Ranks) -> None:
    check(pool, 3, {}, crossed=False, dtype=torch.bfloat16)


def test_a_gradient_of_a_gradient_is_refused(pool: Ranks) -> None:
    """By torch, in its own words; without that, a gradient penalty trains with a part of its gradients."""
    for said in pool.run(2, training_bodies.differentiated_twice, {}):
        assert "once_differentiable" in said


def test_gradients_between_nodes(pool: Ranks) -> None:
    check(pool, 4, NODES, crossed=True)


@INTERPRETED
@pytest.mark.interpreter
def test_gradients_on_a_device(interpreted: Ranks) -> None:
    check(interpreted, 2, DEVICE, crossed=False)


@INTERPRETED
@pytest.mark.interpreter
def test_gradients_between_nodes_on_a_device(interpreted: Ranks) -> None:
    check(interpreted, 4, {**DEVICE, **NODES}, crossed=True)


@pytest.mark.long
def test_the_example_trains() -> None:
    command = [sys.executable, "examples/04_training.py", "--tokens", "60", "--steps", "5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert shown.returncode == 0, shown.stderr[-3000:]
    assert shown.stdout.count("gradients equal those of the dense layer") == 2
