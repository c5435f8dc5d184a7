"""The names of the backend in vLLM's configuration, and what configuration derives from them."""

from __future__ import annotations

import functools
import logging
import typing
from collections.abc import Callable
from typing import Any, Literal

from uccl_ep_serving.engines import environment
from uccl_ep_serving.engines.devices import check_device
from uccl_ep_serving.engines.versions import VLLM
from uccl_ep_serving.engines.vllm import hooks, layer_hooks
from uccl_ep_serving.engines.vllm.log_records import log_through_vllm
from uccl_ep_serving.engines.vllm.targets import (
    BACKENDS,
    CONFIG_TARGETS,
    CURRENT_CONFIG,
    NAME_TARGETS,
    Target,
    config_twin,
    find,
    verify,
)
from uccl_ep_serving.errors import ConfigError

__all__ = ["accept_names", "activate"]

_log = logging.getLogger("uccl_ep_serving")

# --- the names -------------------------------------------------------------------------------------------------------


def accept_names() -> None:
    """Add the names to the setting, and hook ``ParallelConfig``. Idempotent.

    Raises:
        ConfigError: this version of vLLM keeps the setting elsewhere; nothing has been changed then.
    """
    VLLM.check_version()
    verify(NAME_TARGETS)
    parallel, _, backend = find(NAME_TARGETS[0])
    config = parallel.ParallelConfig
    known = typing.get_args(backend)
    # vLLM's pull request 50556 lets platforms bring backends of their own: any name is taken then, and none is missing
    open_to_any = backend is str or str in known
    if not open_to_any and not (known and all(isinstance(name, str) for name in known)):
        raise VLLM.refusal(f"{NAME_TARGETS[0].path} is no Literal of names any more")
    if hooks.BACKEND_FIELD not in config.__dataclass_fields__:
        raise VLLM.refusal(f"ParallelConfig has no field {hooks.BACKEND_FIELD} any more")
    if not hooks.hooked(NAME_TARGETS[1]):
        config.__post_init__ = _checked(config.__post_init__)
        hooks.verify_hooked(NAME_TARGETS[1:2])
    missing = [] if open_to_any else [name for name in BACKENDS if name not in known]
    if missing:
        try:
            _set_type(parallel, Literal[(*known, *missing)])
        except Exception as error:  # of pydantic; vLLM goes on with another backend, so it gets its own type back
            _set_type(parallel, backend)
            raise VLLM.refusal(f"{NAME_TARGETS[0].path} cannot take more names ({error})") from error
    find(NAME_TARGETS[2])[2]()


def _set_type(parallel: Any, backend: Any) -> None:
    """Make ``backend`` the type of the setting, for the command line and for validation."""
    from pydantic.dataclasses import rebuild_dataclass

    config = parallel.ParallelConfig
    parallel.All2AllBackend = backend
    config.__annotations__[hooks.BACKEND_FIELD] = backend
    config.__dataclass_fields__[hooks.BACKEND_FIELD].type = backend
    rebuild_dataclass(config, force=True)


def _checked(original: Callable[..., Any]) -> Any:
    """``ParallelConfig.__post_init__``, then for our names the hooks below, the checks and the guard."""

    @functools.wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if hooks.asked_for(self):
            activate()
            _check_request(self)
            if self.use_all2all and self.enable_expert_parallel:
                _check_and_compile(self.all2all_backend)
                hooks.say_active()
            else:
                _warn_of_idleness(self.all2all_backend)
            self._uccl_ep_guard = _Guard(environment.launch())
        return result

    return hooks.mark(post_init)


class _Guard:
    """Rides on a pickled ``ParallelConfig``: unpickling it hooks the worker that receives it.

    A worker process gets its configuration before it loads plugins, and a Ray actor may not load them at all, nor have
    the launcher's environment.

    Args:
        record: of the launcher's environment, handed on as it came by a worker that starts workers.
    """

    def __init__(self, record: dict[str, str]) -> None:
        self._record = record

    def __reduce__(self) -> tuple[Callable[[dict[str, str]], _Guard], tuple[dict[str, str]]]:
        return _hook_worker, (self._record,)


def _hook_worker(record: dict[str, str]) -> _Guard:
    log_through_vllm()
    environment.adopt(record)
    accept_names()
    activate()
    return _Guard(record)


def _check_request(parallel_config: Any) -> None:
    """Refuse, before a weight is loaded, what the first dispatch would stumble over."""
    from uccl_ep_serving import Settings

    Settings.from_environment()
    backend = parallel_config.all2all_backend
    if getattr(parallel_config, "enable_fault_tolerance", False):
        # vLLM refuses it as well, in each worker (v1/worker/sentinel/gpu_worker_sentinel.py:26)
        raise ConfigError(
            f"--all2all-backend {backend} with --enable-fault-tolerance: after a lost rank vLLM replays the CUDA "
            "graphs that it has, and they do not know the windows that uccl_ep rebuilds without that rank. Next step: "
            "leave the option out (a lost rank then ends the engine, by name, within a second)"
        )


