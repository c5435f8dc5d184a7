"""Each rule of the stream that kernels or the host hold, taken out: its test must fail."""

from __future__ import annotations

import pytest

from tests.rules.kernel_mutants import MUTANTS
from tests.rules.mutant_copy import run_without_rules


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, int]:
    """Exit status of each rule's test without the rule."""
    return run_without_rules(request, "tests.rules.kernel_mutants", "MUTANTS")


@pytest.mark.mutants
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("rule", MUTANTS)
def test_the_test_fails_without_its_rule(rule: str, results: dict[str, int]) -> None:
    assert results[rule] == 1
