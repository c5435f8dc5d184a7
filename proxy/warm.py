"""Everything that proxies run, compiled before the ranks meet.

Compiling takes seconds to a minute the first time, and differs between hosts: a rank that did it once the others count
on it would use up their deadlines.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from ..proxy import loop
from .transport.select import NIC_TRANSPORTS, SHM, TCP

__all__ = ["warm"]

#: What ``auto`` may come to once the peers are known, and always can.
_AUTO = (SHM, TCP)


def warm(transport: str, nics: Iterable[str] = ()) -> None:
    """Compile, or load from the cache, the loop and the data path of ``transport`` (a value of UCCL_EP_TRANSPORT).

    ``nics``: transports for which this host has NICs, which ``auto`` may come to as well.
    """
    loop.warm()
    for name in (*_AUTO, *nics) if transport == "auto" else (transport,):
        # only the module of a transport that is used is imported
        folder = ".transport.nic" if name in NIC_TRANSPORTS else ".transport"
        importlib.import_module(f"{folder}.{name}_data", __package__).warm()
