"""vLLM's configuration as a process with the plugins has it; imported where vLLM is."""

from __future__ import annotations

from typing import Any


def parallel_config(**fields: Any) -> Any:
    """A ``ParallelConfig`` where the plugins are loaded."""
    from vllm.config import ParallelConfig
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return ParallelConfig(**{"enable_expert_parallel": True, **fields})
