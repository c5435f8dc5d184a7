"""Each rule that kernels on a device hold between nodes, taken out: its test must fail, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from kernel_mutants import run_without_rules, write_copy
from node_mutants import NODE_MUTANTS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def test_every_rule_is_found_in_the_source(tmp_path: Path) -> None:
    write_copy(tmp_path, NODE_MUTANTS)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Exit status of each rule's test without the rule."""
    return run_without_rules(
        tmp_path_factory.mktemp("mutants"), "node_mutants", "NODE_MUTANTS", NODE_MUTANTS, ("system",)
    )


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("rule", NODE_MUTANTS)
def test_the_test_fails_without_its_rule(rule: str, results: dict[str, int]) -> None:
    assert results[rule] == 1
