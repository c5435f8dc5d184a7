"""Each rule of kernels on a device, between nodes too, taken out: its test must fail, in Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest

from tests.rules.device_mutants import DEVICE_MUTANTS
from tests.rules.mutant_copy import run_without_rules
from tests.rules.node_mutants import NODE_MUTANTS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def without_device_rules(request: pytest.FixtureRequest) -> dict[str, int]:
    """Exit status of each rule's test without the rule."""
    return run_without_rules(request, "tests.rules.device_mutants", "DEVICE_MUTANTS")


@pytest.fixture(scope="module")
def without_node_rules(request: pytest.FixtureRequest) -> dict[str, int]:
    return run_without_rules(request, "tests.rules.node_mutants", "NODE_MUTANTS")


@pytest.mark.mutants
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("rule", DEVICE_MUTANTS)
def test_the_test_fails_without_its_rule(rule: str, without_device_rules: dict[str, int]) -> None:
    assert without_device_rules[rule] == 1


@pytest.mark.mutants
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("rule", NODE_MUTANTS)
def test_the_test_fails_without_its_rule_between_nodes(rule: str, without_node_rules: dict[str, int]) -> None:
    assert without_node_rules[rule] == 1
