"""Memory of the compiled TCP data path: one int64 context per endpoint, records per connection and per peer.

Written by the endpoint before the proxy thread starts, then by that thread alone; nothing here is shared with another
process. Words are indices into int64 arrays.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from ...protocol.frame import FRAME_BYTES

__all__ = ["State"]

# --- context ----------------------------------------------------------------------------------------------------------
WINDOW = 0  # address of this rank's window
WINDOW_BYTES = 1  # its length
RANKS = 2
CONNECTIONS = 3  # connections per peer
LINKS = 4  # address of the connection records, [rank][connection]
PEERS = 5  # address of the peer records
EPOLL = 6  # epoll descriptor, edge-triggered over all connections
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
ENDING = 17  # peers that lost a connection and are not reported yet
BY_FD = 18  # address of a table from descriptor to connection: what epoll returns is a descriptor
CONTEXT_WORDS = 24

# --- a connection -----------------------------------------------------------------------------------------------------
FD = 0  # descriptor, -1 = not connected
PEER = 1
FLAGS = 2  # READABLE | WRITABLE | FINISHING | QUEUED | RECEIVE_OVER | SEND_OVER
POSTED = 3  # frames accepted
SENT_FRAMES = 4  # frames handed to the kernel completely
SENT_BYTES = 5  # bytes of the next frame that the kernel has taken
QUEUE = 6  # address of QUEUE_SLOTS frames, 64 bytes each
IN_HEADER = 7  # bytes of the current header that have arrived, FRAME_BYTES = it is complete and checked
IN_LEFT = 8  # payload bytes of the current frame still to come
IN_PLACE = 9  # address where the next of them goes
IN_NUMBER = 10  # number of the next frame
IN_IMM = 11
HEADER = 12  # 4 words: the header as received, copied here so that each field is read once
LINK_WORDS = 16

READABLE, WRITABLE = 1, 2  # since the last EAGAIN; edge-triggered epoll tells only about changes
FINISHING = 4  # the peer has closed: read on until the end even after a short read
QUEUED = 8  # is in the READY ring
RECEIVE_OVER, SEND_OVER = 16, 32  # no more in this direction

# --- a frame in a connection's queue: its header, then ----------------------------------------------------------------
FRAME_LOCAL = FRAME_BYTES  # address of the payload
FRAME_NBYTES = FRAME_BYTES + 8
FRAME_WR_ID = FRAME_BYTES + 16
FRAME_SLOT_BYTES = 64

# --- a peer -----------------------------------------------------------------------------------------------------------
STATE = 0
LOST_ERRNO = 1  # why the first connection ended
LOST_TIME = 2  # CLOCK_MONOTONIC ns at which DOWN is reported even if other connections still seem alive
LOST_BYTES = 3  # bytes at least that are missing of the frame in which it ended, 0 = it ended between frames
PEER_WORDS = 4

ABSENT = 0
UP = 1
ENDING_PEER = 2  # a connection ended, the others are still read
CLOSED = 3  # DOWN was queued after everything that came before it
DROPPED = 4  # told to forget it: queued events are discarded too

# --- sizes ------------------------------------------------------------------------------------------------------------
#: Frames a connection queues before BUSY.
QUEUE_SLOTS = 256
#: Bytes of one receive that are not the rest of a payload. Large enough to make the system call cheap, small enough to
#: stay in a core's second-level cache until they are copied to the window.
STAGING_BYTES = 128 << 10
#: Frames gathered into one sendmsg (two entries each; the kernel allows 1024 entries).
GATHER_FRAMES = 64
#: Most events one turn of a connection can make: zero-length frames in a full staging buffer, the frame whose payload
#: came before it, the sends, and a DOWN or FAULT.
TURN_EVENTS = STAGING_BYTES // FRAME_BYTES + GATHER_FRAMES + 4
EVENT_SLOTS = 2 * TURN_EVENTS
WAITING_SLOTS = 64
EPOLL_EVENT_BYTES = 12 if os.uname().machine == "x86_64" else 16
EPOLL_DATA = EPOLL_EVENT_BYTES - 8
#: A dead process closes all its connections at once; a peer that lost one is reported when the rest has ended, or after
#: this.
LOST_GRACE_NS = 100_000_000

_IOVEC_WORDS = 2
_MSGHDR_WORDS = 7
#: Word of msghdr.msg_iovlen (LP64: name, namelen, iov, iovlen, control, controllen, flags).
MESSAGE_COUNT = 3


class State:
    """Allocates and holds all of it for one endpoint; freed with the object."""

    def __init__(self, *, ranks: int, connections: int, window: int, window_bytes: int) -> None:
        links = ranks * connections
        self.context = np.zeros(CONTEXT_WORDS, np.int64)
        self.links = np.zeros((links, LINK_WORDS), np.int64)
        self.peers = np.zeros((ranks, PEER_WORDS), np.int64)
        self._queues: dict[int, npt.NDArray[np.int64]] = {}
        self._by_fd = np.zeros(0, np.int64)
        self._events = np.zeros(EVENT_SLOTS * 4, np.int64)
        self._ready = np.zeros(max(links, 1), np.int64)
        self._staging = np.zeros(STAGING_BYTES // 8, np.int64)
        self._vectors = np.zeros(2 * GATHER_FRAMES * _IOVEC_WORDS, np.int64)
        self._message = np.zeros(_MSGHDR_WORDS, np.int64)
        self._waiting = np.zeros(WAITING_SLOTS * 2, np.int64)
        self._message[2] = self._vectors.ctypes.data
        self.links[:, FD] = -1
        self.links[:, PEER] = np.repeat(np.arange(ranks), connections)
        for word, value in {
            WINDOW: window,
            WINDOW_BYTES: window_bytes,
            RANKS: ranks,
            CONNECTIONS: connections,
            LINKS: self.links.ctypes.data,
            PEERS: self.peers.ctypes.data,
            EPOLL: -1,
            EVENTS: self._events.ctypes.data,
            READY: self._ready.ctypes.data,
            STAGING: self._staging.ctypes.data,
            VECTORS: self._vectors.ctypes.data,
            MESSAGE: self._message.ctypes.data,
            WAITING: self._waiting.ctypes.data,
        }.items():
            self.context[word] = value

    @property
    def address(self) -> int:
        """Address of the context."""
        return int(self.context.ctypes.data)

    def attach(self, link: int, fd: int) -> None:
        """Give connection ``link`` its non-blocking socket, registered with EPOLL; its peer is up from now on."""
        if fd >= self._by_fd.size:
            self._by_fd = np.concatenate([self._by_fd, np.zeros(fd + 64 - self._by_fd.size, np.int64)])
            self.context[BY_FD] = self._by_fd.ctypes.data
        self._by_fd[fd] = link
        queue = np.zeros(QUEUE_SLOTS * FRAME_SLOT_BYTES // 8, np.int64)
        self._queues[link] = queue
        record = self.links[link]
        record[FD] = fd
        # Not known to be readable, but an edge may have passed before: the first turn finds out.
        record[FLAGS] = READABLE | WRITABLE | QUEUED
        record[QUEUE] = queue.ctypes.data
        self.peers[int(record[PEER]), STATE] = UP
        self._ready[self.context[READY_HEAD]] = link
        self.context[READY_HEAD] += 1

    def detach(self) -> None:
        """Forget all sockets: posts are refused and polls find nothing from here on."""
        self.links[:, FD] = -1
        self.peers[:, STATE] = DROPPED
        self.context[EPOLL] = -1
        self.context[READY_HEAD] = self.context[READY_TAIL] = 0
