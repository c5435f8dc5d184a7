"""Low-latency dispatch and combine through rings, proxies and a hostile wire: the same results as over mapped
windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.direct_ranks import DirectGroup
from tests.support.fake_ranks import HOSTILE, FakeGroup
from tests.support.ll_cases import Case, check_combined, reserve, run_rank
from uccl_ep_serving.config import Settings
from uccl_ep_serving.modes.low_latency_cpu import LowLatency
from uccl_ep_serving.proxy.transport.fake import Adversary


def run(group: DirectGroup, case: Case, repeats: int = 4) -> list[torch.Tensor]:
    """``repeats`` rounds of ``case``, all checked; the last round's combined tokens by rank."""
    rounds = [replace(case, seed=case.seed + index) for index in range(repeats)]
    inputs = [one.inputs() for one in rounds]

    def body(runtime: Any) -> torch.Tensor:
        low_latency = LowLatency(runtime)
        for one, given in zip(rounds, inputs, strict=True):
            combined = run_rank(one, low_latency, runtime.rank, given)
            check_combined(one, given, runtime.rank, combined)
        return combined

    return group.run(body)


@pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "expanded"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_quiet_wire(ranks: int, reduced: bool) -> None:
    with FakeGroup(ranks, settings=Settings(timeout=30.0)) as group:
        run(group, Case(ranks=ranks, experts=24, topk=6, reduced=reduced))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "expanded"])
def test_hostile_wire(reduced: bool, seed: int) -> None:
    """Reordered, delayed and repeated writes: a slot or a staging byte reused too early would show in the sums."""
    settings = Settings(timeout=30.0, channels=1 + seed, proxies=1 + seed % 2)
    with FakeGroup(3, adversary=HOSTILE, seed=seed, settings=settings) as group:
        run(group, Case(ranks=3, experts=12, reduced=reduced, counts=(8, 3, 0), seed=seed), repeats=12)


@pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "expanded"])
@pytest.mark.parametrize("seed", range(3))
def test_late_repetitions(seed: int, reduced: bool) -> None:
    """A NIC that repeats writes long after they arrived, with whatever the send slot holds by then.

    Who owns which rows of the combine space changes each time, so a repetition that comes when the next owner has
    written would land on somebody else's rows.
    """
    late = Adversary(duplicate=0.5, linger=0.97)
    with FakeGroup(3, adversary=late, seed=seed, settings=Settings(timeout=30.0)) as group:
        run(group, Case(ranks=3, experts=6, topk=2, reduced=reduced, counts=(8, 5, 8), seed=seed), repeats=16)


@pytest.mark.parametrize("routing", ["same", "twice"])
def test_tokens_that_name_an_expert_in_many_slots_return_no_more_rows_than_there_is_room_for(routing: str) -> None:
    """With more slots than a rank has experts, and all tokens for the same rank: its staging is full, and no more."""
    case = Case(ranks=4, tokens=16, counts=(16,), experts=4, topk=4, reduced=False, routing=routing)
    inputs = [replace(given, topk_idx=given.topk_idx * 0 + 3) for given in case.inputs()]
    if routing == "twice":
        inputs = case.inputs()

    def body(runtime: Any) -> None:
        low_latency = LowLatency(runtime)
        reserve(low_latency, case)
        region = runtime.layout["ll_combine_send"]
        behind = runtime.space._segment.bytes[region.offset + region.nbytes :][:65536]
        behind[:] = 0xA5
        runtime.group.barrier.wait(10)
        combined = run_rank(case, low_latency, runtime.rank, inputs)
        check_combined(case, inputs, runtime.rank, combined)
        assert (behind == 0xA5).all()

    with FakeGroup(4, settings=Settings(timeout=30.0)) as group:
        group.run(body)


def test_smallest_ring() -> None:
    """A ring of two slots is full most of the time: a kernel goes on where it stopped, and posts nothing twice."""
    settings = Settings(timeout=30.0, ring_slots=2, channels=5)
    with FakeGroup(3, settings=settings, adversary=HOSTILE) as group:
        run(group, Case(ranks=3, experts=12))


@pytest.mark.parametrize("case", [Case(ranks=4, fp8=True), Case(ranks=4, dtype=torch.float32, routing="holes")])
def test_some_peers_mapped(case: Case) -> None:
    """Two hosts of two ranks: neighbours write each other's window, the others go through proxies."""
    with FakeGroup(
        4, mapped=lambda a, b: a // 2 == b // 2, adversary=HOSTILE, settings=Settings(timeout=30.0, channels=2)
    ) as group:
        run(group, case)


def test_equal_to_mapped_windows() -> None:
    case = Case(ranks=2, hidden=256, reduced=False)
    with FakeGroup(2, settings=Settings(timeout=30.0, channels=3)) as group:
        through_proxies = run(group, case)
    for one, other in zip(through_proxies, run(DirectGroup(2), case), strict=True):
        assert torch.equal(one, other)
