"""What the operating system refuses a transport on this host, named with what to do about it."""

from __future__ import annotations

import errno

from ...errors import TransportError

__all__ = ["NO_DESCRIPTORS", "refused"]

#: The process, or the whole system, has as many files open as it may.
NO_DESCRIPTORS = frozenset((errno.EMFILE, errno.ENFILE))


def refused(what: str, error: OSError, device: str, less: str = "") -> TransportError:
    """The error to raise for ``error``.

    Args:
        what: who wanted what.
        device: the interface or kind of transport it was for.
        less: how to need fewer descriptors, for the case that none is left.
    """
    hint = ""
    if error.errno in NO_DESCRIPTORS:
        hint = f". Next step: raise the limit on open files (ulimit -n){less}"
    elif error.errno == errno.ENOSPC:  # of epoll_ctl: see epoll(7)
        hint = ". Next step: raise fs.epoll.max_user_watches"
    return TransportError(f"{what}: {error.strerror or error}{hint}", device=device, errno=error.errno or 0)
