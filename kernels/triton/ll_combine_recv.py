"""Low-latency combine, receiving side: each token is the sum of the rows that came back for it."""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import DTYPE_F32
from .context import (
    R_RETURN_BASE,
    S_ARRIVALS,
    S_COMBINE_AHEAD,
    S_COMBINE_READ,
    S_COMBINE_RECV,
    S_COMBINE_RECV_STEP,
    S_ROUTE_RETURNS,
    has_failed,
    is_live,
    route_table,
    window_address,
)
from .ll_counts import mark_read
from .quant import load_together, store_floats
from .routing import HEADER
from .words import arrives_last, floats, int64s, peek

_F32 = tl.constexpr(DTYPE_F32)


# what the caller may pass with any alignment or length has one compiled code: none is compiled amid an operation
@triton.jit(do_not_specialize=["weights", "tokens"])
def sum_rows(
    context: tl.int64,
    state: tl.int64,
    route: tl.int64,
    ticket: tl.int64,
    weights: tl.int64,
    out: tl.int64,
    tokens: tl.int64,
    row_bytes: tl.int64,
    HIDDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    REDUCED: tl.constexpr,
    TOPK: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Sum the rows of a combine that has arrived; grid (ceil(tokens / ROWS), at least 1; ceil(HIDDEN / BLOCK)). Compile
    without fused multiply-add.

    Reduced form: plain float32 sum over ranks, ascending. Expanded form: weighted float32 sum over top-k slots in slot
    order. Rounded once; a token without experts is zero, and after a failure every token is.

    Args:
        weights: float32[tokens, TOPK], used in the expanded form.
        out: [tokens, HIDDEN] of DTYPE, on a multiple of 16 bytes.
        TOGETHER: slots whose rows are asked for together: a program waits once for their places and once for them.
    """
    tokens = tokens.to(tl.int64)
    width: tl.constexpr = 4 if DTYPE == _F32 else 2
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    wanted = (token < tokens)[:, None] & (value < HIDDEN)
    target = out + token * (HIDDEN * width)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    failed = has_failed(context)
    number = peek(ticket)
    if failed == 0:
        region = window_address(context) + peek(state + S_COMBINE_RECV)
        region += (number & 1) * peek(state + S_COMBINE_RECV_STEP) + HEADER
        returns = route + peek(state + S_ROUTE_RETURNS)
        for first in range(0, TOPK, TOGETHER):
            sources, there, factors = (), (), ()
            for step in tl.static_range(TOGETHER):
                inside = (token < tokens) & (first + step < TOPK)
                at = token * TOPK + first + step
                entry = tl.load(int64s(returns + 8 * at), mask=inside, other=-1)
                rank = tl.where(entry >= 0, entry >> 32, 0)
                # of a rank that was lost since the dispatch nothing has come
                here = (entry >= 0) & is_live(context, rank)
                base = region + peek(route_table(context, route, R_RETURN_BASE, rank))
                sources += (base + tl.where(here, entry & 0xFFFFFFFF, 0) * row_bytes,)  # type: ignore[assignment]
                there += (here,)  # type: ignore[assignment]
                if not REDUCED:
                    factor = tl.load(floats(weights + 4 * at), mask=inside, other=0.0)
                    factors += (factor,)  # type: ignore[assignment]
            parts = load_together(sources, there, value, wanted, DTYPE, TOGETHER)
            for step in tl.static_range(TOGETHER):
                part = parts[step]
                if not REDUCED:
                    part = factors[step][:, None] * part
                total = tl.where(there[step][:, None], total + part, total)
    store_floats(target, value, total, wanted, DTYPE, BACKEND)
    if failed == 0:
        if arrives_last(state + S_ARRIVALS, tl.num_programs(0) * tl.num_programs(1), BACKEND):
            mark_read(state, S_COMBINE_READ, S_COMBINE_AHEAD, number)
