"""Prepare / finalize in vLLM's BatchedExperts form, on the low-latency mode of the Buffer: decode."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import vllm.envs as envs
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate
from vllm.model_executor.layers.fused_moe.utils import normalize_batched_scales_shape
from vllm.v1.worker.ubatching import dbo_current_ubatch_id, dbo_maybe_run_recv_hook

from uccl_ep_serving import Buffer
from uccl_ep_serving.engines.vllm.graph_steps import capturing
from uccl_ep_serving.engines.vllm.prepare_finalize import PrepareFinalize
from uccl_ep_serving.engines.vllm.quantisation import (
    is_block_scaled_fp8,
    one_scale_of_all,
    quantised_after,
    weighted_input,
)
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.protocol.message import SCALE_BLOCK

__all__ = ["LowLatencyBatched"]

Hook = Callable[[], None]


#: Buffers whose ranks have met before their first dispatch.
_met: weakref.WeakSet[Buffer] = weakref.WeakSet()


def _meet_once(buffer: Buffer) -> None:
    """Wait for the other ranks before the first dispatch, for longer than an operation does: room was made when layers
    were built, and since then vLLM has compiled the model, minutes on one node and seconds on another."""
    if buffer not in _met and not capturing():
        _met.add(buffer)
        buffer.runtime.meet()


class LowLatencyBatched(PrepareFinalize):
    """Every token once to each rank of its experts, unpacked there by local expert.

    The router's weights travel with the tokens, so the experts' side weights and sums the rows of a token in float32
    and sends one row back per (token, rank); the built-in backend, whose dispatch does not know the weights, gets one
    per (token, expert).

    Args:
        buffer, ranks: as for both modes.
        reserve: makes room in the group's windows for dispatches with ``use_fp8`` and ``use_ue8m0`` as given.
        max_tokens_per_rank: T, the most tokens a rank dispatches in one step.
        hidden_size: H.
        quant_config: of the layer; e4m3 with 128 x 128 blocks is quantised inside dispatch, with a scale per 128
            values of a token. Other formats travel as they are and are quantised after dispatch.
        global_to_physical: int64 [experts]: where round-robin placement has put an expert; None for linear placement.

    Raises:
        ConfigError: FP8 rows of a hidden size that is no multiple of 128, scales per token, or
            VLLM_DEEPEPLL_NVFP4_DISPATCH=1.
    """

    #: [local experts, ranks x T, H], filled from the front.
    activation_format = mk.FusedMoEActivationFormat.BatchedExperts

    def __init__(
        self,
        buffer: Buffer,
        ranks: int,
        *,
        reserve: Callable[..., None],
        max_tokens_per_rank: int,
        hidden_size: int,
        quant_config: Any,
        global_to_physical: torch.Tensor | None = None,
    ) -> None:
        super().__init__(buffer, ranks, max_tokens_per_rank)
        self._reserve = reserve
        self._tokens = max_tokens_per_rank
        self._fp8 = is_block_scaled_fp8(quant_config)
        self._ue8m0 = False
        self._table = None if global_to_physical is None else global_to_physical.to(torch.int64)
        _check_formats(quant_config, hidden_size, fp8=self._fp8)

    def post_init_setup(self, fused_experts: Any) -> None:
        """Experts that read packed UE8M0 scales get them from dispatch. Now the formats are known: make room."""
        fp8 = self._fp8 and not fused_experts.expects_unquantized_inputs
        self._ue8m0 = fp8 and fused_experts.supports_packed_ue8m0_act_scales()
        self._reserve(use_fp8=fp8, use_ue8m0=self._ue8m0)

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
    ) -> tuple[Hook, Callable[[], Any]]:
        """Send at most T tokens.

        Returns:
            The recv hook, which waits for the other ranks' tokens, and a function that then gives rows
            [local experts, ranks x T, H]; their scales or None; rows of each local expert; None, None: ids and weights
            stay those of this rank, for combine. Between the two calls the stream is free for other work (dual-batch
            overlap).
        """
        if apply_router_weight_on_input:
            a1 = weighted_input(a1, topk_weights)
        fp8 = self._fp8 and not defer_input_quant
        self.buffer.layer = self.layer
        _meet_once(self.buffer)
        rows, counts, handle, _, hook = self.buffer.low_latency_dispatch(
            a1,
            self._physical(topk_ids),
            self._tokens,
            num_experts,
            use_fp8=fp8,
            round_scale=fp8 and self._ue8m0,
            use_ue8m0=fp8 and self._ue8m0,
            return_recv_hook=True,
            topk_weights=_weights_of_combine(topk_weights, apply_router_weight_on_input),
        )
        self._handles[dbo_current_ubatch_id()] = handle
        assert hook is not None, "a recv hook was asked for"

        def receiver() -> Any:
            values, scales = rows if fp8 else (rows, None)
            if not fp8 and not defer_input_quant and quant_config.quant_dtype not in (None, "nvfp4"):
                values, scales = _quantised_rows(values, counts, quant_config)
            meta = mk.ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=None)
            return values, scales, meta, None, None

        return hook, receiver

    def _physical(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Ids in the order in which ranks hold their experts; -1 stays -1."""
        if self._table is None:
            return topk_ids
        return torch.where(topk_ids < 0, topk_ids, self._table[topk_ids.clamp(min=0)])

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> tuple[Hook, Callable[[], None]]:
        """Send the rows back; ids and weights are those given to prepare.

        Returns:
            The recv hook, after which ``output`` [tokens, H] is valid, and a function that does nothing more.
        """
        if not isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            raise ConfigError(
                f"uccl_ep_low_latency weights and sums in combine, but the experts ask for "
                f"{type(weight_and_reduce_impl).__name__}. Next step: experts of the BatchedExperts form"
            )
        handle = self._handles.pop(dbo_current_ubatch_id())
        into = output if output.dtype == fused_expert_output.dtype and output.is_contiguous() else None
        dbo_maybe_run_recv_hook()  # of the other micro-batch: at most two operations of a phase are in flight
        combined, _, hook = self.buffer.low_latency_combine(
            fused_expert_output.contiguous(),
            self._physical(topk_ids),
            _weights_of_combine(topk_weights, apply_router_weight_on_input),
            handle,
            return_recv_hook=True,
            out=into,
        )
        assert hook is not None, "a recv hook was asked for"
        receive = hook

        def hook_and_copy() -> None:
            receive()
            if into is None:
                output.copy_(combined)

        return hook_and_copy, lambda: None


