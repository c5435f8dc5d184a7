"""What vLLM's two forms of prepare / finalize share on one Buffer: the answers to vLLM's questions, and the waiting."""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk

from uccl_ep_serving import Buffer
from uccl_ep_serving.traffic.trace import UNKNOWN_LAYER

__all__ = ["PrepareFinalize"]


class PrepareFinalize(mk.FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
    """The base of both modes, which add ``prepare_async`` and ``finalize_async``.

    Args:
        buffer: of the expert-parallel group.
        ranks: of that group: as many may send rows to this one.
        max_tokens: the most tokens a rank dispatches in one step; None: any number.

    Attributes:
        layer: number of the model's layer, for routing traces; UNKNOWN_LAYER until it is set.
    """

    def __init__(self, buffer: Buffer, ranks: int, max_tokens: int | None = None) -> None:
        super().__init__()
        self.buffer = buffer
        self.layer = UNKNOWN_LAYER
        self._ranks = ranks
        self._max_tokens = max_tokens
        # one for each micro-batch of dual-batch overlap
        self._handles: dict[int, Any] = {}

    def num_dispatchers(self) -> int:
        return self._ranks

    def output_is_reduced(self) -> bool:
        return True  # combine sums over the ranks

    def max_num_tokens_per_rank(self) -> int | None:
        return self._max_tokens

    def topk_indices_dtype(self) -> torch.dtype | None:
        return torch.int64

    def supports_async(self) -> bool:
        return True

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Send the tokens and wait for those of the other ranks. ``prepare_async`` takes the same arguments:

        Args:
            a1: [T, H], not quantised.
            topk_weights, topk_ids: [T, K]; ids int64 in 0 .. num_experts - 1, or -1 for none (padding).
            num_experts: of all ranks, redundant ones included.
            expert_map: not needed: experts lie in rank order, and ids travel with the rows or are implied by them.
            apply_router_weight_on_input: weight the tokens before they travel (top-1 only); combine then only sums.
            quant_config: of the layer.
            defer_input_quant: the experts quantise themselves: rows travel as they are.

        Returns:
            Rows, their scales or None, tokens of each local expert, ids and weights; each mode says in which form.

        Raises:
            NotImplementedError: weights on the input with more than one expert a token.
            ConfigError and the other errors of the Buffer's dispatch.
        """
        return _received(self.prepare_async(*args, **kwargs))

    def finalize(self, *args: Any, **kwargs: Any) -> None:
        """Send the rows back and sum them into ``output`` [T, H]. ``finalize_async`` takes the same arguments."""
        _received(self.finalize_async(*args, **kwargs))


def _received(sent: Any) -> Any:
    """Wait for an operation: ``sent`` is a receiver, or a recv hook and the receiver to call after it."""
    hook, receiver = sent if isinstance(sent, tuple) else (None, sent)
    if hook is not None:
        hook()
    return receiver()
