"""Low-latency dispatch, sending side: every token is cast once and written to the message of each of its ranks.

The message space is free and the rows are numbered (:mod:`.routing`). The last program adds headers and publishes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import DTYPE_F32, DTYPE_FP8, DTYPE_FP8_UE8M0, SCALE_BLOCK
from ...protocol.streams import LL_DISPATCH
from .context import (
    R_COUNTS,
    R_RETURN_BASE,
    S_ARRIVALS,
    S_DISPATCH_NUMBER,
    S_EXPERTS,
    S_META,
    S_ROUTE_SENDS,
    T_MESSAGE_AT,
    has_failed,
    rank_count,
    route_table,
    state_table,
)
from .ll_header import DISPATCH_TAG, WEIGHTED, send_messages
from .quant import load_floats, quantise_blocks
from .routing import HEADER
from .words import aligned, arrives_last, floats, int32s, int64s, peek, poke, uint8s

_DISPATCH = tl.constexpr(LL_DISPATCH)
_F32, _FP8, _UE8M0 = tl.constexpr(DTYPE_F32), tl.constexpr(DTYPE_FP8), tl.constexpr(DTYPE_FP8_UE8M0)
_GROUP = tl.constexpr(SCALE_BLOCK)


@triton.jit
def _row_addresses(
    context: tl.tensor, state: tl.tensor, route: tl.tensor, entry: tl.tensor, chosen: tl.tensor, row_bytes: tl.tensor
) -> tl.tensor:
    """(addresses of the rows, addresses of the metas) that entries of ``sends`` name."""
    rank = tl.where(chosen, entry >> 32, 0)
    row = tl.where(chosen, entry & 0xFFFFFFFF, 0)
    first = peek(state_table(context, state, T_MESSAGE_AT, rank)) + HEADER
    meta = peek(state + S_META)
    rows = first + peek(route_table(context, route, R_COUNTS, rank)) * meta + row * row_bytes
    return rows, first + row * meta


@triton.jit
def _write_metas(
    context: tl.tensor,
    state: tl.tensor,
    route: tl.tensor,
    topk_idx: tl.tensor,
    weights: tl.tensor,
    token: tl.tensor,
    tokens: tl.tensor,
    row_bytes: tl.tensor,
    REDUCED: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    """Token index, the expert ids of the destination, and the router weights of each ``token`` [rows]."""
    sends = route + peek(state + S_ROUTE_SENDS)
    local = peek(state + S_EXPERTS) // rank_count(context)
    slot = tl.arange(0, SLOTS)[None, :]
    given = (token[:, None] < tokens) & (slot < TOPK)
    at = token[:, None] * TOPK + slot
    ids = tl.load(int64s(topk_idx + 8 * at), mask=given, other=-1)
    if REDUCED:
        factors = tl.load(floats(weights + 4 * at), mask=given, other=0.0)
    for index in range(TOPK):
        entry = tl.load(int64s(sends + 8 * (token * TOPK + index)), mask=token < tokens, other=-1)
        chosen = entry >= 0
        _, meta = _row_addresses(context, state, route, entry, chosen, row_bytes)
        rank = (entry >> 32)[:, None]
        tl.store(int32s(meta), token.to(tl.int32), mask=chosen)
        here = (ids >= 0) & (ids // local == rank)
        place = meta[:, None] + 4 + 4 * slot
        wanted = chosen[:, None] & (slot < TOPK)
        tl.store(int32s(place), tl.where(here, ids, -1).to(tl.int32), mask=wanted)
        if REDUCED:
            tl.store(floats(place + 4 * TOPK), factors, mask=wanted)


# what the caller may pass with any alignment or length has one compiled code: none is compiled amid an operation
@triton.jit(do_not_specialize=["topk_idx", "weights", "tokens"])
def pack_dispatch(
    context: tl.int64,
    state: tl.int64,
    route: tl.int64,
    x: tl.int64,
    topk_idx: tl.int64,
    weights: tl.int64,
    tokens: tl.int64,
    row_bytes: tl.int64,
    HIDDEN: tl.constexpr,
    SOURCE: tl.constexpr,
    CODING: tl.constexpr,
    ROUND: tl.constexpr,
    FNUZ: tl.constexpr,
    REDUCED: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Pack and publish the next dispatch message for every rank; grid (ceil(tokens / ROWS), at least 1; any), the
    second for the blocks of a row.

    Args:
        x: [tokens, HIDDEN] of dtype SOURCE, contiguous, on a multiple of 16 bytes.
        weights: float32[tokens, TOPK], or 0 when not REDUCED.
        CODING: DTYPE_* of the rows. ROUND: scales are powers of two. FNUZ: gfx942's FP8.
        BLOCK: values cast at a time, a power of two, at least 128. LANES: peers published to at a time.
    """
    tokens = tokens.to(tl.int64)
    if has_failed(context) == 0:
        token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)
        sends = route + peek(state + S_ROUTE_SENDS)
        column, step = tl.program_id(1) * BLOCK, tl.num_programs(1) * BLOCK
        if column == 0:
            _write_metas(context, state, route, topk_idx, weights, token, tokens, row_bytes, REDUCED, TOPK, SLOTS)
        if (CODING == _FP8) | (CODING == _UE8M0):
            width: tl.constexpr = 4 if SOURCE == _F32 else 2
            groups: tl.constexpr = BLOCK // _GROUP
            value = tl.arange(0, BLOCK)[None, :]
            for first in range(column, HIDDEN, step):
                inside = (token[:, None] < tokens) & (first + value < HIDDEN)
                given = load_floats(x + token * (HIDDEN * width), first + value, inside, SOURCE)
                given = tl.reshape(given, [ROWS, groups, _GROUP])
                codes, scales = quantise_blocks(given, ROUND, FNUZ, BACKEND)
                codes = tl.reshape(codes, [ROWS, BLOCK])
                group = first // _GROUP + tl.arange(0, groups)[None, :]
                for index in range(TOPK):
                    entry = tl.load(int64s(sends + 8 * (token * TOPK + index)), mask=token < tokens, other=-1)
                    chosen = entry >= 0
                    rows, _ = _row_addresses(context, state, route, entry, chosen, row_bytes)
                    wanted = chosen[:, None] & inside
                    tl.store(aligned(rows, tl.uint8)[:, None] + (first + value), codes, mask=wanted)
                    wanted_scales = chosen[:, None] & (group < HIDDEN // _GROUP)
                    if CODING == _FP8:
                        tl.store(int32s(rows[:, None] + HIDDEN) + group, scales, mask=wanted_scales)
                    else:
                        exponents = (scales >> 23).to(tl.uint8)
                        tl.store(uint8s(rows[:, None] + HIDDEN + group), exponents, mask=wanted_scales)
        else:
            words: tl.constexpr = HIDDEN * (4 if SOURCE == _F32 else 2) // 4
            for first in range(column, words, step):
                word = first + tl.arange(0, BLOCK)[None, :]
                inside = (token[:, None] < tokens) & (word < words)
                given = tl.load(aligned(x + token * (4 * words), tl.int32)[:, None] + word, mask=inside, other=0)
                for index in range(TOPK):
                    entry = tl.load(int64s(sends + 8 * (token * TOPK + index)), mask=token < tokens, other=-1)
                    chosen = entry >= 0
                    rows, _ = _row_addresses(context, state, route, entry, chosen, row_bytes)
                    tl.store(aligned(rows, tl.int32)[:, None] + word, given, mask=chosen[:, None] & inside)
        if arrives_last(state + S_ARRIVALS, tl.num_programs(0) * tl.num_programs(1), BACKEND):
            number = peek(state + S_DISPATCH_NUMBER)
            ranks = rank_count(context)
            for first_peer in range(0, ranks, LANES):
                peers = first_peer + tl.arange(0, LANES).to(tl.int64)
                inside = peers < ranks
                counts = tl.load(int64s(route_table(context, route, R_COUNTS, peers)), mask=inside, other=0)
                base = tl.load(int64s(route_table(context, route, R_RETURN_BASE, peers)), mask=inside, other=0)
                coding: tl.constexpr = (WEIGHTED if REDUCED else 0) | CODING
                send_messages(context, state, peers, _DISPATCH, number, DISPATCH_TAG, counts, coding, base, BACKEND)
            # rule: low latency: the send kernel counts its message
            poke(state + S_DISPATCH_NUMBER, number + 1)
