"""One small operation of each mode on a GPU, path by path: ``scripts/gpu-check`` runs these before all else."""

from __future__ import annotations

import pytest

from tests.support import gpu_bodies, ll_cases, normal_cases
from tests.support.gpu_ranks import GpuRanks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("path", gpu_bodies.PATHS)
@pytest.mark.parametrize("mode", ["alone", "low latency", "normal"])
def test_one_operation(on_gpu: GpuRanks, mode: str, path: str) -> None:
    overrides = gpu_bodies.PATHS[path]
    if mode == "alone":
        on_gpu.run(1, gpu_bodies.against_the_oracle, overrides, [ll_cases.Case(ranks=1)], timeout=240)
    elif mode == "low latency":
        on_gpu.run(2, gpu_bodies.against_the_oracle, overrides, [ll_cases.Case()], timeout=240)
    else:
        cases = [normal_cases.Case(tokens=(40, 33), experts=8)]
        on_gpu.run(2, gpu_bodies.normal_against_the_oracle, overrides, cases, timeout=240)
