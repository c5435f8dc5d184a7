"""What a rank knew when it could not go on, written to a file: engines kill their workers, and then nobody answers.

The counters of :meth:`~uccl_ep_serving.data_plane.runtime.Runtime.stats`, the latest calls, and where each Python
thread stands. ``uccl-ep flight`` reads the files of all ranks beside one another.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ..errors import ConfigError, TransportError, UcclEpError
from ..native.background import start_thread

__all__ = ["SUFFIX", "FlightRecorder"]

_log = logging.getLogger("uccl_ep_serving")

#: Of the files.
SUFFIX = ".flight.json"
#: Frames of a thread, innermost first.
_FRAMES = 48
#: Files of one Buffer: an epoch has one at most.
_MOST_FILES = 16
#: Seconds that a call which fails waits for its file; a file system may hang.
_WRITE_SECONDS = 2.0


class FlightRecorder:
    """Writes one file an epoch, when this rank first cannot go on in it.

    Args:
        directory: for the files of all ranks.
        rank: this one.
        stats: counters of this rank.
        calls: its latest operations, for people to read.

    Attributes:
        group: name of the group, the same on all ranks. Writer: the host, before the first operation.

    Raises:
        ConfigError: the directory cannot be made, or written.
    """

    def __init__(
        self, directory: str, rank: int, stats: Callable[[], dict[str, Any]], calls: Callable[[], list[Any]]
    ) -> None:
        self.group = ""
        self._rank = rank
        self._stats = stats
        self._calls = calls
        #: By epoch, what is or will be in its file. Writers: the host, and the thread that reads the control
        #: connections. No lock: the counters are read under locks of their own.
        self._records: dict[int, dict[str, Any]] = {}
        #: Held while a file is written, so that what was found last is written last.
        self._writing = threading.Lock()
        self._place = Path(directory).expanduser()
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._place):
                pass
        except OSError as error:
            raise ConfigError(
                f"UCCL_EP_FLIGHT_RECORDER={directory}: {error}. Next step: a directory that this user may write, or "
                "leave it unset"
            ) from error

    def record(self, epoch: int, error: UcclEpError | None = None) -> None:
        """This rank cannot go on in ``epoch``: keep what it knows, unless that was kept before, and the first ``error``
        that an operation raises for it. Any thread. With an error the file is there on return, unless writing takes
        long."""
        found = self._records.get(epoch)
        if found is None and len(self._records) < _MOST_FILES:
            knows = {"stats": self._stats(), "calls": self._calls(), "threads": _threads(), "error": ""}
            found = self._records.setdefault(epoch, knows)
        elif found is None or error is None or found["error"]:
            return
        if error is not None:
            found["error"] = f"{type(error).__name__}: {error}"
        try:
            writer = start_thread("uccl-ep flight", self._write, epoch)
        except TransportError as refused:
            _log.warning("rank %d writes no flight record: %s", self._rank, refused)
            return
        if error is not None:
            writer.join(_WRITE_SECONDS)

    def _write(self, epoch: int) -> None:
        path = self._place / f"{self.group}-epoch{epoch}-rank{self._rank}{SUFFIX}"
        name = ""
        with self._writing:
            text = json.dumps(self._records[epoch])
            try:
                # of mode 0600: stacks and paths are the user's
                descriptor, name = tempfile.mkstemp(dir=self._place, prefix=".", suffix=SUFFIX)
                with open(descriptor, "w") as file:
                    file.write(text)
                os.replace(name, path)
            except OSError as error:
                _log.warning("rank %d writes no flight record: %s", self._rank, error)
                with contextlib.suppress(OSError):
                    os.unlink(name)
                return
        _log.warning("rank %d: what it knew of epoch %d when it could not go on is in %s", self._rank, epoch, path)


def _threads() -> dict[str, list[str]]:
    """By the name of each Python thread, where it stands, innermost first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, str(ident)): list(itertools.islice(_stack(frame), _FRAMES))
        for ident, frame in sys._current_frames().items()
    }


def _stack(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:  # the traceback module would read sources from disk
        yield f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
        frame = frame.f_back
