"""Rows and their meta of an exchange between nodes, moved by many programs: ``normal_rows``, and what passes through
forwarders.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import NormalNotify
from .context import has_failed, own_rank, rank_count
from .normal_blocks import W_IN_HEAP, W_OPEN
from .normal_forward import take_passed
from .normal_gather import lay_out, sum_laid_out
from .normal_nodes import is_far, is_rail
from .normal_rows import pack, unpack
from .normal_tensors import UNALIGNED_NODES, NodeTables, RowShape, RowTensors
from .words import peek

_COMBINE = tl.constexpr(NormalNotify.OPERATION_COMBINE)


@triton.jit
def move_nodes(
    context: tl.tensor,
    state: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    tensors: RowTensors,
    tables: NodeTables,
    shape: RowShape,
    HIDDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Program ``program`` of ``programs``: its part of all rows of the turn."""
    ranks, me = rank_count(context), own_rank(context)
    for step in range(0, ranks):
        # not all ranks write to the same peer first, nor all programs, when there are few rows for each
        peer = (me + step) % ranks
        part = (program + step * 7) % programs
        summed = False
        if shape.KIND == _COMBINE:
            summed = is_far(context, state, peer)
        if summed:
            if shape.KIND == _COMBINE:
                if is_rail(context, state, peer):
                    counts = tables.counts
                    sum_laid_out(context, state, peer, part, programs, tensors, counts, shape, HIDDEN, DTYPE, BACKEND)
                else:
                    lay_out(context, state, peer, part, programs, tensors, shape)
        else:
            pack(context, state, peer, part, programs, tensors, tables.in_rank, shape, True)
    if (shape.KIND != _COMBINE) | (peek(state + W_IN_HEAP) == 0):
        for step in range(1, ranks):
            peer = (me + step) % ranks
            part = (program + step * 7) % programs
            passed = False
            if shape.KIND != _COMBINE:
                passed = is_far(context, state, peer)
            if passed:
                if shape.KIND != _COMBINE:
                    take_passed(context, state, peer, part, programs, tensors, tables, shape)
            else:
                unpack(context, state, peer, part, programs, tensors, shape)


# any number of tokens with the same compiled code
@triton.jit(do_not_specialize=UNALIGNED_NODES)
def move_node_rows(
    context: tl.int64,
    state: tl.int64,
    x: tl.int64,
    lists: tl.int64,
    tokens: tl.int64,
    topk_idx: tl.int64,
    weights: tl.int64,
    scales: tl.int64,
    out: tl.int64,
    out_idx: tl.int64,
    out_weights: tl.int64,
    out_scales: tl.int64,
    capacity: tl.int64,
    local_experts: tl.int64,
    in_rank: tl.int64,
    passes: tl.int64,
    pass_rows: tl.int64,
    counts: tl.int64,
    KIND: tl.constexpr,
    HIDDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    WORDS: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Move what :func:`.normal_node_advance.advance_nodes` has chosen; any grid of one dimension. Compile without fused
    multiply-add.

    Args:
        x ... local_experts: see :class:`.normal_tensors.RowTensors`.
        in_rank ... counts: see :class:`.normal_tensors.NodeTables`.
        KIND ... BLOCK: see :class:`.normal_tensors.RowShape`.
        HIDDEN, DTYPE: values of a row that is summed, and what they are (combine).
    """
    tokens, capacity, local_experts = tokens.to(tl.int64), capacity.to(tl.int64), local_experts.to(tl.int64)
    tensors = RowTensors(
        x, lists, tokens, topk_idx, weights, scales, out, out_idx, out_weights, out_scales, capacity, local_experts
    )
    tables = NodeTables(in_rank, passes, pass_rows.to(tl.int64), counts)
    if (has_failed(context) == 0) & (peek(state + W_OPEN) == 1):
        program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
        move_nodes(
            context,
            state,
            program,
            programs,
            tensors,
            tables,
            RowShape(KIND, WORDS, TOPK, SLOTS, SCALE_WORDS, SCALES, ROWS, BLOCK),
            HIDDEN,
            DTYPE,
            BACKEND,
        )
