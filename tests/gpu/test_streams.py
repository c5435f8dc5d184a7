"""Streams and events of a Buffer on a device, on a model of a device: who waits for whom, in DeepEP's rules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.device_model import Device, Event, Stream, Tensor, begin_capture, install
from uccl_ep_serving.data_plane.turn import Turn
from uccl_ep_serving.errors import ConfigError, UcclEpError
from uccl_ep_serving.gpu.streams import GpuOrder
from uccl_ep_serving.handles import EventOverlap
from uccl_ep_serving.modes.low_latency_gpu_session import LowLatencyGpuSession
from uccl_ep_serving.protocol.layout import LowLatencyPlan

GPU = torch.device("cuda", 0)


class Kernel:
    """A launch of a kernel."""

    #: Names of launches that fail.
    broken: frozenset[str] = frozenset()

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self) -> None:
        if self.name in self.broken:
            raise RuntimeError("out of resources")
        Device.kernel(self.name)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> type[Device]:
    """``torch.cuda`` is the model."""
    install(monkeypatch)
    return Device


class OneBuffer:
    """Operations of one Buffer: its order, and dispatches named by the test."""

    def __init__(self) -> None:
        self.order = GpuOrder(GPU, self._capture_of)
        gpu: Any = SimpleNamespace(
            order=self.order, interpreted=False, take_report=lambda: None, check_ids=lambda phase: None
        )
        self.runtime: Any = SimpleNamespace(
            epoch=0,
            turn=Turn(),
            stale="",
            rebuild_requested=False,
            check=lambda phase: None,
            begin_operation=lambda *_: None,
            interrupted="",
            interrupt=lambda operation: setattr(self.runtime, "interrupted", operation),
        )
        self.session = LowLatencyGpuSession(self.runtime, gpu)
        self.session.epoch.enter()
        self.flight = self.session.dispatches
        self.received: list[str] = []

    @staticmethod
    def _capture_of(stream: int) -> int:
        assert stream == Device.current.cuda_stream
        assert Device.capturing, "only a capturing stream has a capture"
        return Device.capturing

    def dispatch(
        self, name: str, *, async_finish: bool = False, hook: bool = False, tensor: Tensor | None = None
    ) -> tuple[EventOverlap, Callable[[], None] | None]:
        self.session.epoch.check("low-latency dispatch", begins=True)
        if not self.flight.has_room:
            raise self.flight.refusal("low-latency dispatch")
        return self.session.launch(
            "low-latency dispatch",
            self.flight,
            LowLatencyPlan(1, 4, 128, 2, 2, 2),
            (Kernel(f"{name} send"),),  # type: ignore[arg-type]
            (Kernel(f"{name} receive"),),  # type: ignore[arg-type]
            [tensor or Tensor()],  # type: ignore[list-item]
            lambda nanoseconds: self.received.append(name),
            async_finish=async_finish,
            return_recv_hook=hook,
        )


def test_an_operation_runs_after_the_current_stream_and_before_what_follows(device: type[Device]) -> None:
    buffer = OneBuffer()
    device.kernel("before")
    event, hook = buffer.dispatch("a")
    device.kernel("after")
    assert hook is None
    assert "before" in device.kernels["a send"]
    assert "a send" in device.kernels["a receive"]
    assert "a receive" in device.kernels["after"]
    assert event.extra_tensors is None


def test_async_finish_leaves_waiting_to_the_caller(device: type[Device]) -> None:
    buffer, tensor = OneBuffer(), Tensor()
    event, _ = buffer.dispatch("a", async_finish=True, tensor=tensor)
    device.kernel("overlapped")
    event.current_stream_wait()
    device.kernel("after")
    assert not any(name.startswith("a ") for name in device.kernels["overlapped"])
    assert "a receive" in device.kernels["after"]
    # until the caller waits, nobody may take their memory
    assert event.extra_tensors == (tensor,)
    assert set(tensor.streams) == {buffer.order.stream, device.current}


def test_memory_is_kept_for_no_stream_that_the_current_one_waits_for(device: type[Device]) -> None:
    """What is freed after the call is used again in the order of the current stream, which runs after the kernels. Kept
    for the communication stream as well, the memory of each layer in a captured graph would be taken anew."""
    buffer, tensor = OneBuffer(), Tensor()
    buffer.dispatch("a", tensor=tensor)
    assert set(tensor.streams) == {device.current}


def test_who_asks_for_the_combine_buffer_again_waits_for_the_combine_that_reads_it(device: type[Device]) -> None:
    buffer = OneBuffer()
    buffer.session._gpu.memory = SimpleNamespace(device="cpu")  # type: ignore[misc, assignment]
    buffer.runtime.before_unmapping = lambda act: None
    plan = LowLatencyPlan(1, 4, 128, 2, 2, 2)
    buffer.session.combine_buffer(plan, torch.bfloat16)
    buffer.dispatch("combine", async_finish=True)
    device.kernel("overlapped")
    buffer.session.combine_buffer(plan, torch.bfloat16)
    device.kernel("experts of the next micro-batch")
    assert "combine send" not in device.kernels["overlapped"]
    assert "combine send" in device.kernels["experts of the next micro-batch"]


def test_overlap_inside_a_with_block(device: type[Device]) -> None:
    buffer = OneBuffer()
    with buffer.dispatch("a", async_finish=True)[0]:
        device.kernel("overlapped")
    device.kernel("after")
    assert "a receive" not in device.kernels["overlapped"]
    assert "a receive" in device.kernels["after"]


def test_halves_run_on_the_stream_that_is_current_when_they_are_launched(device: type[Device]) -> None:
    buffer, other, tensor = OneBuffer(), Stream(), Tensor()
    main = device.current
    _, hook = buffer.dispatch("a", hook=True, tensor=tensor)
    assert hook is not None
    assert "a send" in main.after
    with device.on(other):
        hook()
    # in order, although nobody has made the streams wait for each other; and its memory is kept for the other stream
    assert "a send" in device.kernels["a receive"]
    assert "a receive" in other.after
    assert "a receive" not in main.after
    assert other in tensor.streams
    hook()
    assert buffer.received == ["a"]


def test_two_micro_batches_in_flight(device: type[Device]) -> None:
    """Two-batch overlap: the second batch's attention runs between the first one's send and receive."""
    buffer = OneBuffer()
    _, first = buffer.dispatch("a", hook=True)
    device.kernel("attention b")
    _, second = buffer.dispatch("b", hook=True)
    assert first is not None
    assert second is not None
    with pytest.raises(ConfigError, match="at most two at a time"):
        buffer.dispatch("c", hook=True)
    device.kernel("attention a")
    second()
    with pytest.raises(ConfigError, match="the one before last is not received"):
        buffer.dispatch("c", hook=True)
    first()
    assert "a receive" not in device.kernels["attention a"]
    # a Buffer's kernels run one after the other, whatever the order of the hooks
    assert "b receive" in device.kernels["a receive"]
    buffer.dispatch("c", hook=True)


@pytest.mark.parametrize(("half", "hook"), [("send", False), ("receive", False), ("send", True)])
def test_a_launch_that_fails_is_named_by_every_call_after_it(
    device: type[Device], monkeypatch: pytest.MonkeyPatch, half: str, hook: bool
) -> None:
    """There is no hook that could be called, and the peers may have what was launched."""
    buffer = OneBuffer()
    monkeypatch.setattr(Kernel, "broken", frozenset({f"a {half}"}))
    with pytest.raises(RuntimeError, match="out of resources"):
        buffer.dispatch("a", hook=hook)
    for _ in range(3):
        with pytest.raises(UcclEpError, match=r"an earlier low-latency dispatch \(RuntimeError: out of"):
            buffer.dispatch("b")
    assert (buffer.flight.count, buffer.received) == (0, [])
    # new windows, in which all ranks begin at zero
    buffer.runtime.epoch, buffer.runtime.interrupted = buffer.runtime.epoch + 1, ""
    buffer.session.epoch.enter()
    buffer.dispatch("c")
    assert buffer.received == ["c"]


def test_a_capture_that_fails_has_sent_nothing(device: type[Device], monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = OneBuffer()
    _, hook = buffer.dispatch("before", hook=True)
    assert hook is not None
    begin_capture(1)
    monkeypatch.setattr(Kernel, "broken", frozenset({"a receive"}))
    with pytest.raises(RuntimeError, match="out of resources"):
        buffer.dispatch("a")
    begin_capture(0)
    # the one before is still the last that runs: there is room for one more
    buffer.dispatch("b")
    hook()
    assert buffer.received == ["b", "before"]


def test_a_hook_whose_launch_fails_can_be_called_again(device: type[Device], monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = OneBuffer()
    _, hook = buffer.dispatch("a", hook=True)
    assert hook is not None
    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "broken", frozenset({"a receive"}))
        with pytest.raises(RuntimeError, match="out of resources"):
            hook()
    assert (buffer.flight.count, buffer.received) == (1, [])
    buffer.dispatch("b")
    hook()
    assert (buffer.flight.count, buffer.received) == (0, ["b", "a"])


def test_kernels_of_one_buffer_never_overlap_and_those_of_two_may(device: type[Device]) -> None:
    one, two = OneBuffer(), OneBuffer()
    streams = [Stream(), Stream()]
    with device.on(streams[0]):
        one.dispatch("a", async_finish=True)
    with device.on(streams[1]):
        two.dispatch("x", async_finish=True)
        one.dispatch("b", async_finish=True)
    assert "a receive" in device.kernels["b send"]
    assert not any(name.startswith("a ") for name in device.kernels["x send"])
    assert not any(name.startswith("x ") for name in device.kernels["b send"])


def test_a_capture_waits_for_no_event_from_outside(device: type[Device]) -> None:
    buffer = OneBuffer()
    buffer.dispatch("warm")
    assert buffer.order.captures == 0
    begin_capture(1)
    _, hook = buffer.dispatch("a", hook=True)
    assert hook is not None
    hook()
    assert buffer.order.captures == 2
    assert device.kernels["a receive"] == {"a send"}
    # another graph, captured right after: the model would say if anything waited for the first one
    begin_capture(2)
    buffer.dispatch("b")
    assert device.kernels["b send"] == set()
    begin_capture(0)
    # nor does what follows the captures wait for an event inside one
    buffer.dispatch("c")


def test_in_a_capture_memory_is_kept_by_the_event_and_not_by_the_allocator(device: type[Device]) -> None:
    """torch keeps what it was told is used on another stream until the capture ends: of every layer."""
    buffer, tensor = OneBuffer(), Tensor()
    current = begin_capture(1)
    event, _ = buffer.dispatch("a", async_finish=True, tensor=tensor)
    assert event.extra_tensors == (tensor,)
    assert set(tensor.streams) == {current}
    # an operation after that event, for which the caller's stream has not waited: the event may go now
    with buffer.order.operation(event, own_stream=True):
        pass
    assert set(tensor.streams) == {current, buffer.order.stream}


def test_in_a_capture_memory_of_another_stream_is_kept_by_the_hook(device: type[Device]) -> None:
    """SGLang's single-batch overlap on Blackwell: a combine is sent on another stream, and received on the main one."""
    buffer, tensor, other = OneBuffer(), Tensor(), Stream()
    main = begin_capture(1)
    device.kernel("experts")
    other.wait_stream(main)
    with device.on(other):
        _, hook = buffer.dispatch("a", hook=True, tensor=tensor)
    device.kernel("shared expert")
    assert hook is not None
    assert tensor.streams == []
    held = sys.getrefcount(tensor)
    hook()
    # what the main stream is given from here on may use the memory again
    assert {"a send", "shared expert"} <= device.kernels["a receive"]
    assert set(tensor.streams) == {main}
    assert sys.getrefcount(tensor) < held


