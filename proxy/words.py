"""The state of one proxy: everything its compiled loop touches, as int64 words at named byte offsets.

All of it is private to this process. One loop thread owns it; the comments say who else reads or writes a word and with
which memory order. A word without such a note is the loop's alone (relaxed, nobody else relies on it). Anybody may read
statistics at any time, untorn and possibly slightly stale. :class:`.state.ProxyState` allocates and fills all of it.

Tables are indexed ``peer * 256 + stream``. They are allocated zeroed and committed by the operating system page by page
as they are touched, so 4,096 ranks cost address space, not memory.
"""

from __future__ import annotations

from ..native.atomics import peek, poke
from ..native.jit import inlined
from .sequence import WINDOW_STATE_BYTES

# --- header: configuration, written before the thread starts, then constant -------------------------------------------
RANK = 0  # of this process
RANKS = 8
WINDOW = 16  # address of this rank's window
WINDOW_BYTES = 24
ERROR = 32  # address of the sticky error (protocol.context)
RING = 40  # address of the ring
RING_MASK = 48  # its capacity - 1
RING_SHIFT = 56  # log2 of its capacity
SEND = 64  # addresses of the tables, to LATENCY
RECEIVE = 72
PEERS = 80
ENDPOINTS = 88
ENDPOINT_COUNT = 96  # entries of ENDPOINTS
OWNED = 104
ARRIVED = 112
COMPLETED = 120
POOL = 128
EVENTS = 136
COUNTERS = 144
LATENCY = 152
QUANTUM = 160  # bytes of the longest single write, multiple of 16
WRITE_CAP = 168  # data writes in flight
BYTE_CAP = 176  # their bytes
PEER_BYTE_CAP = 184  # those to one peer
QUOTA = 192  # queued commands per destination
DIE_AFTER = 200  # fault injection: commands after which the loop ends; 0 = never
SPIN = 208  # nanoseconds that an idle loop keeps polling before it gives its core to others
PROXY = 216  # index of this proxy among those of the rank
PROXIES = 224  # their number
RINGS = 232  # address of int64[PROXIES]: addresses of all their rings
WAKEUP = 240  # address of the word on which idle proxies of the rank sleep; see loop.py

# --- header: control, on a cache line of its own ----------------------------------------------------------------------
STOP = 256  # host stores 1 (release); loop loads (acquire) once per iteration
REQUESTS = 264  # host adds 1 (release) after it stored a peer's REQUEST; loop loads (acquire) once per iteration
NAMED = 272  # host stores how many refused commands it has named (release); loop loads (acquire) when it refuses one

# --- header: what the loop works with, on cache lines of its own ------------------------------------------------------
TAIL = 320  # ring index of the next command
REQUESTS_SEEN = 328  # REQUESTS already served
LOAD = 336  # data writes in flight << LOAD_SHIFT | their bytes; drain() reads
CREDITS = 344  # credits in flight; drain() reads
QUEUED = 352  # commands taken from the ring, not posted completely; loop (release when less), drain() reads
POOL_FREE = 360  # first free queue node + 1
POOL_TOP = 368  # nodes ever used
READY_HEAD = 376  # streams with queued commands, round robin
READY_TAIL = 384
READY_COUNT = 392
DUE_HEAD = 400  # streams that owe the peer a credit
DUE_TAIL = 408
STAMP = 416  # number of the iteration
PROBE = 424  # ticket + 1 of the write whose latency is being measured
PROBE_AT = 432  # when it was posted
FAULTS = 440  # peers with a fault, plus 1 when FAULT is set; loop (release), check() reads (acquire)
FAULT = 448  # first fault that no peer is to blame for; FAULT to FAULT_VALUE: check() reads them after FAULTS
FAULT_PEER = 456
FAULT_STREAM = 464
FAULT_VALUE = 472
REFUSED = 480  # commands dropped that no operation waits for; loop (release), check_commands() reads (acquire)
REFUSED_LOW = 488  # words and ring index of the first one that is not named yet (REFUSED == NAMED)
REFUSED_HIGH = 496  # loop stores them before REFUSED, check_commands() reads them after it
REFUSED_INDEX = 504
HEADER_BYTES = 512

#: Writes and bytes in flight change together, so they share a word. At most 2**40 bytes (Settings), and one write of at
#: most 2**28 for each of 4,096 peers beyond that, are below 2**44. At most 2**16 + 4,096 writes fit the other 19 bits.
LOAD_SHIFT = 44
LOAD_BYTES = (1 << LOAD_SHIFT) - 1
LOAD_WRITE = 1 << LOAD_SHIFT

