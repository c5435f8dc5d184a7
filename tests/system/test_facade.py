"""What ``Buffer`` and ``Config`` take and refuse by themselves, on a group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from uccl_ep_serving import buffer as module
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError

GPU = torch.device("cuda", 0)


class Alone:
    """A group of one rank."""

    rank, size = 0, 1

    def all_gather(self, payload: bytes) -> list[bytes]:
        return [payload]


def opened(**settings: Any) -> Buffer:
    return Buffer(Alone(), settings=Settings(heap_bytes=1 << 20, **settings))


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    one = opened()
    yield one
    one.destroy()


def dispatch(buffer: Buffer, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Any:
    """Two tokens to one of two experts."""
    x = torch.ones(2, 128, dtype=dtype, device=device)
    ids = torch.zeros(2, 1, dtype=torch.int64, device=device)
    return buffer.low_latency_dispatch(x, ids, 2, 2, use_fp8=False)


@pytest.mark.parametrize("missing", ["DeviceGround", "DeviceLowLatency", "DeviceNormal"])
def test_a_device_that_cannot_be_served_leaves_the_buffer_as_it_was(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """A package is missing: every call on a GPU says so, and CPU tensors are served."""
    for name in ("DeviceGround", "DeviceLowLatency", "DeviceNormal"):
        monkeypatch.setattr(module, name, lambda *_, **__: None)

    def refused(*_: Any, **__: Any) -> None:
        raise ConfigError("pip install it")

    monkeypatch.setattr(module, missing, refused)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for _ in range(2):
        with pytest.raises(ConfigError, match="pip install it"):
            buffer.get_comm_stream()
    assert dispatch(buffer)[1].tolist() == [2, 0]


def test_tensors_of_devices_that_nobody_serves_decide_nothing(buffer: Buffer) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match="a tensor is on meta: a Buffer serves tensors on cpu or cuda"):
            dispatch(buffer, device="meta")
    assert dispatch(buffer)[1].tolist() == [2, 0]
