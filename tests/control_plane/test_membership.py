"""Survivors agree on one group: whatever fails while they do, no two of them act on different ones."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.control_plane.membership_model import Crash, Cut, Fault, GiveUp, Stall, World, crowded_world

#: Far more than the agreement may take.
_LONG = 6.0


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("killed", [1, 2])
def test_the_dead_are_left_out_and_nobody_else(ranks: int, killed: int) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        dead = frozenset(draw.sample(range(ranks), min(killed, ranks - 1)))
        world = World(ranks, [Crash(rank, 0.01 + draw.random() * 0.02) for rank in dead], seed)
        world.run(0.3)
        assert world.check_one_group() == frozenset(range(ranks)) - dead
        assert len(world.going_on) == ranks - len(dead)


@pytest.mark.parametrize("ranks", [16, 48])
def test_a_death_costs_each_pair_a_few_notes(ranks: int) -> None:
    """Also where they are slow. Were everybody to tell all others what it hears, hundreds of ranks would be too slow to
    agree in time: these 48 said 14 times something to each, with 225 reports."""
    world = World(ranks, [Crash(ranks - 1, 0.01)], 1, delay=0.03)
    world.run(0.6)
    assert world.check_one_group() == frozenset(range(ranks - 1))
    pairs = (ranks - 1) * (ranks - 2)
    assert world.notes <= 5 * pairs
    assert world.reports <= 4 * pairs


@pytest.mark.parametrize("stopped", range(4))
def test_of_a_silent_rank_the_root_is_named(stopped: int) -> None:
    """The others wait for each other, and in the end for the stopped one; each gives up at a time of its own."""
    for seed in range(20):
        draw = random.Random(seed)
        others = [rank for rank in range(4) if rank != stopped]
        draw.shuffle(others)
        waits = dict(zip(others, [*others[1:], stopped], strict=True))
        first = draw.choice(others)
        world = World(4, [Stall(stopped, 0, 3.0), GiveUp(first, waits[first], 0.1)], seed, waits=waits)
        world.run(1.0)
        assert world.check_one_group() == frozenset(others)
        world.run(4.0)
        assert world.going_on == sorted(others)
        assert "gone on without it" in world.ranks[stopped].machine.stopped


def test_a_rank_that_wakes_at_the_deadline_splits_nobody() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        waits = {0: 1, 1: 3, 2: 1}
        world = World(
            4, [Stall(3, 0, 0.1 + draw.random() * 0.5), GiveUp(0, 1, 0.1), GiveUp(2, 1, 0.1 + draw.random() * 0.4)],
            seed, waits=waits,
        )  # fmt: skip
        world.run(3.0)
        assert world.check_one_group() == frozenset({0, 1, 2})


@pytest.mark.parametrize("pair", [(0, 1), (0, 3), (2, 3)])
def test_a_cut_connection_costs_the_higher_rank(pair: tuple[int, int]) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        world = World(4, [Cut(pair, 0.1, (draw.random() * 0.3, draw.random() * 0.3))], seed)
        world.run(2.5)
        assert world.check_one_group() == frozenset(range(4)) - {max(pair)}


def _partition(sides: tuple[list[int], list[int]], at: float, draw: random.Random) -> list[Fault]:
    return [Cut((a, b), at, (draw.random() * 0.2, draw.random() * 0.2)) for a in sides[0] for b in sides[1]]


@pytest.mark.parametrize(
    ("sides", "left"),
    [
        (([0, 1], [2, 3, 4]), {2, 3, 4}),
        (([0, 3], [1, 2]), {0, 3}),
        (([0], [1, 2]), {1, 2}),
        (([0], [1]), {0}),
        (([1, 2, 3], [0]), {1, 2, 3}),
    ],
)
def test_the_larger_part_goes_on(sides: tuple[list[int], list[int]], left: set[int]) -> None:
    for seed in range(10):
        draw = random.Random(seed)
        world = World(sum(map(len, sides)), _partition(sides, 0.05, draw), seed)
        world.run(3.0)
        assert set(world.going_on) == left
        assert world.check_one_group() == left


@st.composite
def _worlds(draw: st.DrawFn) -> World:
    ranks = draw(st.integers(2, 6))
    rank = st.integers(0, ranks - 1)
    at = st.floats(0.0, 0.6)
    faults: list[Fault] = []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["crash", "crash", "cut", "stall", "give up", "part"]))
        one = draw(rank)
        other = draw(rank.filter(lambda peer, one=one: peer != one))
        when = draw(at)
        if kind == "crash":
            faults.append(Crash(one, when, draw(st.integers(0, 8))))
        elif kind == "cut":
            faults.append(Cut((one, other), when, (draw(at), draw(at))))
        elif kind == "stall":
            faults.append(Stall(one, when, draw(st.floats(0.05, 1.5))))
        elif kind == "give up":
            faults.append(GiveUp(one, other, when))
        else:
            side = draw(st.sets(rank, min_size=1, max_size=ranks - 1))
            faults += [Cut((a, b), when, (draw(at), draw(at))) for a in side for b in range(ranks) if b not in side]
    waits = draw(st.dictionaries(rank, rank))
    delay = draw(st.sampled_from([0.001, 0.02, 0.15]))
    return World(
        ranks, faults, draw(st.integers(0, 1 << 30)), delay=delay, waits={a: b for a, b in waits.items() if a != b}
    )


@settings(max_examples=settings.default.max_examples // 2)
@given(_worlds())
def test_no_two_groups_are_ever_acted_on(world: World) -> None:
    world.run(_LONG)
    world.check_one_group()


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 3000), marks=pytest.mark.long)])
def test_several_faults_within_one_agreement(seeds: range) -> None:
    for seed in seeds:
        world = crowded_world(seed)
        world.run(1.5)
        world.check_one_group()
