"""Typed reads of the kernel context block (``protocol.context``), for compiled kernels.

``context`` is the address of the block. The block and its tables are constant while kernels run, except the counts that
the tables point at (written by proxies or by peers' kernels, hence acquire) and the mask (written by the host).
"""

from __future__ import annotations

from ...native.atomics import load64, peek, peek32
from ...native.jit import compiled
from ...protocol.context import (
    ARRIVED,
    CHANNELS,
    COMPLETED,
    ERROR,
    FLAG,
    MASK,
    PEER_WINDOW,
    RANK,
    RANKS,
    RING,
    WINDOW,
    WINDOW_BYTES,
)
from ...protocol.streams import STREAMS

#: Completed count of a peer whose window is mapped: a kernel's own stores are over when it returns.
ALWAYS = 1 << 62


@compiled
def own_rank(context: int) -> int:
    """EP rank of this process."""
    return peek(context + 8 * RANK)


@compiled
def rank_count(context: int) -> int:
    """EP ranks."""
    return peek(context + 8 * RANKS)


@compiled
def channel_count(context: int) -> int:
    """Channels a message is striped over."""
    return peek(context + 8 * CHANNELS)


@compiled
def window_address(context: int) -> int:
    """Address of this rank's window."""
    return peek(context + 8 * WINDOW)


@compiled
def window_bytes(context: int) -> int:
    """Length of every window."""
    return peek(context + 8 * WINDOW_BYTES)


@compiled
def error_address(context: int) -> int:
    """Address of the sticky error."""
    return peek(context + 8 * ERROR)


@compiled
def arrived_count(context: int, peer: int, stream: int) -> int:
    """Messages of (``peer`` -> this rank, ``stream``) that arrived without a gap; acquire, so their bytes are
    visible."""
    return load64(peek(peek(context + 8 * ARRIVED) + 8 * (peer * STREAMS + stream)))


@compiled
def completed_count(context: int, peer: int, stream: int) -> int:
    """Own messages of (this rank -> ``peer``, ``stream``) that completed locally; :data:`ALWAYS` for a mapped peer."""
    address = peek(peek(context + 8 * COMPLETED) + 8 * (peer * STREAMS + stream))
    if address == 0:
        return ALWAYS
    return load64(address)


@compiled
def peer_window(context: int, peer: int) -> int:
    """Address at which ``peer``'s window is mapped, 0 when the peer is reached through a proxy."""
    return peek(peek(context + 8 * PEER_WINDOW) + 8 * peer)


@compiled
def flag_address(context: int, peer: int, stream: int) -> int:
    """Address, in a mapped peer's window, of the message count that this rank stores for ``stream``."""
    return peek(peek(context + 8 * FLAG) + 8 * (peer * STREAMS + stream))


@compiled
def ring_address(context: int, stream: int) -> int:
    """Address of the command ring that owns ``stream``."""
    return peek(peek(context + 8 * RING) + 8 * stream)


@compiled
def is_masked(context: int, peer: int) -> bool:
    """True when ``peer`` is lost and skipped."""
    return peek32(peek(context + 8 * MASK) + 4 * peer) != 0
