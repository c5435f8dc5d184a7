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
        quantize: function that the normal mode quantises with.
    """

    deepep: Any
    base: Any
    low_latency: Any
    buffer: Any
    overlap: Any
    runner: Any
    scheduler: Any
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
        "envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
    )
    low_latency = deepep._DeepEPDispatcherImplLowLatency
    overlap = import_checked(_OVERLAP, "SboFlags.enable_combine_down_gemm_two_stream_overlap").SboFlags
    quantization = import_checked("sglang.kernels.ops.quantization.fp8_kernel", "sglang_per_token_group_quant_fp8")
    runner = import_checked(_RUNNER, "ModelRunner.init_cuda_graphs").ModelRunner
    scheduler = import_checked(_SCHEDULER, "Scheduler.process_batch_result").Scheduler
    # the names themselves are absent where deep_ep is not installed, so look at what the engine's code will look up
    used = deepep.DeepEPConfig.__init__.__code__.co_names
    for name in ("Buffer", "Config"):
        if name not in used:
            raise SGLANG.refusal(f"{_DEEPEP}.DeepEPConfig does not use the global {name} any more")
    for name, expected in (
        ("_dispatch_core", ["self", "hidden_states", "topk_ids", "topk_weights"]),
        ("_combine_core", ["self", "hidden_states", "topk_ids", "topk_weights"]),
    ):
        parameters = list(inspect.signature(getattr(low_latency, name)).parameters)
        if parameters != expected:
            core = f"_DeepEPDispatcherImplLowLatency.{name}"
            raise SGLANG.refusal(f"{_DEEPEP}.{core} takes other arguments: {', '.join(parameters)}")
    _check_calls(Path(deepep.__file__))
    return Targets(
        deepep,
        deepep._DeepEPDispatcherImplBase,
        low_latency,
        deepep.DeepEPBuffer,
        overlap,
        runner,
        scheduler,
        quantization.sglang_per_token_group_quant_fp8,
    )


def _check_calls(dispatcher: Path) -> None:
    """Refuse, by line and name, a use of the Buffer that ours does not take: a newer engine may pass new keywords."""
    from uccl_ep_serving.engines.deepep_calls import fits, uses

    for use in uses(dispatcher.read_text()):
        if fault := fits(use):
            raise SGLANG.refusal(f"{dispatcher}, {fault}")
