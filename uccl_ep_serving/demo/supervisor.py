"""Guardian of one demo server: a small process of its own session, so that nothing outlives the demo.

The demo starts it as a script, ``python -I supervisor.py SPEC``; it imports the standard library only. It starts
the server, with its own environment, then waits on three things: the pipe from the demo, the server, and signals.
Whatever happens to the demo, SIGKILL included, closes the pipe; the guardian then kills the server's whole process tree
and removes what the server left in shared memory. It relies on no exit handler of anybody:

* orphans of the server are re-parented to the guardian (``PR_SET_CHILD_SUBREAPER``), so the tree stays whole;
* should the guardian itself be killed, the server's main process dies with it (``PR_SET_PDEATHSIG``), most of the
  engine's workers follow in the same way, and the demo kills the others and does the cleaning (:func:`clean`);
* should both be killed at once, the next demo finds the run directory without an owner and does it (``remains.py``).

Commands on the pipe, one a line: ``stop`` (stop, keep the run directory), ``detach`` (from now on the pipe
does not matter, SIGTERM stops). Closing the pipe stops and removes the run directory. Answers on stdout are
JSON lines: ``{"pid": ...}`` at start, ``{"exit": code}`` when the server ends by itself, and last
``{"killed": n, "removed": [...]}``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import fnmatch
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["LEFTOVERS", "LOCK", "clean", "snapshot"]

LEFTOVERS = (
    "/dev/shm/sgl_shm_mq_*",  # SGLang's message queues between scheduler ranks
    "/dev/shm/sem.mp-*",  # semaphores of multiprocessing
    "/dev/shm/sglang_loads_*",  # SGLang's load snapshots
    "/dev/shm/psm_*",  # shared memory of multiprocessing: vLLM's message queues
    "/tmp/sglang_load_collector_*.sock",  # and the socket they are collected on
)
"""What a SIGKILLed engine leaves behind; only files that its own server made are ever removed."""

LOCK = "alive.lock"
"""File in the run directory on which the demo and its guardians hold a shared lock as long as they live."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_KILL_SECONDS = 15.0
_POLL_SECONDS = 0.05
#: How often the guardian looks whether the server still runs.
_LOOK_SECONDS = 0.1


def snapshot(patterns: Iterable[str] = LEFTOVERS) -> list[str]:
    """Paths that match ``patterns`` now and belong to this user."""
    return sorted(_matching(patterns))


def clean(before: Iterable[str], patterns: Iterable[str] = LEFTOVERS) -> list[str]:
    """Remove what matches ``patterns``, was not there ``before``, is ours, and no living process uses.

    Args:
        before: the :func:`snapshot` taken before the server was started.
        patterns: glob patterns, wildcards in the last component only.

    Returns:
        The paths removed.
    """
    candidates = set(_matching(patterns)) - set(before)
    if not candidates:
        return []
    candidates -= _in_use(candidates)
    removed = []
    for path in sorted(candidates):
        with contextlib.suppress(OSError):
            os.unlink(path)
            removed.append(path)
    return removed


def _matching(patterns: Iterable[str]) -> Iterator[str]:
    for pattern in patterns:
        directory, name = os.path.split(pattern)
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                if fnmatch.fnmatchcase(entry.name, name):
                    with contextlib.suppress(OSError):
                        if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                            yield entry.path


def _in_use(paths: set[str]) -> set[str]:
    """Those of ``paths`` that a living process maps, or that a live Unix socket is bound to.

    Mappings are compared by inode: glibc maps a named semaphore under a temporary name before it gets its own.
    """
    inodes: dict[str, str] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            inodes[str(os.stat(path).st_ino)] = path
    used: set[str] = set()
    for pid in _processes():
        with contextlib.suppress(OSError):  # gone, or of another user
            for line in Path("/proc", pid, "maps").read_text(errors="replace").splitlines():
                inode = line.split(maxsplit=5)[4]  # address, permissions, offset, device, inode, path
                if inode in inodes:
                    used.add(inodes[inode])
    with contextlib.suppress(OSError):
        sockets = Path("/proc/net/unix").read_text(errors="replace")
        used.update(path for path in paths if path in sockets)
    return used


def _processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def _descendants(root: int) -> list[int]:
    """Every process below ``root``, zombies left out."""
    children: dict[int, list[int]] = {}
    for pid in _processes():
        try:
            fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(pid))
    found, pending = [], [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def _kill_tree() -> int:
    """SIGKILL every descendant until none is left; returns how many there were."""
    killed: set[int] = set()
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        alive = _descendants(os.getpid())
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(alive)
        # reap too: the dead stay visible until somebody does, and re-parented ones are ours to reap
        reaped_all = False
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            reaped_all = True
        if reaped_all and not alive:
            break
        time.sleep(_POLL_SECONDS)
    return len(killed)


def _say(**message: Any) -> None:
    with contextlib.suppress(OSError):  # nobody may be reading any more
        os.write(1, json.dumps(message).encode() + b"\n")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _start(spec: dict[str, Any]) -> subprocess.Popen[bytes]:
    guardian = os.getpid()

    def die_with_guardian() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:  # it died before the line above
            os._exit(1)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    with open(spec["log"], "ab") as log:
        return subprocess.Popen(
            spec["command"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=spec["directory"],
            preexec_fn=die_with_guardian,
        )


def _ask_to_end(server: subprocess.Popen[bytes], seconds: float) -> None:
    """SIGTERM, and time to follow it: a launcher (srun, mpirun) then ends what it has started on other hosts."""
    if seconds and server.poll() is None:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(seconds)


def _watch(server: subprocess.Popen[bytes], wakeup: int) -> bool:
    """Wait until there is a reason to stop; returns whether to remove the run directory too."""
    watched = [0, wakeup]
    attached, runs = True, True
    while True:
        # looked at, not waited for: not every Python, and not every sandbox, has pidfds
        ready, _, _ = select.select(watched, [], [], _LOOK_SECONDS if runs else None)
        if runs and server.poll() is not None:
            runs = False
            _say(exit=server.returncode)
        if not (runs or attached):
            return True
        if wakeup in ready:
            return True
        if 0 in ready:
            words = os.read(0, 4096).decode().split()
            if "stop" in words:
                return False
            if "detach" in words:
                attached = False
                watched.remove(0)
            elif not words:
                return True


def main() -> None:
    """Run one server; the specification is the JSON object in ``sys.argv[1]``."""
    spec = json.loads(sys.argv[1])
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wakeup, waker = os.pipe()
    os.set_blocking(waker, False)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda _number, _frame: os.write(waker, b"x"))
    with contextlib.suppress(OSError):  # a run directory of a test need not have one
        fcntl.flock(os.open(Path(spec["run_directory"], LOCK), os.O_RDWR | os.O_CLOEXEC), fcntl.LOCK_SH)
    forget_directory = True
    try:
        server = _start(spec)
        _say(pid=server.pid)
        forget_directory = _watch(server, wakeup)
        _ask_to_end(server, spec.get("grace", 0.0))
    finally:
        killed = _kill_tree()
        removed = clean(spec["before"])
        if forget_directory:
            shutil.rmtree(spec["run_directory"], ignore_errors=True)
        _say(killed=killed, removed=removed)


if __name__ == "__main__":
    main()
