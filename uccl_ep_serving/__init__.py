"""uccl_ep_serving: a portable all-to-all for serving Mixture-of-Experts models.

``Buffer`` follows DeepEP's contract; engines reach it through their plugins (``uccl_ep_serving.engines``). Importing
this package has no side effect: names are resolved on first use, and nothing is compiled before a Buffer is built.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .buffer import Buffer, Config
    from .config import Settings
    from .errors import (
        BootstrapError,
        ConfigError,
        Evicted,
        PeerError,
        PeerLost,
        PeerTimeout,
        ProtocolError,
        ProxyDied,
        TransportError,
        UcclEpError,
    )
    from .handles import EventOverlap

__all__ = [
    "BootstrapError",
    "Buffer",
    "Config",
    "ConfigError",
    "EventOverlap",
    "Evicted",
    "PeerError",
    "PeerLost",
    "PeerTimeout",
    "ProtocolError",
    "ProxyDied",
    "Settings",
    "TransportError",
    "UcclEpError",
]

_HOME = {"Buffer": ".buffer", "Config": ".buffer", "EventOverlap": ".handles", "Settings": ".config"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version(__name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME.get(name, ".errors"), __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
