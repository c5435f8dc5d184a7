"""Recording from a Buffer: what is given is what is read, and nothing that goes wrong is an error of an operation."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.alone import Alone
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.handles import EventOverlap
from uccl_ep_serving.traffic import advice, recorder
from uccl_ep_serving.traffic.advice import Shape, Verdict, device_name, store
from uccl_ep_serving.traffic.recorder import Recorder, open_recorder
from uccl_ep_serving.traffic.trace import Trace, load

EXPERTS, TOPK = 8, 2
Opened = Callable[..., Buffer]


@pytest.fixture
def opened() -> Iterator[Opened]:
    buffers: list[Buffer] = []

    def open_(**settings: Any) -> Buffer:
        buffers.append(Buffer(Alone(), settings=Settings(heap_bytes=1 << 20, **settings)))
        return buffers[-1]

    yield open_
    for buffer in buffers:
        buffer.destroy()


def some_ids(tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, EXPERTS, generator=generator).topk(TOPK, dim=1).indices


def low_latency(buffer: Buffer, ids: torch.Tensor) -> None:
    x = torch.ones(len(ids), 128, dtype=torch.bfloat16)
    buffer.low_latency_dispatch(x, ids, 16, EXPERTS, use_fp8=False)


def normal(buffer: Buffer, ids: torch.Tensor) -> None:
    x = torch.ones(len(ids), 128, dtype=torch.bfloat16)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    weights = torch.ones(ids.shape)
    handle = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=weights,
    )[4]
    buffer.dispatch(x, handle=handle)  # a cached one has no ids of its own


def made(directory: Path, every: int = 1, whole: bool = True) -> Recorder:
    return Recorder(directory, every=every, whole=whole, rank=0, ranks=2)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_both_modes_are_recorded_by_layer(opened: Opened, tmp_path: Path) -> None:
    buffer = opened(trace=str(tmp_path / "new"), trace_what="whole")
    given = [some_ids(tokens, tokens) for tokens in range(1, 7)]
    low_latency(buffer, given[0])
    for layer, operation in ((3, low_latency), (4, normal)):
        buffer.layer = layer
        for ids in given:
            operation(buffer, ids)
    buffer.layer = None
    low_latency(buffer, given[0])
    buffer.destroy()
    assert load(tmp_path / "new").layers == (-1, 3, 4)  # and None is left out
    for layer, mode in ((3, 0), (4, 1)):
        trace = load(tmp_path / "new", layer)
        assert (trace.experts, trace.topk, trace.ranks) == (EXPERTS, TOPK, 1)
        assert [(one.step, one.mode) for one in trace.steps[0]] == [(step, mode) for step in range(6)]
        for one, ids in zip(trace.steps[0], given, strict=True):
            assert np.array_equal(one.ids, ids.numpy())


def test_a_copy_is_taken_before_the_caller_has_its_ids_back(opened: Opened, tmp_path: Path) -> None:
    buffer = opened(trace=str(tmp_path), trace_what="whole")
    ids = some_ids(4)
    kept = ids.clone()
    low_latency(buffer, ids)
    ids.fill_(0)
    buffer.destroy()
    assert np.array_equal(load(tmp_path).steps[0][0].ids, kept.numpy())


def test_a_histogram_counts_what_was_chosen(opened: Opened, tmp_path: Path) -> None:
    buffer = opened(trace=str(tmp_path))
    given = [some_ids(5, seed) for seed in range(4)]
    given[1][2] = -1
    for ids in given:
        low_latency(buffer, ids)
    buffer.destroy()
    chosen = torch.cat(given).flatten()
    trace = load(tmp_path)
    assert not trace.steps
    assert trace.histogram.tolist() == torch.bincount(chosen[chosen >= 0], minlength=EXPERTS).tolist()
    (file,) = tmp_path.iterdir()
    assert "rank0of1" in file.name


def test_without_the_setting_nothing_is_there(opened: Opened) -> None:
    buffer = opened()
    low_latency(buffer, some_ids(2))
    assert buffer._observer is None
    assert not [thread for thread in threading.enumerate() if thread.name == "uccl-ep trace"]


def test_a_refused_dispatch_is_not_recorded(opened: Opened, tmp_path: Path) -> None:
    buffer = opened(trace=str(tmp_path))
    with pytest.raises(ConfigError):
        low_latency(buffer, torch.full((2, TOPK), EXPERTS))
    buffer.destroy()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("every", [1, 2, 7, 100])
def test_samples_are_the_same_steps_of_every_layer_and_of_no_period(tmp_path: Path, every: int) -> None:
    one = made(tmp_path, every)
    ids = some_ids(1)
    for _ in range(1000):
        for layer in (0, 1):
            one.record(layer, 0, ids, EXPERTS)
    one.close()
    steps = [[record.step for record in load(tmp_path, layer).steps[0]] for layer in (0, 1)]
    assert steps[0] == steps[1]
    assert len(steps[0]) == pytest.approx(1000 / every, abs=2)
    assert steps[0][0] == 0
    # layers that nobody tells apart come in turn: each of them has its part
    for layers in (2, 7) if every in (2, 7) else ():
        met = np.bincount(np.array(steps[0]) % layers, minlength=layers)
        assert met.min() > 0.8 * 1000 / every / layers, (every, layers, met)


def test_what_is_recorded_can_be_read_while_it_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines end their workers with SIGKILL; files grow by parts, and each part stands in one file."""
    monkeypatch.setattr(recorder, "_WRITE_SECONDS", 0.02)
    monkeypatch.setattr(recorder, "_FILE_BYTES", 2000)
    one = made(tmp_path)

    def read() -> Trace | None:
        return load(tmp_path) if list(tmp_path.glob("*.npz")) else None

    for step in range(20):
        one.record(0, 0, some_ids(16, step), EXPERTS)
        if step in (2, 19):
            deadline = time.monotonic() + 10
            while (found := read()) is None or len(found.steps[0]) <= step:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    one.close()
    trace = load(tmp_path)
    assert [record.step for record in trace.steps[0]] == list(range(20))
    assert len(list(tmp_path.glob("*.npz"))) == 3  # of 7 dispatches each


