"""What each operation moved and how long it took, and the live socket that serves the counters of a process.

Engines kill their workers with SIGKILL and segments have no names, so nothing can be read after the fact: each Buffer
answers while it lives, on an abstract Unix socket ``@uccl_ep.<uid>.<pid>.<n>``. Abstract sockets leave no file behind;
each side checks the other's user by the kernel's credentials (SO_PEERCRED), as a file of mode 0600 would.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import json
import logging
import os
import re
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import TransportError
from .native.background import start_thread

__all__ = ["OPERATIONS", "LiveServer", "OperationLog", "Reading", "Served", "query", "read", "served"]

OPERATIONS = ("ll_dispatch", "ll_combine", "normal_dispatch", "normal_combine")

#: Durations kept per operation for the percentiles; older ones are overwritten.
_KEPT = 8192
#: Of the histogram of durations: bucket b counts calls of less than 2**b us and not less than half of it, bucket 0
#: those shorter than 1 us, the last one also longer ones.
_BUCKETS = 26
#: Calls of all operations that are kept one by one.
_LATEST = 256

#: How the names of the sockets begin.
_NAME = "uccl_ep"
#: A line of /proc/net/unix: flags, inode, then user, pid and number of the name. And the flag of those that listen.
_SOCKETS = re.compile(rb"^\S+ \S+ \S+ (\S+) \S+ \S+ +(\d+) @uccl_ep\.(\d{1,10})\.(\d{1,10})\.(\d{1,10})$", re.MULTILINE)
_ACCEPTS = 0x10000
#: More than the counters of thousands of ranks take.
_MOST_BYTES = 64 << 20

_log = logging.getLogger("uccl_ep_serving.stats")
_numbers = itertools.count()
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_open_servers: weakref.WeakSet[LiveServer] = weakref.WeakSet()


class OperationLog:
    """Counters per operation. One host thread records; any thread may take a snapshot."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {op: {"count": 0, "tokens": 0, "rows": 0} for op in OPERATIONS}
        self._total = dict.fromkeys(OPERATIONS, 0)
        self._histogram = {op: [0] * _BUCKETS for op in OPERATIONS}
        self._latest: collections.deque[tuple[int, float, str, int, float]] = collections.deque(maxlen=_LATEST)
        self._ended = 0
        self._durations: dict[str, npt.NDArray[np.int64]] = {op: np.zeros(_KEPT, dtype=np.int64) for op in OPERATIONS}

    def record(self, op: str, tokens: int, rows: int, nanoseconds: int, **extra: int) -> None:
        """Count one call of ``op``.

        Args:
            op: one of OPERATIONS.
            tokens: tokens of this rank that the call was about.
            rows: rows that this rank sent to other ranks.
            nanoseconds: time inside the call (send and recv part together).
            extra: further counts to add up, for example ``expert_rows`` or ``reduced``.
        """
        counts = self._counts[op]
        self._durations[op][counts["count"] % _KEPT] = nanoseconds
        self._total[op] += nanoseconds
        self._histogram[op][min((nanoseconds // 1000).bit_length(), _BUCKETS - 1)] += 1
        self._latest.append((self._ended, time.time(), op, tokens, nanoseconds / 1e9))
        self._ended += 1
        counts["count"] += 1
        counts["tokens"] += tokens
        counts["rows"] += rows
        for name, value in extra.items():
            counts[name] = counts.get(name, 0) + value

    def latest(self) -> list[tuple[int, float, str, int, float]]:
        """The latest calls, newest last: number of each, when it ended (seconds since 1970), its operation, its tokens,
        and seconds inside it."""
        return list(self._latest.copy())

    def durations(self) -> dict[str, list[int]]:
        """By operation that was called: the calls in each of :data:`_BUCKETS`."""
        return {op: list(buckets) for op, buckets in self._histogram.items() if self._counts[op]["count"]}

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Counts, ``total_us`` of all calls, ``p50_us`` and ``p99_us`` of the latest, by operation (microseconds)."""
        result: dict[str, dict[str, float]] = {}
        for op, counts in self._counts.items():
            kept = self._durations[op][: min(counts["count"], _KEPT)]
            # np.percentile imports a part of NumPy when it is first called, for which a descriptor may be missing
            ordered = np.sort(kept) if len(kept) else np.zeros(1, dtype=np.int64)
            p50, p99 = (int(ordered[round(share * (len(ordered) - 1))]) for share in (0.5, 0.99))
            times = {"total_us": self._total[op], "p50_us": p50, "p99_us": p99}
            result[op] = {**counts, **{name: round(value / 1000, 1) for name, value in times.items()}}
        return result


def _credentials_of(connection: socket.socket) -> tuple[int, int, int]:
    """(process id, user, group) of who connected, or of who listens where we connected; by the kernel."""
    options = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, group = _CREDENTIALS.unpack(options)
    return pid, user, group


class LiveServer:
    """Answers every connection with ``snapshot()`` as one JSON document, then closes it.

    Raises:
        TransportError: the system refuses a socket or a thread.
    """

    def __init__(self, snapshot: Callable[[], dict[str, Any]]) -> None:
        self._snapshot = snapshot
        self._closing = threading.Event()
        with contextlib.ExitStack() as undo:
            try:
                #: A descriptor. Writer: the thread that serves, until it has ended.
                self._spare: IO[bytes] | None = undo.enter_context(open(os.devnull, "rb"))
                self._socket = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                self.name = self._bind()
                self._socket.listen(8)
            except OSError as error:
                raise TransportError(
                    f"no socket for the live counters: {error}. Next step: raise the limit on open files (ulimit -n)",
                    device="live counters",
                    errno=error.errno or 0,
                ) from error
            self._thread = start_thread("uccl-ep live", self._serve)
            undo.pop_all()
        _open_servers.add(self)

    def _bind(self) -> str:
        """Containers that share a network namespace but not their process ids may want the same name: take the next."""
        while True:
            name = Served(os.getuid(), os.getpid(), next(_numbers)).name
            try:
                self._socket.bind("\0" + name)
                return name
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise

    def _accept(self) -> socket.socket:
        """Wait for a reader. Where there is no descriptor for it, one that was kept gives its place: the counters are
        needed most when something is wrong."""
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = open(os.devnull, "rb")  # noqa: SIM115
        try:
            return self._socket.accept()[0]
        except OSError as error:
            if error.errno != errno.EMFILE or self._spare is None:
                raise
        self._spare.close()
        self._spare = None
        return self._socket.accept()[0]

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                connection = self._accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                _log.warning("the live counters are not served for a second: %s", error)
                self._closing.wait(1.0)
                continue
            with connection:
                try:
                    connection.settimeout(2.0)
                    if _credentials_of(connection)[1] in (os.getuid(), 0):
                        connection.sendall(json.dumps(self._snapshot()).encode())
                except OSError as error:  # the reader has gone
                    _log.debug("a reader of the live counters was not served: %s", error)
                except Exception as error:
                    _log.warning("the live counters could not be read", exc_info=error)

    def close(self) -> None:
        """Stop serving. May be called twice."""
        self._closing.set()
        _open_servers.discard(self)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        if self._spare is not None:
            self._spare.close()


class Served(NamedTuple):
    """An open Buffer that serves its counters, by the name of its socket.

    Attributes:
        user, pid: of its process, as that sees itself; a container may count processes from 1.
        number: of the Buffer in its process; a later one has a higher one.
    """

    user: int
    pid: int
    number: int

    @property
    def name(self) -> str:
        """Of the abstract socket."""
        return f"{_NAME}.{self.user}.{self.pid}.{self.number}"


class Reading(NamedTuple):
    """What a Buffer answered.

    Attributes:
        pid: of its process as this one counts; 0 where that is not to be seen from here.
        counters: its ``Buffer.stats()``, and its latest ``calls``; None when it did not answer in time.
        strange: why its answer is none that this version understands, where it is none; then there are no counters.
    """

    pid: int
    counters: dict[str, Any] | None
    strange: str = ""


def served() -> list[Served]:
    """Open Buffers of this user in this network namespace, those of all users for root; oldest first of a process."""
    return sorted(one for one in _listening() if os.getuid() in (0, one.user))


def _listening() -> dict[Served, int]:
    """Sockets of that name that listen, whosever they are, and their inodes."""
    found = {}
    # names of others are any bytes
    for line in _SOCKETS.finditer(Path("/proc/net/unix").read_bytes()):
        flags, inode, *words = line.groups()
        if int(flags, 16) & _ACCEPTS:
            found[Served(*map(int, words))] = int(inode)
    return found


def _is_its_own(one: Served) -> bool:
    """Whether the process of that name has the socket: where nobody accepts, nobody else says whose it is."""
    link = f"socket:[{_listening().get(one)}]"
    try:
        return any(os.readlink(entry.path) == link for entry in os.scandir(f"/proc/{one.pid}/fd"))
    except OSError:
        return False


def read(one: Served, timeout: float = 2.0) -> Reading | None:
    """Counters of a Buffer, within ``timeout`` seconds; None when it has closed, when another user has its name, or
    when it answers what no Buffer does."""
    pid, received, size, until = 0, [], 0, time.monotonic() + timeout
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect("\0" + one.name)
            pid, user, _ = _credentials_of(connection)
            if user != one.user:
                return None
            while part := connection.recv(1 << 20):
                received.append(part)
                size += len(part)
                left = until - time.monotonic()
                if size > _MOST_BYTES or left <= 0:
                    return Reading(pid, None)
                connection.settimeout(left)
        document = json.loads(b"".join(received))
        return Reading(pid, document) if isinstance(document, dict) else None
    except (TimeoutError, BlockingIOError):  # the latter where too many wait for an answer already
        return Reading(pid or one.pid, None) if pid or _is_its_own(one) else None
    except (OSError, ValueError, RecursionError):
        return None  # it is about to close, or no Buffer


def query(pid: int, timeout: float = 2.0) -> list[dict[str, Any]]:
    """Counters of all open Buffers of process ``pid`` in this network namespace, oldest first; [] when it has none.

    Raises TimeoutError when one does not answer within ``timeout`` seconds.
    """
    found = []
    for one in served():
        if one.pid != pid or (reading := read(one, timeout)) is None or reading.pid != pid:
            continue  # closed, or of another process, which counts from 1 as well
        if reading.counters is None:
            raise TimeoutError(f"process {pid} does not say its live counters within {timeout:g} s")
        found.append(reading.counters)
    return found


def _close_in_child() -> None:
    for server in list(_open_servers):
        server._socket.close()
        if server._spare is not None:
            server._spare.close()


os.register_at_fork(after_in_child=_close_in_child)
