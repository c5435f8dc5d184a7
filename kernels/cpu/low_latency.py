"""The low-latency kernels for CPU tensors as one object: ``kernels.interface.LowLatencyKernels``."""

from __future__ import annotations

from typing import Any

from numba import types

from ...native.jit import compile_lock, compiled
from ...protocol.message import FORM_REDUCED
from ..blocks import low_latency as block
from .context import rank_count
from .ll_combine import combine_recv, combine_send
from .ll_dispatch import dispatch_recv, dispatch_send
from .ll_message import route_word
from .quant import quantise
from .routing import first_bad_id, route
from .words import get


@compiled
def _route(context: int, state: int, route_block: int, topk_idx: int) -> None:
    route(
        context,
        topk_idx,
        get(route_block, block.SENT_TOKENS),
        get(state, block.TOPK),
        get(state, block.EXPERTS) // rank_count(context),
        1 if get(route_block, block.FORM) == FORM_REDUCED else 0,
        route_word(context, route_block, block.STARTS, 0),
        route_word(context, route_block, block.COUNTS, 0),
        route_word(context, route_block, block.PAIRS, 0),
        get(route_block, block.ORDER),
        get(route_block, block.RETURNS),
    )


#: Entry points (Numba dispatchers, which the decorator's type does not show) and how many int64 arguments each takes.
_ENTRY_POINTS: tuple[tuple[Any, int], ...] = (
    (first_bad_id, 3),
    (_route, 4),
    (quantise, 9),
    (dispatch_send, 12),
    (dispatch_recv, 15),
    (combine_send, 10),
    (combine_recv, 12),
)


class CpuLowLatencyKernels:
    """Compiled entry points. :meth:`warm` compiles them (or loads them from the cache) before time matters."""

    name = "cpu"
    first_bad_id = staticmethod(first_bad_id)
    route = staticmethod(_route)
    quantise = staticmethod(quantise)
    dispatch_send = staticmethod(dispatch_send)
    dispatch_recv = staticmethod(dispatch_recv)
    combine_send = staticmethod(combine_send)
    combine_recv = staticmethod(combine_recv)

    def warm(self) -> None:
        """Compile everything for int64 arguments; of many ranks that start together one compiles, the others load."""
        with compile_lock(f"{len(_ENTRY_POINTS)} kernels of the low-latency mode"):
            for entry, arity in _ENTRY_POINTS:
                entry.compile((types.int64,) * arity)
