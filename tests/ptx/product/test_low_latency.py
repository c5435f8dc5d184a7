"""Low-latency kernels as Triton compiles them for a GPU, on the model machine: every shape equal to the oracle."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import random
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
trials = pytest.importorskip("tests.ptx.product.trials", reason="needs Triton")

from tests.ptx.product.compiled import Compiled  # noqa: E402
from tests.support import ll_cases  # noqa: E402
from tests.support.bits import OtherBits  # noqa: E402
from tests.support.ll_cases import Case  # noqa: E402
from tests.support.ll_player import program_of  # noqa: E402

_SMALL: dict[str, Any] = {"tokens": 4, "experts": 4, "topk": 2, "counts": (4, 3)}
SHAPES: dict[str, Case] = {
    "bf16": Case(**_SMALL),
    "fp8, per expert": Case(**_SMALL, reduced=False, fp8=True),
    "in order": Case(**_SMALL, routing="twice", deterministic=True),
    "ue8m0, an empty rank": Case(**{**_SMALL, "counts": (0, 4)}, fp8=True, hidden=512, round_scale=True, ue8m0=True),
}
MORE: dict[str, Case] = {
    "blocks of rows": Case(**{**_SMALL, "hidden": 1280}),
    "holes": Case(topk=3, reduced=False, routing="holes", tokens=5, counts=(5, 2)),
    "fp16": Case(**_SMALL, dtype=torch.float16),
    "fp32, per expert": Case(**_SMALL, dtype=torch.float32, reduced=False),
    "fp8 of fp32": Case(**_SMALL, fp8=True, dtype=torch.float32, hidden=384),
    "fp8, rounded scales": Case(**_SMALL, fp8=True, round_scale=True),
    "no expert": Case(**_SMALL, routing="none"),
    "one expert": Case(**_SMALL, routing="one", reduced=False),
    "an expert twice": Case(**_SMALL, routing="twice"),
    "an expert twice, per expert": Case(**_SMALL, routing="twice", reduced=False),
    "one expert in every slot": Case(**{**_SMALL, "topk": 3}, routing="same"),
    "one expert in every slot, per expert": Case(**{**_SMALL, "topk": 3}, routing="same", reduced=False),
    "more slots than experts of a rank, some twice": Case(**{**_SMALL, "topk": 4}, routing="twice", reduced=False),
    "far experts": Case(**_SMALL, routing="far", hidden=136),
    "one token": Case(tokens=1, counts=(1,), experts=4, topk=2),
    "no tokens": Case(tokens=4, counts=(0,), experts=4, topk=2),
    "in order, per expert": Case(
        ranks=3, tokens=5, counts=(5, 3, 4), experts=6, topk=3, routing="one", reduced=False, deterministic=True
    ),
    "three ranks": Case(ranks=3, tokens=3, counts=(3, 0, 2), experts=6, topk=3),
}
EVERY = SHAPES | MORE
#: Seeds of each shape and path in the long run.
SEEDS = {"sequential": 30, "weak": 10}


@functools.cache
def compiled(memory: str, gpu: str = "sm_90") -> Compiled:
    """The kernels for all tests of this process."""
    return Compiled(memory == "weak", gpu)


@pytest.mark.parametrize(
    ("memory", "path", "shape"),
    [
        ("sequential", "mapped", "bf16"),
        ("sequential", "proxied", "fp8, per expert"),
        ("weak", "mapped", "fp8, per expert"),
        ("weak", "proxied", "bf16"),
        ("weak", "mapped", "in order"),
    ],
)
def test_a_seed_of_a_quick_shape(memory: str, path: str, shape: str) -> None:
    trials.layers(compiled(memory), memory, path, SHAPES[shape], 2, count=1 if memory == "weak" else 2)


def replayed(memory: str, seed: int) -> trials.Outcome:
    return trials.layers(compiled(memory), memory, "proxied", SHAPES["bf16"], seed, count=1)


@pytest.mark.parametrize("memory", ["sequential", pytest.param("weak", marks=pytest.mark.model)])
def test_a_seed_replays_exactly(memory: str) -> None:
    once, again, other = (replayed(memory, seed) for seed in (5, 5, 9))
    assert once == again != other


@pytest.mark.model
@pytest.mark.parametrize("memory", trials.MEMORIES)
def test_a_seed_replays_in_any_process(memory: str) -> None:
    program = f"from tests.ptx.product.test_low_latency import *; print(replayed({memory!r}, 5).digest)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.split()[-1] == replayed(memory, 5).digest


def test_a_seed_that_fails_fails_again_with_the_same_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are right: it is the expectation that is wrong in one place."""
    expected = ll_cases.expected_combined

    def other(case: Case, inputs: list[Any], rank: int) -> torch.Tensor:
        combined = expected(case, inputs, rank)
        combined[1, 5] += 1
        return combined

    monkeypatch.setattr(ll_cases, "expected_combined", other)
    reports = []
    for _ in range(2):
        with pytest.raises(OtherBits) as failed:
            trials.layers(compiled("weak"), "weak", "mapped", SHAPES["bf16"], 2, count=1)
        reports.append([str(failed.value), *failed.value.__notes__])
    assert reports[0] == reports[1]
    message, where, account = reports[0]
    assert "row 1, column 5 is" in message
    assert "seed 2, step " in where
    # the element's cell, and who wrote it last, how, and by which line
    assert "torch.bfloat16 [4, 128]+0x108" in account
    assert re.search(r"uccl_ep_combine_recv CTA \(\d+, 0\) thread \d+ wrote .* by st\..*ll_combine_recv.py", account)


@pytest.mark.parametrize("memory", ["sequential", pytest.param("weak", marks=pytest.mark.model)])
def test_two_in_flight_and_hooks_in_another_order(memory: str) -> None:
    cases = [replace(SHAPES["bf16"], seed=3), replace(SHAPES["fp8, per expert"], seed=4)]
    programs = ["D D d0 d1 C0 C1 c0 c1", "D D d1 d0 C0 C1 c1 c0"]
    trials.play(compiled(memory), memory, "proxied", cases, programs, 12)


@pytest.mark.model
@pytest.mark.parametrize("gpu", ["sm_90", "sm_100"])
@pytest.mark.parametrize(("memory", "path", "shape"), list(itertools.product(trials.MEMORIES, trials.PATHS, EVERY)))
def test_many_seeds(memory: str, path: str, shape: str, gpu: str) -> None:
    for seed in range(SEEDS[memory] if gpu == "sm_90" else 1):
        trials.layers(compiled(memory, gpu), memory, path, EVERY[shape], seed)


@pytest.mark.model
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("memory", "path"), list(itertools.product(trials.MEMORIES, trials.PATHS)))
def test_random_steps(memory: str, path: str, seed: int) -> None:
    """Ten operations of random shapes in a random order of calls and hooks, another one on every rank."""
    choose = random.Random(f"steps {seed}")
    ranks = choose.choice((2, 2, 3))
    names = choose.sample(sorted(EVERY), 3)
    cases = [replace(EVERY[name], ranks=ranks, experts=2 * ranks, seed=seed) for name in names]
    collectives = [choose.randrange(3) for _ in range(10)]
    programs = [program_of(choose.randrange(1 << 20), collectives) for _ in range(ranks)]
    trials.play(compiled(memory), memory, path, cases, programs, seed)
