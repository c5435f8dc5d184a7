"""In which order kernels of one Buffer run, and on which streams: DeepEP's rules.

Without a hook an operation runs on the Buffer's own communication stream, after what the current stream has been given;
the current stream then waits for it, or the caller does (``async_finish``). With a hook both halves run on the stream
that is current when they are launched. Kernels of one Buffer never overlap each other, whatever streams they are on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .handles import EventOverlap

__all__ = ["DeviceLane", "HostLane", "StreamLane"]


class DeviceLane(Protocol):
    """Runs launches in order."""

    @property
    def capturing(self) -> bool:
        """True while the current stream captures a graph."""

    @property
    def stream(self) -> Any:
        """The communication stream, None where there are no streams."""

    def run(
        self, launch: Callable[[], None], tensors: Sequence[torch.Tensor], *, own_stream: bool, finish: bool
    ) -> EventOverlap:
        """Run ``launch``, which launches kernels that use ``tensors``.

        Args:
            own_stream: on the communication stream, after the current one; else on the current stream.
            finish: make the current stream wait for it; else the caller waits for the event.
        """


class HostLane:
    """In Triton's interpreter a kernel is over when its launch returns."""

    capturing = False
    stream = None

    def run(
        self, launch: Callable[[], None], tensors: Sequence[torch.Tensor], *, own_stream: bool, finish: bool
    ) -> EventOverlap:
        """See :class:`DeviceLane`."""
        launch()
        return EventOverlap()


class StreamLane:
    """Streams of a CUDA or ROCm device.

    Args:
        device: theirs.
        capture_of: number of the capture that the stream with a handle takes part in (``DeviceMemory.capture_of``).
    """

    def __init__(self, device: torch.device, capture_of: Callable[[int], int]) -> None:
        self._device = device
        self._capture_of = capture_of
        self._own = torch.cuda.Stream(device, priority=-1)
        self._last: torch.cuda.Event | None = None
        #: The capture that ``_last`` belongs to, None for none.
        self._captured: int | None = None

    @property
    def capturing(self) -> bool:
        """See :class:`DeviceLane`."""
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    @property
    def stream(self) -> Any:
        """See :class:`DeviceLane`."""
        return self._own

    def run(
        self, launch: Callable[[], None], tensors: Sequence[torch.Tensor], *, own_stream: bool, finish: bool
    ) -> EventOverlap:
        """See :class:`DeviceLane`."""
        current = torch.cuda.current_stream(self._device)
        stream = self._own if own_stream else current
        with torch.cuda.device(self._device):
            capture = self._capture_of(current.cuda_stream) if self.capturing else None
            if stream != current:
                stream.wait_stream(current)
            # An event of another capture, or of none, cannot be waited for inside a capture, nor the other way round; a
            # capture starts and a replay runs after what was launched before it.
            if self._last is not None and capture == self._captured:
                stream.wait_event(self._last)
            with torch.cuda.stream(stream):
                launch()
                event = torch.cuda.Event()
                event.record(stream)
            self._last, self._captured = event, capture
            if stream != current and finish:
                current.wait_event(event)
        for tensor in tensors:
            # Memory that is freed is used again in the order of the stream that it was allocated on. The current one
            # is another for what was allocated on the communication stream, or before a hook that is called elsewhere;
            # the communication stream is, unless the current one waits for it. torch skips the stream's own.
            tensor.record_stream(current)
            if stream != current and not finish:
                tensor.record_stream(stream)
        return EventOverlap(event, tuple(tensors) if not finish else None)
