"""Low-latency combine. Sending: the experts' rows return to each source, summed here when the weights are known; the
first kernel waits for space and places the messages, the second packs them, and its last program publishes. Receiving:
each token is the sum of the rows that came back for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import DTYPE_F32, FORM_REDUCED
from ...protocol.streams import LL_COMBINE
from .blocks import (
    P_ROUTE_BEFORE,
    P_ROUTE_PLACES,
    P_ROUTE_RETURNS,
    P_ROUTE_WEIGHTS,
    P_TOKENS,
    R_RECEIVED,
    R_RETURN_BASE,
    R_RETURN_FORM,
    R_RETURN_ROWS,
    R_RETURN_TO,
    S_ARRIVALS,
    S_COMBINE_AHEAD,
    S_COMBINE_NUMBER,
    S_COMBINE_READ,
    S_COMBINE_RECV,
    S_COMBINE_RECV_STEP,
    S_COMBINE_SEND,
    S_COMBINE_SEND_STEP,
    T_COMBINE_BASE,
    T_MESSAGE_AT,
    route_table,
    state_table,
)
from .context import has_failed, is_live, landing_window, rank_count
from .kernel import kernel
from .ll_counts import ack_combines, mark_read, wait_spaces
from .ll_dispatch import PLACE_EXPERT, PLACE_POSITION
from .ll_message import COMBINE_TAG, send_messages
from .quant import load_together, store_floats
from .routing import HEADER, place_messages
from .words import aligned, arrives_last, clock_ns, floats, int32s, int64s, peek, poke, settle

_COMBINE, _REDUCED, _F32 = tl.constexpr(LL_COMBINE), tl.constexpr(FORM_REDUCED), tl.constexpr(DTYPE_F32)


@kernel()
def prepare_combine(
    context: tl.int64,
    state: tl.int64,
    route: tl.int64,
    ticket: tl.int64,
    row_bytes: tl.int64,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Make the next combine message's space free and place the messages; grid (1,), one warp.

    ``ticket``: address of the int64 where the message number is stored, for the receive. ``row_bytes``: of a row on the
    wire.
    """
    if has_failed(context) == 0:
        start = clock_ns(BACKEND)
        number = peek(state + S_COMBINE_NUMBER)
        parity = number & 1
        poke(ticket, number)
        ranks = tl.arange(0, RANKS).to(tl.int64)
        inside = ranks < rank_count(context)
        base = tl.load(int64s(route_table(context, route, R_RETURN_BASE, ranks)), mask=inside, other=0)
        tl.store(int64s(state_table(context, state, T_COMBINE_BASE + parity, ranks)), base, mask=inside)
        rows = tl.load(int64s(route_table(context, route, R_RETURN_ROWS, ranks)), mask=inside, other=0)
        back = tl.load(int64s(route_table(context, route, R_RETURN_TO, ranks)), mask=inside, other=0)
        staging = peek(state + S_COMBINE_SEND) + parity * peek(state + S_COMBINE_SEND_STEP)
        region = peek(state + S_COMBINE_RECV) + parity * peek(state + S_COMBINE_RECV_STEP)
        place_messages(context, state, ranks, inside, rows * row_bytes + HEADER, staging, region + back)
        # the places are read again while waiting
        settle(BACKEND)
        ack_combines(context, state, start, LANES, BACKEND)
        wait_spaces(context, state, _COMBINE, start, LANES, BACKEND)


@triton.jit
def _expert_row(
    layout_range: tl.tensor, place: tl.tensor, source: tl.tensor, ranks: tl.tensor, capacity: tl.tensor
) -> tl.tensor:
    """Row of the experts' output, counted over all experts, that ``place`` names; 0 where there is none."""
    here = place >= 0
    expert = tl.where(here, place >> PLACE_EXPERT, 0).to(tl.int64)
    begin = peek(layout_range + 8 * (expert * ranks + source)) >> 32
    return tl.where(here, expert * capacity + begin + (place & PLACE_POSITION).to(tl.int64), 0)


