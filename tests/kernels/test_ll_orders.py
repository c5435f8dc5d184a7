"""Orders of calls: overlapped micro-batches, hooks called late or swapped, dispatches that are never combined."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.direct_ranks import DirectGroup
from tests.support.fake_ranks import HOSTILE, FakeGroup
from tests.support.ll_cases import (
    Case,
)
from tests.support.ll_player import Player, program_of
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.modes.low_latency_cpu import LowLatency
from uccl_ep_serving.proxy.transport.fake import Adversary

CASE = Case(tokens=4, counts=(4, 2, 0), experts=6, topk=3)


@contextlib.contextmanager
def group_of(kind: str, ranks: int, seed: int = 0) -> Iterator[DirectGroup]:
    if kind == "direct":
        yield DirectGroup(ranks)
        return
    with FakeGroup(ranks, adversary=HOSTILE, seed=seed, settings=Settings(timeout=20.0, channels=2)) as group:
        yield group


def play(kind: str, programs: list[str], case: Case = CASE, seed: int = 0) -> None:
    """Run one program per rank (cycled)."""
    case = replace(case, ranks=len(programs), experts=3 * len(programs))
    with group_of(kind, case.ranks, seed) as group:
        group.run(lambda runtime: Player(LowLatency(runtime), runtime.rank, case).play(programs[runtime.rank]))


@pytest.mark.parametrize("kind", ["direct", "fake"])
@pytest.mark.parametrize("reduced", [True, False], ids=["reduced", "expanded"])
@pytest.mark.parametrize(
    "program",
    [
        pytest.param("D D d0 d1 C0 C1 c0 c1", id="two-in-flight"),
        pytest.param("D D d1 d0 C1 C0 c1 c0 D D d3 d2 C2 C3 c3 c2", id="swapped-hooks"),
        pytest.param("D d0 D C0 d1 c0 C1 D c1 d2 C2 c2 D d3 C3 c3", id="two-batches-interleaved"),
        pytest.param("D d0 C0 D d1 C1 c0 D d2 c1 C2 D d3 C3 c2 c3 D d4 C4 c4", id="combine-behind-dispatch"),
        pytest.param("D d0 D d1 C0 c0 D d2 D d3 C3 c1", id="dispatch-twice-combine-once"),
        pytest.param(" ".join(f"D d{i}" for i in range(10)), id="ten-dispatches-without-combine"),
        pytest.param("D d0 " + " ".join(f"C0 c{i}" for i in range(10)), id="one-handle-combined-ten-times"),
        pytest.param("D D " + " ".join(f"d{2 * i} d{2 * i + 1} D D" for i in range(6)), id="dispatches-in-pairs"),
        pytest.param(
            "D d0 C0 C0 " + " ".join(f"c{2 * i} c{2 * i + 1} C0 C0" for i in range(6)), id="combines-in-pairs"
        ),
    ],
)
def test_orders(program: str, reduced: bool, kind: str) -> None:
    play(kind, [program] * 3, replace(CASE, reduced=reduced))


@pytest.mark.parametrize("kind", ["direct", "fake"])
def test_ranks_call_hooks_in_their_own_order(kind: str) -> None:
    play(
        kind,
        [
            "D D d0 d1 C0 C1 c0 c1 D D d2 d3 C2 C3 c3 c2",
            "D D d1 d0 C0 C1 c1 c0 D d2 D C2 d3 C3 c2 c3",
            "D d0 D d1 C0 c0 C1 c1 D D d3 d2 C2 c2 C3 c3",
        ],
    )


@pytest.mark.parametrize("kind", ["direct", "fake"])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    ranks=st.integers(1, 3),
    collectives=st.lists(st.integers(0, 2), min_size=1, max_size=14),
    seeds=st.lists(st.integers(0, 1 << 20), min_size=3, max_size=3),
    reduced=st.booleans(),
)
def test_any_order(kind: str, ranks: int, collectives: list[int], seeds: list[int], reduced: bool) -> None:
    programs = [program_of(seeds[rank], collectives) for rank in range(ranks)]
    play(kind, programs, replace(CASE, reduced=reduced), seed=seeds[0])


@pytest.mark.parametrize("seed", range(3))
def test_space_is_free_only_when_nothing_can_be_repeated_into_it(seed: int) -> None:
    """Rank 2 pauses after combine 0, whose writes its NIC goes on repeating; the others run ahead as far as they may.

    Combine 2 uses the space of combine 0, where rank 1's rows now lie where rank 2's were. Rank 0 must not offer it to
    rank 1 because combine 0 is read, but only once rank 2 has sent combine 1, which it does when combine 0 is complete.
    """
    case = replace(CASE, ranks=3, experts=9, counts=(4,), hidden=1024)
    late = Adversary(duplicate=0.5, linger=0.995)
    with FakeGroup(
        3, adversary=late, seed=seed, settings=Settings(timeout=20.0), mapped=lambda a, b: a < 2 and b < 2
    ) as group:

        def body(runtime: Any) -> None:
            player = Player(LowLatency(runtime), runtime.rank, case, routings={0: "last", 1: "far"})
            player.play("D d0 D d1 C0 c0")
            if runtime.rank == 2:
                time.sleep(0.1)
            player.play("C0 C1 c1 c2")

        group.run(body)


def test_third_in_flight_is_refused_before_anything_moves() -> None:
    case = replace(CASE, ranks=2, experts=6)

    def body(runtime: Any) -> None:
        player = Player(LowLatency(runtime), runtime.rank, case)
        player.play("D D")
        with pytest.raises(ConfigError, match="at most two"):
            player.dispatch()
        player.play("d1")
        with pytest.raises(ConfigError, match="at most two"):
            player.dispatch()
        player.play("d0 C0 C1")
        with pytest.raises(ConfigError, match="at most two"):
            player.combine(0)
        player.play("c0 c1 D d2 C2 c2")

    DirectGroup(2).run(body)


def test_calling_a_hook_again_does_nothing() -> None:
    case = replace(CASE, ranks=2, experts=6)

    def body(runtime: Any) -> None:
        player = Player(LowLatency(runtime), runtime.rank, case)
        player.play("D d0 D d1 D d0 d2 C2 c0 C1 c0 c1")
        assert [record[0] for record in runtime.records] == ["ll_dispatch"] * 3 + ["ll_combine"] * 2

    DirectGroup(2).run(body)


def test_returned_rows_live_as_long_as_they_are_held() -> None:
    """Memory is used again only when the caller has dropped every tensor over it."""
    case = replace(CASE, ranks=2, experts=6)

    def body(runtime: Any) -> None:
        player = Player(LowLatency(runtime), runtime.rank, case)
        addresses = set()
        for number in range(8):
            player.play(f"D d{number}")
            addresses.add(player.dispatches[number]["rows"].data_ptr())
        assert len(addresses) == 8
        for number in range(8):
            player.dispatch_hook(number)
        held = player.dispatches[0]["rows"][0, :1]
        before = held.clone()
        player.dispatches.clear()
        for number in range(8):
            player.play(f"D d{number}")
            addresses.add(player.dispatches[number]["rows"].data_ptr())
            player.dispatches[number]["rows"] = None
        assert len(addresses) < 12
        assert torch.equal(held, before)

    DirectGroup(2).run(body)
