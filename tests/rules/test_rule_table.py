"""The page says which test holds which clause of the rules of the stream: that must be so."""

from __future__ import annotations

import ast
import functools

from tests.rules import rule_table
from tests.rules.rule_table import CLAUSES, MUTANTS, NAMES, PAGE, ROOT, RULES, TCP_MUTANTS


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()
    assert rule_table.render(page) == page, "run python -m tests.rules.rule_table --write"


def test_every_mutant_is_a_clause_once_and_every_rule_has_one() -> None:
    clauses = [clause for clauses in CLAUSES.values() for clause in clauses]
    assert sorted(clauses) == sorted([*RULES, *MUTANTS, *TCP_MUTANTS])
    assert {rule for rule, *_ in rule_table.rows()} == set(NAMES) == set(range(1, 11))


@functools.cache
def names_of(path: str) -> set[str]:
    """The functions and classes of a file."""
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_holders_and_tests_exist() -> None:
    for _, clause, holder, test, _ in rule_table.rows():
        for place in (holder, test):
            path, _, name = place.partition(": ")
            assert name in names_of(path), f"{clause}: {path} has no {name}"
