"""What a demo leaves that was killed at the same moment as its guardian, and how the next one removes it.

A demo's run directory holds a lock file on which the demo and each guardian keep a shared lock; the kernel lets go of
it when they die, however they die. A directory whose lock nobody holds is a dead demo's. It also holds the list of
SGLang's shared-memory files that were there before the demo, so that what came after it can be told.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path

from uccl_ep_serving.demo import supervisor
from uccl_ep_serving.demo.server import kill_users_of

__all__ = ["PREFIX", "new_run_directory", "sweep"]

PREFIX = "uccl-ep-demo-"
_BEFORE = "before.json"


def new_run_directory() -> Path:
    """A directory (mode 0700, with a short name, for Unix socket paths below it) that is this process's until it ends.

    Raises:
        OSError: it cannot be made, for example because the disk is full.
    """
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    (directory / _BEFORE).write_text(json.dumps(supervisor.snapshot()))
    # never closed: the lock ends with the process
    lock = os.open(directory / supervisor.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return directory


def sweep() -> list[str]:
    """Remove what dead demos of this user left below the temporary directory, and what their servers left.

    Returns:
        The paths removed.
    """
    removed: list[str] = []
    for directory in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError, ValueError):  # another user's, or being removed by its guardian right now
            lock = os.open(directory / supervisor.LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                # not what a link of another user's leads to
                if directory.lstat().st_uid != os.getuid() or directory.is_symlink():
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                kill_users_of(directory)
                removed += supervisor.clean(json.loads((directory / _BEFORE).read_text()))
                shutil.rmtree(directory)
                removed.append(str(directory))
            finally:
                os.close(lock)
    return removed
