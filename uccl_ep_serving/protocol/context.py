"""The kernel context: one int64 block per Buffer through which kernels find everything they touch.

Kernels get the address of this block and nothing else that belongs to the runtime; the proxy knows only the
address of the sticky error. Tables of
``ranks x 256`` are indexed ``rank * STREAMS + stream``. Written once by the runtime before the first kernel, then only
where the last column says so.

    word  name             meaning                                                           later writer
    0     RANK             EP rank of this process                                            -
    1     RANKS            EP ranks                                                           -
    2     CHANNELS         channels a message is striped over                                 -
    3     WINDOW           address of this rank's window; where windows lie in two kinds of   -
                           memory, of the one that proxies read
    4     WINDOW_BYTES     its length                                                         -
    5     ARRIVED          address of int64[ranks x 256]: *address* of the arrived count      -
    6     COMPLETED        address of int64[ranks x 256]: *address* of the locally completed  -
                           message count, 0 for a peer whose window is mapped
    7     PEER_WINDOW      address of int64[ranks]: address of the peer's mapped window, 0    -
                           for a peer reached through a proxy (this rank's own entry: LANDING)
    8     FLAG             address of int64[ranks x 256]: address of the peer's direct flag,  -
                           0 for a peer reached through a proxy
    9     RING             address of int64[256]: address of the ring that owns the stream    -
    10    MASK             address of int32[ranks]: 1 = the peer is masked (lost)             host
    11    ERROR            address of int64[8], the sticky error: code, peer, stream,         kernel, host,
                           arrived, expected; nothing is published once the code is not 0     proxy
    12    VERDICT          address, in device memory, of an int64: 1 once a kernel failed     -
    13    REPORT           address, in host memory, of int64[8]: that failure, in the words   kernel
                           of a sticky error, which the host moves there; and, in word
                           ERROR_IDS, an expert id out of range, which ends nothing
    14    HEADS            address of int64[256]: address, in device memory, of the head, the  -
                           last known tail and the capacity of the ring that owns the stream
    15    LIMIT            nanoseconds that a wait may last                                   -
    16    LANDING          address of int64[ranks]: address of this rank's window that the    -
                           rank's messages land in; all are WINDOW unless windows lie in two
                           kinds of memory

The last five are for kernels on a device, which read-modify-write no memory of the host; for kernels on the CPU they
are 0.

Memory orders: arrived and completed counts are stored with release by their one writer (proxy, or for a mapped peer
the peer's kernel) and loaded with acquire; the sticky error's code is stored last with release, loaded with acquire.
"""

from __future__ import annotations

__all__ = [
    "ARRIVED",
    "CHANNELS",
    "COMPLETED",
    "CONTEXT_WORDS",
    "ERROR",
    "ERROR_CODE",
    "ERROR_PEER",
    "ERROR_STREAM",
    "ERROR_WORDS",
    "FAILURE_CLAIMED",
    "FAILURE_CLOSED",
    "FAILURE_COMMAND",
    "FAILURE_LAYOUT",
    "FAILURE_NONE",
    "FAILURE_PEER_LOST",
    "FAILURE_PEER_TIMEOUT",
    "FAILURE_PROTOCOL",
    "FAILURE_PROXY_DIED",
    "FAILURE_RING_FULL",
    "FAILURE_TRANSPORT",
    "FLAG",
    "HEADS",
    "LANDING",
    "LIMIT",
    "MASK",
    "PEER_WINDOW",
    "RANK",
    "RANKS",
    "REPORT",
    "RING",
    "STATUS_OK",
    "STATUS_PENDING",
    "STATUS_POISONED",
    "STATUS_PROTOCOL",
    "VERDICT",
    "WINDOW",
    "WINDOW_BYTES",
]

RANK, RANKS, CHANNELS, WINDOW, WINDOW_BYTES, ARRIVED, COMPLETED, PEER_WINDOW, FLAG, RING, MASK, ERROR = range(12)
VERDICT, REPORT, HEADS, LIMIT, LANDING = range(12, 17)
CONTEXT_WORDS = 17

ERROR_CODE, ERROR_PEER, ERROR_STREAM, ERROR_ARRIVED, ERROR_EXPECTED = range(5)
ERROR_WORDS = 8
#: Of the report only: (1 + position in topk_idx) << ERROR_IDS_SHIFT | number of experts; 0 = every id was right, or
#: the host has raised it.
ERROR_IDS = 5
ERROR_IDS_SHIFT = 16

#: Values of the sticky error's code. The first to be set wins (compare-and-exchange from 0, details stored before it
#: under the private code FAILURE_CLAIMED); CLOSED is set by an orderly close.
FAILURE_NONE = 0
FAILURE_CLAIMED = 1
FAILURE_PEER_LOST = 2
FAILURE_PEER_TIMEOUT = 3
FAILURE_PROXY_DIED = 4
FAILURE_PROTOCOL = 5
FAILURE_TRANSPORT = 6
FAILURE_CLOSED = 7
#: A kernel of this rank was about to enqueue a write outside the window (words 3 and 4: where it ends, window bytes).
FAILURE_COMMAND = 8
#: Only from kernels on a device: a ring whose proxy took no command within the limit (its tail, the tail needed).
FAILURE_RING_FULL = 9
#: Only where kernels on a device wait: the peer asks for other windows before an operation that this rank has begun. It
#: releases the kernels; the host's next call settles it with the peer.
FAILURE_LAYOUT = 10

#: What a kernel returns. PENDING: the slice of time it was given is over and a peer is still missing; call again.
STATUS_OK = 0
STATUS_PENDING = 1
#: The sticky error was set before or while the kernel ran; nothing was published after it.
STATUS_POISONED = 2
#: A peer's header claims something the formats forbid; the sticky error says what.
STATUS_PROTOCOL = 3
