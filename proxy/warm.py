"""Everything that proxies run, compiled before the ranks meet.

Compiling takes seconds to a minute the first time, and differs between hosts: a rank that did it once the others count
on it would use up their deadlines.
"""

from __future__ import annotations

from collections.abc import Callable

from . import loop
from .transport import shm_data, tcp_data
from .transport.select import SHM, TCP

__all__ = ["warm"]

_DATA_PATHS: dict[str, Callable[[], object]] = {SHM: shm_data.warm, TCP: tcp_data.warm}


def warm(transport: str) -> None:
    """Compile, or load from the cache, the loop and the data path of ``transport``; with ``auto`` those of all that
    may be chosen once the peers are known."""
    loop.warm()
    for name, compile_data_path in _DATA_PATHS.items():
        if transport in (name, "auto"):
            compile_data_path()
