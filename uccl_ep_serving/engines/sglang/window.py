"""The low-latency window of a launch: tokens a rank, and the running requests that fit it.

Every decode step of a rank must fit its window, the captured ones and those that run eagerly because more requests are
there than were captured. SGLang bounds both by the running requests of a data-parallel rank, so they and the window
are decided together, once everything else is resolved. ``--max-running-requests`` stays as the user gave it: SGLang
sizes other pools by it as well (states of linear attention, sliding windows), and takes it for a wish there.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from uccl_ep_serving.engines.expert_rows import whole_tiles
from uccl_ep_serving.engines.sglang.memory import reserve
from uccl_ep_serving.engines.sglang.options import WINDOW_VARIABLE, asked_tokens
from uccl_ep_serving.engines.sglang.targets import import_checked
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.protocol.layout import MAX_LOW_LATENCY_TOKENS

__all__ = ["MOST_TOKENS", "UNUSED_TOKENS", "Steps", "Window", "bound_prefill", "choose", "fit", "settle_mode"]

_log = logging.getLogger("uccl_ep_serving")

MOST_TOKENS = 512
"""Window that is chosen without the user: what SGLang captures at most, and 4 GiB of activations of DeepSeek-V3."""
UNUSED_TOKENS = 128
"""SGLang's default, for servers that run no low-latency operation: no memory is laid out for it."""

#: Experts that take rows of low latency alone.
_ONE_FORM = "flashinfer_cutedsl"


