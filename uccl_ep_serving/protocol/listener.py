"""Listening for peers: on one address, on any free port or on one of ``UCCL_EP_PORT_RANGE``."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import time

__all__ = ["BACKLOG", "PortsTaken", "listen", "ports_needed"]

#: Capped by net.core.somaxconn; whoever finds the queue full connects again.
BACKLOG = 4096
#: A range is gone through this often, with a pause of this many seconds at most in between.
_SCANS, _MOST_PAUSE_SECONDS = 5, 0.05


class PortsTaken(OSError):
    """No port of the range is free."""

    def __init__(self, first: int, last: int) -> None:
        which, verb = (f"all {last - first + 1} ports", "are") if last > first else ("the only port", "is")
        super().__init__(errno.EADDRINUSE, f"{which} of UCCL_EP_PORT_RANGE={first}-{last} {verb} taken")

    def __str__(self) -> str:
        return str(self.strerror)


def ports_needed(ranks: int, proxies: int) -> str:
    """How many ports a range must hold, and the next step, in words."""
    each = 1 + proxies
    return (
        f"While its Buffer is open a rank listens on 1 port, and over tcp on 1 more for each of its {proxies} proxies: "
        f"{ranks} x {each} = {ranks * each} ports where all {ranks} ranks are on one host, and as many for each other "
        "engine there. Next step: a wider UCCL_EP_PORT_RANGE"
    )


def listen(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """A socket that listens on ``host``, numeric.

    Args:
        ports: first and last of a range, whose first free one is taken; None = any port of the kernel's choice. What
            others free within a few hundredths of a second is found.

    Raises:
        PortsTaken: no port of the range is free.
        OSError: the system refuses a socket, or the address.
    """
    if ports is None:
        return _listen(host, 0)
    first, last = ports
    for scan in range(_SCANS):
        if scan:
            # A port behind this scan may have become free: ranks leave windows before they build others. Ranks that
            # scan together should not meet again, and engines give all one seed: hence the system's random numbers.
            time.sleep(random.SystemRandom().uniform(0, _MOST_PAUSE_SECONDS))
        for port in range(first, last + 1):
            try:
                return _listen(host, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
    raise PortsTaken(first, last)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
        if port:
            # Connections that were accepted on a port, live or just closed, do not keep it: only listeners do.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # of two that bound the same port, the second is refused here
        listener.listen(BACKLOG)
        undo.pop_all()
    return listener
