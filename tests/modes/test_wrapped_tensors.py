"""Tensors that only stand for another one, or are negated when they are read: kernels would read at address 0, which
ends the process, or the wrong sign. Each is refused by name, whichever argument it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.alone import Alone
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError


class StandIn(torch.Tensor):
    """As DTensor and AsyncCollectiveTensor are made."""

    @staticmethod
    def of(tensor: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            StandIn, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        return made

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        raise AssertionError(f"{call} was called")


def faked(tensor: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


def zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype)


WITHOUT_MEMORY = {"wrapper": StandIn.of, "FakeTensor": faked, "ZeroTensor": zeros}
X, IDS, WEIGHTS = torch.ones(2, 128), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    one = Buffer(Alone(), settings=Settings(heap_bytes=1 << 20))  # type: ignore[arg-type]
    yield one
    one.destroy()


def low_latency(buffer: Buffer, wrong: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    given = {name: make(tensor) if name == wrong else tensor for name, tensor in (("x", X), ("topk_idx", IDS))}
    weights = make(WEIGHTS) if wrong == "topk_weights" else WEIGHTS
    rows, _, handle, *_ = buffer.low_latency_dispatch(
        given["x"], given["topk_idx"], 2, 2, use_fp8=False, topk_weights=weights
    )
    out = make(torch.empty(2, 128)) if wrong == "out" else None
    buffer.low_latency_combine(make(rows) if wrong == "rows" else rows, IDS, WEIGHTS, handle, out=out)


def normal(buffer: Buffer, wrong: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    ids = make(IDS) if wrong == "topk_idx" else IDS
    counts = buffer.get_dispatch_layout(ids, 2)
    rows, _, weights, _, handle, _ = buffer.dispatch(
        make(X) if wrong == "x" else X,
        None,
        counts[0],
        None,
        counts[3],
        counts[2],
        IDS,
        make(WEIGHTS) if wrong == "topk_weights" else WEIGHTS,
    )
    bias = make(X) if wrong == "bias" else None
    buffer.combine(make(rows) if wrong == "rows" else rows, handle, weights, bias)


CASES = [
    *((low_latency, name) for name in ("x", "topk_idx", "topk_weights", "rows", "out")),
    *((normal, name) for name in ("x", "topk_idx", "topk_weights", "rows", "bias")),
]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
@pytest.mark.parametrize(("mode", "wrong"), CASES)
def test_a_tensor_without_memory_is_refused(buffer: Buffer, mode: Callable[..., None], wrong: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=r"without memory of its own. Next step"):
        mode(buffer, wrong, WITHOUT_MEMORY[kind])
    mode(buffer, "", lambda tensor: tensor)


@pytest.mark.parametrize("mode", [low_latency, normal])
def test_a_tensor_that_is_negated_lazily_is_refused(buffer: Buffer, mode: Callable[..., None]) -> None:
    with pytest.raises(ConfigError, match=r"x is negated lazily.*resolve_neg"):
        mode(buffer, "x", torch._neg_view)
    mode(buffer, "x", lambda tensor: torch._neg_view(tensor).resolve_neg())
