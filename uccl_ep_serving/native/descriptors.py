"""Descriptors that Linux has and not every Python knows: one that was built against an old C library (conda's, say)
leaves out what that had not."""

from __future__ import annotations

import ctypes
import errno
import os

__all__ = ["F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_GROW", "F_SEAL_SEAL", "F_SEAL_SHRINK", "memfd", "open_process"]

# linux/memfd.h
_CLOEXEC, _ALLOW_SEALING = 0x1, 0x2
#: Linux 6.3: never executable. A hardened system (vm.memfd_noexec=2) refuses memfds without it.
_NOEXEC_SEAL = 0x8
# linux/fcntl.h
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 0x1, 0x2, 0x4
#: pidfd_open(2) has the same number on all processors.
_PIDFD_OPEN = 434

_libc = ctypes.CDLL(None, use_errno=True)


def memfd(name: str, more: int = 0) -> int:
    """A new sealable memfd; ``more``: flags of memfd_create(2). Raises OSError."""
    flags = _CLOEXEC | _ALLOW_SEALING | more
    try:
        return _checked(_libc.memfd_create(name.encode(), flags | _NOEXEC_SEAL))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _checked(_libc.memfd_create(name.encode(), flags))  # an older kernel


def open_process(pid: int) -> int:
    """A descriptor that can be read once process ``pid`` has ended. Raises OSError."""
    return _checked(_libc.syscall(_PIDFD_OPEN, pid, 0))


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))
    return result
