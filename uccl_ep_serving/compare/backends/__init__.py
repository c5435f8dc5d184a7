"""Who can be compared, by name: why one cannot run here, and how it is opened.

All have one boundary, what a layer sees: a dispatch begins with rows, ids and weights of the router, a combine with
what the experts made of them; the layout and the exchange of counts are inside.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from uccl_ep_serving.bench import peers
from uccl_ep_serving.bench.card import PATHS, Card
from uccl_ep_serving.bench.problem import FlatProblem, LowLatencyProblem
from uccl_ep_serving.bench.subjects import LowLatencySubject, NormalSubject, Subject
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.compare.backends.all_to_all import AllToAllLayer
from uccl_ep_serving.compare.backends.gather import GatherLayer
from uccl_ep_serving.config import Settings

__all__ = ["open_backend", "why_not"]

#: Behind the name of a library: its all-gather and reduce-scatter instead of its all-to-all.
_GATHER = "-gather"


def why_not(name: str, card: Card) -> str:
    """Why backend ``name`` cannot run in this process, "" when it can. Looks only; starts nothing."""
    return "" if name.startswith("uccl_ep") else peers.why_not(name.removesuffix(_GATHER), card)


def open_backend(
    name: str, card: Card, flat: FlatProblem, low_latency: LowLatencyProblem | None, device: torch.device
) -> Subject:
    """Backend ``name``, for which :func:`why_not` was "" on every rank. Collective."""
    if name == "deepep":
        return peers.open_peer(name, card, flat, low_latency)
    if not name.startswith("uccl_ep"):
        return _collective(name, flat)
    path = name.partition(":")[2]
    options: dict[str, Any] = dict(PATHS[path]) if path else {}
    group = dist.group.WORLD
    assert group is not None
    buffer = Buffer(group, low_latency_mode=low_latency is not None, settings=Settings.from_environment(**options))
    if low_latency is None:
        return NormalSubject(name, buffer, flat, device)
    return LowLatencySubject(name, buffer, low_latency, device, card.weights_at_dispatch)


def _collective(name: str, flat: FlatProblem) -> Subject:
    """An all-to-all, or an all-gather and a reduce-scatter, of gloo, MPI or NCCL."""
    library = name.removesuffix(_GATHER)
    cpu = torch.device("cpu")
    if library == "mpi":
        return AllToAllLayer(name, flat, peers.mpi_all_to_all(flat.card.ranks, flat.rank), cpu)
    device = cpu
    if library == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", flat.rank)))
        torch.cuda.set_device(device)
    group = dist.new_group(backend=library)

    def stop() -> None:
        dist.destroy_process_group(group)

    if name.endswith(_GATHER):
        return GatherLayer(name, flat, group, device, stop)
    return AllToAllLayer(name, flat, peers.torch_all_to_all(group), device, stop)
