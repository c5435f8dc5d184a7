"""What a launch of vLLM is told before a weight is loaded: what is refused, and what the log says of the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.vllm_settings import parallel_config
from uccl_ep_serving.engines.vllm import targets

pytestmark = pytest.mark.engine

InEngine = Callable[..., Any]
NAMES = list(targets.BACKENDS)


# --- everything below that starts with "engine_" runs in the process that has vLLM ------------------------------------


def engine_config(backend: str, fields: dict[str, Any]) -> str:
    """The backend of a configuration, or why there is none."""
    try:
        return str(parallel_config(all2all_backend=backend, **fields).all2all_backend)
    except ValueError as error:
        return f"refused: {error}"


def engine_launched(backend: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Two launches on a device without kernels, and what the second one is told; what ours has logged."""
    from vllm.platforms import current_platform

    type(current_platform).device_type = "tpu"
    said = logged()
    first = engine_config(backend, fields)
    return {"same": engine_config(backend, fields) == first, "outcome": first, "said": said}


def logged() -> list[str]:
    """Gets what the package logs from now on."""
    import logging

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("uccl_ep_serving").addHandler(handler)
    logging.getLogger("uccl_ep_serving").setLevel(logging.INFO)
    return said


def engine_served_on_cpu(backend: str) -> list[str]:
    """What the package logs where data-parallel ranks are launched twice."""
    said = logged()
    for _ in range(2):
        parallel_config(all2all_backend=backend, data_parallel_size=2)
    return said


def engine_without_expert_parallelism(backend: str, data: int, model: str, dense: bool) -> str:
    """What ``VllmConfig`` says of a model whose data-parallel ranks have all experts."""
    from vllm.config import ModelConfig, VllmConfig

    if dense:
        ModelConfig.is_moe = property(lambda self: False)
    parallel = parallel_config(all2all_backend=backend, data_parallel_size=data, enable_expert_parallel=False)
    try:
        VllmConfig(parallel_config=parallel, model_config=ModelConfig(model=model, dtype="float32"))
    except ValueError as error:
        return str(error)
    return "accepted"


def engine_of_long_steps(backend: str, tokens: int, model: str) -> str:
    """What ``VllmConfig`` says of steps of so many tokens, which its CPU platform would change."""
    from vllm.config import ModelConfig, SchedulerConfig, VllmConfig
    from vllm.platforms import current_platform

    type(current_platform).check_and_update_config = classmethod(lambda cls, config: None)
    parallel = parallel_config(all2all_backend=backend, data_parallel_size=2)
    scheduler = SchedulerConfig(
        max_num_batched_tokens=tokens, max_num_seqs=8, max_model_len=64, is_encoder_decoder=False
    )
    try:
        VllmConfig(
            parallel_config=parallel,
            model_config=ModelConfig(model=model, dtype="float32", max_model_len=64),
            scheduler_config=scheduler,
        )
    except ValueError as error:
        return str(error)
    return "accepted"


def engine_refused_by_vllm(backend: str) -> tuple[list[str], list[str]]:
    """What vLLM's refusals of a configuration say where they name the backend, and what the package logs before."""
    from vllm.config import CompilationConfig, VllmConfig

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ValueError(f"all2all_backend={kwargs['all2all_backend']!r} cannot be")

    CompilationConfig.set_splitting_ops_for_v1 = refuse
    said, refusals = logged(), []
    for _ in range(2):
        parallel = parallel_config(all2all_backend=backend, data_parallel_size=2)
        try:
            VllmConfig(parallel_config=parallel)
        except ValueError as error:
            refusals.append(f"{error}, {parallel.all2all_backend}")
    return refusals, said


# --- the tests --------------------------------------------------------------------------------------------------------


def test_a_device_without_kernels_is_refused_at_launch(in_engine: InEngine) -> None:
    launched = in_engine(engine_launched, "uccl_ep", {"data_parallel_size": 2})
    assert "--all2all-backend uccl_ep: " in launched["outcome"]
    assert "no kernels for tpu tensors" in launched["outcome"]
    assert launched["same"]
    assert launched["said"] == []


