"""When a direction is claimed: never more than one time in twenty of equals as this kind of machine measures them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uccl_ep_serving.compare.statistics import compare_paired

#: Ours and MPI, each opened three times by ranks with a core each, the third made 5 % slower: benchmarks/verdicts.py.
QUIET = Path(__file__).parents[2] / "benchmarks" / "results" / "verdicts.json"
#: Two equal pairs (ours over shm, gloo) on a busy machine with two cores: microseconds a layer of the slowest rank, by
#: pair, one of it, start and round. Recorded with: uccl-ep compare --backends uccl_ep:shm,uccl_ep:shm,gloo,gloo
#: --tokens 16 --hidden 256 --experts 8 --topk 2 --repeat 3 --rounds 30 --starts 12
RECORDED = Path(__file__).with_name("equal_samples.json")
RUNS = 40

_Samples = npt.NDArray[np.float64]

_times = st.floats(0.1, 1e6)
_paired = st.integers(2, 6).flatmap(
    lambda starts: st.integers(1, 12).flatmap(
        lambda rounds: st.tuples(
            *[st.lists(st.lists(_times, min_size=rounds, max_size=rounds), min_size=starts, max_size=starts)] * 2
        )
    )
)


def recorded() -> list[_Samples]:
    """[2, starts, rounds] of each pair."""
    return [np.asarray(pair) for pair in json.loads(RECORDED.read_text())]


def draw(pair: _Samples, starts: int, generator: np.random.Generator) -> _Samples:
    """[2, starts, rounds]: some starts of a pair, its two sides exchanged where a coin says so."""
    chosen = pair[:, generator.choice(pair.shape[1], starts, replace=False)]
    flip = generator.random(starts) < 0.5
    return np.where(flip[None, :, None], chosen[::-1], chosen)


@pytest.mark.parametrize("starts", [3, 5])
@pytest.mark.parametrize("pair", [0, 1], ids=["uccl_ep:shm", "gloo"])
def test_equals_are_rarely_told_apart(pair: int, starts: int) -> None:
    generator = np.random.default_rng(starts)
    samples = recorded()[pair]
    claimed = sum(bool(compare_paired(*draw(samples, starts, generator)).direction) for _ in range(RUNS))
    assert claimed <= RUNS // 20


def verdicts_on(name: str, other: str, starts: int) -> list[str]:
    """Directions of RUNS comparisons of ``name`` with ``other`` as they were measured, each of some of the starts."""
    us = json.loads(QUIET.read_text())["equals"]["us"]
    a, b = np.asarray(us[name]), np.asarray(us[other])
    generator = np.random.default_rng(starts)
    chosen = [generator.choice(len(a), starts, replace=False) for _ in range(RUNS)]
    return [compare_paired(a[one], b[one]).direction for one in chosen]


@pytest.mark.parametrize("name", ["uccl_ep:direct", "mpi"])
@pytest.mark.parametrize("starts", [3, 5])
def test_a_backend_opened_again_is_rarely_told_apart(name: str, starts: int) -> None:
    """Nothing is exchanged here: whoever is opened or sampled after the other must not pay for that."""
    assert sum(map(bool, verdicts_on(name, f"{name}#2", starts))) <= RUNS // 20


@pytest.mark.parametrize("name", ["uccl_ep:direct", "mpi"])
def test_a_backend_made_five_percent_slower_is_told(name: str) -> None:
    for starts, least in ((5, 0.8), (8, 0.95)):
        found = verdicts_on(name, f"{name}#3", starts)
        assert set(found) <= {"faster", ""}
        assert found.count("faster") >= least * RUNS


def noise(starts: int, rounds: int, between: float, generator: np.random.Generator) -> _Samples:
    """[starts, rounds]: one side's noise that lasts over rounds, and what a start has for itself (``between``)."""
    wobble = generator.normal(0, 0.02, (starts, rounds))
    for number in range(1, rounds):
        wobble[:, number] += 0.7 * wobble[:, number - 1]
    return np.exp(wobble + generator.normal(0, between, (starts, 1)))


def test_five_percent_is_found_and_its_direction_is_right() -> None:
    generator = np.random.default_rng(0)
    load = noise(5, 40, 0.1, generator)
    found = []
    for _ in range(40):
        ours, theirs = (load * noise(5, 40, 0.005, generator) for _ in range(2))
        found.append(compare_paired(ours * 1.05, theirs).direction)
    assert set(found) <= {"slower", ""}
    assert found.count("slower") >= 36


def claims(effect: float, starts: int, runs: int) -> list[str]:
    """Directions of ``runs`` comparisons of ours, which takes ``effect`` times as long, where starts differ by 4 %."""
    generator = np.random.default_rng(starts)
    sides = [(noise(starts, 10, 0.03, generator) * effect, noise(starts, 10, 0.03, generator)) for _ in range(runs)]
    return [compare_paired(*side).direction for side in sides]


