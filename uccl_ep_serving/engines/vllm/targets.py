"""What of vLLM this plugin changes and uses, as data: verified before anything is changed, and again afterwards.

The same lists feed the contract test and the table in the documentation. Lines are those of vLLM 0.33.0.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from uccl_ep_serving.engines.versions import VLLM

__all__ = [
    "BACKENDS",
    "CONFIG_TARGETS",
    "CURRENT_CONFIG",
    "HIGH_THROUGHPUT",
    "LAYER_TARGETS",
    "LOW_LATENCY",
    "NAME_TARGETS",
    "ONE_NAME",
    "USED",
    "Target",
    "config_twin",
    "find",
    "twin",
    "verify",
]

ONE_NAME = "uccl_ep"
HIGH_THROUGHPUT = "uccl_ep_high_throughput"
LOW_LATENCY = "uccl_ep_low_latency"

BACKENDS = {
    ONE_NAME: "deepep_high_throughput",
    HIGH_THROUGHPUT: "deepep_high_throughput",
    LOW_LATENCY: "deepep_low_latency",
}
"""Values of ``--all2all-backend``, each with the built-in backend whose special cases in vLLM hold for it too."""


def twin(backend: str) -> str:
    """The built-in backend that vLLM's special cases name, for one of ours; any other name is returned as it is."""
    return BACKENDS.get(backend, backend)


def config_twin(backend: str) -> str:
    """The same for ``VllmConfig``. There the names decide over dual-batch overlap and CUDA graphs: both are for
    ``uccl_ep`` what they are for the built-in backend whose steps can be captured."""
    return BACKENDS[LOW_LATENCY] if backend == ONE_NAME else twin(backend)


@dataclass(frozen=True)
class Target:
    """A name of vLLM.

    Attributes:
        module, name: where it is; ``name`` may be dotted.
        needs: parameters it must have, by name; None for what is not called.
        purpose: what the plugin does there.
        line: file and line in vLLM 0.33.0.
    """

    module: str
    name: str
    needs: tuple[str, ...] | None
    purpose: str
    line: str = ""

    @property
    def path(self) -> str:
        """The whole dotted path."""
        return f"{self.module}.{self.name}"


_MOE = "vllm.model_executor.layers.fused_moe"
_KERNEL = f"{_MOE}.modular_kernel"
_UBATCH = "vllm.v1.worker.ubatching"
_PREPARE = (
    "self",
    "a1",
    "topk_weights",
    "topk_ids",
    "num_experts",
    "expert_map",
    "apply_router_weight_on_input",
    "quant_config",
    "defer_input_quant",
)
_FINALIZE = (
    "self",
    "output",
    "fused_expert_output",
    "topk_weights",
    "topk_ids",
    "apply_router_weight_on_input",
    "weight_and_reduce_impl",
)

NAME_TARGETS = (
    Target(
        "vllm.config.parallel",
        "All2AllBackend",
        None,
        "gains the three names; any other stays refused",
        "config/parallel.py:45",
    ),
    Target(
        "vllm.config.parallel",
        "ParallelConfig.__post_init__",
        ("self",),
        "with one of the names: checks, then the hooks below; the record also carries them to workers",
        "config/parallel.py:962",
    ),
    Target(
        "vllm.engine.arg_utils",
        "_compute_kwargs.cache_clear",
        (),
        "the command line reads the names again",
        "engine/arg_utils.py:325",
    ),
)
"""Always hooked: with another backend these do nothing."""

CONFIG_TARGETS = (
    Target(
        "vllm.config.parallel",
        "ParallelConfig.use_sequence_parallel_moe",
        None,
        "TP > 1 and DP > 1: experts get sequence-parallel input",
        "config/parallel.py:768",
    ),
    Target(
        "vllm.config.parallel",
        "ParallelConfig.use_batched_dp_moe",
        None,
        "low latency: at most 256 tokens a step unless told otherwise",
        "config/parallel.py:796",
    ),
    Target(
        "vllm.config.vllm",
        "VllmConfig.__post_init__",
        ("self",),
        "dual-batch overlap is allowed; uccl_ep_high_throughput switches CUDA graphs off, uccl_ep keeps them",
        "config/vllm.py:2181, config/compilation.py:1243",
    ),
    Target(
        "vllm.platforms.interface",
        "Platform.get_device_communicator_cls",
        (),
        "the EP group gets our all-to-all manager",
        "platforms/interface.py:1222",
    ),
)
"""Hooked in a process once a configuration with one of our names exists in it."""

