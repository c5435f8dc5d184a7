"""Background threads: every one is a daemon with a name, and a system that has no more of them is named."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

from ..errors import TransportError

__all__ = ["start_thread"]


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
