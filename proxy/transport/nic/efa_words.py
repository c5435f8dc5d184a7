"""Memory of the compiled EFA data path: one int64 context per endpoint, records per rail, peer and link.

Written by the endpoint before the proxy thread starts, then by that thread alone; those of a window in device memory by
the endpoint later, before the first command that names an offset in it is in a ring. Nothing here is shared with
another process. Words are indices into int64 arrays. A *link* is a peer seen through one rail: an address handle, a QP
number and the peer's keys.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..verbs.abi import RECV_WR, SGE, WC
from ..verbs.codes import STATUS_ERRNO
from .striping import stripe_table

__all__ = ["State"]

# --- context ----------------------------------------------------------------------------------------------------------
WINDOW = 0  # address of this rank's window
WINDOW_BYTES = 1  # length of every window
RANK = 2
RANKS = 3
RAIL_COUNT = 4
RAILS = 5  # address of the rail records
PEERS = 6  # address of the peer records
LINKS = 7  # address of the link records, [peer][rail]
STRIPES = 8  # address of the stripe of each stream
CURSOR = 9  # rail whose completions the next poll takes first
MAX_WRITE = 10  # most bytes of one write
STRANGERS = 11  # immediates of QPs that are no peer's, dropped
COMPLETIONS = 12  # address of room for COMPLETION_BATCH completions
ERRNOS = 13  # address of the errno that a DOWN carries, by completion status
SHIFT = 14  # offset >> SHIFT is the chunk of a window that an offset lies in, each with keys of its own
SPLIT = 15  # offsets below it lie in device memory, at both ends; 0 = none does
DEVICE_WINDOW = 16  # address of that part of this rank's window
BROKEN_RAIL = 17  # 1 + the rail that is of no use any more, 0 = none. Loop stores, host reads later
BROKEN_STATUS = 18  # status of the work request that failed, or what a call returned (negative)
BROKEN_VENDOR = 19  # the NIC's own code of that work request
CONTEXT_WORDS = 24

# --- a rail: one QP with its completion queue on one NIC --------------------------------------------------------------
QP = 0  # address of the ibv_qp, 0 = closed
QP_EX = 1  # address of its ibv_qp_ex
WR_START = 2  # addresses of the provider's functions
WR_WRITE_IMM = 3
WR_SET_ADDRESS = 4
WR_SET_SGE = 5
WR_COMPLETE = 6
CQ = 7  # address of the ibv_cq
POLL_CQ = 8
POST_RECV = 9
OPEN = 10  # writes posted since wr_start; 0 = no session is open
FREE = 11  # free slots of the send queue
SLOTS = 12  # address of the slots, SLOT_WORDS each
FREE_SLOTS = 13  # address of the stack of free slots' numbers
LOCAL_KEYS = 14  # address of the window's lkeys, one per chunk
OWED = 15  # receives to be posted again; counts only when RECEIVES is not 0
RECEIVES = 16  # receives kept posted, 0 = unsolicited writes need none
RECEIVE_LIST = 17  # address of RECEIVE_BATCH chained ibv_recv_wr
DEPTH = 18  # slots
POSTED = 19  # writes posted, for the counters of tests and benchmarks
DEVICE_SHIFT = 20  # SHIFT and LOCAL_KEYS of the part of the window that is device memory
DEVICE_KEYS = 21
RAIL_WORDS = 24

# --- a slot of the send queue: what is needed when its write completes ------------------------------------------------
SLOT_TICKET = 0  # the proxy's wr_id
SLOT_PEER = 1
SLOT_WORDS = 2

# --- a peer -----------------------------------------------------------------------------------------------------------
STATE = 0
LINK_COUNT = 1  # rails that both ends have
REMOTE_WINDOW = 2  # address of its window in its process
LOST_STATUS = 3  # completion status that parted us from it, and the NIC's own code, for describe()
LOST_VENDOR = 4
DEVICE_TARGET = 5  # address of the part of its window that is device memory
PEER_WORDS = 8

ABSENT, UP, CLOSED = 0, 1, 2

# --- a link -----------------------------------------------------------------------------------------------------------
AH = 0  # address of the ibv_ah
QPN = 1  # of the peer's rail
QKEY = 2
AH_NUMBER = 3  # what a completion names as the sender's address, -1 = the library does not tell
REMOTE_KEYS = 4  # address of the rkeys of the peer's window, one per chunk
DEVICE_TARGET_SHIFT = 5  # the same of the part of the peer's window that is device memory
DEVICE_REMOTE_KEYS = 6
LINK_WORDS = 8

# --- sizes ------------------------------------------------------------------------------------------------------------
#: Completions taken from a rail at once.
COMPLETION_BATCH = 64
#: Completion statuses told apart; higher ones count as the last.
STATUSES = 32
#: Receives posted again at once: often enough not to run dry, seldom enough to be cheap.
RECEIVE_BATCH = 64
#: Bytes of memory that every receive names. A write with an immediate leaves them alone, but libefa puts a receive that
#: names none on no queue, without a word.
LANDING_BYTES = 64
#: wr_id of a receive; sends have their slot's number + 1, an unsolicited write has 0.
RECEIVE_ID = 1 << 62

Words = npt.NDArray[np.int64]


class State:
    """Allocates and holds all of it for one endpoint; freed with the object.

    Args:
        rank, ranks, proxies: of the group.
        window, window_bytes: this rank's window.
        max_write: most bytes of one write.
        shift, chunks: how the windows are registered, see :func:`.window.register_window`.
        depths: by rail, work requests its send queue holds.
        receives: by rail, receives kept posted, 0 = none are needed.
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
        shift: int,
        chunks: int,
        depths: Sequence[int],
        receives: Sequence[int],
    ) -> None:
        count = len(depths)
        self.context: Words = np.zeros(CONTEXT_WORDS, np.int64)
        self.rails: Words = np.zeros((count, RAIL_WORDS), np.int64)
        self.peers: Words = np.zeros((ranks, PEER_WORDS), np.int64)
        self.links: Words = np.zeros((ranks, count, LINK_WORDS), np.int64)
        self.local_keys: Words = np.zeros((count, chunks), np.int64)
        self.remote_keys: Words = np.zeros((ranks, count, chunks), np.int64)
        self._stripes = stripe_table(proxies)
        self._tables: list[Words] = []
        self._completions = np.zeros(COMPLETION_BATCH * WC.nbytes // 8, np.int64)
        self._errnos = np.array([STATUS_ERRNO.get(status, errno.ECONNRESET) for status in range(STATUSES)], np.int64)
        self._slots = [np.zeros((depth, SLOT_WORDS), np.int64) for depth in depths]
        self._free = [np.arange(depth, dtype=np.int64) for depth in depths]
        self._receive_lists = [_receive_list() for _ in depths]
        # Pages of their own: those that a NIC knows may be missing in a forked child.
        self._landing = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
        for word, value in {
            WINDOW: window,
            WINDOW_BYTES: window_bytes,
            RANK: rank,
            RANKS: ranks,
            RAIL_COUNT: count,
            RAILS: self.rails.ctypes.data,
            PEERS: self.peers.ctypes.data,
            LINKS: self.links.ctypes.data,
            STRIPES: self._stripes.ctypes.data,
            MAX_WRITE: max_write,
            SHIFT: shift,
            COMPLETIONS: self._completions.ctypes.data,
            ERRNOS: self._errnos.ctypes.data,
        }.items():
            self.context[word] = value
        self.links[:, :, AH_NUMBER] = -1
        for index, (depth, kept) in enumerate(zip(depths, receives, strict=True)):
            record = self.rails[index]
            record[FREE] = record[DEPTH] = depth
            record[SLOTS] = self._slots[index].ctypes.data
            record[FREE_SLOTS] = self._free[index].ctypes.data
            record[LOCAL_KEYS] = self.local_keys[index].ctypes.data
            record[RECEIVES] = record[OWED] = kept
            record[RECEIVE_LIST] = self._receive_lists[index].ctypes.data
        for peer in range(ranks):
            for index in range(count):
                self.links[peer, index, REMOTE_KEYS] = self.remote_keys[peer, index].ctypes.data

    @property
    def landing(self) -> int:
        """Address of the LANDING_BYTES bytes that receives name."""
        return int(self._landing.ctypes.data)

    def let_land(self, rail: int, lkey: int) -> None:
        """The receives of ``rail`` name the landing memory, which its NIC knows by ``lkey``."""
        entry = int(self._receive_lists[rail].ctypes.data) + RECEIVE_BATCH * RECV_WR.nbytes
        for field, value in {"addr": self.landing, "length": LANDING_BYTES, "lkey": lkey}.items():
            SGE.set(entry, field, value)

    def keep(self, values: Sequence[int]) -> int:
        """Address of an int64 table of ``values`` that lives as long as this object."""
        table = np.array(values, np.int64)
        self._tables.append(table)
        return int(table.ctypes.data)

    @property
    def address(self) -> int:
        """Address of the context."""
        return int(self.context.ctypes.data)


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
