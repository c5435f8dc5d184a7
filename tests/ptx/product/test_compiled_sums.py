"""A kernel as Triton compiles it, on the machine: reductions, scans, histograms and transposes of several warps."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ptx.machine.machine import Machine
from tests.ptx.machine.report import DataRace, Uninitialised
from tests.ptx.memory.sequential import Sequential
from tests.ptx.memory.weak import Weak
from tests.ptx.other_process import printed_by
from tests.ptx.texts import memory
from tests.ptx.translation.host_code import Kernel

pytestmark = [
    pytest.mark.triton,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

COUNT = 512


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    found: dict[str, Any] = printed_by(Path(__file__).with_name("compiled_sums.py"))
    return found


def run(ptx: str, shared: int, model: Callable[[], Any], seed: int) -> None:
    """Launches the kernel, and checks what it has written."""
    x, y = memory(COUNT), memory(4 * COUNT)
    x[:] = np.random.default_rng(seed).integers(0, 1000, COUNT)
    machine = Machine(seed, model(), parting=0.2)
    for name, array in (("x", x), ("y", y)):
        machine.memory.register(name, array.ctypes.data, array.nbytes)
    kernel = Kernel(ptx, machine.memory.every_access)
    machine.launch_later(0, kernel, (1,), [x.ctypes.data, y.ctypes.data], shared)
    machine.run(limit_steps=200_000)
    sums, rest = y[:COUNT], y[COUNT:]
    assert sums.tolist() == (np.cumsum(x) + x.sum()).tolist()
    assert rest[: COUNT // 16].tolist() == x.reshape(-1, 16).sum(1).tolist()
    assert rest[COUNT // 16 :][:64].tolist() == np.bincount((x % 64).astype(int), minlength=64).tolist()
    assert y[2 * COUNT : 3 * COUNT].tolist() == x.reshape(-1, 16).T.ravel().tolist()


@pytest.mark.parametrize("model", [Sequential, Weak], ids=["sequential", "weak"])
def test_results_in_any_order(compiled: dict[str, Any], model: Callable[[], Any]) -> None:
    for seed in range(4):
        run(compiled["ptx"], compiled["shared"], model, seed)


def test_no_barrier_can_be_missed(compiled: dict[str, Any]) -> None:
    """Without any of its barriers the kernel races, and the report says at which line of the kernel."""
    ptx, many = re.subn(r"\n\s*bar\.sync\s+0;", "\n", compiled["ptx"])
    assert many
    with pytest.raises((DataRace, Uninitialised)) as found:
        run(ptx, compiled["shared"], Weak, 1)
    assert "compiled_sums.py:" in str(found.value)
