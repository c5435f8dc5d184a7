"""What runs beside a caller: threads, daemons with names, and processes that end with the one that started them."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
from collections.abc import Callable

from ..errors import TransportError

__all__ = ["die_with_parent", "start_thread"]

#: prctl(2): the signal that a process gets when the thread that started it ends.
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when ``parent``, which started it, ends, however that happens.

    Raises:
        OSError: the kernel refused, or the parent has ended already.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the kernel was asked
        raise OSError(f"the process that started this one, {parent}, has ended")


def start_thread(name: str, body: Callable[..., None], *arguments: object) -> threading.Thread:
    """A running daemon thread.

    Args:
        name: for messages and debuggers.
        body: called with ``arguments``.

    Raises:
        TransportError: the system refuses a further thread.
    """
    thread = threading.Thread(target=body, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise TransportError(
            f"the thread {name!r} was not started: {error}. Likely cause: the limit on processes and threads. Next "
            "step: raise it (ulimit -u, pids.max of the container)",
            device="thread",
            errno=errno.EAGAIN,
        ) from error
    return thread
