"""gloo, MPI and NCCL: an all-to-all, or an all-gather and a reduce-scatter. Their classes say what each delivers."""

from __future__ import annotations

import torch
import torch.distributed as dist

from uccl_ep_serving.bench import peers
from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.problem import FlatProblem, LowLatencyProblem
from uccl_ep_serving.bench.subjects import Subject
from uccl_ep_serving.compare.backends.all_to_all import AllToAllLayer
from uccl_ep_serving.compare.backends.gather import GatherLayer

__all__ = ["open_collective", "why_not_collective"]

#: Behind the name of a library: its all-gather and reduce-scatter instead of its all-to-all.
_GATHER = "-gather"


def why_not_collective(name: str, card: Card) -> str:
    """Why "gloo", "nccl-gather", … cannot run in this process, "" when it can."""
    return peers.why_not(name.removesuffix(_GATHER), card)


def open_collective(
    name: str, card: Card, flat: FlatProblem, low_latency: LowLatencyProblem | None, device: torch.device
) -> Subject:
    """Rows go once per (token, rank) in either mode; fp8 rows are quantised beforehand. Collective."""
    library = name.removesuffix(_GATHER)
    where = device if library == "nccl" else torch.device("cpu")
    if library == "mpi":
        return AllToAllLayer(name, flat, peers.mpi_all_to_all(card.ranks, flat.rank), where)
    group = dist.new_group(backend=library)

    def stop() -> None:
        dist.destroy_process_group(group)

    if name.endswith(_GATHER):
        return GatherLayer(name, flat, group, where, stop)
    return AllToAllLayer(name, flat, peers.torch_all_to_all(group), where, stop)
