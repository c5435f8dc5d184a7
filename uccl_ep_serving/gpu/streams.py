"""In which order kernels of one Buffer run, and on which streams: DeepEP's rules.

Without a hook an operation runs on the Buffer's own communication stream, after what the current stream has been given,
or after ``previous_event`` alone where its memory is to be the communication stream's (``allocate_on_comm_stream``);
the current stream then waits for it, or the caller does (``async_finish``). With a hook both halves run on the stream
that is current when they are launched. Kernels of one Buffer never overlap each other, whatever streams they are on.

Except those of a replayed graph, of which the host hears nothing: they run in the order of the stream that replays.
Whoever replays has waited there for the events of all operations that were launched before; and an event that later
operations begin after is recorded after the replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from ..handles import EventOverlap, wait_for

__all__ = ["GpuOrder", "HostOrder", "StreamOrder"]


class StreamOrder(Protocol):
    """Runs launches in order."""

    @property
    def capturing(self) -> bool:
        """True while the current stream captures a graph."""

    @property
    def capture(self) -> int | None:
        """Number of the capture that the current stream takes part in, None for none."""

    @property
    def captures(self) -> int:
        """How many times something was run that was captured, and may be replayed."""

    @property
    def stream(self) -> Any:
        """The communication stream, None where there are no streams."""

    def operation(
        self, previous: EventOverlap | None, *, own_stream: bool
    ) -> contextlib.AbstractContextManager[None, bool | None]:
        """Around all that an operation does: what it allocates, copies and fills, and what it runs here.

        Args:
            previous: what its arguments are ready after, if that is not the current stream.
            own_stream: everything is the communication stream's, which waits for ``previous`` alone, or for the current
                stream where there is none. Else the current stream waits for ``previous``.
        """

    def run(
        self, launch: Callable[[], None], tensors: Sequence[torch.Tensor], *, own_stream: bool, finish: bool
    ) -> EventOverlap:
        """Run ``launch``, which launches kernels that use ``tensors``.

        Args:
            own_stream: on the communication stream, after the current one unless :meth:`operation` says otherwise; else
                on the current stream.
            finish: make the current stream wait for it; else the caller waits for the event.
        """

    def look(self) -> None:
        """Raise the driver's error where a kernel has failed: RuntimeError. Waits for nothing."""


class HostOrder:
    """In Triton's interpreter a kernel is over when its launch returns."""

    capturing = False
    capture = None
    captures = 0
    stream = None

    def operation(
        self, previous: EventOverlap | None, *, own_stream: bool
    ) -> contextlib.AbstractContextManager[None, bool | None]:
        wait_for(previous)
        return contextlib.nullcontext()

    def run(
        self, launch: Callable[[], None], tensors: Sequence[torch.Tensor], *, own_stream: bool, finish: bool
    ) -> EventOverlap:
        launch()
        return EventOverlap()

    def look(self) -> None:
        pass


class GpuOrder:
    """Streams of a CUDA or ROCm device.

    Args:
        device: theirs.
        capture_of: number of the capture that the stream with a handle takes part in (``DeviceMemory.capture_of``).

    Attributes:
        captures: how many times something was run that was captured, and may be replayed.
    """

    def __init__(self, device: torch.device, capture_of: Callable[[int], int]) -> None:
        self._device = device
        self._capture_of = capture_of
        self.captures = 0
        self._own = torch.cuda.Stream(device, priority=-1)
        #: What the current stream had been given when an operation began: recorded again by each.
        self._begun = torch.cuda.Event()
        #: By capture, None for what is not captured: the event of what ran last, and whether that was on the
        #: communication stream. Of captures the latest alone.
        self._last: dict[int | None, tuple[torch.cuda.Event, bool]] = {}
        #: While an operation is on the communication stream altogether, the stream that it was called on.
        self._caller: torch.cuda.Stream | None = None

    @property
    def capturing(self) -> bool:
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    @property
    def capture(self) -> int | None:
        with torch.cuda.device(self._device):
            return self._capture(torch.cuda.current_stream(self._device))

    def _capture(self, current: torch.cuda.Stream) -> int | None:
        """``current`` is the current stream, of the current device."""
        return self._capture_of(current.cuda_stream) if torch.cuda.is_current_stream_capturing() else None

    @property
    def stream(self) -> Any:
        return self._own

    def look(self) -> None:
        # whatever is asked of a context that a kernel has broken fails
        self._own.query()

    @contextlib.contextmanager
    def operation(self, previous: EventOverlap | None, *, own_stream: bool) -> Iterator[None]:
        if not own_stream:
            wait_for(previous)
            yield
            return
        caller = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._own):
            # First of all: once it waits for something captured it is part of the capture, and what is allocated on it
            # is the graph's.
            wait_for(previous)
            if previous is None or previous.event is None:
                self._own.wait_stream(caller)
            elif self.capturing:
                # what its event holds in a capture (see below) goes with it, and the caller has not waited
                for tensor in previous.extra_tensors or ():
                    tensor.record_stream(self._own)
            self._caller = caller
            try:
                yield
            finally:
                self._caller = None

    def run(
        self, launch: Callable[[], None], tensors: Sequence[torch.Tensor], *, own_stream: bool, finish: bool
    ) -> EventOverlap:
        current = torch.cuda.current_stream(self._device)
        caller = self._caller or current
        stream = self._own if own_stream else current
        with torch.cuda.device(self._device):
            capture = self._capture(current)
            if stream != current:
                self._begun.record(current)
                stream.wait_event(self._begun)
            # An event of another capture, or of none, cannot be waited for inside a capture, nor the other way round.
            # What is captured runs with the replay, whose order is the caller's.
            # The communication stream waits for nothing of its own.
            last, last_is_own = self._last.get(capture, (None, False))
            if last is not None and not (own_stream and last_is_own):
                stream.wait_event(last)
            with torch.cuda.stream(stream):
                launch()
                event = torch.cuda.Event()
                event.record(stream)
            if capture is not None:
                for over in self._last.keys() - {None, capture}:
                    del self._last[over]
            self._last[capture] = event, own_stream
            self.captures += capture is not None
            if stream != caller and finish:
                caller.wait_event(event)
        for tensor in tensors:
            # Memory that is freed is used again in the order of the stream that it was allocated on. The caller's is
            # another for what was allocated on the communication stream, or before a hook that is called elsewhere; the
            # communication stream is, unless the caller's waits for it. torch skips the stream's own.
            tensor.record_stream(caller)
            # In a capture torch would keep such memory from all that is captured later. The event holds it until the
            # caller has waited.
            if stream != caller and not finish and capture is None:
                tensor.record_stream(stream)
        return EventOverlap(event, tuple(tensors) if not finish else None)
