"""Nodes: whether the ranks of a group form equal groups that map each other's windows, which normal mode builds on."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["equal_nodes", "on_one_node"]


def equal_nodes(direct: Sequence[Collection[int]]) -> int:
    """Ranks of a node M when all nodes are groups of M consecutive ranks that map each other's windows, else 1.

    Args:
        direct: by rank, the other ranks whose windows its kernels write themselves.
    """
    ranks = len(direct)
    size = len(direct[0]) + 1
    if ranks % size:
        return 1
    for rank, mapped in enumerate(direct):
        first = rank // size * size
        if set(mapped) | {rank} != set(range(first, first + size)):
            return 1
    return size


def on_one_node(rank: int, peer: int, node_ranks: int) -> bool:
    """Whether the setting ``UCCL_EP_NODE_RANKS`` leaves two ranks on one node; 0 = the setting says nothing."""
    return node_ranks == 0 or rank // node_ranks == peer // node_ranks