@pytest.mark.parametrize(
    "fields",
    [{"tensor_parallel_size": 2}, {"data_parallel_size": 2, "enable_expert_parallel": False}],
    ids=["no data parallelism", "no expert parallelism"],
)
@pytest.mark.parametrize("name", NAMES)
def test_no_device_is_asked_for_where_vllm_dispatches_nothing(
    in_engine: InEngine, name: str, fields: dict[str, Any]
) -> None:
    """A warning says so, once, and nothing says that it runs on this package."""
    launched = in_engine(engine_launched, name, fields)
    assert launched["outcome"] == name
    (said,) = launched["said"]
    assert said.startswith(f"WARNING --all2all-backend {name}: nothing is dispatched")
    assert "Next step: -dp " in said


def test_with_it_the_log_says_once_what_runs(in_engine: InEngine) -> None:
    said = [line for line in in_engine(engine_served_on_cpu, "uccl_ep") if "expert parallelism" in line]
    assert len(said) == 1
    assert said[0].startswith("INFO uccl_ep: vLLM ")
    assert said[0].endswith("runs its expert parallelism on uccl_ep_serving")


@pytest.mark.parametrize("name", NAMES)
def test_data_parallelism_without_expert_parallelism_is_refused_at_launch(
    in_engine: InEngine, model: str, name: str
) -> None:
    """Not by each worker, once it builds its layers. A dense model has no experts to be parallel."""
    refused = in_engine(engine_without_expert_parallelism, name, 2, model, False)
    assert f"--all2all-backend {name} with 2 data-parallel ranks, none of which has experts of its own" in refused
    assert "Next step: --enable-expert-parallel" in refused
    assert in_engine(engine_without_expert_parallelism, name, 1, model, False) == "accepted"
    assert in_engine(engine_without_expert_parallelism, name, 2, model, True) == "accepted"


@pytest.mark.parametrize(
    ("name", "tokens", "said"),
    [
        ("uccl_ep_low_latency", 8193, "8193 tokens per rank and step, of which low latency takes at most 8192"),
        ("uccl_ep_low_latency", 512, "accepted"),
        ("uccl_ep", 16384, "accepted"),
    ],
)
def test_steps_that_low_latency_cannot_take_are_refused_at_launch(
    in_engine: InEngine, model: str, name: str, tokens: int, said: str
) -> None:
    """Not by each worker, once it has loaded the weights."""
    assert said in in_engine(engine_of_long_steps, name, tokens, model)


@pytest.mark.parametrize("name", NAMES)
def test_what_vllm_refuses_is_said_of_the_name_that_was_typed(in_engine: InEngine, name: str) -> None:
    refusals, said = in_engine(engine_refused_by_vllm, name)
    assert len(refusals) == 2
    for refusal in refusals:
        assert f"all2all_backend='{name}' cannot be" in refusal
        assert refusal.endswith(f", {name}")
        assert "deepep" not in refusal
    assert len([line for line in said if targets.config_twin(name) in line and line.endswith(f"is about {name}")]) == 1


@pytest.mark.parametrize("name", NAMES)
def test_fault_tolerance_is_refused_at_launch(in_engine: InEngine, name: str) -> None:
    """Not by each worker, once it runs."""
    assert f"--all2all-backend {name} with --enable-fault-tolerance: " in in_engine(
        engine_config, name, {"enable_fault_tolerance": True}
    )


def test_a_bad_setting_is_refused_at_launch() -> None:
    """As a user starts it; the variable is read before the model is looked for."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from vllm.config import ParallelConfig; from vllm.plugins import load_general_plugins\n"
            "load_general_plugins(); ParallelConfig(all2all_backend='uccl_ep', enable_expert_parallel=True)",
        ],
        env={**os.environ, "UCCL_EP_PROXIES": "many", "PYTHONSAFEPATH": "1", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "UCCL_EP_PROXIES='many': must be a whole number" in done.stderr
