"""Stands in for the package ``deep_ep``, for frameworks that import it by name."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .errors import ConfigError

__all__ = ["install_as_deep_ep"]

#: By name of each module of DeepEP version 1, what others import from it.
_MODULES = {
    "deep_ep": ("Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"),
    "deep_ep.buffer": ("Buffer", "Config", "EventHandle", "EventOverlap"),
    "deep_ep.utils": ("EventHandle", "EventOverlap"),
    "deep_ep_cpp": ("Config", "EventHandle", "topk_idx_t"),
}


class _StandIn(ModuleType):
    """A module of DeepEP whose names are ours, each resolved when it is first asked for."""

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULES[self.__name__]:
            raise AttributeError(f"module {self.__name__!r} of uccl_ep_serving has no attribute {name!r}")
        return getattr(sys.modules[__package__], name)


def install_as_deep_ep() -> None:
    """From now on ``import deep_ep`` gives this package's Buffer in this process, whether DeepEP is installed or not.

    For training frameworks that import DeepEP by name (Megatron-Core, TorchTitan, XTuner and others): call it before
    theirs. May be called again.

    Raises:
        ConfigError: DeepEP itself has been imported already.
    """
    for name in _MODULES:
        if not isinstance(sys.modules.get(name, None), _StandIn | None):
            raise ConfigError(
                f"{name} of DeepEP has been imported already. Next step: call install_as_deep_ep() before anything "
                "that imports it"
            )
    for name in _MODULES:
        if name not in sys.modules:
            module = _StandIn(name, __doc__)
            module.__spec__ = ModuleSpec(name, None, is_package=name == "deep_ep")
            if name == "deep_ep":
                module.__path__ = []
            sys.modules[name] = module
            package, _, own = name.partition(".")
            if own:
                setattr(sys.modules[package], own, module)
