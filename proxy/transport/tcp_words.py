"""Memory of the compiled TCP data path: a context for each endpoint, a record for each connection and each peer.

The endpoint allocates it and fills in what is constant; after that the proxy thread owns all of it. What the endpoint's
mending thread (:mod:`.tcp_mend`) reads or writes besides says so, with its memory order. Nothing is shared with another
process. Words are indices into int64 arrays.
"""

from __future__ import annotations

import os

from ...native.atomics import load64, peek, poke
from ...native.jit import compiled
from ...protocol.frame import FRAME_BYTES, SEAL_BYTES
from .base import put_event

# --- context ----------------------------------------------------------------------------------------------------------
WINDOW = 0  # address of this rank's window
WINDOW_BYTES = 1  # its length
RANKS = 2
CONNECTIONS = 3  # connections per peer
LINKS = 4  # address of the connection records, [rank][connection]
PEERS = 5  # address of the peer records
EPOLL = 6  # epoll descriptor, edge-triggered over all connections; the data of an event is the connection's index
EVENTS_HEAD = 7  # events queued for the next poll
EVENTS_TAIL = 8  # events delivered
EVENTS = 9  # address of EVENT_SLOTS events
READY = 10  # address of the ring of connections with work to do, one slot per connection
READY_HEAD = 11
READY_TAIL = 12
STAGING = 13  # address of STAGING_BYTES for received bytes
VECTORS = 14  # address of the scatter-gather list
MESSAGE = 15  # address of the msghdr that points at it
WAITING = 16  # address of room for WAITING_SLOTS epoll events
ENDING = 17  # peers that lost a connection for good and are not reported yet
OWING = 18  # CLOCK_MONOTONIC ns at which the first frame arrived that its sender was not told of, 0 = none
BELL = 19  # eventfd that wakes the mending thread: a connection broke
ORDERS = 20  # mending thread: adds 1 (release) after it stored a link's ORDER; the loop loads (acquire) at each poll
ORDERS_SEEN = 21
HEADER_BYTES = 22  # of a frame: FRAME_BYTES, and SEAL_BYTES where frames carry MACs
AUTH = 23  # address of the functions that make MACs (tcp_auth), 0 = frames carry none
CONTEXT_WORDS = 24

# --- a connection -----------------------------------------------------------------------------------------------------
FD = 0  # descriptor; the mending thread closes it once STATE is BROKEN
PEER = 1
FLAGS = 2  # READABLE | WRITABLE | FINISHING | QUEUED | SEND_OVER | ACK_DUE
POSTED = 3  # frames accepted
SENT_FRAMES = 4  # frames handed to the kernel completely
SENT_BYTES = 5  # bytes of the next frame that the kernel has taken
ACKED = 6  # frames that the peer has whole: they are complete, and their slots are free
SEALED = 7  # frames whose header (with MAC) is final
QUEUE = 8  # address of QUEUE_SLOTS frames, and one more slot for the frame that only says what has arrived
ACK_LEFT = 9  # bytes of that one still to be sent
IN_HEADER = 10  # bytes of the current header that have arrived, HEADER_BYTES = it is complete
IN_LEFT = 11  # payload bytes of the current frame still to come
IN_PLACE = 12  # address where the next of them goes
IN_NUMBER = 13  # frames that arrived whole = number of the next one; the mending thread reads it while BROKEN
TOLD = 14  # of those, how many the peer was told of
UNTOLD_BYTES = 15  # payload bytes of the rest
HEADER = 16  # 8 words: the header as received, copied here so that each field is read once, and its MACs
STATE = 24  # NONE, UP, BROKEN or OVER; loop stores (release), mending thread loads (acquire)
REASON = 25  # errno of the break
MISSING = 26  # bytes at least that were missing of the frame in which it broke
BROKE_AT = 27  # CLOCK_MONOTONIC ns; stored before STATE, as these two are
ORDER = 28  # NO_ORDER, LET_GO, TAKE or GIVE_UP: mending thread stores (release), loop loads (acquire), obeys, clears
NEW_FD = 29  # of a TAKE: the descriptor, and
NEW_COUNT = 30  # how many frames the peer has; the mending thread stores both before ORDER
HELD = 31  # where MACs are checked: address of room for a payload, 0 = payloads go straight to the window
SEND_KEY = 32  # addresses of EVP_CIPHER_CTX; the mending thread sets their keys while NONE or BROKEN
RECEIVE_KEY = 33
SEND_COUNTER = 34  # frames sealed since the keys were set: the nonce of the next MACs
RECEIVE_COUNTER = 35
LINK_WORDS = 40

READABLE, WRITABLE = 1, 2  # since the last EAGAIN; edge-triggered epoll tells only about changes
FINISHING = 4  # the peer has closed: read on until the end even after a short read
QUEUED = 8  # is in the READY ring
SEND_OVER = 16  # sending failed: the connection breaks when all that has come is read
ACK_DUE = 32  # the peer is to be told at once what has arrived

NONE = 0  # never connected
UP = 1
BROKEN = 2  # the loop has let go of it: it belongs to the mending thread until an ORDER is obeyed
OVER = 3  # nothing moves on it any more: its peer is dropped, or it could not be mended

NO_ORDER = 0
LET_GO = 1  # the peer has noticed a break: be BROKEN
TAKE = 2  # go on with another descriptor
GIVE_UP = 3

