"""SGLang's ``--moe-a2a-backend uccl_ep``: a plugin of the entry-point group ``sglang.srt.plugins``.

SGLang has no registry of all-to-all backends, so the plugin stands in for DeepEP: the new name is a choice of the
command line, configuration resolves it to ``deepep``, and the engine's own ``DeepEPDispatcher`` runs on our
:class:`~uccl_ep_serving.Buffer`. Every special case of the engine then holds as it does under ``deepep``: padding under
DP attention, CUDA graphs, two-batch overlap, EPLB and the expert runners. ``--deepep-mode``, ``--deepep-config``,
``--deepep-dispatcher-output-dtype`` and ``SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK`` keep their meaning.

Two hooks are registered for everybody and change nothing unless ``uccl_ep`` was asked for:

==================================== ======= ==================================================================
target                               kind    does
==================================== ======= ==================================================================
``ServerArgs.add_cli_args``          AFTER   adds the choice to the two backend options
``ServerArgs.resolve_once``          BEFORE  if asked for: checks, declares ``deepep``, then :func:`activate`
==================================== ======= ==================================================================

``resolve_once`` runs in the launcher and again in every scheduler (when the configuration is published), so both
verify. SGLang only logs a plugin that fails; here a failure raises :class:`~uccl_ep_serving.errors.ConfigError`.
The configuration also carries a guard through pickling: a worker that never loads plugins (Ray actors do not) would
otherwise run the real ``deep_ep`` under the resolved name without a word; unpickling the guard loads them.
"""

from __future__ import annotations

import argparse
import contextlib
import contextvars
import functools
import importlib
import inspect
import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from uccl_ep_serving.engines.devices import check_device
from uccl_ep_serving.engines.versions import SGLANG
from uccl_ep_serving.errors import ConfigError

__all__ = ["BACKEND", "activate", "register"]

BACKEND = "uccl_ep"
"""The value of ``--moe-a2a-backend`` and ``--speculative-moe-a2a-backend``."""

_RESOLVED = "deepep"
_FIELDS = ("moe_a2a_backend", "speculative_moe_a2a_backend")
_DEEPEP = "sglang.srt.layers.moe.token_dispatcher.deepep"
_OVERLAP = "sglang.srt.batch_overlap.single_batch_overlap"
_SERVER_ARGS = "sglang.srt.server_args"


# --- hooks that are always there ------------------------------------------------------------------------------------


def register() -> None:
    """Entry point: register the two hooks. Cheap: neither torch nor the Buffer is imported."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    server_args = importlib.import_module(_SERVER_ARGS).ServerArgs
    HookRegistry.register(f"{_SERVER_ARGS}.ServerArgs.add_cli_args", _after_add_cli_args, HookType.AFTER)
    if hasattr(server_args, "resolve_once"):
        HookRegistry.register(f"{_SERVER_ARGS}.ServerArgs.resolve_once", _before_resolve_once, HookType.BEFORE)
    else:
        # too old to serve with: accept the name on the command line only to refuse it with the reason
        HookRegistry.register(
            f"{_SERVER_ARGS}.ServerArgs.__post_init__", _before_post_init_of_old_version, HookType.BEFORE
        )


def _after_add_cli_args(result: None, parser: Any, *_args: object, **_kwargs: object) -> None:
    """Offer ``uccl_ep`` wherever ``deepep`` is a choice of one of the two options; any other name stays refused."""
    for action in parser._actions:
        if action.dest in _FIELDS and action.choices is not None and BACKEND not in action.choices:
            action.choices = [*action.choices, BACKEND]  # a new list: the engine shares its own between parsers
            action.type = functools.partial(_checked_name, action.type or str)
    return result


def _checked_name(parse: Callable[[str], Any], text: str) -> Any:
    """Argparse type of the two options: ``uccl_ep`` is an argument error, with the reason, when a hook is missing.

    Without the hook on ``resolve_once`` the name would go on to the engine, whose own error says nothing of us.
    """
    if text == BACKEND and hasattr(importlib.import_module(_SERVER_ARGS).ServerArgs, "resolve_once"):
        try:
            _verify_hooks()
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return parse(text)


def _before_post_init_of_old_version(server_args: Any, *_args: object, **_kwargs: object) -> None:
    if any(getattr(server_args, field, None) == BACKEND for field in _FIELDS):
        raise SGLANG.refusal("ServerArgs.resolve_once is missing")


def _before_resolve_once(server_args: Any) -> None:
    """Resolve ``uccl_ep`` to ``deepep`` (launcher) and put our Buffer under the engine's dispatcher (every process)."""
    requested = [field for field in _FIELDS if getattr(server_args, field, None) == BACKEND]
    if not requested:
        return
    _verify_hooks()
    if not getattr(server_args, "_resolution_finished", False):
        for field in set(_FIELDS) - set(requested):
            if getattr(server_args, field, None) == _RESOLVED:
                raise ConfigError(
                    f"--{field.replace('_', '-')} deepep beside --{requested[0].replace('_', '-')} {BACKEND}: both run "
                    f"on the engine's one DeepEP buffer of the process. Give {BACKEND} to both, or to neither."
                )
        _check_options(server_args)
        overrides = _import("sglang.srt.arg_groups.overrides", "declare_resolution")
        overrides.declare_resolution(server_args, BACKEND, **dict.fromkeys(requested, _RESOLVED))
        server_args._uccl_ep_guard = _WorkerGuard()  # rides along when the record is pickled to workers
        # imported here: whoever does not ask for the backend pays nothing
        from uccl_ep_serving.engines.ahead import compile_ahead

        compile_ahead(str(server_args.device))
    else:
        check_device(str(server_args.resolved_dict()["device"]), f"--moe-a2a-backend {BACKEND}", "uccl-ep demo")
    activate()


