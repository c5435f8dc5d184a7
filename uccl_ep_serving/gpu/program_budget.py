"""How many programs of a device move the rows of an operation: what the slowest way needs to be kept busy, no more.

Kernels copy each row once or twice while it crosses a link or a NIC once. An operation lasts as long as the slowest of
these ways, or as its steps where it has little to move; programs beyond those that copy all rows in that time would
only take multiprocessors from whoever computes meanwhile. A combine moves what its dispatch did, the other way.
"""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = [
    "DEFAULT_SMS",
    "LINK_BANDWIDTH",
    "PCIE_BANDWIDTH",
    "PROXY_BANDWIDTH",
    "Budget",
    "RowTraffic",
    "budget",
    "row_traffic",
]

#: The most SMs that operations take unless the user sets another number: DeepEP's default.
DEFAULT_SMS = 20
#: Bytes of rows that one program copies in a second: what DeepEP's SMs do (153 GB/s in and as much out with 20, its
#: README, dispatch among 8 H800). What is on its way to a program would allow more (Little's law): it waits for the
#: list of 4 rows, then asks for up to 32 KiB at once, so 2 waits for 28 KiB of FP8 rows and 3 for 56 KiB of BF16 rows.
#: At 0.55 us, twice the 479 cycles of an idle H100 (arXiv 2402.13499), that is 26 and 35 GB/s. Not measured here yet:
#: no machine of the project has had a GPU.
_PROGRAM_BANDWIDTH = 15e9
#: Seconds of a step that has nothing to copy: two kernels, each of which starts about 2 us after the end of the last.
#: What ``advance`` waits for is not counted: loads past the caches, one after the other.
_STEP_SECONDS = 4e-6
#: Bytes a second, one way. Fourth-generation NVLink: 18 links of 25 GB/s (NVIDIA H100 data sheet: 900 GB/s both ways).
LINK_BANDWIDTH = 450e9
#: The same of 16 lanes of PCIe 5.0 (63 GB/s) less packet headers: windows in host memory.
PCIE_BANDWIDTH = 50e9
#: The same of the proxies of a rank that copy rows themselves (shm, tcp): benchmarks/RESULTS.md, 4096 x 7168 over shm.
PROXY_BANDWIDTH = 3.5e9


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


class Budget(NamedTuple):
    """Programs, and what their number follows from, in words."""

    programs: int
    reason: str


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
    if node_ranks:
        nodes = ranks // node_ranks
        near, far = (node_ranks - 1) * per_rank, min(copies / nodes, 1.0) * (nodes - 1)
        # what a rank takes of the rows that crossed to its node; what it forwards itself is in its own memory
        passed = (nodes - 1) * node_ranks * per_rank
        copied = per_rank + 2 * near + far + passed
        link = near + passed * (node_ranks - 1) / node_ranks
    else:
        near, far = (mapped - 1) * per_rank, (ranks - mapped) * per_rank
        copied, link = per_rank + 2 * (near + far), near
    if not on_device:
        link += far
    rows = tokens * row_bytes
    return RowTraffic(copied * rows, link * rows, far * rows)


def budget(traffic: RowTraffic, steps: int, link: float, far: float, most: int) -> Budget:
    """Programs that copy ``traffic`` in the time that the slowest way takes.

    Args:
        steps: of the operation, at least 1.
        link, far: bytes per second of a link to peers' windows, and of NICs or proxies.
        most: programs that the caller allows.
    """
    ways = {
        "the links to windows of other ranks": traffic.link / link,
        "NICs and proxies": traffic.far / far,
        "the steps of the operation": steps * _STEP_SECONDS,
    }
    slowest = max(ways, key=lambda way: ways[way])
    needed = max(math.ceil(traffic.copied / (ways[slowest] * _PROGRAM_BANDWIDTH)), 1)
    if needed > most:
        return Budget(max(most, 1), f"all that are allowed; the bottleneck, {slowest}, would keep more busy")
    return Budget(needed, f"enough to saturate the bottleneck, {slowest}")
