"""One SGLang server of the demo and of the tests: its command line and its environment."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from uccl_ep_serving.demo import sglang_cpu

__all__ = ["MODEL", "RANKS", "SglangLaunch"]

MODEL = "tiny-deepseek-v3"
RANKS = 2


@dataclass(frozen=True)
class SglangLaunch:
    """What distinguishes one server from another.

    Attributes:
        backend: ``--moe-a2a-backend``.
        dp_attention: attention is data-parallel over the ranks instead of tensor-parallel.
        deepep_mode: ``auto``, ``normal`` or ``low_latency``.
        dispatch_dtype: ``bf16`` (rows travel as they are) or ``fp8``.
        dtype: dtype of weights and activations.
        chunked_prefill: tokens of one prefill step, at most the low-latency window when every step goes
            through it.
        ranks: tensor- and expert-parallel ranks.
        arguments: more command-line arguments.
        environment: more environment variables.
    """

    engine: ClassVar[str] = "SGLang"
    chatter: ClassVar[str] = "server_args="

    backend: str
    dp_attention: bool = False
    deepep_mode: str = "auto"
    dispatch_dtype: str = "bf16"
    dtype: str = "float32"
    chunked_prefill: int = 1024
    ranks: int = RANKS
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, model: Path, port: int) -> list[str]:
        """The command a user would type, for a machine without a GPU."""
        options = {
            "model-path": model,
            "served-model-name": MODEL,
            "host": "127.0.0.1",
            "port": port,
            "device": "cpu",
            "dtype": self.dtype,
            "tp": self.ranks,
            "moe-a2a-backend": self.backend,
            "attention-backend": "torch_native",
            "cuda-graph-backend-decode": "disabled",
            "cuda-graph-backend-prefill": "disabled",
            # the tokens are what counts; a small share fails where other programs take memory while the server starts
            "mem-fraction-static": "0.5",
            "max-total-tokens": 4096,
            "chunked-prefill-size": self.chunked_prefill,
            "random-seed": 0,
        }
        if self.backend == "none":
            options["ep-size"] = self.ranks  # experts are placed as with an all-to-all, but sums are all-reduced
            if self.dp_attention:
                # the default needs a kernel that SGLang has for GPUs only
                options["boundary-reduction"] = "ar"
        else:
            options["deepep-mode"] = self.deepep_mode
            options["deepep-dispatcher-output-dtype"] = self.dispatch_dtype
        if self.dp_attention:
            options["attn-dp-size"] = self.ranks
        flags = ["--skip-server-warmup", "--sleep-on-idle"]
        named = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        return [sys.executable, "-m", "sglang.launch_server", *named, *flags, *self.arguments]

    def cpu_environment(self, directory: Path) -> dict[str, str]:
        """The startup directory of :mod:`uccl_ep_serving.demo.sglang_cpu`, and its variables."""
        return sglang_cpu.environment(directory, ranks=self.ranks)

    def phase(self, line: str) -> str | None:
        """SGLang writes ``[time rank] text``."""
        match = re.match(r"\[[^\]]*\] (.*)", line)
        return match.group(1) if match else None
