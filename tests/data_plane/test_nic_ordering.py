"""Which writes of NICs a GPU must order: those that other GPUs of the node read as well, where rows are forwarded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from uccl_ep_serving.config import Settings
from uccl_ep_serving.gpu import context as gpu_context
from uccl_ep_serving.gpu.context import GpuContext
from uccl_ep_serving.gpu.streams import HostOrder


@pytest.mark.parametrize(
    ("ranks", "node_ranks", "hierarchy", "masked", "shown"),
    [
        (4, 2, "auto", False, True),
        (4, 2, "off", False, False),
        (4, 2, "auto", True, False),
        (4, 1, "auto", False, False),
    ],
)
def test_an_objection_is_asked_for_what_peers_read(
    monkeypatch: pytest.MonkeyPatch, ranks: int, node_ranks: int, hierarchy: str, masked: bool, shown: bool
) -> None:
    told: list[str] = []
    memory: Any = SimpleNamespace(
        synchronize=None, export_dmabuf=None, unordered=lambda shown: f"the objection where shown is {shown}"
    )
    window: Any = SimpleNamespace(own=1 << 40, nbytes=4096)
    monkeypatch.setattr(gpu_context, "memory_of", lambda device, interpreted: memory)
    monkeypatch.setattr(gpu_context, "DeviceWindow", lambda *_: window)
    monkeypatch.setattr(gpu_context, "DeviceSpace", lambda *_: SimpleNamespace(close=None))
    runtime: Any = SimpleNamespace(
        rank=0,
        ranks=ranks,
        epoch=0,
        settings=Settings(window="device", hierarchy=hierarchy),
        space=None,
        layout=None,
        mask=np.array([0, 0, 0, masked], dtype=np.int32),
        node_ranks=node_ranks,
        nic_peers=frozenset({2, 3}),
        device_unreachable=frozenset(),
        exchange=None,
        before_draining=lambda finish: None,
        before_unmapping=lambda release: None,
        register_device_window=lambda start, nbytes, export, objection: told.append(objection),
    )
    GpuContext(runtime, torch.device("cpu"), HostOrder()).space()
    assert told == [f"the objection where shown is {shown}"]
