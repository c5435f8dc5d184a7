"""Recording of what dispatches are given, off their path: an operation hands over a copy, a thread counts and writes.

Everything is bounded: copies that wait (else the dispatch is left out, which is counted), what the thread holds, and
the bytes of all files. Nothing here is ever an error of an operation: what goes wrong is one warning, and recording
ends. Engines kill their workers, so files are written while they serve: what is lost is that of the last seconds.

The thread calls nothing of CUDA: a call of it from another thread would end the capture of a graph. Copies from a GPU
are looked at by later dispatches.
"""

from __future__ import annotations

import collections
import itertools
import logging
import os
import queue
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..handles import EventOverlap, wait_for
from ..native.background import start_thread
from .trace import Ids, Whole, id_dtype, write_histogram, write_whole

__all__ = ["Recorder"]

_log = logging.getLogger("uccl_ep_serving")
_numbers = itertools.count(1)

#: Bytes of copies that wait: for the GPU, or for the thread.
_MOST_WAITING = 32 << 20
#: Bytes of whole dispatches in a file; so many are held.
_FILE_BYTES = 4 << 20
#: What a whole dispatch takes beside its ids.
_RECORD_BYTES = 256
#: Bytes of all files of a recorder.
_MOST_BYTES = 256 << 20
#: What has been recorded is written at the latest after so many seconds.
_WRITE_SECONDS = 5.0
_CLOSE_SECONDS = 5.0
#: 2^64 divided by the golden ratio: multiples of it spread evenly, and in step with no other period.
_GOLDEN, _WORD = 0x9E3779B97F4A7C15, 1 << 64


class _Taken(NamedTuple):
    """A copy of what a dispatch was given. ``copied``: what ``ids`` are valid after, None for at once."""

    experts: int
    layer: int
    step: int
    mode: int
    ids: torch.Tensor
    copied: torch.cuda.Event | None


