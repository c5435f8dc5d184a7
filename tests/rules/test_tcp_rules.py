"""Each rule that the tcp transport holds, taken out: its test must fail."""

from __future__ import annotations

import pytest

from tests.rules.mutant_copy import run_without_rules
from tests.rules.tcp_mutants import TCP_MUTANTS


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, int]:
    """Exit status of each rule's test without the rule."""
    return run_without_rules(request, "tests.rules.tcp_mutants", "TCP_MUTANTS")


@pytest.mark.mutants
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("rule", TCP_MUTANTS)
def test_the_test_of_tcp_fails_without_its_rule(rule: str, results: dict[str, int]) -> None:
    assert results[rule] == 1
