"""Where machine code is kept between processes, and what makes it stale.

A file holds the object code of one group of entry points. Its directory carries a digest of every source that the code
can come from, its name one of the group, the processor and the compiler. A checksum finds damage; what keeps other
people's code out is that nobody else can write the directory.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import logging
import os
import platform
import stat
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from ..config import cache_base, cache_wanted

__all__ = [
    "cache_directory",
    "file_digest",
    "ours",
    "places",
    "read_directories",
    "read_object",
    "trusted",
    "usable",
    "write_object",
]

_log = logging.getLogger("uccl_ep_serving")

_PACKAGE = Path(__file__).resolve().parent.parent
#: The folders that compiled code comes from. The two top-level packages are reached through links in a checkout.
SOURCES = ("protocol", "native", "proxy", "kernels")
#: Stands for no directory at all: nothing can be read or written there.
_NOWHERE = Path(os.devnull) / "uccl_ep_serving"
#: Variables by which a user has Numba make other code, of every function in the process: slower, or one that says more.
_NUMBA_SETTINGS = ("NUMBA_BOUNDSCHECK", "NUMBA_DEBUGINFO", "NUMBA_ENABLE_PROFILING", "NUMBA_OPT")
#: The first bytes of a file; a checksum of the rest follows.
_MAGIC = b"uccl_ep object 1\n"


def _sources(part: str) -> list[tuple[str, Path]]:
    """The sources of a folder by name, or where none were installed what Python has made of them."""
    root = (_PACKAGE / part).resolve()
    found = sorted(root.rglob("*.py")) or sorted(root.rglob("*.pyc"))
    # the caches of those compilers know them
    kept = [path for path in found if not {root / "triton", root / "cuda"} & {*path.parents}]
    return [(f"{part}/{path.relative_to(root)}", path) for path in kept]


def _state() -> dict[str, tuple[int, int, int]]:
    """What shows that a source has been replaced or written to. No clock is asked: that of a file system is another."""
    found = {}
    for part in SOURCES:
        for name, path in _sources(part):
            state = path.stat()
            found[name] = state.st_ino, state.st_mtime_ns, state.st_size
    return found


#: When this process imported the sources, or little later.
_IMPORTED = _state()


def _compiler() -> str:
    """What compiles, and how: part of every digest."""
    settings = [f"{name}={os.environ[name]}" for name in _NUMBA_SETTINGS if name in os.environ]
    numba = f"numba {version('numba')} llvmlite {version('llvmlite')}"
    return " ".join((f"python {sys.version_info[:3]} {numba} {platform.machine()}", *settings))


@functools.cache
def _source_digest() -> str:
    """Digest of all sources that compiled functions can inline, and of the compiler.

    A source that has changed since this process imported it (an upgrade while an engine starts) is not what is compiled
    here: such a process keeps its code to itself.
    """
    digest = hashlib.sha256(f"{_compiler()} {version('uccl_ep_serving')}".encode())
    for part in SOURCES:
        for name, path in _sources(part):
            digest.update(name.encode())
            digest.update(path.read_bytes())
    if _state() != _IMPORTED:
        _log.warning("sources of uccl_ep_serving have changed since this process began: it compiles for itself alone")
        digest.update(f"{os.getpid()} {time.time()}".encode())
    return digest.hexdigest()[:16]


@functools.cache
def file_digest(path: str) -> str:
    """Digest of a source file with compiled functions that is none of the package's (a test's, say), and of those
    beside it; empty for the package's own."""
    file = Path(path).resolve()
    if any((_PACKAGE / part).resolve() in file.parents for part in SOURCES):
        return ""
    digest = hashlib.sha256()
    for other in sorted(file.parent.glob("*.py")):
        digest.update(other.read_bytes())
    return digest.hexdigest()


