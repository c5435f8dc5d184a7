"""Rows and their meta of an exchange between nodes, moved by many programs: ``normal_rows``, and what passes through
forwarders.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import NormalNotify
from .block_access import has_failed, own_rank, rank_count
from .normal_blocks import W_IN_HEAP, W_OPEN
from .normal_forward import take_passed
from .normal_gather import lay_out, sum_laid_out
from .normal_nodes import is_far, is_rail
from .normal_rows import UNALIGNED, pack, unpack
from .words import peek

__all__ = ["UNALIGNED_NODES", "move_node_rows", "move_nodes"]

_COMBINE = tl.constexpr(NormalNotify.OPERATION_COMBINE)
#: Arguments for which there is one compiled kernel, see ``normal_rows``.
UNALIGNED_NODES = [*UNALIGNED, "in_rank", "passes", "pass_rows", "counts"]


@triton.jit
def move_nodes(
    context: tl.tensor,
    state: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    x: tl.tensor,
    lists: tl.tensor,
    tokens: tl.tensor,
    topk_idx: tl.tensor,
    weights: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    out_idx: tl.tensor,
    out_weights: tl.tensor,
    out_scales: tl.tensor,
    capacity: tl.tensor,
    local_experts: tl.tensor,
    in_rank: tl.tensor,
    passes: tl.tensor,
    pass_rows: tl.tensor,
    counts: tl.tensor,
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
    """Program ``program`` of ``programs``: its part of all rows of the turn."""
    ranks, me = rank_count(context), own_rank(context)
    for step in range(0, ranks):
        # not all ranks write to the same peer first, nor all programs, when there are few rows for each
        peer = (me + step) % ranks
        part = (program + step * 7) % programs
        summed = False
        if KIND == _COMBINE:
            summed = is_far(context, state, peer)
        if summed:
            if KIND == _COMBINE:
                if is_rail(context, state, peer):
                    sum_laid_out(
                        context,
                        state,
                        peer,
                        part,
                        programs,
                        x,
                        tokens,
                        weights,
                        counts,
                        HIDDEN,
                        DTYPE,
                        TOPK,
                        SLOTS,
                        ROWS,
                        BLOCK,
                        BACKEND,
                    )
                else:
                    lay_out(context, state, peer, part, programs, x, tokens, weights, WORDS, TOPK, SLOTS, ROWS, BLOCK)
        else:
            pack(
                context,
                state,
                peer,
                part,
                programs,
                x,
                lists,
                tokens,
                topk_idx,
                weights,
                scales,
                out,
                out_idx,
                out_weights,
                out_scales,
                capacity,
                local_experts,
                in_rank,
                KIND,
                True,
                WORDS,
                TOPK,
                SLOTS,
                SCALE_WORDS,
                SCALES,
                ROWS,
                BLOCK,
            )
    if (KIND != _COMBINE) | (peek(state + W_IN_HEAP) == 0):
        for step in range(1, ranks):
            peer = (me + step) % ranks
            part = (program + step * 7) % programs
            passed = False
            if KIND != _COMBINE:
                passed = is_far(context, state, peer)
            if passed:
                if KIND != _COMBINE:
                    take_passed(
                        context,
                        state,
                        peer,
                        part,
                        programs,
                        passes,
                        pass_rows,
                        out,
                        out_idx,
                        out_weights,
                        out_scales,
                        capacity,
                        local_experts,
                        WORDS,
                        TOPK,
                        SLOTS,
                        SCALE_WORDS,
                        SCALES,
                        ROWS,
                        BLOCK,
                    )
            else:
                unpack(
                    context,
                    state,
                    peer,
                    part,
                    programs,
                    out,
                    out_idx,
                    out_weights,
                    out_scales,
                    capacity,
                    local_experts,
                    KIND,
                    WORDS,
                    TOPK,
                    SLOTS,
                    SCALE_WORDS,
                    SCALES,
                    ROWS,
                    BLOCK,
                )


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
        x ... local_experts: as for :func:`.normal_rows.move_rows`.
        in_rank: uint8[tokens, ranks], which ranks a token of a dispatch goes to.
        passes: int32[ranks, pass_rows], of :func:`.normal_forward.list_passed` (dispatch).
        counts: of :func:`.normal_gather.count_marks` (combine).
        HIDDEN, DTYPE: values of a row that is summed, and what they are (combine).
    """
    tokens, capacity, local_experts = tokens.to(tl.int64), capacity.to(tl.int64), local_experts.to(tl.int64)
    if (has_failed(context) == 0) & (peek(state + W_OPEN) == 1):
        move_nodes(
            context,
            state,
            tl.program_id(0).to(tl.int64),
            tl.num_programs(0).to(tl.int64),
            x,
            lists,
            tokens,
            topk_idx,
            weights,
            scales,
            out,
            out_idx,
            out_weights,
            out_scales,
            capacity,
            local_experts,
            in_rank,
            passes,
            pass_rows.to(tl.int64),
            counts,
            KIND,
            HIDDEN,
            DTYPE,
            WORDS,
            TOPK,
            SLOTS,
            SCALE_WORDS,
            SCALES,
            ROWS,
            BLOCK,
            BACKEND,
        )
