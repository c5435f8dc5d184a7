"""The low-latency kernels for CPU tensors: what the host calls, and how it is compiled before time matters."""

from __future__ import annotations

import functools
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
from .routing import first_bad_id
from .routing import route as _fill_lists
from .words import get

__all__ = [
    "combine_recv",
    "combine_send",
    "dispatch_recv",
    "dispatch_send",
    "first_bad_id",
    "quantise",
    "route",
    "warm",
]


@compiled
def route(context: int, state: int, route_block: int, topk_idx: int) -> None:
    """Fill the lists of a route block from int64[tokens, K] ids."""
    _fill_lists(
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


#: Numba dispatchers, which the decorator's type does not show, and how many int64 arguments each takes.
_ENTRY_POINTS: tuple[tuple[Any, int], ...] = (
    (first_bad_id, 3),
    (route, 4),
    (quantise, 9),
    (dispatch_send, 12),
    (dispatch_recv, 15),
    (combine_send, 10),
    (combine_recv, 12),
)


@functools.cache
def warm() -> None:
    """Compile everything for int64 arguments; of many ranks that start together one compiles, the others load."""
    with compile_lock(f"{len(_ENTRY_POINTS)} kernels of the low-latency mode"):
        for entry, arity in _ENTRY_POINTS:
            entry.compile((types.int64,) * arity)
