"""A check that an engine needs before it starts: once on a host, by whoever comes first, in a process of its own."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from .machine import Machine, environment_of_a_check
from .stamp import COMMAND, Record, State, directory, look

__all__ = ["SECONDS", "checked", "most_seconds"]

_log = logging.getLogger("uccl_ep_serving")

#: How long a check may take (the default of the command), and what its process needs besides.
SECONDS, _PROCESS_SECONDS = 120.0, 45.0
#: A check that another process runs is looked at this often.
_LOOK_SECONDS = 0.2


def most_seconds() -> float:
    """That a check and its process may take."""
    return SECONDS + _PROCESS_SECONDS


def checked(machine: Machine) -> Record:
    """What is known of ``machine`` once this host has checked it: passed, failed, or why nothing could be found out."""
    kept = directory()
    if kept is None:
        step = "set UCCL_EP_CACHE_DIR to a directory that this user can write and nobody else"
        return Record(State.UNKNOWN, f"what a check finds could not be kept anywhere: {step}")
    # the home may be one of several hosts, which need not wait for each other
    with _only_one(os.path.join(kept, f".{os.uname().nodename}.lock")) as held:
        record = look(machine)
        if record.state is not State.UNKNOWN:
            return record
        if not held:
            waited = most_seconds()
            return Record(State.UNKNOWN, f"another process of this host has been checking for more than {waited:.0f} s")
        _log.warning(
            "uccl_ep: %s. Running `%s` before the engine starts: once on this host, %.0f s at most",
            record.why,
            COMMAND,
            SECONDS,
        )
        said = _run()
        record = look(machine)
        if record.state is State.UNKNOWN:
            return Record(State.UNKNOWN, f"`{COMMAND}` left no record that fits ({record.why}); it said: {said}")
        return record


def _run() -> str:
    """The last words of the command, which keeps what it finds."""
    command = [sys.executable, "-m", "uccl_ep_serving.cli.main", *COMMAND.split()[1:]]
    # a file and no pipe, which a process that the driver holds would keep open
    with tempfile.TemporaryFile("w+") as said:
        try:
            status = subprocess.run(
                command,
                env=environment_of_a_check(),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                timeout=most_seconds(),
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"nothing within {most_seconds():.0f} s, and was ended"
        except OSError as error:
            return str(error)
        said.seek(0)
        return said.read().strip()[-500:] or f"nothing (status {status})"


@contextlib.contextmanager
def _only_one(path: str) -> Iterator[bool]:
    """Hold the lock of this host, waiting for whoever holds it; yields False when that lasts longer than a check may.

    Only a courtesy: on a file system without locks several processes check at the same time.
    """
    deadline = time.monotonic() + most_seconds()
    with contextlib.ExitStack() as stack:
        held = True
        try:
            file = stack.enter_context(open(path, "w"))
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        held = False
                        break
                    time.sleep(_LOOK_SECONDS)
        except OSError:
            pass
        yield held
