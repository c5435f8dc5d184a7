"""Who can be compared, by name: why one cannot run here, and how it is opened."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from uccl_ep_serving.bench import peers
from uccl_ep_serving.bench.card import PATHS, Card
from uccl_ep_serving.bench.problem import FlatProblem, LowLatencyProblem
from uccl_ep_serving.bench.subjects import LowLatencySubject, NormalSubject, Subject
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.config import Settings

__all__ = ["open_backend", "why_not"]


def why_not(name: str, card: Card) -> str:
    """Why backend ``name`` cannot run in this process, "" when it can. Looks only; starts nothing."""
    return "" if name.startswith("uccl_ep") else peers.why_not(name, card)


def open_backend(
    name: str, card: Card, flat: FlatProblem, low_latency: LowLatencyProblem | None, device: torch.device
) -> Subject:
    """Backend ``name``, for which :func:`why_not` was "" on every rank. Collective."""
    if not name.startswith("uccl_ep"):
        return peers.open_peer(name, card, flat, low_latency)
    path = name.partition(":")[2]
    options: dict[str, Any] = dict(PATHS[path]) if path else {}
    group = dist.group.WORLD
    assert group is not None
    buffer = Buffer(group, low_latency_mode=low_latency is not None, settings=Settings.from_environment(**options))
    if low_latency is None:
        return NormalSubject(name, buffer, flat, device)
    return LowLatencySubject(name, buffer, low_latency, device, card.weights_at_dispatch)
