"""MORI-EP of ROCm. In both modes a row goes once per (token, rank), in an order of its own.

A dispatch delivers bf16 rows with ids and weights, the number of rows and those of each expert on the device; it knows
no layout and waits for no count on the host. A combine sums rows without weights. The kernel is the one that SGLang
takes: between nodes that of low latency up to 256 tokens or when the card's mode says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch
import torch.distributed as dist

from uccl_ep_serving.bench import peers
from uccl_ep_serving.bench.any_order import AnyOrderFlat
from uccl_ep_serving.bench.card import Card
from uccl_ep_serving.bench.problem import FlatProblem, LowLatencyProblem
from uccl_ep_serving.bench.subjects import Subject, finish
from uccl_ep_serving.compare.backends.installed import lacks, not_importable

__all__ = ["open_mori", "why_not_mori"]

_FEW_TOKENS = 256
#: As of mori 624002c (python/mori/ops/dispatch_combine.py); what we pass to a Config.
_CONFIG = (
    *("data_type", "rank", "world_size", "hidden_dim", "scale_dim", "scale_type_size", "max_token_type_size"),
    *("max_num_inp_token_per_rank", "num_experts_per_rank", "num_experts_per_token", "kernel_type", "gpu_per_node"),
    *("warp_num_per_block", "block_num", "rdma_block_num", "num_qp_per_pe"),
)
SIGNATURES = {
    "ops.EpDispatchCombineConfig": _CONFIG,
    "ops.EpDispatchCombineOp.dispatch": ("input", "weights", "scales", "indices", "call_local_expert_count"),
    "ops.EpDispatchCombineOp.combine": ("input", "weights", "indices"),
    "ops.EpDispatchCombineOp.get_dispatch_src_token_pos": (),
    "ops.EpDispatchCombineOp.max_num_tokens_to_recv": (),
    "shmem.shmem_torch_process_group_init": ("group_name",),
}
#: Its symmetric heap is set up once for a process, and taken down with it.
_started: list[str] = []


def why_not_mori(card: Card) -> str:
    """Why MORI-EP cannot run in this process, "" when it can."""
    if importlib.util.find_spec("mori") is None:
        return "mori is not installed"
    if card.dtype != "bf16":
        return f"its rows are moved as bf16 here, not as {card.dtype}"
    if torch.version.hip is None:
        return "this torch is not ROCm's"
    return (
        peers.gpus_missing(card)
        or not_importable("mori.ops")
        or not_importable("mori.shmem")
        or lacks("mori", SIGNATURES)
    )


class MoriLayer(AnyOrderFlat):
    """Its operator ``op`` as the backend of a layer."""

    def __init__(self, name: str, op: Any, problem: FlatProblem, device: torch.device) -> None:
        super().__init__(name, problem, device, op.max_num_tokens_to_recv())
        self._op = op
        self._ids = self._ids.int()
        self._total: Any = None

    def _dispatch(self, variant: int) -> None:
        self._rows, self._told, _, self._everywhere, self._total = self._op.dispatch(
            self._x[variant], self._weights, None, self._ids, call_local_expert_count=True
        )
        finish(self._device)

    def _combine(self, variant: int) -> None:
        self._combined, _ = self._op.combine(self._out, None, self._ids)
        finish(self._device)

    def _positions(self) -> torch.Tensor:
        found: torch.Tensor = self._op.get_dispatch_src_token_pos()
        return found[: int(self._total[0])].cpu().long()

    def check(self, variant: int) -> float:
        card, rank = self._problem.card, self._problem.rank
        self._chosen = self._everywhere - rank * (card.experts // card.ranks)
        self._counts = self._op.local_expert_count.tolist()
        return super().check(variant)


def open_mori(
    name: str, card: Card, flat: FlatProblem, low_latency: LowLatencyProblem | None, device: torch.device
) -> Subject:
    """Its operator, sized for the card. Collective."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", card.ranks))
    # what it allocates comes from a heap of fixed size: rows in and out, of dispatch and combine, with room to spare
    rows = 8 * card.ranks * card.tokens * card.hidden * 4
    os.environ.setdefault("MORI_SHMEM_HEAP_SIZE", str(max(rows, 4 << 30)))
    ops: Any = importlib.import_module("mori.ops")
    if not _started:
        group: Any = dist.new_group(backend="gloo")
        importlib.import_module("mori.shmem").shmem_torch_process_group_init(group.group_name)
        _started.append(group.group_name)
    kinds = ops.EpDispatchCombineKernelType
    kind, warps, blocks, rdma_blocks = kinds.IntraNode, 16, 80, 0
    if here < card.ranks:
        few = low_latency is not None or card.tokens <= _FEW_TOKENS
        kind, warps, blocks, rdma_blocks = (kinds.InterNodeV1LL if few else kinds.InterNodeV1), 8, 64, 32
    config = ops.EpDispatchCombineConfig(
        data_type=torch.bfloat16,
        rank=flat.rank,
        world_size=card.ranks,
        hidden_dim=card.hidden,
        scale_dim=0,
        scale_type_size=4,
        max_token_type_size=2,
        max_num_inp_token_per_rank=card.tokens,
        num_experts_per_rank=card.experts // card.ranks,
        num_experts_per_token=card.topk,
        kernel_type=kind,
        gpu_per_node=here,
        warp_num_per_block=warps,
        block_num=blocks,
        rdma_block_num=rdma_blocks,
        num_qp_per_pe=2,
    )
    return MoriLayer(name, ops.EpDispatchCombineOp(config), flat, device)
