"""A control message of normal mode: written into a mapped peer's window, or into this window for a proxy to send.

Both sides of the window have the same offsets, so a message is told by a *source* offset in this rank's window (used
for a proxied peer) and a *target* offset in the peer's.
"""

from __future__ import annotations

from ...native.jit import compiled
from .context import peer_window, window_address
from .publish import put_write, store_flag

__all__ = ["message_address", "publish"]


@compiled
def message_address(context: int, peer: int, source: int, target: int) -> int:
    """Where the kernel writes the bytes of a message to ``peer``."""
    window = peer_window(context, peer)
    return window + target if window != 0 else window_address(context) + source


@compiled
def publish(context: int, peer: int, stream: int, source: int, target: int, nbytes: int, count: int) -> int:
    """Publish a message of one write whose bytes stand at :func:`message_address`.

    ``count`` is the number of messages of the stream with this one (a mapped peer's flag holds counts).
    Returns STATUS_OK, STATUS_PENDING when the ring is full (publish again later) or STATUS_POISONED.
    """
    if peer_window(context, peer) != 0:
        return store_flag(context, peer, stream, count)
    return put_write(context, peer, stream, source, target, nbytes, 1)
