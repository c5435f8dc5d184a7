"""What normal mode takes of a device: at most how many programs, and the bytes of rows that they and proxies move."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DEFAULT_SMS", "RowTraffic", "row_traffic"]

#: The most SMs that operations take unless the user sets another number: DeepEP's default, which engines count on. By
#: the counts of docs/architecture/gpu.md a full NVLink takes 17 in a dispatch and 23 to 29 in a combine, a NIC 3 or 4.
DEFAULT_SMS = 20


class RowTraffic(NamedTuple):
    """Bytes of rows, of one rank in one operation.

    Attributes:
        copied: read and written by its kernels.
        link: stored to, or read from, memory beyond the device's own by these kernels, in the busier direction.
        far: sent by its proxies.
    """

    copied: float
    link: float
    far: float


def row_traffic(
    tokens: int, row_bytes: int, copies: int, ranks: int, mapped: int, node_ranks: int, on_device: bool
) -> RowTraffic:
    """What an operation moves when all ranks have ``tokens`` tokens and experts are chosen evenly.

    Args:
        row_bytes: bytes of a row.
        copies: most ranks that a token goes to.
        mapped: ranks whose windows this rank's kernels write, itself included.
        node_ranks: ranks of a node when each row crosses once to a node, else 0.
        on_device: windows lie in device memory; else all that leaves this rank goes through host memory.
    """
    per_rank = copies / ranks
    # rows are put into pipes and taken out of them, those of this rank itself as well
    if node_ranks:
        nodes = ranks // node_ranks
        near, far = node_ranks * per_rank, min(copies / nodes, 1.0) * (nodes - 1)
        passed = (nodes - 1) * node_ranks * per_rank
        copied = near + far + passed + copies
        link = (near + passed) * (node_ranks - 1) / node_ranks
    else:
        near, far = (mapped - 1) * per_rank, (ranks - mapped) * per_rank
        copied, link = 2 * copies, near
    if not on_device:
        link += far
    rows = tokens * row_bytes
    return RowTraffic(copied * rows, link * rows, far * rows)
