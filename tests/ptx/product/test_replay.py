"""Layers as graphs hold them: the same launches again, with other tokens and without the host's code around them."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
trials = pytest.importorskip("tests.ptx.product.trials", reason="needs Triton")

from tests.ptx.product.test_low_latency import compiled  # noqa: E402
from tests.support.ll_replay import FORMS, Layer, RecordingOrder  # noqa: E402
from uccl_ep_serving.handles import EventOverlap  # noqa: E402

#: Of a layer, each with other tokens.
REPLAYS = 3


class Recording(RecordingOrder):
    """What the experts compute begins when the kernels before it are over, as on a stream."""

    def __init__(self, synchronise: Callable[[], None]) -> None:
        super().__init__()
        self._synchronise = synchronise

    def run(
        self, launch: Callable[[], None], tensors: Sequence[torch.Tensor], *, own_stream: bool, finish: bool
    ) -> EventOverlap:
        def whole() -> None:
            launch()
            self._synchronise()

        return super().run(whole, tensors, own_stream=own_stream, finish=finish)


def replay(memory: str, path: str, form: str, seed: int) -> None:
    """A layer of every rank, and replays of it."""
    machine = trials.machine_of(memory, seed)
    with trials.group_of(machine, compiled(memory), 2, path) as group:

        def body(runtime: Any) -> int:
            order = Recording(group.synchronise)
            low_latency = group.low_latency(runtime, order)

            def reserve(*sizes: int, use_fp8: bool, with_topk_weights: bool) -> None:
                formats = {"round_scale": False, "use_ue8m0": False, "with_topk_weights": with_topk_weights}
                low_latency.reserve(*sizes, dtype=torch.bfloat16, use_fp8=use_fp8, **formats)

            facade: Any = SimpleNamespace(
                rank=runtime.rank,
                group_size=runtime.ranks,
                low_latency_dispatch=low_latency.dispatch,
                low_latency_combine=low_latency.combine,
                reserve_low_latency=reserve,
            )
            layer = Layer(facade, form, torch.device("cpu"), order.compute)
            # windows and kernels are made by a layer that no graph holds
            order.eager = True
            layer.run()
            order.eager = False
            layer.run()
            kept = len(order.launches)
            layer.check(order.replay, REPLAYS)
            assert len(order.launches) == kept
            return kept

        assert min(group.run(body, limit_steps=trials.LIMIT_STEPS)) >= 4


def test_a_layer_again() -> None:
    replay("sequential", "proxied", "plain", 2)


@pytest.mark.model
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("memory", "path", "form"), list(itertools.product(trials.MEMORIES, trials.PATHS, FORMS)))
def test_every_form(memory: str, path: str, form: str, seed: int) -> None:
    replay(memory, path, form, seed)
