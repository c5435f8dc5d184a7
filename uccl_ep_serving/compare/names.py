"""The names of backends, without importing any."""

from __future__ import annotations

__all__ = ["BACKENDS", "GIVEN_ROWS"]

BACKENDS = (
    "uccl_ep",
    "uccl_ep:direct",
    "uccl_ep:shm",
    "uccl_ep:tcp",
    "uccl_ep:efa",
    "uccl_ep:roce",
    "gloo",
    "gloo-gather",
    "mpi",
    "nccl",
    "nccl-gather",
    "deepep",
    "deepep_v2",
    "nixl_ep",
    "mori",
    "uccl",
)
#: Those that move rows as they are given: FP8 ones are quantised before they are timed.
GIVEN_ROWS = ("gloo", "gloo-gather", "mpi", "nccl", "nccl-gather")