LAYER_TARGETS = (
    Target(
        f"{_MOE}.config",
        "FusedMoEParallelConfig.use_deepep_ht_kernels",
        None,
        "true for uccl_ep and high throughput: the oracles choose experts that take Standard activations",
        "fused_moe/config.py:1041",
    ),
    Target(
        f"{_MOE}.config",
        "FusedMoEParallelConfig.use_deepep_ll_kernels",
        None,
        "true for the low-latency name: batched activations, and routing tables for round-robin placement",
        "fused_moe/config.py:1048",
    ),
    Target(
        f"{_MOE}.all2all_utils",
        "maybe_make_prepare_finalize",
        ("moe", "quant_config", "routing_tables"),
        "returns our prepare / finalize objects",
        "fused_moe/all2all_utils.py:190",
    ),
    Target(
        f"{_MOE}.all2all_utils",
        "maybe_roundup_layer_hidden_size",
        ("hidden_size", "act_dtype", "moe_parallel_config"),
        "rounds up to rows of 16 bytes: there is no list of allowed sizes",
        "fused_moe/all2all_utils.py:148",
    ),
    Target(
        "vllm.v1.worker.worker_base",
        "WorkerWrapperBase.execute_model",
        ("self", "scheduler_output"),
        "raises before it, and when its output is on the host, what the Buffer knows to be wrong: a replayed CUDA "
        "graph calls nothing of ours. So do `sample_tokens`, `execute_dummy_batch` and the warm-ups",
        "v1/worker/worker_base.py:383",
    ),
    Target(
        "vllm.v1.worker.workspace",
        "WorkspaceManager._ensure_workspace_size",
        ("self", "required_bytes"),
        "experts get scratch memory for more rows than vLLM measured before it locked it",
        "v1/worker/workspace.py:209",
    ),
    Target(
        _UBATCH,
        "UBatchContext._cpu_yield",
        ("self",),
        "dual-batch overlap: raises where the other micro-batch has failed; vLLM would wait for it without an end",
        "v1/worker/ubatching.py:94",
    ),
    Target(
        _UBATCH,
        "UBatchContext.__exit__",
        ("self", "exc_type", "exc_val", "exc_tb"),
        "dual-batch overlap: the first error of a micro-batch is that of the step",
        "v1/worker/ubatching.py:65",
    ),
)
"""Hooked in a worker, when its EP group is built and before the model is."""

CURRENT_CONFIG = Target(
    "vllm.config", "get_current_vllm_config_or_none", (), "the backend that is asked for, and which steps are captured"
)

