"""Normal mode over the life of a Buffer: masked ranks, new windows, interrupted operations, slow progress."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from tests.support.bits import same_bits
from tests.support.direct_ranks import DirectGroup
from tests.support.fake_ranks import FakeGroup
from tests.support.normal_cases import Case, Outcome, check, dispatch, expert_outputs, round_trip
from uccl_ep_serving import oracle
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import UcclEpError
from uccl_ep_serving.modes.normal_cpu import Normal
from uccl_ep_serving.protocol.layout import LowLatencyPlan, NormalPlan


@pytest.mark.parametrize("heap", [1 << 20, 0], ids=["in place", "rounds"])
def test_a_masked_rank_drops_out(heap: int) -> None:
    """Ranks 0 and 2 mask rank 1, which does nothing: its rows are missing from the sums and all else is there."""
    case = Case((40, 30, 20), experts=12)
    inputs = case.inputs()
    delivered = inputs.delivered

    def body(runtime: Any) -> Outcome | None:
        if runtime.rank == 1:
            return None
        runtime.mask[1] = 1
        normal = Normal(runtime)
        outcome = round_trip(normal, inputs, runtime.rank)
        again = normal.dispatch(inputs.x[runtime.rank], handle=outcome.handle)
        assert same_bits(again[0], outcome.rows)
        return outcome

    outcomes = DirectGroup(3, NormalPlan(3, 64, heap=heap, rounds=96 << 10, chunk=8192)).run(body)
    outputs = []
    for rank, there in enumerate(delivered):
        rows = expert_outputs(there.rows(inputs.x), rank)
        outputs.append(torch.zeros_like(rows) if rank == 1 else rows)
    for rank in (0, 2):
        present = delivered[rank].source != 1
        assert same_bits(outcomes[rank].rows, delivered[rank].rows(inputs.x)[present])
        assert same_bits(outcomes[rank].topk_idx, delivered[rank].topk_idx[present])
        expected = oracle.normal_combine(outputs, delivered, rank, case.tokens[rank])
        assert oracle.calc_diff(outcomes[rank].combined, expected) < 5e-6


def test_a_rank_masked_between_dispatch_and_combine() -> None:
    inputs = Case((40, 30, 20), experts=12).inputs()
    delivered = inputs.delivered
    barrier = threading.Barrier(3)

    def body(runtime: Any) -> torch.Tensor | None:
        normal = Normal(runtime)
        received, *_, handle, _ = dispatch(normal, inputs, runtime.rank)
        barrier.wait()
        if runtime.rank == 1:
            return None
        runtime.mask[1] = 1
        combined = normal.combine(expert_outputs(received, runtime.rank), handle)[0]
        rows = normal.dispatch(inputs.x[runtime.rank], handle=handle)[0]
        expected = delivered[runtime.rank].rows(inputs.x)
        expected[delivered[runtime.rank].source == 1] = 0
        assert same_bits(rows, expected)
        return combined

    outputs = [expert_outputs(there.rows(inputs.x), rank) for rank, there in enumerate(delivered)]
    outputs[1].zero_()
    for rank, combined in enumerate(DirectGroup(3).run(body)):
        if rank != 1:
            expected = oracle.normal_combine(outputs, delivered, rank, inputs.case.tokens[rank])
            assert oracle.calc_diff(combined, expected) < 5e-6


@pytest.mark.parametrize("kind", [DirectGroup, FakeGroup])
def test_new_windows_restart_all_counts_and_keep_handles_and_tensors(kind: type[DirectGroup]) -> None:
    """Low latency's first call rebuilds the windows in the middle of normal mode's life."""
    inputs = [Case((20, 30), experts=8, seed=seed).inputs() for seed in range(5)]
    plan = LowLatencyPlan(2, 8, 256, 8, 4, 2)
    group = kind(2)

    def body(runtime: Any) -> Any:
        normal, rank = Normal(runtime), runtime.rank
        before = [round_trip(normal, one, rank) for one in inputs[:3]]
        received, idx, weights, counts, handle, _ = dispatch(normal, inputs[3], rank)
        runtime.rebuild(plan)
        combined, back, _ = normal.combine(expert_outputs(received, rank), handle, topk_weights=weights)
        across = Outcome(received, idx, weights, counts, handle, combined, back)
        return [*before, across, round_trip(normal, inputs[4], rank)]

    try:
        for one, outcomes in zip(inputs, zip(*group.run(body), strict=True), strict=True):
            check(one, outcomes)
    finally:
        if isinstance(group, FakeGroup):
            group.close()


def test_an_interrupted_operation_ends_normal_mode_by_name() -> None:
    """Ctrl-C in the middle leaves the ranks with different message numbers; nothing may go on as if they agreed."""
    inputs = Case((20, 30), experts=8).inputs()

    def body(runtime: Any) -> str:
        normal = Normal(runtime)
        if runtime.rank == 0:
            real = runtime.space.wait

            def interrupted(phase: str, step: Any, moved: Any) -> None:
                if phase == "normal dispatch":
                    raise KeyboardInterrupt
                real(phase, step, moved)

            runtime.space.wait = interrupted
        with pytest.raises((KeyboardInterrupt, UcclEpError)):
            dispatch(normal, inputs, runtime.rank)
        with pytest.raises(UcclEpError) as caught:
            dispatch(normal, inputs, runtime.rank)
        return str(caught.value)

    words = DirectGroup(2, settings=Settings(timeout=0.5)).run(body)
    assert "an earlier normal dispatch (KeyboardInterrupt) was interrupted" in words[0]
    assert "rank 0 is silent" in words[1]


def test_an_operation_that_was_opened_and_not_run_ends_normal_mode_by_name() -> None:
    """The peers wait for rows by then, so a rank that runs out of memory cannot just go on."""
    inputs = Case((20,), experts=8).inputs()

    def body(runtime: Any) -> None:
        normal = Normal(runtime)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(normal, "_tensor", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                dispatch(normal, inputs, 0)
        with pytest.raises(UcclEpError, match=r"an earlier normal dispatch \(ZeroDivisionError: division by zero"):
            dispatch(normal, inputs, 0)

    DirectGroup(1).run(body)


class SlowKernels:
    """Kernels of which ``exchange`` makes one step at a time and naps after it."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def exchange(self, *arguments: int) -> int:
        time.sleep(0.05)
        return int(self._kernels.exchange(*arguments[:-1], 0))


def test_the_deadline_bounds_silence_and_not_work() -> None:
    """An operation that takes longer than the timeout, but never stands still that long, succeeds."""
    timeout = 1.0
    inputs = Case((40, 40), hidden=1024, experts=4, topk=2, lost=0.0).inputs()
    # a chunk and a round slot hold one row
    plan = NormalPlan(2, 64, heap=0, rounds=12288, chunk=4096, depth=1)
    seconds = [0.0, 0.0]

    def body(runtime: Any) -> Outcome:
        normal = Normal(runtime)
        if runtime.rank == 1:
            normal._exchange.kernels = SlowKernels(normal._exchange.kernels)
        started = time.monotonic()
        outcome = round_trip(normal, inputs, runtime.rank)
        seconds[runtime.rank] = time.monotonic() - started
        return outcome

    check(inputs, DirectGroup(2, plan, Settings(timeout=timeout)).run(body))
    assert min(seconds) > 2 * timeout