def usable(directory: Path) -> bool:
    """Create ``directory``, and try a file in it; False also where another user could put machine code into it."""
    try:
        for place in (*reversed(directory.parents), directory):
            # each by itself: parents that mkdir makes along with a directory get no mode, and others could write there
            if not place.exists():
                place.mkdir(mode=0o755, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return trusted(directory)
    except OSError:
        return False


def trusted(directory: Path) -> bool:
    """Whether ``directory`` is there, and nobody but this user and root can put anything into it."""
    try:
        parents = directory.resolve().parents
        return ours(directory) and all(ours(parent, sticky=True) for parent in parents)
    except OSError:
        return False


def ours(path: Path, *, sticky: bool = False) -> bool:
    """Whether nobody but this user and root can change what stands in ``path``, or whose it is; with ``sticky``, what
    of theirs stands there, as in /tmp, where others may put things of their own beside it."""
    found = path.lstat()
    shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not (sticky and found.st_mode & stat.S_ISVTX)
    # "/" and what stands there belong to root, whatever root is called here
    trusted_owners = os.geteuid(), 0, *(_nameless_root() if len(path.parts) <= 2 else ())
    return found.st_uid in trusted_owners and not shared


@functools.cache
def _nameless_root() -> tuple[int, ...]:
    """As whom a user namespace shows root, and everybody else whom it does not know; () where it knows root."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
        known = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
        if not any(first <= 0 < first + count for first, count in known):
            return (int(Path("/proc/sys/kernel/overflowuid").read_text()),)
    except (OSError, ValueError):
        pass
    return ()


@functools.cache
def cache_directory() -> Path:
    """Directory for compiled code, by source digest: ``UCCL_EP_CACHE_DIR``, ``XDG_CACHE_HOME``, ``~/.cache`` or a
    temporary directory: the first that can be written, and by nobody else. Says once when that is not the one that was
    asked for. Without any, code is compiled in memory."""
    directory, wanted = next(filter(usable, _candidates()), _NOWHERE), cache_wanted()
    if lies_elsewhere(directory, wanted) and not any(map(trusted, _candidates()[:1])):
        _log.warning(
            "UCCL_EP_CACHE_DIR=%s cannot be written, or others can write it: compiled code is kept in %s instead. Next "
            "step: make it writable for this user alone, or unset it",
            wanted,
            directory,
        )
    return directory


def lies_elsewhere(directory: Path, wanted: str) -> bool:
    """Whether ``directory``, one of :func:`places`, is not below what UCCL_EP_CACHE_DIR asks for, if it is set."""
    return bool(wanted) and not directory.is_relative_to(os.path.realpath(wanted))


def _candidates() -> list[Path]:
    return places(_source_digest())


def places(name: str) -> list[Path]:
    """Where a directory ``name`` of ours may stand, best first: whether it does, and is ours, is another question.

    Links are followed here, once: who can turn one could otherwise have one directory looked at and another one used.
    """
    bases = [Path(base) / "uccl_ep_serving" for base in cache_base()]
    with contextlib.suppress(OSError):  # a system without any temporary directory
        bases.append(Path(tempfile.gettempdir()) / f"uccl_ep_serving-{os.geteuid()}")
    return [base.resolve() / name for base in bases]


@functools.cache
def read_directories() -> tuple[Path, ...]:
    """Where compiled code may be found: :func:`cache_directory`, and what it passed over because this user cannot write
    there, such as what root has compiled into an image."""
    chosen = cache_directory()
    passed_over = itertools.takewhile(lambda one: one != chosen, _candidates())
    return chosen, *filter(trusted, passed_over)


def read_object(path: Path) -> bytes | None:
    """The object code in ``path``; None where there is none. A damaged file counts as none, and goes; so does one that
    another user could have written, but stays."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PermissionError(errno.EPERM, "another user could have written it")
            content = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _log.warning("compiled code in %s cannot be read (%s): it is compiled again", path, error)
        return None
    start = len(_MAGIC) + hashlib.sha256().digest_size
    code = content[start:]
    if content[:start] == _MAGIC + hashlib.sha256(code).digest():
        return code
    _log.warning("compiled code in %s is damaged: it is compiled again", path)
    with contextlib.suppress(OSError):
        path.unlink()
    return None


def write_object(path: Path, code: bytes) -> None:
    """Keep ``code`` in ``path``, whole or not at all. A cache that cannot be written costs time and nothing else."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
            try:
                file.write(_MAGIC + hashlib.sha256(code).digest() + code)
                file.close()
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise
    except OSError as error:
        _log.warning("compiled code is not kept in %s (%s): every process compiles it again", path.parent, error)
