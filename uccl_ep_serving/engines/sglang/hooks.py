"""The two hooks that are registered for everybody, and whether the engine has applied them.

==================================== ======= ==================================================================
target                               kind    does
==================================== ======= ==================================================================
``ServerArgs.add_cli_args``          AFTER   adds the choice to the two backend options
``ServerArgs.resolve_once``          AROUND  if asked for: checks, declares ``deepep``, sizes, activates
==================================== ======= ==================================================================

``resolve_once`` runs in the launcher and again in every scheduler (when the configuration is published), so both
verify. SGLang only logs a plugin that fails; here a failure raises :class:`~uccl_ep_serving.errors.ConfigError`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uccl_ep_serving.engines.devices import check_device
from uccl_ep_serving.engines.versions import SGLANG
from uccl_ep_serving.errors import ConfigError

if TYPE_CHECKING:
    from uccl_ep_serving.engines.sglang.workers import Decisions

__all__ = ["BACKEND", "FIELDS", "register", "verify_hooks"]

_log = logging.getLogger("uccl_ep_serving")

BACKEND = "uccl_ep"
"""The value of ``--moe-a2a-backend`` and ``--speculative-moe-a2a-backend``."""

FIELDS = ("moe_a2a_backend", "speculative_moe_a2a_backend")

_RESOLVED = "deepep"
_SERVER_ARGS = "sglang.srt.server_args"
#: What the engine sets on a ``ServerArgs`` that it has resolved.
_FINISHED = "_resolution_finished"

#: Targets whose hooks the registry will not apply, and why.
_displaced: dict[str, str] = {}


def register() -> None:
    """Entry point: register the two hooks. Cheap: neither torch nor the Buffer is imported."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    server_args = importlib.import_module(_SERVER_ARGS).ServerArgs
    hooks: list[tuple[str, Callable[..., Any], Any]] = [("add_cli_args", _after_add_cli_args, HookType.AFTER)]
    if hasattr(server_args, "resolve_once"):
        hooks.append(("resolve_once", _around_resolve_once, HookType.AROUND))
    else:
        # too old to serve with: accept the name on the command line only to refuse it with the reason
        hooks.append(("__post_init__", _before_post_init_of_old_version, HookType.BEFORE))
    for name, hook, kind in hooks:
        target = f"{_SERVER_ARGS}.ServerArgs.{name}"
        if others := _applied_before(HookRegistry, target):
            _displaced[target] = (
                f"SGLang's HookRegistry had patched it for {others} before this plugin was loaded, and skips a target "
                "it has patched. Next step: have that plugin leave HookRegistry.apply_hooks to SGLang, or take it out "
                "(SGLANG_PLUGINS)"
            )
            _log.warning("uccl_ep: the hook on %s will not be applied: %s", target, _displaced[target])
            if name == "resolve_once":
                _refuse_by_hand(server_args)
        HookRegistry.register(target, hook, kind)


def _refuse_by_hand(server_args: Any) -> None:
    """Have ``resolve_once`` refuse the backend where the registry has no place for our hook: a caller in Python passes
    no command line, where it would be refused."""
    original = server_args.resolve_once

    @functools.wraps(original)
    def resolve_once(self: Any) -> None:
        if any(getattr(self, field, None) == BACKEND for field in FIELDS):
            verify_hooks()
        original(self)

    server_args.resolve_once = resolve_once


def _applied_before(registry: Any, target: str) -> str:
    """Whose hooks the registry has applied to ``target`` already; empty where it has none."""
    if target not in getattr(registry, "_patched", ()):
        return ""
    hooks = (hook for _, hook, *_ in getattr(registry, "_hooks", {}).get(target, ()))
    return ", ".join(f"{hook.__module__}.{hook.__qualname__}" for hook in hooks) or "another plugin"


def _after_add_cli_args(result: None, parser: Any, *_args: object, **_kwargs: object) -> None:
    """Offer ``uccl_ep`` wherever ``deepep`` is a choice of one of the two options; any other name stays refused."""
    for action in parser._actions:
        if action.dest in FIELDS and action.choices is not None and BACKEND not in action.choices:
            action.choices = [*action.choices, BACKEND]  # a new list: the engine shares its own between parsers
            action.type = functools.partial(_checked_name, action.type or str)
    return result


def _checked_name(parse: Callable[[str], Any], text: str) -> Any:
    """Argparse type of the two options: ``uccl_ep`` is an argument error, with the reason, when a hook is missing.

    Without the hook on ``resolve_once`` the name would go on to the engine, whose own error says nothing of us.
    """
    if text != BACKEND or not hasattr(importlib.import_module(_SERVER_ARGS).ServerArgs, "resolve_once"):
        return parse(text)
    try:
        verify_hooks()
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    from uccl_ep_serving.engines.sglang.workers import BackendName

    return BackendName(text)


