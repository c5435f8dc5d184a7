"""What all kernels of normal mode share, as Triton compiles it: rows arrive whole, and no order may be missing."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
trials = pytest.importorskip("tests.ptx.product.trials", reason="needs Triton")

from tests.ptx.machine.report import DataRace  # noqa: E402
from tests.ptx.product import exchange_kernels  # noqa: E402
from tests.ptx.product.compiled import Compiled  # noqa: E402
from tests.ptx.product.exchange_kernels import FORMS, ROWS, WORDS, Places  # noqa: E402
from tests.ptx.product.test_low_latency import compiled  # noqa: E402
from uccl_ep_serving.kernels.blocks.normal_device import DeviceNormalState  # noqa: E402

#: One after the other: rows of the second land where those of the first were read.
EXCHANGES = 2
#: Seeds of each form and path in the long run, and within how many a fault is noticed.
SEEDS, WITHIN = 20, 5


def given(ranks: int, rank: int, seed: int) -> torch.Tensor:
    """Rows of a rank by exchange and peer."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    shape = (EXCHANGES, ranks, ROWS, WORDS)
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator, dtype=torch.int32)


def run(kernels: Compiled, memory: str, path: str, form: str, seed: int, ranks: int = 2) -> None:
    """Every rank gets the rows of every other."""
    machine = trials.machine_of(memory, seed)
    with trials.group_of(machine, kernels, ranks, path) as group:

        def body(runtime: Any) -> None:
            gpu, me = group.gpu(runtime), runtime.rank
            space, state = gpu.space(), DeviceNormalState(runtime.layout, torch.device("cpu"))
            x, out = given(ranks, me, seed), torch.zeros(EXCHANGES, ranks, ROWS, WORDS, dtype=torch.int32)
            for number in range(EXCHANGES):
                addresses = space.context, state.address, x[number].data_ptr(), out[number].data_ptr()
                for one in exchange_kernels.launches(form, *addresses, Places.of(runtime.layout), number + 1):
                    one.run()
            group.synchronise()
            gpu.take_report()
            runtime.check("an exchange of rows")
            for peer in range(ranks):
                expected = given(ranks, peer, seed)[:, me] if peer != me else torch.zeros_like(out[:, me])
                assert torch.equal(out[:, peer], expected)

        group.run(body, limit_steps=trials.LIMIT_STEPS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", trials.PATHS)
@pytest.mark.parametrize("memory", [pytest.param("sequential", marks=pytest.mark.model), "weak"])
def test_rows_arrive(memory: str, path: str, form: str) -> None:
    run(compiled(memory), memory, path, form, 1)


@pytest.mark.model
@pytest.mark.parametrize("gpu", ["sm_90", "sm_100"])
@pytest.mark.parametrize(("memory", "path", "form"), list(itertools.product(trials.MEMORIES, trials.PATHS, FORMS)))
def test_many_seeds(memory: str, path: str, form: str, gpu: str) -> None:
    for seed in range(SEEDS):
        run(compiled(memory, gpu), memory, path, form, seed, ranks=2 + seed % 2)


#: What is needed on which path: releases of flags in windows and of commands in rings, acquires of counts.
ORDERS = [
    ("mapped", "st.release.sys.global.b64"),
    ("proxied", "st.release.sys.global.v2.b64"),
    ("mapped", "ld.acquire.sys.global.b64"),
    ("proxied", "ld.acquire.sys.global.b64"),
]
#: What is put for it.
WEAKER = {
    "none": lambda order: order.replace("release", "relaxed").replace("acquire", "relaxed"),
    "scope": lambda order: order.replace(".sys.", ".gpu."),
}


def noticed(kernels: Compiled, path: str, form: str) -> str:
    """What is wrong with ``kernels``; nothing where nothing is noticed."""
    for seed in range(WITHIN):
        try:
            run(kernels, "weak", path, form, seed)
        except (DataRace, AssertionError) as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("weaker", "form"),
    [
        ("none", "one kernel"),
        *(pytest.param(*one, marks=pytest.mark.model) for one in list(itertools.product(WEAKER, FORMS))[1:]),
    ],
)
@pytest.mark.parametrize(("path", "order"), ORDERS)
def test_an_order_that_is_taken_away_is_noticed(path: str, order: str, weaker: str, form: str) -> None:
    changed = []

    def edit(name: str, text: str) -> str:
        changed.append(order in text)
        return text.replace(order, WEAKER[weaker](order))

    assert noticed(compiled("weak").edited(edit), path, form)
    assert any(changed)
