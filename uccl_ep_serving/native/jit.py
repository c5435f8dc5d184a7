"""``@compiled``: a nogil, cached Numba function whose cache can never be stale or unwritable.

Numba invalidates a cached function when its own file changes, not when a *callee in another file* or an imported
constant changes. So the cache directory carries a digest of every source file that compiled code can come from. It is
created below the user's cache directory, or in a temporary one when that cannot be written (a read-only install
with an unwritable HOME must not fail at import).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import numba
from numba import njit

from ..config import cache_base, cache_wanted

__all__ = ["c_function", "cache_directory", "compile_lock", "compiled", "inlined"]

_log = logging.getLogger("uccl_ep_serving")

F = TypeVar("F", bound=Callable[..., Any])

#: Longest wait for another rank's compilation; a cold one takes tens of seconds on a slow core.
_LOCK_SECONDS = 300.0
#: A compilation that lasts longer is talked about.
_SAY_SECONDS = 1.0

_PACKAGE = Path(__file__).resolve().parent.parent


def _source_digest() -> str:
    """Digest of all sources that compiled functions can inline, and of the compiler."""
    digest = hashlib.sha256(f"{numba.__version__} {sys.version_info[:3]}".encode())
    for part in ("protocol", "native", "proxy", "kernels"):
        # The two top-level packages are reached through symlinks in a checkout, hence resolve().
        root = (_PACKAGE / part).resolve()
        for path in sorted(root.rglob("*.py")):
            if root / "triton" in path.parents:
                continue  # Triton's own cache knows those
            digest.update(f"{part}/{path.relative_to(root)}".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _writable(directory: Path) -> bool:
    """Create ``directory`` (mode 0700) and try a file in it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


@functools.cache
def cache_directory() -> Path:
    """Directory for compiled code, by source digest: ``UCCL_EP_CACHE_DIR``, ``XDG_CACHE_HOME``, ``~/.cache`` or a
    temporary directory, the first that can be written. Says once when that is not the one that was asked for."""
    directory, wanted = _first_writable(), cache_wanted()
    if wanted and not directory.is_relative_to(wanted):
        _log.warning(
            "UCCL_EP_CACHE_DIR=%s cannot be written: compiled code is kept in %s instead. Next step: make it writable "
            "for this user, or unset it",
            wanted,
            directory,
        )
    return directory


def _first_writable() -> Path:
    digest = _source_digest()
    for base in cache_base():
        if _writable(directory := Path(base) / "uccl_ep_serving" / digest):
            return directory
    directory = Path(tempfile.gettempdir()) / f"uccl_ep_serving-{os.getuid()}" / digest
    # Someone else's directory in a shared /tmp must not feed us machine code.
    if _writable(directory) and directory.stat().st_uid == os.getuid() == directory.parent.stat().st_uid:
        return directory
    return Path(tempfile.mkdtemp(prefix="uccl_ep_serving-"))


@contextlib.contextmanager
def _numba_cache_directory(directory: Path) -> Iterator[None]:
    """Numba reads this setting while a function is decorated; other users of Numba in the process keep theirs."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(directory)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def compiled(function: F) -> F:
    """Decorator: Numba-compiled on first use, nogil, cached. No bounds checks, no exceptions: return status codes."""
    with _numba_cache_directory(cache_directory()):
        return cast(F, njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)(function))


def inlined(function: F) -> F:
    """:func:`compiled`, and LLVM puts its code into every caller: for the small functions on a hot path.

    A call that stays one costs 2 to 5 ns here, because each passes a status and a result through memory.
    """
    with _numba_cache_directory(cache_directory()):
        options = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}
        return cast(F, njit(**options, forceinline=True)(function))


def c_function(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: a cached C-callable function; its ``.address`` goes into transport tables."""

    def decorate(function: Callable[..., Any]) -> Any:
        with _numba_cache_directory(cache_directory()):
            return numba.cfunc(signature, nopython=True, cache=True, error_model="numpy")(function)

    return decorate


@contextlib.contextmanager
def compile_lock(what: str) -> Iterator[None]:
    """Hold this while compiling: of many ranks that start together one compiles and the others load its result.

    Only a courtesy: without it (a holder that hangs, a file system without locks) two ranks compile the same code.

    Args:
        what: what is compiled, for the log. A cold compilation takes up to a minute on a slow core, so one that is
            still under way after a second is talked about; loading from the cache takes less.
    """
    started = time.monotonic()
    doing = "waits for another process to compile"
    said = threading.Event()

    def say() -> None:
        said.set()
        _log.info("uccl_ep %s %s: once, then cached in %s", doing, what, cache_directory())

    timer = threading.Timer(_SAY_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        with open(cache_directory() / ".lock", "w") as file:
            _lock(file)
            doing = "compiles"
            yield
    finally:
        timer.cancel()
        timer.join(_SAY_SECONDS)
    if said.is_set():
        _log.info("uccl_ep: %s ready after %.0f s", what, time.monotonic() - started)


def _lock(file: IO[str]) -> None:
    """Lock ``file``, waiting a bounded time; without a lock in the end where that is not possible."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            return
