"""The engine in a process of its own for every test: hooks are global, so no test may see those of another."""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import pytest

from tests.support.fork_server import ensure_fork_server, stop_fork_server
from uccl_ep_serving.demo import sglang_cpu, vllm_cpu
from uccl_ep_serving.demo.checkpoint import write_checkpoint

Result = TypeVar("Result")
InEngine = Callable[..., Any]

# imported once in the fork server: what costs seconds in every test otherwise
PRELOAD = {
    "sglang": [
        "sglang.srt.server_args",
        "sglang.srt.plugins",
        "sglang.srt.layers.moe.ep_moe.layer",
        "sglang.srt.model_executor.model_runner",
        "sglang.srt.managers.scheduler",
        "sglang.srt.batch_overlap.single_batch_overlap",
    ],
    "vllm": ["vllm.engine.arg_utils", "vllm.model_executor.layers.fused_moe.oracle.unquantized"],
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a tiny DeepSeek-V3; a test module that serves another has a fixture of this name."""
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory)
    return str(directory)


@pytest.fixture(scope="session")
def engine_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], ProcessPoolExecutor]]:
    """Pools of fresh forks of a process that has imported the engine. An environment holds one: SGLang or vLLM."""
    engine = "vllm" if importlib.util.find_spec("vllm") else "sglang"
    directory = tmp_path_factory.mktemp(engine)
    supplied = {"sglang": sglang_cpu.environment, "vllm": vllm_cpu.environment}[engine](directory)
    context = multiprocessing.get_context("forkserver")

    def processes(size: int) -> ProcessPoolExecutor:
        ensure_fork_server(PRELOAD[engine], {**supplied, "PYTHONSAFEPATH": "1"})
        return ProcessPoolExecutor(size, mp_context=context)

    yield processes
    stop_fork_server()  # or it would live until pytest ends, and count as left behind


@pytest.fixture(scope="session")
def in_engine(engine_processes: Callable[[int], ProcessPoolExecutor]) -> InEngine:
    """Call ``function(*args)`` in such a process; returns or raises as it did."""

    def call(function: Callable[..., Result], *args: Any) -> Result:
        with engine_processes(1) as pool:
            return pool.submit(function, *args).result(timeout=100)

    return call


@pytest.fixture(scope="session")
def in_engine_ranks(
    engine_processes: Callable[[int], ProcessPoolExecutor], tmp_path_factory: pytest.TempPathFactory
) -> InEngine:
    """Call ``function(rank, size, rendezvous, *args)`` in ``size`` such processes at once; returns the results."""

    def call(size: int, function: Callable[..., Result], *args: Any) -> list[Result]:
        rendezvous = str(tmp_path_factory.mktemp("ranks") / "store")
        with engine_processes(size) as pool:
            started = [pool.submit(function, rank, size, rendezvous, *args) for rank in range(size)]
            return [one.result(timeout=300) for one in started]

    return call
