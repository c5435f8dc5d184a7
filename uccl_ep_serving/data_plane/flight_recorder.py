"""What a rank knew when it could not go on, written to a file: engines kill their workers, and then nobody answers.

The counters of :meth:`~uccl_ep_serving.data_plane.runtime.Runtime.stats`, the latest calls, and where each Python
thread stood. ``uccl-ep flight`` reads the files of all ranks beside one another.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from ..errors import ConfigError, TransportError, UcclEpError
from ..native.background import start_thread

__all__ = ["SUFFIX", "FlightRecorder"]

_log = logging.getLogger("uccl_ep_serving")

#: Of the files.
SUFFIX = ".flight.json"
#: Frames of a thread, innermost first.
_FRAMES = 48
#: Files of one Buffer: each epoch has one at most, and the latest are kept.
_MOST_FILES = 16
#: Seconds that anybody waits for the file system, which may hang.
_WAIT_SECONDS = 2.0
#: Sources whose frames are those of the recording.
_OWN = (__file__, str(Path(__file__).with_name("watch.py")))


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
        #: The latest epoch with a record, and what is or will be in its file. Writers: the host, and the thread that
        #: reads the control connections.
        self._epoch = -1
        self._record: dict[str, Any] = {}
        # a signal handler that closes the Buffer may interrupt who holds it
        self._lock = threading.RLock()
        #: Held while a file is written, so that what was found last is written last.
        self._writing = threading.Lock()
        self._files: list[Path] = []
        self._place = _writable(directory)

    def record(self, epoch: int, error: UcclEpError | None = None) -> None:
        """This rank cannot go on in ``epoch``: keep what it knows, unless that was kept before, and the first ``error``
        that an operation raises for it.

        Any thread, the one that answers the peers included: counters are read, and the file is written, by a thread of
        its own. With an error that is waited for, a moment.
        """
        with self._lock:
            if epoch > self._epoch:
                self._epoch, self._record = epoch, {"threads": _threads(), "error": ""}
            elif epoch < self._epoch or error is None or self._record["error"]:
                return
            record = self._record
            if error is not None:
                record["error"] = f"{type(error).__name__}: {error}"
        try:
            writer = start_thread("uccl-ep flight", self._write, epoch, record)
        except TransportError as refused:
            _log.warning("rank %d writes no flight record: %s", self._rank, refused)
            return
        if error is not None:
            writer.join(_WAIT_SECONDS)

    def _write(self, epoch: int, record: dict[str, Any]) -> None:
        path = self._place / f"{self.group}-epoch{epoch}-rank{self._rank}{SUFFIX}"
        name = ""
        with self._writing:
            try:
                if "stats" not in record:
                    record.update(stats=self._stats(), calls=self._calls())
                # of mode 0600: stacks and paths are the user's
                descriptor, name = tempfile.mkstemp(dir=self._place, prefix=".", suffix=SUFFIX)
                with open(descriptor, "wb") as file:
                    file.write(msgspec.json.encode(record))
                os.replace(name, path)
            except Exception as error:
                _log.warning("rank %d writes no flight record: %s", self._rank, error)
                with contextlib.suppress(OSError):
                    os.unlink(name)
                return
            if path not in self._files:
                self._files.append(path)
            if len(self._files) > _MOST_FILES:
                self._files.pop(0).unlink(missing_ok=True)
        _log.warning("rank %d: what it knew of epoch %d when it could not go on is in %s", self._rank, epoch, path)


def _writable(directory: str) -> Path:
    """``directory``, which is there and takes files. Raises ConfigError."""
    found: list[Path | Exception] = []

    def look() -> None:
        try:
            place = Path(directory).expanduser().absolute()
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place):
                found.append(place)
        except (OSError, RuntimeError) as error:  # RuntimeError: no such user
            found.append(error)

    start_thread("uccl-ep flight", look).join(_WAIT_SECONDS)
    answer = found[0] if found else TimeoutError(f"its file system does not answer within {_WAIT_SECONDS:g} s")
    if isinstance(answer, Path):
        return answer
    raise ConfigError(
        f"UCCL_EP_FLIGHT_RECORDER={directory}: {answer}. Next step: a directory that this user may write, or leave it "
        "unset"
    ) from answer


def _threads() -> dict[str, list[str]]:
    """By the name of each Python thread, where it stands, innermost first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, frames = threading.main_thread().ident, sys._current_frames()
    return {
        names.get(ident, "?") if ident == main else f"{names.get(ident, '?')} ({ident})": list(
            itertools.islice(_stack(frame), _FRAMES)
        )
        for ident, frame in frames.items()
    }


def _stack(frame: FrameType | None) -> Iterator[str]:
    while frame is not None and frame.f_code.co_filename in _OWN:
        frame = frame.f_back
    while frame is not None:  # the traceback module would read sources from disk
        yield f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
        frame = frame.f_back
