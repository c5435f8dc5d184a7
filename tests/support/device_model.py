"""A model of a device: who waits for whom among streams and events, and what a capture holds.

It notes, for each kernel, which others it runs after for certain; what a test does not find there may overlap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

__all__ = ["Device", "Event", "Stream", "Tensor", "begin_capture", "install"]


class Stream:
    """A stream: ``after`` is everything that its next kernel runs after."""

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.priority = priority
        self.cuda_stream = id(self)
        self.after: set[str] = set()
        self._joined = 0

    @property
    def captured(self) -> int:
        """Number of the capture that the stream takes part in, 0 for none."""
        return self._joined if self._joined == Device.capturing else 0

    def join(self, capture: int) -> None:
        """Take part in a capture, which what the stream was given before is no part of."""
        if capture != self.captured:
            self._joined, self.after = capture, set()

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: Event) -> None:
        if event.captured:
            assert event.captured == Device.capturing, "an event of a graph cannot be waited for outside of its capture"
            self.join(event.captured)
        assert not self.captured or event.captured, "an event from outside cannot be waited for in a capture"
        self.after |= event.after


class Event:
    """An event of a stream."""

    def __init__(self) -> None:
        self.after: set[str] = set()
        self.captured = 0

    def record(self, stream: Stream) -> None:
        self.after, self.captured = set(stream.after), stream.captured

    def wait(self) -> None:
        Device.current.wait_event(self)


class Device:
    """The one device: its current stream, and what every kernel ran after."""

    current = Stream()
    #: Number of the capture that is going on, 0 while there is none.
    capturing = 0
    kernels: dict[str, set[str]]
    #: The calling thread's device, of several.
    chosen = torch.device("cuda", 0)

    @classmethod
    @contextlib.contextmanager
    def choose(cls, device: torch.device) -> Iterator[None]:
        """``torch.cuda.device``."""
        before, cls.chosen = cls.chosen, device
        try:
            yield
        finally:
            cls.chosen = before

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


def begin_capture(number: int) -> Stream:
    """A new current stream, which captures graph ``number``; 0: the capture is over. Returns the stream."""
    Device.capturing, Device.current = number, Stream()
    Device.current.join(number)
    return Device.current


class Tensor:
    """A tensor that notes the streams it is used on."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.streams.append(stream)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.cuda`` is the model."""
    Device.current, Device.capturing, Device.kernels = Stream(), 0, {}
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Device.current)
    monkeypatch.setattr(torch.cuda, "stream", Device.on)
    monkeypatch.setattr(torch.cuda, "device", Device.choose)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(Device.current.captured))
