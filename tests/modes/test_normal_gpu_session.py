"""What the host says of an operation on a device when the device itself has said too little."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from uccl_ep_serving.errors import REBUILD_GROUP, UcclEpError
from uccl_ep_serving.modes import normal_gpu_session as module
from uccl_ep_serving.modes.normal_gpu_session import NormalGpuSession
from uccl_ep_serving.modes.row_format import RowFormat
from uccl_ep_serving.protocol.message import DTYPE_BF16, NormalNotify


def test_an_opening_that_gave_up_without_a_report_has_a_cause_and_a_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    words: Any = SimpleNamespace(ticket=0, different=1)
    monkeypatch.setattr(module, "device_normal_kernels", lambda *_: words)
    gpu: Any = SimpleNamespace(
        interpreted=True,
        memory=SimpleNamespace(device="cuda:1"),
        order=SimpleNamespace(capturing=False),
        on_its_device=contextlib.nullcontext,
        take_report=lambda: None,
        check_ids=lambda phase: None,
    )
    runtime: Any = SimpleNamespace(
        ranks=2, epoch=0, stale="", check=lambda phase: None, begin_operation=lambda plan: None
    )
    session = NormalGpuSession(runtime, gpu)
    session.epoch.enter()
    form = RowFormat(NormalNotify.OPERATION_DISPATCH, DTYPE_BF16, 128, 256)
    operation = session.epoch.operation(form.name)
    # the ticket of the last opening, and that it failed
    present: Any = SimpleNamespace(reply=[0, -1])
    with pytest.raises(UcclEpError) as caught, operation:
        session.wait_reply(operation, form, present)
    assert str(caught.value).startswith("normal dispatch: the opening on cuda:1 gave up")
    assert "Likely cause: " in str(caught.value)
    assert str(caught.value).endswith(REBUILD_GROUP)
    # peers may count on its rows
    with pytest.raises(UcclEpError, match=r"an earlier normal dispatch .* was interrupted"):
        session.epoch.check(form.name)
