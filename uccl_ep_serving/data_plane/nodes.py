"""Nodes: whether the ranks of a group form equal groups that map each other's windows, which normal mode builds on."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["crossed_once", "equal_nodes", "on_one_node"]


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


def crossed_once(node_ranks: int, ranks: int, hierarchy: str, masked: bool) -> int:
    """Ranks of a node when a row of normal mode crosses once to each node, else 0: to each rank.

    Args:
        node_ranks: of :func:`equal_nodes`, of ``ranks`` ranks.
        hierarchy: the setting ``UCCL_EP_HIERARCHY``.
        masked: a rank is left out.
    """
    return 0 if node_ranks in (1, ranks) or hierarchy == "off" or masked else node_ranks
