"""How the plugin hooks a name of vLLM: a marked replacement, and records that show the built-in backend's name."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from uccl_ep_serving.engines.versions import VLLM
from uccl_ep_serving.engines.vllm.targets import BACKENDS, Target, find, twin

__all__ = ["BACKEND_FIELD", "asked_for", "hook_property", "hooked", "is_hook", "mark", "say_active", "verify_hooked"]

BACKEND_FIELD = "all2all_backend"
"""The setting, in ``ParallelConfig`` and in ``FusedMoEParallelConfig``."""

_MARK = "_uccl_ep_hook"


def mark(hook: Any) -> Any:
    """Mark a function as one of the plugin's hooks, for :func:`hooked`."""
    setattr(hook, _MARK, True)
    return hook


def is_hook(function: Any) -> bool:
    """Whether ``function`` is one of the plugin's hooks."""
    return getattr(function, _MARK, False) is True


def hooked(target: Target) -> bool:
    """Whether the plugin's hook is what vLLM finds at ``target`` now."""
    _, _, value = find(target)
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    return is_hook(value)


def asked_for(parallel_config: Any) -> bool:
    """Whether a ``ParallelConfig`` (or ``FusedMoEParallelConfig``) names one of our backends."""
    return getattr(parallel_config, BACKEND_FIELD, None) in BACKENDS


class _SeenAsDeepEp:
    """A configuration record read through this shows the built-in backend's name in the place of ours.

    vLLM's properties compare the name with those of the built-in backends; evaluated on this view they give what they
    give for DeepEP, whatever else a later version adds to the condition.
    """

    __slots__ = ("_record",)

    def __init__(self, record: Any) -> None:
        self._record = record

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._record, name)
        return twin(value) if name == BACKEND_FIELD else value


def hook_property(target: Target) -> None:
    """Evaluate a property on the DeepEP view of records that name one of our backends. Idempotent."""
    owner, name, value = find(target)
    if not isinstance(value, property) or value.fget is None:
        raise VLLM.refusal(f"{target.path} is no property any more")
    if hooked(target):
        return
    original = value.fget

    @functools.wraps(original)
    def evaluate(self: Any) -> Any:
        return original(_SeenAsDeepEp(self) if asked_for(self) else self)

    setattr(owner, name, property(mark(evaluate), doc=value.__doc__))


def verify_hooked(targets: Iterable[Target]) -> None:
    """Raise ConfigError when the hook on one of ``targets`` did not take."""
    for target in targets:
        if not hooked(target):
            raise VLLM.refusal(f"the hook on {target.path} did not take")


@functools.cache
def say_active() -> None:
    """Log, once in a process, that vLLM runs on this package."""
    VLLM.log_activation("expert parallelism")
