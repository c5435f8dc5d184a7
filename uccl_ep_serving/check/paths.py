"""How rows get from one rank to another on a machine with a GPU: the settings of a Buffer that takes just that way."""

from __future__ import annotations

from typing import Any

__all__ = ["PATHS"]

PATHS: dict[str, dict[str, Any]] = {
    "mapped host memory": {"window": "host"},
    "shm": {"window": "host", "direct": False, "transport": "shm", "proxies": 2, "channels": 2},
    "tcp": {"window": "host", "direct": False, "transport": "tcp"},
    "ipc": {"window": "device"},
}
