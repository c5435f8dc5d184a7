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


def engine_without_the_mark(model: str, renamed: bool) -> tuple[int, str]:
    """How often a configuration is sized that is resolved twice, where the engine's mark of a resolved one is lost
    between the two, or has another name from the start; and the refusal."""
    from sglang.srt.server_args import ServerArgs

    from uccl_ep_serving.engines.sglang import window

    sized: list[Any] = []
    fit = window.fit
    window.fit = lambda server_args: sized.append(server_args) or fit(server_args)  # type: ignore[func-returns-value]
    if renamed:
        resolve = ServerArgs.resolve_once

        def resolve_once(self: Any) -> None:
            resolve(self)
            self.__dict__["_resolution_done"] = self.__dict__.pop("_resolution_finished")

        setattr(ServerArgs, "resolve_once", resolve_once)  # noqa: B010 - mypy knows the method
    try:
        server_args = resolved(model, moe_a2a_backend="uccl_ep")
    except ConfigError as error:
        return len(sized), str(error)
    del server_args.__dict__["_resolution_finished"]
    server_args.resolve_once()
    return len(sized), ""


def test_a_configuration_is_sized_once_whatever_the_engine_calls_a_resolved_one(
    in_engine: InEngine, model: str
) -> None:
    """Every scheduler would take the memory once more."""
    assert in_engine(engine_without_the_mark, model, False) == (1, "")
    sized, refusal = in_engine(engine_without_the_mark, model, True)
    assert sized == 0
    assert "sglang.srt.server_args.ServerArgs._resolution_finished is missing" in refusal


def engine_refused_twice(model: str, fields: dict[str, Any]) -> list[str]:
    """What is said to a caller in Python who tries a refused configuration again."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    server_args = ServerArgs(
        model_path=model,
        device="cpu",
        attention_backend="torch_native",
        tp_size=2,
        moe_a2a_backend="uccl_ep",
        **fields,
    )
    said = []
    for _ in range(2):
        try:
            server_args.resolve_once()
        except ConfigError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("fields", [{"max_running_requests": 4096}, {"enable_eplb": True}], ids=["requests", "EPLB"])
def test_a_refused_configuration_is_refused_again_for_the_same_reason(
    in_engine: InEngine, model: str, fields: dict[str, Any]
) -> None:
    first, again = in_engine(engine_refused_twice, model, fields)
    assert "Next step: " in first
    assert again == f"{first} (this ServerArgs was refused before: correct the arguments in a new one)"


def test_a_configuration_that_was_resolved_without_the_plugin_is_refused(in_engine: InEngine, model: str) -> None:
    assert "resolved before the plugin was loaded" in in_engine(engine_resolved_without_us, model)
