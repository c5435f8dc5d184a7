"""Memory of the compiled ``roce`` data path: one context per endpoint, records per peer and per link.

A *link* is one queue pair to one peer; a peer has one, or several when writes are dealt over them. Words are indices
into int64 arrays, and all of them are private to the process: written by the endpoint before the proxy thread starts,
then by that thread alone. What a peer's NIC can write besides the window are the words of :attr:`State.credits_in`,
one per link; each is read once and checked before it is used.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from ..state import aligned_zeros
from .verbs_abi import QP_ATTR, RECV_WR, SEND_WR, SGE, WC, Block
from .verbs_codes import QPS_ERR, STATUS_ERRNO

__all__ = ["State"]

# --- context ----------------------------------------------------------------------------------------------------------
WINDOW = 0  # address of this rank's window
WINDOW_BYTES = 1  # its length, equal on all ranks
RANKS = 2
QPS = 3  # links per peer
LINKS = 4  # address of the link records, [rank][link]
PEERS = 5  # address of the peer records
CQ = 6  # address of the ibv_cq
POLL_CQ = 7  # addresses of the provider's functions
POST_SEND = 8
POST_RECV = 9
MODIFY_QP = 10  # of ibv_modify_qp, to stop a queue pair
STOP = 11  # address of the ibv_qp_attr that asks for the error state
COMPLETIONS = 12  # address of POLL_ENTRIES ibv_wc
BAD = 13  # address of the word in which a provider names the work request that it refused
POOL = 14  # address of POOL_SLOTS ibv_send_wr, each followed by its ibv_sge
POOL_USED = 15  # of them, chained and not posted yet
DIRTY = 16  # address of the list of links that have a chain
DIRTY_COUNT = 17
READY = 18  # address of the ring of links with completions to tell, one slot per link
READY_HEAD = 19
READY_TAIL = 20
SHIFT = 21  # offset >> SHIFT is the chunk of the window that an offset lies in
LKEYS = 22  # address of int64[chunks]: keys of this rank's window
CREDIT_LKEY = 23  # key of the memory of the credit words
SEND_SLOTS = 24  # work requests per link
RECEIVE_SLOTS = 25  # receives per link
SIGNAL_EVERY = 26  # at least every so many work requests one asks for a completion
INLINE = 27  # SEND_INLINE when credit words may travel inside the work request
OWED = 28  # links that owe a credit
ENDING = 29  # peers that failed and are not reported yet
WATCHING = 30  # 1 = every peer is connected: silence means loss. Host stores, loop loads (relaxed)
WATCH_POLLS = 31  # polls since the clock was last read
WATCH_TIME = 32  # CLOCK_MONOTONIC ns of the next look at idle peers
ERRNOS = 33  # address of int64[32]: errno of a completion status
SIGNALS = 34  # completions asked for, for tests
DOORBELLS = 35  # calls of post_send, for tests
CONTEXT_WORDS = 40

# --- a link -----------------------------------------------------------------------------------------------------------
QP = 0  # address of the ibv_qp, 0 = none
PEER = 1
FLAGS = 2  # DIRTY_LINK | READY_LINK | OWES | RECEIVE_OVER
POSTED = 3  # work requests built
RETIRED = 4  # of them, known to have completed
TOLD = 5  # of them, looked at for a SENT
SIGNALED = 6  # number after the last one that asks for a completion
CHAIN_HEAD = 7  # first and last work request not handed to the provider, 0 = none
CHAIN_TAIL = 8
TICKETS = 9  # address of int64[SEND_SLOTS]: wr_id + 1 of each, 0 = no SENT
IMMEDIATES = 10  # immediates posted
ALLOWED = 11  # immediates that the peer has posted receives for, as last read
CREDIT_IN = 12  # address of the word that the peer writes ALLOWED to
CREDIT_OUT = 13  # address of the word that is written to the peer's CREDIT_IN
CREDIT_TARGET = 14  # address of that word at the peer
CREDIT_RKEY = 15  # its key
RECEIVED = 16  # receives used
POSTED_RECEIVES = 17  # receives posted
GRANTED = 18  # of them, told to the peer
RECEIVE_CHAIN = 19  # address of RECEIVE_BATCH ibv_recv_wr, chained
LINK_WORDS = 24

DIRTY_LINK, READY_LINK, OWES, RECEIVE_OVER = 1, 2, 4, 8

# --- a peer -----------------------------------------------------------------------------------------------------------
STATE = 0
NEXT_LINK = 1  # the link that takes the next write
TARGET = 2  # address of the peer's window there
RKEYS = 3  # address of int64[chunks]: its keys
TARGET_SHIFT = 4  # offset >> TARGET_SHIFT is the chunk at the peer
STATUS = 5  # status of the completion that failed, -errno for a call that did
VENDOR = 6  # vendor code of that completion
ENDED_AT = 7  # CLOCK_MONOTONIC ns of the failure
PROBLEM = 8  # FAULT_* code to report, 0 = none
PEER_WORDS = 12

ABSENT = 0
UP = 1
ENDING_PEER = 2  # failed; what arrived before is still delivered
CLOSED = 3  # DOWN or FAULT was reported
DROPPED = 4  # told to forget it

# --- sizes ------------------------------------------------------------------------------------------------------------
#: Work requests and receives per link, where the NIC allows as many. A proxy has at most 1,024 writes of a stream and
#: half of UCCL_EP_WRITES_IN_FLIGHT per peer under way; more than a few hundred hide no latency that matters.
LINK_SENDS, LINK_RECEIVES = 512, 1024
#: Receives are posted anew in chains of this many.
RECEIVE_BATCH = 32
#: Work requests kept free for credits, so that data cannot hold them up.
SEND_RESERVE = 8
#: Work requests chained before they are handed over even without a flush.
POOL_SLOTS = 256
#: Completions taken per call.
POLL_ENTRIES = 64
SLOT_BYTES = SEND_WR.nbytes + SGE.nbytes

#: An idle peer is written to (its credit word) this often: a queue pair whose other end is gone tells nobody otherwise.
WATCH_NS = 200_000_000
#: The clock is read every so many polls.
WATCH_EVERY_POLLS = 32
#: A failed peer is reported when its receives are flushed, or after this.
GRACE_NS = 100_000_000

#: wr_id: link << 32 | number for sends; this bit and the link for receives.
RECEIVE_BIT = 1 << 62


class State:
    """Allocates and holds all of it for one endpoint; freed with the object."""

    def __init__(self, *, ranks: int, qps: int, window: int, window_bytes: int, sends: int, receives: int) -> None:
        links = ranks * qps
        self.context = np.zeros(CONTEXT_WORDS, np.int64)
        self.links = np.zeros((links, LINK_WORDS), np.int64)
        self.peers = np.zeros((ranks, PEER_WORDS), np.int64)
        # Shared and anonymous: a forked child must not turn the pages that the NIC knows into copies.
        self._credits = np.frombuffer(mmap.mmap(-1, 2 * links * 8), np.int64)
        #: Written by the NICs of peers (one word per link), read by the loop (acquire), which checks the value.
        self.credits_in = self._credits[:links]
        #: Written by the loop, read by this NIC.
        self.credits_out = self._credits[links:]
        self._completions = aligned_zeros(POLL_ENTRIES * WC.nbytes)
        self._bad = np.zeros(1, np.int64)
        self._pool = aligned_zeros(POOL_SLOTS * SLOT_BYTES)
        self._dirty = np.zeros(links, np.int64)
        self._ready = np.zeros(links, np.int64)
        self._errnos = np.full(32, 104, np.int64)  # ECONNRESET
        self._tables: list[npt.NDArray[np.int64]] = []
        self._stop = Block(QP_ATTR, qp_state=QPS_ERR)
        for status, number in STATUS_ERRNO.items():
            self._errnos[status] = number
        pool = self._pool.ctypes.data
        for slot in range(POOL_SLOTS):
            SEND_WR.set(pool + slot * SLOT_BYTES, "sg_list", pool + slot * SLOT_BYTES + SEND_WR.nbytes)
        for word, value in {
            WINDOW: window,
            WINDOW_BYTES: window_bytes,
            RANKS: ranks,
            QPS: qps,
            LINKS: self.links.ctypes.data,
            PEERS: self.peers.ctypes.data,
            STOP: self._stop.address,
            COMPLETIONS: self._completions.ctypes.data,
            BAD: self._bad.ctypes.data,
            POOL: pool,
            DIRTY: self._dirty.ctypes.data,
            READY: self._ready.ctypes.data,
            SEND_SLOTS: sends,
            RECEIVE_SLOTS: receives,
            SIGNAL_EVERY: max(1, sends // 8),
            ERRNOS: self._errnos.ctypes.data,
        }.items():
            self.context[word] = value

    @property
    def address(self) -> int:
        """Address of the context."""
        return int(self.context.ctypes.data)

    @property
    def credit_bytes(self) -> int:
        """Bytes of the memory that holds the credit words, starting at ``credits_in``."""
        return int(self._credits.nbytes)

    def keep(self, values: list[int]) -> int:
        """Address of an int64 table of ``values`` that lives as long as this object."""
        table = np.array(values, np.int64)
        self._tables.append(table)
        return int(table.ctypes.data)

    def add_link(self, index: int, peer: int, qp: int) -> int:
        """Enter queue pair ``qp`` as link ``index``; address of its chain of receives, all ready to be posted."""
        record = self.links[index]
        chain = aligned_zeros(RECEIVE_BATCH * RECV_WR.nbytes)
        self._tables.append(chain.view(np.int64))
        start = int(chain.ctypes.data)
        for place in range(RECEIVE_BATCH):
            RECV_WR.set(start + place * RECV_WR.nbytes, "wr_id", RECEIVE_BIT | index << 32)
            if place + 1 < RECEIVE_BATCH:
                RECV_WR.set(start + place * RECV_WR.nbytes, "next", start + (place + 1) * RECV_WR.nbytes)
        for word, value in {
            QP: qp,
            PEER: peer,
            TICKETS: self.keep([0] * int(self.context[SEND_SLOTS])),
            CREDIT_IN: self.credits_in.ctypes.data + 8 * index,
            CREDIT_OUT: self.credits_out.ctypes.data + 8 * index,
            RECEIVE_CHAIN: start,
        }.items():
            record[word] = value
        return start

    def detach(self) -> None:
        """Forget all peers: posts are refused and polls find nothing from here on."""
        self.peers[:, STATE] = DROPPED
        self.links[:, QP] = 0
        self.context[DIRTY_COUNT] = self.context[OWED] = self.context[ENDING] = 0
        self.context[READY_HEAD] = self.context[READY_TAIL] = 0
        self.context[CQ] = 0