# --- a frame in a connection's queue: its header, its MACs, then ------------------------------------------------------
FRAME_LOCAL = FRAME_BYTES + SEAL_BYTES  # address of the payload
FRAME_NBYTES = FRAME_LOCAL + 8
FRAME_WR_ID = FRAME_LOCAL + 16
FRAME_SLOT_BYTES = FRAME_LOCAL + 24

# --- a peer -----------------------------------------------------------------------------------------------------------
STANDING = 0
LOST_ERRNO = 1  # why the first connection ended
LOST_AT = 2  # and when, CLOCK_MONOTONIC ns
LOST_BYTES = 3  # bytes at least that are missing of the frame in which it ended, 0 = it ended between frames
LOST_UNTIL = 4  # CLOCK_MONOTONIC ns at which DOWN is reported even if other connections still seem alive
PEER_WORDS = 5

ABSENT = 0
PRESENT = 1
ENDING_PEER = 2  # a connection is lost for good, the others are still read
CLOSED = 3  # DOWN was queued after everything that came before it
DROPPED = 4  # told to forget it: queued events are discarded too

# --- sizes ------------------------------------------------------------------------------------------------------------
#: Frames a connection holds that the peer has not, before BUSY.
QUEUE_SLOTS = 256
#: Bytes of one receive that are not the rest of a payload. Large enough to make the system call cheap, small enough to
#: stay in a core's second-level cache until they are copied to the window.
STAGING_BYTES = 128 << 10
#: Frames gathered into one sendmsg (two entries each, and one; the kernel allows 1024 entries).
GATHER_FRAMES = 64
#: Most events that one time slice of a connection can make: zero-length frames in a full staging buffer, the frame
#: whose payload came before it, the completions of a whole queue, and a DOWN or FAULT.
SLICE_EVENTS = STAGING_BYTES // FRAME_BYTES + QUEUE_SLOTS + 4
EVENT_SLOTS = 2 * SLICE_EVENTS
WAITING_SLOTS = 64
EPOLL_EVENT_BYTES = 12 if os.uname().machine == "x86_64" else 16
EPOLL_DATA = EPOLL_EVENT_BYTES - 8
#: A peer whose process ended lost all its connections at once; it is reported when the rest has ended, or after this.
LOST_GRACE_NS = 100_000_000
#: A frame that arrived is acknowledged by the next frame that goes back. Where none does, by a frame of its own: when
#: so many frames or bytes are owed, or after this time.
ACK_FRAMES, ACK_BYTES = 32, 256 << 10
ACK_DELAY_NS = 100_000

IOVEC_WORDS = 2
MSGHDR_WORDS = 7
#: Word of msghdr.msg_iovlen (LP64: name, namelen, iov, iovlen, control, controllen, flags).
MESSAGE_COUNT = 3

assert FRAME_SLOT_BYTES % 8 == 0


@compiled
def link_record(context: int, index: int) -> int:
    """Address of the record of connection ``index``."""
    return peek(context + 8 * LINKS) + index * 8 * LINK_WORDS


@compiled
def peer_record(context: int, rank: int) -> int:
    """Address of the record of peer ``rank``."""
    return peek(context + 8 * PEERS) + rank * 8 * PEER_WORDS


@compiled
def queue_event(context: int, kind: int, value: int, peer: int, status: int) -> None:
    """Queue an event; a time slice begins only when there is room for all it can make."""
    head = peek(context + 8 * EVENTS_HEAD)
    put_event(peek(context + 8 * EVENTS), head % EVENT_SLOTS, kind, value, peer, status)
    poke(context + 8 * EVENTS_HEAD, head + 1)


@compiled
def set_flags(link: int, flags: int) -> None:
    """Set ``flags`` of the connection record at ``link``."""
    poke(link + 8 * FLAGS, peek(link + 8 * FLAGS) | flags)


@compiled
def clear_flags(link: int, flags: int) -> None:
    """Clear ``flags`` of the connection record at ``link``."""
    poke(link + 8 * FLAGS, peek(link + 8 * FLAGS) & ~flags)


@compiled
def wants_to_send(link: int) -> bool:
    """Whether a frame waits, or the peer is to be told what has arrived."""
    waits = peek(link + 8 * POSTED) > peek(link + 8 * SENT_FRAMES)
    return waits or peek(link + 8 * ACK_LEFT) > 0 or peek(link + 8 * FLAGS) & ACK_DUE != 0


@compiled
def has_work(link: int) -> bool:
    """Whether a time slice of the connection could move something."""
    flags = peek(link + 8 * FLAGS)
    if load64(link + 8 * STATE) != UP:
        return False
    return flags & READABLE != 0 or (flags & WRITABLE != 0 and flags & SEND_OVER == 0 and wants_to_send(link))


@compiled
def enqueue(context: int, index: int) -> None:
    """Put connection ``index`` into the READY ring unless it stands there."""
    link = link_record(context, index)
    flags = peek(link + 8 * FLAGS)
    if flags & QUEUED != 0:
        return
    poke(link + 8 * FLAGS, flags | QUEUED)
    head = peek(context + 8 * READY_HEAD)
    slots = peek(context + 8 * RANKS) * peek(context + 8 * CONNECTIONS)
    poke(peek(context + 8 * READY) + (head % slots) * 8, index)
    poke(context + 8 * READY_HEAD, head + 1)
