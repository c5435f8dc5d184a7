"""Real processes as ranks. The cases of ``tests/kernels`` serve here too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

# after the path: rank processes inherit it and import the cases
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Rank processes shared by all tests; a test that kills one uses ``mortal_ranks``."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture
def mortal_ranks() -> Iterator[Ranks]:
    """Rank processes for one test."""
    pool = Ranks()
    yield pool
    pool.close()
