"""Rules are marked in the source: each marker has a mutant and each mutant a marker, and every mutated file parses."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from tests.rules.device_mutants import DEVICE_MUTANTS
from tests.rules.fuzz_mutants import FUZZ_MUTANTS, Check
from tests.rules.kernel_mutants import MUTANTS
from tests.rules.mutation import Mutant, Rules, find, markers, mutated
from tests.rules.nic_mutants import NIC_MUTANTS
from tests.rules.node_mutants import NODE_MUTANTS
from tests.rules.proxy_mutants import RULES
from tests.rules.tcp_mutants import TCP_MUTANTS

TABLES: dict[str, Rules[Any]] = {
    "kernels": MUTANTS,
    "device": DEVICE_MUTANTS,
    "nodes": NODE_MUTANTS,
    "nics": NIC_MUTANTS,
    "proxy": RULES,
    "tcp": TCP_MUTANTS,
    "fuzz": FUZZ_MUTANTS,
}


def test_every_marker_has_a_mutant_and_every_mutant_a_marker() -> None:
    assert sorted(markers()) == sorted(item for table in TABLES.values() for item in find(table).items())


@pytest.mark.parametrize("name", TABLES)
def test_every_mutated_file_parses(name: str) -> None:
    files = find(TABLES[name])
    ways = {rule: mutant.way if isinstance(mutant, Mutant | Check) else mutant for rule, mutant in TABLES[name].items()}
    sources = mutated(ways, files, 1 << 40)
    assert sources.keys() == set(files.values())
    for path, source in sources.items():
        ast.parse(source, str(path))
