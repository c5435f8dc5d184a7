"""Prepare / finalize in vLLM's Standard form, on the normal mode of the Buffer: any number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.v1.worker.ubatching import (
    dbo_current_ubatch_id,
    dbo_enabled,
    dbo_get_previous_event,
    dbo_switch_to_comm,
    dbo_switch_to_compute,
    dbo_switch_to_compute_sync,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
)

from uccl_ep_serving import Buffer, EventOverlap
from uccl_ep_serving.engines.vllm.graph_steps import GraphSteps
from uccl_ep_serving.engines.vllm.prepare_finalize import PrepareFinalize
from uccl_ep_serving.engines.vllm.quantisation import (
    is_block_scaled_fp8,
    one_scale_of_all,
    quantised_after,
    quantised_before,
    weighted_input,
)

__all__ = ["HighThroughput"]


class HighThroughput(PrepareFinalize):
    """Every token once to each rank of its experts; there the experts see rows with global expert ids and weights.

    A dispatch asks how many rows come, for which the host waits; in the steps of ``graphs`` it takes the most that can
    come instead. The experts then see rows beyond those that came: they have no expert here, and combine sends none.

    Under dual-batch overlap the calls yield where the built-in DeepEP high-throughput backend yields
    (``prepare_finalize/deepep_ht.py:144``): before dispatch and before combine, so that the other micro-batch computes.

    Args:
        buffer, ranks: as for both modes.
        rank_expert_offset: global id of the first local expert.
        graphs: which steps a CUDA graph may hold; None: none.
    """

    #: Rows, with ids and weights beside them.
    activation_format = mk.FusedMoEActivationFormat.Standard

    def __init__(
        self, buffer: Buffer, ranks: int, *, rank_expert_offset: int, graphs: GraphSteps | None = None
    ) -> None:
        super().__init__(buffer, ranks)
        self._offset = rank_expert_offset
        self._graphs = graphs

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Callable[[], Any]:
        """Send the tokens. FP8 with a scale per 128 values is quantised before dispatch, other formats after it.

        Returns:
            A function that waits and gives rows [N, H]; their scales or None; tokens of each local expert, or None
            where the host has not asked; global ids int64 [N, K]; weights float32 [N, K]. An id that belongs to another
            rank, and each of a row that nobody sent, is one that ``expert_map`` maps to -1: the built-in experts take
            no -1 themselves.
        """
        most = 0 if self._graphs is None else self._graphs.most_rows(len(a1))
        if apply_router_weight_on_input:
            a1 = weighted_input(a1, topk_weights)
        quantises_here = is_block_scaled_fp8(quant_config) and not defer_input_quant
        rows, scales = quantised_before(a1, quant_config) if quantises_here else (a1, None)
        weights = topk_weights.to(torch.float32)

        # taken before the other micro-batch runs, so that it covers the work of this one only
        previous = dbo_get_previous_event(self.buffer.capture)
        dbo_yield_and_switch_from_compute_to_comm()
        _used_by_this_stream(rows, scales, topk_ids, weights)
        per_rank, per_node, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            topk_ids, num_experts, previous_event=previous
        )
        self.buffer.layer = self.layer
        received, ids, recv_weights, counts, handle, event = self.buffer.dispatch(
            rows if scales is None else (rows, scales),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_ids,
            topk_weights=weights,
            num_worst_tokens=most,
            config=Buffer.get_dispatch_config(self._ranks),
            previous_event=previous,
            async_finish=not dbo_enabled(),
        )
        # Under dual-batch overlap what was received is memory of the communication stream, and another one uses it
        # until combine makes that stream wait. Recorded for the other it would be kept from all that is captured later.
        held = (received, ids, recv_weights) if dbo_enabled() else None
        self._handles[dbo_current_ubatch_id()] = handle, held
        dbo_switch_to_compute_sync()
        assert ids is not None, "ids were given, so ids come back"
        kept, kept_ids = received, ids

        def receiver() -> Any:
            event.current_stream_wait()
            values, value_scales = kept if isinstance(kept, tuple) else (kept, None)
            meta = None if most else mk.ExpertTokensMetadata.make_from_list(counts, device=values.device)
            if not quantises_here and not defer_input_quant and values.numel():
                if most and one_scale_of_all(quant_config):
                    values = values.masked_fill((kept_ids == -1).all(1, keepdim=True), 0)
                values, value_scales = quantised_after(values, quant_config)
            return values, value_scales, meta, self._global(kept_ids, num_experts), recv_weights

        return receiver

    def _global(self, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
        elsewhere = num_experts - 1 if self._offset == 0 else 0  # some expert of another rank
        return torch.where(ids == -1, elsewhere, ids + self._offset)

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> Callable[[], None]:
        """Send the rows back; weights and ids are those that prepare returned.

        Returns:
            A function that waits; ``output`` [T, H] is valid after it.
        """
        combined, event = self._combine(
            fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
        )

        def receiver() -> None:
            event.current_stream_wait()
            dbo_switch_to_comm()
            output.copy_(combined, non_blocking=True)
            dbo_yield_and_switch_from_comm_to_compute()

        return receiver

    def _combine(
        self,
        rows: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce: Any,
    ) -> tuple[torch.Tensor, EventOverlap]:
        if rows.numel():  # none when no token chose an expert of this rank
            if isinstance(weight_and_reduce, TopKWeightAndReduceDelegate):
                weight_and_reduce = TopKWeightAndReduceContiguous()
            rows = weight_and_reduce.apply(
                output=None,
                fused_expert_output=rows,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                apply_router_weight_on_input=apply_router_weight_on_input,
            )
        previous = dbo_get_previous_event(self.buffer.capture)
        dbo_yield_and_switch_from_compute_to_comm()
        _used_by_this_stream(rows)
        handle, _received = self._handles.pop(dbo_current_ubatch_id())
        combined, _, event = self.buffer.combine(
            rows,
            handle,
            config=Buffer.get_combine_config(self._ranks),
            previous_event=previous,
            async_finish=not dbo_enabled(),
        )
        dbo_switch_to_compute()
        return combined, event


def _used_by_this_stream(*tensors: torch.Tensor | None) -> None:
    """Under dual-batch overlap tensors cross streams: the allocator must not lend their memory out in between."""
    if not dbo_enabled():
        return
    stream = torch.cuda.current_stream()
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(stream)
