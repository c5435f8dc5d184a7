"""SGLang in a process of its own for every test: hooks are global, so no test may see those of another."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import pytest

from uccl_ep_serving.engines import sglang_cpu

Result = TypeVar("Result")
InEngine = Callable[..., Any]

# imported once in the fork server: what costs seconds in every test otherwise
PRELOAD = [
    "sglang.srt.server_args",
    "sglang.srt.plugins",
    "sglang.srt.layers.moe.ep_moe.layer",
    "sglang.srt.batch_overlap.single_batch_overlap",
]


@pytest.fixture(scope="session")
def in_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InEngine]:
    """Call ``function(*args)`` in a fresh fork of a process that has imported SGLang; returns or raises as it did."""
    directory = tmp_path_factory.mktemp("sglang")
    changed = {**sglang_cpu.environment(directory), "PYTHONSAFEPATH": "1"}
    saved = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
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
