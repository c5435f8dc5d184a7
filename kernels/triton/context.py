"""What stands where in the kernel context, for code inside kernels: numbers of ``protocol`` as ``tl.constexpr``."""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol import context as ctx
from ...protocol.streams import MAX_CHANNELS, STREAMS
from .words import acquire, int32s, peek

_RANK, _RANKS = tl.constexpr(8 * ctx.RANK), tl.constexpr(8 * ctx.RANKS)
_CHANNELS, _WINDOW = tl.constexpr(8 * ctx.CHANNELS), tl.constexpr(8 * ctx.WINDOW)
_ARRIVED, _COMPLETED = tl.constexpr(8 * ctx.ARRIVED), tl.constexpr(8 * ctx.COMPLETED)
_PEER_WINDOW, _FLAG = tl.constexpr(8 * ctx.PEER_WINDOW), tl.constexpr(8 * ctx.FLAG)
_RING, _HEADS = tl.constexpr(8 * ctx.RING), tl.constexpr(8 * ctx.HEADS)
_MASK, _ERROR = tl.constexpr(8 * ctx.MASK), tl.constexpr(8 * ctx.ERROR)
_VERDICT, _REPORT = tl.constexpr(8 * ctx.VERDICT), tl.constexpr(8 * ctx.REPORT)
_LIMIT, _LANDING = tl.constexpr(8 * ctx.LIMIT), tl.constexpr(8 * ctx.LANDING)
_STREAMS, _MAX_CHANNELS = tl.constexpr(STREAMS), tl.constexpr(MAX_CHANNELS)


@triton.jit
def own_rank(context: tl.tensor) -> tl.tensor:
    """EP rank of this process."""
    return peek(context + _RANK)


@triton.jit
def rank_count(context: tl.tensor) -> tl.tensor:
    """EP ranks."""
    return peek(context + _RANKS)


@triton.jit
def channel_count(context: tl.tensor) -> tl.tensor:
    """Channels a message is striped over."""
    return peek(context + _CHANNELS)


@triton.jit
def window_address(context: tl.tensor) -> tl.tensor:
    """Address of this rank's window; where it has two, of the one that proxies read."""
    return peek(context + _WINDOW)


@triton.jit
def landing_window(context: tl.tensor, peers: tl.tensor) -> tl.tensor:
    """Addresses of this rank's windows that the peers' messages land in. For ranks of the group."""
    return peek(peek(context + _LANDING) + 8 * peers)


@triton.jit
def wait_limit(context: tl.tensor) -> tl.tensor:
    """Nanoseconds that a wait may last."""
    return peek(context + _LIMIT)


@triton.jit
def peer_window(context: tl.tensor, peers: tl.tensor) -> tl.tensor:
    """Addresses at which the peers' windows are mapped, 0 for a peer reached through a proxy."""
    return peek(peek(context + _PEER_WINDOW) + 8 * peers)


@triton.jit
def mask_address(context: tl.tensor) -> tl.tensor:
    """Address of int32[ranks], by rank: not 0 = it is masked."""
    return peek(context + _MASK)


@triton.jit
def is_live(context: tl.tensor, peers: tl.tensor) -> tl.tensor:
    """True for ranks of the group that are not masked. ``peers`` may exceed the ranks."""
    inside = peers < rank_count(context)
    mask = int32s(mask_address(context) + 4 * peers)
    return inside & (tl.load(mask, mask=inside, other=1) == 0)


@triton.jit
def stream_of(phase: tl.tensor, number: tl.tensor) -> tl.tensor:
    """Stream of channel 0 of message ``number``; channel c has the id c above it."""
    return (number & 1) * _MAX_CHANNELS + phase


@triton.jit
def _of_stream(table: tl.tensor, peers: tl.tensor, stream: tl.tensor) -> tl.tensor:
    return peek(table + 8 * (peers * _STREAMS + stream))


@triton.jit
def arrived_address(context: tl.tensor, peers: tl.tensor, stream: tl.tensor) -> tl.tensor:
    """Addresses of the counts of messages that have arrived."""
    return _of_stream(peek(context + _ARRIVED), peers, stream)


@triton.jit
def completed_address(context: tl.tensor, peers: tl.tensor, stream: tl.tensor) -> tl.tensor:
    """Addresses of the counts of own messages that completed locally; 0 for mapped peers."""
    return _of_stream(peek(context + _COMPLETED), peers, stream)


@triton.jit
def flag_address(context: tl.tensor, peers: tl.tensor, stream: tl.tensor) -> tl.tensor:
    """Addresses, in mapped peers' windows, of the counts that this rank stores."""
    return _of_stream(peek(context + _FLAG), peers, stream)


@triton.jit
def ring_address(context: tl.tensor, stream: tl.tensor) -> tl.tensor:
    """Address of the ring that owns ``stream``."""
    return peek(peek(context + _RING) + 8 * stream)


@triton.jit
def head_address(context: tl.tensor, stream: tl.tensor) -> tl.tensor:
    """Address of that ring's head, last known tail and capacity, in device memory."""
    return peek(peek(context + _HEADS) + 8 * stream)


@triton.jit
def verdict_address(context: tl.tensor) -> tl.tensor:
    """Address of the verdict, in device memory: not 0 once a kernel of this rank has failed."""
    return peek(context + _VERDICT)


@triton.jit
def report_address(context: tl.tensor) -> tl.tensor:
    """Address of the report, in host memory: which failure it was, as the words of a sticky error."""
    return peek(context + _REPORT)


@triton.jit
def sticky_code(context: tl.tensor) -> tl.tensor:
    """Code of the sticky error, which proxies and host set: 0 until all threads see it, of which all ask."""
    return acquire(peek(context + _ERROR))


@triton.jit
def has_failed(context: tl.tensor) -> tl.tensor:
    """True when an earlier kernel has failed: nothing is valid any more, and nothing may be written."""
    return peek(verdict_address(context)) != 0


@triton.jit
def has_failed_now(context: tl.tensor) -> tl.tensor:
    """The same where another program of this kernel may fail meanwhile. All threads ask."""
    return acquire(verdict_address(context)) != 0
