"""A process has one fork server: who is about to fork says which modules and variables it must have started with."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
from collections.abc import Mapping, Sequence

_running: tuple[list[str], dict[str, str]] | None = None


def ensure_fork_server(preload: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Make the fork server one that has imported ``preload`` with ``environment`` on top of this process's variables;
    one that another test started with anything else ends here, and its children live on."""
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
    """End the fork server; the processes that came from it live on."""
    global _running
    multiprocessing.forkserver._forkserver._stop()
    _running = None
