"""Bulk copies in CUDA C, as NVRTC compiles them: kernels are right on every schedule, and each order in them counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ptx.cuda import mutants
from tests.ptx.cuda.mutants import Mutant
from tests.ptx.cuda.ring import Ring, play, play_sum
from tests.ptx.machine.report import MachineError, Misaligned
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.kernels.cuda.nvrtc import GPUS, version

try:
    version()
except ConfigError as reason:
    pytest.skip(f"NVRTC: {reason}", allow_module_level=True)

MEMORIES = ("sequential", "weak")
KERNELS = {"ring": play, "sum": play_sum}
#: Fewer rows than stages, as many, and rows of more bytes than threads copy at once.
SHAPES = (
    Ring(),
    Ring(rows=2, stages=3),
    Ring(rows=3, stages=3),
    Ring(rows=4, stages=2),
    Ring(rows=7, words=30, stages=4),
)
#: Seeds of each shape: quickly, and in the long run. A mutant is noticed within so many.
FEW, MANY, WITHIN = 2, 100, 2


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", KERNELS)
def test_a_few_seeds(name: str, memory: str, gpu: str) -> None:
    for shape in SHAPES:
        for seed in range(FEW):
            KERNELS[name](shape, memory, gpu, seed)


@pytest.mark.model
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", KERNELS)
def test_many_seeds(name: str, memory: str, shape: Ring, gpu: str) -> None:
    for seed in range(MANY):
        KERNELS[name](shape, memory, gpu, seed)


def noticed(kernel: Callable[..., str], mutant: Mutant, gpu: str, seed: int) -> str:
    """The error that tells a mutant; nothing where it is not noticed."""
    try:
        kernel(Ring(), "weak", gpu, seed, mutant.edit)
    except MachineError as error:
        return type(error).__name__
    return ""


CASES = [(name, one) for name in KERNELS for one in getattr(mutants, name.upper())]


@pytest.mark.parametrize(("name", "mutant"), CASES, ids=[f"{name}: {one.name}" for name, one in CASES])
def test_what_is_taken_away_is_noticed(name: str, mutant: Mutant) -> None:
    found = next(filter(None, (noticed(KERNELS[name], mutant, "sm_90", seed) for seed in range(WITHIN))), "nothing")
    assert found in mutant.errors


@pytest.mark.model
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("name", "mutant"), CASES, ids=[f"{name}: {one.name}" for name, one in CASES])
def test_each_of_many_seeds_notices_it(name: str, mutant: Mutant, gpu: str) -> None:
    assert {noticed(KERNELS[name], mutant, gpu, seed) for seed in range(20)} <= {*mutant.errors}


def test_rows_that_are_no_multiple_of_sixteen_bytes() -> None:
    with pytest.raises(Misaligned, match=r"cp\.async\.bulk.*move\.cu:\d+.*40 bytes"):
        play(Ring(words=5), "weak", "sm_90", 1)
