"""Bits of laps and parities, and rules of kernels for devices, taken out of the source: compiled, and noticed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
sources = pytest.importorskip("tests.ptx.faults.sources", reason="needs Triton")

from tests.ptx.faults.failures import FAILURES  # noqa: E402
from tests.ptx.faults.judge import notices, raised  # noqa: E402
from tests.ptx.faults.lies import LIES  # noqa: E402
from tests.ptx.faults.scenes import LAPS, SCENES, TWO_COMBINES, WITHIN, Play  # noqa: E402
from tests.ptx.product.test_low_latency import compiled  # noqa: E402
from tests.rules.device_mutants import DEVICE_MUTANTS  # noqa: E402

_LAYER, _LAYERS = SCENES[0].play, SCENES[2].play
#: Two of one kernel run one after the other.
_TOGETHER = next(scene.play for scene in SCENES if scene.name == "two in flight")
#: Those of layers, and of two in flight.
_SHOWING = [scene.play for scene in SCENES[:8]]
#: What shows that a kernel does not hold a rule.
RULES: dict[str, Play] = {
    "low latency: a receive waits for every unmasked peer": _LAYER,
    "a wait ends when the sticky error is set": FAILURES["released: a dispatch"],
    "low latency: the send kernel counts its message": _LAYERS,
    "low latency: an expert id is compared before it is cut to 32 bits": FAILURES["ids of no expert"],
    "low latency: the host is told of an expert id out of range": FAILURES["ids of no expert"],
    "low latency: a message of another shape is refused": FAILURES["another shape"],
}
_OF_THE_HOST = "the host's rule: ranks on the machine have no control plane"
ELSEWHERE = {
    "a waiting kernel leaves memory of the host alone most of the time": "a matter of speed: no result differs",
    "low latency: the host releases kernels that wait for a peer which wants other windows": _OF_THE_HOST,
    "control: the host releases kernels that wait for a peer which is in the other mode": _OF_THE_HOST,
}
"""Rules that the model machine cannot show, and why not."""


def test_the_same_sources_serve(tmp_path: Path) -> None:
    """What is compiled of them is right, so that a mutant fails by its mutation."""
    with sources.serving({}, tmp_path):
        _LAYER(compiled("sequential"), "sequential", 0)


def test_every_change_finds_what_it_changes() -> None:
    every = sources.LAPS | sources.PARITIES | sources.STAGING | sources.STAMPS | sources.READERS
    for changes in every.values():
        assert sources.changed(*changes)


@pytest.mark.model
@pytest.mark.parametrize("mutant", sources.LAPS)
def test_every_lap_bit(mutant: str, tmp_path: Path) -> None:
    """By the first seed, on the memory that is quick."""
    with sources.serving(sources.changed(*sources.LAPS[mutant]), tmp_path):
        assert raised(lambda: LAPS.play(compiled("sequential"), "sequential", 0))


@pytest.mark.model
def test_laps_as_they_are() -> None:
    for seed in range(10 * WITHIN):
        LAPS.play(compiled("sequential"), "sequential", seed)


@pytest.mark.model
@pytest.mark.parametrize("mutant", sources.PARITIES)
def test_every_parity(mutant: str, tmp_path: Path) -> None:
    with sources.serving(sources.changed(*sources.PARITIES[mutant]), tmp_path):
        assert notices(_SHOWING)


@pytest.mark.model
@pytest.mark.parametrize("mutant", sources.STAGING)
def test_every_wait_for_staging(mutant: str, tmp_path: Path) -> None:
    with sources.serving(sources.changed(*sources.STAGING[mutant]), tmp_path):
        assert notices([TWO_COMBINES.play])


@pytest.mark.model
def test_two_combines_as_they_are() -> None:
    for seed in range(10 * WITHIN):
        TWO_COMBINES.play(compiled("weak"), "weak", seed)


@pytest.mark.model
@pytest.mark.parametrize("mutant", sources.STAMPS)
def test_every_stamp(mutant: str, tmp_path: Path) -> None:
    with sources.serving(sources.changed(*sources.STAMPS[mutant]), tmp_path):
        assert notices([_LAYER, _TOGETHER])


@pytest.mark.model
@pytest.mark.parametrize("mutant", sources.READERS)
def test_every_reader_of_a_word(mutant: str, tmp_path: Path) -> None:
    with sources.serving(sources.changed(*sources.READERS[mutant]), tmp_path):
        assert notices([play for name, play in LIES.items() if name.startswith("a word that changes")])


@pytest.mark.model
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("memory", ["sequential", "weak"])
def test_failures_as_they_are(memory: str, failure: str) -> None:
    for seed in range(10 * WITHIN if memory == "weak" else WITHIN):
        FAILURES[failure](compiled(memory), memory, seed)


def test_every_rule_of_low_latency_is_here() -> None:
    assert {rule for rule in DEVICE_MUTANTS if not rule.startswith("normal mode: ")} == {*RULES, *ELSEWHERE}


@pytest.mark.model
@pytest.mark.parametrize("rule", RULES)
def test_a_kernel_without_a_rule(rule: str, tmp_path: Path) -> None:
    with sources.serving(sources.without(rule, DEVICE_MUTANTS), tmp_path):
        assert notices([RULES[rule]])
