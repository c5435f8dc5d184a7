"""What would otherwise end a scheduler at its first request, after the weights were loaded: refused in the launcher."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from uccl_ep_serving.engines.sglang.targets import import_checked
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.protocol.layout import MAX_LOW_LATENCY_TOKENS

__all__ = ["WINDOW_VARIABLE", "asked_tokens", "check_given", "check_resolved", "wait_for_compilation"]

WINDOW_VARIABLE = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
"""SGLang's own variable for the low-latency window. Its dispatcher asserts 1,024, which is DeepEP's limit, not ours."""


def asked_tokens() -> int | None:
    """Low-latency tokens a rank that the user asks for. Raises ConfigError for what no window can hold."""
    text = os.environ.get(WINDOW_VARIABLE)
    if text is None:
        return None
    try:
        tokens = int(text)
    except ValueError:
        tokens = 0
    if not 0 < tokens <= MAX_LOW_LATENCY_TOKENS:
        raise ConfigError(f"{WINDOW_VARIABLE} = {text} is outside 1..{MAX_LOW_LATENCY_TOKENS} tokens")
    return tokens


#: Seconds that ranks wait for one which compiles DeepGEMM's products: SGLang's warning says 10 to 20 minutes.
_COMPILING_SECONDS = 3600


def wait_for_compilation() -> None:
    """Under ``sglang.compile_deep_gemm`` one rank of a node compiles while the others wait inside an operation: they
    wait longer, unless the user says how long."""
    stage = getattr(import_checked("sglang.srt.environ", "envs").envs, "SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE", None)
    if stage is not None and stage.get():
        os.environ.setdefault("UCCL_EP_TIMEOUT", str(_COMPILING_SECONDS))


def check_given(server_args: Any) -> None:
    """Refuse what the command line and the environment say, before SGLang resolves them.

    Raises:
        ConfigError: an option, a variable of SGLang or a ``UCCL_EP_*`` variable holds what cannot be used.
    """
    from uccl_ep_serving import Settings

    Settings.from_environment()
    asked_tokens()
    _check_dtype(server_args)
    if server_args.deepep_config:
        _check_deepep_config(server_args.deepep_config)


def _check_dtype(server_args: Any) -> None:
    """Rows in NVFP4 are not sent yet; the engine would ask the Buffer for them at the first low-latency dispatch."""
    other = "Next step: --deepep-dispatcher-output-dtype bf16 or fp8; the experts may still compute in NVFP4"
    if getattr(server_args, "deepep_dispatcher_output_dtype", None) == "nvfp4":
        raise ConfigError(f"--deepep-dispatcher-output-dtype nvfp4: rows are not sent in NVFP4. {other}")
    variable = getattr(import_checked("sglang.srt.environ", "envs").envs, "SGLANG_MOE_NVFP4_DISPATCH", None)
    if variable is not None and variable.get():
        raise ConfigError(f"SGLANG_MOE_NVFP4_DISPATCH=1: rows are not sent in NVFP4. Unset it. {other}")


def _check_deepep_config(given: str) -> None:
    """Read ``--deepep-config`` as the engine's ``DeepEPConfig`` will: JSON, or the name of a file that holds it."""
    from uccl_ep_serving import Config

    what = f"--deepep-config {given!r}"
    try:
        parsed = json.loads(given if given.lstrip().startswith("{") else Path(given).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} is neither JSON nor a file of JSON: {error}") from error
    configs = []
    for part in ("normal_dispatch", "normal_combine"):
        if not (isinstance(parsed, dict) and isinstance(parsed.get(part), dict)):
            raise ConfigError(f"{what} needs an object named {part!r}, with the fields of Config")
        try:
            configs.append(Config(**parsed[part]))
        except (TypeError, ConfigError) as error:
            raise ConfigError(f"{what}, {part}: {error}") from error
        if "num_sms" not in parsed[part]:
            raise ConfigError(f"{what}, {part}: num_sms is missing")
    if configs[0].num_sms != configs[1].num_sms:
        raise ConfigError(f"{what}: num_sms of normal_dispatch and of normal_combine differ; SGLang wants them equal")


def check_resolved(server_args: Any) -> None:
    """Refuse what SGLang itself raises a bare NotImplementedError for, in every scheduler, or does not notice.

    Raises:
        ConfigError: EPLB, or another recorder of where tokens go, in a mode of DeepEP that the recorder cannot read; or
            a draft's experts are not shared by the ranks that its dispatch goes to.
    """
    cfg = import_checked("sglang.srt.arg_groups.overrides", "resolving_view").resolving_view(server_args)
    if str(cfg.moe_a2a_backend) != "deepep" and cfg.ep_size != cfg.tp_size:
        # SGLang sets --ep-size for the target's backend, and the draft's dispatcher takes all tensor-parallel ranks
        raise ConfigError(
            f"--speculative-moe-a2a-backend uccl_ep with --ep-size {cfg.ep_size}: the draft would dispatch to "
            f"{cfg.tp_size} ranks, which do not share its experts. Next step: --ep-size {cfg.tp_size}, or "
            "--moe-a2a-backend uccl_ep as well"
        )
    recorder, mode = cfg.expert_distribution_recorder_mode, str(cfg.deepep_mode)
    if recorder in (None, "per_token"):
        return
    wanted = ("normal",) if recorder == "stat_approx" else ("normal", "low_latency")
    if mode not in wanted:
        asked = "--enable-eplb" if cfg.enable_eplb else f"--expert-distribution-recorder-mode {recorder}"
        raise ConfigError(
            f"{asked} with --deepep-mode {mode}: SGLang's recorder of expert loads (mode {recorder}) reads one mode of "
            f"DeepEP at a time. Next step: --deepep-mode {' or '.join(wanted)}; with prefill and decode on servers of "
            "their own each takes one"
        )
