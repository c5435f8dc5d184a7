"""Scratch memory of vLLM's experts, for steps that bring a rank more rows than any step that vLLM tried at its start.

vLLM's layers share one piece of it, as large as its profile run needed, which it locks once graphs are captured: they
hold its address. A larger step then ends the engine. Built-in backends never meet that: either every step has the rows
of the worst case, or (``deepep_high_throughput``) no graph is captured and nothing is locked. ``uccl_ep`` captures
small steps and gives the experts of large ones the rows that come, by whatever the router chose.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from uccl_ep_serving.engines.memory_budget import GIB
from uccl_ep_serving.engines.vllm.graph_steps import capturing
from uccl_ep_serving.engines.vllm.hooks import mark

__all__ = ["growing"]

_log = logging.getLogger("uccl_ep_serving")


def growing(original: Callable[[Any, int], torch.Tensor]) -> Any:
    """``WorkspaceManager._ensure_workspace_size``, which also serves what the locked workspace has no room for: with
    memory of that one use, unless a graph is captured, which would hold the address. Graphs keep the one they have."""

    @functools.wraps(original)
    def ensure(self: Any, required_bytes: int) -> torch.Tensor:
        try:
            return original(self, required_bytes)
        except AssertionError:
            if not self.is_locked() or capturing():
                raise
            _say_once()
            _log.debug("uccl_ep: %.2f GiB of scratch for one layer of one step", required_bytes / GIB)
            return torch.empty(required_bytes, dtype=torch.uint8, device=self._device)

    return mark(ensure)


@functools.cache
def _say_once() -> None:
    _log.info(
        "uccl_ep: a step brings this rank more rows than those that vLLM measured at its start; their experts' scratch "
        "memory is taken anew in each layer. Where that runs out: a lower --gpu-memory-utilization, or "
        "uccl_ep_high_throughput"
    )