# --- one entry per peer -----------------------------------------------------------------------------------------------
PEER_STATE = 0  # ABSENT, UP, LOST or FORGOTTEN; check() reads
PEER_ENDPOINT = 8  # address of its endpoint's entry, 0 = none; constant
PEER_LOAD = 16  # data writes in flight to it << LOAD_SHIFT | their bytes
PEER_CREDITS = 24  # credits in flight to it
PEER_QUEUED = 32  # queued commands for it
PEER_BUSY = 40  # STAMP of the iteration in which its transport was busy
PEER_WAITER = 48  # stream + 1 whose queued write waits for room under the caps; no other takes that room
PEER_REQUEST = 56  # 0, or 1: forget this peer; host stores (release), loop loads (acquire)
PEER_FAULT = 64  # code of the first fault it is to blame for; loop (release), check() reads (acquire)
PEER_FAULT_STREAM = 72  # loop stores these before PEER_FAULT, check() reads them after it
PEER_FAULT_VALUE = 80
PEER_FAULT_DETAIL = 88
PEER_EXACT = 96  # 1 = its transport keeps each stream in order and repeats nothing; constant
PEER_READS = 104  # 1 = its transport may read our bytes for it after it was dropped; constant
PEER_ENTRY = 128
ABSENT, UP, LOST, FORGOTTEN = range(4)

# --- one entry per endpoint -------------------------------------------------------------------------------------------
EP_CONTEXT = 0  # its data path
EP_POST = 8
EP_FLUSH = 16
EP_POLL = 24
EP_DROP = 32
EP_DIRTY = 40  # posted to since the last flush
EP_BROKEN = 48  # one of its functions returned a negative status
EP_FENCE = 56  # address of the fence (fence.py) before its arrivals count, 0 = none; host stores, before any arrives
ENDPOINT_ENTRY = 64

# --- send side of a stream --------------------------------------------------------------------------------------------
NEXT = 0  # writes posted: number of the next one (never wraps)
CREDITED = 8  # writes covered by the prefix that the receiver returned
ENQUEUED = 16  # messages whose last command was taken from the ring
WAITING = 24  # messages among them whose last write was not posted; of a lost peer, never
QUEUE_HEAD = 32  # first and last queue node + 1, 0 = empty
QUEUE_TAIL = 40
READY = 48  # 1 when in the round-robin list
READY_NEXT = 56  # the following stream + 1
DONE = 64  # sequence window of local completions (its PREFIX counts writes)
SEND_ENTRY = -(-(DONE + WINDOW_STATE_BYTES) // 64) * 64

# --- receive side of a stream -----------------------------------------------------------------------------------------
GRANTED = 0  # writes for which credits were sent
DUE = 8  # 1 when in the list of streams that owe a credit
DUE_NEXT = 16  # the following stream + 1
SEEN = 24  # sequence window of arrivals (its PREFIX counts writes)
RECEIVE_ENTRY = -(-(SEEN + WINDOW_STATE_BYTES) // 64) * 64

# --- one queue node ---------------------------------------------------------------------------------------------------
NODE_LOW = 0  # the two words of a command
NODE_HIGH = 8
NODE_NEXT = 16  # the next node + 1, or the next free node + 1
NODE_BYTES = 24

# --- counters: loop adds, anybody reads; what can be summed from the streams is not counted again (stats) -------------
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
#: way to one peer (in low latency two operations a phase, each at most 16 channels; in normal mode 24 channels with
#: what their staging holds, or chunk_depth chunks), so a blocked destination does not block its ring.
DESTINATION_QUOTA = 1024
#: Buckets of the latency histogram: bucket b counts latencies in [2**b, 2**(b+1)) ns, the last one everything longer.
LATENCY_BUCKETS = 40


@inlined
def peer_entry(state: int, peer: int) -> int:
    """Address of the entry of ``peer``."""
    return peek(state + PEERS) + peer * PEER_ENTRY


@inlined
def peer_state(state: int, peer: int) -> int:
    """ABSENT, UP, LOST or FORGOTTEN."""
    return peek(peer_entry(state, peer) + PEER_STATE)


@inlined
def send_record(state: int, index: int) -> int:
    """Address of the send side of stream ``index`` (peer * 256 + stream)."""
    return peek(state + SEND) + index * SEND_ENTRY


@inlined
def receive_record(state: int, index: int) -> int:
    """Address of the receive side of stream ``index``."""
    return peek(state + RECEIVE) + index * RECEIVE_ENTRY


@inlined
def add(state: int, counter: int, amount: int) -> None:
    """Add ``amount`` to a counter, C_*."""
    address = peek(state + COUNTERS) + counter
    poke(address, peek(address) + amount)


@inlined
def count(state: int, counter: int) -> None:
    """Add 1 to a counter, C_*."""
    address = peek(state + COUNTERS) + counter
    poke(address, peek(address) + 1)
