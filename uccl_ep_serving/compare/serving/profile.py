"""One load of a server while the engine's own profiler runs."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any

from uccl_ep_serving.compare.serving.engines import Engine
from uccl_ep_serving.compare.serving.traces import share_of_steps
from uccl_ep_serving.demo.server import ServerFailed

__all__ = ["profiled"]

#: An engine may take so long to write its traces.
_SECONDS = 120.0
_POLL_SECONDS = 1.0


def profiled(engine: Engine, url: str, traces: Path, steps: int, load: Callable[[], object]) -> dict[str, Any] | str:
    """Call ``load`` while the profiler of the server at ``url`` runs.

    Args:
        traces: where the server writes its traces; emptied before. steps: recorded at most.

    Returns:
        What :func:`~.traces.share_of_steps` says of them, or why there is nothing.

    Raises:
        ServerFailed: the server does not start its profiler.
    """
    shutil.rmtree(traces, ignore_errors=True)
    traces.mkdir(parents=True)
    _post(url, "start_profile", engine.start_profile(traces, steps))
    load()
    # one that has seen its steps has stopped by itself, and may refuse
    with contextlib.suppress(ServerFailed):
        _post(url, "stop_profile", {})
    deadline = time.monotonic() + _SECONDS
    before: list[tuple[Path, int]] = []
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        now = sorted((path, path.stat().st_size) for path in traces.rglob("*.json*"))
        if now and now == before:
            # half written ones are read again
            with contextlib.suppress(ValueError, EOFError):
                if found := share_of_steps(traces):
                    return found
        before = now
    return f"no trace of a step came to {traces} of this host"


def _post(url: str, route: str, body: Mapping[str, Any]) -> None:
    request = urllib.request.Request(f"{url}/{route}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        urllib.request.urlopen(request, timeout=_SECONDS).read()
    except (OSError, HTTPException) as error:
        raise ServerFailed(f"/{route}: {error}") from error
