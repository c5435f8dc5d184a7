"""The low-latency kernels for CPU tensors: what the host calls."""

from __future__ import annotations

from ...native.groups import Group
from ...native.jit import compiled
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
    "LOW_LATENCY",
    "combine_recv",
    "combine_send",
    "dispatch_recv",
    "dispatch_send",
    "first_bad_id",
    "quantise",
    "route",
]


@compiled
def route(context: int, route_block: int, topk_idx: int) -> None:
    """Fill the lists of a route block from int64[tokens, K] ids."""
    _fill_lists(
        context,
        topk_idx,
        get(route_block, block.SENT_TOKENS),
        get(route_block, block.TOPK),
        get(route_block, block.EXPERTS) // rank_count(context),
        1 if get(route_block, block.FORM) == FORM_REDUCED else 0,
        route_word(context, route_block, block.STARTS, 0),
        route_word(context, route_block, block.COUNTS, 0),
        route_word(context, route_block, block.PAIRS, 0),
        get(route_block, block.ORDER),
        get(route_block, block.RETURNS),
    )


#: What the host calls once a dispatch is known to be right.
LOW_LATENCY = Group("low-latency mode", route, quantise, dispatch_send, dispatch_recv, combine_send, combine_recv)
