"""What of the engine the plugin changes, all found and checked before the first is touched."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uccl_ep_serving.engines.versions import SGLANG

__all__ = ["Targets", "find_targets", "import_checked"]

_DEEPEP = "sglang.srt.layers.moe.token_dispatcher.deepep"
_OVERLAP = "sglang.srt.batch_overlap.single_batch_overlap"
_RUNNER = "sglang.srt.model_executor.model_runner"
_SCHEDULER = "sglang.srt.managers.scheduler"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"

#: What the plugin reads of the engine's objects, by the module that assigns it.
_READ = {
    _DEEPEP: (
        "_low_latency_dispatcher",
        "_normal_dispatcher",
        "deepep_mode",
        "group",
        "hidden_size",
        "num_experts",
        "num_max_dispatch_tokens_per_rank",
        "params_bytes",
        "params_dtype",
        "return_recv_hook",
        "router_topk",
    ),
    "sglang.srt.batch_overlap.two_batch_overlap": ("_inners",),
    "sglang.srt.layers.moe.fused_moe_triton.layer": ("dispatcher",),
}


def import_checked(module: str, *names: str) -> Any:
    """Import ``module`` and check that it has ``names`` (dotted below the module)."""
    try:
        imported: Any = importlib.import_module(module)
    except ImportError as error:
        raise SGLANG.refusal(f"{module} could not be imported ({error})") from error
    for name in names:
        owner: Any = imported
        for part in name.split("."):
            owner = getattr(owner, part, None)
            if owner is None:
                raise SGLANG.refusal(f"{module}.{name} is missing")
    return imported


@dataclass(frozen=True)
class Targets:
    """Objects of the engine.

    Attributes:
        deepep: the module of the DeepEP dispatcher.
        base: class of what both its modes share, which reads the window's tokens.
        low_latency: class of its low-latency mode.
        buffer: class that builds the process's Buffer and tells it which mode is next.
        overlap: class of the flags of single-batch overlap.
        runner: class that loads the model and captures graphs.
        scheduler: class that tells clients what a step has given.
        configurator: class that says how many requests a data-parallel rank runs.
        quantize: function that the normal mode quantises with.
    """

    deepep: Any
    base: Any
    low_latency: Any
    buffer: Any
    overlap: Any
    runner: Any
    scheduler: Any
    configurator: Any
    quantize: Any


def find_targets() -> Targets:
    """Find every one. Raises ConfigError that names what is missing, or what our Buffer does not take."""
    deepep = import_checked(
        _DEEPEP,
        "DeepEPBuffer.get_deepep_buffer",
        "DeepEPBuffer.set_dispatch_mode",
        "DeepEPConfig.get_instance",
        "DeepEPDispatcher",
        "_DeepEPDispatcherImplBase",
        "_DeepEPDispatcherImplLowLatency._dispatch_core",
        "_DeepEPDispatcherImplLowLatency._combine_core",
        "_DeepEPDispatcherImplNormal._get_buffer",
        "_DeepEPDispatcherImplNormal.dispatch_a",
        "envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
    )
    low_latency = deepep._DeepEPDispatcherImplLowLatency
    overlap = import_checked(_OVERLAP, "SboFlags.enable_combine_down_gemm_two_stream_overlap").SboFlags
    quantization = import_checked("sglang.kernels.ops.quantization.fp8_kernel", "sglang_per_token_group_quant_fp8")
    runner = import_checked(_RUNNER, "ModelRunner.init_cuda_graphs").ModelRunner
    scheduler = import_checked(_SCHEDULER, "Scheduler.process_batch_result").Scheduler
    requests = import_checked(_CONFIGURATOR, "KVCacheConfigurator.resolve_max_num_reqs")
    # the names themselves are absent where deep_ep is not installed, so look at what the engine's code will look up
    used = deepep.DeepEPConfig.__init__.__code__.co_names
    for name in ("Buffer", "Config"):
        if name not in used:
            raise SGLANG.refusal(f"{_DEEPEP}.DeepEPConfig does not use the global {name} any more")
    for mode, name, expected in (
        (low_latency, "_dispatch_core", ["self", "hidden_states", "topk_ids", "topk_weights"]),
        (low_latency, "_combine_core", ["self", "hidden_states", "topk_ids", "topk_weights"]),
        (deepep._DeepEPDispatcherImplNormal, "dispatch_a", ["self", "hidden_states", "topk_output"]),
    ):
        parameters = list(inspect.signature(getattr(mode, name)).parameters)
        if parameters != expected:
            raise SGLANG.refusal(f"{_DEEPEP}.{mode.__name__}.{name} takes other arguments: {', '.join(parameters)}")
    for module, names in _READ.items():
        source = Path(import_checked(module).__file__).read_text()
        for name in names:
            if f"self.{name} = " not in source:
                raise SGLANG.refusal(f"{module} assigns no attribute {name}")
    _check_calls(Path(deepep.__file__))
    return Targets(
        deepep,
        deepep._DeepEPDispatcherImplBase,
        low_latency,
        deepep.DeepEPBuffer,
        overlap,
        runner,
        scheduler,
        requests.KVCacheConfigurator,
        quantization.sglang_per_token_group_quant_fp8,
    )


def _check_calls(dispatcher: Path) -> None:
    """Refuse, by line and name, a use of the Buffer that ours does not take: a newer engine may pass new keywords."""
    from uccl_ep_serving.engines.deepep_calls import fits, uses

    for use in uses(dispatcher.read_text()):
        if fault := fits(use):
            raise SGLANG.refusal(f"{dispatcher}, {fault}")
