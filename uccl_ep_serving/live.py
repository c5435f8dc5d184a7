"""Live counters of every open Buffer of a process, served as JSON to processes of the same user.

Engines kill their workers with SIGKILL and segments have no names, so nothing can be read after the fact: each Buffer
answers while it lives, on an abstract Unix socket ``@uccl_ep.<uid>.<pid>.<n>``. Abstract sockets leave no file behind;
the peer's user is checked by the kernel's credentials (SO_PEERCRED), as a file of mode 0600 would.
"""

from __future__ import annotations

import contextlib
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

__all__ = ["LiveServer", "query"]

_log = logging.getLogger("uccl_ep_serving.live")
_numbers = itertools.count()
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_open_servers: weakref.WeakSet[LiveServer] = weakref.WeakSet()


class LiveServer:
    """Answers every connection with ``snapshot()`` as one JSON document, then closes it."""

    def __init__(self, snapshot: Callable[[], dict[str, Any]]) -> None:
        self._snapshot = snapshot
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.name = f"uccl_ep.{os.getuid()}.{os.getpid()}.{next(_numbers)}"
        self._socket.bind("\0" + self.name)
        self._socket.listen(8)
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="uccl-ep live", daemon=True)
        self._thread.start()
        _open_servers.add(self)

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection:
                try:
                    connection.settimeout(2.0)
                    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                    if _CREDENTIALS.unpack(credentials)[1] in (os.getuid(), 0):
                        connection.sendall(json.dumps(self._snapshot()).encode())
                except Exception as error:
                    # Whatever a reader does, the counters keep being served.
                    _log.warning("a reader of the live counters was not served: %s", error)

    def close(self) -> None:
        """Stop serving. May be called twice."""
        self._closed = True
        _open_servers.discard(self)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)


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
            document = b"".join(iter(lambda c=connection: c.recv(65536), b""))  # type: ignore[misc]
        if document:
            result.append(json.loads(document))
    return result


def _close_in_child() -> None:
    for server in list(_open_servers):
        server._socket.close()


os.register_at_fork(after_in_child=_close_in_child)
