"""Small groups of entry points, which processes of ``uccl-ep warm`` find by the names of these functions."""

from __future__ import annotations

from uccl_ep_serving.native.failure import STICKY_ERROR
from uccl_ep_serving.native.groups import Group
from uccl_ep_serving.native.jit import compiled


@compiled
def twice(value: int) -> int:
    """Twice as much."""
    return value + value


@compiled
def raises(value: int) -> int:
    """What no compiled function may do."""
    if value > 3:
        raise ValueError(value)
    return value


def small() -> list[Group]:
    """Two that compile."""
    return [Group("first", twice), Group("second", twice)]


def broken() -> list[Group]:
    """One that does not compile, between two that do."""
    return [Group("first", twice), Group("broken", raises), Group("second", twice)]


def real() -> list[Group]:
    """The smallest one of the product."""
    return [STICKY_ERROR]
