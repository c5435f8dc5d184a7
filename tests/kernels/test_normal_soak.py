"""Two hundred random operations on one Buffer, results kept and dropped at random, all compared with the oracle."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.bits import same_bits
from tests.support.direct_ranks import DirectGroup
from tests.support.fake_ranks import HOSTILE, FakeGroup
from tests.support.normal_cases import Case, check, dispatch, expert_outputs, round_trip
from uccl_ep_serving import oracle
from uccl_ep_serving.config import Settings
from uccl_ep_serving.modes.normal_cpu import Normal
from uccl_ep_serving.protocol.layout import NormalPlan

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
PLAN = NormalPlan(3, 64, heap=384 << 10, rounds=96 << 10, chunk=8192, depth=2)


def random_case(dice: random.Random, ranks: int) -> Case:
    topk = dice.randint(1, 8)
    local = dice.randint(topk, 12)
    return Case(
        tokens=tuple(dice.choice((0, 1, dice.randint(2, 70))) for _ in range(ranks)),
        hidden=128 * dice.randint(1, 4),
        experts=ranks * local,
        topk=topk,
        dtype=dice.choice(DTYPES),
        lost=dice.choice((0.0, 0.2, 0.9)),
        hot=dice.choice((-1, -1, dice.randrange(ranks))),
        seed=dice.randrange(1 << 30),
    )


def digest(tensor: torch.Tensor) -> str:
    """Hash of a tensor's bytes."""
    return hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


def soak(group: DirectGroup, steps: int, seed: int) -> None:
    """Every step: a round trip or a cached dispatch. What a rank keeps must have its bytes as long as it is kept."""
    dice = random.Random(seed)
    inputs = [random_case(dice, group.ranks).inputs() for _ in range(steps)]
    again = [dice.random() < 0.3 for _ in range(steps)]

    def body(runtime: Any) -> list[Any]:
        rank = runtime.rank
        mine = random.Random(seed * 100 + rank)  # ranks keep different things: the heap's room differs
        normal = Normal(runtime)
        kept: list[tuple[torch.Tensor, str]] = []
        results = []
        for one, cached in zip(inputs, again, strict=True):
            outcome = round_trip(normal, one, rank)
            copies = [outcome.rows.clone(), outcome.combined.clone()]
            if cached:
                rows, *_, handle, _ = normal.dispatch(one.rows(rank), handle=outcome.handle)
                rows = rows[0] if isinstance(rows, tuple) else rows
                combined = normal.combine(expert_outputs(rows, rank), handle)[0]
                assert same_bits(rows, copies[0])
                assert same_bits(combined, copies[1])
            for tensor in (outcome.rows, outcome.combined):
                if mine.random() < 0.4:
                    kept.append((tensor, digest(tensor)))
            while len(kept) > 8 or (kept and mine.random() < 0.3):
                tensor, expected = kept.pop(mine.randrange(len(kept)))
                assert digest(tensor) == expected
            results.append(replace(outcome, combined=copies[1], received=_detached(outcome)))
        assert all(digest(tensor) == expected for tensor, expected in kept)
        return results

    for one, outcomes in zip(inputs, zip(*group.run(body), strict=True), strict=True):
        check(one, outcomes)


def _detached(outcome: Any) -> Any:
    """The received rows in memory of their own, so that the test's record holds no lease."""
    if isinstance(outcome.received, tuple):
        return outcome.received[0].clone(), outcome.received[1]
    return outcome.received.clone()


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_two_hundred_steps_over_mapped_windows(seed: int) -> None:
    soak(DirectGroup(3, PLAN, Settings(timeout=30.0, channels=2)), 200, seed)


@pytest.mark.long
def test_two_hundred_steps_over_a_hostile_wire() -> None:
    settings = Settings(timeout=60.0, channels=3, proxies=2, ring_slots=8)
    with FakeGroup(3, adversary=HOSTILE, seed=11, normal=PLAN, settings=settings) as group:
        soak(group, 200, 3)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_hundred_steps_between_nodes_over_a_hostile_wire() -> None:
    settings = Settings(timeout=60.0, channels=3, proxies=2, ring_slots=8)
    plan = NormalPlan(4, 64, heap=384 << 10, rounds=128 << 10, chunk=8192, depth=2)
    with FakeGroup(4, node_ranks=2, adversary=HOSTILE, seed=13, normal=plan, settings=settings) as group:
        soak(group, 200, 6)


def test_twenty_steps_over_a_hostile_wire() -> None:
    with FakeGroup(3, adversary=HOSTILE, seed=12, normal=PLAN, settings=Settings(timeout=60.0)) as group:
        soak(group, 20, 4)


def test_many_dispatches_in_flight_to_their_combines() -> None:
    """Forward passes of several layers, combined in another order than dispatched."""
    dice = random.Random(5)
    inputs = [random_case(dice, 3).inputs() for _ in range(12)]
    order = dice.sample(range(12), 12)

    def body(runtime: Any) -> dict[int, torch.Tensor]:
        normal, rank = Normal(runtime), runtime.rank
        flying = [dispatch(normal, one, rank) for one in inputs]
        combined = {}
        for index in order:
            rows = flying[index][0][0] if inputs[index].quantised else flying[index][0]
            combined[index] = normal.combine(expert_outputs(rows, rank), flying[index][4])[0]
        return combined

    results = DirectGroup(3, PLAN).run(body)
    for index, one in enumerate(inputs):
        delivered = one.delivered
        outputs = [expert_outputs(there.rows(one.x), rank) for rank, there in enumerate(delivered)]
        for rank, combined in enumerate(results):
            expected = oracle.normal_combine(outputs, delivered, rank, one.case.tokens[rank])
            assert oracle.calc_diff(combined[index], expected) < 5e-6
