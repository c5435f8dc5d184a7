"""Fakes of packages that cannot load without GPUs: ``deep_ep``, ``uccl``, ``nixl_ep`` and ``mori``.

They have the signatures of those packages' public sources (versions stand beside each class), and move rows for real:
through gloo, on CPU tensors, in the layouts that those sources document. Rows come in another order in each call where
the packages promise none.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from uccl_ep_serving import oracle

_random = torch.Generator()


def _from_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _shuffled(count: int) -> torch.Tensor:
    return torch.randperm(count, generator=_random)


def _plain(x: Any) -> Any:
    """``x`` so that it can be sent: torch does not pickle fp8."""
    return (x[0].view(torch.uint8), x[1]) if isinstance(x, tuple) else x


def _take(x: Any, there: oracle.NormalReceived, order: torch.Tensor) -> Any:
    """Rows of all ranks' ``x`` (of :func:`_plain`) that arrive, in ``order``."""
    if isinstance(x[0], tuple):
        codes, scales = (there.rows(list(one))[order] for one in zip(*x, strict=True))
        return codes.view(torch.float8_e4m3fn), scales
    return there.rows(x)[order]


class Config:
    """``deep_ep.Config``."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks


class _Buffer:
    """What Buffers with the interface of DeepEP 2.1.0 (``legacy.py``) share; nixl_ep's and UCCL's are such."""

    num_sms = 20
    destroyed = False

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return num_max_dispatch_tokens_per_rank * hidden * num_experts

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        self._experts = num_experts
        in_rank = oracle.in_rank(topk_idx, num_experts, dist.get_world_size())
        return in_rank.sum(0).int(), None, torch.bincount(topk_idx.flatten(), minlength=num_experts), in_rank, None

    def dispatch(
        self,
        x: Any,
        handle: Any = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        everyone = _from_all((_plain(x), topk_idx, topk_weights))
        delivered = oracle.normal_dispatch([one[1] for one in everyone], [one[2] for one in everyone], self._experts)
        here = delivered[dist.get_rank()]
        rows = _take([one[0] for one in everyone], here, torch.arange(len(here.token)))
        handle = (delivered, len(is_token_in_rank))
        return rows, here.topk_idx, here.topk_weights, here.expert_counts, handle, None

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        delivered, tokens = handle
        return oracle.normal_combine(_from_all(x), delivered, dist.get_rank(), tokens), None, None

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, ...]:
        everyone = _from_all((x, topk_idx))
        given = [oracle.LowLatencyInput(rows, ids, torch.zeros_like(ids)) for rows, ids in everyone]
        rank, tokens = dist.get_rank(), num_max_dispatch_tokens_per_rank
        sorted_rows = oracle.low_latency_dispatch(given, rank, tokens, num_experts)
        rows = torch.full_like(sorted_rows.x, torch.nan)
        info, ranges = torch.full_like(sorted_rows.src_info, -7), torch.zeros_like(sorted_rows.layout_range)
        for expert, packed in enumerate(sorted_rows.layout_range.tolist()):
            end = 0
            for source in _shuffled(len(packed)).tolist():
                begin, count = packed[source] >> 32, packed[source] & 0xFFFFFFFF
                order = begin + _shuffled(count)
                rows[expert, end : end + count] = sorted_rows.x[expert, order]
                info[expert, end : end + count] = sorted_rows.src_info[expert, order]
                ranges[expert, source] = end << 32 | count
                end += count
        received: Any = rows
        if use_fp8:
            codes, scales = oracle.quantise_fp8(rows.flatten(0, 1))
            received = codes.view(rows.shape), scales.view(*rows.shape[:2], -1)
        handle = (info, ranges, tokens, x.shape[1], num_experts)
        return received, sorted_rows.count, handle, None, None

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        total = torch.zeros(*topk_idx.shape, x.shape[2])
        for owner, (rows, info, ranges) in enumerate(_from_all((x, *handle[:2]))):
            for expert, packed in enumerate(ranges[:, dist.get_rank()].tolist()):
                begin, count = packed >> 32, packed & 0xFFFFFFFF
                tokens = info[expert, begin : begin + count].long()
                slot = (topk_idx[tokens] == owner * len(rows) + expert).int().argmax(1)
                total[tokens, slot] = rows[expert, begin : begin + count].float()
        return (total * topk_weights[:, :, None]).sum(1).to(x.dtype), None, None

    def destroy(self) -> None:
        self.destroyed = True


class DeepEPBuffer(_Buffer):
    """``deep_ep.Buffer`` of DeepEP 2.1.0."""

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        assert group.size() == dist.get_world_size()
        assert num_rdma_bytes


class UcclBuffer(_Buffer):
    """``deep_ep.Buffer`` of UCCL da914a2."""

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        is_intranode: bool | None = None,
    ) -> None:
        assert group.size() == dist.get_world_size()
        assert num_rdma_bytes


class NixlBuffer(_Buffer):
    """``nixl_ep.Buffer`` of nixl 8770b65."""

    def __init__(
        self,
        disable_ll_nvlink: bool = False,
        explicitly_destroy: bool = False,
        rank: int = 0,
        low_latency_mode: bool = True,
        group: Any = None,
        comm: Any = None,
        tcp_store_group: Any = None,
        timeout_ms: int = 30_000,
    ) -> None:
        self._rank, self._store, self._group = rank, tcp_store_group, group
        self._low_latency = low_latency_mode
        self._ready = False

    @staticmethod
    def get_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        return num_max_dispatch_tokens_per_rank * hidden * num_experts

    def update_memory_buffers(
        self, num_ranks: int, num_experts_per_rank: int, num_rdma_bytes: int, num_nvl_bytes: int = 0
    ) -> None:
        assert num_rdma_bytes
        self._ranks = num_ranks

    def connect_ranks(self, remote_ranks: list[int], activate: bool = True) -> None:
        assert sorted([*remote_ranks, self._rank]) == list(range(self._ranks))
        assert self._low_latency or self._group is not None
        keys = [f"NIXL_EP/{rank}" for rank in remote_ranks]
        self._store.set(f"NIXL_EP/{self._rank}", b"metadata")
        self._store.wait(keys)
        assert self._store.multi_get(keys) == [b"metadata"] * len(keys)
        self._ready = True

    def ht_dispatch(
        self,
        x: Any,
        handle: Any = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        assert self._ready
        layout = (num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert)
        return _Buffer.dispatch(self, x, None, *layout, topk_idx, topk_weights)

    def ht_combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        return _Buffer.combine(self, x, handle)

    # in these names it has its low-latency mode, whose other ones they were
    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        return self.low_latency_dispatch(*args, **kwargs)

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        return self.low_latency_combine(*args, **kwargs)


@dataclass
class EPHandle:
    """``deep_ep.EPHandle`` of DeepEP 2.1.0, as far as callers read it."""

    do_expand: bool
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    recv_src_metadata: torch.Tensor


class ElasticBuffer:
    """``deep_ep.ElasticBuffer`` of DeepEP 2.1.0."""

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        assert group.size() == dist.get_world_size()
        assert hidden
        self._most, self._explicitly_destroy = num_max_tokens_per_rank, explicitly_destroy

    def dispatch(
        self,
        x: Any,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, ...]:
        assert num_experts is not None
        everyone = _from_all((_plain(x), topk_idx, topk_weights))
        delivered = oracle.normal_dispatch([one[1] for one in everyone], [one[2] for one in everyone], num_experts)
        here, ranks = delivered[dist.get_rank()], dist.get_world_size()
        # grouped by source rank, in any order within
        order = torch.cat(
            [where[_shuffled(len(where))] for where in ((here.source == rank).nonzero()[:, 0] for rank in range(ranks))]
        )
        ids, topk = here.topk_idx[order], here.topk_idx.shape[1]
        metadata = torch.full((len(order), topk + 2), -1, dtype=torch.int32)
        metadata[:, 0] = (here.source * self._most + here.token)[order]
        by_rank = torch.bincount(here.source, minlength=ranks).cumsum(0).int()
        rows = _take([one[0] for one in everyone], here, order)
        # a token's weights come whole, also those of experts elsewhere
        weights = here.rows([one[2] for one in everyone])[order]
        if not do_expand:
            assert do_cpu_sync
            counts = torch.tensor(here.expert_counts).cumsum(0).int()
            self._sent = len(topk_idx)  # type: ignore[arg-type]
            return rows, ids, weights, EPHandle(False, here.expert_counts, by_rank, counts, metadata), None
        assert not do_cpu_sync
        align, local = expert_alignment or 1, len(here.expert_counts)
        most = -(-(ranks * self._most * min(topk, local) + (align - 1) * local) // align) * align
        expanded, told = torch.full((most, rows.shape[1]), torch.nan, dtype=rows.dtype), torch.full((most,), torch.nan)
        ends, begin = [], 0
        for expert in range(local):
            row, slot = (ids == expert).nonzero()[_shuffled(here.expert_counts[expert])].T
            end = begin + len(row)
            expanded[begin:end], told[begin:end] = rows[row], weights[row, slot]
            metadata[row, slot + 2] = torch.arange(begin, end, dtype=torch.int32)
            ends.append(end)
            begin = -(-end // align) * align
        # as many lines as there can be; those beyond what came hold anything
        unused = torch.full((ranks * self._most - len(order), topk + 2), 3, dtype=torch.int32)
        self._sent = len(topk_idx)  # type: ignore[arg-type]
        handle = EPHandle(True, [], by_rank, torch.tensor(ends, dtype=torch.int32), torch.cat([metadata, unused]))
        return expanded, None, told, handle, None

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        metadata = handle.recv_src_metadata[:count]
        rows = x
        if handle.do_expand:
            places = metadata[:, 2:].long()
            one_by_one = torch.where((places >= 0)[:, :, None], x[places.clamp(min=0)].float(), 0.0)
            rows = one_by_one.sum(1).to(x.dtype)
        assert len(rows) == count
        total = torch.zeros(self._sent, x.shape[1])
        for back, info in _from_all((rows, metadata[:, 0].long())):
            mine = info // self._most == dist.get_rank()
            total[info[mine] % self._most] += back[mine].float()
        return total.to(x.dtype), None, None

    def destroy(self) -> None:
        assert self._explicitly_destroy


class EpDispatchCombineKernelType(enum.Enum):
    """``mori.ops.EpDispatchCombineKernelType`` of mori 624002c."""

    IntraNode, IntraNodeLL, InterNode, InterNodeV1, InterNodeV1LL, AsyncLL = range(6)


@dataclass
class EpDispatchCombineConfig:
    """``mori.ops.EpDispatchCombineConfig`` of mori 624002c."""

    data_type: torch.dtype
    rank: int
    world_size: int
    hidden_dim: int
    scale_dim: int
    scale_type_size: int
    max_token_type_size: int
    max_num_inp_token_per_rank: int
    num_experts_per_rank: int
    num_experts_per_token: int
    warp_num_per_block: int = 8
    block_num: int = 80
    max_total_recv_tokens: int = 0
    use_external_inp_buf: bool = True
    kernel_type: EpDispatchCombineKernelType = EpDispatchCombineKernelType.IntraNode
    gpu_per_node: int = 8
    rdma_block_num: int = 0
    num_qp_per_pe: int = 1
    quant_type: str = "none"


class EpDispatchCombineOp:
    """``mori.ops.EpDispatchCombineOp`` of mori 624002c."""

    def __init__(self, config: EpDispatchCombineConfig) -> None:
        self.config = config
        self.local_expert_count = torch.zeros(config.num_experts_per_rank, dtype=torch.int32)

    def max_num_tokens_to_recv(self) -> int:
        return self.config.world_size * self.config.max_num_inp_token_per_rank

    def dispatch(
        self,
        input: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
        *,
        routing: Any = None,
        return_routing: bool = False,
    ) -> tuple[Any, ...]:
        assert indices.dtype == torch.int32
        assert scales is None
        everyone = _from_all((input, indices.long(), weights))
        experts = self.config.world_size * self.config.num_experts_per_rank
        delivered = oracle.normal_dispatch([one[1] for one in everyone], [one[2] for one in everyone], experts)
        here = delivered[self.config.rank]
        count, most = len(here.token), self.max_num_tokens_to_recv()
        order = _shuffled(count)
        if call_local_expert_count:
            self.local_expert_count = torch.tensor(here.expert_counts, dtype=torch.int32)
        self._position = (here.source * self.config.max_num_inp_token_per_rank + here.token)[order].int()
        out = torch.full((most, input.shape[1]), torch.nan, dtype=input.dtype)
        out[:count] = _take([one[0] for one in everyone], here, order)
        told, ids = torch.full((most, weights.shape[1]), torch.nan), torch.zeros(most, indices.shape[1]).int()
        told[:count] = here.rows([one[2] for one in everyone])[order]
        ids[:count] = here.rows([one[1] for one in everyone])[order].int()
        return out, told, None, ids, torch.tensor([count], dtype=torch.int32)

    def combine(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        use_external_inp_buf: int = -1,
        call_reset: bool = False,
        *,
        routing: Any = None,
    ) -> tuple[Any, ...]:
        most = self.config.max_num_inp_token_per_rank
        total = torch.zeros(most, input.shape[1])
        for rows, position in _from_all((input[: len(self._position)], self._position.long())):
            mine = position // most == self.config.rank
            total[position[mine] % most] += rows[mine].float()
        assert len(indices) <= most
        return total.to(input.dtype), None

    def get_dispatch_src_token_pos(self) -> torch.Tensor:
        return self._position


def shmem_torch_process_group_init(group_name: str) -> int:
    """``mori.shmem.shmem_torch_process_group_init`` of mori 624002c."""
    group = dist.distributed_c10d._resolve_process_group(group_name)
    assert group.size() == dist.get_world_size()
    return 0


def _module(name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(content)
    module.__spec__ = types.SimpleNamespace(name=name)  # type: ignore[assignment]
    return module


def packages(uccl: bool = False) -> dict[str, types.ModuleType]:
    """By name, the fakes as modules. With ``uccl``, deep_ep is UCCL's and not DeepEP's."""
    ops = _module(
        "mori.ops",
        EpDispatchCombineKernelType=EpDispatchCombineKernelType,
        EpDispatchCombineConfig=EpDispatchCombineConfig,
        EpDispatchCombineOp=EpDispatchCombineOp,
    )
    shmem = _module("mori.shmem", shmem_torch_process_group_init=shmem_torch_process_group_init)
    own: dict[str, Any] = {"Buffer": DeepEPBuffer, "ElasticBuffer": ElasticBuffer, "Config": Config}
    if uccl:
        nothing: Callable[[], None] = lambda: None  # noqa: E731
        own = {"Buffer": UcclBuffer, "Config": Config, "initialize_uccl": nothing, "destroy_uccl": nothing}
    return {
        "deep_ep": _module("deep_ep", **own),
        "nixl_ep": _module("nixl_ep", Buffer=NixlBuffer, Config=Config),
        "mori": _module("mori", ops=ops, shmem=shmem),
        "mori.ops": ops,
        "mori.shmem": shmem,
        "uccl": _module("uccl"),
    }


def install(uccl: bool = False) -> None:
    """Put the fakes where ``import`` finds them, for the rest of this process."""
    sys.modules.update(packages(uccl))
    _random.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
