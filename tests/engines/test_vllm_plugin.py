"""The vLLM plugin without a server: names, derived settings, verification, and that it changes nothing unasked."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.vllm_settings import parallel_config
from uccl_ep_serving.demo.checkpoint import write_checkpoint
from uccl_ep_serving.demo.vllm_launch import MODELS
from uccl_ep_serving.engines.versions import VLLM
from uccl_ep_serving.engines.vllm import targets

pytestmark = pytest.mark.engine

InEngine = Callable[..., Any]
NAMES = ["uccl_ep", "uccl_ep_high_throughput", "uccl_ep_low_latency"]
QWEN = "qwen3-moe"
MOE = "vllm.model_executor.layers.fused_moe"


# --- everything below that starts with "engine_" runs in the process that has vLLM ------------------------------------


def engine_parse(arguments: list[str], hide: str = "") -> str:
    """The backend that the command line of ``vllm serve`` yields, or what argparse says."""
    import argparse

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if hide:
        import vllm.config.parallel as parallel

        delattr(parallel, hide)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.exit_on_error = False
    try:
        return str(parser.parse_args(["--model", "x", *arguments]).all2all_backend)
    except (argparse.ArgumentError, SystemExit) as error:
        return f"refused: {error}"


def engine_config(backend: str) -> str:
    try:
        return str(parallel_config(all2all_backend=backend).all2all_backend)
    except ValueError as error:
        return f"refused: {error}"


def engine_open_to_any_name(backend: str) -> dict[str, Any]:
    """The backend where vLLM takes any name, as its pull request 50556 has it: ``Literal | str``, without choices."""
    import vllm.config.parallel as parallel
    from pydantic.dataclasses import rebuild_dataclass

    widened = parallel.All2AllBackend | str
    parallel.All2AllBackend = widened
    parallel.ParallelConfig.__annotations__["all2all_backend"] = widened
    parallel.ParallelConfig.__dataclass_fields__["all2all_backend"].type = widened
    rebuild_dataclass(parallel.ParallelConfig, force=True)
    config = parallel_config(all2all_backend=backend, tensor_parallel_size=2, data_parallel_size=2)
    from uccl_ep_serving.engines.vllm.hooks import hooked

    return {
        "backend": config.all2all_backend,
        "type left alone": parallel.All2AllBackend is widened,
        "hooked": all(hooked(target) for target in targets.CONFIG_TARGETS[:3]),
        "as a twin": config.use_sequence_parallel_moe,
    }


def engine_rebuild_fails() -> dict[str, Any]:
    """pydantic does not take the widened type: vLLM must go on as if the plugin were not there."""
    import typing

    import pydantic.dataclasses as dataclasses
    import vllm.config.parallel as parallel

    rebuild, before = dataclasses.rebuild_dataclass, parallel.All2AllBackend

    def refuse(config: Any, **options: Any) -> Any:
        if "uccl_ep" in typing.get_args(parallel.All2AllBackend):
            raise TypeError("no such schema")
        return rebuild(config, **options)

    dataclasses.rebuild_dataclass = refuse
    return {
        "ours": engine_config("uccl_ep"),
        "other": engine_config("allgather_reducescatter"),
        "type": parallel.All2AllBackend is before,
    }


def engine_logged(backend: str, configured: bool = False) -> tuple[list[str], bool]:
    """Lines of ours that vLLM's own handlers and formatter write, and whether the root logger saw one as well."""
    import io
    import logging

    if configured:
        logging.getLogger("uccl_ep_serving").setLevel(logging.ERROR)
    parallel_config(all2all_backend=backend)  # in the launcher: vLLM has not configured its logger yet
    with contextlib.suppress(ImportError):  # 0.30 configures it when it is imported, and has no such module
        from vllm.config.logging import LoggingConfig
        from vllm.logger import configure_logging

        configure_logging(LoggingConfig())
    (handler,) = logging.getLogger("vllm").handlers
    assert isinstance(handler, logging.StreamHandler)
    written = handler.setStream(io.StringIO())
    root = logging.StreamHandler(io.StringIO())
    logging.getLogger().addHandler(root)
    assert written is not None
    parallel_config(all2all_backend=backend)
    logging.getLogger("uccl_ep_serving").info("of uccl_ep itself")
    logging.getLogger("uccl_ep_serving.control_plane.mesh").info("of a child, %d", 7)
    logging.getLogger("vllm").setLevel(logging.WARNING)  # as --log-level does, later
    logging.getLogger("uccl_ep_serving").info("below vLLM's level")
    lines = handler.stream.getvalue().splitlines()
    return [line for line in lines if "uccl_ep" in line or "child" in line], "child" in root.stream.getvalue()


