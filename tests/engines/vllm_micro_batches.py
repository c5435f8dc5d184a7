"""Dual-batch overlap without a GPU: vLLM's own micro-batch threads, of both of its model runners."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def without_streams() -> tuple[Any, Any]:
    """What vLLM's contexts need of a GPU: streams become names, and events nothing, as a CPU runs all work in order.

    Returns:
        The streams to compute and to communicate on.
    """
    import torch
    from vllm.utils import torch_utils

    event = SimpleNamespace(record=lambda _stream: None)
    torch.Event = lambda: event  # type: ignore[assignment,misc]
    torch.cuda.set_stream = lambda stream: setattr(torch_utils._current_stream_tls, "value", stream)
    torch.cuda.stream = lambda _stream: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda: None
    compute, communication = (SimpleNamespace(wait_event=lambda _event: None) for _ in range(2))
    return compute, communication


def starting_on(stream: Any) -> None:
    """Threads of micro-batches start on ``stream``, as those of a GPU do on its present one."""
    from vllm.utils import torch_utils
    from vllm.v1.worker.ubatching import UBatchContext

    enter = UBatchContext.__enter__

    def entered(self: Any) -> Any:
        torch_utils._current_stream_tls.value = stream
        return enter(self)

    UBatchContext.__enter__ = entered


def first_runner(compute: Any, communication: Any, model: Callable[..., Any]) -> Callable[[], Any]:
    """A step of two micro-batches as vLLM's first model runner has it."""
    from vllm.v1.worker import gpu_ubatch_wrapper, ubatching

    barrier = threading.Barrier(3)
    wrapper: Any = object.__new__(gpu_ubatch_wrapper.UBatchWrapper)
    wrapper.ready_barrier = barrier
    wrapper.device = 0

    def step() -> Any:
        forward: list[Any] = [SimpleNamespace(micro_batch=number, dp_metadata=None) for number in range(2)]
        contexts = ubatching.make_ubatch_contexts(2, compute, communication, forward, barrier)
        made = [gpu_ubatch_wrapper.UbatchMetadata(one, None, None, None, None, 4) for one in contexts]
        return wrapper._run_ubatches(made, model)

    return step


def second_runner(compute: Any, communication: Any, model: Callable[..., Any]) -> Callable[[], Any]:
    """The same of its second model runner."""
    import torch
    from vllm.utils import torch_utils
    from vllm.v1.worker.gpu.ubatch_utils import UBatchRunner, UBatchState

    torch.accelerator.set_device_index = lambda _index: None
    runner: Any = object.__new__(UBatchRunner)
    runner.num_ubatches, runner.device, runner._pending_finish = 2, SimpleNamespace(index=0), None
    runner.comm_stream, runner.ready_barrier = communication, threading.Barrier(3)
    runner.sm_control = contextlib.nullcontext()

    def step() -> Any:
        torch_utils._current_stream_tls.value = compute
        halves: list[Any] = [SimpleNamespace(token_slice=slice(number, number + 1)) for number in range(2)]
        forward: list[Any] = [SimpleNamespace(micro_batch=number, dp_metadata=None) for number in range(2)]
        given = {"positions": torch.zeros(2), "input_ids": None, "intermediate_tensors": None, "inputs_embeds": None}
        return runner.run(model, given, UBatchState(slices=halves, forward_contexts=forward))

    return step
