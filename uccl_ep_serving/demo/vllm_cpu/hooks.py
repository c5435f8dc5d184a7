"""The hooks behind :func:`uccl_ep_serving.demo.vllm_cpu.register`, for vLLM 0.32 and 0.33 on a CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.oracle import unquantized

from uccl_ep_serving.demo.vllm_cpu.experts import TorchBatchedExperts, TorchExperts

__all__ = ["register"]

_MARK = "_uccl_ep_cpu_hook"


def register() -> None:
    """Supply the experts, and the two collectives that the default all-to-all needs. Idempotent."""
    choose = unquantized.select_unquantized_moe_backend
    if not getattr(choose, _MARK, False):
        hooked = _with_torch_experts(choose)
        unquantized.select_unquantized_moe_backend = hooked
        from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method

        unquantized_fused_moe_method.select_unquantized_moe_backend = hooked
    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _with_torch_experts(original: Any) -> Any:
    @functools.wraps(original)
    def select(moe_config: Any) -> Any:
        parallel = moe_config.moe_parallel_config
        if not (parallel.use_ep and parallel.use_all2all_kernels):
            return original(moe_config)
        batched = parallel.use_batched_activation_format
        return unquantized.UnquantizedMoeBackend.CPU, TorchBatchedExperts if batched else TorchExperts

    setattr(select, _MARK, True)
    return select


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Rows of every rank, as many as ``sizes`` says, in rank order."""
    if isinstance(input_, list):
        return [_all_gatherv(self, one, dim, sizes) for one in input_]
    counts = sizes or [input_.shape[0]] * self.world_size
    most = max(counts)
    padded = input_.new_zeros(most, *input_.shape[1:])
    padded[: input_.shape[0]] = input_
    gathered = input_.new_empty(self.world_size * most, *input_.shape[1:])
    dist.all_gather_into_tensor(gathered, padded, group=self.device_group)
    return torch.cat([gathered[rank * most : rank * most + count] for rank, count in enumerate(counts)])


def _reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """This rank's rows of the sum over the ranks: gloo has an all-reduce, of which one part is kept."""
    counts = sizes or [input_.shape[0] // self.world_size] * self.world_size
    total = input_.contiguous().clone()
    dist.all_reduce(total, group=self.device_group)
    first = sum(counts[: self.rank_in_group])
    return total[first : first + counts[self.rank_in_group]].clone()
