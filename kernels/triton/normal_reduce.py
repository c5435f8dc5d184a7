"""Normal-mode combine, receiving side: a token is the sum of the rows that its ranks have sent back.

In ascending order of ranks, in float32, rounded once: the same sum as :mod:`..cpu.normal_reduce`, bit by bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import DTYPE_F32
from .block_access import has_failed, is_live, own_rank, rank_count, window_address
from .normal_blocks import (
    N_META_LANDING,
    N_RECV_FIRST,
    N_ROW_LANDING,
    N_SEND_FIRST,
    W_IN_HEAP,
    W_META_BYTES,
    W_RAN,
    entry,
)
from .quant import load_floats, store_floats
from .words import floats, int32s, peek

__all__ = ["reduce_rows"]

_F32 = tl.constexpr(DTYPE_F32)


# any number of tokens with the same compiled code
@triton.jit(
    do_not_specialize=["weights", "places", "tokens", "gathered", "gathered_weights", "bias_0", "bias_1", "out_weights"]
)
def reduce_rows(
    context: tl.int64,
    state: tl.int64,
    x: tl.int64,
    weights: tl.int64,
    places: tl.int64,
    tokens: tl.int64,
    gathered: tl.int64,
    gathered_weights: tl.int64,
    bias_0: tl.int64,
    bias_1: tl.int64,
    out: tl.int64,
    out_weights: tl.int64,
    HIDDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    BIASES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Sum the rows of a combine that is over; any grid (programs, ceil(HIDDEN / BLOCK)). Compile without fused
    multiply-add. A token without rows is zero, and where the rows were not exchanged every token is.

    Args:
        x, weights: rows of this rank's experts, [received rows, HIDDEN] of DTYPE and float32[…, TOPK].
        places: int32[tokens, ranks], place of the token in the list of the rank, or -1.
        gathered, gathered_weights: rows of the other ranks, where they did not stay in the heap.
        bias_0, bias_1: [tokens, HIDDEN], BIASES of them are added.
        out: [tokens, HIDDEN] of DTYPE. out_weights: float32[tokens, TOPK].
    """
    tokens = tokens.to(tl.int64)
    ranks, me = rank_count(context), own_rank(context)
    width: tl.constexpr = 4 if DTYPE == _F32 else 2
    failed = has_failed(context) | (peek(state + W_RAN) == 0)
    value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    slot = tl.arange(0, SLOTS)[None, :]
    in_heap, meta = peek(state + W_IN_HEAP), peek(state + W_META_BYTES)
    window = window_address(context)
    for first in range(tl.program_id(0).to(tl.int64) * ROWS, tokens, tl.num_programs(0).to(tl.int64) * ROWS):
        token = first + tl.arange(0, ROWS).to(tl.int64)
        inside = token < tokens
        wanted = inside[:, None] & (value < HIDDEN)
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        factors = tl.zeros([ROWS, SLOTS], tl.float32)
        found = tl.zeros([ROWS], tl.int32)
        if failed == 0:
            for rank in range(ranks):
                place = tl.load(int32s(places + 4 * (token * ranks + rank)), mask=inside, other=-1).to(tl.int64)
                # of a rank that was lost since the dispatch nothing has come
                here = (place >= 0) & is_live(context, tl.zeros_like(token) + rank)
                place = tl.where(here, place, 0)
                if rank == me:
                    row = peek(entry(context, state, N_SEND_FIRST, rank)) + place
                    source, metas = x + row * (HIDDEN * width), weights + row * (4 * TOPK)
                elif in_heap != 0:
                    source = window + peek(entry(context, state, N_ROW_LANDING, rank)) + place * (HIDDEN * width)
                    metas = window + peek(entry(context, state, N_META_LANDING, rank)) + place * meta
                else:
                    row = peek(entry(context, state, N_RECV_FIRST, rank)) + place
                    source, metas = gathered + row * (HIDDEN * width), gathered_weights + row * (4 * TOPK)
                part = load_floats(source, value, here[:, None] & wanted, DTYPE)
                # the first row is taken as it is: adding it to zero would lose the sign of a zero
                total = tl.where(here[:, None], tl.where((found > 0)[:, None], total + part, part), total)
                found += here.to(tl.int32)
                if TOPK > 0:
                    given = here[:, None] & (slot < TOPK)
                    factors += tl.load(floats(metas[:, None] + 4 * slot), mask=given, other=0.0)
            if BIASES > 0:
                part = load_floats(bias_0 + token * (HIDDEN * width), value, wanted, DTYPE)
                total = tl.where((found > 0)[:, None], total + part, part)
                found += 1
            if BIASES > 1:
                total += load_floats(bias_1 + token * (HIDDEN * width), value, wanted, DTYPE)
        store_floats(out + token * (HIDDEN * width), value, total, wanted, DTYPE, BACKEND)
        if TOPK > 0:
            if tl.program_id(1) == 0:
                tl.store(
                    floats(out_weights + 4 * (token[:, None] * TOPK + slot)),
                    factors,
                    mask=inside[:, None] & (slot < TOPK),
                )