USED = (
    CURRENT_CONFIG,
    Target("vllm.config", "CUDAGraphMode.NONE", None, "steps without a graph"),
    Target(
        "vllm.config",
        "CompilationConfig",
        ("cudagraph_mode", "max_cudagraph_capture_size"),
        "which steps are captured",
    ),
    Target("vllm.v1.worker.workspace", "WorkspaceManager.is_locked", ("self",), "once graphs are captured"),
    Target("vllm.forward_context", "is_forward_context_available", (), "which steps are captured"),
    Target("vllm.forward_context", "get_forward_context", (), "which steps are captured"),
    Target("vllm.forward_context", "ForwardContext", ("dp_metadata", "cudagraph_runtime_mode"), "the same"),
    Target("vllm.forward_context", "DPMetadata", ("num_tokens_across_dp_cpu",), "tokens of every rank"),
    Target(f"{_MOE}.config", "FusedMoEParallelConfig", ("sp_size", "all2all_backend"), "of a layer"),
    Target(_KERNEL, "FusedMoEPrepareAndFinalizeModular.prepare", _PREPARE, "base class"),
    Target(_KERNEL, "FusedMoEPrepareAndFinalizeModular.prepare_async", _PREPARE, "base class"),
    Target(_KERNEL, "FusedMoEPrepareAndFinalizeModular.finalize", _FINALIZE, "base class"),
    Target(_KERNEL, "FusedMoEPrepareAndFinalizeModular.finalize_async", _FINALIZE, "base class"),
    Target(_KERNEL, "FusedMoEPrepareAndFinalize.post_init_setup", ("self", "fused_experts"), "UE8M0 scales"),
    Target(_KERNEL, "FusedMoEActivationFormat.Standard", None, "form of high throughput"),
    Target(_KERNEL, "FusedMoEActivationFormat.BatchedExperts", None, "form of low latency"),
    Target(
        _KERNEL, "ExpertTokensMetadata", ("expert_num_tokens", "expert_num_tokens_cpu"), "tokens of each local expert"
    ),
    Target(_KERNEL, "ExpertTokensMetadata.make_from_list", ("expert_num_tokens_list", "device"), "the same"),
    Target(
        f"{_MOE}.topk_weight_and_reduce",
        "TopKWeightAndReduceDelegate",
        (),
        "experts that leave weights and sums to finalize",
    ),
    Target(f"{_MOE}.topk_weight_and_reduce", "TopKWeightAndReduceContiguous.apply", (), "high throughput's weights"),
    Target(
        f"{_MOE}.utils",
        "moe_kernel_quantize_input",
        ("A", "A_scale", "quant_dtype", "per_act_token_quant", "block_shape"),
        "quantisation before or after dispatch",
    ),
    Target(f"{_MOE}.utils", "normalize_batched_scales_shape", ("scales", "num_experts"), "scales of batched rows"),
    Target(f"{_MOE}.all2all_utils", "get_ep_all2all_manager", (), "the manager of the EP group"),
    Target(_UBATCH, "dbo_current_ubatch_id", (), "dual-batch overlap"),
    Target(_UBATCH, "dbo_enabled", (), "dual-batch overlap"),
    Target(_UBATCH, "dbo_get_previous_event", ("func",), "dual-batch overlap"),
    Target(_UBATCH, "dbo_maybe_run_recv_hook", (), "dual-batch overlap"),
    Target(_UBATCH, "dbo_switch_to_comm", (), "dual-batch overlap"),
    Target(_UBATCH, "dbo_switch_to_compute", (), "dual-batch overlap"),
    Target(_UBATCH, "dbo_switch_to_compute_sync", (), "dual-batch overlap"),
    Target(_UBATCH, "dbo_yield_and_switch_from_compute_to_comm", (), "dual-batch overlap"),
    Target(_UBATCH, "dbo_yield_and_switch_from_comm_to_compute", (), "dual-batch overlap"),
    Target(
        "vllm.distributed.device_communicators.base_device_communicator",
        "All2AllManagerBase",
        ("cpu_group", "tcp_store_group"),
        "base class of the manager",
    ),
    Target(
        "vllm.distributed.device_communicators.base_device_communicator",
        "DeviceCommunicatorBase.destroy",
        ("self",),
        "the manager closes its Buffer there",
    ),
    Target("vllm.utils.import_utils", "resolve_obj_by_qualname", ("qualname",), "finds the platform's communicator"),
)
"""Not changed, but called or derived from."""


def find(target: Target) -> tuple[Any, str, Any]:
    """Owner, last name and present value of ``target``; the value is not bound and properties are not evaluated.

    Raises:
        ConfigError: the module does not import, or the name is missing.
    """
    try:
        owner: Any = importlib.import_module(target.module)
    except ImportError as error:
        raise VLLM.refusal(f"{target.module} could not be imported ({error})") from error
    *owners, last = target.name.split(".")
    for part in owners:
        owner = getattr(owner, part, None)
        if owner is None:
            raise VLLM.refusal(f"{target.path} is missing")
    missing = object()
    # a class: what it declares or inherits, unbound. Elsewhere, and for a cached function's methods, what it has.
    value = inspect.getattr_static(owner, last, missing) if isinstance(owner, type) else getattr(owner, last, missing)
    if value is missing:
        raise VLLM.refusal(f"{target.path} is missing")
    return owner, last, value


def verify(targets: Iterable[Target]) -> None:
    """Check that every target exists and takes the parameters that are needed.

    Raises:
        ConfigError: naming the version of vLLM and the first target that does not fit.
    """
    for target in targets:
        _, _, value = find(target)
        if target.needs is None:
            continue
        called = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if not callable(called):
            raise VLLM.refusal(f"{target.path} is no function any more")
        try:
            names = set(inspect.signature(called).parameters)
        except ValueError:  # built-in functions have none
            continue
        missing = [name for name in target.needs if name not in names]
        if missing:
            raise VLLM.refusal(f"{target.path} has no parameter {', '.join(missing)} any more")