def engine_derived(backend: str) -> list[tuple[bool, bool, bool]]:
    """Derived settings for every pair of small tensor- and data-parallel sizes."""
    found = []
    for tensor, data in itertools.product([1, 2], [1, 2]):
        config = parallel_config(all2all_backend=backend, tensor_parallel_size=tensor, data_parallel_size=data)
        found.append((config.use_sequence_parallel_moe, config.use_batched_dp_moe, config.use_all2all))
    return found


def engine_moe(backend: str, data: int) -> dict[str, bool]:
    """What the layers' parallel configuration says, with every hook in place."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    from uccl_ep_serving.engines.vllm import layer_hooks

    parallel_config(all2all_backend=backend)
    layer_hooks.activate()
    moe = FusedMoEParallelConfig(
        tp_size=1,
        pcp_size=1,
        dp_size=data,
        ep_size=data,
        tp_rank=0,
        pcp_rank=0,
        dp_rank=0,
        ep_rank=0,
        sp_size=1,
        use_ep=True,
        all2all_backend=backend,
        enable_eplb=False,
    )
    properties = [name for name, value in vars(FusedMoEParallelConfig).items() if isinstance(value, property)]
    return {name: bool(getattr(moe, name)) for name in properties}


def engine_vllm_config(backend: str, dbo: bool, model: str) -> dict[str, Any]:
    """What ``VllmConfig`` makes of a backend where the platform would run dual-batch overlap.

    ``graphs`` is the name that the rule about CUDA graphs is given, ``captured`` what the rule, which is vLLM's, makes
    of it for a GPU. Overlap asks for a model, up to 0.31 even a configuration without one.
    """
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, ModelConfig, VllmConfig
    from vllm.platforms import current_platform

    platform = type(current_platform)
    # the CPU platform switches it off, whatever the backend
    platform.check_and_update_config = classmethod(lambda cls, config: None)
    parallel = parallel_config(all2all_backend=backend, data_parallel_size=2, enable_dbo=dbo)
    rule, given = CompilationConfig.set_splitting_ops_for_v1, []

    def spy(self: Any, *args: Any, **kwargs: Any) -> None:
        given.append(kwargs["all2all_backend"])
        rule(self, *args, **kwargs)

    CompilationConfig.set_splitting_ops_for_v1 = spy
    try:
        config = VllmConfig(parallel_config=parallel, model_config=ModelConfig(model=model, dtype="float32"))
    except (AssertionError, ValueError) as error:
        return {"refused": str(error), "after": parallel.all2all_backend}
    of_a_gpu = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    rule(of_a_gpu, all2all_backend=given[0], data_parallel_size=2)
    captured = of_a_gpu.cudagraph_mode.name
    return {"after": config.parallel_config.all2all_backend, "graphs": given, "captured": captured}


def engine_worker(pickled: bytes) -> dict[str, Any]:
    """A worker that gets its configuration before, or without, any plugin."""
    from vllm.config import ParallelConfig

    before = "_uccl_ep_hook" in vars(ParallelConfig.__post_init__)
    received = pickle.loads(pickled)
    from uccl_ep_serving.engines.vllm.hooks import hooked

    return {
        "before": before,
        "backend": received.all2all_backend,
        "hooked": all(hooked(target) for target in targets.CONFIG_TARGETS[:3]),
    }


def engine_pickled(backend: str) -> bytes:
    os.environ.update(UCCL_EP_TIMEOUT="7", UCCL_EP_PROXIES="3")
    return pickle.dumps(parallel_config(all2all_backend=backend))


def engine_of_another_node(pickled: bytes, own: dict[str, str]) -> tuple[bytes, dict[str, Any]]:
    """A worker with an environment of its own, as a Ray actor has: what it starts others with, and its settings."""
    os.environ.update(own)
    received = pickle.loads(pickled)
    from uccl_ep_serving import Settings

    found = Settings.from_environment()
    return pickle.dumps(received), {"timeout": found.timeout, "proxies": found.proxies, "channels": found.channels}


def engine_untouched(backend: str) -> dict[str, Any]:
    """What the plugin has changed where another backend runs."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.platforms import current_platform

    parts = (
        VllmConfig.__post_init__,
        all2all_utils.maybe_make_prepare_finalize,
        all2all_utils.maybe_roundup_layer_hidden_size,
        FusedMoEParallelConfig.use_deepep_ht_kernels,
        FusedMoEParallelConfig.use_deepep_ll_kernels,
        vars(type(current_platform))["get_device_communicator_cls"],
    )
    config = VllmConfig(parallel_config=parallel_config(all2all_backend=backend, data_parallel_size=2))
    with set_current_vllm_config(config):
        communicator = current_platform.get_device_communicator_cls()
    after = (
        VllmConfig.__post_init__,
        all2all_utils.maybe_make_prepare_finalize,
        all2all_utils.maybe_roundup_layer_hidden_size,
        FusedMoEParallelConfig.use_deepep_ht_kernels,
        FusedMoEParallelConfig.use_deepep_ll_kernels,
        vars(type(current_platform))["get_device_communicator_cls"],
    )
    return {
        "same": all(one is other for one, other in zip(parts, after, strict=True)),
        "communicator": communicator,
        "ours_imported": "uccl_ep_serving.buffer" in sys.modules,
    }


