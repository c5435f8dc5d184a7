"""Groups of entry points: compiled together, kept as one file, shared by the processes of a host.

The ranks of a host start together and need the same groups. Each takes what nobody compiles yet and loads what another
one has compiled, so that they share the work.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .cache import cache_directory, file_digest, read_directories, read_object, write_object
from .machine import load_object, processor
from .parts import Function

__all__ = ["Group", "load"]

_log = logging.getLogger("uccl_ep_serving")

#: Longest wait for what another process compiles: it may hang, or the file system may keep no locks.
_LOCK_SECONDS = 300.0
#: A compilation that lasts longer is talked about.
_SAY_SECONDS = 1.0


class Group:
    """Entry points that are compiled together.

    Args:
        name: for the log and the file's name.
        entries: functions that Python calls, or whose addresses it takes. One may stand in several groups.
    """

    def __init__(self, name: str, *entries: Any) -> None:
        self.name = name
        self._entries: dict[str, Function] = {f"{name}/{entry.name}": entry for entry in entries}
        self.loaded = False

    @property
    def path(self) -> Path:
        """The file in which this process keeps it."""
        return cache_directory() / self._file_name

    @functools.cached_property
    def _file_name(self) -> str:
        digest = hashlib.sha256(repr(processor()).encode())
        for symbol, entry in self._entries.items():
            digest.update(f"{symbol} {entry.signature} {file_digest(entry.function.__code__.co_filename)}".encode())
        word = re.sub(r"\W+", "_", self.name)[-60:]
        return f"{word}-{digest.hexdigest()[:16]}.o"

    @property
    def cached(self) -> bool:
        """True when no process of this host needs to compile it."""
        return self.found is not None

    @property
    def found(self) -> Path | None:
        """The file from which it is loaded, None where there is none yet."""
        files = (directory / self._file_name for directory in read_directories())
        return next((file for file in files if file.exists()), None)

    def try_load(self) -> bool:
        """Load it from the cache; False when it is not there."""
        if not self.loaded:
            for directory in read_directories():
                if (code := read_object(directory / self._file_name)) is not None:
                    self._bind(code)
                    break
        return self.loaded

    def compile(self, keep: bool = True) -> None:
        """Compile and load it, and ``keep`` it for others. Raises what Numba raises."""
        from .compiler import emit

        code = emit(self._entries)
        if keep:
            write_object(self.path, code)
        self._bind(code)

    def _bind(self, code: bytes) -> None:
        found = load_object(code, self._entries)
        for symbol, entry in self._entries.items():
            entry.bind(*found[symbol])
        self.loaded = True


def load(*groups: Group) -> None:
    """Have machine code for ``groups``: from the cache, from another process that compiles it now, or compiled here."""
    missing = [group for group in groups if not group.try_load()]
    if not missing:
        return
    started = time.monotonic()
    with _said(missing) as doing:
        while missing:
            forced = time.monotonic() - started > _LOCK_SECONDS
            left = []
            for group in missing:
                with _lock(group.path.with_suffix(".lock"), forced) as held:
                    if not group.try_load():
                        if held:
                            doing[:] = "compiles", group.name
                            group.compile()
                        else:
                            left.append(group)
            if left and len(left) == len(missing):
                doing[:] = "waits for another process to compile", left[0].name
                time.sleep(0.02)
            missing = left


@contextlib.contextmanager
def _said(groups: list[Group]) -> Iterator[list[str]]:
    """Log what takes longer than a second; yields what is being done, and to what, to be kept up to date."""
    doing = ["compiles", groups[0].name]
    started = time.monotonic()
    said = threading.Event()

    def say() -> None:
        said.set()
        _log.info("uccl_ep %s %s: once, then cached in %s", *doing, cache_directory())

    timer = threading.Timer(_SAY_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield doing
    finally:
        timer.cancel()
        timer.join(_SAY_SECONDS)
    if said.is_set():
        names = ", ".join(group.name for group in groups)
        _log.info("uccl_ep: %s ready after %.0f s", names, time.monotonic() - started)


@contextlib.contextmanager
def _lock(path: Path, forced: bool) -> Iterator[bool]:
    """Hold the lock of a group; yields False when another process holds it and ``forced`` is not set.

    Only a courtesy: without it (a holder that hangs, a file system without locks) two processes compile the same code.
    """
    held = True
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held = forced
        except OSError:
            pass
        yield held
