"""What a row exchange moves rows from and to, as the code inside kernels hands it on: tensors, and shapes.

A kernel has each of them as a parameter, since that is what a launch gives; inside, they travel together. A
:class:`RowShape` is passed where it is made: Triton makes values of constants that are assigned to a variable.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

#: Arguments that differ from call to call, or that a caller need not align: one compiled kernel for all of them.
UNALIGNED = [
    "lists",
    "tokens",
    "topk_idx",
    "weights",
    "scales",
    "out_idx",
    "out_weights",
    "out_scales",
    "capacity",
    "local_experts",
]
#: The same of kernels between nodes.
UNALIGNED_NODES = [*UNALIGNED, "in_rank", "passes", "pass_rows", "counts"]


class RowTensors(NamedTuple):
    """Addresses of the caller's tensors, and how much they hold; int64.

    Attributes:
        x: [tokens, WORDS x 4 bytes], rows of a dispatch; of a combine [received rows, …]. On a multiple of 16.
        lists: int32[ranks, tokens], tokens for each rank (dispatch).
        tokens: rows of x.
        topk_idx: int64[tokens, TOPK]. weights: float32, as many, or [received rows, TOPK]. scales: [tokens,
            SCALE_WORDS x 4 bytes].
        out: rows of ``capacity``, on a multiple of 16; likewise out_idx int64, out_weights float32, out_scales. In a
            combine: where rows are gathered that do not stay in the heap.
        local_experts: experts per rank.
    """

    x: tl.tensor
    lists: tl.tensor
    tokens: tl.tensor
    topk_idx: tl.tensor
    weights: tl.tensor
    scales: tl.tensor
    out: tl.tensor
    out_idx: tl.tensor
    out_weights: tl.tensor
    out_scales: tl.tensor
    capacity: tl.tensor
    local_experts: tl.tensor


class NodeTables(NamedTuple):
    """Addresses of what an exchange between nodes needs besides; int64.

    Attributes:
        in_rank: uint8[tokens, ranks], which ranks a token of a dispatch goes to.
        passes: int32[ranks, pass_rows], of :func:`.normal_forward.list_passed` (dispatch).
        counts: of :func:`.normal_gather.count_marks` (combine).
    """

    in_rank: tl.tensor
    passes: tl.tensor
    pass_rows: tl.tensor
    counts: tl.tensor


class RowShape(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        KIND: of the operation.
        WORDS: of 4 bytes in a row.
        TOPK, SCALE_WORDS: of a row; SLOTS, SCALES: rounded up to powers of two, at least 1.
        ROWS: moved together. BLOCK: words, or values that are summed, likewise.
    """

    KIND: tl.constexpr
    WORDS: tl.constexpr
    TOPK: tl.constexpr
    SLOTS: tl.constexpr
    SCALE_WORDS: tl.constexpr
    SCALES: tl.constexpr
    ROWS: tl.constexpr
    BLOCK: tl.constexpr
