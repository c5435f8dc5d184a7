"""Memory of the compiled ``roce`` data path: one context per endpoint, records per peer and per link.

A *rail* is one NIC of the endpoint. A *link* is one queue pair to one peer; a peer has one per rail, or several when
writes are dealt over them. Words are indices into int64 arrays, and all of them are private to the process: written by
the endpoint before the proxy thread starts, then by that thread alone; those of a window in device memory by the
endpoint later, before the first command that names an offset in it is in a ring. What a peer's NIC can write besides
the window are the words of :attr:`State.credits_in`, one per link; each is read once and checked before it is used.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from ...state import aligned_zeros
from ..verbs.abi import QP_ATTR, RECV_WR, SEND_WR, SGE, WC, Block
from ..verbs.codes import QPS_ERR, STATUS_ERRNO
from .striping import stripe_table

__all__ = ["State"]

# --- context ----------------------------------------------------------------------------------------------------------
WINDOW = 0  # address of this rank's window
WINDOW_BYTES = 1  # its length, equal on all ranks
RANK = 2
RANKS = 3
QPS = 4  # links per peer and rail
RAIL_COUNT = 5
PEER_LINKS = 6  # RAIL_COUNT * QPS
RAILS = 7  # address of the rail records
LINKS = 8  # address of the link records, [rank][rail][link]
PEERS = 9  # address of the peer records
STRIPES = 10  # address of the stripe of each stream
CURSOR = 11  # rail whose completions the next poll takes first
MODIFY_QP = 12  # address of ibv_modify_qp, to stop a queue pair
STOP = 13  # address of the ibv_qp_attr that asks for the error state
COMPLETIONS = 14  # address of POLL_ENTRIES ibv_wc
BAD = 15  # address of the word in which a provider names the work request that it refused
POOL = 16  # address of POOL_SLOTS ibv_send_wr, each followed by its ibv_sge
POOL_USED = 17  # of them, chained and not posted yet
DIRTY = 18  # address of the list of links that have a chain
DIRTY_COUNT = 19
READY = 20  # address of the ring of links with completions to tell, one slot per link
READY_HEAD = 21
READY_TAIL = 22
SEND_SLOTS = 23  # work requests per link
RECEIVE_SLOTS = 24  # receives per link
SIGNAL_EVERY = 25  # at least every so many work requests one asks for a completion
OWED = 26  # links that owe a credit
ENDING = 27  # peers that failed and are not reported yet
WATCHING = 28  # 1 = every peer is connected: silence means loss. Host stores, loop loads (relaxed)
WATCH_POLLS = 29  # polls since the clock was last read
WATCH_TIME = 30  # CLOCK_MONOTONIC ns of the next look at idle peers
ERRNOS = 31  # address of int64[32]: errno of a completion status
SIGNALS = 32  # completions asked for, for tests
DOORBELLS = 33  # calls of post_send, for tests
SPLIT = 34  # offsets below it lie in device memory, at both ends; 0 = none does
DEVICE_WINDOW = 35  # address of that part of this rank's window
BROKEN_RAIL = 36  # 1 + the rail whose completion queue could not be polled, 0 = none. Loop stores, host reads later
BROKEN_STATUS = 37  # what its poll_cq returned
CONTEXT_WORDS = 40

# --- a rail: one NIC with its completion queue ------------------------------------------------------------------------
CQ = 0  # address of the ibv_cq, 0 = closed
POLL_CQ = 1  # addresses of the provider's functions
POST_SEND = 2
POST_RECV = 3
CREDIT_LKEY = 4  # the NIC's key of the memory of the credit words
BYTE_LIMIT = 5  # most bytes that the endpoint should have in flight on it, 0 = any number
LOAD = 6  # bytes in flight, counted where BYTE_LIMIT is set
RAIL_WORDS = 8

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
RAIL = 20  # address of its rail's record
SHIFT = 21  # offset >> SHIFT is the chunk of the own window, as its NIC knows it
LKEYS = 22  # address of int64[chunks]: that NIC's keys of the own window
TARGET_SHIFT = 23  # the same of the peer's window, as the NIC at the other end knows it
RKEYS = 24
LENGTHS = 25  # address of int64[SEND_SLOTS]: bytes of each, kept where the rail has a BYTE_LIMIT
LINK_LOAD = 26  # of the rail's LOAD, what this link has under way
DEVICE_SHIFT = 27  # SHIFT to RKEYS for the part of the windows that is device memory
DEVICE_LKEYS = 28
DEVICE_TARGET_SHIFT = 29
DEVICE_RKEYS = 30
NEXT_PLACE = 31  # used in the first link of a peer and rail: which of that rail's links takes the next write
LINK_WORDS = 32

DIRTY_LINK, READY_LINK, OWES, RECEIVE_OVER = 1, 2, 4, 8

# --- a peer -----------------------------------------------------------------------------------------------------------
STATE = 0
TARGET = 1  # address of the peer's window there
COMMON_RAILS = 2  # rails that both ends have
STATUS = 3  # status of the completion that failed, -errno for a call that did
VENDOR = 4  # vendor code of that completion
FAILED_LINK = 5  # the link it was on
ENDED_AT = 6  # CLOCK_MONOTONIC ns of the failure
PROBLEM = 7  # FAULT_* code to report, 0 = none
DEVICE_TARGET = 8  # address of the part of the peer's window that is device memory
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
#: As many receives serve a peer well where there are many peers.
SHORT_RECEIVES = 256
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
    """Allocates and holds all of it for one endpoint; freed with the object.

    Args:
        rank, ranks, proxies: of the group.
        rails: NICs of the endpoint.
        qps: links per peer and rail.
        window, window_bytes: this rank's window.
        sends, receives: work requests and receives per link.
    """

    def __init__(
        self,
        *,
        rank: int,
        ranks: int,
        proxies: int,
        rails: int,
        qps: int,
        window: int,
        window_bytes: int,
        sends: int,
        receives: int,
    ) -> None:
        links = ranks * rails * qps
        self.context = np.zeros(CONTEXT_WORDS, np.int64)
        self.rails = np.zeros((rails, RAIL_WORDS), np.int64)
        self.links = np.zeros((links, LINK_WORDS), np.int64)
        self.peers = np.zeros((ranks, PEER_WORDS), np.int64)
        # Shared and anonymous: a forked child must not turn the pages that the NIC knows into copies.
        self._credits = np.frombuffer(mmap.mmap(-1, 2 * links * 8), np.int64)
        #: Written by the NICs of peers (one word per link), read by the loop (acquire), which checks the value.
        self.credits_in = self._credits[:links]
        #: Written by the loop, read by this NIC.
        self.credits_out = self._credits[links:]
        self._stripes = stripe_table(proxies)
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
            RANK: rank,
            RANKS: ranks,
            QPS: qps,
            RAIL_COUNT: rails,
            PEER_LINKS: rails * qps,
            RAILS: self.rails.ctypes.data,
            LINKS: self.links.ctypes.data,
            PEERS: self.peers.ctypes.data,
            STRIPES: self._stripes.ctypes.data,
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

    def link_index(self, peer: int, rail: int, place: int) -> int:
        """Index of link ``place`` to ``peer`` on ``rail``, in ``links`` and among the credit words."""
        return (peer * len(self.rails) + rail) * int(self.context[QPS]) + place

    def add_link(self, peer: int, rail: int, place: int, qp: int) -> int:
        """Enter queue pair ``qp`` as that link; address of its chain of receives, all ready to be posted."""
        index, sends = self.link_index(peer, rail, place), int(self.context[SEND_SLOTS])
        record = self.links[index]
        chain = aligned_zeros(RECEIVE_BATCH * RECV_WR.nbytes)
        self._tables.append(chain.view(np.int64))
        start = int(chain.ctypes.data)
        for each in range(RECEIVE_BATCH):
            RECV_WR.set(start + each * RECV_WR.nbytes, "wr_id", RECEIVE_BIT | index << 32)
            if each + 1 < RECEIVE_BATCH:
                RECV_WR.set(start + each * RECV_WR.nbytes, "next", start + (each + 1) * RECV_WR.nbytes)
        for word, value in {
            QP: qp,
            PEER: peer,
            TICKETS: self.keep([0] * sends),
            LENGTHS: self.keep([0] * sends) if self.rails[rail, BYTE_LIMIT] else 0,
            CREDIT_IN: self.credits_in.ctypes.data + 8 * index,
            CREDIT_OUT: self.credits_out.ctypes.data + 8 * index,
            RECEIVE_CHAIN: start,
            RAIL: self.rails[rail].ctypes.data,
        }.items():
            record[word] = value
        return start

    def detach(self) -> None:
        """Forget all peers: posts are refused and polls find nothing from here on."""
        self.peers[:, STATE] = DROPPED
        self.links[:, QP] = 0
        self.rails[:, CQ] = 0
        self.context[DIRTY_COUNT] = self.context[OWED] = self.context[ENDING] = 0
        self.context[READY_HEAD] = self.context[READY_TAIL] = 0
