"""Families of tests with several axes: ``make test`` takes a diagonal, ``make test-combinations`` the rest."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["diagonal", "first_of"]


def diagonal(*axes: Iterable[Any]) -> list[Any]:
    """Parameters of every combination. Only as many as it takes for each value of each axis to occur stay without
    the marker ``combinations``."""
    values = [list(axis) for axis in axes]
    kept = {tuple(step % len(axis) for axis in values) for step in range(max(map(len, values)))}
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(values, places, strict=True)),
            marks=() if places in kept else pytest.mark.combinations,
        )
        for places in itertools.product(*(range(len(axis)) for axis in values))
    ]


def first_of(*cases: Any) -> list[Any]:
    """``cases`` of a test that takes seconds: only the first stays without the marker ``combinations``. A case that is
    a tuple gives several parameters."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=() if row is rows[0] else pytest.mark.combinations) for row in rows]