class _WorkerGuard:
    """Rides on a pickled ``ServerArgs``; unpickling it loads SGLang's plugins in a worker that would not."""

    def __reduce__(self) -> tuple[Callable[[], _WorkerGuard], tuple[()]]:
        return _load_in_worker, ()


def _load_in_worker() -> _WorkerGuard:
    importlib.import_module("sglang.srt.plugins").load_plugins()
    _verify_hooks()
    return _WorkerGuard()


# --- verification ---------------------------------------------------------------------------------------------------


def _import(module: str, *names: str) -> Any:
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


def _is_hooked(function: Any, hook: Callable[..., Any]) -> bool:
    """Whether ``hook`` is in the chain of wrappers that SGLang's registry put around ``function``."""
    # the registry's own record says what it applied, not whether another plugin has replaced the function since
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # a cell that is still empty
                if cell.cell_contents is hook:
                    return True
        function = getattr(function, "__wrapped__", None)
    return False


def _verify_hooks() -> None:
    """Check version and the two registry hooks; SGLang itself only logs a hook that could not be applied."""
    SGLANG.check_version()
    hooks: dict[str, Callable[..., Any]] = {"add_cli_args": _after_add_cli_args, "resolve_once": _before_resolve_once}
    server_args = _import(_SERVER_ARGS, *(f"ServerArgs.{name}" for name in hooks)).ServerArgs
    for name, hook in hooks.items():
        if not _is_hooked(getattr(server_args, name), hook):
            raise SGLANG.refusal(
                f"the hook on {_SERVER_ARGS}.ServerArgs.{name} was not applied",
                "See 'Failed to apply hooks' above in SGLang's log; another plugin may have replaced the function.",
            )


# --- what would otherwise end a scheduler at its first request, after the weights were loaded ------------------------

_MOST_DISPATCH_TOKENS = 1024
"""SGLang's own limit, which its dispatcher asserts without a word (``_DeepEPDispatcherImplBase``)."""


def _check_options(server_args: Any) -> None:
    """Refuse, in the launcher, options and variables that the first dispatch would stumble over.

    Raises:
        ConfigError: ``--deepep-config``, ``SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK`` or a ``UCCL_EP_*`` variable
            holds what cannot be used.
    """
    from uccl_ep_serving import Settings

    Settings.from_environment()
    window = _import("sglang.srt.environ", "envs").envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()
    if not 0 < window <= _MOST_DISPATCH_TOKENS:
        raise ConfigError(
            f"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK = {window} is outside 1..{_MOST_DISPATCH_TOKENS}, the "
            "range that SGLang's dispatcher takes"
        )
    if server_args.deepep_config:
        _check_deepep_config(server_args.deepep_config)


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


# --- activation: only when uccl_ep was asked for ---------------------------------------------------------------------

_router_weights: contextvars.ContextVar[Any] = contextvars.ContextVar("uccl_ep_router_weights", default=None)
"""Router weights of the low-latency dispatch in progress; float32 ``[tokens, topk]`` or None."""


