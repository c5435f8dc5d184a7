"""vLLM asks the Buffer before each step, and before its tokens are told: a replayed CUDA graph calls nothing of ours,
and leaves zeros after errors."""

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


class _OnItsWay:
    """The output of a step that the device is still at."""

    def __init__(self, output: str, raises: bool) -> None:
        self._output, self._raises = output, raises

    def get_output(self) -> str:
        """Waits for the device."""
        if self._raises:
            raise RuntimeError("device-side assert")
        return self._output


def engine_steps(way: str, fails: str) -> list[str]:
    """Have a worker take steps: without a Buffer, while all is well, with one in which a peer is lost ``fails`` it, and
    with the Buffer closed. Returns what each raised or gave. ``fails`` may say that the step itself raises, and "alone"
    that no peer is lost."""
    from vllm.v1.worker.gpu_worker import Worker
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
    lost = _Known(PeerLost("rank 1 is lost", peer=1))

    def step(number: int) -> Any:
        if number == 2 and fails in ("in", "raises in"):
            manager._buffer = lost
        if number == 2 and fails in ("raises in", "raises alone"):
            raise RuntimeError("device-side assert")
        if "behind" in fails:
            return _OnItsWay(f"step {number}", number == 2 and fails == "raises behind")
        return f"step {number}"

    own = "execute_model" if way == "execute_model_ray" else way
    assert hasattr(Worker, own)
    worker.worker = SimpleNamespace(**{own: step})
    worker._apply_mm_cache = lambda given: None
    seen = []
    for number, buffer in enumerate((None, _Known(), lost if fails == "before" else _Known(), None)):
        manager._buffer = buffer
        try:
            given = getattr(worker, way)(number)
            if "behind" in fails:
                manager._buffer = lost if number == 2 else buffer
                given = given.get_output()
            seen.append(given)
        except RuntimeError as error:
            seen.append(str(error))
    return seen


@pytest.mark.parametrize("fails", ["before", "in", "behind", "raises in", "raises behind", "raises alone"])
@pytest.mark.parametrize(
    "way",
    ["execute_model", "sample_tokens", "execute_dummy_batch", "execute_model_ray", "compile_or_warm_up_model"],
)
def test_no_step_in_which_something_failed_gives_tokens(in_engine: Callable[..., Any], way: str, fails: str) -> None:
    """``behind``: the device is at it when the worker has returned. What is lost is named whatever the step raises."""
    why = "device-side assert" if fails == "raises alone" else "rank 1 is lost"
    assert in_engine(engine_steps, way, fails) == ["step 0", "step 1", why, "step 3"]