@pytest.mark.parametrize(
    ("sent", "called", "words"),
    [
        (1, 0, "was captured in a graph, .* call the recv hook in that capture"),
        (1, 2, "was captured in a graph, .* call the recv hook in that capture"),
        (0, 1, "was not captured, .* call the recv hook before the capture begins"),
    ],
)
def test_a_receive_is_captured_where_its_send_is(device: type[Device], sent: int, called: int, words: str) -> None:
    buffer = OneBuffer()
    begin_capture(sent)
    _, hook = buffer.dispatch("a", hook=True)
    assert hook is not None
    begin_capture(called)
    with pytest.raises(ConfigError, match=f"low-latency dispatch recv: the operation {words}"):
        hook()
    assert "a receive" not in device.kernels


def test_a_captured_receive_runs_after_its_send_whatever_is_run_in_between(device: type[Device]) -> None:
    buffer = OneBuffer()
    begin_capture(1)
    _, hook = buffer.dispatch("a", hook=True)
    assert hook is not None
    with device.on(Stream()):
        buffer.dispatch("b", hook=True)
    beside = Stream()
    beside.join(1)
    with device.on(beside):
        hook()
    assert "a send" in device.kernels["a receive"]


def test_no_graph_receives_what_was_sent_before(device: type[Device]) -> None:
    buffer = OneBuffer()
    epoch = buffer.session.epoch
    buffer.dispatch("a", hook=True)
    begin_capture(1)
    with pytest.raises(ConfigError, match="has not been received, its recv hook was dropped, and no graph can"):
        epoch.receive_dropped()
    begin_capture(0)
    epoch.receive_dropped()
    assert (buffer.flight.count, buffer.received) == (0, ["a"])
    assert "a receive" in device.kernels


