"""uccl_ep_serving: a portable all-to-all for serving Mixture-of-Experts models.

``Buffer`` follows DeepEP's contract; engines reach it through their plugins (``uccl_ep_serving.engines``). Importing
this package has no side effect: names are resolved on first use, and nothing is compiled before a Buffer is built.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .as_deep_ep import install_as_deep_ep
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
    from .handles import EventHandle, EventOverlap, topk_idx_t

__all__ = [
    "BootstrapError",
    "Buffer",
    "Config",
    "ConfigError",
    "EventHandle",
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
    "install_as_deep_ep",
    "topk_idx_t",
]

_HOME = {
    "Buffer": ".buffer",
    "Config": ".buffer",
    "EventHandle": ".handles",
    "EventOverlap": ".handles",
    "Settings": ".config",
    "install_as_deep_ep": ".as_deep_ep",
    "topk_idx_t": ".handles",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version(__name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME.get(name, ".errors"), __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
