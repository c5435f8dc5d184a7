"""What the host tells the normal-mode kernels of a device beside addresses of its own blocks: format and tensors."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["NodeTensors", "NormalFormat", "NormalTensors"]


class NormalFormat(NamedTuple):
    """What all ranks agree on in a normal-mode operation on a device.

    Attributes:
        kind: NormalNotify.OPERATION_*.
        dtype: DTYPE_* of the rows.
        row_bytes, meta_bytes, scale_bytes: of a row.
        topk: ids and weights per row of a dispatch, weights per row of a combine.
        local_experts: experts per rank.
        shape: digest for the handle of a dispatch with number -1.
        shape_step: what it grows by with the number of that dispatch, modulo 2**63.
        node_ranks: ranks of a node when each row crosses once to a node, else 0.
    """

    kind: int
    dtype: int
    row_bytes: int
    meta_bytes: int
    scale_bytes: int
    topk: int
    local_experts: int
    shape: int
    shape_step: int
    node_ranks: int = 0


class NormalTensors(NamedTuple):
    """Addresses of what an exchange moves, 0 for what there is not; see ``triton/normal_rows.move_rows``."""

    x: int
    lists: int
    tokens: int
    topk_idx: int
    weights: int
    scales: int
    out: int
    out_idx: int
    out_weights: int
    out_scales: int
    capacity: int


class NodeTensors(NamedTuple):
    """Addresses and sizes of what an exchange between nodes needs besides, 0 for what there is not.

    Attributes:
        in_rank: uint8[tokens, ranks], which ranks a dispatched token goes to.
        passes, pass_rows: int32[ranks, pass_rows], scratch of a dispatch: rows of two landing slots for each rank.
        marks, room: uint8[room, mark bytes], for which ranks of its node each row was that this rank forwards.
        counts: int32[room + nodes, ranks of a node], scratch of a combine.
    """

    in_rank: int
    passes: int
    pass_rows: int
    marks: int
    room: int
    counts: int
