"""What the tests on a GPU run on each rank, run here in Triton's interpreter: the tests' own code is right."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import gpu_bodies, ll_cases, normal_cases
from tests.support.ranks import Ranks
from uccl_ep_serving.check.paths import PATHS
from uccl_ep_serving.control_plane.bootstrap import StoreExchange

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.timeout(600),
    # not imported here: whether it is the interpreter is decided when it is imported
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

IPC: dict[str, Any] = {**PATHS["ipc"], "device": "interpreter", "timeout": 120.0}
NODES: dict[str, Any] = {**gpu_bodies.NODES, "device": "interpreter", "timeout": 120.0, "node_ranks": 2}


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Ranks]:
    """Rank processes whose Triton is the interpreter."""
    pool = Ranks()
    yield pool
    pool.close()


def test_low_latency(interpreted: Ranks) -> None:
    cases = [ll_cases.Case(topk=2), ll_cases.Case(topk=2, fp8=True, reduced=False)]
    interpreted.run(2, gpu_bodies.against_the_oracle, IPC, cases, timeout=500)


def on_gfx942(exchange: StoreExchange, overrides: dict[str, Any], cases: list[ll_cases.Case]) -> None:
    """Kernels that quantise as on gfx942."""
    buffer = gpu_bodies.opened(exchange, overrides)
    from uccl_ep_serving.kernels.triton import low_latency

    present = low_latency.present_target
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_latency, "present_target", lambda: replace(present(), fnuz=True))
        for case in cases:
            gpu_bodies.run_case(buffer, torch.device("cpu"), exchange.rank, case)
    buffer.destroy()


def test_low_latency_of_gfx942(interpreted: Ranks) -> None:
    fp8 = ll_cases.Case(ranks=1, experts=4, topk=2, fp8=True, fnuz=True)
    interpreted.run(1, on_gfx942, IPC, [fp8, replace(fp8, hidden=512, ue8m0=True)], timeout=500)


def test_normal(interpreted: Ranks) -> None:
    cases = [normal_cases.Case(tokens=(4, 3), experts=4, topk=2, dtype=torch.float8_e4m3fn)]
    interpreted.run(2, gpu_bodies.normal_against_the_oracle, IPC, cases, timeout=500)


@pytest.mark.parametrize("window", ["host", "device"])
def test_normal_between_nodes(interpreted: Ranks, window: str) -> None:
    cases = [normal_cases.Case(tokens=(4, 3, 0, 2), experts=8, topk=2)]
    overrides = {**NODES, "window": window}
    interpreted.run(4, gpu_bodies.normal_against_the_oracle, overrides, cases, True, timeout=550)


def run(script: str, *options: str) -> str:
    """What a script prints that ``scripts/gpu-check`` starts, started as it is there."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(Path(__file__).with_name(script)), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_soak() -> None:
    """Two rounds of all shapes over each path."""
    found = json.loads(run("soak.py", "0", "--device", "interpreter"))
    assert [one["steps"] for path in ("ipc", "shm") for one in found[path]] == [8] * 4


def test_what_a_sanitizer_watches() -> None:
    said = run("sanitized.py", "interpreter").splitlines()
    bodies = ("against_the_oracle", "normal_against_the_oracle")
    ended = {
        f"sanitized: rank {rank}: {body} over {path}" for rank in (0, 1) for body in bodies for path in ("ipc", "shm")
    }
    assert set(said) == ended
