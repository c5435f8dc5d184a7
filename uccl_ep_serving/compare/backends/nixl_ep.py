"""NIXL EP: DeepEP's first interface with other names in normal mode, and ranks that connect one by one.

What it delivers is what DeepEP does (see ``deepep.py``). Its normal mode is between nodes of eight GPUs only.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from uccl_ep_serving.bench import peers
from uccl_ep_serving.bench.any_order import AnyOrderLowLatency
from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.problem import FlatProblem, LowLatencyProblem
from uccl_ep_serving.bench.subjects import NormalSubject, Subject
from uccl_ep_serving.compare.backends.deepep import SIGNATURES as DEEPEP
from uccl_ep_serving.compare.backends.installed import lacks, not_importable

__all__ = ["open_nixl_ep", "why_not_nixl_ep"]

_NODE = 8
_LOW_LATENCY = ("Buffer.low_latency_dispatch", "Buffer.low_latency_combine", "Buffer.get_dispatch_layout")
#: As of nixl 8770b65 (examples/device/ep/nixl_ep/buffer.py).
SIGNATURES = {
    "Buffer.__init__": ("rank", "low_latency_mode", "explicitly_destroy", "group", "tcp_store_group"),
    "Buffer.get_rdma_size_hint": ("num_max_dispatch_tokens_per_rank", "hidden", "num_ranks", "num_experts"),
    "Buffer.update_memory_buffers": ("num_ranks", "num_experts_per_rank", "num_rdma_bytes", "num_nvl_bytes"),
    "Buffer.connect_ranks": ("remote_ranks",),
    "Buffer.ht_dispatch": DEEPEP["Buffer.dispatch"],
    "Buffer.ht_combine": DEEPEP["Buffer.combine"],
    **{name: DEEPEP[name] for name in _LOW_LATENCY},
}


def why_not_nixl_ep(card: Card) -> str:
    """Why NIXL EP cannot run in this process, "" when it can."""
    if importlib.util.find_spec("nixl_ep") is None:
        return "nixl_ep is not installed"
    if card.dtype not in ("bf16", "fp8"):
        return f"it has no {card.dtype} rows"
    if card.mode == "normal" and (card.ranks <= _NODE or card.ranks % _NODE):
        return f"its normal mode is between nodes of {_NODE} GPUs, not for {card.ranks} ranks"
    if card.mode == "low-latency" and card.ranks * card.tokens % 4:
        return f"{card.ranks} ranks of {card.tokens} tokens are no multiple of 4"
    return peers.gpus_missing(card) or not_importable("nixl_ep") or lacks("nixl_ep", SIGNATURES)


class _NormalNames:
    """Its Buffer by the names of DeepEP's normal mode."""

    def __init__(self, buffer: Any) -> None:
        self.get_dispatch_layout = buffer.get_dispatch_layout
        self.dispatch, self.combine, self.destroy = buffer.ht_dispatch, buffer.ht_combine, buffer.destroy


def open_nixl_ep(
    name: str, card: Card, flat: FlatProblem, low_latency: LowLatencyProblem | None, device: torch.device
) -> Subject:
    """Its Buffer in the card's mode, as vLLM opens it in low-latency mode. Collective."""
    nixl_ep: Any = importlib.import_module("nixl_ep")
    group: Any = dist.new_group(backend="gloo")
    # one more name for each buffer: keys of an earlier one may still be there
    store = c10d.PrefixStore(f"nixl_ep/{group.group_name}", group.get_group_store())
    local, others = card.experts // card.ranks, [rank for rank in range(card.ranks) if rank != flat.rank]
    if low_latency is not None:
        size = nixl_ep.Buffer.get_rdma_size_hint(card.tokens, card.hidden, card.ranks, card.experts)
        buffer = nixl_ep.Buffer(rank=flat.rank, explicitly_destroy=True, tcp_store_group=store)
        buffer.update_memory_buffers(card.ranks, local, size)
        buffer.connect_ranks(others)
        return AnyOrderLowLatency(name, buffer, low_latency, device)
    row = card.hidden * 2
    configs = (nixl_ep.Buffer.get_dispatch_config(card.ranks), nixl_ep.Buffer.get_combine_config(card.ranks))
    rdma = max(config.get_rdma_buffer_size_hint(row, card.ranks) for config in configs)
    nvl = max(config.get_nvl_buffer_size_hint(row, card.ranks) for config in configs)
    buffer = nixl_ep.Buffer(
        rank=flat.rank, low_latency_mode=False, explicitly_destroy=True, group=group, tcp_store_group=store
    )
    buffer.update_memory_buffers(card.ranks, max(nixl_ep.Buffer.num_sms // 2, 1), rdma, nvl)
    buffer.connect_ranks(others)
    return NormalSubject(name, _NormalNames(buffer), flat, device)
