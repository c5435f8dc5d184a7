"""Kernels of normal mode without what they hold: compiled, and noticed on the model machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
sources = pytest.importorskip("tests.ptx.faults.sources", reason="needs Triton")

from tests.ptx.faults.judge import notices  # noqa: E402
from tests.ptx.faults.normal_scenes import SCENES  # noqa: E402
from tests.ptx.faults.normal_sources import EQUIVALENT, FAULTS, RULES  # noqa: E402
from tests.ptx.product.test_low_latency import compiled  # noqa: E402
from tests.rules.device_mutants import DEVICE_MUTANTS  # noqa: E402
from tests.rules.mutation import markers  # noqa: E402
from tests.rules.node_mutants import NODE_MUTANTS  # noqa: E402

#: A fault of normal mode is noticed within so many seeds; the kernels as they are pass ten times as many.
WITHIN = 1


def test_every_change_finds_what_it_changes() -> None:
    for change, _ in (FAULTS | EQUIVALENT).values():
        assert sources.changed(change)


def test_every_rule_of_normal_mode_is_here() -> None:
    """So is each mutant between nodes; what both modes share is low latency's."""
    marked = markers(["kernels/triton"])
    own = {rule for rule, path in marked if path.stem == "routing" or path.stem.startswith("normal")}
    assert own | {*NODE_MUTANTS} == {*RULES}
    assert {*SCENES} == {fault.scene for fault in FAULTS.values()} | {*RULES.values()}


@pytest.mark.model
@pytest.mark.parametrize("name", FAULTS)
def test_is_noticed(name: str, tmp_path: Path) -> None:
    with sources.serving(sources.changed(FAULTS[name].change), tmp_path, "normal"):
        assert notices([SCENES[FAULTS[name].scene]], WITHIN)


@pytest.mark.model
@pytest.mark.parametrize("rule", RULES)
def test_a_kernel_without_a_rule(rule: str, tmp_path: Path) -> None:
    table = NODE_MUTANTS if rule in NODE_MUTANTS else DEVICE_MUTANTS
    with sources.serving(sources.without(rule, table), tmp_path, "normal"):
        assert notices([SCENES[RULES[rule]]], WITHIN)


@pytest.mark.model
@pytest.mark.parametrize("scene", SCENES)
def test_the_same_sources_serve(scene: str, tmp_path: Path) -> None:
    """What is compiled of them is right, so that a mutant fails by its mutation."""
    with sources.serving({}, tmp_path, "normal"):
        SCENES[scene](compiled("weak"), "weak", 0)


@pytest.mark.model
@pytest.mark.parametrize("scene", ["mapped", "proxied"])
@pytest.mark.parametrize("name", EQUIVALENT)
def test_what_a_sentence_excuses_is_not_noticed(name: str, scene: str, tmp_path: Path) -> None:
    with sources.serving(sources.changed(EQUIVALENT[name][0]), tmp_path, "normal"):
        SCENES[scene](compiled("weak"), "weak", 0)


@pytest.mark.model
@pytest.mark.parametrize("seed", range(10 * WITHIN))
@pytest.mark.parametrize("scene", SCENES)
def test_as_they_are(scene: str, seed: int) -> None:
    SCENES[scene](compiled("weak"), "weak", seed)
