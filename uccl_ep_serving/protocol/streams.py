"""Stream ids: which phase, buffer parity and channel a sequence of writes belongs to.

A stream is (source rank -> destination rank, stream id). Phases, parities and channels have ids of their own, so two
overlapped micro-batches never wait for each other. Ids 0..127 carry messages; id ``CREDIT | s`` carries, in the
opposite direction, zero-length messages that each return :data:`CREDIT_WRITES` writes of stream ``s``. Credit streams
need no credits themselves: at most ``SEQUENCE_WINDOW / CREDIT_WRITES`` of them can be outstanding, because the stream
they credit stops without them.

Every id belongs to one proxy, the same number at both ends (:func:`proxy_of`), hence to one ring and one connection.
"""

from __future__ import annotations

from .imm import IMM, SEQUENCE_WINDOW

__all__ = [
    "CREDIT",
    "CREDIT_WRITES",
    "HOST",
    "LL_COMBINE",
    "LL_DISPATCH",
    "MAX_CHANNELS",
    "NORMAL_CHANNELS",
    "NORMAL_COMBINE",
    "NORMAL_DISPATCH",
    "NORMAL_GRANT",
    "NORMAL_NOTIFY",
    "NOTICE",
    "STREAMS",
    "TRANSPORT",
    "channel_of",
    "exists",
    "ll_stream",
    "name_of",
    "proxy_of",
]

STREAMS = 256
CREDIT = 128
MAX_CHANNELS = 16
#: Of normal mode on GPUs, where a program serves each: the SMs with which DeepEP publishes its fastest figures.
NORMAL_CHANNELS = 24

#: Low-latency consumed counts that no header carried in time (one 64-byte write each).
NOTICE = 0
#: Normal mode: counts (or "ready") that open every operation. On CPUs a dispatch closes with a second, empty message,
#: sent once all its writes are locally complete: nothing of it can land on rows that the receiver has handed out.
NORMAL_NOTIFY = 1
#: Normal mode on CPUs: the receiver's grants.
NORMAL_GRANT = 2

LL_DISPATCH = 8  # + parity * 16 + channel
LL_COMBINE = LL_DISPATCH + 2 * MAX_CHANNELS  # + parity * 16 + channel
#: Rows; on GPUs also how many are read, of the other phase (:mod:`.pipe`).
NORMAL_DISPATCH = LL_COMBINE + 2 * MAX_CHANNELS  # + channel
NORMAL_COMBINE = NORMAL_DISPATCH + NORMAL_CHANNELS  # + channel
#: Free for whoever talks to the proxies without an operation (diagnosis): no kernel waits for it.
HOST = NORMAL_COMBINE + NORMAL_CHANNELS
_END = HOST + 1

#: No stream: immediates that the two ends of a transport exchange beneath the proxies, which never see them.
TRANSPORT = STREAMS - 1

#: A quarter of the window: the sender always has a credit under way long before it would have to stop.
CREDIT_WRITES = SEQUENCE_WINDOW // 4

assert _END <= TRANSPORT & (CREDIT - 1)
assert IMM["stream"].limit + 1 == STREAMS


def exists(stream: int) -> bool:
    """True for ids that something may travel on: nobody owns the others, and what names one is refused."""
    base = stream & (CREDIT - 1)
    return base in (NOTICE, NORMAL_NOTIFY, NORMAL_GRANT) or LL_DISPATCH <= base < _END


def ll_stream(phase: int, number: int, channel: int) -> int:
    """Stream of low-latency message ``number`` (0, 1, 2, …) of ``phase`` (LL_DISPATCH or LL_COMBINE).

    Message ``number`` is message ``number // 2`` of that stream, so it has arrived when ``arrived >= number // 2 + 1``.
    """
    return phase + (number & 1) * MAX_CHANNELS + channel


def channel_of(stream: int) -> int:
    """Channel of a stream id; control streams, HOST and the credits of these belong to channel 0."""
    base = stream & (CREDIT - 1)
    if base < LL_DISPATCH or base >= HOST:
        return 0
    if base < NORMAL_DISPATCH:
        return (base - LL_DISPATCH) % MAX_CHANNELS
    return (base - NORMAL_DISPATCH) % NORMAL_CHANNELS


def proxy_of(stream: int, proxies: int) -> int:
    """Index of the proxy thread that owns a stream, equal on both sides because all ranks agree on ``proxies``."""
    return channel_of(stream) % proxies


def name_of(stream: int) -> str:
    """Words for a stream id, for messages and tables."""
    base, prefix = stream & (CREDIT - 1), "credit of " if stream & CREDIT else ""
    if base < LL_DISPATCH:
        return prefix + {NOTICE: "notice", NORMAL_NOTIFY: "normal notify", NORMAL_GRANT: "normal grant"}.get(
            base, f"no stream {base}"
        )
    channel = channel_of(base)
    if base < LL_COMBINE:
        return f"{prefix}low-latency dispatch, parity {(base - LL_DISPATCH) // MAX_CHANNELS}, channel {channel}"
    if base < NORMAL_DISPATCH:
        return f"{prefix}low-latency combine, parity {(base - LL_COMBINE) // MAX_CHANNELS}, channel {channel}"
    if base < NORMAL_COMBINE:
        return f"{prefix}normal dispatch, channel {channel}"
    if base < HOST:
        return f"{prefix}normal combine, channel {channel}"
    return f"{prefix}host" if base == HOST else f"{prefix}no stream {base}"
