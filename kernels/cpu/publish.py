"""Publishing: a command into a ring for a proxied peer, a message count into the window of a mapped one.

Both are release stores that follow the payload, and nothing is published once the sticky error is set. A slot of the
ring is reserved by compare-and-exchange and only when there is room, so that a kernel whose slice of time is over never
holds a slot it has not filled.

Both sides of a window have the same offsets, so a message has a *source* offset in this rank's window, where the kernel
writes it for a proxied peer, and a *target* offset in the peer's.
"""

from __future__ import annotations

from ...native.atomics import compare_exchange, load64, peek, poke, store64
from ...native.failure import failed, set_failure
from ...native.jit import compiled
from ...protocol.command import COMMAND_BYTES, HIGH, KIND_WRITE, LOW, MAX_WRITE_BYTES, UNIT
from ...protocol.context import FAILURE_COMMAND, STATUS_OK, STATUS_PENDING, STATUS_POISONED
from ...protocol.ring import CAPACITY, HEAD, SLOTS, TAIL
from .context import error_address, flag_address, peer_window, ring_address, window_address, window_bytes

_SOURCE = LOW["source"].shift
_LENGTH = LOW["length"].shift
_TARGET = HIGH["target"].shift
_RANK = HIGH["rank"].shift
_STREAM = HIGH["stream"].shift
_KIND = KIND_WRITE << HIGH["kind"].shift
_LAST = HIGH["last"].shift


@compiled
def reserve(ring: int, count: int) -> int:
    """Index of the first of ``count`` consecutive slots now owned by the caller, or -1 when the ring has no room."""
    capacity = peek(ring + CAPACITY)
    while True:
        head = peek(ring + HEAD)
        # acquire: the proxy has read the previous lap's words before it moved the tail past them
        # rule: a full ring takes nothing
        if head + count - load64(ring + TAIL) > capacity:
            return -1
        if compare_exchange(ring + HEAD, head, head + count):
            return head


@compiled
def put_write(context: int, peer: int, stream: int, source: int, target: int, nbytes: int, last: int) -> int:
    """Put one write of ``nbytes`` bytes (0 allowed) into the ring that owns ``stream``.

    ``source`` and ``target`` are byte offsets in this rank's and ``peer``'s window, multiples of 16 like ``nbytes``;
    ``last`` = 1 ends the message. More than 256 MiB become several commands, of which only the last carries ``last``.

    Returns:
        STATUS_OK, STATUS_PENDING when the ring is full (nothing happened, call again), or STATUS_POISONED: the sticky
        error was set, or is now because the bytes do not lie in the window. Nothing is published then.
    """
    # rule: nothing is published after the sticky error
    if failed(error_address(context)):
        return STATUS_POISONED
    limit = window_bytes(context) - nbytes
    misfit = (source | target | nbytes) & (UNIT - 1) != 0
    # rule: a write outside the window is not published
    if nbytes < 0 or source < 0 or source > limit or target < 0 or target > limit or misfit:
        end = max(source, target) + nbytes
        set_failure(error_address(context), FAILURE_COMMAND, peer, stream, end, window_bytes(context))
        return STATUS_POISONED
    ring = ring_address(context, stream)
    commands = max(1, (nbytes + MAX_WRITE_BYTES - 1) // MAX_WRITE_BYTES)
    index = reserve(ring, commands)
    if index < 0:
        return STATUS_PENDING
    capacity = peek(ring + CAPACITY)
    for part in range(commands):
        done = part * MAX_WRITE_BYTES
        length = min(nbytes - done, MAX_WRITE_BYTES)
        at = index + part
        lap = ((at // capacity) + 1) & 1
        slot = ring + SLOTS + (at % capacity) * COMMAND_BYTES
        ends = last if part == commands - 1 else 0
        poke(slot, lap | ((source + done) // UNIT) << _SOURCE | (length // UNIT) << _LENGTH)
        high = lap | ((target + done) // UNIT) << _TARGET | peer << _RANK | stream << _STREAM
        store64(slot + 8, high | _KIND | ends << _LAST)
    return STATUS_OK


@compiled
def store_flag(context: int, peer: int, stream: int, count: int) -> int:
    """Tell a mapped peer that ``count`` messages of ``stream`` lie in its window; STATUS_OK or STATUS_POISONED."""
    if failed(error_address(context)):
        return STATUS_POISONED
    store64(flag_address(context, peer, stream), count)
    return STATUS_OK


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
