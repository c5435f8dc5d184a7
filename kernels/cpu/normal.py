"""The normal-mode kernels for CPU tensors: what the host calls, and how it is compiled before time matters."""

from __future__ import annotations

import functools
from typing import Any

from numba import types

from ...native.jit import compile_lock
from .normal_exchange import exchange, exchange_nodes
from .normal_open import open_operation, place, prepare, prepare_nodes
from .routing import layout, route_nodes, route_rows

__all__ = [
    "exchange",
    "exchange_nodes",
    "layout",
    "open_operation",
    "place",
    "prepare",
    "prepare_nodes",
    "route_nodes",
    "route_rows",
    "warm",
    "warm_nodes",
]

#: Numba dispatchers, which the decorator's type does not show, and how many int64 arguments each takes.
_ENTRY_POINTS: tuple[tuple[Any, int], ...] = (
    (layout, 8),
    (route_rows, 11),
    (prepare, 4),
    (open_operation, 5),
    (place, 3),
    (exchange, 6),
)
_BETWEEN_NODES: tuple[tuple[Any, int], ...] = (
    (route_nodes, 7),
    (prepare_nodes, 6),
    (exchange_nodes, 6),
)


@functools.cache
def warm() -> None:
    """Compile for int64 arguments what every group needs; of many ranks that start together one compiles, the others
    load."""
    _compile(_ENTRY_POINTS, "kernels of the normal mode")


@functools.cache
def warm_nodes() -> None:
    """The same for groups of several nodes."""
    _compile(_BETWEEN_NODES, "kernels of the normal mode between nodes")


def _compile(entries: tuple[tuple[Any, int], ...], what: str) -> None:
    with compile_lock(f"{len(entries)} {what}"):
        for entry, arity in entries:
            entry.compile((types.int64,) * arity)
