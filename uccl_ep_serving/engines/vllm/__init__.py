"""vLLM's ``--all2all-backend uccl_ep``: a plugin of the entry-point group ``vllm.general_plugins``.

vLLM has no registry of all-to-all backends, so the plugin adds its names to the setting, gives the expert-parallel
group a manager of its own and the MoE layers prepare / finalize objects of its own. Wherever vLLM treats ``deepep_*``
in a special way, ours are treated alike (:data:`.targets.BACKENDS`).

============================ ==========================================================================================
name                         form
============================ ==========================================================================================
``uccl_ep``                  normal mode, Standard activations: prefill, and decode in CUDA graphs (``graph_steps``)
``uccl_ep_high_throughput``  the same without graphs: prefill
``uccl_ep_low_latency``      low-latency mode, BatchedExperts activations: decode, at most ``max_num_batched_tokens``
============================ ==========================================================================================

Three steps, each of which verifies before it changes anything:

1. :func:`register`, in every process: the names, and a hook on ``ParallelConfig`` that does nothing for other backends;
2. :func:`.config_hooks.activate`, once a configuration asks for one of the names (or arrives in a worker with one);
3. :func:`.layer_hooks.activate`, in a worker when the expert-parallel group is built.

With another backend only the first step happens, and nothing changes.
"""

from __future__ import annotations

import logging

from uccl_ep_serving.engines.vllm.targets import BACKENDS
from uccl_ep_serving.errors import ConfigError

__all__ = ["BACKENDS", "register"]

_log = logging.getLogger("uccl_ep_serving")


def register() -> None:
    """Entry point: make vLLM accept the names. Cheap: neither kernels nor the Buffer are imported.

    vLLM loads plugins whatever backend is asked for, so a version that the plugin does not fit must not stop it: the
    names are then refused by vLLM like any other unknown one, and the log says why.
    """
    from uccl_ep_serving.engines.vllm import config_hooks

    try:
        config_hooks.accept_names()
    except ConfigError as error:
        _log.warning("uccl_ep: %s", error)