def _check_and_compile(backend: str) -> None:
    """Refuse a device that does not run the kernels, and compile them while vLLM loads the model."""
    # imported here: whoever does not ask for the backend pays nothing
    from uccl_ep_serving.engines.ahead import compile_ahead

    device = str(find(Target("vllm.platforms", "current_platform", None, ""))[2].device_type)
    check_device(device, f"--all2all-backend {backend}", "uccl-ep demo-vllm")
    compile_ahead(device)


@functools.cache
def _warn_of_idleness(backend: str) -> None:
    """Once for each of the names."""
    _log.warning(
        "--all2all-backend %s: nothing is dispatched, so uccl_ep_serving has no part in this launch: experts need data "
        "parallelism, and --enable-expert-parallel with it. With -tp alone each rank has every token already. Next "
        "step: -dp with more than 1 and --enable-expert-parallel (and a smaller -tp); or leave the option out",
        backend,
    )


# --- what follows from the names -------------------------------------------------------------------------------------


def activate() -> None:
    """Hook what configuration derives from the backend's name, and the choice of communicator. Idempotent.

    Raises:
        ConfigError: the version is refused, a target is missing (nothing has been changed then), or a hook did not
            take.
    """
    log_through_vllm()
    VLLM.check_version()
    verify(CONFIG_TARGETS)
    sequence_parallel, batched_dp, post_init, communicator = CONFIG_TARGETS
    platform = _platform_class(communicator)
    if all(map(hooks.hooked, CONFIG_TARGETS[:3])) and hooks.is_hook(platform.get_device_communicator_cls):
        return
    for target in (sequence_parallel, batched_dp):
        hooks.hook_property(target)
    owner, name, function = find(post_init)
    if not hooks.hooked(post_init):
        setattr(owner, name, _post_init_as_deepep(function))
    _hook_communicator(platform)
    hooks.verify_hooked(CONFIG_TARGETS[:3])


def _post_init_as_deepep(original: Callable[..., Any]) -> Any:
    """``VllmConfig.__post_init__`` compares the name in place, so it sees the built-in one while it runs. What it
    refuses is said of the name that was typed."""

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        parallel = self.parallel_config
        if not hooks.asked_for(parallel):
            return original(self, *args, **kwargs)
        ours = parallel.all2all_backend
        theirs = config_twin(ours)
        layer_hooks.check_experts_are_parallel(
            ours,
            parallel.data_parallel_size if self.model_config is not None and self.model_config.is_moe else 1,
            parallel.enable_expert_parallel,
        )
        _say_twin(ours, theirs)
        parallel.all2all_backend = theirs
        try:
            result = original(self, *args, **kwargs)
        except Exception as error:
            error.args = tuple(one.replace(theirs, ours) if isinstance(one, str) else one for one in error.args)
            raise
        finally:
            if parallel.all2all_backend == theirs:  # else vLLM has chosen another one
                parallel.all2all_backend = ours
        if parallel.use_all2all and parallel.enable_expert_parallel:
            # now that vLLM has settled them; its workers would find out once the weights are loaded
            layer_hooks.check_step_fits(parallel.all2all_backend, self.scheduler_config.max_num_batched_tokens)
        return result

    return hooks.mark(wrapped)


@functools.cache
def _say_twin(ours: str, theirs: str) -> None:
    """Once for each of the names."""
    _log.info("uccl_ep: what vLLM says of %s while it checks its configuration is about %s", theirs, ours)


def _platform_class(communicator: Target) -> type[Any]:
    platform = find(Target("vllm.platforms", "current_platform", None, ""))[2]
    found: type[Any] = type(platform)
    if not hasattr(found, "get_device_communicator_cls"):
        raise VLLM.refusal(f"{communicator.path} is missing from {found.__name__}")
    return found


def _hook_communicator(platform: type[Any]) -> None:
    if hooks.is_hook(platform.get_device_communicator_cls):
        return
    original = platform.get_device_communicator_cls.__func__

    @functools.wraps(original)
    def choose(cls: type[Any]) -> str:
        name: str = original(cls)
        current = find(CURRENT_CONFIG)[2]()
        if current is None or not hooks.asked_for(current.parallel_config):
            return name
        from uccl_ep_serving.engines.vllm import all2all

        layer_hooks.activate()
        return all2all.communicator_of(name)

    setattr(platform, "get_device_communicator_cls", classmethod(hooks.mark(choose)))  # noqa: B010 - mypy knows the method
