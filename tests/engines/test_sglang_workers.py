"""What reaches processes of SGLang that load no plugins and inherit no environment, such as Ray's actors."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.test_sglang_plugin import resolved
from uccl_ep_serving.errors import ConfigError

pytestmark = pytest.mark.engine

InEngine = Callable[..., Any]


def engine_launcher(model: str, variables: dict[str, str]) -> bytes:
    os.environ.update(variables)
    return pickle.dumps(resolved(model, moe_a2a_backend="uccl_ep", max_running_requests=12))


def engine_actor(record: bytes, variables: dict[str, str]) -> dict[str, Any]:
    """Unpickle and publish as an actor does."""
    from uccl_ep_serving.engines.sglang import activation, hooks

    asked: list[str] = []
    os.environ.update(variables)
    hooks.check_device = lambda device, *_arguments: asked.append(device)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: said.append(entry.getMessage())  # type: ignore[method-assign]
    logging.getLogger("uccl_ep_serving").addHandler(handler)
    server_args = pickle.loads(record)
    server_args.resolve_once()
    return {
        "chunk": os.environ.get("UCCL_EP_CHUNK_BYTES"),
        "nics": os.environ.get("NCCL_IB_HCA"),
        "tokens": activation._decided.tokens,
        "said": [one for one in said if "in this worker" in one],
        "asked": asked,
    }


def engine_refused_actor(record: bytes) -> tuple[str, bool]:
    """What an actor raises on a host whose GPUs have not been checked, and whether it runs on our Buffer."""
    from uccl_ep_serving.engines.sglang import activation, hooks, workers

    def refuse(device: str, option: str, demo: str) -> None:
        raise ConfigError(f"{option}: {device} has no record")

    hooks.check_device = refuse
    workers.host = lambda: "another"
    server_args = pickle.loads(record)
    try:
        server_args.resolve_once()
    except ConfigError as error:
        return str(error), activation._decided.tokens == 128
    return "", True


def test_settings_and_window_reach_an_actor(in_engine: InEngine, model: str) -> None:
    record = in_engine(engine_launcher, model, {"UCCL_EP_CHUNK_BYTES": "256K", "NCCL_IB_HCA": "mlx5"})
    assert in_engine(engine_actor, record, {}) == {
        "chunk": "256K",
        "nics": "mlx5",
        "tokens": 128,
        "said": [],
        "asked": [],
    }


def test_an_actor_asks_for_the_gpus_of_its_own_host(in_engine: InEngine, model: str) -> None:
    """Ray chooses hosts on which no launcher has asked."""
    refusal = in_engine(engine_refused_actor, in_engine(engine_launcher, model, {}))
    assert refusal == ("--moe-a2a-backend uccl_ep: cpu has no record", False)


def test_what_an_actors_own_environment_says_holds(in_engine: InEngine, model: str) -> None:
    """A node may have other NICs than the launcher's."""
    record = in_engine(engine_launcher, model, {"UCCL_EP_CHUNK_BYTES": "256K"})
    found = in_engine(engine_actor, record, {"UCCL_EP_CHUNK_BYTES": "512K"})
    assert found["chunk"] == "512K"
    (said,) = found["said"]
    assert "UCCL_EP_CHUNK_BYTES=512K in this worker and 256K where the engine was launched" in said


def engine_parsed(model: str) -> bytes:
    """A configuration as a tool hands it to the process that resolves it: parsed only."""
    import argparse

    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    line = f"--model-path {model} --device cpu --attention-backend torch_native --tp 2 --moe-a2a-backend uccl_ep"
    return pickle.dumps(ServerArgs.from_cli_args(parser.parse_args(line.split())))


def engine_resolve_first(record: bytes) -> str:
    from sglang.srt.layers.moe.token_dispatcher import deepep

    server_args = pickle.loads(record)
    server_args.resolve_once()
    return f"{server_args.moe_a2a_backend} {deepep.Buffer.__name__}"


def test_an_unresolved_configuration_brings_the_plugin(in_engine: InEngine, model: str) -> None:
    """``sglang.compile_deep_gemm`` and routers' launchers resolve in a process that has loaded none."""
    assert in_engine(engine_resolve_first, in_engine(engine_parsed, model)) == "uccl_ep SGLangBuffer"


def engine_resolved_without_us(model: str) -> str:
    """The plugin comes after the engine has resolved the name as it is."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    server_args = ServerArgs(model_path=model, moe_a2a_backend="uccl_ep")
    server_args._resolution_finished = True
    try:
        server_args.resolve_once()
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_a_configuration_that_was_resolved_without_the_plugin_is_refused(in_engine: InEngine, model: str) -> None:
    assert "resolved before the plugin was loaded" in in_engine(engine_resolved_without_us, model)
