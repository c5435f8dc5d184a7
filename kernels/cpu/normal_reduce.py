"""Summing the rows that a combine brings back, token by token, as soon as all rows of a token have arrived.

Rows of every peer come in ascending token order, so the first row of a peer that has not arrived yet names the token
before which everything of that peer is here; the smallest of these over all peers is the frontier up to which tokens
can be summed. The order of a sum is the order of ranks, and every sum is taken in float32 and rounded once, so the
result depends on nothing but the rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...native.atomics import copy, peek, peek32, poke, zero
from ...native.jit import compiled
from ...protocol.message import DTYPE_F32
from ..blocks import normal as block
from ..blocks.normal import TILE
from .context import own_rank, rank_count
from .elements import float_view
from .normal_receive import landed_meta, landed_row
from .words import MOVED, NOTHING, add, get, put
from .quant import accumulate, add_two, narrow_sum, narrow_sum_of_two

__all__ = ["add_weights", "reduce_ready", "sum_rows"]

#: Rows read in one step, so that sending goes on in between; about 1 MiB at 7168 bfloat16 values.
_STEP_ROWS = 64
#: A float32, so that the products of ``accumulate`` stay float32.
_ONE: Any = np.float32(1.0)


@compiled
def _ready_until(operation: int, peers: int, ranks: int) -> int:
    """The first token that still misses a row, or TOKENS."""
    limit = get(operation, block.TOKENS)
    for rank in range(ranks):
        state = peers + 8 * block.PEER_WORDS * rank
        arrived = get(state, block.ARRIVED_ROWS)
        if arrived < get(state, block.RECV_ROWS):
            limit = min(limit, peek32(get(state, block.RECV_LIST) + 4 * arrived))
    return limit


@compiled
def sum_rows(operation: int, out: int, found: int, rows: int) -> None:
    """The row at ``out`` = sum, in that order, of the ``found`` rows whose addresses stand at ``rows``.

    The first two are added and the last is rounded on the way, so that two rows, the most common case, take one pass
    and every further one reads and writes the float32 total once.
    """
    hidden, dtype = get(operation, block.HIDDEN), get(operation, block.ELEMENT)
    nbytes = get(operation, block.ROW_BYTES)
    width = 4 if dtype == DTYPE_F32 else 2
    if found == 0:
        zero(out, nbytes)
    elif found == 1:
        copy(out, peek(rows), nbytes)
    elif found == 2:
        narrow_sum_of_two(out, peek(rows), peek(rows + 8), hidden, dtype)
    else:
        total = get(operation, block.SCRATCH)
        for start in range(0, hidden, TILE):
            count, at = min(TILE, hidden - start), start * width
            add_two(total, peek(rows) + at, peek(rows + 8) + at, count, dtype)
            for index in range(2, found - 1):
                accumulate(total, peek(rows + 8 * index) + at, count, dtype, _ONE)
            narrow_sum(out + at, total, peek(rows + 8 * (found - 1)) + at, count, dtype)


@compiled
def _sum_token(operation: int, token: int, found: int, rows: int) -> None:
    """OUT of ``token`` = sum of the ``found`` rows whose addresses stand at ``rows``, then of the biases."""
    nbytes = get(operation, block.ROW_BYTES)
    bias_0, bias_1 = get(operation, block.BIAS_0), get(operation, block.BIAS_1)
    if bias_0 != 0:
        poke(rows + 8 * found, bias_0 + token * nbytes)
        found += 1
    if bias_1 != 0:
        poke(rows + 8 * found, bias_1 + token * nbytes)
        found += 1
    sum_rows(operation, get(operation, block.OUT) + token * nbytes, found, rows)


@compiled
def add_weights(operation: int, target: int, weights: int) -> None:
    """Add the router weights at address ``weights`` to those at ``target``."""
    topk = get(operation, block.TOPK)
    total = float_view(target, topk)
    part = float_view(weights, topk)
    for slot in range(topk):
        total[slot] += part[slot]


@compiled
def reduce_ready(context: int, operation: int, peers: int) -> int:
    """Sum tokens whose rows have all arrived, a bounded number of them. Returns MOVED or NOTHING."""
    ranks, me = rank_count(context), own_rank(context)
    token = first = get(operation, block.FRONTIER)
    limit = _ready_until(operation, peers, ranks)
    rows = get(operation, block.SCRATCH) + block.SCRATCH_BYTES
    weighted = get(operation, block.META_BYTES) != 0
    weights_bytes = 4 * get(operation, block.TOPK)
    used = 0
    while token < limit and used < _STEP_ROWS:
        found = 0
        if weighted:
            zero(get(operation, block.OUT_WEIGHTS) + weights_bytes * token, weights_bytes)
        for rank in range(ranks):
            state = peers + 8 * block.PEER_WORDS * rank
            row = get(state, block.CONSUMED)
            if row == get(state, block.RECV_ROWS) or peek32(get(state, block.RECV_LIST) + 4 * row) != token:
                continue
            if rank == me:
                # own rows go through no message: they are summed where the caller has them
                row += get(state, block.SEND_FIRST)
                address = get(operation, block.X) + row * get(operation, block.ROW_BYTES)
                meta = get(operation, block.WEIGHTS) + weights_bytes * row
            else:
                address = landed_row(context, operation, state, row)
                meta = landed_meta(context, operation, state, row)
            poke(rows + 8 * found, address)
            if weighted:
                add_weights(operation, get(operation, block.OUT_WEIGHTS) + weights_bytes * token, meta)
            found += 1
            add(state, block.CONSUMED, 1)
        _sum_token(operation, token, found, rows)
        used += found + 1
        token += 1
    put(operation, block.FRONTIER, token)
    return MOVED if token > first else NOTHING
