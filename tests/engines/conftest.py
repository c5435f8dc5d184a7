"""The engine in a process of its own for every test: hooks are global, so no test may see those of another."""

from __future__ import annotations

import importlib.util
import multiprocessing
import multiprocessing.forkserver
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import pytest

from uccl_ep_serving.engines import sglang_cpu, vllm_cpu

Result = TypeVar("Result")
InEngine = Callable[..., Any]

# imported once in the fork server: what costs seconds in every test otherwise
PRELOAD = {
    "sglang": [
        "sglang.srt.server_args",
        "sglang.srt.plugins",
        "sglang.srt.layers.moe.ep_moe.layer",
        "sglang.srt.batch_overlap.single_batch_overlap",
    ],
    "vllm": ["vllm.engine.arg_utils", "vllm.model_executor.layers.fused_moe.oracle.unquantized"],
}


@pytest.fixture(scope="session")
def in_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InEngine]:
    """Call ``function(*args)`` in a fresh fork of a process that has imported the engine; returns or raises as it did.

    An environment holds one engine: SGLang or vLLM.
    """
    engine = "vllm" if importlib.util.find_spec("vllm") else "sglang"
    directory = tmp_path_factory.mktemp(engine)
    supplied = {"sglang": sglang_cpu.environment, "vllm": vllm_cpu.environment}[engine](directory)
    changed = {**supplied, "PYTHONSAFEPATH": "1"}
    saved = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD[engine])
    multiprocessing.forkserver._forkserver._stop()  # one that another test started has neither imports nor variables
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

    def call(function: Callable[..., Result], *args: Any) -> Result:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(function, *args).result(timeout=100)

    yield call
    multiprocessing.forkserver._forkserver._stop()  # or it would live until pytest ends, and count as left behind


@pytest.fixture(scope="session")
def in_engine_ranks(in_engine: InEngine, tmp_path_factory: pytest.TempPathFactory) -> InEngine:
    """Call ``function(rank, size, rendezvous, *args)`` in ``size`` such processes at once; returns the results."""
    context = multiprocessing.get_context("forkserver")

    def call(size: int, function: Callable[..., Result], *args: Any) -> list[Result]:
        rendezvous = str(tmp_path_factory.mktemp("ranks") / "store")
        with ProcessPoolExecutor(size, mp_context=context) as pool:
            started = [pool.submit(function, rank, size, rendezvous, *args) for rank in range(size)]
            return [one.result(timeout=300) for one in started]

    return call
