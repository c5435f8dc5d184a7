"""Each rule that the NIC transports' posting and polling hold, taken out: its test must fail."""

from __future__ import annotations

import pytest

from tests.rules.mutant_copy import run_without_rules
from tests.rules.nic_mutants import NIC_MUTANTS


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, int]:
    """Exit status of each rule's test without the rule."""
    return run_without_rules(request, "tests.rules.nic_mutants", "NIC_MUTANTS")


@pytest.mark.mutants
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("rule", NIC_MUTANTS)
def test_the_test_of_a_nic_fails_without_its_rule(rule: str, results: dict[str, int]) -> None:
    assert results[rule] == 1