@pytest.mark.parametrize("later", [0, 2])
def test_a_capture_that_is_given_up_leaves_nothing_in_flight(device: type[Device], later: int) -> None:
    buffer = OneBuffer()
    begin_capture(1)
    sent = buffer.dispatch("a", hook=True)
    begin_capture(later)
    del sent
    buffer.session.epoch.receive_dropped()
    assert buffer.flight.count == 0
    assert "a receive" not in device.kernels


def test_a_capture_receives_what_its_dropped_hooks_would_have(device: type[Device]) -> None:
    buffer = OneBuffer()
    begin_capture(1)
    buffer.dispatch("a", hook=True)
    assert buffer.flight.count == 1
    buffer.session.epoch.receive_dropped()
    assert buffer.flight.count == 0
    assert device.kernels["a receive"] == {"a send"}


def test_an_operation_after_a_capture_runs_after_the_one_before_it(device: type[Device]) -> None:
    buffer = OneBuffer()
    with device.on(Stream()):
        buffer.dispatch("a", async_finish=True)
    begin_capture(1)
    buffer.dispatch("b")
    begin_capture(0)
    buffer.dispatch("c", hook=True)
    assert "a receive" in device.kernels["c send"]


class Captured(EventOverlap):
    """``Buffer.capture``, on the model."""

    def __init__(self) -> None:
        super().__init__(Event())
        self.event.record(Device.current)  # type: ignore[union-attr]