@pytest.mark.parametrize("starts", [3, 5, 12])
def test_equals_are_told_apart_one_time_in_twenty_however_many_starts(starts: int) -> None:
    """Of three starts a bootstrap alone claims a direction whenever all fall on one side: one time in four. The bound
    is four standard deviations above a twentieth of the runs."""
    runs = 200
    assert sum(map(bool, claims(1.0, starts, runs))) <= runs / 20 + 4 * math.sqrt(runs * 0.05 * 0.95)


def test_more_starts_tell_more() -> None:
    found = [claims(1.05, starts, 40) for starts in (3, 8, 20)]
    assert {word for one in found for word in one} <= {"slower", ""}
    assert [one.count("slower") for one in found] == sorted(one.count("slower") for one in found)
    assert found[-1].count("slower") >= 38


class TestAnyPairedSamples:
    @given(_paired)
    def test_exchanging_the_two_turns_the_answer_round(self, samples: Any) -> None:
        a, b = samples
        here, there = compare_paired(a, b), compare_paired(b, a)
        assert math.isclose(here.ratio, 1 / there.ratio, rel_tol=1e-9)
        assert {here.direction, there.direction} in ({""}, {"faster", "slower"})

    @given(_paired, st.floats(0.01, 100))
    def test_the_unit_does_not_matter(self, samples: Any, unit: float) -> None:
        a, b = samples
        scaled = [[[value * unit for value in start] for start in side] for side in (a, b)]
        here, there = compare_paired(a, b), compare_paired(*scaled)
        assert math.isclose(here.low, there.low, rel_tol=1e-6)
        assert math.isclose(here.high, there.high, rel_tol=1e-6)

    @given(_paired)
    def test_the_ratio_lies_in_its_interval_and_between_its_starts(self, samples: Any) -> None:
        one = compare_paired(*samples)
        assert one.low <= one.ratio * (1 + 1e-9)
        assert one.ratio <= one.high * (1 + 1e-9)
        assert min(one.by_start) <= one.ratio * (1 + 1e-9)
        assert one.ratio <= max(one.by_start) * (1 + 1e-9)

    @given(_paired)
    def test_a_rate_is_better_when_it_is_higher(self, samples: Any) -> None:
        as_time, as_rate = compare_paired(*samples), compare_paired(*samples, higher_is_better=True)
        assert (as_time.low, as_time.high) == (as_rate.low, as_rate.high)
        assert {as_time.direction, as_rate.direction} in ({""}, {"faster", "slower"})

    @given(st.lists(st.lists(_times, min_size=1, max_size=9), min_size=2, max_size=5))
    def test_a_backend_does_not_differ_from_itself(self, samples: Any) -> None:
        one = compare_paired(samples, samples)
        assert (one.ratio, one.low, one.high, one.direction) == (1, 1, 1, "")


class TestWords:
    @pytest.mark.parametrize(
        ("factor", "words"),
        [
            (0.88, r"faster: 12 % less time \(\d+ \.\. \d+ %\)"),
            (0.98, r"faster: 1\.8 % less time \(\d\.\d \.\. \d\.\d %\)"),
            (1.25, r"slower: 25 % more time \(\d+ \.\. \d+ %\)"),
            (1.0, r"no difference seen \(-\d \.\. \+\d %\)"),
            (0.2, r"faster: 80 % less time \(\d+ \.\. \d+ %\)"),
            (5.0, r"slower: 5\.0 x the time \([45]\.\d \.\. 5\.\d\)"),
        ],
    )
    def test_they_say_of_what_the_percentage_is_one(self, factor: float, words: str) -> None:
        wobble = np.array([[0.99, 1.0, 1.01], [1.0, 1.01, 0.99], [1.005, 1.015, 0.995]])
        one = compare_paired(wobble * factor, np.ones((3, 3)))
        assert re.fullmatch(words, one.words), one.words

    def test_a_wide_interval_does_not_say_that_two_are_alike(self) -> None:
        one = compare_paired([[1.0], [1.4], [0.8]], [[1.0]] * 3)
        assert one.words.startswith("cannot tell (")

    def test_rates_are_no_times(self) -> None:
        one = compare_paired([[110.0], [111.0], [112.0]], [[100.0]] * 3, higher_is_better=True)
        assert one.words.startswith("faster: 11 % higher rate")

    @pytest.mark.parametrize(
        ("a", "b", "words"),
        [
            ([[1.0]], [[1.0]], "1 starts"),
            ([[1.0], [1.0]], [[1.0]], "no pairs"),
            ([[1.0], [1.0, 2.0]], [[1.0], [1.0]], "no pairs"),
            ([[1.0], []], [[1.0], []], "without samples"),
            ([[1.0], [0.0]], [[1.0], [1.0]], "not positive"),
            ([[1.0], [math.nan]], [[1.0], [1.0]], "not positive"),
        ],
    )
    def test_what_is_no_pair_of_samples_is_refused(self, a: Any, b: Any, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            compare_paired(a, b)
