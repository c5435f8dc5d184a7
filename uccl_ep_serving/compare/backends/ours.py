"""This package: by the path that it chooses itself, or by one that is named.

Normal mode: the layout is a phase of its own; a dispatch exchanges counts, and delivers rows once per (token, rank)
with ids and weights, and the rows of each expert as a list. Low-latency mode: rows once per (token, expert) in DeepEP's
layout with counts on the device, quantised on the way if the card says fp8; with ``weights_at_dispatch`` weights travel
with the rows, and one row returns per (token, rank).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from uccl_ep_serving.bench.card import PATHS, Card
from uccl_ep_serving.bench.problem import FlatProblem, LowLatencyProblem
from uccl_ep_serving.bench.rank import settings_of
from uccl_ep_serving.bench.subjects import LowLatencySubject, NormalSubject, Subject
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.data_plane.nics import nic_transports
from uccl_ep_serving.proxy.transport.select import NIC_TRANSPORTS

__all__ = ["open_ours", "why_not_ours"]


def _options(name: str) -> Mapping[str, Any]:
    path = name.partition(":")[2]
    return PATHS[path] if path else {}


def why_not_ours(name: str, card: Card) -> str:
    """Why path ``name`` ("uccl_ep:efa") cannot run in this process, "" when it can."""
    options = _options(name)
    transport = options.get("transport")
    if transport in NIC_TRANSPORTS and transport not in nic_transports(settings_of(card, options)):
        return f"this host has no NIC for {transport}"
    return ""


def open_ours(
    name: str, card: Card, flat: FlatProblem, low_latency: LowLatencyProblem | None, device: torch.device
) -> Subject:
    """Path ``name``: "uccl_ep", "uccl_ep:tcp", … Collective."""
    group = dist.group.WORLD
    assert group is not None
    buffer = Buffer(group, low_latency_mode=low_latency is not None, settings=settings_of(card, _options(name)))
    if low_latency is None:
        return NormalSubject(name, buffer, flat, device)
    return LowLatencySubject(name, buffer, low_latency, device, card.weights_at_dispatch)
