"""Dual-batch overlap as vLLM runs it: two threads over its own micro-batch contexts and modular kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.vllm_micro_batches import without_streams
from tests.engines.vllm_moe import Case, Layer, difference, group

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

InRanks = Callable[..., list[Any]]
LAYERS = 4


# --- everything below that starts with "engine_" runs in a process that has vLLM --------------------------------------


def engine_overlapped(
    rank: int, ranks: int, rendezvous: str, low_latency: bool, cases: list[Case]
) -> tuple[list[str], list[tuple[int, str]]]:
    """Both micro-batches through LAYERS layers each; what is wrong, and the calls in the order in which they began."""
    import torch
    from vllm.utils import torch_utils
    from vllm.v1.worker import ubatching

    compute, communication = without_streams()
    calls: list[tuple[int, str]] = []
    problems: list[str] = []
    with group(rank, ranks, rendezvous) as buffer:
        layers = [Layer(case, low_latency, buffer, rank, ranks) for case in cases]
        # of the same weights; one runs both micro-batches, as a model's layer does, the other only makes its inputs
        noted(layers[0].prepare_finalize, calls, ubatching.dbo_current_ubatch_id)
        barrier = threading.Barrier(3)
        forward: list[Any] = [SimpleNamespace(micro_batch=number, dp_metadata=None) for number in range(2)]
        contexts = ubatching.make_ubatch_contexts(2, compute, communication, forward, barrier)

        def micro_batch(number: int) -> None:
            torch_utils._current_stream_tls.value = compute
            try:
                with torch.inference_mode(), contexts[number]:
                    for seed in range(LAYERS):
                        step = layers[number].step(10 * seed + number)
                        problems.append(difference(layers[0].apply(step), step.expected))
            except BaseException as error:
                problems.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=micro_batch, args=(number,), daemon=True) for number in range(2)]
        for thread in threads:
            thread.start()
        barrier.wait(60)
        contexts[0].cpu_wait_event.set()
        for thread in threads:
            thread.join(60)
            if thread.is_alive():
                problems.append("a micro-batch waits for ever")
    return problems, calls


def noted(made: Any, calls: list[tuple[int, str]], micro_batch: Callable[[], int]) -> None:
    """Write down the calls of a prepare / finalize object, with the micro-batch that makes them."""

    def with_note(name: str) -> Callable[..., Any]:
        original = getattr(made, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((micro_batch(), name))
            return original(*args, **kwargs)

        return call

    for name in ("prepare_async", "finalize_async"):
        setattr(made, name, with_note(name))


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["standard", "batched"])
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([Case(32, 128, 256, 2), Case(32, 128, 256, 2)], id="even"),
        pytest.param([Case(24, 128, 256, 6, skew=11), Case(24, 128, 256, 6, idle=True)], id="uneven"),
    ],
)
def test_micro_batches_take_turns(in_engine_ranks: InRanks, form: str, cases: list[Case]) -> None:
    for problems, calls in in_engine_ranks(2, engine_overlapped, form == "batched", cases):
        assert problems == [""] * (2 * LAYERS)
        assert len(calls) == 4 * LAYERS
        # each sends before the other has received: neither runs its layer alone
        begun = [number for number, name in calls if name == "prepare_async"]
        assert begun == [0, 1] * LAYERS
