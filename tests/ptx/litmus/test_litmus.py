"""The memory model reaches what PTX allows, and nothing that it forbids."""

from __future__ import annotations

import pytest

from tests.ptx.litmus import programs
from tests.ptx.litmus.litmus import Litmus
from tests.ptx.litmus.tests import ALL
from tests.ptx.memory.weak import Weak

#: what is allowed is reached within so many seeds; what is forbidden is looked for in fewer
REACHED_WITHIN, LOOKED_FOR = 100, 7


def weak() -> Weak:
    """As weak as it gets. Many tests race on purpose."""
    return Weak(stale=0.7, races="ignore")


@pytest.mark.parametrize("test", ALL, ids=lambda test: test.name.replace(" ", "-"))
def test_litmus(test: Litmus) -> None:
    wanted = test.allowed and not test.beyond
    found = programs.outcomes(test, range(REACHED_WITHIN if wanted else LOOKED_FOR), weak)
    assert bool(found[True]) == wanted, f"{test.outcome}: {found[True]} of {found.total()} runs"


def test_names_are_unique() -> None:
    assert len({test.name for test in ALL}) == len(ALL)
