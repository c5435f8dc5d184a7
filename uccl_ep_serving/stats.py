"""What each operation moved and how long it took, and the live socket that serves the counters of a process.

Engines kill their workers with SIGKILL and segments have no names, so nothing can be read after the fact: each Buffer
answers while it lives, on an abstract Unix socket ``@uccl_ep.<uid>.<pid>.<n>``. Abstract sockets leave no file behind;
the peer's user is checked by the kernel's credentials (SO_PEERCRED), as a file of mode 0600 would.
"""

from __future__ import annotations

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
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import TransportError
from .native.background import start_thread

__all__ = ["OPERATIONS", "LiveServer", "OperationLog", "query", "serving_processes"]

OPERATIONS = ("ll_dispatch", "ll_combine", "normal_dispatch", "normal_combine")

#: Durations kept per operation for the percentiles; older ones are overwritten.
_KEPT = 8192

_log = logging.getLogger("uccl_ep_serving.stats")
_numbers = itertools.count()
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_open_servers: weakref.WeakSet[LiveServer] = weakref.WeakSet()


class OperationLog:
    """Counters per operation. One host thread records; any thread may take a snapshot."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {op: {"count": 0, "tokens": 0, "rows": 0} for op in OPERATIONS}
        self._total = dict.fromkeys(OPERATIONS, 0)
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
        counts["count"] += 1
        counts["tokens"] += tokens
        counts["rows"] += rows
        for name, value in extra.items():
            counts[name] = counts.get(name, 0) + value

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Counts, ``total_us`` of all calls, ``p50_us`` and ``p99_us`` of the latest, by operation (microseconds)."""
        result: dict[str, dict[str, float]] = {}
        for op, counts in self._counts.items():
            kept = self._durations[op][: min(counts["count"], _KEPT)]
            p50, p99 = np.percentile(kept, (50, 99)) / 1000 if len(kept) else (0.0, 0.0)
            times = {"total_us": self._total[op] / 1000, "p50_us": float(p50), "p99_us": float(p99)}
            result[op] = {**counts, **{name: round(value, 1) for name, value in times.items()}}
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
            name = f"uccl_ep.{os.getuid()}.{os.getpid()}.{next(_numbers)}"
            try:
                self._socket.bind("\0" + name)
                return name
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                # out of descriptors, for example: the counters are needed most when something is wrong
                _log.warning("the live counters are not served for a second: %s", error)
                self._closing.wait(1.0)
                continue
            with connection:
                try:
                    connection.settimeout(2.0)
                    if _credentials_of(connection)[1] in (os.getuid(), 0):
                        connection.sendall(json.dumps(self._snapshot()).encode())
                except Exception as error:
                    # Whatever a reader does, the counters keep being served.
                    _log.warning("a reader of the live counters was not served: %s", error)

    def close(self) -> None:
        """Stop serving. May be called twice."""
        self._closing.set()
        _open_servers.discard(self)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)


def serving_processes() -> list[int]:
    """Processes of this user that have an open Buffer in this network namespace, in ascending order."""
    found = re.findall(rf"@uccl_ep\.{os.getuid()}\.(\d+)\.\d+$", Path("/proc/net/unix").read_text(), re.MULTILINE)
    return sorted({int(pid) for pid in found})


def query(pid: int, timeout: float = 2.0) -> list[dict[str, Any]]:
    """Counters of all open Buffers of process ``pid`` in this network namespace, oldest first; [] when it has none.

    Raises OSError when a socket is there but does not answer within ``timeout`` seconds.
    """
    pattern = re.compile(rf"@(uccl_ep\.\d+\.{pid}\.(\d+))$", re.MULTILINE)
    names = dict(pattern.findall(Path("/proc/net/unix").read_text()))
    result = []
    for name in sorted(names, key=lambda one: int(names[one])):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect("\0" + name)
            if _credentials_of(connection)[0] != pid:
                continue  # another process took the name
            document = b"".join(iter(lambda c=connection: c.recv(65536), b""))  # type: ignore[misc]
        if document:
            result.append(json.loads(document))
    return result


def _close_in_child() -> None:
    for server in list(_open_servers):
        server._socket.close()


os.register_at_fork(after_in_child=_close_in_child)
