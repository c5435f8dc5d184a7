"""The launches of a row exchange between nodes, in which each row crosses once to a node."""

from __future__ import annotations

from ...protocol.message import NormalNotify, element_bytes
from ..interface import NodeTensors, NormalFormat, NormalTensors
from .launch import Launch, Target
from .normal_forward import list_passed
from .normal_gather import count_marks
from .normal_node_advance import advance_nodes
from .normal_node_finish import finish_nodes
from .normal_node_rows import move_node_rows

#: Nanoseconds that a turn of a combine waits for more once it has something to move: about what a turn costs. In the
#: interpreter a turn takes far longer than that.
_PATIENCE, _PATIENCE_INTERPRETED = 20_000, 200_000_000
#: Rows whose marks a program looks at together.
_LISTED = 256


def exchange_nodes(
    target: Target,
    ranks: int,
    context: int,
    state: int,
    form: NormalFormat,
    tensors: NormalTensors,
    nodes: NodeTensors,
    turns: int,
    programs: int,
    constants: dict[str, int],
    rows: int,
    warps: int,
) -> tuple[Launch, ...]:
    """Move the rows of an opened operation in ``turns`` turns of ``programs`` programs, then what is left.

    Args:
        constants: of ``normal_rows.move_rows``, without ROWS.
        rows: that a program moves together, of ``warps`` warps.
    """
    combine = form.kind == NormalNotify.OPERATION_COMBINE
    interpreted = target.interpreted
    lanes = {"LANES": target.warp, "BACKEND": target.backend}
    patience = {"PATIENCE": _PATIENCE_INTERPRETED if interpreted else _PATIENCE}
    waiting = {"COMBINE": combine, **patience, **lanes}
    # a dispatch may have values of a byte, which nobody sums
    summed = {"HIDDEN": form.row_bytes // element_bytes(form.dtype) if combine else 0, "DTYPE": form.dtype}
    arguments = (
        context,
        state,
        *tensors,
        form.local_experts,
        nodes.in_rank,
        nodes.passes,
        nodes.pass_rows,
        nodes.counts,
    )
    moving = {**constants, **summed, "BACKEND": target.backend}
    begin = Launch(advance_nodes, (1,), (context, state, nodes.counts), waiting)
    move = Launch(move_node_rows, (programs,), arguments, {**moving, "ROWS": rows}, warps=warps, fused=False)
    block = 32 if interpreted else _LISTED
    first: tuple[Launch, ...] = ()
    turn: tuple[Launch, ...] = (begin, move)
    if combine:
        count = Launch(
            count_marks,
            (ranks,),
            (context, state, nodes.marks, nodes.room, nodes.counts),
            {"BLOCK": block},
            warps=4,
        )
        first = (count,)
    else:
        used = 2 * form.topk + form.scale_bytes // 4
        listing = Launch(
            list_passed,
            (ranks,),
            (context, state, nodes.passes, nodes.pass_rows, nodes.marks, nodes.room),
            {"USED": used, "BLOCK": block},
            warps=4,
        )
        turn = (begin, listing, move)
    rest = Launch(
        finish_nodes,
        (1,),
        (*arguments, nodes.marks, nodes.room),
        {**moving, "ROWS": rows if interpreted else 1, **patience, **lanes},
        fused=False,
    )
    return first + turn * turns + (rest,)