@dataclass(frozen=True)
class Steps:
    """The decode steps of a data-parallel rank, as the configuration has them.

    Attributes:
        ranks: data-parallel ranks of attention.
        captured: requests of the largest captured step.
        running: ``--max-running-requests``, of all ranks together, or None.
        width: tokens of a request in one step: 1, or those of speculation, or the block of a diffusion model.
        multiple: requests of a step are padded to a multiple of it.
    """

    ranks: int
    captured: int
    running: int | None
    width: int = 1
    multiple: int = 1

    def tokens(self, requests: int) -> int:
        """Tokens of a step of ``requests``. They are not divided by the ranks of attention's tensor parallelism: of a
        batch that they do not divide, every rank dispatches all (SGLang's ``BatchVariant.UNPADDED``)."""
        return -(-requests // self.multiple) * self.multiple * self.width

    def requests(self, tokens: int) -> int:
        """Most requests of a step that ``tokens`` hold."""
        return tokens // self.width // self.multiple * self.multiple


@dataclass(frozen=True)
class Window:
    """What was chosen.

    Attributes:
        tokens: of a rank, in one low-latency dispatch.
        requests: of a data-parallel rank, as many as a step of ``tokens`` holds.
    """

    tokens: int
    requests: int


def choose(steps: Steps, asked: int | None) -> int:
    """The smallest window that holds the largest step, at most :data:`MOST_TOKENS` unless ``asked`` says another.

    Raises:
        ConfigError: the running requests do not fit.
    """
    limit = asked or MOST_TOKENS
    if steps.requests(limit) < 1:
        raise ConfigError(
            f"low-latency window: one request takes {steps.tokens(1)} tokens in a step, and the window has {limit}. "
            f"Next step: {WINDOW_VARIABLE}={steps.tokens(1)}, or fewer --speculative-num-draft-tokens (of a diffusion "
            "model: a smaller block)"
        )
    if steps.running is None:
        return asked or min(limit, steps.tokens(steps.captured))
    requests = max(1, steps.running // steps.ranks)
    needed = steps.tokens(requests)
    if needed > limit:
        raise ConfigError(_too_many(steps, requests, needed, limit))
    return asked or needed


def _too_many(steps: Steps, requests: int, needed: int, limit: int) -> str:
    fitting = steps.requests(limit) * steps.ranks
    ways = [f"--max-running-requests {fitting}"]
    if needed <= MAX_LOW_LATENCY_TOKENS:
        ways.append(f"{WINDOW_VARIABLE}={needed} on every node, which takes memory in proportion")
    return (
        f"--max-running-requests {steps.running} is {requests} on each of {steps.ranks} data-parallel ranks, "
        f"x {steps.width} tokens a request = {needed} tokens of a rank in one decode step, and the low-latency window "
        f"holds {limit}. Next step: {', or '.join(ways)}"
    )


# --- from a resolved configuration -----------------------------------------------------------------------------------


def fit(server_args: Any) -> Window | None:
    """Choose the window of a resolved configuration and the requests that fit it, and reserve the memory.

    Returns:
        None where no low-latency operation will run: in normal mode.

    Raises:
        ConfigError: the running requests, or the tokens of a prefill step, do not fit; or the memory is not there.
    """
    overrides = import_checked(
        "sglang.srt.arg_groups.overrides", "declare_resolution", "resolving_view", "model_config_of"
    )
    cfg = overrides.resolving_view(server_args)
    if str(cfg.model_path).lower() in ("none", "dummy"):
        return None  # SGLang resolves no more of it either
    mode = str(cfg.deepep_mode)
    chosen = None
    if mode in ("low_latency", "auto"):
        steps = _steps(overrides, server_args, cfg)
        tokens = choose(steps, asked_tokens())
        if _prefills_through_window(cfg):
            tokens = max(tokens, _held_prefill(cfg))
        _check_warm_ups(cfg)
        tokens = whole_tiles(tokens, cfg.tp_size)
        chosen = Window(tokens, steps.requests(tokens))
        _log.info(
            "uccl_ep: low-latency window of %d tokens a rank: room for %d running requests x %d on each of %d "
            "data-parallel ranks; %s sets another window",
            chosen.tokens,
            chosen.requests,
            steps.width,
            steps.ranks,
            WINDOW_VARIABLE,
        )
    reserve(overrides, server_args, cfg, chosen.tokens if chosen else 0)
    return chosen


def _attention_ranks(cfg: Any) -> int:
    """Data-parallel ranks of attention; before 0.5.22 they were those of ``--dp`` with ``--enable-dp-attention``."""
    return max(getattr(cfg, "attn_dp_size", None) or 1, cfg.dp_size if cfg.enable_dp_attention else 1)


def _check_warm_ups(cfg: Any) -> None:
    """Raise ConfigError for those that run decode steps of more tokens than the window holds: as many as a prefill step
    has, or thousands for the products of a pipeline's stages."""
    environment = import_checked("sglang.srt.environ", "envs").envs
    larger = []
    # where SGLang drafts it leaves them out, but for prefill servers, which have another mode or a window for prefill
    if not cfg.speculative_algorithm:
        larger += [] if _prefills_through_window(cfg) else ["SGLANG_FLASHINFER_AUTOTUNE_EXTEND"]
        larger += ["SGLANG_PP_PARALLEL_DEEPGEMM_WARMUP"] if cfg.pp_size > 1 else []
    for name in larger:
        variable = getattr(environment, name, None)
        if variable is not None and variable.get():
            raise ConfigError(
                f"{name}=1 with --deepep-mode {cfg.deepep_mode}: SGLang would warm up with more tokens than the "
                "low-latency window holds. Next step: unset it, or --deepep-mode normal"
            )


def _steps(overrides: Any, server_args: Any, cfg: Any) -> Steps:
    width = 1
    if cfg.speculative_algorithm:
        most = getattr(overrides, "max_speculative_num_draft_tokens", None)
        drafted = most(server_args) if most else cfg.speculative_num_draft_tokens
        width = max(drafted or 1, cfg.speculative_eagle_topk or 1)
        if getattr(cfg, "enable_multi_layer_eagle", False):
            width = max(width, 2 * (cfg.speculative_num_steps or 0))
    if getattr(cfg, "dllm_algorithm", None):
        # a diffusion model: each step denoises a block of every request
        blocks = import_checked("sglang.srt.dllm.config", "DllmConfig").DllmConfig.from_server_args(server_args)
        width = max(width, blocks.block_size)
    ranks = _attention_ranks(cfg)
    multiple = 2 if cfg.enable_two_batch_overlap else 1
    context_ranks = getattr(cfg, "attn_cp_size", None) or 1
    if multiple % context_ranks:
        multiple *= context_ranks
    captured = cfg.cuda_graph_config.decode.max_bs or MOST_TOKENS
    return Steps(ranks, captured, cfg.max_running_requests, width, multiple)


def _prefills_through_window(cfg: Any) -> bool:
    """Before the configuration is resolved as well: of ``auto`` SGLang makes ``low_latency`` for experts that have no
    other form."""
    mode, experts = str(cfg.deepep_mode), str(cfg.moe_runner_backend)
    alone = mode == "low_latency" or (mode == "auto" and experts == _ONE_FORM)
    return alone and cfg.disaggregation_mode != "decode"


def bound_prefill(server_args: Any) -> None:
    """Before the configuration is resolved: prefill in steps that the window holds, and capture no larger ones, where
    that must be so and nothing is set."""
    if not _prefills_through_window(server_args):
        return
    overrides = import_checked("sglang.srt.arg_groups.overrides", "declare_resolution")
    limit = asked_tokens() or MOST_TOKENS
    if server_args.chunked_prefill_size is None:
        # SGLang divides it by the data-parallel ranks
        overrides.declare_resolution(server_args, "uccl_ep", chunked_prefill_size=limit * _attention_ranks(server_args))
    given = ("cuda_graph_max_bs_prefill", "cuda_graph_bs_prefill", "cuda_graph_config")
    if hasattr(server_args, given[0]) and all(getattr(server_args, name, None) is None for name in given):
        # without data-parallel attention SGLang captures 2,048, whatever the chunk
        overrides.declare_resolution(server_args, "uccl_ep", cuda_graph_max_bs_prefill=limit)


def settle_mode(server_args: Any) -> None:
    """Once the configuration is resolved: a prefill server in mode ``auto`` runs normal mode only.

    All its steps extend a batch, but for the engine's own warm-up (FlashInfer's autotuning), a decode step as large as
    its requests: that would go through a low-latency window which no server of this kind needs.
    """
    overrides = import_checked("sglang.srt.arg_groups.overrides", "declare_resolution", "resolving_view")
    cfg = overrides.resolving_view(server_args)
    if str(cfg.deepep_mode) == "auto" and cfg.disaggregation_mode == "prefill":
        overrides.declare_resolution(server_args, "uccl_ep", deepep_mode="normal")


def _captured_prefill(cfg: Any) -> int:
    """Tokens of the largest graph of prefill; 0 where none is captured."""
    prefill = getattr(cfg.cuda_graph_config, "prefill", None)
    if prefill is None or str(prefill.backend) == "disabled":
        return 0
    return int(max([prefill.max_bs or 0, *(prefill.bs or ())]))


def _grows(cfg: Any) -> bool:
    """Whether SGLang chooses the size of each chunk between stages of a pipeline."""
    return bool(cfg.enable_dynamic_chunking) and cfg.pp_size > 1


def _held_prefill(cfg: Any) -> int:
    """Tokens of the largest prefill step: with ``--deepep-mode low_latency`` it goes through the window as well, and so
    do its graphs."""
    chunk = cfg.chunked_prefill_size if cfg.chunked_prefill_size > 0 else cfg.max_prefill_tokens
    if _grows(cfg):
        # up to --max-prefill-tokens; the latencies are probed with chunks of up to 1.25 times the size
        chunk = max(chunk, cfg.max_prefill_tokens, math.ceil(chunk * 1.25))
    limit = asked_tokens() or MOST_TOKENS
    captured = _captured_prefill(cfg)
    largest: int = max(chunk, captured)
    if largest > limit:
        what = f"a prefill step of a data-parallel rank has up to {chunk} tokens (--chunked-prefill-size)"
        ways = [f"--chunked-prefill-size {limit * _attention_ranks(cfg)}"]
        if _grows(cfg):
            what = f"a prefill step has up to {chunk} tokens (--enable-dynamic-chunking, up to --max-prefill-tokens)"
            ways = ["leave out --enable-dynamic-chunking"]
        if captured > chunk:
            what = f"the largest graph of prefill has {captured} tokens (--cuda-graph-bs-prefill, or its maximum)"
            ways = [f"--cuda-graph-max-bs-prefill {limit}"]
        if str(cfg.moe_runner_backend) != _ONE_FORM:
            ways.append("--deepep-mode auto")
        if largest <= MAX_LOW_LATENCY_TOKENS:
            ways.append(f"{WINDOW_VARIABLE}={largest} on every node, which takes memory in proportion")
        raise ConfigError(
            f"--deepep-mode low_latency: {what}, and the low-latency window holds {limit}. "
            f"Next step: {', or '.join(ways)}"
        )
    return largest
