"""Normal mode on the model machine where a peer falls silent, or says what cannot be: both kinds of copies name it."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
trials = pytest.importorskip("tests.ptx.product.trials", reason="needs Triton")

from tests.ptx.product.normal_failures import FAILURES, fail  # noqa: E402
from tests.ptx.product.ranks import TIMEOUT  # noqa: E402
from tests.ptx.product.test_normal import compiled  # noqa: E402
from tests.support.nvrtc import needs_nvrtc  # noqa: E402
from uccl_ep_serving.config import Settings  # noqa: E402

pytestmark += [needs_nvrtc]


def _play(copy: str, memory: str, phase: str, failure: str, seed: int) -> None:
    machine = trials.machine_of(memory, seed)
    settings = Settings(timeout=TIMEOUT, window="host", programs=2, copy=copy)
    with trials.group_of(machine, compiled(memory), 2, "mapped", settings) as group:
        group.run(
            lambda runtime: fail(group.normal_mode(runtime), runtime, phase, failure), limit_steps=trials.LIMIT_STEPS
        )


@pytest.mark.parametrize("failure", FAILURES)
def test_is_named(failure: str) -> None:
    _play("tma", "sequential", "dispatch", failure, 0)


@pytest.mark.model
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("copy", ["tma", "triton"])
@pytest.mark.parametrize("memory", trials.MEMORIES)
def test_is_named_by_many_seeds(memory: str, copy: str, phase: str, failure: str) -> None:
    for seed in range(6):
        _play(copy, memory, phase, failure, seed)
