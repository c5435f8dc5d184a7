"""Putting our Buffer under the engine's DeepEP dispatcher in this process: only where ``uccl_ep`` was asked for."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from typing import Any

from uccl_ep_serving.config import Settings
from uccl_ep_serving.engines.sglang.buffer import LAYER, buffer_class, open_before_capture, router_weights
from uccl_ep_serving.engines.sglang.options import WINDOW_VARIABLE
from uccl_ep_serving.engines.sglang.targets import find_targets
from uccl_ep_serving.engines.sglang.workers import Decisions
from uccl_ep_serving.engines.versions import SGLANG
from uccl_ep_serving.traffic.trace import UNKNOWN_LAYER

__all__ = ["activate"]

_log = logging.getLogger("uccl_ep_serving")

#: Where a layer makes its dispatcher; that one's two modes, and their classes.
_LAYERS = "sglang.srt.layers.moe.fused_moe_triton.layer"
_INNER = ("_low_latency_dispatcher", "_normal_dispatcher")
_MODES = ("_DeepEPDispatcherImplLowLatency", "_DeepEPDispatcherImplNormal")

#: What the dispatcher asserts of its tokens, for a limit of DeepEP's kernels.
_ENGINE_LIMIT = 1024

#: Of the latest configuration that this process has resolved or was sent.
_decided = Decisions(1, False, {})


def activate(decisions: Decisions) -> None:
    """Put our Buffer, Config, window and router-weight hook there. Idempotent; the latest ``decisions`` hold.

    Raises:
        ConfigError: the engine is of a refused version or lacks one of the targets; nothing has been changed then.
    """
    global _decided
    SGLANG.check_version()
    targets = find_targets()

    from uccl_ep_serving import Config

    _decided = decisions
    if getattr(targets.deepep, "Buffer", None) is buffer_class():
        return
    _hook_dispatcher(targets.base, targets.low_latency)
    _hook_buffer(targets.buffer)
    _hook_runner(targets.runner, targets.deepep)
    _hook_scheduler(targets.scheduler)
    _hook_requests(targets.configurator)
    if Settings.from_environment().trace:
        _hook_layers(targets.deepep)
    # by attribute: the scheduler has imported the module before plugins are loaded
    targets.deepep.Buffer = buffer_class()
    targets.deepep.Config = Config
    targets.deepep.use_deepep = True
    # imported by the engine in the same try as deep_ep: without deep_ep, FP8 dispatch of the normal mode misses it
    targets.deepep.sglang_per_token_group_quant_fp8 = targets.quantize
    # Our combine does not watch the down-projection's per-block signals, so it must not start before that kernel ends.
    # The other overlaps of --enable-single-batch-overlap stay.
    targets.overlap.enable_combine_down_gemm_two_stream_overlap = classmethod(lambda _cls: False)
    SGLANG.log_activation("DeepEP dispatcher")


def _hook_dispatcher(base: Any, low_latency: Any) -> None:
    """The window's tokens, beyond what the engine asserts, and the router weights at dispatch."""
    construct, core = base.__init__, low_latency._dispatch_core

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = os.environ.get(WINDOW_VARIABLE)
        os.environ[WINDOW_VARIABLE] = str(min(_decided.tokens, _ENGINE_LIMIT))
        try:
            construct(self, *args, **kwargs)
        finally:
            del os.environ[WINDOW_VARIABLE]
            if given is not None:
                os.environ[WINDOW_VARIABLE] = given
        self.num_max_dispatch_tokens_per_rank = _decided.tokens

    @functools.wraps(core)
    def dispatch_core(self: Any, hidden_states: Any, topk_ids: Any, topk_weights: Any) -> Any:
        token = router_weights.set(topk_weights)
        try:
            return core(self, hidden_states, topk_ids, topk_weights)
        finally:
            router_weights.reset(token)

    base.__init__ = init
    low_latency._dispatch_core = dispatch_core


def _hook_layers(deepep: Any) -> None:
    """Tell the Buffer of which layer the next dispatch is. Where the engine has no such names any more, routing is
    recorded all the same, of all layers together."""
    layers: Any = importlib.import_module(_LAYERS)
    modes = [getattr(deepep, name, None) for name in _MODES]
    if not all(hasattr(mode, "_get_buffer") for mode in modes) or not hasattr(layers, "create_moe_dispatcher"):
        _log.warning("UCCL_EP_TRACE: this version of SGLang does not show which layer dispatches")
        return
    create = layers.create_moe_dispatcher

    @functools.wraps(create)
    def create_moe_dispatcher(moe_runner_config: Any, *args: Any, **kwargs: Any) -> Any:
        outer = create(moe_runner_config, *args, **kwargs)
        for inner in getattr(outer, "_inners", (outer,)):
            for name in _INNER:
                if (mode := getattr(inner, name, None)) is not None:
                    setattr(mode, LAYER, _number(getattr(moe_runner_config, "layer_id", None)))
        return outer

    layers.create_moe_dispatcher = create_moe_dispatcher
    for mode in modes:
        _hook_get_buffer(mode)


def _hook_get_buffer(mode: Any) -> None:
    get_buffer = mode._get_buffer

    @functools.wraps(get_buffer)
    def _get_buffer(self: Any) -> Any:
        buffer = get_buffer(self)
        buffer.layer = getattr(self, LAYER, UNKNOWN_LAYER)
        return buffer

    mode._get_buffer = _get_buffer


def _number(layer: object) -> int:
    return layer if isinstance(layer, int) else UNKNOWN_LAYER


def _hook_buffer(buffer: Any) -> None:
    set_mode = buffer.set_dispatch_mode.__func__

    @functools.wraps(set_mode)
    def set_dispatch_mode(cls: Any, mode: Any) -> None:
        # called before every replay of a captured graph, which calls nothing of ours
        buffer_class().check_all()
        set_mode(cls, mode)

    buffer.set_dispatch_mode = classmethod(set_dispatch_mode)


def _hook_runner(runner: Any, deepep: Any) -> None:
    capture = runner.init_cuda_graphs

    @functools.wraps(capture)
    def init_cuda_graphs(self: Any, *args: Any, **kwargs: Any) -> Any:
        open_before_capture(deepep, self.model, str(self.device), _decided.low_latency)
        return capture(self, *args, **kwargs)

    runner.init_cuda_graphs = init_cuda_graphs


def _hook_scheduler(scheduler: Any) -> None:
    """Raise what has failed before the tokens of a step are told: kernels that follow a failure move nothing, and a
    graph that is replayed calls nothing of ours."""
    process = scheduler.process_batch_result

    @functools.wraps(process)
    def process_batch_result(self: Any, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        _await(result)
        buffer_class().check_all()
        return process(self, batch, result, *args, **kwargs)

    scheduler.process_batch_result = process_batch_result


def _hook_requests(configurator: Any) -> None:
    """Let no more requests run than the window holds: pools, graphs and the scheduler all take the number from here."""
    resolve = configurator.resolve_max_num_reqs

    @functools.wraps(resolve)
    def resolve_max_num_reqs(self: Any, *args: Any, **kwargs: Any) -> int:
        found: int = resolve(self, *args, **kwargs)
        return found if _decided.requests is None else min(found, _decided.requests)

    configurator.resolve_max_num_reqs = resolve_max_num_reqs


def _await(result: Any) -> None:
    """Until a step's tokens are on the host, as the engine does next."""
    import torch

    copied = getattr(result, "copy_done", None)
    if copied is not None:
        copied.synchronize()
    elif torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
