"""What vLLM lacks on a CPU with expert parallelism, for the demo and the tests only: nothing here is product.

vLLM's CPU experts drop ``expert_map`` and take Standard activations only, and its CPU communicator cannot run the
default all-to-all, so expert parallelism over data-parallel ranks does not run on a CPU as it is. This package fills
those gaps with plain torch, so that the real server, scheduler, model runner and modular MoE kernel run on any
machine. It is switched on by :func:`environment` alone: that writes a *startup directory* and returns the variables
(``PYTHONPATH`` among them) that a child process needs. Without that directory on the path nothing of this package is
ever imported by vLLM, and :func:`register` refuses to work where vLLM runs on a GPU.

================================================= =====================================================================
where vLLM stops                                  what is supplied
================================================= =====================================================================
``vllm serve`` asks for the distribution "vllm"   a stub of its metadata, where the CPU build has another name
CPU experts drop ``expert_map``                   ``experts.TorchExperts``: Standard form
no CPU experts in the BatchedExperts form         ``experts.TorchBatchedExperts``
``CpuCommunicator`` has no ``all_gatherv``        ``hooks``: gloo calls (comparison runs with
and no ``reduce_scatterv``                        ``allgather_reducescatter`` only)
================================================= =====================================================================
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from uccl_ep_serving.demo import cpu_server
from uccl_ep_serving.errors import ConfigError

__all__ = ["SWITCH", "environment", "register", "require_cpu"]

SWITCH = "_UCCL_EP_VLLM_CPU"
"""Set to ``1`` by :func:`environment`; the entry point does nothing without it."""

_ENTRY_POINTS = "[vllm.general_plugins]\nuccl_ep_vllm_cpu = uccl_ep_serving.demo.vllm_cpu:register\n"


def environment(directory: Path, *, threads: int = 1) -> dict[str, str]:
    """Write the startup directory and return the variables of a CPU server.

    Args:
        directory: where to write it; created if missing. It must outlive the server.
        threads: OpenMP threads of each rank.

    Returns:
        Variables to lay over ``os.environ`` of the child process.
    """
    startup = directory / "startup"
    cpu_server.write_distribution(startup, "uccl_ep_vllm_cpu", entry_points=_ENTRY_POINTS)
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        cpu_server.write_distribution(startup, "vllm", f"{importlib.metadata.version('vllm-cpu')}+cpu")
    return {
        **cpu_server.variables(startup, SWITCH, threads),
        "VLLM_CPU_SIM_MULTI_NUMA": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def require_cpu() -> None:
    """Refuse to go on where vLLM would not run on the CPU.

    Raises:
        ConfigError: torch sees a GPU, or vLLM has chosen another platform.
    """
    import torch
    from vllm.platforms import current_platform

    if torch.cuda.is_available() or not current_platform.is_cpu():
        raise ConfigError(
            f"{SWITCH}=1 replaces vLLM's experts with CPU code for demonstrations; it must not be set where vLLM runs "
            "on a GPU. Unset it, or hide the GPUs (CUDA_VISIBLE_DEVICES='') and install a CPU build of vLLM."
        )


def register() -> None:
    """Entry point of the ``vllm.general_plugins`` group: register the CPU hooks (see :mod:`.hooks`)."""
    cpu_server.register_hooks(SWITCH, "vLLM", require_cpu, "uccl_ep_serving.demo.vllm_cpu.hooks")
