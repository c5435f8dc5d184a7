"""The names of the backend in vLLM's configuration, and what configuration derives from them."""

from __future__ import annotations

import functools
import logging
import typing
from collections.abc import Callable
from typing import Any, Literal

from uccl_ep_serving.engines.devices import check_device
from uccl_ep_serving.engines.versions import Standing
from uccl_ep_serving.engines.vllm.log_records import log_through_vllm
from uccl_ep_serving.engines.vllm.targets import (
    BACKENDS,
    CONFIG_TARGETS,
    NAME_TARGETS,
    Target,
    check_version,
    find,
    refusal,
    twin,
    verify,
    vllm_version,
)

__all__ = ["SeenAsDeepEp", "accept_names", "activate", "asked_for", "hooked", "mark"]

_log = logging.getLogger("uccl_ep_serving")
_MARK = "_uccl_ep_hook"
_FIELD = "all2all_backend"
_GUARD = "_uccl_ep_guard"


def mark(hook: Any) -> Any:
    """Mark a function as one of the plugin's hooks, for :func:`hooked`."""
    setattr(hook, _MARK, True)
    return hook


def hooked(target: Target) -> bool:
    """Whether the plugin's hook is what vLLM finds at ``target`` now."""
    _, _, value = find(target)
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    return getattr(value, _MARK, False) is True


def asked_for(parallel_config: Any) -> bool:
    """Whether a ``ParallelConfig`` (or ``FusedMoEParallelConfig``) names one of our backends."""
    return getattr(parallel_config, _FIELD, None) in BACKENDS


class SeenAsDeepEp:
    """A configuration record read through this shows the built-in backend's name in the place of ours.

    vLLM's properties compare the name with those of the built-in backends; evaluated on this view they give what they
    give for DeepEP, whatever else a later version adds to the condition.
    """

    __slots__ = ("_record",)

    def __init__(self, record: Any) -> None:
        self._record = record

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._record, name)
        return twin(value) if name == _FIELD else value


# --- the names -------------------------------------------------------------------------------------------------------


def accept_names() -> None:
    """Add the names to the setting, and hook ``ParallelConfig``. Idempotent.

    Raises:
        ConfigError: this version of vLLM keeps the setting elsewhere; nothing has been changed then.
    """
    check_version()
    verify(NAME_TARGETS)
    parallel, _, backend = find(NAME_TARGETS[0])
    config = parallel.ParallelConfig
    known = typing.get_args(backend)
    # vLLM's pull request 50556 lets platforms bring backends of their own: any name is taken then, and none is missing
    open_to_any = backend is str or str in known
    if not open_to_any and not (known and all(isinstance(name, str) for name in known)):
        raise refusal(f"{NAME_TARGETS[0].path} is no Literal of names any more")
    if _FIELD not in config.__dataclass_fields__:
        raise refusal(f"ParallelConfig has no field {_FIELD} any more")
    if not hooked(NAME_TARGETS[1]):
        config.__post_init__ = _after(config.__post_init__, _after_parallel_config)
        if not hooked(NAME_TARGETS[1]):
            raise refusal(f"the hook on {NAME_TARGETS[1].path} did not take")
    missing = [] if open_to_any else [name for name in BACKENDS if name not in known]
    if missing:
        try:
            _set_type(parallel, Literal[(*known, *missing)])
        except Exception as error:  # of pydantic; vLLM goes on with another backend, so it gets its own type back
            _set_type(parallel, backend)
            raise refusal(f"{NAME_TARGETS[0].path} cannot take more names ({error})") from error
    find(NAME_TARGETS[2])[2]()


def _set_type(parallel: Any, backend: Any) -> None:
    """Make ``backend`` the type of the setting, for the command line and for validation."""
    from pydantic.dataclasses import rebuild_dataclass

    config = parallel.ParallelConfig
    parallel.All2AllBackend = backend
    config.__annotations__[_FIELD] = backend
    config.__dataclass_fields__[_FIELD].type = backend
    rebuild_dataclass(config, force=True)


def _after(function: Callable[..., Any], hook: Callable[[Any], None]) -> Any:
    """``function`` with ``hook(self)`` called after it."""

    @functools.wraps(function)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)
        hook(self)
        return result

    return mark(wrapped)


def _after_parallel_config(parallel_config: Any) -> None:
    if not asked_for(parallel_config):
        return
    activate()
    _check_request(parallel_config)
    setattr(parallel_config, _GUARD, _Guard())


