"""Each rule of kernels on a device, between nodes too, taken out: its test must fail, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from device_mutants import DEVICE_MUTANTS
from kernel_mutants import Mutant, run_without_rules, write_copy
from node_mutants import NODE_MUTANTS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


#: By the module that holds them: the name of the table there, and the table.
TABLES: dict[str, tuple[str, dict[str, Mutant]]] = {
    "device_mutants": ("DEVICE_MUTANTS", DEVICE_MUTANTS),
    "node_mutants": ("NODE_MUTANTS", NODE_MUTANTS),
}


@pytest.mark.parametrize("module", TABLES)
def test_every_rule_is_found_in_the_source(module: str, tmp_path: Path) -> None:
    write_copy(tmp_path, TABLES[module][1])


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Exit status of each rule's test without the rule."""
    name, table = TABLES[request.param]
    return run_without_rules(tmp_path_factory.mktemp("mutants"), request.param, name, table, ("system",))


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    ("results", "rule"),
    [(module, rule) for module, (_, table) in TABLES.items() for rule in table],
    indirect=["results"],
)
def test_the_test_fails_without_its_rule(rule: str, results: dict[str, int]) -> None:
    assert results[rule] == 1