@functools.cache
def buffer_class() -> type[Any]:
    """Our Buffer as SGLang's dispatcher sees it: it also learns the router weights at dispatch.

    SGLang hands them to ``low_latency_dispatch`` on one other platform only, yet they are what lets the expert side
    sum a token's experts and return one row per (token, rank) instead of one per (token, expert). The weights are
    those that ``low_latency_combine`` gets: every runner of 0.5.23 passes the dispatcher's tensor through.
    """
    from uccl_ep_serving import Buffer

    class SGLangBuffer(Buffer):
        #: Those of this process.
        alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.alive.add(self)

        @classmethod
        def check_all(cls) -> None:
            """Raise what is known to be wrong with any of them; see ``Buffer.check``."""
            for buffer in list(cls.alive):
                if not buffer.runtime.closed:
                    buffer.check()

        def low_latency_dispatch(self, *args: Any, topk_weights: Any = None, **kwargs: Any) -> Any:
            if topk_weights is None:
                topk_weights = _router_weights.get()
            return super().low_latency_dispatch(*args, topk_weights=topk_weights, **kwargs)

    return SGLangBuffer


@dataclass(frozen=True)
class _Targets:
    """The objects of the engine that :func:`activate` changes, all found before the first is touched."""

    deepep: Any  # module sglang.srt.layers.moe.token_dispatcher.deepep
    dispatcher: Any  # its class _DeepEPDispatcherImplLowLatency
    buffer: Any  # its class DeepEPBuffer
    overlap: Any  # class SboFlags
    quantize: Any  # function sglang_per_token_group_quant_fp8


def _find_targets() -> _Targets:
    core = "_DeepEPDispatcherImplLowLatency._dispatch_core"
    buffer = ("DeepEPBuffer.get_deepep_buffer", "DeepEPBuffer.set_dispatch_mode")
    deepep = _import(_DEEPEP, *buffer, "DeepEPConfig.get_instance", core)
    dispatcher = deepep._DeepEPDispatcherImplLowLatency
    overlap = _import(_OVERLAP, "SboFlags.enable_combine_down_gemm_two_stream_overlap").SboFlags
    quantization = _import("sglang.kernels.ops.quantization.fp8_kernel", "sglang_per_token_group_quant_fp8")
    # the names themselves are absent where deep_ep is not installed, so look at what the engine's code will look up
    used = deepep.DeepEPConfig.__init__.__code__.co_names
    for name in ("Buffer", "Config"):
        if name not in used:
            raise SGLANG.refusal(f"{_DEEPEP}.DeepEPConfig does not use the global {name} any more")
    parameters = list(inspect.signature(dispatcher._dispatch_core).parameters)
    if parameters != ["self", "hidden_states", "topk_ids", "topk_weights"]:
        raise SGLANG.refusal(f"{_DEEPEP}.{core} takes other arguments: {', '.join(parameters)}")
    return _Targets(deepep, dispatcher, deepep.DeepEPBuffer, overlap, quantization.sglang_per_token_group_quant_fp8)


def activate() -> None:
    """Put our Buffer, Config and router-weight hook under SGLang's DeepEP dispatcher in this process. Idempotent.

    Raises:
        ConfigError: the engine is of a refused version or lacks one of the targets; nothing has been changed then.
    """
    SGLANG.check_version()
    targets = _find_targets()

    from uccl_ep_serving import Config

    if getattr(targets.deepep, "Buffer", None) is buffer_class():
        return
    core = targets.dispatcher._dispatch_core

    @functools.wraps(core)
    def dispatch_core(self: Any, hidden_states: Any, topk_ids: Any, topk_weights: Any) -> Any:
        token = _router_weights.set(topk_weights)
        try:
            return core(self, hidden_states, topk_ids, topk_weights)
        finally:
            _router_weights.reset(token)

    set_mode = targets.buffer.set_dispatch_mode.__func__

    @functools.wraps(set_mode)
    def set_dispatch_mode(cls: Any, mode: Any) -> None:
        # called before every replay of a captured graph, which calls nothing of ours
        buffer_class().check_all()
        set_mode(cls, mode)

    targets.buffer.set_dispatch_mode = classmethod(set_dispatch_mode)
    targets.dispatcher._dispatch_core = dispatch_core
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
