"""The SGLang plugin without a server: choices, resolution, verification, and that it changes nothing unasked."""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import CellType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.engines import ray_stand_in
from uccl_ep_serving.data_plane.turn import Turn
from uccl_ep_serving.engines.sglang import buffer as our_buffer
from uccl_ep_serving.engines.sglang import hooks
from uccl_ep_serving.engines.versions import SGLANG, VLLM, Engine, Standing
from uccl_ep_serving.errors import ConfigError

pytestmark = pytest.mark.engine

InEngine = Callable[..., Any]
DEEPEP = "sglang.srt.layers.moe.token_dispatcher.deepep"


# --- everything below that starts with "engine_" runs in the process that has SGLang ----------------------------------


def engine_parse(arguments: list[str]) -> str:
    """Parse a command line as the launcher does; returns the raw backend, or what argparse complained about."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    try:
        parsed = parser.parse_args(["--model-path", "dummy", *arguments])
    except argparse.ArgumentError as error:
        return f"refused: {error}"
    return f"{parsed.moe_a2a_backend} {parsed.speculative_moe_a2a_backend}"


def engine_parse_without_hook(arguments: list[str]) -> str:
    """The same where SGLang lost our hook on ``resolve_once`` (it only logs that)."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    setattr(ServerArgs, "resolve_once", lambda self: None)  # noqa: B010 - mypy knows the method
    return engine_parse(arguments)


def engine_help() -> str:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.format_help()


def resolved(model: str, **fields: Any) -> Any:
    """A resolved ``ServerArgs`` (plugins loaded)."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    server_args = ServerArgs(model_path=model, device="cpu", attention_backend="torch_native", tp_size=2, **fields)
    server_args.resolve_once()
    return server_args


def engine_resolve(model: str, fields: dict[str, Any]) -> dict[str, Any]:
    """What configuration says and what the dispatcher's module holds, after resolving."""
    import sglang.srt.layers.moe.token_dispatcher.deepep as deepep

    before = (getattr(deepep, "Buffer", None), deepep._DeepEPDispatcherImplLowLatency._dispatch_core)
    server_args = resolved(model, **fields)
    after = (getattr(deepep, "Buffer", None), deepep._DeepEPDispatcherImplLowLatency._dispatch_core)
    values = server_args.resolved_dict()
    return {
        "raw": server_args.moe_a2a_backend,
        "target": values["moe_a2a_backend"],
        "draft": values["speculative_moe_a2a_backend"],
        "ep_size": values["ep_size"],
        "buffer": getattr(after[0], "__name__", None),
        "untouched": before == after,
        "ours_imported": "uccl_ep_serving.buffer" in sys.modules,
    }


def engine_untouched_under(model: str, backend: str) -> bool:
    """Whether a stand-in for the engine's own ``deep_ep`` survives resolving ``backend``."""
    import sglang.srt.layers.moe.token_dispatcher.deepep as deepep

    own = deepep.Buffer = type("Buffer", (), {})
    core = deepep._DeepEPDispatcherImplLowLatency._dispatch_core
    resolved(model, moe_a2a_backend=backend)
    return (
        deepep.Buffer is own
        and deepep._DeepEPDispatcherImplLowLatency._dispatch_core is core
        and "uccl_ep_serving.buffer" not in sys.modules
    )


def engine_resolve_mutilated(model: str, module: str, name: str, how: str) -> str:
    """Break one target of the plugin, then ask for uccl_ep; returns the error, and whether anything was changed."""
    import importlib

    from sglang.srt.plugins import load_plugins

    deepep = importlib.import_module(DEEPEP)
    core = deepep._DeepEPDispatcherImplLowLatency._dispatch_core
    broken: Any = importlib.import_module(module)
    if how == "unhooked":
        load_plugins()
    *owners, last = name.split(".")
    for owner in owners:
        broken = getattr(broken, owner)
    if how == "absent":
        delattr(broken, last)
    elif how == "other arguments":
        setattr(broken, last, lambda self, hidden_states, topk: None)
    elif how == "unhooked":
        setattr(broken, last, getattr(broken, last).__wrapped__)
    try:
        resolved(model, moe_a2a_backend="uccl_ep")
    except ConfigError as error:
        implementation = getattr(deepep, "_DeepEPDispatcherImplLowLatency", None)
        changed = hasattr(deepep, "Buffer") or getattr(implementation, "_dispatch_core", core).__module__ != DEEPEP
        return f"{error}{' CHANGED' if changed and how == 'absent' else ''}"
    return "no error"


