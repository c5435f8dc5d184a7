"""vLLM asks the Buffer before each step: a replayed CUDA graph calls nothing of ours, and leaves zeros after errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.engine


class _Known:
    """A Buffer that knows of ``error``, or of nothing."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def check(self) -> None:
        """As :meth:`uccl_ep_serving.Buffer.check`."""
        if self.error is not None:
            raise self.error


def engine_steps(way: str) -> list[str]:
    """Have a worker take steps: without a Buffer, while all is well, after a peer was lost, and with the Buffer closed.
    Returns what each raised or gave."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    class RayWorkerWrapper(WorkerWrapperBase):  # type: ignore[misc]
        """Stands for vLLM's, which exists where Ray is installed."""

        def execute_model_ray(self, given: Any) -> Any:
            """The step of Ray's compiled graph."""
            return self.worker.execute_model(given)

    ray = ModuleType("vllm.v1.executor.ray_utils")
    ray.RayWorkerWrapper = RayWorkerWrapper  # type: ignore[attr-defined]
    sys.modules[ray.__name__] = ray
    from uccl_ep_serving.engines.vllm import all2all, layer_hooks
    from uccl_ep_serving.errors import PeerLost

    layer_hooks.activate()
    layer_hooks.activate()
    manager: Any = object.__new__(all2all.UcclEpAll2AllManager)
    manager._buffer = None
    all2all._managers.add(manager)
    worker: Any = object.__new__(RayWorkerWrapper)
    worker.worker = SimpleNamespace(execute_model=lambda given: f"step {given}")
    worker._apply_mm_cache = lambda given: None
    seen = []
    for number, buffer in enumerate((None, _Known(), _Known(PeerLost("rank 1 is lost", peer=1)), None)):
        manager._buffer = buffer
        try:
            seen.append(getattr(worker, way)(number))
        except PeerLost as error:
            seen.append(str(error))
    return seen


@pytest.mark.parametrize("way", ["execute_model", "execute_model_ray"])
def test_what_is_wrong_is_raised_before_a_step(in_engine: Callable[..., Any], way: str) -> None:
    assert in_engine(engine_steps, way) == ["step 0", "step 1", "rank 1 is lost", "step 3"]
