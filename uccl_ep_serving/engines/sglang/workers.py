"""What the launcher has decided, carried to the engine's other processes inside the pickled configuration.

SGLang's schedulers load plugins before they unpickle it and inherit the environment. Ray's actors do neither: the
engine would run the real ``deep_ep`` there under the resolved name without a word, and our settings would be lost.
Unpickling the guard loads the plugins and hands over the ``UCCL_EP_*`` variables of the launcher. A configuration that
a tool (``uccl-ep run``) hands to a process before it is resolved carries no guard yet; there the backend's name itself
loads them.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from uccl_ep_serving.errors import ConfigError

__all__ = ["BackendName", "Decisions", "attach", "decisions_of"]

_log = logging.getLogger("uccl_ep_serving")

_GUARD = "_uccl_ep_guard"


class BackendName(str):
    """The backend's name as the command line gave it: unpickling it loads SGLang's plugins."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[[str], BackendName], tuple[str]]:
        return _load_name, (str(self),)


def _load_name(name: str) -> BackendName:
    importlib.import_module("sglang.srt.plugins").load_plugins()
    return BackendName(name)


def _own_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("UCCL_EP_")}


@dataclass(frozen=True)
class Decisions:
    """What every process of a launch must agree on.

    Attributes:
        tokens: low-latency tokens of a rank.
        low_latency: low-latency operations will run.
        variables: settings that the launcher's environment gives.
    """

    tokens: int
    low_latency: bool
    variables: dict[str, str] = field(default_factory=_own_settings)


class _Guard:
    """Rides on a ``ServerArgs``."""

    def __init__(self, decisions: Decisions, verify: Callable[[], None]) -> None:
        self.decisions, self.verify = decisions, verify

    def __reduce__(self) -> tuple[Callable[..., _Guard], tuple[Decisions, Callable[[], None]]]:
        return _load_in_worker, (self.decisions, self.verify)


def attach(server_args: Any, decisions: Decisions, verify: Callable[[], None]) -> None:
    """Have ``decisions`` ride on ``server_args``; a worker calls ``verify`` once it has loaded the plugins."""
    setattr(server_args, _GUARD, _Guard(decisions, verify))


def decisions_of(server_args: Any) -> Decisions:
    """What rides on ``server_args``. Raises ConfigError where it was resolved without the plugin."""
    guard: _Guard | None = getattr(server_args, _GUARD, None)
    if guard is None:
        raise ConfigError(
            "--moe-a2a-backend uccl_ep: this configuration was resolved before the plugin was loaded, so nothing of it "
            "was checked. Next step: call sglang.srt.plugins.load_plugins() before resolving it, as `sglang serve` does"
        )
    return guard.decisions


def _load_in_worker(decisions: Decisions, verify: Callable[[], None]) -> _Guard:
    importlib.import_module("sglang.srt.plugins").load_plugins()
    verify()
    # What the worker's own environment says stays: a node may have other NICs than the launcher's.
    for name, value in decisions.variables.items():
        own = os.environ.setdefault(name, value)
        if own != value:
            message = "uccl_ep: %s=%s in this worker and %s where SGLang was launched: the worker's own holds"
            _log.warning(message, name, own, value)
    return _Guard(decisions, verify)
