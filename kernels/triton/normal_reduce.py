"""Normal-mode combine, receiving side: a token is the sum of the rows that its ranks have sent back.

In ascending order of ranks, in float32, rounded once: the same sum as :mod:`..cpu.normal_reduce`, bit by bit. Rows of
several ranks are asked for before the first is added: a program waits twice for all of them, for their places and for
themselves, where one rank after the other would be two waits each. So nothing in that part of the loop is a branch.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ...protocol.message import DTYPE_F32
from .context import has_failed, mask_address, own_rank, rank_count, window_address
from .normal_blocks import (
    N_META_LANDING,
    N_RECV_FIRST,
    N_ROW_LANDING,
    N_SEND_FIRST,
    W_IN_HEAP,
    W_META_BYTES,
    W_RAN,
    entry_among,
)
from .normal_sum import add_rows
from .quant import load_floats, load_together, store_floats
from .words import floats, int32s, peek

_F32 = tl.constexpr(DTYPE_F32)
#: More rows than there are.
_EVERY = tl.constexpr(1 << 62)


class _Combined(NamedTuple):
    """What all programs of a sum read first, scalars.

    Attributes:
        ranks, me: of the group. received: rows of this rank's experts.
        places: see :func:`reduce_rows`. masked: see :func:`.block_access.mask_address`.
        in_heap: rows of other ranks are summed where they landed. window: of this rank. meta: bytes of a row's.
    """

    ranks: tl.tensor
    me: tl.tensor
    received: tl.tensor
    places: tl.tensor
    masked: tl.tensor
    in_heap: tl.tensor
    window: tl.tensor
    meta: tl.tensor


@triton.jit
def _of(state: tl.tensor, seen: _Combined, table: tl.constexpr, rank: tl.tensor) -> tl.tensor:
    """One rank's entry of a table."""
    return peek(entry_among(seen.ranks, state, table, rank))


