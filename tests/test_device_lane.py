"""Streams and events of low-latency mode on a device, on a model of a device: who waits for whom, in DeepEP's rules.

The model notes, for each kernel, which others it runs after for certain; what a test does not find there may overlap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from uccl_ep_serving.device_lane import StreamLane
from uccl_ep_serving.device_launch import InFlight, launch
from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.handles import EventOverlap

GPU = torch.device("cuda", 0)


class Stream:
    """A stream: ``after`` is everything that its next kernel runs after."""

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.priority = priority
        self.cuda_stream = id(self)
        self.after: set[str] = set()

    def wait_stream(self, other: Stream) -> None:
        self.after |= other.after

    def wait_event(self, event: Event) -> None:
        assert event.captured == Device.capturing, "an event of another graph, or of none, cannot be waited for"
        self.after |= event.after


class Event:
    """An event of a stream."""

    def __init__(self) -> None:
        self.after: set[str] = set()
        self.captured = 0

    def record(self, stream: Stream) -> None:
        self.after, self.captured = set(stream.after), Device.capturing

    def wait(self) -> None:
        Device.current.wait_event(self)


class Device:
    """The one device: its current stream, and what every kernel ran after."""

    current = Stream()
    #: Number of the capture, 0 while there is none.
    capturing = 0
    kernels: dict[str, set[str]]

    @classmethod
    def kernel(cls, name: str) -> None:
        """A kernel is launched on the current stream."""
        cls.kernels[name] = set(cls.current.after)
        cls.current.after.add(name)

    @classmethod
    @contextlib.contextmanager
    def on(cls, stream: Stream) -> Iterator[None]:
        """``torch.cuda.stream``."""
        before, cls.current = cls.current, stream
        try:
            yield
        finally:
            cls.current = before


class Tensor:
    """A tensor that notes the streams it is used on."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.streams.append(stream)


class Kernel:
    """A launch of a kernel."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self) -> None:
        Device.kernel(self.name)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> type[Device]:
    """``torch.cuda`` is the model."""
    Device.current, Device.capturing, Device.kernels = Stream(), 0, {}
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Device.current)
    monkeypatch.setattr(torch.cuda, "stream", Device.on)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(Device.capturing))
    return Device


class OneBuffer:
    """Operations of one Buffer: its lane, and dispatches named by the test."""

    def __init__(self) -> None:
        self.lane = StreamLane(GPU, self._capture_of)
        self.flight = InFlight("low-latency dispatch", "dispatches")
        self.received: list[str] = []

    @staticmethod
    def _capture_of(stream: int) -> int:
        assert stream == Device.current.cuda_stream
        assert Device.capturing, "only a capturing stream has a capture"
        return Device.capturing

    def dispatch(
        self, name: str, *, async_finish: bool = False, hook: bool = False, tensor: Tensor | None = None
    ) -> tuple[EventOverlap, Callable[[], None] | None]:
        self.flight.check_room()
        return launch(
            self.lane,
            self.flight,
            [Kernel(f"{name} send")],
            [Kernel(f"{name} receive")],
            [tensor or Tensor()],  # type: ignore[list-item]
            before_receive=lambda: None,
            received=lambda: self.received.append(name),
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
    assert set(tensor.streams) == {buffer.lane.stream, device.current}


def test_memory_is_kept_for_no_stream_that_the_current_one_waits_for(device: type[Device]) -> None:
    """What is freed after the call is used again in the order of the current stream, which runs after the kernels. Kept
    for the communication stream as well, the memory of each layer in a captured graph would be taken anew."""
    buffer, tensor = OneBuffer(), Tensor()
    buffer.dispatch("a", tensor=tensor)
    assert set(tensor.streams) == {device.current}


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
    device.capturing, device.current = 1, Stream()
    buffer.lane._own.after.clear()
    _, hook = buffer.dispatch("a", hook=True)
    assert hook is not None
    hook()
    assert device.kernels["a receive"] == {"a send"}
    # another graph, captured right after: the model would say if anything waited for the first one
    device.capturing, device.current = 2, Stream()
    buffer.lane._own.after.clear()
    buffer.dispatch("b")
    assert device.kernels["b send"] == set()
    device.capturing, device.current = 0, Stream()
    # nor does what follows the captures wait for an event inside one
    buffer.dispatch("c")
