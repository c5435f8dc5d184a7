"""What the plugin refuses at launch, and what of ``--deepep-config`` reaches the engine. No server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.test_sglang_plugin import resolved
from uccl_ep_serving.errors import ConfigError

pytestmark = pytest.mark.engine

InEngine = Callable[..., Any]


# --- what starts with "engine_" runs in the process that has SGLang --------------------------------------------------


def engine_settings(model: str, fields: dict[str, Any], variables: dict[str, str]) -> tuple[str, int]:
    """Ask for uccl_ep with these settings; returns the refusal, or the SMs that the engine's own configuration took."""
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.moe.token_dispatcher import deepep

    os.environ.update(variables)
    try:
        server_args = resolved(model, moe_a2a_backend="uccl_ep", **fields)
    except ConfigError as error:
        return str(error), 0
    deepep.get_deepep_config = lambda: server_args.deepep_config or ""
    utils.get_deepep_config = deepep.get_deepep_config
    deepep.torch.distributed.get_rank = lambda: 1
    return "", deepep.DeepEPConfig.get_instance().num_sms


def engine_on_device(model: str, device: str, name: str = "UCCL_EP_DEVICE", value: str = "auto") -> str:
    """What a launcher says whose configuration resolves to ``device``, with a variable set."""
    from uccl_ep_serving.engines.sglang import hooks

    os.environ[name] = value
    check = hooks.check_device

    def on_device(found: str, option: str, demo: str) -> None:
        assert found == "cpu"
        check(device, option, demo)

    hooks.check_device = on_device
    try:
        resolved(model, moe_a2a_backend="uccl_ep")
    except ConfigError as error:
        return str(error)
    return ""


def engine_patience(model: str, variables: dict[str, str]) -> str | None:
    """What the workers of a launch are told of UCCL_EP_TIMEOUT."""
    os.environ.update(variables)
    from uccl_ep_serving.engines.sglang import workers

    decisions = workers.decisions_of(resolved(model, moe_a2a_backend="uccl_ep"))
    assert decisions is not None
    return decisions.variables.get("UCCL_EP_TIMEOUT")


def engine_draft_attention(steps: int) -> list[str]:
    """What stock SGLang says to an EAGLE draft on the attention of a CPU without AMX; our plugin is not loaded."""
    from types import SimpleNamespace

    from sglang.srt.speculative import draft_utils

    assert not sys.modules["sglang.srt.plugins"]._plugins_loaded
    draft_utils.attention_backends = lambda: ("torch_native", "torch_native")
    draft_utils.get_spec = lambda: SimpleNamespace(speculative_attention_mode="prefill")
    runner = SimpleNamespace(draft_attention_backend="torch_native", model_config=None, mambaish_config=None)
    draft_utils._assert_draft_needs_no_conv_sidecar = lambda _runner: None
    factory = draft_utils.DraftBackendFactory(runner, topk=1, speculative_num_steps=steps)
    refusals = []
    for create in (factory.create_decode_backend, factory.create_draft_extend_backend):
        try:
            create()
        except ValueError as error:
            refusals.append(str(error))
    return refusals


# --- tests ------------------------------------------------------------------------------------------------------------


def deepep_config(**changes: Any) -> str:
    """A ``--deepep-config`` whose normal_combine has ``changes``."""
    fields = {
        "num_sms": 8,
        "num_max_nvl_chunked_send_tokens": 4,
        "num_max_nvl_chunked_recv_tokens": 64,
        "num_max_rdma_chunked_send_tokens": 4,
        "num_max_rdma_chunked_recv_tokens": 32,
    }
    return json.dumps({"normal_dispatch": fields, "normal_combine": {**fields, **changes}})


@pytest.mark.parametrize("how", ["inline", "file"])
def test_deepep_config_reaches_the_engine(in_engine: InEngine, model: str, tmp_path: Path, how: str) -> None:
    given = deepep_config()
    if how == "file":
        (tmp_path / "deepep.json").write_text(given)
        given = str(tmp_path / "deepep.json")
    assert in_engine(engine_settings, model, {"deepep_config": given}, {}) == ("", 8)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ("no_such_file.json", "neither JSON nor a file of JSON"),
        ('{"normal_dispatch": ', "neither JSON nor a file of JSON"),
        ('{"normal_dispatch": {"num_sms": 8}}', "needs an object named 'normal_combine'"),
        (deepep_config(num_sms=10), "num_sms of normal_dispatch and of normal_combine differ"),
        (deepep_config(num_sms=7), "normal_combine: num_sms = 7 must be even"),
        (deepep_config(num_max_nvl_chunked_recv_tokens=1), "send tokens 4 must be in 1..recv tokens 1"),
        (deepep_config(num_smss=8), "num_smss"),
    ],
)
def test_bad_deepep_config_is_refused_at_launch(in_engine: InEngine, model: str, config: str, complaint: str) -> None:
    message, _ = in_engine(engine_settings, model, {"deepep_config": config}, {})
    assert message.startswith("--deepep-config ")
    assert complaint in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "8193"),
        ("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "0"),
        ("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "many"),
        ("UCCL_EP_TRANSPORT", "carrier-pigeon"),
    ],
)
def test_bad_variable_is_refused_at_launch(in_engine: InEngine, model: str, name: str, value: str) -> None:
    message, _ = in_engine(engine_settings, model, {}, {name: value})
    assert name in message
    assert value in message


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, None),
        ({"SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE": "1"}, "3600"),
        ({"SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE": "1", "UCCL_EP_TIMEOUT": "50"}, "50"),
    ],
)
def test_ranks_wait_for_one_that_compiles_for_all(
    in_engine: InEngine, model: str, variables: dict[str, str], told: str | None
) -> None:
    assert in_engine(engine_patience, model, variables) == told


def test_device_without_kernels_is_refused_before_the_weights_are_loaded(in_engine: InEngine, model: str) -> None:
    assert in_engine(engine_on_device, model, "cpu") == ""
    assert "no kernels for npu tensors" in in_engine(engine_on_device, model, "npu")


def test_gpus_are_served_where_their_check_is_on_record(in_engine: InEngine, model: str) -> None:
    """What opens the gate: tests/check/test_gate.py."""
    refused = in_engine(engine_on_device, model, "cuda", "UCCL_EP_GPU_CHECK", "0")
    assert "Next step: `uccl-ep check --gpu` on this machine" in refused
    assert in_engine(engine_on_device, model, "cuda", "UCCL_EP_DEVICE", "cuda") == ""


@pytest.mark.parametrize("steps", [1, 3])
def test_speculation_on_a_cpu_is_refused_by_sglang_itself(in_engine: InEngine, steps: int) -> None:
    """The README says so. When this fails, SGLang has learnt it, and a server test of ours is due."""
    refusals = in_engine(engine_draft_attention, steps)
    assert len(refusals) == (1 if steps == 1 else 2)
    for refusal in refusals:
        assert "EAGLE is not supported in" in refusal
        assert "torch_native" in refusal
