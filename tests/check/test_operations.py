"""The operations of the check of GPUs, with the kernels of CPU tensors in place of a GPU's: what is right passes, and
what a Buffer gets wrong is told by kernel."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import bodies
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.check.faults import Wrong
from uccl_ep_serving.control_plane.bootstrap import StoreExchange

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


class Place:
    """Of one rank on the CPU."""

    device = torch.device("cpu")


class Faulty:
    """A Buffer one of whose results is wrong in its first row.

    Args:
        method, result: which of the results of which method.
    """

    def __init__(self, buffer: Buffer, method: str, result: int) -> None:
        self._buffer, self._method, self._result = buffer, method, result

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._buffer, name)
        if name != self._method:
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            results = found(*arguments, **named)
            first = results[self._result][:1]
            first.copy_(first == 0)
            return results

        return call


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    """Of one rank, alone."""
    found = bodies.opened(StoreExchange(dist.HashStore(), 0, 1), {})
    yield found
    found.destroy()


def operate(mode: str, buffer: Any, option: int) -> None:
    """An operation of ``mode``; ``option``: weights at dispatch, or how many rows there are at the worst."""
    from uccl_ep_serving.check import operations

    operation: Any = getattr(operations, f"_{mode}")
    operation(Place(), buffer, operations._tokens((8 if mode == "low_latency" else 40,), seed=3), option)


@pytest.mark.parametrize(("mode", "option"), [("low_latency", 0), ("low_latency", 1), ("normal", 0), ("normal", 42)])
def test_what_is_right_passes(buffer: Buffer, mode: str, option: int) -> None:
    operate(mode, buffer, option)


@pytest.mark.parametrize(
    ("mode", "method", "result", "where", "what"),
    [
        ("low_latency", "low_latency_dispatch", 0, "kernels dispatch_send and dispatch_recv", "rows of expert 0"),
        ("low_latency", "low_latency_dispatch", 1, "kernel dispatch_recv", "rows of each expert"),
        ("low_latency", "low_latency_combine", 0, "kernels combine_send and combine_recv", "combined tokens"),
        ("normal", "get_dispatch_layout", 3, "kernel mark_tokens", "is_token_in_rank"),
        ("normal", "dispatch", 0, "kernel dispatch_rows", "rows"),
        ("normal", "dispatch", 1, "kernel dispatch_rows", "ids"),
        ("normal", "dispatch", 2, "kernel dispatch_rows", "weights"),
        ("normal", "combine", 0, "kernel combine_rows", "combined tokens"),
        ("normal", "combine", 1, "kernel combine_rows", "combined weights"),
    ],
)
def test_a_wrong_result_is_told(buffer: Buffer, mode: str, method: str, result: int, where: str, what: str) -> None:
    with pytest.raises(Wrong) as caught:
        operate(mode, Faulty(buffer, method, result), 0)
    fault = caught.value.fault
    assert fault.where == where
    assert f" values of {what} differ, the first at [0" in fault.found
