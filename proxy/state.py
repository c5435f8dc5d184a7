"""The state of one proxy: everything its compiled loop touches, as int64 memory with named byte offsets.

All of it is private to this process. One loop thread owns it; the last column of each table says who else reads or
writes a word and with which memory order ("loop" alone means: relaxed, nobody else relies on it; statistics may be
read by anybody at any time, untorn and possibly slightly stale).

Tables are indexed ``peer * 256 + stream``. They are allocated zeroed and committed by the operating system page by page
as they are touched, so 4,096 ranks cost address space, not memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..native.pages import own_pages
from ..protocol.command import COMMAND_BYTES, MAX_RANKS, MAX_WINDOW_BYTES, UNIT
from ..protocol.ring import CAPACITY, SLOTS, ring_bytes
from ..protocol.streams import STREAMS, exists, proxy_of
from .sequence import WINDOW_STATE_BYTES
from .transport.base import EVENT_BYTES, Capabilities, DataPath

__all__ = ["ProxyState", "aligned_zeros"]

Words = NDArray[np.int64]

# --- header: configuration, written before the thread starts, then constant ---------------------------------
# RANK, RANKS        of this process
# WINDOW(_BYTES)     address and length of this rank's window
# ERROR              address of the sticky error (protocol.context)
# RING, RING_MASK, RING_SHIFT   address of the ring, capacity - 1, log2 capacity
# SEND, RECEIVE, PEERS, ENDPOINTS, OWNED, ARRIVED, COMPLETED, POOL, EVENTS, COUNTERS, LATENCY   addresses of the tables
# ENDPOINT_COUNT     entries of ENDPOINTS
# QUANTUM            bytes of the longest single write, multiple of 16
# WRITE_CAP, BYTE_CAP, PEER_BYTE_CAP   data writes and bytes in flight
# QUOTA              queued commands per destination
# DIE_AFTER          fault injection: commands after which the loop ends; 0 = never
# SPINS              idle iterations before the loop gives its core to others
# PROXY, PROXIES     index of this proxy among those of the rank, and their number
# RINGS              address of int64[PROXIES]: addresses of all their rings
# BELL               address of the word on which idle proxies of the rank sleep; see loop.py
(
    RANK,
    RANKS,
    WINDOW,
    WINDOW_BYTES,
    ERROR,
    RING,
    RING_MASK,
    RING_SHIFT,
    SEND,
    RECEIVE,
    PEERS,
    ENDPOINTS,
    ENDPOINT_COUNT,
    OWNED,
    ARRIVED,
    COMPLETED,
    POOL,
    EVENTS,
    COUNTERS,
    LATENCY,
    QUANTUM,
    WRITE_CAP,
    BYTE_CAP,
    PEER_BYTE_CAP,
    QUOTA,
    DIE_AFTER,
    SPINS,
    PROXY,
    PROXIES,
    RINGS,
    BELL,
) = range(0, 31 * 8, 8)

# --- header: control, on a cache line of its own ------------------------------------------------------------
# STOP        host stores 1 (release); loop loads (acquire) once per iteration
# REQUESTS    host adds 1 (release) after it stored a peer's REQUEST; loop loads (acquire) once per iteration
# NAMED       host stores how many refused commands it has named (release); loop loads (acquire) when it refuses one
STOP, REQUESTS, NAMED = 256, 264, 272

# --- header: what the loop works with, on cache lines of its own --------------------------------------------
# TAIL            ring index of the next command                                    loop
# REQUESTS_SEEN   REQUESTS already served                                           loop
# LOAD            data writes in flight << LOAD_SHIFT | their bytes                 loop; drain() reads
# CREDITS         credits in flight                                                 loop; drain() reads
# QUEUED          commands taken from the ring, not posted completely     loop (release when less); drain() reads
# POOL_FREE, POOL_TOP    first free queue node + 1; nodes ever used                 loop
# READY_HEAD, READY_TAIL, READY_COUNT    streams with queued commands, round robin  loop
# DUE_HEAD, DUE_TAIL     streams that owe the peer a credit                         loop
# STAMP           number of the iteration                                           loop
# PROBE, PROBE_AT  ticket + 1 of the write whose latency is being measured; when it was posted   loop
# FAULTS          peers with a fault, plus 1 when FAULT is set           loop (release); check() reads (acquire)
# FAULT, FAULT_PEER, FAULT_STREAM, FAULT_VALUE   first fault that no peer is to blame for   loop; check() after FAULTS
# REFUSED         commands dropped that no operation waits for       loop (release); check_commands() reads (acquire)
# REFUSED_LOW, REFUSED_HIGH, REFUSED_INDEX   words and ring index of the first one that is not named yet
#                 (REFUSED == NAMED)                                 loop, before REFUSED; check_commands() after it
(
    TAIL,
    REQUESTS_SEEN,
    LOAD,
    CREDITS,
    QUEUED,
    POOL_FREE,
    POOL_TOP,
    READY_HEAD,
    READY_TAIL,
    READY_COUNT,
    DUE_HEAD,
    DUE_TAIL,
    STAMP,
    PROBE,
    PROBE_AT,
    FAULTS,
    FAULT,
    FAULT_PEER,
    FAULT_STREAM,
    FAULT_VALUE,
    REFUSED,
    REFUSED_LOW,
    REFUSED_HIGH,
    REFUSED_INDEX,
) = range(320, 320 + 24 * 8, 8)
HEADER_BYTES = 512

#: Writes and bytes in flight change together, so they share a word: at most 2**16 + 4,096 writes of at most 2**28 bytes
#: (Settings, and one write per peer beyond the caps) are below 2**44 bytes and leave 19 bits for the writes.
LOAD_SHIFT = 44
LOAD_BYTES = (1 << LOAD_SHIFT) - 1
LOAD_WRITE = 1 << LOAD_SHIFT

# --- one entry per peer -------------------------------------------------------------------------------------
# PEER_STATE      ABSENT, UP, LOST or FORGOTTEN                                     loop; check() reads
# PEER_ENDPOINT   address of its endpoint's entry, 0 = none                         constant
# PEER_LOAD       data writes in flight to it << LOAD_SHIFT | their bytes           loop
# PEER_CREDITS    credits in flight to it                                           loop
# PEER_QUEUED     queued commands for it                                            loop
# PEER_BUSY       STAMP of the iteration in which its transport was busy            loop
# PEER_WAITER     stream + 1 whose queued write waits for room under the caps; no other takes that room   loop
# PEER_REQUEST    0, or reason + 1: forget this peer           host stores (release); loop loads (acquire)
# PEER_FAULT      code of the first fault it is to blame for   loop (release); check() reads (acquire)
# PEER_FAULT_STREAM, PEER_FAULT_VALUE, PEER_FAULT_DETAIL       loop, before PEER_FAULT; check() reads after it
# PEER_EXACT      1 = its transport keeps each stream in order and repeats nothing   constant
(
    PEER_STATE,
    PEER_ENDPOINT,
    PEER_LOAD,
    PEER_CREDITS,
    PEER_QUEUED,
    PEER_BUSY,
    PEER_WAITER,
    PEER_REQUEST,
    PEER_FAULT,
    PEER_FAULT_STREAM,
    PEER_FAULT_VALUE,
    PEER_FAULT_DETAIL,
    PEER_EXACT,
) = range(0, 13 * 8, 8)
PEER_ENTRY = 128
ABSENT, UP, LOST, FORGOTTEN = range(4)

# --- one entry per endpoint: its data path, DIRTY = posted to since the last flush, BROKEN = negative status; loop
EP_CONTEXT, EP_POST, EP_FLUSH, EP_POLL, EP_DROP, EP_DIRTY, EP_BROKEN = range(0, 7 * 8, 8)
ENDPOINT_ENTRY = 64

# --- send side of a stream; all words: loop -----------------------------------------------------------------
# NEXT            writes posted: number of the next one (never wraps)
# CREDITED        writes covered by the prefix that the receiver returned
# ENQUEUED        messages whose last command was taken from the ring
# WAITING         messages among them whose last write was not posted
# QUEUE_HEAD, QUEUE_TAIL   first and last queue node + 1, 0 = empty
# READY, READY_NEXT        1 when in the round-robin list; the following stream + 1
# DONE            sequence window of local completions (its PREFIX counts writes)
(NEXT, CREDITED, ENQUEUED, WAITING, QUEUE_HEAD, QUEUE_TAIL, READY, READY_NEXT, DONE) = range(0, 9 * 8, 8)
SEND_ENTRY = -(-(DONE + WINDOW_STATE_BYTES) // 64) * 64

# --- receive side of a stream; all words: loop --------------------------------------------------------------
# GRANTED         writes for which credits were sent
# DUE, DUE_NEXT   1 when in the list of streams that owe a credit; the following stream + 1
# SEEN            sequence window of arrivals (its PREFIX counts writes)
(GRANTED, DUE, DUE_NEXT, SEEN) = range(0, 4 * 8, 8)
RECEIVE_ENTRY = -(-(SEEN + WINDOW_STATE_BYTES) // 64) * 64

# --- one queue node: the two words of a command, and the next node + 1 (or the next free node + 1); loop
NODE_LOW, NODE_HIGH, NODE_NEXT = 0, 8, 16
NODE_BYTES = 24

# --- counters: loop adds (relaxed), anybody reads; what can be summed from the streams is not counted again (stats)
COUNTER_NAMES = (
    "iterations",
    "commands",
    "bytes_sent",
    "bytes_received",
    "held_back",
    "duplicates",
    "retries",
    "queued",
    "discarded",
    "ring_blocked",
    "sleeps",
    "refused",
)
(
    C_ITERATIONS,
    C_COMMANDS,
    C_BYTES_SENT,
    C_BYTES_RECEIVED,
    C_HELD_BACK,
    C_DUPLICATES,
    C_RETRIES,
    C_QUEUED,
    C_DISCARDED,
    C_RING_BLOCKED,
    C_SLEEPS,
    C_REFUSED,
) = range(0, len(COUNTER_NAMES) * 8, 8)

#: Events taken from a transport per poll.
EVENT_LIMIT = 64
#: Commands queued for one destination before it holds up its ring. More than the kernels of one Buffer ever have under
#: way to one peer (two operations a phase, each at most 16 channels, or chunk_depth chunks), so a blocked destination
#: does not block its ring.
DESTINATION_QUOTA = 1024
#: Buckets of the latency histogram: bucket b counts latencies in [2**b, 2**(b+1)) ns, the last one everything longer.
LATENCY_BUCKETS = 40


def aligned_zeros(nbytes: int, alignment: int = 64) -> NDArray[np.uint8]:
    """Zeroed bytes at an aligned address; pages are committed when they are first touched."""
    raw = np.zeros(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]


def _check_capacity(rank: int, ranks: int, route: Sequence[int], endpoints: int, window_bytes: int) -> None:
    """Raise ConfigError when the formats cannot hold the group or its window."""
    if not 1 <= ranks <= MAX_RANKS or not 0 <= rank < ranks:
        raise ConfigError(f"rank {rank} of {ranks}: up to {MAX_RANKS} ranks are possible")
    if len(route) != ranks or any(not -1 <= k < endpoints for k in route) or route[rank] != -1:
        raise ConfigError(f"route {list(route)} must name one of {endpoints} endpoints, or -1, per rank")
    if not 0 < window_bytes <= MAX_WINDOW_BYTES:
        raise ConfigError(f"a window of {window_bytes} bytes: 1..{MAX_WINDOW_BYTES} are possible")


def _caps(
    capabilities: Sequence[Capabilities], quantum: int, bytes_in_flight: int, peer_bytes_in_flight: int
) -> dict[int, int]:
    """Header words QUANTUM, BYTE_CAP and PEER_BYTE_CAP: what is asked for, as far as the transports can.

    A NIC's own limit leaves room for four of the longest writes, so that small ones pass between them.

    Raises:
        ConfigError: a transport writes less than a unit at once.
    """
    limits = [c.bytes_in_flight for c in capabilities if c.bytes_in_flight]
    quantum = min([quantum, *(c.max_write for c in capabilities), *(n // 4 for n in limits)]) // UNIT * UNIT
    if quantum <= 0:
        raise ConfigError(f"a transport that writes fewer than {UNIT} bytes at once cannot be used")
    return {
        QUANTUM: quantum,
        BYTE_CAP: min([bytes_in_flight, *limits]),
        PEER_BYTE_CAP: min([peer_bytes_in_flight, *(n // 2 for n in limits)]),
    }


class ProxyState:
    """Memory of one proxy, filled in and ready for the loop.

    Args:
        rank, ranks: EP rank of this process and number of EP ranks.
        proxy, proxies: index of this proxy and number of proxies: which streams it owns.
        window, window_bytes: this rank's window.
        error: address of the sticky error.
        paths, capabilities: data path and capabilities of each endpoint.
        route: per peer, index into ``paths``, or -1 when the peer is not reached through a proxy.
        ring_slots, quantum, bytes_in_flight, peer_bytes_in_flight, writes_in_flight: see Settings.
        die_after: fault injection, commands after which the loop ends; 0 = never.
        spins: idle iterations before the loop yields its core.

    Raises:
        ConfigError: a value is outside the capacity of the formats.
    """

    def __init__(
        self,
        *,
        rank: int,
        ranks: int,
        proxy: int,
        proxies: int,
        window: int,
        window_bytes: int,
        error: int,
        paths: Sequence[DataPath],
        capabilities: Sequence[Capabilities],
        route: Sequence[int],
        ring_slots: int,
        quantum: int,
        bytes_in_flight: int,
        peer_bytes_in_flight: int,
        writes_in_flight: int,
        die_after: int = 0,
        spins: int = 0,
    ) -> None:
        _check_capacity(rank, ranks, route, len(paths), window_bytes)
        caps = _caps(capabilities, quantum, bytes_in_flight, peer_bytes_in_flight)
        self.rank, self.ranks, self.proxy = rank, ranks, proxy
        streams = ranks * STREAMS
        # what kernels of a device reach
        self._ring = own_pages(ring_bytes(ring_slots))
        self._header = aligned_zeros(HEADER_BYTES)
        self._send = aligned_zeros(streams * SEND_ENTRY)
        self._receive = aligned_zeros(streams * RECEIVE_ENTRY)
        self._peers = aligned_zeros(ranks * PEER_ENTRY)
        self._endpoints = aligned_zeros(max(1, len(paths)) * ENDPOINT_ENTRY)
        self._owned = aligned_zeros(STREAMS * 8)
        self._arrived = own_pages(streams * 8)
        self._completed = own_pages(streams * 8)
        self._pool = aligned_zeros(ranks * DESTINATION_QUOTA * NODE_BYTES)
        self._events = aligned_zeros(EVENT_LIMIT * EVENT_BYTES)
        self._counters = aligned_zeros(len(COUNTER_NAMES) * 8)
        self._latency = aligned_zeros(STREAMS * LATENCY_BUCKETS * 8)
        self._family: Words | None = None

        #: Address that the compiled loop takes.
        self.address = int(self._header.ctypes.data)
        #: Address of the command ring.
        self.ring = int(self._ring.ctypes.data)
        #: Views for Python: header words; [peer, word]; [peer, stream, word]; counts as the kernels see them.
        self.header: Words = self._header.view(np.int64)
        self.peers: Words = self._peers.view(np.int64).reshape(ranks, -1)
        self.send: Words = self._send.view(np.int64).reshape(ranks, STREAMS, -1)
        self.receive: Words = self._receive.view(np.int64).reshape(ranks, STREAMS, -1)
        self.arrived: Words = self._arrived.view(np.int64).reshape(ranks, STREAMS)
        self.completed: Words = self._completed.view(np.int64).reshape(ranks, STREAMS)
        self.counters: Words = self._counters.view(np.int64)
        self.latency: Words = self._latency.view(np.int64).reshape(STREAMS, -1)

        self._ring.view(np.int64)[CAPACITY // 8] = ring_slots
        self._owned.view(np.int64)[:] = [
            exists(stream) and proxy_of(stream, proxies) == proxy for stream in range(STREAMS)
        ]
        self._connect(paths, capabilities, route)
        self._fill_header(
            {
                RANK: rank,
                RANKS: ranks,
                WINDOW: window,
                WINDOW_BYTES: window_bytes,
                ERROR: error,
                RING_MASK: ring_slots - 1,
                RING_SHIFT: ring_slots.bit_length() - 1,
                ENDPOINT_COUNT: len(paths),
                WRITE_CAP: writes_in_flight,
                QUOTA: DESTINATION_QUOTA,
                DIE_AFTER: die_after,
                SPINS: spins,
                PROXY: proxy,
                PROXIES: 1,
                **caps,
            }
        )
        assert SLOTS + ring_slots * COMMAND_BYTES == self._ring.nbytes

    def _connect(self, paths: Sequence[DataPath], capabilities: Sequence[Capabilities], route: Sequence[int]) -> None:
        """Enter the endpoints, and which of them reaches each peer."""
        endpoint_words = self._endpoints.view(np.int64).reshape(-1, ENDPOINT_ENTRY // 8)
        for words, path in zip(endpoint_words, paths, strict=False):
            words[:5] = path.context, path.post, path.flush, path.poll, path.drop
        for peer, k in enumerate(route):
            if k >= 0:
                self.peers[peer, PEER_STATE // 8] = UP
                self.peers[peer, PEER_ENDPOINT // 8] = self._endpoints.ctypes.data + k * ENDPOINT_ENTRY
                self.peers[peer, PEER_EXACT // 8] = int(capabilities[k].in_sequence)

    def _fill_header(self, configuration: Mapping[int, int]) -> None:
        """Enter ``configuration``, by byte offset, and where the tables are."""
        tables = {
            RING: self.ring,
            SEND: self._send.ctypes.data,
            RECEIVE: self._receive.ctypes.data,
            PEERS: self._peers.ctypes.data,
            ENDPOINTS: self._endpoints.ctypes.data,
            OWNED: self._owned.ctypes.data,
            ARRIVED: self._arrived.ctypes.data,
            COMPLETED: self._completed.ctypes.data,
            POOL: self._pool.ctypes.data,
            EVENTS: self._events.ctypes.data,
            COUNTERS: self._counters.ctypes.data,
            LATENCY: self._latency.ctypes.data,
        }
        for offset, value in {**tables, **configuration}.items():
            self.header[offset // 8] = value

    @staticmethod
    def join(states: Sequence[ProxyState]) -> None:
        """Make the proxies of a rank known to each other, so that they watch and wake one another while idle.

        Call before any of them runs.
        """
        # the bell on a line of its own, then the rings
        family = aligned_zeros(64 + 8 * len(states)).view(np.int64)
        for state in states:
            family[8 + state.proxy] = state.ring
            state.header[PROXIES // 8] = len(states)
            state.header[BELL // 8] = family.ctypes.data
            state.header[RINGS // 8] = family.ctypes.data + 64
            state._family = family

    def word(self, offset: int) -> int:
        """Header word at byte ``offset``."""
        return int(self.header[offset // 8])

    def arrived_address(self, peer: int, stream: int) -> int:
        """Address of the int64 count of messages of (peer, stream) that have arrived without a gap."""
        return int(self._arrived.ctypes.data) + (peer * STREAMS + stream) * 8

    def completed_address(self, peer: int, stream: int) -> int:
        """Address of the int64 count of own messages to (peer, stream) that have completed locally without a gap."""
        return int(self._completed.ctypes.data) + (peer * STREAMS + stream) * 8
