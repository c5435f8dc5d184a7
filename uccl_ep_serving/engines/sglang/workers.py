"""What the launcher has decided, carried to the engine's other processes inside the pickled configuration.

SGLang's schedulers load plugins before they unpickle it and inherit the environment. Ray's actors do neither: the
engine would run the real ``deep_ep`` there under the resolved name without a word, and our settings would be lost.
Unpickling the guard hands over the settings of the launcher (:mod:`..environment`) and loads the plugins. A
configuration that a tool (``uccl-ep run``) hands to a process before it is resolved carries no guard yet; there the
backend's name itself loads them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uccl_ep_serving.engines import environment
from uccl_ep_serving.errors import ConfigError

__all__ = ["BackendName", "Decisions", "attach", "decisions_of", "host", "refuse"]

_GUARD = "_uccl_ep_guard"
#: Why a ``ServerArgs`` was refused.
_REFUSAL = "_uccl_ep_refusal"


class BackendName(str):
    """The backend's name as the command line gave it: unpickling it loads SGLang's plugins."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[[str], BackendName], tuple[str]]:
        return _load_name, (str(self),)


def _load_name(name: str) -> BackendName:
    importlib.import_module("sglang.srt.plugins").load_plugins()
    return BackendName(name)


def host() -> str:
    """Which machine this is; the same in all its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class Decisions:
    """What every process of a launch must agree on.

    Attributes:
        tokens: low-latency tokens of a rank.
        low_latency: low-latency operations will run.
        variables: the record of :func:`.environment.launch`.
        host: the launcher's, of :func:`host`.
        requests: most running requests of a data-parallel rank; None where nothing of ours bounds them.
    """

    tokens: int
    low_latency: bool
    variables: dict[str, str] = field(default_factory=environment.launch)
    host: str = field(default_factory=host)
    requests: int | None = None


class _Guard:
    """Rides on a ``ServerArgs``."""

    def __init__(self, decisions: Decisions, verify: Callable[[], None]) -> None:
        self.decisions, self.verify = decisions, verify

    def __reduce__(self) -> tuple[Callable[..., _Guard], tuple[Decisions, Callable[[], None]]]:
        return _load_in_worker, (self.decisions, self.verify)


def attach(server_args: Any, decisions: Decisions, verify: Callable[[], None]) -> None:
    """Have ``decisions`` ride on ``server_args``; a worker calls ``verify`` once it has loaded the plugins."""
    setattr(server_args, _GUARD, _Guard(decisions, verify))


def refuse(server_args: Any, error: Exception) -> None:
    """Keep why ``server_args`` cannot run: for SGLang it is resolved, and the same error is due at the next try."""
    setattr(server_args, _REFUSAL, str(error))


def decisions_of(server_args: Any) -> Decisions | None:
    """What rides on ``server_args``; None before anything was decided. Raises ConfigError where it was refused."""
    if refusal := getattr(server_args, _REFUSAL, ""):
        raise ConfigError(f"{refusal} (this ServerArgs was refused before: correct the arguments in a new one)")
    guard: _Guard | None = getattr(server_args, _GUARD, None)
    return guard.decisions if guard else None


def _load_in_worker(decisions: Decisions, verify: Callable[[], None]) -> _Guard:
    environment.adopt(decisions.variables)
    importlib.import_module("sglang.srt.plugins").load_plugins()
    verify()
    return _Guard(decisions, verify)