class _Guard:
    """Rides on a pickled ``ParallelConfig``: unpickling it hooks the worker that receives it.

    A worker process gets its configuration before it loads plugins, and a Ray actor may not load them at all.
    """

    def __reduce__(self) -> tuple[Callable[[], _Guard], tuple[()]]:
        return _hook_worker, ()


def _hook_worker() -> _Guard:
    accept_names()
    activate()
    return _Guard()


def _check_request(parallel_config: Any) -> None:
    """Refuse, before a weight is loaded, what the first dispatch would stumble over."""
    from uccl_ep_serving import Settings

    Settings.from_environment()
    device = find(Target("vllm.platforms", "current_platform", None, ""))[2].device_type
    check_device(device, f"--all2all-backend {parallel_config.all2all_backend}", "uccl-ep demo-vllm")


# --- what follows from the names -------------------------------------------------------------------------------------


def activate() -> None:
    """Hook what configuration derives from the backend's name, and the choice of communicator. Idempotent.

    Raises:
        ConfigError: the version is refused, a target is missing (nothing has been changed then), or a hook did not
            take.
    """
    log_through_vllm()
    standing, reason = check_version()
    verify(CONFIG_TARGETS)
    sequence_parallel, batched_dp, post_init, communicator = CONFIG_TARGETS
    platform = _platform_class(communicator)
    already = all(map(hooked, CONFIG_TARGETS[:3])) and getattr(platform.get_device_communicator_cls, _MARK, False)
    if already:
        return
    for target in (sequence_parallel, batched_dp):
        hook_property(target)
    owner, name, function = find(post_init)
    if not hooked(post_init):
        setattr(owner, name, _post_init_as_deepep(function))
    _hook_communicator(platform)
    for target in CONFIG_TARGETS[:3]:
        if not hooked(target):
            raise refusal(f"the hook on {target.path} did not take")
    _log.info("uccl_ep: vLLM %s (%s) runs its expert parallelism on uccl_ep_serving", vllm_version(), standing)
    if standing is not Standing.SUPPORTED:
        _log.warning("uccl_ep: no test has served with vLLM %s: %s; all hooks were found", vllm_version(), reason)


def hook_property(target: Target) -> None:
    """Evaluate a property on the DeepEP view of records that name one of our backends. Idempotent."""
    owner, name, value = find(target)
    if not isinstance(value, property) or value.fget is None:
        raise refusal(f"{target.path} is no property any more")
    if hooked(target):
        return
    original = value.fget

    @functools.wraps(original)
    def evaluate(self: Any) -> Any:
        return original(SeenAsDeepEp(self) if asked_for(self) else self)

    setattr(owner, name, property(mark(evaluate), doc=value.__doc__))


def _post_init_as_deepep(original: Callable[..., Any]) -> Any:
    """``VllmConfig.__post_init__`` compares the name in place, so it sees the built-in one while it runs."""

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        parallel = self.parallel_config
        if not asked_for(parallel):
            return original(self, *args, **kwargs)
        ours = parallel.all2all_backend
        parallel.all2all_backend = twin(ours)
        try:
            return original(self, *args, **kwargs)
        finally:
            if parallel.all2all_backend == twin(ours):  # else vLLM has chosen another one
                parallel.all2all_backend = ours

    return mark(wrapped)


def _platform_class(communicator: Target) -> type[Any]:
    platform = find(Target("vllm.platforms", "current_platform", None, ""))[2]
    found: type[Any] = type(platform)
    if not hasattr(found, "get_device_communicator_cls"):
        raise refusal(f"{communicator.path} is missing from {found.__name__}")
    return found


def _hook_communicator(platform: type[Any]) -> None:
    if getattr(platform.get_device_communicator_cls, _MARK, False):
        return
    original = platform.get_device_communicator_cls.__func__

    @functools.wraps(original)
    def choose(cls: type[Any]) -> str:
        name: str = original(cls)
        current = find(Target("vllm.config", "get_current_vllm_config_or_none", (), ""))[2]()
        if current is None or not asked_for(current.parallel_config):
            return name
        from uccl_ep_serving.engines.vllm import all2all, layer_hooks

        layer_hooks.activate()
        return all2all.communicator_of(name)

    setattr(platform, "get_device_communicator_cls", classmethod(mark(choose)))  # noqa: B010 - mypy knows the method
