"""The normal-mode kernels for CPU tensors as one object: ``kernels.interface.NormalKernels``."""

from __future__ import annotations

from typing import Any

from numba import types

from ...native.jit import compile_lock
from .normal_exchange import exchange
from .normal_layout import layout, route_rows
from .normal_notify import open_operation
from .normal_prepare import place, prepare

__all__ = ["CpuNormalKernels"]

#: Entry points (Numba dispatchers, which the decorator's type does not show) and how many int64 arguments each takes.
_ENTRY_POINTS: tuple[tuple[Any, int], ...] = (
    (layout, 8),
    (route_rows, 11),
    (prepare, 6),
    (open_operation, 5),
    (place, 3),
    (exchange, 6),
)


class CpuNormalKernels:
    """Compiled entry points. :meth:`warm` compiles them (or loads them from the cache) before time matters."""

    name = "cpu"
    layout = staticmethod(layout)
    route_rows = staticmethod(route_rows)
    prepare = staticmethod(prepare)
    open_operation = staticmethod(open_operation)
    place = staticmethod(place)
    exchange = staticmethod(exchange)

    def warm(self) -> None:
        """Compile everything for int64 arguments; of many ranks that start together one compiles, the others load."""
        with compile_lock(f"{len(_ENTRY_POINTS)} kernels of the normal mode"):
            for entry, arity in _ENTRY_POINTS:
                entry.compile((types.int64,) * arity)