def test_a_full_disk_is_one_warning_and_the_end_of_recording(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "_WRITE_SECONDS", 0.0)

    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(recorder, "write_histogram", full)
    buffer = opened(trace=str(tmp_path))
    for _ in range(20):
        low_latency(buffer, some_ids(2))
        time.sleep(0.002)
    buffer.destroy()
    (said,) = warnings(caplog)
    assert "No space left on device" in said
    assert "recording ends here, and operations go on. Next step: " in said


def test_a_copy_that_fails_is_no_error_of_the_operation(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = opened(trace=str(tmp_path))

    def refused(*_: Any) -> None:
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr(Recorder, "_record", refused)
    for _ in range(3):
        low_latency(buffer, some_ids(2))
    (said,) = warnings(caplog)
    assert "no pinned memory" in said


def test_a_directory_that_cannot_be_is_one_warning(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    buffer = opened(trace=str(tmp_path / "file" / "traces"))
    low_latency(buffer, some_ids(2))
    (said,) = warnings(caplog)
    assert "nothing is recorded" in said
    assert open_recorder("/proc", every=1, whole=True, rank=0, ranks=1) is None
    assert open_recorder("~nobody-of-that-name/trace", every=1, whole=True, rank=0, ranks=1) is None


def test_copies_that_pile_up_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "_MOST_WAITING", 1000)
    go = threading.Event()
    take = Recorder._take

    def late(self: Recorder, one: Any) -> None:
        assert go.wait(10)
        take(self, one)

    monkeypatch.setattr(Recorder, "_take", late)
    one = made(tmp_path)
    ids = some_ids(16)  # 256 bytes
    for _ in range(10):
        one.record(0, 0, ids, EXPERTS)
    assert one.dropped == 7
    go.set()
    one.close()
    assert len(load(tmp_path).steps[0]) == 3
    assert "7 dispatches were left out" in warnings(caplog)[0]


@pytest.mark.parametrize("whole", [True, False])
def test_files_have_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    monkeypatch.setattr(recorder, "_WRITE_SECONDS", 0.0)
    monkeypatch.setattr(recorder, "_FILE_BYTES", 5000)
    monkeypatch.setattr(recorder, "_MOST_BYTES", 20000)
    one = made(tmp_path, whole=whole)
    layer = 0
    deadline = time.monotonic() + 20
    while not one._ended and time.monotonic() < deadline:
        one.record(layer, 0, some_ids(16), EXPERTS)
        layer += 1
        time.sleep(0.0001)
    one.close()
    (said,) = warnings(caplog)
    assert "the most that is recorded" in said
    assert 20000 <= sum(file.stat().st_size for file in tmp_path.iterdir()) < 32000
    assert load(tmp_path).experts == EXPERTS


def test_nothing_is_recorded_in_a_capture_which_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No other call of CUDA is made there: this machine would refuse one."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    one = made(tmp_path)
    for _ in range(3):
        one.record(0, 0, SimpleNamespace(is_cuda=True), EXPERTS)  # type: ignore[arg-type]
    one.close()
    (said,) = warnings(caplog)
    assert "captured in CUDA graphs are not recorded" in said
    assert "Next step: " in said
    assert not list(tmp_path.iterdir())


class OnGpu(torch.Tensor):
    """Ids in the memory of a GPU, as far as the recorder looks."""

    is_cuda = True  # type: ignore[assignment]


def test_what_a_gpu_copies_is_taken_once_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits: the copy goes to pinned memory, in the order of the stream, and a later dispatch looks at it."""
    done: list[bool] = []
    steps: list[str] = []
    empty = torch.empty

    class Event:
        def record(self) -> None:
            steps.append("event")

        def query(self) -> bool:
            return bool(done)

    def allocated(*shape: Any, pin_memory: bool = False, **keywords: Any) -> torch.Tensor:
        if pin_memory:
            steps.append("pinned")
        return empty(*shape, **keywords)

    monkeypatch.setattr(torch, "empty", allocated)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    one = made(tmp_path)
    previous = EventOverlap(SimpleNamespace(wait=lambda: steps.append("previous")))
    for step in range(2):
        one.record(0, 1, some_ids(3, step).as_subclass(OnGpu), EXPERTS, previous)
    assert steps == ["previous", "pinned", "event"] * 2
    assert len(one._on_gpu) == 2
    done.append(True)
    one.record(0, 1, some_ids(3, 2).as_subclass(OnGpu), EXPERTS, None)
    assert len(one._on_gpu) == 1
    one.close()
    records = load(tmp_path).steps[0]
    assert all(np.array_equal(one.ids, some_ids(3, step).numpy()) for step, one in enumerate(records))
    assert len(records) == 3


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_later_writes_do_not_show(tmp_path: Path) -> None:
    one = made(tmp_path)
    given = [some_ids(64, step) for step in range(4)]
    ids = torch.empty(64, TOPK, dtype=torch.int64, device="cuda")
    one.record(0, 0, ids.zero_(), EXPERTS)  # allocates
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 30)
    started = time.monotonic()
    for kept in given:
        ids.copy_(kept.pin_memory(), non_blocking=True)
        one.record(0, 0, ids, EXPERTS)
    assert not one._on_gpu[-1].copied.query()  # type: ignore[union-attr]
    assert time.monotonic() - started < 0.2
    ids.zero_()
    one.close()
    records = load(tmp_path).steps[0][1:]
    assert all(np.array_equal(record.ids, kept.numpy()) for record, kept in zip(records, given, strict=True))


def test_layers_of_two_models_have_files_of_their_own(tmp_path: Path) -> None:
    one = made(tmp_path)
    one.record(0, 0, some_ids(4), EXPERTS)
    one.record(1, 0, some_ids(4), 2 * EXPERTS)
    one.close()
    with pytest.raises(ConfigError, match="experts = "):
        load(tmp_path)
    assert {load(file).experts for file in tmp_path.iterdir()} == {EXPERTS, 2 * EXPERTS}


def test_advice_is_one_line_at_the_first_operation_of_a_shape(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "uccl_ep_serving")
    tmp_path.chmod(0o700)
    monkeypatch.setattr(advice, "places", lambda name: [tmp_path / name])
    here = device_name(torch.device("cpu"))
    shape = Shape("low-latency", 1, 128, EXPERTS, TOPK, "bfloat16", "alone", here, 4)
    store(Verdict(shape, "gloo-gather", 2.0, 1.9, 2.1, "", "2026-11-23"))
    buffers = opened(advice=True), opened()
    for buffer in buffers:
        for tokens in (4, 5, 4, 16):
            low_latency(buffer, some_ids(tokens))
        normal(buffer, some_ids(4))
    said = [record.getMessage() for record in caplog.records if "UCCL_EP_ADVICE" in record.getMessage()]
    assert len(said) == 1
    assert "low latency, 4 x 128 bfloat16" in said[0]
    assert "gloo-gather is 2.00 times as fast" in said[0]
