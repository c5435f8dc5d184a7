"""What the host says of an operation on a device when the device itself has said too little."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import pytest

from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import REBUILD_GROUP, ConfigError, TransportError, UcclEpError
from uccl_ep_serving.kernels.blocks import normal_device as block
from uccl_ep_serving.modes import normal_gpu_session as module
from uccl_ep_serving.modes.normal_gpu_session import NormalGpuSession
from uccl_ep_serving.modes.row_format import RowFormat
from uccl_ep_serving.protocol.message import DTYPE_BF16, NormalNotify


def _session(monkeypatch: pytest.MonkeyPatch, look: Any = lambda: None) -> NormalGpuSession:
    """Of a device on which nothing runs; ``look``: what the driver says of it."""
    words: Any = SimpleNamespace(ticket=0, different=1)
    monkeypatch.setattr(module, "device_normal_kernels", lambda *_: words)
    gpu: Any = SimpleNamespace(
        interpreted=True,
        memory=SimpleNamespace(device="cuda:1"),
        order=SimpleNamespace(capturing=False, look=look),
        on_its_device=contextlib.nullcontext,
        take_report=lambda: None,
        check_ids=lambda phase: None,
    )
    runtime: Any = SimpleNamespace(
        ranks=2,
        rank=0,
        epoch=0,
        stale="",
        check=lambda phase: None,
        begin_operation=lambda *_: None,
        interrupted="",
        interrupt=lambda operation: setattr(runtime, "interrupted", operation),
        space=SimpleNamespace(watch=lambda: None),
        settings=Settings(timeout=100.0),
    )
    session = NormalGpuSession(runtime, gpu)
    session.epoch.enter()
    return session


def test_an_opening_that_gave_up_without_a_report_has_a_cause_and_a_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    session = _session(monkeypatch)
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


def test_a_kernel_that_faults_is_named_while_the_host_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the deadline is over, and not as other work that does not end."""

    def look() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    session = _session(monkeypatch, look)
    form = RowFormat(NormalNotify.OPERATION_COMBINE, DTYPE_BF16, 128, 256)
    operation = session.epoch.operation(form.name)
    started = time.monotonic()
    words = "normal combine: a kernel has failed on cuda:1: CUDA error: an illegal memory access was encountered"
    with pytest.raises(TransportError, match=words), operation:
        session.wait_reply(operation, form, SimpleNamespace(reply=[-1, 0]))  # type: ignore[arg-type]
    assert time.monotonic() - started < 1.0
    with pytest.raises(UcclEpError, match=r"an earlier normal combine .* was interrupted"):
        session.epoch.check(form.name)


class Reply(dict[int, int]):
    """Words of an opening, which a kernel has written."""

    def __missing__(self, word: int) -> int:
        return 0

    def clear(self, word: int) -> None:  # type: ignore[override]
        self[word] = 0

    def take_shapes(self) -> list[tuple[int, int, int, int]]:
        return [(1, NormalNotify.OPERATION_COMBINE << 16 | DTYPE_BF16, 256, 0)]


def test_ranks_that_part_are_told_of_the_operation_in_which_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has launched others since."""
    session = _session(monkeypatch)
    dispatch = RowFormat(NormalNotify.OPERATION_DISPATCH, DTYPE_BF16, 128, 256)
    tickets = [session.new_ticket(dispatch)]
    tickets += [session.new_ticket(dispatch._replace(kind=NormalNotify.OPERATION_COMBINE)) for _ in range(2)]
    reply = Reply({block.INFO_SHAPE_MISMATCH: tickets[0]})
    session._present = SimpleNamespace(reply=reply)  # type: ignore[assignment]
    words = "^normal dispatch: .* rank 0 a normal dispatch of .* rank 1 a normal combine"
    with pytest.raises(ConfigError, match=words):
        session.check("normal dispatch")
    session.check("normal dispatch")
    # one that a graph repeats, long after
    for _ in range(2000):
        session.new_ticket(dispatch._replace(kind=NormalNotify.OPERATION_COMBINE))
    reply[block.INFO_SHAPE_MISMATCH] = tickets[0]
    with pytest.raises(ConfigError, match=words):
        session.check("normal dispatch")