class _Part:
    """What one file will hold; ``written``: its bytes on the disk."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.records: list[Whole] = []
        self.counts: dict[int, npt.NDArray[np.int64]] = {}
        self.dispatches: collections.Counter[int] = collections.Counter()
        self.held = 0
        self.written = 0
        self.dirty = False


class Recorder:
    """Records dispatches of one Buffer. One host thread at a time calls :meth:`record`.

    Args:
        directory: where files go; created where it is missing.
        every: of so many dispatches of a layer one is recorded, of all layers and ranks the same ones.
        whole: ids of every token; else how often each expert was chosen.
        rank, ranks: of the group.

    Attributes:
        dropped: dispatches that were left out because copies had piled up.

    Raises:
        OSError, TransportError: the directory cannot be written, or there is no thread.
    """

    def __init__(self, directory: Path, *, every: int, whole: bool, rank: int, ranks: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass  # else a directory that cannot be written would show with the first file
        self._directory, self._whole, self._rank, self._ranks = directory, whole, rank, ranks
        now = time.strftime("%Y%m%d-%H%M%S")
        self._name = f"{now}-rank{rank}of{ranks}-pid{os.getpid()}-{next(_numbers)}"
        self._every = every
        self._seen: collections.Counter[int] = collections.Counter()
        self.dropped = 0
        self._ended = False
        self._said_capture = False
        #: Bytes given to the thread and taken by it: each is changed by one thread only.
        self._given = self._taken = 0
        self._on_gpu: collections.deque[_Taken] = collections.deque()
        self._queue: queue.SimpleQueue[_Taken | None] = queue.SimpleQueue()
        self._parts: dict[tuple[int, int], _Part] = {}
        self._finished_bytes = 0
        self._thread = start_thread("uccl-ep trace", self._serve)

    # -- in the operation's thread --------------------------------------------------------------------------------

    def record(
        self, layer: int, mode: int, ids: torch.Tensor, experts: int, previous: EventOverlap | None = None
    ) -> None:
        """Take a copy, without waiting for a device or the disk. Raises nothing.

        Args:
            layer: of the model, or ``trace.UNKNOWN_LAYER``.
            mode: index in ``trace.MODES``.
            ids: int64 [T, K] as dispatch was given them.
            experts: E.
            previous: what ``ids`` are ready after, if that is not the current stream.
        """
        if self._ended:
            return
        try:
            self._record(layer, mode, ids, experts, previous)
        except Exception as error:  # the operation has succeeded, and shall
            self._end(f"a dispatch could not be recorded ({type(error).__name__}: {error})")

    def _record(self, layer: int, mode: int, ids: torch.Tensor, experts: int, previous: EventOverlap | None) -> None:
        if ids.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                self._say_capture()
                return
            self._hand_over()
        step = self._seen[layer]
        self._seen[layer] += 1
        if step * _GOLDEN % _WORD >= _WORD // self._every:
            return
        if self._given - self._taken + ids.nbytes > _MOST_WAITING:
            self.dropped += 1
            return
        self._given += ids.nbytes
        if not ids.is_cuda:
            self._queue.put(_Taken(experts, layer, step, mode, ids.clone(), None))
            return
        with torch.cuda.device(ids.device):
            wait_for(previous)
            host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            host.copy_(ids, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._on_gpu.append(_Taken(experts, layer, step, mode, host, copied))

    def _hand_over(self) -> None:
        """Give the thread what the GPU has copied by now. Pinned memory is given back here, outside of any capture."""
        while self._on_gpu and (one := self._on_gpu[0]).copied is not None and one.copied.query():
            self._on_gpu.popleft()
            plain = torch.empty(one.ids.shape, dtype=one.ids.dtype)
            self._queue.put(one._replace(ids=plain.copy_(one.ids), copied=None))

    def _say_capture(self) -> None:
        if not self._said_capture:
            self._said_capture = True
            _log.warning(
                "UCCL_EP_TRACE: dispatches that are captured in CUDA graphs are not recorded, nor are replays, which "
                "call nothing of ours. Next step: to record them, start without graphs (SGLang: "
                "--cuda-graph-backend-decode disabled, vLLM: --enforce-eager)"
            )

    def close(self) -> None:
        """Write what is there, within some seconds. May be called twice."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        try:
            while self._on_gpu and not self._ended and time.monotonic() < deadline:
                self._hand_over()
                time.sleep(0.001)
        except RuntimeError as error:
            _log.warning("UCCL_EP_TRACE: the last dispatches are not recorded: the GPU has failed (%s)", error)
        self._on_gpu.clear()
        self._queue.put(None)
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self.dropped:
            _log.warning("UCCL_EP_TRACE: %d dispatches were left out, as copies had piled up", self.dropped)
            self.dropped = 0

    # -- in the recorder's thread ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            written, open_ = time.monotonic(), True
            while open_ and not self._ended:
                due = written + _WRITE_SECONDS - time.monotonic()
                try:
                    one = self._queue.get(timeout=max(due, 0.0))
                except queue.Empty:
                    pass
                else:
                    open_ = one is not None
                    if one is not None:
                        self._take(one)
                if not open_ or time.monotonic() >= written + _WRITE_SECONDS:
                    for key in list(self._parts):
                        self._write(key)
                    written = time.monotonic()
        except Exception as error:  # a full disk, above all
            self._end(f"{self._directory} takes no more ({type(error).__name__}: {error})")
        self._parts.clear()

    def _take(self, one: _Taken) -> None:
        self._taken += one.ids.nbytes
        given = one.ids.numpy()
        # a GPU reports ids out of range with the next operation, and counts them as none
        ids: Ids = np.where((given < 0) | (given >= one.experts), -1, given).astype(id_dtype(one.experts))
        key = one.experts, ids.shape[1]
        part = self._parts.setdefault(key, _Part(1))
        part.dirty = True
        if self._whole:
            part.records.append(Whole(one.layer, one.step, one.mode, ids))
            part.held += ids.nbytes + _RECORD_BYTES
            if part.held >= _FILE_BYTES:
                self._write(key)
                self._finished_bytes += part.written
                self._parts[key] = _Part(part.number + 1)
        else:
            counts = np.bincount(ids[ids >= 0], minlength=one.experts)
            part.counts[one.layer] = part.counts.get(one.layer, 0) + counts
            part.dispatches[one.layer] += 1

    def _write(self, key: tuple[int, int]) -> None:
        """Write what the file of a shape holds, in the place of what it held before."""
        part = self._parts[key]
        if not part.dirty:
            return
        experts, topk = key
        path = self._directory / f"{self._name}-e{experts}k{topk}-{part.number:04}.npz"
        if self._whole:
            part.written = write_whole(
                path, rank=self._rank, ranks=self._ranks, experts=experts, topk=topk, records=part.records
            )
        else:
            part.written = write_histogram(
                path,
                rank=self._rank,
                ranks=self._ranks,
                experts=experts,
                topk=topk,
                counts=part.counts,
                dispatches=part.dispatches,
            )
        part.dirty = False
        if self._finished_bytes + sum(one.written for one in self._parts.values()) >= _MOST_BYTES:
            self._end(f"{self._directory} has {_MOST_BYTES >> 20} MiB of this rank, the most that is recorded")

    def _end(self, why: str) -> None:
        if not self._ended:
            self._ended = True
            _log.warning(
                "UCCL_EP_TRACE: %s: recording ends here, and operations go on. Next step: make room or another "
                "directory; a larger UCCL_EP_TRACE_EVERY, or UCCL_EP_TRACE_WHAT=histogram, takes less",
                why,
            )


def open_recorder(directory: str, *, every: int, whole: bool, rank: int, ranks: int) -> Recorder | None:
    """A recorder, or None, with one warning, where there can be none."""
    try:
        return Recorder(Path(directory).expanduser(), every=every, whole=whole, rank=rank, ranks=ranks)
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user; TransportError is one
        _log.warning("UCCL_EP_TRACE=%s: nothing is recorded: %s", directory, error)
        return None
