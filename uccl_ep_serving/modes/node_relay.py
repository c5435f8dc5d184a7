"""What the host adds to an exchange of rows in which each row crosses once to a node: who, how many, marked how."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ..handles import NodeRoute
from ..kernels.blocks import normal as block
from ..kernels.cpu import normal as kernels
from ..protocol.layout import WindowLayout
from ..protocol.message import NormalNotify
from .arguments import CPU
from .row_format import mark_bytes

__all__ = ["NodeRelay"]

Int64s = npt.NDArray[np.int64]


class NodeRelay:
    """The part of one Buffer's normal mode that knows nodes.

    Args:
        rank, ranks: of the group.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._cursors: Int64s = np.zeros(ranks, dtype=np.int64)

    def route(self, in_rank: torch.Tensor, node_ranks: int) -> NodeRoute:
        """Which tokens cross to each node, from a layout bool [tokens, R] that has been checked."""
        tokens, nodes = len(in_rank), self._ranks // node_ranks
        rows = torch.empty(nodes, dtype=torch.int64, device=CPU)
        lists = torch.empty(nodes, tokens, dtype=torch.int32, device=CPU)
        kernels.route_nodes(
            in_rank.data_ptr(), tokens, self._ranks, node_ranks, self._rank, rows.data_ptr(), lists.data_ptr()
        )
        return NodeRoute(rows, lists)

    def fill_template(self, template: Int64s, window: WindowLayout, node_ranks: int) -> None:
        """Set the words that are the same in every operation between nodes."""
        for word, value in (
            (block.NODE_RANKS, node_ranks),
            (block.RANKS, self._ranks),
            (block.MARK_BYTES, mark_bytes(node_ranks)),
            (block.CURSORS, self._cursors.ctypes.data),
            (block.BOARDS, window.relay_boards),
            (block.LINES, window.relay_lines),
        ):
            template[word] = value

    def prepare(self, context: int, operation: Int64s, peers: int, route: NodeRoute, in_rank: torch.Tensor) -> None:
        """Fill the rails' words of the peers' blocks at address ``peers``, after ``kernels.cpu.normal.prepare``."""
        operation[block.MARKS] = in_rank.data_ptr()
        taken = 0
        if route.relay_rows is not None and route.relay_marks is not None:
            taken = route.relay_rows.data_ptr()
            if operation[block.KIND] == NormalNotify.OPERATION_COMBINE:
                operation[block.RELAY_MARKS] = route.relay_marks.data_ptr()
        kernels.prepare_nodes(
            context, operation.ctypes.data, peers, route.node_rows.data_ptr(), taken, route.node_tokens.data_ptr()
        )

    def keep_marks(self, operation: Int64s, peers: Int64s, route: NodeRoute) -> NodeRoute:
        """After a first dispatch was opened: room for the marks that its combine needs. ``peers`` int64 [R, words]."""
        node_ranks = int(operation[block.NODE_RANKS])
        rows = torch.from_numpy(peers[self._rank % node_ranks :: node_ranks, block.RAIL_RECV].copy())
        marks = torch.empty(int(rows.sum()), mark_bytes(node_ranks), dtype=torch.uint8, device=CPU)
        operation[block.RELAY_MARKS] = marks.data_ptr()
        return route._replace(relay_rows=rows, relay_marks=marks)
