"""Memory of the compiled ``roce`` data path: the words behind those of :mod:`.words`, and what they point to.

A link is one queue pair to one peer; a peer has one per rail, or several when writes are dealt over them. What a peer's
NIC can write besides the window are the words of :attr:`RoceMemory.credits_in`, one per link; each is read once and
checked before it is used.
"""

from __future__ import annotations

import mmap

import numpy as np

from ...state import aligned_zeros
from ..verbs.abi import QP_ATTR, RECV_WR, SEND_WR, SGE, Block
from ..verbs.codes import QPS_ERR
from . import words
from .words import Memory, Words

# --- context ----------------------------------------------------------------------------------------------------------
QPS = words.OWN_CONTEXT  # links per peer and rail
PEER_LINKS = words.OWN_CONTEXT + 1  # RAIL_COUNT * QPS
MODIFY_QP = words.OWN_CONTEXT + 2  # address of ibv_modify_qp, to stop a queue pair
STOP = words.OWN_CONTEXT + 3  # address of the ibv_qp_attr that asks for the error state
BAD = words.OWN_CONTEXT + 4  # address of the word in which a provider names the work request that it refused
POOL = words.OWN_CONTEXT + 5  # address of POOL_SLOTS ibv_send_wr, each followed by its ibv_sge
POOL_USED = words.OWN_CONTEXT + 6  # of them, chained and not posted yet
DIRTY = words.OWN_CONTEXT + 7  # address of the list of links that have a chain
DIRTY_COUNT = words.OWN_CONTEXT + 8
READY = words.OWN_CONTEXT + 9  # address of the ring of links with completions to report, one slot per link
READY_HEAD = words.OWN_CONTEXT + 10
READY_TAIL = words.OWN_CONTEXT + 11
SEND_SLOTS = words.OWN_CONTEXT + 12  # work requests per link
RECEIVE_SLOTS = words.OWN_CONTEXT + 13  # receives per link
SIGNAL_EVERY = words.OWN_CONTEXT + 14  # at least every so many work requests one asks for a completion
OWED = words.OWN_CONTEXT + 15  # links that owe a credit
ENDING = words.OWN_CONTEXT + 16  # peers that failed and are not reported yet
WATCHING = words.OWN_CONTEXT + 17  # 1 = every peer is connected: silence means loss. Host stores, loop loads (relaxed)
WATCH_POLLS = words.OWN_CONTEXT + 18  # polls since the clock was last read
WATCH_TIME = words.OWN_CONTEXT + 19  # CLOCK_MONOTONIC ns of the next look at idle peers
SIGNALS = words.OWN_CONTEXT + 20  # completions asked for, for tests
DOORBELLS = words.OWN_CONTEXT + 21  # calls of post_send, for tests

# --- a rail -----------------------------------------------------------------------------------------------------------
POST_SEND = words.OWN_RAIL  # address of the provider's function
CREDIT_LKEY = words.OWN_RAIL + 1  # the NIC's key of the credit words that it reads
BYTE_LIMIT = words.OWN_RAIL + 2  # most bytes that the endpoint has in flight on it, but for one write that is longer
LOAD = words.OWN_RAIL + 3  # bytes in flight

# --- a link -----------------------------------------------------------------------------------------------------------
QP = words.OWN_LINK  # address of the ibv_qp, 0 = none
PEER = words.OWN_LINK + 1
FLAGS = words.OWN_LINK + 2  # DIRTY_LINK | READY_LINK | OWES | RECEIVE_OVER
POSTED = words.OWN_LINK + 3  # work requests built
RETIRED = words.OWN_LINK + 4  # of them, known to have completed
REPORTED = words.OWN_LINK + 5  # of them, looked at for a SENT
SIGNALED = words.OWN_LINK + 6  # number after the last one that asks for a completion
CHAIN_HEAD = words.OWN_LINK + 7  # first and last work request not handed to the provider, 0 = none
CHAIN_TAIL = words.OWN_LINK + 8
TICKETS = words.OWN_LINK + 9  # address of int64[SEND_SLOTS]: wr_id + 1 of each, 0 = no SENT
IMMEDIATES = words.OWN_LINK + 10  # immediates posted
ALLOWED = words.OWN_LINK + 11  # immediates that the peer has posted receives for, as last read
CREDIT_IN = words.OWN_LINK + 12  # address of the word that the peer writes ALLOWED to
CREDIT_OUT = words.OWN_LINK + 13  # address of the word that is written to the peer's CREDIT_IN
CREDIT_TARGET = words.OWN_LINK + 14  # address of that word at the peer
CREDIT_RKEY = words.OWN_LINK + 15  # its key
RECEIVED = words.OWN_LINK + 16  # receives used
POSTED_RECEIVES = words.OWN_LINK + 17  # receives posted
GRANTED = words.OWN_LINK + 18  # of them, granted to the peer
RECEIVE_CHAIN = words.OWN_LINK + 19  # address of RECEIVE_BATCH ibv_recv_wr, chained
RAIL = words.OWN_LINK + 20  # address of its rail's record
LENGTHS = words.OWN_LINK + 21  # address of int64[SEND_SLOTS]: bytes of each
LINK_LOAD = words.OWN_LINK + 22  # of the rail's LOAD, what this link has under way
NEXT_PLACE = words.OWN_LINK + 23  # in the first link of a peer and rail: which of that rail's links writes next
LINK_WORDS = words.OWN_LINK + 24

