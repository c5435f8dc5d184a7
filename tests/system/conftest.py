"""Real processes as ranks. The cases of ``tests/kernels`` serve here too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks


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