def _weights_of_combine(topk_weights: torch.Tensor, apply_router_weight_on_input: bool) -> torch.Tensor:
    """What combine multiplies with, and what dispatch must therefore be given: ones where the input was weighted."""
    weights = topk_weights.to(torch.float32)
    return torch.ones_like(weights) if apply_router_weight_on_input else weights


def _quantised_rows(rows: torch.Tensor, counts: torch.Tensor, quant_config: Any) -> tuple[torch.Tensor, Any]:
    """Rows [L, N, H], of which ``counts`` [L] were sent, quantised where the experts are."""
    experts, most, hidden = rows.shape
    if one_scale_of_all(quant_config):
        nobodys = torch.arange(most, device=rows.device) >= counts[:, None]
        rows.masked_fill_(nobodys[:, :, None], 0)
    flat, scales = quantised_after(rows.view(-1, hidden), quant_config)
    return flat.view(experts, -1, hidden), normalize_batched_scales_shape(scales, experts)


def _check_formats(quant_config: Any, hidden_size: int, *, fp8: bool) -> None:
    """Refuse formats before the first token. Raises ConfigError."""
    if quant_config is None:
        return
    if fp8 and hidden_size % SCALE_BLOCK:
        raise ConfigError(
            f"uccl_ep_low_latency: hidden size {hidden_size} is no multiple of {SCALE_BLOCK}, the block of FP8 dispatch"
        )
    if quant_config.quant_dtype == "nvfp4" and envs.VLLM_DEEPEPLL_NVFP4_DISPATCH:
        raise ConfigError(
            "uccl_ep_low_latency dispatches NVFP4 layers in BF16: unset VLLM_DEEPEPLL_NVFP4_DISPATCH, which makes the "
            "experts expect quantised rows"
        )
    scale = quant_config.a1_scale if quant_config.a1_scale is not None else quant_config.a2_scale
    if quant_config.quant_dtype not in (None, "nvfp4") and scale is not None and scale.numel() != 1:
        raise ConfigError("uccl_ep_low_latency: static activation scales per token are not supported")
