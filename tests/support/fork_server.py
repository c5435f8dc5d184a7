"""A process has one fork server: who is about to fork says which modules and variables it must have started with."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
from collections.abc import Mapping, Sequence

import psutil

_running: tuple[list[str], dict[str, str]] | None = None


def ensure_fork_server(preload: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Make the fork server one that has imported ``preload`` with ``environment`` on top of this process's variables;
    one that another test started with anything else is let go, and its children live on."""
    global _running
    wanted = (list(preload), dict(environment or {}))
    if _running == wanted:
        return
    stop_fork_server()
    server = multiprocessing.forkserver._forkserver
    server.set_forkserver_preload(wanted[0])
    saved = {name: os.environ.get(name) for name in wanted[1]}
    os.environ.update(wanted[1])
    try:
        server.ensure_running()
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    _running = wanted


def stop_fork_server() -> None:
    """Let go of the fork server. It ends here, or with the last process that came from it: each holds it open."""
    global _running
    _running = None
    server = multiprocessing.forkserver._forkserver
    with server._lock:
        pid, address = server._forkserver_pid, server._forkserver_address
        if pid is None:
            return
        os.close(server._forkserver_alive_fd)
        os.unlink(address)
        server._forkserver_pid = server._forkserver_alive_fd = server._forkserver_address = None
    process = psutil.Process(pid)
    # multiprocessing's own `_stop` waits, without end where a pool of ranks lives on
    if not process.children():
        # it may still import
        process.wait(60)