@kernel()
def pack_combine(
    context: tl.int64,
    state: tl.int64,
    route: tl.int64,
    x: tl.int64,
    layout_range: tl.int64,
    row_bytes: tl.int64,
    HIDDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    TOPK: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Pack and publish the rows for every source; any grid (programs, R). Compile without fused multiply-add: product
    and sum are rounded separately, as everywhere else. Six arguments of a launch, eight constants.

    Args:
        x: experts' output [L, R * T, HIDDEN] of DTYPE in the layout of recv_x, on a multiple of 16 bytes.
        layout_range: int64[L, R] of the dispatch.
        TOGETHER: slots whose rows are loaded together.
    """
    if has_failed(context) == 0:
        source = tl.program_id(1).to(tl.int64)
        ranks, most = rank_count(context), peek(route + P_TOKENS)
        capacity = ranks * most
        tokens = peek(route_table(context, route, R_RECEIVED, source))
        width: tl.constexpr = 4 if DTYPE == _F32 else 2
        places = route + peek(route + P_ROUTE_PLACES) + 4 * source * most * TOPK
        first_row = peek(state_table(context, state, T_MESSAGE_AT, source)) + HEADER
        reduced = peek(route_table(context, route, R_RETURN_FORM, source)) == _REDUCED
        for lowest in range(tl.program_id(0).to(tl.int64) * ROWS, tokens, tl.num_programs(0).to(tl.int64) * ROWS):
            index = lowest + tl.arange(0, ROWS).to(tl.int64)
            inside = index < tokens
            if reduced:
                weights = route + peek(route + P_ROUTE_WEIGHTS) + 4 * source * most * TOPK
                target = first_row + index * row_bytes
                for column in range(0, HIDDEN, BLOCK):
                    value = column + tl.arange(0, BLOCK)[None, :]
                    wanted = inside[:, None] & (value < HIDDEN)
                    total = tl.zeros([ROWS, BLOCK], tl.float32)
                    for first in range(0, TOPK, TOGETHER):
                        sources, there, factors = (), (), ()
                        for step in tl.static_range(TOGETHER):
                            given = inside & (first + step < TOPK)
                            at = 4 * (index * TOPK + first + step)
                            place = tl.load(int32s(places + at), mask=given, other=-1)
                            factor = tl.load(floats(weights + at), mask=given, other=0.0)
                            row = _expert_row(layout_range, place, source, ranks, capacity)
                            sources += (x + row * (HIDDEN * width),)  # type: ignore[assignment]
                            there += (place >= 0,)  # type: ignore[assignment]
                            factors += (factor,)  # type: ignore[assignment]
                        parts = load_together(sources, there, value, wanted, DTYPE, TOGETHER)
                        for step in tl.static_range(TOGETHER):
                            part = total + factors[step][:, None] * parts[step]
                            total = tl.where(there[step][:, None], part, total)
                    store_floats(target, value, total, wanted, DTYPE, BACKEND)
            else:
                before = route + peek(route + P_ROUTE_BEFORE) + 4 * source * most
                pair = tl.load(int32s(before + 4 * index), mask=inside, other=0).to(tl.int64)
                words: tl.constexpr = HIDDEN * width // 4
                for slot in range(TOPK):
                    place = tl.load(int32s(places + 4 * (index * TOPK + slot)), mask=inside, other=-1)
                    row = _expert_row(layout_range, place, source, ranks, capacity)
                    start = x + row * (HIDDEN * width)
                    target = first_row + pair * row_bytes
                    for first in range(0, words, BLOCK):
                        word = first + tl.arange(0, BLOCK)[None, :]
                        here = (place >= 0)[:, None] & (word < words)
                        part = tl.load(aligned(start, tl.int32)[:, None] + word, mask=here, other=0)
                        tl.store(aligned(target, tl.int32)[:, None] + word, part, mask=here)
                    pair += (place >= 0).to(tl.int64)
        if arrives_last(state + S_ARRIVALS, tl.num_programs(0) * tl.num_programs(1), BACKEND):
            number = peek(state + S_COMBINE_NUMBER)
            for first_peer in range(0, ranks, LANES):
                peers = first_peer + tl.arange(0, LANES).to(tl.int64)
                in_group = peers < ranks
                rows = tl.load(int64s(route_table(context, route, R_RETURN_ROWS, peers)), mask=in_group, other=0)
                form = tl.load(int64s(route_table(context, route, R_RETURN_FORM, peers)), mask=in_group, other=0)
                coding = (form << 8) | DTYPE
                send_messages(context, state, route, peers, _COMBINE, number, COMBINE_TAG, rows, coding, 0, BACKEND)
            poke(state + S_COMBINE_NUMBER, number + 1)


# what the caller may pass with any alignment or length has one compiled code: none is compiled amid an operation
@kernel(do_not_specialize=["weights", "tokens"])
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

    Eight arguments of a launch, eight constants.

    Args:
        weights: float32[tokens, TOPK], used in the expanded form.
        out: [tokens, HIDDEN] of DTYPE, on a multiple of 16 bytes.
        TOGETHER: slots whose rows are loaded together: a program waits once for their places and once for them.
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
        region = peek(state + S_COMBINE_RECV)
        region += (number & 1) * peek(state + S_COMBINE_RECV_STEP) + HEADER
        returns = route + peek(route + P_ROUTE_RETURNS)
        for first in range(0, TOPK, TOGETHER):
            sources, there, factors = (), (), ()
            for step in tl.static_range(TOGETHER):
                inside = (token < tokens) & (first + step < TOPK)
                at = token * TOPK + first + step
                entry = tl.load(int64s(returns + 8 * at), mask=inside, other=-1)
                rank = tl.where(entry >= 0, entry >> 32, 0)
                # of a rank that was lost since the dispatch nothing has come
                here = (entry >= 0) & is_live(context, rank)
                base = landing_window(context, rank) + region + peek(route_table(context, route, R_RETURN_BASE, rank))
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