def operation(
    order: GpuOrder, name: str, previous: EventOverlap | None, own_stream: bool, finish: bool, tensor: Tensor
) -> EventOverlap:
    """One of normal mode: it fills what it returns, then moves rows."""
    with order.operation(previous, own_stream=own_stream):
        Device.kernel(f"{name} fill")
        return order.run(lambda: Device.kernel(f"{name} rows"), [tensor], own_stream=True, finish=finish)  # type: ignore[list-item]


@pytest.mark.parametrize("capture", [0, 1])
def test_an_operation_after_an_event_overlaps_what_the_stream_was_given_since(
    device: type[Device], capture: int
) -> None:
    """SGLang's two-batch overlap in prefill: the other batch's work stands between the event and the call."""
    order, tensor = OneBuffer().order, Tensor()
    main = begin_capture(capture)
    device.kernel("router")
    event = Captured()
    device.kernel("other")
    sent = operation(order, "a", event, own_stream=True, finish=False, tensor=tensor)
    device.kernel("overlapped")
    sent.current_stream_wait()
    device.kernel("after")
    assert device.current is main
    assert device.kernels["a fill"] == {"router"}
    assert device.kernels["a rows"] == {"router", "a fill"}
    assert "a rows" not in device.kernels["overlapped"]
    assert "a rows" in device.kernels["after"]
    # what it returns is the communication stream's memory, which the caller's stream uses
    assert main in tensor.streams
    assert (order.stream in tensor.streams) == (not capture)


@pytest.mark.parametrize("capture", [0, 1])
def test_memory_of_the_communication_stream_is_filled_there_after_the_current_stream(
    device: type[Device], capture: int
) -> None:
    """Without an event. In a capture the communication stream must be part of it before anything is allocated on it."""
    order, tensor = OneBuffer().order, Tensor()
    main = begin_capture(capture)
    device.kernel("router")
    with order.operation(None, own_stream=True):
        assert device.current is order.stream
        assert device.current.captured == capture
    operation(order, "a", None, own_stream=True, finish=True, tensor=tensor)
    device.kernel("after")
    assert "router" in device.kernels["a fill"]
    assert "a rows" in device.kernels["after"]
    assert set(tensor.streams) == {main}


def test_an_operation_on_the_callers_memory_is_after_the_event_and_the_current_stream(device: type[Device]) -> None:
    """Its memory may have been another kernel's until now, so it cannot begin before that one."""
    order, writer = OneBuffer().order, Stream()
    with device.on(writer):
        device.kernel("router")
        event = Captured()
    device.kernel("other")
    operation(order, "a", event, own_stream=False, finish=True, tensor=Tensor())
    assert {"router", "other"} <= device.kernels["a fill"]
    assert {"router", "other", "a fill"} <= device.kernels["a rows"]


def test_an_operation_that_fails_leaves_the_lane_as_it_was(device: type[Device]) -> None:
    buffer, main = OneBuffer(), device.current
    with pytest.raises(ConfigError), buffer.order.operation(None, own_stream=True):
        raise ConfigError("wrong")
    buffer.dispatch("a")
    assert device.current is main
    assert "a receive" in main.after
