"""Run a program within a time, with everything that it starts."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

#: Seconds in which what was killed closes its output.
_CLOSING = 10.0


def run_bounded(
    command: Sequence[str | Path], *, seconds: float, cwd: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in ``cwd`` for ``seconds`` at most. Its stdout holds stderr as well; it has no input.

    Raises :class:`subprocess.TimeoutExpired` with what it printed. By then, and whatever else ends the wait, its
    processes are killed.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except BaseException as error:
        _kill_tree(process.pid)
        output, _ = process.communicate(timeout=_CLOSING)
        if isinstance(error, subprocess.TimeoutExpired):
            error.output = output
        raise
    return subprocess.CompletedProcess(command, process.returncode, output)


def _kill_tree(pid: int) -> None:
    # by parents, not by group: torchrun gives each rank a session of its own
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
