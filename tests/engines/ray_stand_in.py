"""The part of Ray that SGLang's ``srt/ray`` uses, so that its launcher and its actor class run without Ray.

What matters here is what Ray does with an actor: its arguments are pickled where it is created and unpickled in a
process of Ray's before the constructor runs, and nothing else of the launcher's process gets there.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["create", "install"]


class _ActorClass:
    """What ``@ray.remote`` makes of a class."""

    def __init__(self, original: type[Any], sent: list[bytes]) -> None:
        self.original, self._sent = original, sent

    def options(self, **_placement: Any) -> _ActorClass:
        return self

    def remote(self, *args: Any, **kwargs: Any) -> object:
        name = self.original.__module__, self.original.__name__
        self._sent.append(pickle.dumps((*name, pickle.dumps((args, kwargs)))))
        return object()


def install() -> list[bytes]:
    """Put the stand-in where ``import ray`` finds it; returns the list that created actors are appended to."""
    sent: list[bytes] = []
    ray = ModuleType("ray")
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": []})  # Ray on a machine without GPUs
    vars(ray).update(remote=lambda original: _ActorClass(original, sent), get_runtime_context=lambda: context)
    for name in ("util", "util.placement_group", "util.scheduling_strategies"):
        sys.modules[f"ray.{name}"] = ModuleType(f"ray.{name}")
    vars(sys.modules["ray.util.placement_group"])["PlacementGroup"] = SimpleNamespace
    vars(sys.modules["ray.util.scheduling_strategies"])["PlacementGroupSchedulingStrategy"] = SimpleNamespace
    sys.modules["ray"] = ray
    return sent


def create(created: bytes, unpickled: Callable[[], None]) -> Any:
    """Create the actor in this process, in Ray's order; ``unpickled`` is called just before its constructor."""
    module, name, pickled = pickle.loads(created)
    args, kwargs = pickle.loads(pickled)
    unpickled()
    return getattr(importlib.import_module(module), name).original(*args, **kwargs)