@triton.jit
def _row_of(
    state: tl.tensor, seen: _Combined, index: tl.tensor, token: tl.tensor, inside: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(rank, row of each ``token`` [rows] among those of that rank, True where there is one). Nothing is there beyond
    the last rank."""
    rank = tl.minimum(seen.ranks - 1, index)
    # of a rank that was lost since the dispatch nothing has come
    live = (seen.ranks > index) & (tl.load(int32s(seen.masked + 4 * rank)) == 0)
    place = tl.load(int32s(seen.places + 4 * (token * seen.ranks + rank))).to(tl.int64)
    place = tl.where(live, place, -1)
    # of a dispatch that received more than was promised, the rest is not there
    own = rank == seen.me
    row = place + tl.where(own, _of(state, seen, N_SEND_FIRST, rank), 0)
    here = inside & (place >= 0) & (row < tl.where(own, seen.received, _EVERY))
    return rank, tl.where(here, row, 0), here


@triton.jit
def _sum_values(
    state: tl.tensor,
    seen: _Combined,
    x: tl.tensor,
    gathered: tl.tensor,
    token: tl.tensor,
    inside: tl.tensor,
    value: tl.tensor,
    wanted: tl.tensor,
    HIDDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(sums [rows, values] of the rows of each ``token``, how many rows those were)."""
    row_bytes: tl.constexpr = HIDDEN * (4 if DTYPE == _F32 else 2)
    total = tl.zeros(wanted.shape, tl.float32)
    found = tl.zeros(token.shape, tl.int32)
    for begin in range(0, seen.ranks, TOGETHER):
        sources, there = (), ()
        for step in tl.static_range(TOGETHER):
            rank, row, here = _row_of(state, seen, begin + step, token, inside)
            landed = seen.window + _of(state, seen, N_ROW_LANDING, rank)
            kept = gathered + _of(state, seen, N_RECV_FIRST, rank) * row_bytes
            source = tl.where(rank == seen.me, x, tl.where(seen.in_heap, landed, kept))
            sources += (source + row * row_bytes,)  # type: ignore[assignment]
            there += (here,)  # type: ignore[assignment]
        parts = load_together(sources, there, value, wanted, DTYPE, TOGETHER)
        for step in tl.static_range(TOGETHER):
            total, found = add_rows(total, found, parts[step], there[step])
    return total, found


@triton.jit
def _sum_weights(
    state: tl.tensor,
    seen: _Combined,
    weights: tl.tensor,
    gathered_weights: tl.tensor,
    token: tl.tensor,
    inside: tl.tensor,
    slot: tl.tensor,
    TOPK: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> tl.tensor:
    """Sums [rows, slots] of the weights that came with the rows of each ``token``."""
    total = tl.zeros([token.shape[0], slot.shape[1]], tl.float32)
    for begin in range(0, seen.ranks, TOGETHER):
        for step in tl.static_range(TOGETHER):
            rank, row, here = _row_of(state, seen, begin + step, token, inside)
            landed = seen.window + _of(state, seen, N_META_LANDING, rank)
            kept = gathered_weights + _of(state, seen, N_RECV_FIRST, rank) * (4 * TOPK)
            own = rank == seen.me
            source = tl.where(own, weights, tl.where(seen.in_heap, landed, kept))
            source += row * tl.where(seen.in_heap & (own == 0), seen.meta, 4 * TOPK)
            total += tl.load(floats(source[:, None] + 4 * slot), mask=here[:, None] & (slot < TOPK), other=0.0)
    return total


# any number of tokens with the same compiled code
@triton.jit(
    do_not_specialize=[
        "received",
        "weights",
        "places",
        "tokens",
        "gathered",
        "gathered_weights",
        "bias_0",
        "bias_1",
        "out_weights",
    ]
)
def reduce_rows(
    context: tl.int64,
    state: tl.int64,
    x: tl.int64,
    received: tl.int64,
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
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Sum the rows of a combine that is over; any grid (programs, ceil(HIDDEN / BLOCK)), with a column more for the
    weights where TOPK is not 0. Compile without fused multiply-add. A token without rows is zero, and where the rows
    were not exchanged every token is.

    Args:
        x, weights: rows of this rank's experts, [received, HIDDEN] of DTYPE and float32[received, TOPK].
        places: int32[tokens, ranks], place of the token in the list of the rank, or -1.
        gathered, gathered_weights: rows of the other ranks, where they did not stay in the heap.
        bias_0, bias_1: [tokens, HIDDEN], BIASES of them are added.
        out: [tokens, HIDDEN] of DTYPE. out_weights: float32[tokens, TOPK].
        TOGETHER: ranks whose rows are asked for together. ROWS: tokens likewise; BLOCK: values of a row.
    """
    tokens, ranks = tokens.to(tl.int64), rank_count(context)
    row_bytes: tl.constexpr = HIDDEN * (4 if DTYPE == _F32 else 2)
    ran = (has_failed(context) == 0) & (peek(state + W_RAN) != 0)
    in_heap, meta, window = peek(state + W_IN_HEAP) != 0, peek(state + W_META_BYTES), window_address(context)
    me, masked = own_rank(context), mask_address(context)
    seen = _Combined(ranks, me, received.to(tl.int64), places, masked, in_heap, window, meta)
    column = tl.program_id(1)
    value, slot = column * BLOCK + tl.arange(0, BLOCK)[None, :], tl.arange(0, SLOTS)[None, :]
    for first in range(tl.program_id(0).to(tl.int64) * ROWS, tokens, tl.num_programs(0).to(tl.int64) * ROWS):
        index = first + tl.arange(0, ROWS).to(tl.int64)
        inside, token = index < tokens, tl.minimum(index, tokens - 1)
        if column * BLOCK < HIDDEN:
            wanted = inside[:, None] & (value < HIDDEN)
            total = tl.zeros([ROWS, BLOCK], tl.float32)
            if ran:
                total, found = _sum_values(
                    state, seen, x, gathered, token, inside, value, wanted, HIDDEN, DTYPE, TOGETHER
                )
                if BIASES > 0:
                    part = load_floats(bias_0 + token * row_bytes, value, wanted, DTYPE)
                    total = tl.where((found > 0)[:, None], total + part, part)
                if BIASES > 1:
                    total += load_floats(bias_1 + token * row_bytes, value, wanted, DTYPE)
            store_floats(out + token * row_bytes, value, total, wanted, DTYPE, BACKEND)
        elif TOPK > 0:
            factors = tl.zeros([ROWS, SLOTS], tl.float32)
            if ran:
                factors = _sum_weights(state, seen, weights, gathered_weights, token, inside, slot, TOPK, TOGETHER)
            given = inside[:, None] & (slot < TOPK)
            tl.store(floats(out_weights + 4 * (token[:, None] * TOPK + slot)), factors, mask=given)
