"""Which steps of ``uccl_ep`` take the worst-case form: those that a CUDA graph may hold, where no host may wait.

vLLM captures the model once for each of some batch sizes, after an eager run of the same size, and replays a graph with
the batches of all data-parallel ranks padded to its size. So a rank gets at most that many tokens from each rank, which
is the room that a captured dispatch makes. Larger steps, prefill above all, are never captured: there the host asks how
many rows come, and the experts get no row more.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available

from uccl_ep_serving.errors import ConfigError

__all__ = ["GraphSteps", "capturing"]


def capturing() -> bool:
    """Whether the calling thread's stream captures a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class GraphSteps:
    """How many rows a rank may get in a step, by what vLLM says of the step: the same on every rank.

    Args:
        compilation: vLLM's ``CompilationConfig``, whose sizes and mode may change until graphs are captured; None where
            there is no configuration.
        ranks: of the expert-parallel group.
        shards: ranks over which the tokens of a data-parallel rank are spread (sequence-parallel input).
    """

    def __init__(self, compilation: Any, ranks: int, shards: int = 1) -> None:
        self._compilation, self._ranks, self._shards = compilation, ranks, shards

    def most_rows(self, tokens: int) -> int:
        """For a step in which this rank dispatches ``tokens``: the most rows that it may get; 0: ask.

        Nothing here waits for the device.

        Raises:
            ConfigError: a graph is captured of a step of which vLLM does not say how many tokens the ranks have, or
                says less than is dispatched.
        """
        captured = capturing()
        context = get_forward_context() if is_forward_context_available() else None
        if context is None or context.dp_metadata is None:
            if captured:
                raise ConfigError(
                    "uccl_ep: a CUDA graph is captured outside of a step whose token counts vLLM has agreed between "
                    "data-parallel ranks, so how many rows may come is unknown. Next step: --enforce-eager, or "
                    "--all2all-backend uccl_ep_low_latency"
                )
            return 0
        step = int(context.dp_metadata.num_tokens_across_dp_cpu.max())
        if not (captured or context.cudagraph_runtime_mode != CUDAGraphMode.NONE or step <= self.largest):
            return 0
        each = -(-step // self._shards)
        if tokens > each:
            raise ConfigError(
                f"uccl_ep: this rank dispatches {tokens} tokens in a step of which vLLM says that no rank has more "
                f"than {each}, for which the others make room. Next step: --enforce-eager, and report the model"
            )
        return self._ranks * each

    @property
    def largest(self) -> int:
        """Tokens of the largest step that is captured; 0: none is."""
        compilation = self._compilation
        if compilation is None or not compilation.cudagraph_mode:
            return 0
        return compilation.max_cudagraph_capture_size or 0
