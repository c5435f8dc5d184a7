"""The end of a row exchange between nodes: what turns are left, then all writes over, then the counters move on."""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import NormalNotify
from .context import has_failed, is_live, rank_count
from .normal_blocks import W_OPEN
from .normal_finish import close
from .normal_forward import list_far
from .normal_node_advance import turn_nodes
from .normal_node_rows import move_nodes
from .normal_nodes import is_far
from .normal_tensors import UNALIGNED_NODES, NodeTables, RowShape, RowTensors
from .words import peek, settle

_COMBINE = tl.constexpr(NormalNotify.OPERATION_COMBINE)


@triton.jit(do_not_specialize=[*UNALIGNED_NODES, "marks", "room"])
def finish_nodes(
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
    marks: tl.int64,
    room: tl.int64,
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
    PATIENCE: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """End the exchange; grid (1,), one warp. Compile without fused multiply-add.

    Like :func:`.normal_finish.finish`: arguments of :func:`.normal_node_rows.move_node_rows`, and ``marks`` and
    ``room`` of :func:`.normal_forward.list_passed`.
    """
    tokens, capacity, local_experts = tokens.to(tl.int64), capacity.to(tl.int64), local_experts.to(tl.int64)
    pass_rows, room = pass_rows.to(tl.int64), room.to(tl.int64)
    tensors = RowTensors(
        x, lists, tokens, topk_idx, weights, scales, out, out_idx, out_weights, out_scales, capacity, local_experts
    )
    tables = NodeTables(in_rank, passes, pass_rows, counts)
    if (has_failed(context) == 0) & (peek(state + W_OPEN) != 0):
        one = tl.full((), 1, tl.int64)
        going = (peek(state + W_OPEN) == 1).to(tl.int32)
        late = tl.full((), 0, tl.int64)
        # rule: the last kernel takes the turns that the host has not launched
        while going != 0:
            going = turn_nodes(context, state, counts, KIND == _COMBINE, PATIENCE, LANES, BACKEND)
            late += going
            if going != 0:
                if KIND != _COMBINE:
                    for far in range(rank_count(context)):
                        if is_live(context, far) & is_far(context, state, far):
                            list_far(context, state, far, passes, pass_rows, marks, room, 2 * TOPK + SCALE_WORDS, LANES)
                    settle(BACKEND)
                move_nodes(
                    context,
                    state,
                    one - 1,
                    one,
                    tensors,
                    tables,
                    RowShape(KIND, WORDS, TOPK, SLOTS, SCALE_WORDS, SCALES, ROWS, BLOCK),
                    HIDDEN,
                    DTYPE,
                    BACKEND,
                )
                settle(BACKEND)
        if has_failed(context) == 0:
            close(context, state, late, KIND, LANES, BACKEND)
