"""The sticky error: the one word that stops everybody.

Writer: whoever notices first (kernel, proxy, host watcher), by compare-and-exchange on the code. Readers: every kernel
before it publishes and while it waits, every proxy loop, the host before every operation. And how the host reads any
other word that explains itself by what stands beside it.
"""

from __future__ import annotations

from ..protocol.context import (
    ERROR_ARRIVED,
    ERROR_CODE,
    ERROR_EXPECTED,
    ERROR_PEER,
    ERROR_STREAM,
    FAILURE_CLAIMED,
    FAILURE_NONE,
)
from .atomics import compare_exchange, load64, poke, store64
from .groups import Group
from .jit import compiled

__all__ = ["STICKY_ERROR", "acquired", "failed", "failure_code", "set_failure"]


@compiled
def failed(error: int) -> bool:
    """True once the sticky error at address ``error`` is set (or being set)."""
    return load64(error + 8 * ERROR_CODE) != FAILURE_NONE


@compiled
def failure_code(error: int) -> int:
    """FAILURE_* of the sticky error at address ``error``; acquire, so the words that explain it are visible."""
    return load64(error + 8 * ERROR_CODE)


@compiled
def set_failure(error: int, code: int, peer: int, stream: int, arrived: int, expected: int) -> bool:
    """Set the sticky error unless somebody was first; True when this call set it."""
    if not compare_exchange(error + 8 * ERROR_CODE, FAILURE_NONE, FAILURE_CLAIMED):
        return False
    poke(error + 8 * ERROR_PEER, peer)
    poke(error + 8 * ERROR_STREAM, stream)
    poke(error + 8 * ERROR_ARRIVED, arrived)
    poke(error + 8 * ERROR_EXPECTED, expected)
    store64(error + 8 * ERROR_CODE, code)
    return True


@compiled
def acquired(address: int) -> int:
    """int64 at ``address``, acquire: what its writer stored before is visible to plain reads, also where the host's
    processor would do these earlier (aarch64)."""
    return load64(address)


#: What the host calls.
STICKY_ERROR = Group("sticky error", failed, failure_code, set_failure, acquired)
