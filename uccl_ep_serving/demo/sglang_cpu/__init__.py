"""What SGLang 0.5.23 lacks on a CPU without AMX, for the demo and the tests only: nothing here is product.

SGLang's CPU engine is built for Xeons with AMX and its own ``sgl_kernel`` build; on any other CPU it stops at
an import, at the attention backend and at the experts. This package fills those gaps with plain torch so that
the real server, the real scheduler and the real DeepEP dispatcher run on any machine. It is switched on by
:func:`environment` alone: that writes a *startup directory* and returns the variables (``PYTHONPATH`` among
them) that a child process needs. Without that directory on the path nothing of this package is ever imported
by SGLang.

==================================== ========================================================================
where SGLang stops                   what is supplied
==================================== ========================================================================
``torchvision::nms does not exist``  ``startup``: the operator schemas, before torchvision is imported
``No module named 'sgl_kernel'``     ``startup``: the module ``sgl_kernel_stub``
MHA prefill over the MLA pool        ``hooks``: the ``torch_native`` backend takes the absorbed (MLA) path
``get_cpu_graph_seq_len_fill_value`` ``hooks``: defined for ``torch_native``
``moe_forward_native`` with ids -1   ``hooks``: such slots get weight 0 (reference runs, backend ``none``)
``get_deepep_buffer`` asks CUDA      ``hooks``: the same construction without the CUDA questions
``combine_a`` without DeepGEMM       ``hooks``: passed through
FP8 rows of the normal mode          ``hooks``: quantised in torch, as DeepGEMM's branch does on a GPU
no runner for the DeepEP formats     ``experts``: the experts in torch, FP8 dequantised
==================================== ========================================================================
"""

from __future__ import annotations

import os
from pathlib import Path

from uccl_ep_serving.demo import cpu_server
from uccl_ep_serving.errors import ConfigError

__all__ = ["SWITCH", "environment", "register", "require_cpu"]

SWITCH = "_UCCL_EP_SGLANG_CPU"
"""Set to ``1`` by :func:`environment`; the startup directory does nothing without it."""

_SITECUSTOMIZE = """\
# Python runs this at start because its directory is on PYTHONPATH. Written by uccl_ep_serving.demo.sglang_cpu.
from uccl_ep_serving.demo.sglang_cpu import startup

startup.install()
"""
_ENTRY_POINTS = "[sglang.srt.plugins]\nuccl_ep_cpu = uccl_ep_serving.demo.sglang_cpu:register\n"


def environment(directory: Path, *, threads: int = 1, ranks: int = 2) -> dict[str, str]:
    """Write the startup directory and return the variables of a CPU server.

    Args:
        directory: where to write it; created if missing. It must outlive the server.
        threads: OpenMP threads of each rank.
        ranks: ranks on this machine; each is bound to CPUs of its own as far as they go.

    Returns:
        Variables to lay over ``os.environ`` of the child process.
    """
    startup = directory / "startup"
    cpu_server.write_distribution(startup, "uccl_ep_sglang_cpu", entry_points=_ENTRY_POINTS)
    (startup / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    cpus = sorted(os.sched_getaffinity(0))
    return {
        **cpu_server.variables(startup, SWITCH, threads),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",  # a failed scheduler would wait a minute for dumps of GPUs
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cpus[rank % len(cpus)]) for rank in range(ranks)),
    }


def require_cpu() -> None:
    """Refuse to go on where SGLang would not run on the CPU.

    Raises:
        ConfigError: torch sees a GPU, or SGLang was not told to use its CPU engine.
    """
    import torch

    if torch.cuda.is_available() or os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        raise ConfigError(
            f"{SWITCH}=1 replaces SGLang's attention, experts and buffer set-up with CPU code for demonstrations; it "
            "must not be set where SGLang runs on a GPU. Unset it, or hide the GPUs (CUDA_VISIBLE_DEVICES='') and set "
            "SGLANG_USE_CPU_ENGINE=1."
        )


def register() -> None:
    """Entry point of the ``sglang.srt.plugins`` group: register the CPU hooks (see :mod:`.hooks`)."""
    cpu_server.register_hooks(SWITCH, "SGLang", require_cpu, "uccl_ep_serving.demo.sglang_cpu.hooks")
