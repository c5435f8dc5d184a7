"""What a group holds in the kernel while it works, and must not leave: sockets, memory, processes.

Segments are memfds and sockets are abstract: neither has a file, so only ``/proc`` can tell.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

__all__ = ["held", "left"]


def held(pids: Iterable[int]) -> dict[str, set[str]]:
    """By kind, what the processes ``pids`` hold now: ``sockets`` (also of those that are dead), ``memory``,
    ``processes``."""
    found: dict[str, set[str]] = {"sockets": set(), "memory": set(), "processes": set()}
    numbers = {str(pid) for pid in pids}
    names = re.findall(r"@(uccl_ep\S*)", Path("/proc/net/unix").read_text())
    found["sockets"] = {name for name in names if numbers & set(re.split(r"\D+", name))}
    for pid in numbers:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
            descriptors = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
            children = psutil.Process(int(pid)).children(recursive=True)
        except (OSError, psutil.Error):  # dead; what a zombie had is gone
            continue
        found["memory"] |= {f"{pid} maps {name}" for name in re.findall(r"/memfd:uccl_ep\S*", maps)}
        found["memory"] |= {f"{pid} has open {name}" for name in descriptors if name.startswith("/memfd:uccl_ep")}
        found["processes"] |= {f"{child.pid} of {pid}" for child in children}
    return found


def left(pids: Iterable[int], seconds: float = 2.0) -> dict[str, set[str]]:
    """The kinds of :func:`held` of which something is still there after ``seconds``; empty when nothing is."""
    pids = list(pids)
    deadline = time.monotonic() + seconds
    while (found := {kind: names for kind, names in held(pids).items() if names}) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found