DIRTY_LINK, READY_LINK, OWES, RECEIVE_OVER = 1, 2, 4, 8

# --- a peer -----------------------------------------------------------------------------------------------------------
FAILED_LINK = words.OWN_PEER  # the link on which it failed
ENDED_AT = words.OWN_PEER + 1  # CLOCK_MONOTONIC ns of the failure
PROBLEM = words.OWN_PEER + 2  # FAULT_* code to report, 0 = none

# further states of a peer
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
SLOT_BYTES = SEND_WR.nbytes + SGE.nbytes

#: An idle peer is written to (its credit word) this often: a queue pair whose other end is gone tells nobody otherwise.
WATCH_NS = 200_000_000
#: The clock is read every so many polls.
WATCH_EVERY_POLLS = 32
#: A failed peer is reported when its receives are flushed, or after this.
GRACE_NS = 100_000_000

#: wr_id: link << 32 | number for sends; this bit and the link for receives.
RECEIVE_BIT = 1 << 62


class RoceMemory(Memory):
    """See :class:`.words.Memory`.

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
        super().__init__(
            rank=rank,
            ranks=ranks,
            proxies=proxies,
            rails=rails,
            links=links,
            link_words=LINK_WORDS,
            window=window,
            window_bytes=window_bytes,
        )
        # Shared and anonymous: a forked child must not turn the pages that the NIC knows into copies.
        credits = np.frombuffer(mmap.mmap(-1, 2 * links * 8), np.int64)
        #: Written by the NICs of peers (one word per link), read by the loop (acquire), which checks the value.
        #: Registered by itself: peers can write nothing beside it.
        self.credits_in = credits[:links]
        #: Written by the loop, read by this NIC.
        self.credits_out = credits[links:]
        self._bad = np.zeros(1, np.int64)
        self._pool = aligned_zeros(POOL_SLOTS * SLOT_BYTES)
        self._dirty = np.zeros(links, np.int64)
        self._ready = np.zeros(links, np.int64)
        #: Tickets, lengths and receives of the links.
        self._tables: list[Words] = []
        self._stop = Block(QP_ATTR, qp_state=QPS_ERR)
        pool = self._pool.ctypes.data
        for slot in range(POOL_SLOTS):
            SEND_WR.set(pool + slot * SLOT_BYTES, "sg_list", pool + slot * SLOT_BYTES + SEND_WR.nbytes)
        self.fill(
            self.context,
            {
                QPS: qps,
                PEER_LINKS: rails * qps,
                STOP: self._stop.address,
                BAD: self._bad.ctypes.data,
                POOL: pool,
                DIRTY: self._dirty.ctypes.data,
                READY: self._ready.ctypes.data,
                SEND_SLOTS: sends,
                RECEIVE_SLOTS: receives,
                SIGNAL_EVERY: max(1, sends // 8),
            },
        )

    def _zeros(self, count: int) -> int:
        """Address of int64[count] that lives as long as this object."""
        table: Words = np.zeros(count, np.int64)
        self._tables.append(table)
        return int(table.ctypes.data)

    def link_index(self, peer: int, rail: int, place: int) -> int:
        """Index of link ``place`` to ``peer`` on ``rail``, in ``links`` and among the credit words."""
        return (peer * len(self.rails) + rail) * int(self.context[QPS]) + place

    def add_link(self, peer: int, rail: int, place: int, qp: int) -> int:
        """Enter queue pair ``qp`` as that link; address of its chain of receives, all ready to be posted."""
        index, sends = self.link_index(peer, rail, place), int(self.context[SEND_SLOTS])
        chain = aligned_zeros(RECEIVE_BATCH * RECV_WR.nbytes)
        self._tables.append(chain.view(np.int64))
        start = int(chain.ctypes.data)
        for each in range(RECEIVE_BATCH):
            RECV_WR.set(start + each * RECV_WR.nbytes, "wr_id", RECEIVE_BIT | index << 32)
            if each + 1 < RECEIVE_BATCH:
                RECV_WR.set(start + each * RECV_WR.nbytes, "next", start + (each + 1) * RECV_WR.nbytes)
        self.fill(
            self.links[index],
            {
                QP: qp,
                PEER: peer,
                TICKETS: self._zeros(sends),
                LENGTHS: self._zeros(sends),
                CREDIT_IN: self.credits_in.ctypes.data + 8 * index,
                CREDIT_OUT: self.credits_out.ctypes.data + 8 * index,
                RECEIVE_CHAIN: start,
                RAIL: self.rails[rail].ctypes.data,
            },
        )
        return start

    def detach(self) -> None:
        """Forget all peers: posts are refused and polls find nothing from here on."""
        self.peers[:, words.STATE] = DROPPED
        self.links[:, QP] = 0
        self.rails[:, words.CQ] = 0
        self.context[DIRTY_COUNT] = self.context[OWED] = self.context[ENDING] = 0
        self.context[READY_HEAD] = self.context[READY_TAIL] = 0
