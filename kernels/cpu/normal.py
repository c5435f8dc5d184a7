"""The normal-mode kernels for CPU tensors as one object: ``kernels.interface.NormalKernels``."""

from __future__ import annotations

from typing import Any

from numba import types

from ...native.jit import compile_lock
from .normal_exchange import exchange
from .normal_layout import layout, row_lists
from .normal_notify import open_operation

__all__ = ["CpuNormalKernels"]

#: Entry points (Numba dispatchers, which the decorator's type does not show) and how many int64 arguments each takes.
_ENTRY_POINTS: tuple[tuple[Any, int], ...] = ((layout, 8), (row_lists, 5), (open_operation, 5), (exchange, 6))


class CpuNormalKernels:
    """Compiled entry points. :meth:`warm` compiles them (or loads them from the cache) before time matters."""

    name = "cpu"
    layout = staticmethod(layout)
    row_lists = staticmethod(row_lists)
    open_operation = staticmethod(open_operation)
    exchange = staticmethod(exchange)

    def warm(self) -> None:
        """Compile everything for int64 arguments; of many ranks that start together one compiles, the others load."""
        with compile_lock(f"{len(_ENTRY_POINTS)} kernels of the normal mode"):
            for entry, arity in _ENTRY_POINTS:
                entry.compile((types.int64,) * arity)