def _before_post_init_of_old_version(server_args: Any, *_args: object, **_kwargs: object) -> None:
    if any(getattr(server_args, field, None) == BACKEND for field in FIELDS):
        raise SGLANG.refusal("ServerArgs.resolve_once is missing")


def _around_resolve_once(original: Callable[[Any], None], server_args: Any) -> None:
    """Resolve ``uccl_ep`` to ``deepep`` (launcher) and put our Buffer under the engine's dispatcher (every process)."""
    requested = [field for field in FIELDS if getattr(server_args, field, None) == BACKEND]
    if not requested:
        original(server_args)
        return
    verify_hooks()
    # imported here: whoever does not ask for the backend pays nothing
    from uccl_ep_serving.engines.sglang import activation, workers

    decisions = workers.decisions_of(server_args)
    if decisions is None:
        if getattr(server_args, _FINISHED, False):
            raise ConfigError(
                "--moe-a2a-backend uccl_ep: this configuration was resolved before the plugin was loaded, so nothing "
                "of it was checked. Next step: call sglang.srt.plugins.load_plugins() before resolving it, as `sglang "
                "serve` does"
            )
        decisions = _resolve(original, server_args, requested)
    elif decisions.host != workers.host():
        # Ray chooses hosts on which nobody has asked for the GPUs yet
        _check_device(server_args)
    activation.activate(decisions)


def _check_device(server_args: Any) -> None:
    """Refuse a device of this host that cannot be served, by name."""
    from uccl_ep_serving.engines.sglang.targets import import_checked

    overrides = import_checked("sglang.srt.arg_groups.overrides", "resolved_view")
    device = str(overrides.resolved_view(server_args).device)
    check_device(device, f"--moe-a2a-backend {BACKEND}", "uccl-ep demo")


def _resolve(original: Callable[[Any], None], server_args: Any, requested: list[str]) -> Decisions:
    """The launcher's part: what is wrong is refused here, before a scheduler starts."""
    from uccl_ep_serving.engines.ahead import compile_ahead
    from uccl_ep_serving.engines.sglang import options, window, workers
    from uccl_ep_serving.engines.sglang.targets import import_checked

    for field in set(FIELDS) - set(requested):
        if getattr(server_args, field, None) == _RESOLVED:
            raise ConfigError(
                f"--{field.replace('_', '-')} deepep beside --{requested[0].replace('_', '-')} {BACKEND}: both run "
                f"on the engine's one DeepEP buffer of the process. Give {BACKEND} to both, or to neither."
            )
    options.wait_for_compilation()
    options.check_given(server_args)
    overrides = import_checked("sglang.srt.arg_groups.overrides", "declare_resolution")
    overrides.declare_resolution(server_args, BACKEND, **dict.fromkeys(requested, _RESOLVED))
    window.bound_prefill(server_args)
    compile_ahead(str(server_args.device))
    original(server_args)
    try:
        if not getattr(server_args, _FINISHED, False):
            raise SGLANG.refusal(f"{_SERVER_ARGS}.ServerArgs.{_FINISHED} is missing")
        decisions = _decide(server_args)
    except Exception as error:
        workers.refuse(server_args, error)
        raise
    workers.attach(server_args, decisions, verify_hooks)
    return decisions


def _decide(server_args: Any) -> Decisions:
    """Check and size what the engine has resolved."""
    from uccl_ep_serving.engines.sglang import options, window, workers

    _check_device(server_args)
    window.settle_mode(server_args)
    options.check_resolved(server_args)
    chosen = window.fit(server_args)
    if chosen is None:
        return workers.Decisions(window.UNUSED_TOKENS, False)
    return workers.Decisions(chosen.tokens, True, requests=chosen.requests)


# --- verification ---------------------------------------------------------------------------------------------------


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


def verify_hooks() -> None:
    """Check version and the two registry hooks; SGLang itself only logs a hook that could not be applied."""
    from uccl_ep_serving.engines.sglang.targets import import_checked

    SGLANG.check_version()
    hooks: dict[str, Callable[..., Any]] = {"add_cli_args": _after_add_cli_args, "resolve_once": _around_resolve_once}
    server_args = import_checked(_SERVER_ARGS, *(f"ServerArgs.{name}" for name in hooks)).ServerArgs
    for name, hook in hooks.items():
        if not _is_hooked(getattr(server_args, name), hook):
            target = f"{_SERVER_ARGS}.ServerArgs.{name}"
            raise SGLANG.refusal(
                f"the hook on {target} was not applied",
                _displaced.get(target)
                or "See 'Failed to apply hooks' above in SGLang's log; another plugin may have replaced the function.",
            )