def engine_resolve_displaced(model: str, name: str) -> str:
    """Another plugin hooks a target of ours and has the registry apply it before ours is loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def somebody_elses(*_args: object, **_kwargs: object) -> None: ...

    HookRegistry.register(f"sglang.srt.server_args.ServerArgs.{name}", somebody_elses, HookType.BEFORE)
    HookRegistry.apply_hooks()
    return engine_resolve_mutilated(model, "sglang.srt.server_args", "ServerArgs", "whole")


def engine_resolve_newer(model: str, directory: str, call: str, newer: str, module: str = DEEPEP) -> str:
    """SGLang whose dispatcher calls our Buffer in another way, or whose ``module`` has other words."""
    import importlib

    changed = importlib.import_module(module)
    assert changed.__file__ is not None
    source = Path(changed.__file__).read_text()
    assert call in source
    file = Path(directory) / "deepep.py"
    file.write_text(source.replace(call, newer))
    changed.__file__ = str(file)
    return engine_resolve_mutilated(model, "sglang.srt.server_args", "ServerArgs", "whole")


def engine_version(model: str, version: str) -> str:
    Engine.installed = lambda self: version  # type: ignore[method-assign]
    try:
        resolved(model, moe_a2a_backend="uccl_ep")
    except ConfigError as error:
        return str(error)
    return "accepted"


def engine_pickle(model: str) -> bytes:
    return pickle.dumps(resolved(model, moe_a2a_backend="uccl_ep"))


def engine_unpickle(record: bytes) -> tuple[bool, bool]:
    """As a Ray actor: plugins are never loaded by the engine. Returns whether ours were, and what publishing does."""
    import sglang.srt.layers.moe.token_dispatcher.deepep as deepep
    from sglang.srt import plugins

    loaded_before = plugins._plugins_loaded
    server_args = pickle.loads(record)
    server_args.resolve_once()  # the first thing that publish() does
    return plugins._plugins_loaded and not loaded_before, deepep.Buffer is our_buffer.buffer_class()


def engine_dispatch_core(model: str) -> dict[str, Any]:
    """Run the engine's own low-latency ``_dispatch_core`` on a recording Buffer; returns what the Buffer was given."""
    import torch

    import uccl_ep_serving

    given: dict[str, Any] = {}

    class Recorder:
        def low_latency_dispatch(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
            given.update(kwargs, positional=len(args))
            return args[0], torch.zeros(4), SimpleNamespace(), None, None

    uccl_ep_serving.Buffer = Recorder
    resolved(model, moe_a2a_backend="uccl_ep")
    import sglang.srt.layers.moe.token_dispatcher.deepep as deepep

    implementation = deepep._DeepEPDispatcherImplLowLatency
    buffer = deepep.Buffer()
    dispatcher = SimpleNamespace(
        quant_config={},
        use_fp8=False,
        use_nvfp4=False,
        return_recv_hook=True,
        num_max_dispatch_tokens_per_rank=128,
        num_experts=8,
        _get_buffer=lambda: buffer,
        _get_npu_mxfp_quantization_kwargs=lambda _buffer: {},
    )
    weights = torch.rand(3, 2)
    implementation._dispatch_core(dispatcher, torch.zeros(3, 128), torch.zeros(3, 2, dtype=torch.int64), weights)
    given["same"] = given.pop("topk_weights") is weights
    given["forgotten"] = our_buffer.router_weights.get() is None
    return given


def engine_replay(model: str) -> list[str]:
    """Do what the engine does before it replays a captured graph, while all is well, after a peer was lost, and once
    the Buffer is closed; returns what was raised each time."""
    from sglang.srt.layers.moe.utils import DeepEPMode
    from sglang.srt.model_executor.runner_utils.deepep_adapter import DeepEPCudaGraphRunnerAdapter

    from uccl_ep_serving.errors import PeerLost

    resolved(model, moe_a2a_backend="uccl_ep")
    own = our_buffer.buffer_class()
    buffer: Any = object.__new__(own)
    own.alive.add(buffer)
    adapter: Any = DeepEPCudaGraphRunnerAdapter()
    adapter._captured_deepep_mode = DeepEPMode.LOW_LATENCY
    adapter.replay.__globals__["get_moe_a2a_backend"] = lambda: SimpleNamespace(is_deepep=lambda: True)

    def lost(phase: str) -> None:
        raise PeerLost(f"{phase}: rank 1 is lost", peer=1)

    raised = []
    for runtime in (
        SimpleNamespace(closed=False, stale=False, interrupted="", check=lambda phase: None, turn=Turn()),
        SimpleNamespace(closed=False, check=lost, turn=Turn()),
        SimpleNamespace(closed=True, check=lost, turn=Turn()),
    ):
        buffer.runtime, buffer._backend = runtime, None
        try:
            adapter.replay()
            raised.append("")
        except PeerLost as error:
            raised.append(str(error))
    return raised


def engine_results(model: str) -> list[tuple[str, list[str]]]:
    """Have a scheduler tell what steps have given: with nothing known, with a peer that is lost while the device is at
    the step, and with the Buffer closed. Returns of each what was raised, and what was done in which order."""
    from sglang.srt.managers.scheduler import Scheduler

    from uccl_ep_serving.errors import PeerLost

    done: list[str] = []
    Scheduler.process_batch_result = lambda self, batch, result: done.append(f"told {batch}")
    resolved(model, moe_a2a_backend="uccl_ep")
    own = our_buffer.buffer_class()
    buffer: Any = object.__new__(own)
    own.alive.add(buffer)
    scheduler: Any = object.__new__(Scheduler)

    def lost(phase: str) -> None:
        if "waited" in done:
            raise PeerLost(f"{phase}: rank 1 is lost", peer=1)

    seen = []
    result = SimpleNamespace(copy_done=SimpleNamespace(synchronize=lambda: done.append("waited")))
    for number, runtime in enumerate(
        (
            SimpleNamespace(closed=False, stale=False, interrupted="", check=lambda phase: None, turn=Turn()),
            SimpleNamespace(closed=False, check=lost, turn=Turn()),
            SimpleNamespace(closed=True, check=lost, turn=Turn()),
        )
    ):
        buffer.runtime, buffer._backend = runtime, None
        done.clear()
        try:
            scheduler.process_batch_result(number, result)
            raised = ""
        except PeerLost as error:
            raised = str(error)
        seen.append((raised, list(done)))
    # what is not copied beside a step, as without overlap
    scheduler.process_batch_result(3, SimpleNamespace(copy_done=None))
    scheduler.process_batch_result(4, SimpleNamespace())
    return [*seen, ("", done[-2:])]


def engine_draft(model: str, target: str) -> dict[str, Any]:
    """Publish as a scheduler does, then let the engine make the draft model's dispatcher; returns what it runs on."""
    import torch
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank

    import uccl_ep_serving
    from uccl_ep_serving.demo import sglang_cpu

    sglang_cpu.register()  # the engine would ask CUDA for its SMs before it makes the buffer

    class Recorder:
        made: ClassVar[list[Any]] = []
        num_sms = 20

        def __init__(self, group: Any, *_arguments: Any, **_keywords: Any) -> None:
            self.made.append(group)

        @staticmethod
        def get_dispatch_config(_group_size: int) -> Any:
            return uccl_ep_serving.Config()

        get_combine_config = get_dispatch_config

        @staticmethod
        def get_low_latency_rdma_size_hint(*_shape: int) -> int:
            return 1

    uccl_ep_serving.Buffer = Recorder
    server_args = resolved(
        model,
        moe_a2a_backend=target,
        ep_size=2,
        speculative_moe_a2a_backend="uccl_ep",
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=model,
    )
    ranks = SpawnRanks(world_rank=spawn_world_rank(server_args, tp_rank=0, pp_rank=0), dp_rank=0, gpu_id=0)
    publish(server_args, role="scheduler", ranks=ranks)
    utils.initialize_moe_config()
    group = SimpleNamespace(size=lambda: 2)
    layer._get_deepep_comm_group = lambda _backend: group
    config = SimpleNamespace(
        runner_backend=None,
        top_k=2,
        num_experts=8,
        num_local_experts=4,
        hidden_size=128,
        params_dtype=torch.float32,
    )
    outside = utils.get_moe_a2a_backend().value
    with utils.speculative_moe_a2a_backend_context():
        inside = utils.get_moe_a2a_backend().value
        dispatcher = layer.create_moe_dispatcher(config, None)
        (inner,) = dispatcher._inners
        buffer = inner._low_latency_dispatcher._get_buffer()
    return {
        "target": outside,
        "draft": inside,
        "ours": type(buffer) is our_buffer.buffer_class() and deepep.Buffer is our_buffer.buffer_class(),
        "group": Recorder.made == [group],
    }


def engine_ray_launcher(model: str) -> bytes:
    """SGLang's ``RayEngine`` creates the actor of rank 0 from a configuration that asks for us."""
    sent = ray_stand_in.install()
    from sglang.srt.ray.engine import _create_scheduler_actor

    _create_scheduler_actor(
        pg=SimpleNamespace(id=b"group"),
        bundle_idx=0,
        gpu_id=0,
        server_args=resolved(model, moe_a2a_backend="uccl_ep"),
        port_args=None,
        tp_rank=0,
        pp_rank=0,
        dp_rank=0,
        dist_init_addr="127.0.0.1:1",
        rank0_node_ip="127.0.0.1",
    )
    (created,) = sent
    return created


def engine_ray_actor(created: bytes) -> dict[str, Any]:
    """SGLang's own ``SchedulerActor``, up to where it builds its scheduler, in a process that loads no plugins."""
    ray_stand_in.install()
    from sglang.srt import plugins
    from sglang.srt.managers import scheduler

    seen: dict[str, Any] = {"loaded before": plugins._plugins_loaded}

    def build(self: Any, *, server_args: Any, port_args: Any) -> None:
        from sglang.srt.runtime_context import get_server_args

        deepep = sys.modules[DEEPEP]
        seen["ours"] = deepep.Buffer is our_buffer.buffer_class()
        seen["backend"] = get_server_args().resolved_dict()["moe_a2a_backend"]

    scheduler.Scheduler.__init__ = build
    ray_stand_in.create(created, lambda: seen.update({"loaded with the arguments": plugins._plugins_loaded}))
    return seen


# --- tests ------------------------------------------------------------------------------------------------------------


def test_help_shows_the_backend_for_target_and_draft(in_engine: InEngine) -> None:
    text = "".join(in_engine(engine_help).split())
    for option in ("--moe-a2a-backend{", "--speculative-moe-a2a-backend{"):
        choices = text.split(option)[1].split("}")[0].split(",")
        assert {"none", "deepep", "uccl_ep"} <= set(choices)


def test_command_line_takes_the_backend(in_engine: InEngine) -> None:
    arguments = ["--moe-a2a-backend", "uccl_ep", "--speculative-moe-a2a-backend", "uccl_ep"]
    assert in_engine(engine_parse, arguments) == "uccl_ep uccl_ep"


def test_bogus_backend_is_still_refused(in_engine: InEngine) -> None:
    answer = in_engine(engine_parse, ["--moe-a2a-backend", "uccl_epp"])
    assert answer.startswith("refused:")
    assert "invalid choice: 'uccl_epp'" in answer


def test_resolves_to_deepep_on_our_buffer(in_engine: InEngine, model: str) -> None:
    seen = in_engine(engine_resolve, model, {"moe_a2a_backend": "uccl_ep"})
    assert seen["raw"] == "uccl_ep"
    assert seen["target"] == "deepep"
    assert seen["ep_size"] == 2  # the engine's own rule for deepep
    assert seen["buffer"] == "SGLangBuffer"
    assert not seen["untouched"]


def test_draft_backend_is_resolved_too(in_engine: InEngine, model: str) -> None:
    fields = {"moe_a2a_backend": "uccl_ep", "speculative_moe_a2a_backend": "uccl_ep"}
    assert in_engine(engine_resolve, model, fields)["draft"] == "deepep"


@pytest.mark.parametrize("fields", [("uccl_ep", "deepep"), ("deepep", "uccl_ep")], ids=["draft", "target"])
def test_mixing_with_the_real_deep_ep_is_refused(in_engine: InEngine, model: str, fields: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="one DeepEP buffer"):
        in_engine(engine_resolve, model, dict(zip(hooks.FIELDS, fields, strict=True)))


def test_a_draft_whose_experts_are_not_shared_by_all_ranks_is_refused(in_engine: InEngine, model: str) -> None:
    """SGLang makes ``--ep-size`` that of all ranks for the target's backend alone."""
    fields = {
        "speculative_moe_a2a_backend": "uccl_ep",
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": model,
    }
    with pytest.raises(
        ConfigError, match=r"with --ep-size 1: .* 2 ranks.*Next step: --ep-size 2, or --moe-a2a-backend"
    ):
        in_engine(engine_resolve, model, fields)
    seen = in_engine(engine_resolve, model, {**fields, "ep_size": 2})
    assert (seen["target"], seen["draft"], seen["ep_size"]) == ("none", "deepep", 2)


def test_what_is_wrong_is_raised_before_a_graph_is_replayed(in_engine: InEngine, model: str) -> None:
    """A graph calls nothing of ours: after a lost peer it would go on with zeros, and nobody would know."""
    assert in_engine(engine_replay, model) == ["", "replayed operations: rank 1 is lost", ""]


def test_no_step_in_which_something_failed_gives_tokens(in_engine: InEngine, model: str) -> None:
    """The device is at it when it has been launched, and the next step is as well: it is asked again once the tokens
    are on the host."""
    assert in_engine(engine_results, model) == [
        ("", ["waited", "told 0"]),
        ("replayed operations: rank 1 is lost", ["waited"]),
        ("", ["waited", "told 2"]),
        ("", ["told 3", "told 4"]),
    ]


@pytest.mark.parametrize("backend", ["none", "deepep"])
def test_other_backends_are_left_alone(in_engine: InEngine, model: str, backend: str) -> None:
    assert in_engine(engine_untouched_under, model, backend)


@pytest.mark.parametrize(
    ("module", "name", "how"),
    [
        (DEEPEP, "_DeepEPDispatcherImplLowLatency._dispatch_core", "absent"),
        (DEEPEP, "_DeepEPDispatcherImplLowLatency._dispatch_core", "other arguments"),
        (DEEPEP, "_DeepEPDispatcherImplLowLatency._combine_core", "other arguments"),
        (DEEPEP, "_DeepEPDispatcherImplNormal.dispatch_a", "other arguments"),
        (DEEPEP, "_DeepEPDispatcherImplBase", "absent"),
        ("sglang.srt.mem_cache.kv_cache_configurator", "KVCacheConfigurator.resolve_max_num_reqs", "absent"),
        ("sglang.srt.model_executor.model_runner", "ModelRunner.init_cuda_graphs", "absent"),
        ("sglang.srt.managers.scheduler", "Scheduler.process_batch_result", "absent"),
        (DEEPEP, "DeepEPBuffer.get_deepep_buffer", "absent"),
        (DEEPEP, "DeepEPBuffer.set_dispatch_mode", "absent"),
        (DEEPEP, "DeepEPConfig.get_instance", "absent"),
        ("sglang.srt.arg_groups.overrides", "declare_resolution", "absent"),
        (
            "sglang.srt.batch_overlap.single_batch_overlap",
            "SboFlags.enable_combine_down_gemm_two_stream_overlap",
            "absent",
        ),
        ("sglang.srt.server_args", "ServerArgs.add_cli_args", "unhooked"),
    ],
)
def test_missing_target_is_named(in_engine: InEngine, model: str, module: str, name: str, how: str) -> None:
    message = in_engine(engine_resolve_mutilated, model, module, name, how)
    assert f"{module}.{name}" in message
    assert "SGLang 0.5." in message
    assert "CHANGED" not in message


@pytest.mark.parametrize("name", ["add_cli_args", "resolve_once"])
def test_who_displaced_a_hook_is_named(in_engine: InEngine, model: str, name: str) -> None:
    message = in_engine(engine_resolve_displaced, model, name)
    assert f"the hook on sglang.srt.server_args.ServerArgs.{name} was not applied" in message
    assert "HookRegistry had patched it for tests.engines.test_sglang_plugin.engine_resolve_displaced" in message
    assert "Next step: " in message


@pytest.mark.parametrize(
    ("call", "newer", "word"),
    [
        ("use_fp8=self.use_fp8,", "use_fp8=self.use_fp8, use_mxfp8=True,", "low_latency_dispatch: got an unexpected"),
        ("buffer.get_dispatch_layout(", "buffer.get_dispatch_plan(", "get_dispatch_plan is missing"),
        ("allow_mnnvl=use_mnnvl_fabric,", "allow_rubin=use_mnnvl_fabric,", "__init__: got an unexpected keyword"),
    ],
)
def test_what_a_newer_engine_asks_of_the_buffer_is_named(
    in_engine: InEngine, model: str, tmp_path: Path, call: str, newer: str, word: str
) -> None:
    message = in_engine(engine_resolve_newer, model, str(tmp_path), call, newer)
    assert f"{tmp_path}/deepep.py, line " in message
    assert word in message


@pytest.mark.parametrize(
    ("module", "attribute"),
    [
        (DEEPEP, "_low_latency_dispatcher"),
        (DEEPEP, "_normal_dispatcher"),
        (DEEPEP, "params_bytes"),
        ("sglang.srt.batch_overlap.two_batch_overlap", "_inners"),
        ("sglang.srt.layers.moe.fused_moe_triton.layer", "dispatcher"),
    ],
)
def test_what_a_newer_engine_calls_otherwise_is_named(
    in_engine: InEngine, model: str, tmp_path: Path, module: str, attribute: str
) -> None:
    """The Buffer would open at the first dispatch, which may be inside a capture."""
    message = in_engine(engine_resolve_newer, model, str(tmp_path), f"self.{attribute} = ", "self.other = ", module)
    assert f"{module} assigns no attribute {attribute}" in message


def test_a_lost_hook_is_an_argument_error_that_says_so(in_engine: InEngine) -> None:
    said = in_engine(engine_parse_without_hook, ["--moe-a2a-backend", "uccl_ep"])
    assert said.startswith("refused: argument --moe-a2a-backend")
    assert "the hook on sglang.srt.server_args.ServerArgs.resolve_once was not applied" in said
    assert in_engine(engine_parse_without_hook, ["--moe-a2a-backend", "none"]).startswith("none")


def test_hook_is_found_below_a_wrapper_with_an_empty_cell() -> None:
    """Another plugin's wrapper may refer to a name that is not bound yet, or not any more."""

    def hook() -> None: ...

    def hooked() -> None:
        hook()

    def wrapper() -> Any:
        return later

    assert wrapper.__closure__ is not None
    assert wrapper.__closure__[0] == CellType()
    setattr(wrapper, "__wrapped__", hooked)  # noqa: B010 - mypy does not know the attribute
    assert hooks._is_hooked(wrapper, hook)
    setattr(wrapper, "__wrapped__", test_version_table_is_in_order_and_has_one_supported_version)  # noqa: B010
    assert not hooks._is_hooked(wrapper, hook)
    later = None


@pytest.mark.parametrize(("version", "reason"), [("0.5.9", "has no plugins"), ("0.5.15.post1", "resolve_once")])
def test_old_version_is_refused(in_engine: InEngine, model: str, version: str, reason: str) -> None:
    message = in_engine(engine_version, model, version)
    assert version in message
    assert reason in message


def test_newer_version_is_tried(in_engine: InEngine, model: str) -> None:
    assert in_engine(engine_version, model, "0.6.0rc1") == "accepted"


def test_worker_that_never_loads_plugins_gets_ours_with_the_configuration(in_engine: InEngine, model: str) -> None:
    record = in_engine(engine_pickle, model)
    assert in_engine(engine_unpickle, record) == (True, True)


def test_ray_actor_runs_on_our_buffer(in_engine: InEngine, model: str) -> None:
    """``--use-ray``: SGLang's launcher and its actor class, with a stand-in for Ray between them."""
    assert in_engine(engine_ray_actor, in_engine(engine_ray_launcher, model)) == {
        "loaded before": False,
        "loaded with the arguments": True,
        "backend": "deepep",
        "ours": True,
    }


@pytest.mark.parametrize("target", ["uccl_ep", "none"])
def test_draft_model_dispatches_through_our_buffer(in_engine: InEngine, model: str, target: str) -> None:
    seen = in_engine(engine_draft, model, target)
    assert seen == {"target": "none" if target == "none" else "deepep", "draft": "deepep", "ours": True, "group": True}


def test_router_weights_reach_the_buffer_at_dispatch(in_engine: InEngine, model: str) -> None:
    given = in_engine(engine_dispatch_core, model)
    assert given["same"]
    assert given["forgotten"]
    assert given["positional"] == 4
    assert given["return_recv_hook"]
    assert not given["use_fp8"]


def test_version_table_is_in_order_and_has_one_supported_version() -> None:
    for earlier, later in zip(SGLANG.versions, SGLANG.versions[1:], strict=False):
        assert earlier.first <= earlier.last < later.first
    assert [known.standing for known in SGLANG.versions].count(Standing.SUPPORTED) == 1
    assert SGLANG.look_up("0.5.23")[0] is Standing.SUPPORTED
    assert SGLANG.look_up("0.5.24rc1")[0] is Standing.UNPROVEN
    assert SGLANG.look_up("0.5.22")[0] is Standing.READ
    assert SGLANG.look_up("0.5.20")[0] is Standing.READ
    assert SGLANG.look_up("0.5.18.post2")[0] is Standing.REFUSED
    assert SGLANG.look_up("0.5.11")[0] is Standing.REFUSED
    assert SGLANG.look_up("0.1.20")[0] is Standing.REFUSED
    assert VLLM.look_up("0.31.2") == (Standing.UNPROVEN, "its sources were not read")
    assert VLLM.look_up("0.34.0") == (Standing.UNPROVEN, "it is newer than this package")


@pytest.mark.parametrize("version", ["0.0.0.dev0", "0.0.0.dev1+g3c8ac78dc", "0.1.dev1+g3c8ac78dc"])
def test_a_build_without_tags_is_tried(version: str) -> None:
    """Its plugin loader has called us: the hooks say whether it fits."""
    standing, reason = SGLANG.look_up(version)
    assert standing is Standing.UNPROVEN
    assert "without tags" in reason


def test_plugin_import_is_light() -> None:
    """SGLang loads the plugin for everybody: it must bring neither torch nor our kernels."""
    import subprocess

    code = (
        "import sys, uccl_ep_serving.engines.sglang; "
        "print([m for m in ('torch', 'numba', 'uccl_ep_serving.buffer') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path("/"))
    assert output.stdout.strip() == "[]"
