"""Memory of the compiled ``efa`` data path: the words behind those of :mod:`.words`, and what they point to.

A link is an address handle, a QP number, the keys at both ends, and how many completions each may lay in the queue of
the other.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from ..verbs.abi import RECV_WR, SGE
from . import words
from .words import Memory, Words

# --- context ----------------------------------------------------------------------------------------------------------
MAX_WRITE = words.OWN_CONTEXT  # most bytes of one write
STRANGERS = words.OWN_CONTEXT + 1  # immediates of QPs that are no peer's, dropped

# --- a rail: one QP with its completion queue -------------------------------------------------------------------------
QP = words.OWN_RAIL  # address of the ibv_qp, 0 = closed
QP_EX = words.OWN_RAIL + 1  # address of its ibv_qp_ex
WR_START = words.OWN_RAIL + 2  # addresses of the provider's functions
WR_WRITE_IMM = words.OWN_RAIL + 3
WR_SET_ADDRESS = words.OWN_RAIL + 4
WR_SET_SGE = words.OWN_RAIL + 5
WR_COMPLETE = words.OWN_RAIL + 6
OPEN = words.OWN_RAIL + 7  # writes posted since wr_start; 0 = no session is open
FREE = words.OWN_RAIL + 8  # free slots of the send queue
SLOTS = words.OWN_RAIL + 9  # address of the slots, SLOT_WORDS each
FREE_SLOTS = words.OWN_RAIL + 10  # address of the stack of free slots' numbers
OWED = words.OWN_RAIL + 11  # receives to be posted again; counts only when RECEIVES is not 0
RECEIVES = words.OWN_RAIL + 12  # receives kept posted, 0 = unsolicited writes need none
RECEIVE_LIST = words.OWN_RAIL + 13  # address of RECEIVE_BATCH chained ibv_recv_wr
DEPTH = words.OWN_RAIL + 14  # slots
POSTED = words.OWN_RAIL + 15  # writes posted, for the counters of tests and benchmarks
STEP = words.OWN_RAIL + 16  # writes of a peer after which it is told that they were taken; 0 = it need not know
LATE = words.OWN_RAIL + 17  # 1 = a peer is to be told

# --- a slot of the send queue: what is needed when its write completes ------------------------------------------------
SLOT_TICKET = 0  # the proxy's wr_id, or UNTICKETED
SLOT_PEER = 1
SLOT_WORDS = 2

UNTICKETED = -1  # a write of this transport's own: nobody waits for it

# --- a peer's further state -------------------------------------------------------------------------------------------
CLOSED = 2

# --- a link -----------------------------------------------------------------------------------------------------------
AH = words.OWN_LINK  # address of the ibv_ah
QPN = words.OWN_LINK + 1  # of the peer's rail
QKEY = words.OWN_LINK + 2
AH_NUMBER = words.OWN_LINK + 3  # what a completion names as the sender's address, -1 = the library does not tell
ROOM = words.OWN_LINK + 4  # writes that the peer's completion queue holds of ours; 0 = any number
UNTOLD = words.OWN_LINK + 5  # writes posted that the peer has not told to have taken from there
TAKEN = words.OWN_LINK + 6  # writes of the peer that were taken and that it has not been told of
LINK_WORDS = 16

# --- sizes ------------------------------------------------------------------------------------------------------------
#: Receives posted again at once: often enough not to run dry, seldom enough to be cheap.
RECEIVE_BATCH = 64
#: Bytes of memory that every receive names. A write with an immediate leaves them alone, but libefa puts a receive that
#: names none on no queue, without a word.
LANDING_BYTES = 64
#: wr_id of a receive; sends have their slot's number + 1, an unsolicited write has 0.
RECEIVE_ID = 1 << 62


class EfaMemory(Memory):
    """See :class:`.words.Memory`.

    Args:
        rank, ranks, proxies: of the group.
        window, window_bytes: this rank's window.
        max_write: most bytes of one write.
        depths: by rail, work requests its send queue holds.
        receives: by rail, receives kept posted, 0 = none are needed.
        steps: by rail, writes of a peer after which it is told that they were taken, 0 = never.
    """

    def __init__(
        self,
        *,
        rank: int,
        ranks: int,
        proxies: int,
        window: int,
        window_bytes: int,
        max_write: int,
        depths: Sequence[int],
        receives: Sequence[int],
        steps: Sequence[int],
    ) -> None:
        count = len(depths)
        super().__init__(
            rank=rank,
            ranks=ranks,
            proxies=proxies,
            rails=count,
            links=ranks * count,
            link_words=LINK_WORDS,
            window=window,
            window_bytes=window_bytes,
        )
        self._slots = [np.zeros((depth, SLOT_WORDS), np.int64) for depth in depths]
        self._free = [np.arange(depth, dtype=np.int64) for depth in depths]
        self._receive_lists = [_receive_list() for _ in depths]
        # Pages of their own: those that a NIC knows may be missing in a forked child.
        self._landing = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        self.context[MAX_WRITE] = max_write
        self.links[:, AH_NUMBER] = -1
        for index, (depth, kept, step) in enumerate(zip(depths, receives, steps, strict=True)):
            self.fill(
                self.rails[index],
                {
                    FREE: depth,
                    DEPTH: depth,
                    SLOTS: self._slots[index].ctypes.data,
                    FREE_SLOTS: self._free[index].ctypes.data,
                    RECEIVES: kept,
                    STEP: step,
                    RECEIVE_LIST: self._receive_lists[index].ctypes.data,
                },
            )

    def link_index(self, peer: int, rail: int) -> int:
        """Index of the link to ``peer`` over ``rail`` in ``links``."""
        return peer * len(self.rails) + rail

    @property
    def landing(self) -> int:
        """Address of the LANDING_BYTES bytes that receives name."""
        return int(self._landing.ctypes.data)

    def let_land(self, rail: int, lkey: int) -> int:
        """The receives of ``rail`` name the landing memory, which its NIC knows by ``lkey``; the address of their
        chain, RECEIVE_BATCH long."""
        chain = int(self._receive_lists[rail].ctypes.data)
        entry = chain + RECEIVE_BATCH * RECV_WR.nbytes
        for field, value in {"addr": self.landing, "length": LANDING_BYTES, "lkey": lkey}.items():
            SGE.set(entry, field, value)
        return chain


def _receive_list() -> Words:
    """RECEIVE_BATCH receives, chained, and after them the one ``ibv_sge`` that all of them name."""
    words: Words = np.zeros((RECEIVE_BATCH * RECV_WR.nbytes + SGE.nbytes) // 8, np.int64)
    requests = words[: RECEIVE_BATCH * RECV_WR.nbytes // 8].reshape(RECEIVE_BATCH, -1)
    requests[:, RECV_WR["wr_id"] // 8] = RECEIVE_ID
    requests[:-1, RECV_WR["next"] // 8] = words.ctypes.data + np.arange(1, RECEIVE_BATCH) * RECV_WR.nbytes
    requests[:, RECV_WR["sg_list"] // 8] = words.ctypes.data + RECEIVE_BATCH * RECV_WR.nbytes
    # rule: efa: a receive names memory
    requests[:, RECV_WR["num_sge"] // 8] = 1
    return words