def engine_mutilated(stage: str, index: int, how: str) -> tuple[str, list[str]]:
    """Break one target, then ask for the backend; returns the error and the targets that were hooked all the same."""
    import importlib

    from uccl_ep_serving.engines.vllm import hooks, layer_hooks

    group = getattr(targets, stage)
    target = group[index]
    parallel = parallel_config()  # loads the plugins; hooks nothing more with the default backend
    assert parallel.all2all_backend not in targets.BACKENDS
    owner: Any = importlib.import_module(target.module)
    *owners, last = target.name.split(".")
    for name in owners:
        owner = getattr(owner, name)
    if how == "absent":
        delattr(owner, last)
    else:
        setattr(owner, last, lambda self: None)
    try:
        if stage == "CONFIG_TARGETS":
            parallel_config(all2all_backend="uccl_ep")
        else:
            layer_hooks.activate()
    except ValueError as error:  # ConfigError, which pydantic turns into its own
        others = [one for one in group if one is not target and one.name != "Platform.get_device_communicator_cls"]
        return str(error), [one.name for one in others if hooks.hooked(one)]
    return "no error", []


def engine_rebound() -> dict[str, bool]:
    """Whether every module that holds one of the two functions holds the hooked one."""
    from uccl_ep_serving.engines.vllm import layer_hooks

    original = sys.modules[f"{MOE}.oracle.unquantized"].maybe_make_prepare_finalize
    layer_hooks.activate()
    layer_hooks.activate()
    now = sys.modules[f"{MOE}.all2all_utils"].maybe_make_prepare_finalize
    holders = {
        name: vars(module)["maybe_make_prepare_finalize"]
        for name, module in sys.modules.items()
        if name.startswith("vllm.") and "maybe_make_prepare_finalize" in vars(module)
    }
    assert original is not now
    assert now.__wrapped__ is original
    return {name: held is now for name, held in holders.items()}


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_command_line_and_configuration_take_the_name(in_engine: InEngine, name: str) -> None:
    assert in_engine(engine_parse, ["--all2all-backend", name]) == name
    assert in_engine(engine_config, name) == name


@pytest.mark.parametrize("name", ["uccl", "uccl_ep_", "deepep", ""])
def test_other_names_stay_refused(in_engine: InEngine, name: str) -> None:
    assert in_engine(engine_parse, ["--all2all-backend", name]).startswith("refused:")
    assert in_engine(engine_config, name).startswith("refused:")


def test_a_vllm_without_the_setting_goes_on_without_us(in_engine: InEngine) -> None:
    assert in_engine(engine_parse, [], "All2AllBackend") == "allgather_reducescatter"


def test_a_setting_that_cannot_be_widened_is_left_as_it_was(in_engine: InEngine) -> None:
    outcome = in_engine(engine_rebuild_fails)
    assert outcome["ours"].startswith("refused:")
    assert outcome["other"] == "allgather_reducescatter"
    assert outcome["type"]


def test_a_vllm_that_takes_any_name_needs_none_of_ours(in_engine: InEngine) -> None:
    outcome = in_engine(engine_open_to_any_name, "uccl_ep_high_throughput")
    assert outcome == {
        "backend": "uccl_ep_high_throughput",
        "type left alone": True,
        "hooked": True,
        "as a twin": True,
    }


