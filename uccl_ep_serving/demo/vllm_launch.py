"""One vLLM server of the demo and of the tests: its model, its command line and its environment."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from uccl_ep_serving.demo import vllm_cpu
from uccl_ep_serving.demo.checkpoint_models import TinyDeepSeek, TinyModel, TinyQwen3Moe

__all__ = ["MODELS", "Kind", "VllmLaunch"]


@dataclass(frozen=True)
class Kind:
    """A model that is served.

    Attributes:
        shape: its checkpoint.
        title, words: for people.
        at_once: requests in flight whose answers do not depend on each other.
        arguments: of ``vllm serve``, that it needs.
    """

    shape: TinyModel
    title: str
    words: str
    at_once: int
    arguments: tuple[str, ...] = ()


MODELS: dict[str, Kind] = {
    "qwen3-moe": Kind(TinyQwen3Moe(), "Qwen3-MoE", "3 layers, 8 experts, top-2, hidden 128", at_once=4),
    # vLLM's MLA on a CPU takes few head sizes, DeepSeek's own among them; and there, what a token computes depends on
    # the batch it is in, so requests go one by one
    "deepseek-v3": Kind(
        TinyDeepSeek(kv_lora_rank=512, qk_rope_head_dim=64),
        "DeepSeek-V3",
        "3 layers, 8 experts, top-2, hidden 128",
        at_once=1,
        # on a CPU with AMX vLLM would take AMX_MLA, which is for bfloat16 alone
        arguments=("--attention-backend", "CPU_MLA"),
    ),
}
"""By the name under which they are served; the checkpoint lies in a directory of that name."""


@dataclass(frozen=True)
class VllmLaunch:
    """What distinguishes one server from another.

    Attributes:
        model: one of :data:`MODELS`.
        backend: ``--all2all-backend``; empty for one rank without expert parallelism.
        ranks: data-parallel ranks, over which the experts are spread.
        dtype: dtype of weights and activations.
        max_tokens: tokens of one step, at most the low-latency window.
        arguments: more command-line arguments.
        environment: more environment variables.
    """

    engine: ClassVar[str] = "vLLM"
    chatter: ClassVar[str] = "non-default args"

    model: str
    backend: str
    ranks: int = 2
    dtype: str = "float32"
    max_tokens: int = 256
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, model: Path, port: int) -> list[str]:
        """The command a user would type, for a machine without a GPU; ``model`` only says where checkpoints lie."""
        options = {
            "served-model-name": self.model,
            "host": "127.0.0.1",
            "port": port,
            "dtype": self.dtype,
            "max-model-len": 1024,
            "max-num-seqs": 8,
            "max-num-batched-tokens": self.max_tokens,
            "seed": 0,
        }
        flags = ["--enforce-eager"]
        if self.backend:
            options |= {
                "data-parallel-size": self.ranks,
                "all2all-backend": self.backend,
                "api-server-count": 1,  # one for each rank would only take longer to start
            }
            flags.append("--enable-expert-parallel")
        named = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        program = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model.parent / self.model)]
        return [*program, *named, *flags, *MODELS[self.model].arguments, *self.arguments]

    def cpu_environment(self, directory: Path) -> dict[str, str]:
        """The startup directory of :mod:`uccl_ep_serving.demo.vllm_cpu`, and its variables."""
        return vllm_cpu.environment(directory)

    def phase(self, line: str) -> str | None:
        """vLLM writes ``(Process pid=1) INFO 11-21 12:46:00 [file.py:286] text``."""
        match = re.match(r"(?:\([^)]*\) )?[A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] (.*)", line)
        return match.group(1) if match else None
