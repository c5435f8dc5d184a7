"""What window and expert activations take of a GPU, taken out of the memory that SGLang would give its KV cache."""

from __future__ import annotations

import logging
from typing import Any

from uccl_ep_serving.config import Settings
from uccl_ep_serving.engines.memory_budget import GIB, MemoryBudget, MoeShape, memory_budget
from uccl_ep_serving.engines.sglang.options import WINDOW_VARIABLE
from uccl_ep_serving.engines.sglang.targets import import_checked
from uccl_ep_serving.errors import ConfigError

__all__ = ["reserve"]

_log = logging.getLogger("uccl_ep_serving")


def _shape(config: Any, redundant: int, shared_ranks: int) -> MoeShape | None:
    """The MoE layers of a checkpoint's configuration, under the names that models give them; None without any.

    Args:
        shared_ranks: ranks that have a slot each for a shared expert that is routed as one more of a token's experts.
    """

    def first(*names: str) -> int | None:
        found = (getattr(config, name, None) for name in names)
        return next((int(one) for one in found if isinstance(one, int) and one > 0), None)

    hidden = first("hidden_size")
    experts = first("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
    topk = first("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
    intermediate = first("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    if hidden is None or experts is None or topk is None or intermediate is None:
        return None
    if not first("n_shared_experts", "num_shared_experts"):
        shared_ranks = 0
    return MoeShape(hidden, experts + redundant + shared_ranks, topk + bool(shared_ranks), intermediate)


def _budget(cfg: Any, model: Any, tokens: int) -> MemoryBudget | None:
    from uccl_ep_serving import Config
    from uccl_ep_serving.data_plane.window_sizes import normal_plan

    ranks = cfg.tp_size
    # --enable-waterfill sets it
    fused = getattr(cfg, "enforce_shared_experts_fusion", False)
    shape = _shape(model.hf_text_config, cfg.ep_num_redundant_experts or 0, ranks if fused else 0)
    if shape is None:
        return None
    if shape.experts % ranks:
        raise ConfigError(
            f"{shape.experts} experts (redundant ones included) cannot be shared by {ranks} expert-parallel ranks "
            f"evenly. Next step: a --tp that divides them, or --ep-num-redundant-experts "
            f"{(cfg.ep_num_redundant_experts or 0) + -shape.experts % ranks}"
        )
    settings = Settings.from_environment()
    heap = 0
    if str(cfg.deepep_mode) != "low_latency":
        # what the engine asks the Buffer for; in normal mode alone both hints count
        hints, row = Config(), shape.hidden * shape.element
        heap = hints.get_nvl_buffer_size_hint(row, ranks)
        heap += 0 if tokens else hints.get_rdma_buffer_size_hint(row, ranks)
    environment = import_checked("sglang.srt.environ", "envs").envs
    unquantised = cfg.deepep_dispatcher_output_dtype == "bf16" or environment.SGLANG_DEEPEP_BF16_DISPATCH.get()
    unquantised |= str(cfg.moe_runner_backend) in ("flashinfer_cutedsl", "cutlass", "humming")
    unquantised |= model.quantization is None
    try:
        return memory_budget(
            shape,
            ranks,
            tokens,
            normal_plan(ranks, settings, heap),
            quantised=not unquantised,
            on_device=settings.window != "host",
            batches=2 if cfg.enable_two_batch_overlap else 1,
        )
    except ValueError as error:
        raise ConfigError(f"low-latency window of {tokens} tokens: {error}") from error


def reserve(overrides: Any, server_args: Any, cfg: Any, tokens: int) -> None:
    """Take window and activations out of ``mem_fraction_static``, where the engine would put its KV cache.

    The engine's own reserve for DeepEP's buffers is in it already. A fraction that the user gives stays. Where the
    engine sizes the KV cache after the capture, it finds what is left by itself: the Buffer is open by then.
    """
    found = _budget(cfg, overrides.model_config_of(server_args), tokens)
    if found is None:
        _log.warning("uccl_ep: the configuration of this model does not say its MoE layers: no memory is reserved")
        return
    said = (
        f"uccl_ep: takes {found.total / GIB:.1f} GiB of each GPU: {found.window / GIB:.1f} window, "
        f"{found.activations / GIB:.1f} expert activations"
    )
    device = str(cfg.device)
    if device == "cpu":
        _log.info("%s (on CPU: pages are committed when they are first touched)", said)
        return
    memory = import_checked("sglang.srt.utils.common", "get_device_memory_capacity").get_device_memory_capacity(device)
    hook = import_checked("sglang.srt.arg_groups.memory_hook")
    fraction = cfg.mem_fraction_static
    if memory is None or fraction is None:
        _log.info("%s; how much there is, SGLang does not know", said)
        return
    left = (1 - fraction) * memory / 1024
    if server_args.mem_fraction_static is not None:
        needed = found.total / GIB
        if str(cfg.cuda_graph_config.decode.backend) != "disabled":
            # the graphs' pool lends nothing to the warm-up of the next size to be captured
            needed += found.activations / GIB
            said += f", and {found.activations / GIB:.1f} once more while graphs are captured"
        warn = needed > left
        _log.log(
            logging.WARNING if warn else logging.INFO,
            "%s; --mem-fraction-static %s leaves %.1f GiB%s",
            said,
            fraction,
            left,
            f", too few. Next step: leave it out, or at most {1 - needed * 1024 / memory:.2f}" if warn else "",
        )
        return
    if overrides.post_capture_kv_sizing_planned(server_args):
        _log.info("%s; SGLang sizes the KV cache after them", said)
        return
    kept = getattr(hook, "reserve_for_deepep_a2a_mb", lambda _args: 0.0)(server_args)
    more = max(0.0, found.total / 2**20 - kept)
    reserved = round(fraction - more / memory, 3)
    if reserved <= 0:
        raise ConfigError(
            f"low-latency window of {tokens} tokens a rank: window and expert activations take "
            f"{found.total / GIB:.1f} GiB of a GPU of {memory / 1024:.0f} GiB, which leaves nothing for the model. "
            f"Next step: a smaller {WINDOW_VARIABLE}, or more ranks"
        )
    overrides.declare_resolution(server_args, "uccl_ep", mem_fraction_static=reserved)
    _log.info("%s; mem_fraction_static %s -> %s", said, fraction, reserved)