@pytest.mark.parametrize("name", NAMES)
def test_derived_settings_are_those_of_deepep(in_engine: InEngine, name: str) -> None:
    ours = in_engine(engine_derived, name)
    assert ours == in_engine(engine_derived, targets.twin(name))
    assert (True, name == targets.LOW_LATENCY, True) in ours


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data", [1, 2])
def test_layers_treat_the_name_as_deepep(in_engine: InEngine, name: str, data: int) -> None:
    assert in_engine(engine_moe, name, data) == in_engine(engine_moe, targets.twin(name), data)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a checkpoint that vLLM knows."""
    directory = tmp_path_factory.mktemp("plugin") / QWEN
    write_checkpoint(directory, model=MODELS[QWEN].shape)
    return str(directory)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dbo", [False, True])
def test_vllm_config_treats_the_name_as_deepep_and_keeps_it(
    in_engine: InEngine, model: str, name: str, dbo: bool
) -> None:
    ours, twin = in_engine(engine_vllm_config, name, dbo, model), targets.config_twin(name)
    assert ours == {**in_engine(engine_vllm_config, twin, dbo, model), "after": name}
    assert "refused" not in ours
    assert ours["graphs"] == [twin]
    assert ours["captured"] == ("NONE" if name == targets.HIGH_THROUGHPUT else "FULL_AND_PIECEWISE")


def test_dual_batch_overlap_is_still_refused_for_others(in_engine: InEngine, model: str) -> None:
    assert "Microbatching" in in_engine(engine_vllm_config, "allgather_reducescatter", True, model)["refused"]


def test_configuration_hooks_the_worker_that_receives_it(in_engine: InEngine) -> None:
    outcome = in_engine(engine_worker, in_engine(engine_pickled, "uccl_ep_low_latency"))
    assert outcome == {"before": False, "backend": "uccl_ep_low_latency", "hooked": True}


def test_configuration_carries_the_launchers_settings(in_engine: InEngine) -> None:
    """To the worker that gets it, unless that has its own, and as they were to those that this one starts."""
    own = {"UCCL_EP_PROXIES": "2", "UCCL_EP_CHANNELS": "4"}
    handed_on, settings = in_engine(engine_of_another_node, in_engine(engine_pickled, "uccl_ep"), own)
    assert settings == {"timeout": 7.0, "proxies": 2, "channels": 4}
    _, settings = in_engine(engine_of_another_node, handed_on, {"UCCL_EP_CHANNELS": "5"})
    assert settings == {"timeout": 7.0, "proxies": 3, "channels": 5}


@pytest.mark.parametrize("name", ["allgather_reducescatter", "deepep_low_latency", "nixl_ep"])
def test_nothing_changes_under_another_backend(in_engine: InEngine, name: str) -> None:
    outcome = in_engine(engine_untouched, name)
    assert outcome["same"]
    assert outcome["communicator"].startswith("vllm.")
    assert not outcome["ours_imported"]


@pytest.mark.parametrize(
    ("stage", "index", "how"),
    [
        ("CONFIG_TARGETS", 0, "absent"),
        ("CONFIG_TARGETS", 1, "absent"),
        ("CONFIG_TARGETS", 1, "a function"),
        ("LAYER_TARGETS", 0, "absent"),
        ("LAYER_TARGETS", 2, "absent"),
        ("LAYER_TARGETS", 2, "other parameters"),
        ("LAYER_TARGETS", 3, "other parameters"),
        ("LAYER_TARGETS", 4, "absent"),
        ("LAYER_TARGETS", 6, "absent"),
        ("LAYER_TARGETS", 7, "other parameters"),
    ],
)
def test_a_moved_target_is_named_with_the_version(in_engine: InEngine, stage: str, index: int, how: str) -> None:
    message, hooked = in_engine(engine_mutilated, stage, index, how)
    assert getattr(targets, stage)[index].path in message
    assert f"vLLM {VLLM.installed()}" in message
    assert "--all2all-backend" in message
    if how != "a function":
        assert hooked == []


def test_every_copy_of_the_factory_is_ours(in_engine: InEngine) -> None:
    holders = in_engine(engine_rebound)
    assert {f"{MOE}.all2all_utils", f"{MOE}.oracle.unquantized"} <= set(holders)
    assert all(holders.values()), holders


def test_our_records_go_through_vllms_logger(in_engine: InEngine) -> None:
    """vLLM configures only the logger ``vllm``; INFO of any other would be dropped."""
    (own, child), twice = in_engine(engine_logged, "uccl_ep")
    assert "INFO" in own
    assert own.endswith("of uccl_ep itself")
    assert child.endswith("of a child, 7")
    assert not twice


def test_a_logger_of_ours_that_somebody_has_configured_stays_so(in_engine: InEngine) -> None:
    assert in_engine(engine_logged, "uccl_ep", True) == ([], False)


def test_logging_is_not_touched_unasked(in_engine: InEngine) -> None:
    assert in_engine(engine_logged, "naive") == ([], False)


def test_targets_are_unique() -> None:
    every = (*targets.NAME_TARGETS, *targets.CONFIG_TARGETS, *targets.LAYER_TARGETS, *targets.USED)
    assert len({target.path for target in every}) == len(every)
    assert all(dataclasses.is_dataclass(target) for target in every)
