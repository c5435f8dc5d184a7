"""The int64 blocks through which low-latency kernels work: counters that outlive a call, and one operation's routing.

Both are plain memory, so that a GPU implementation keeps them in device memory and a captured graph replays without
the host. A block is told to kernels by its address. Only the kernels of the rank that owns a block touch it; the last
column says which of them writes a word.

``STATE``, one per Buffer and window generation:

    word  name                meaning                                                            writer
    0     TOKENS              most tokens per rank, T                                            host, once
    1     HIDDEN              values per token, H                                                host, once
    2     EXPERTS             routed experts, E                                                  host, once
    3     TOPK                experts per token, K                                               host, once
    4     META                bytes of a token's meta                                            host, once
    5     ROW                 most bytes of a row                                                host, once
    6     DIGEST              digest of the plan                                                 host, once
    7     DISPATCH_SLOT       bytes of a dispatch receive slot                                   host, once
    8     DISPATCH_RECV       window offset of the region; likewise the next five                host, once
    9     DISPATCH_SEND
    10    COMBINE_RECV
    11    COMBINE_SEND
    12    NOTICE_RECV
    13    NOTICE_SEND
    14    DISPATCH_SEND_STEP  bytes from parity 0 to parity 1 of the region; likewise the next   host, once
    15    COMBINE_RECV_STEP   two
    16    COMBINE_SEND_STEP
    17    SCRATCH             address of SCRATCH_BYTES bytes for sums                            host, once
    18    DISPATCH_NUMBER     number of the next dispatch message                                dispatch_send
    19    DISPATCH_READ       dispatch messages before this number are unpacked                  dispatch_recv
    20    DISPATCH_AHEAD      1 = message DISPATCH_READ + 1 is unpacked although DISPATCH_READ   dispatch_recv
                              is not (recv hooks called in the other order)
    21    COMBINE_NUMBER      as for dispatch                                                    combine_send
    22    COMBINE_READ                                                                           combine_recv
    23    COMBINE_AHEAD                                                                          combine_recv
    32    tables of int64[ranks], in the order of PEER_TABLES, see below

    DISPATCH_PACKED   dispatch messages packed for the peer; with POSTED, where a resumed send goes on     dispatch_send
    DISPATCH_POSTED   pieces (one per channel) of dispatch messages published to the peer                  dispatch_send
    COMBINE_PACKED    as for dispatch                                                                      combine_send
    COMBINE_POSTED                                                                                         combine_send
    SEEN_DISPATCH     own dispatch messages that the peer says it has unpacked (headers, notices)          all
    SEEN_COMBINE      own combine messages whose space the peer says is free again                         all
    TOLD_DISPATCH     the peer's dispatch messages that this rank has told it are unpacked                 send kernels
    TOLD_COMBINE      the peer's combine messages likewise                                                 send kernels
    NOTICES_SENT      notices sent to the peer                                                             send kernels
    NOTICES_READ      notices of the peer that have been looked at                                         send kernels
    COMBINE_BASE0     where the peer puts combine messages of parity 0, from the start of that parity      combine_send
    COMBINE_BASE1     the same for parity 1                                                                combine_send

``ROUTE``, one per dispatch, part of the handle:

    word  name          meaning                                                                       writer
    0     NUMBER        message number of the dispatch                                                dispatch_send
    1     SENT_TOKENS   tokens of this rank                                                           host
    2     FORM          FORM_* in which rows come back to this rank                                   host
    3     UNPACKED      sources unpacked so far; where a resumed dispatch_recv goes on                dispatch_recv
    4     ORDER         address of int32[tokens x min(K, R)]: tokens by destination                   host
    5     RETURNS       address of int64[tokens, K]: rank << 32 | row, or -1 (see cpu/routing.py)     host
    6     PLACES        address of int32[R, T, K]: row of recv_x (expert-major) that slot k of a      host
                        source's i-th token went to, -1 when not here
    7     WEIGHTS       address of float32[R, T, K]: router weights that came with the tokens         host
    16    tables of int64[ranks], in the order of ROUTE_TABLES:

    STARTS        first entry of the destination's list in ORDER                                      route
    COUNTS        tokens for the destination                                                          route
    PAIRS         (token, slot) pairs for the destination                                             route
    RETURN_BASE   where the destination puts its combine message, from the start of a parity          dispatch_send
    SEND_BASE     where its dispatch message is packed, from the start of a parity of the staging     dispatch_send
    RECEIVED      tokens received from the source                                                     dispatch_recv
    RETURN_ROWS   rows to return to the source                                                        dispatch_recv
    RETURN_TO     where the source wants them, from the start of a parity of its region               dispatch_recv
    RETURN_FORM   FORM_* in which the source wants them                                               dispatch_recv
    COMBINE_STAGE where they are packed, from the start of a parity of the staging                    combine_send

``TICKET``, one int64 per combine: its message number, written by combine_send and read by combine_recv.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...protocol.layout import LowLatencyPlan, WindowLayout
from ...protocol.message import round_up

_I64 = npt.NDArray[np.int64]

TOKENS, HIDDEN, EXPERTS, TOPK, META, ROW, DIGEST, DISPATCH_SLOT = range(8)
DISPATCH_RECV, DISPATCH_SEND, COMBINE_RECV, COMBINE_SEND, NOTICE_RECV, NOTICE_SEND = range(8, 14)
DISPATCH_SEND_STEP, COMBINE_RECV_STEP, COMBINE_SEND_STEP, SCRATCH = range(14, 18)
DISPATCH_NUMBER, DISPATCH_READ, DISPATCH_AHEAD = range(18, 21)
COMBINE_NUMBER, COMBINE_READ, COMBINE_AHEAD = range(21, 24)

#: Word at which the tables per peer start; table i of them starts at word PEER_TABLES + i * ranks.
PEER_TABLES = 32
(
    DISPATCH_PACKED,
    DISPATCH_POSTED,
    COMBINE_PACKED,
    COMBINE_POSTED,
    SEEN_DISPATCH,
    SEEN_COMBINE,
    TOLD_DISPATCH,
    TOLD_COMBINE,
    NOTICES_SENT,
    NOTICES_READ,
    COMBINE_BASE0,
    COMBINE_BASE1,
) = range(12)
_PEER_TABLE_COUNT = 12

#: One block of a row in float32; sums run over blocks so that they stay in the first-level cache.
SCRATCH_BYTES = 4096

NUMBER, SENT_TOKENS, FORM, UNPACKED, ORDER, RETURNS, PLACES, WEIGHTS = range(8)

#: Word at which the tables per rank start; table i of them starts at word ROUTE_TABLES + i * ranks.
ROUTE_TABLES = 16
(
    STARTS,
    COUNTS,
    PAIRS,
    RETURN_BASE,
    SEND_BASE,
    RECEIVED,
    RETURN_ROWS,
    RETURN_TO,
    RETURN_FORM,
    COMBINE_STAGE,
) = range(10)
_ROUTE_TABLE_COUNT = 10


class StateBlock:
    """Owner of a ``STATE`` block in host memory.

    Attributes:
        words: the block. Readers on the host: counters only, between kernels.
        address: what kernels get; valid while this object lives.
    """

    def __init__(self, plan: LowLatencyPlan, layout: WindowLayout) -> None:
        self.plan = plan
        self.words: _I64 = np.zeros(PEER_TABLES + _PEER_TABLE_COUNT * plan.ranks, dtype=np.int64)
        self._scratch: npt.NDArray[np.uint8] = np.zeros(SCRATCH_BYTES, dtype=np.uint8)
        self.address: int = self.words.ctypes.data
        for word, value in {
            TOKENS: plan.tokens,
            HIDDEN: plan.hidden,
            EXPERTS: plan.experts,
            TOPK: plan.topk,
            META: plan.meta,
            ROW: plan.row,
            DIGEST: plan.digest,
            DISPATCH_SLOT: plan.dispatch_slot,
            DISPATCH_RECV: layout.ll_dispatch_recv,
            DISPATCH_SEND: layout.ll_dispatch_send,
            COMBINE_RECV: layout.ll_combine_recv,
            COMBINE_SEND: layout.ll_combine_send,
            NOTICE_RECV: layout.notice_recv,
            NOTICE_SEND: layout.notice_send,
            DISPATCH_SEND_STEP: round_up(plan.dispatch_send, 128),
            COMBINE_RECV_STEP: round_up(plan.combine_recv, 128),
            COMBINE_SEND_STEP: round_up(plan.combine_send, 128),
            SCRATCH: self._scratch.ctypes.data,
        }.items():
            self.words[word] = value

    @property
    def dispatches_in_flight(self) -> int:
        """Dispatches sent and not yet received."""
        return int(self.words[DISPATCH_NUMBER] - self.words[DISPATCH_READ] - self.words[DISPATCH_AHEAD])

    @property
    def combines_in_flight(self) -> int:
        """Combines sent and not yet received."""
        return int(self.words[COMBINE_NUMBER] - self.words[COMBINE_READ] - self.words[COMBINE_AHEAD])

    @property
    def next_dispatch_has_space(self) -> bool:
        """False while the dispatch that used the next one's parity has not been received."""
        return bool(self.words[DISPATCH_NUMBER] - self.words[DISPATCH_READ] < 2)

    @property
    def next_combine_has_space(self) -> bool:
        """False while the combine that used the next one's parity has not been received."""
        return bool(self.words[COMBINE_NUMBER] - self.words[COMBINE_READ] < 2)


class RouteBlock:
    """Owner of a ``ROUTE`` block and its arrays in host memory, for ``tokens`` tokens of this rank.

    Attributes:
        words: the block.
        address: what kernels get; valid while this object lives.
    """

    def __init__(self, plan: LowLatencyPlan, tokens: int, form: int) -> None:
        ranks, topk = plan.ranks, plan.topk
        tables = ROUTE_TABLES + _ROUTE_TABLE_COUNT * ranks
        returns = tokens * topk
        order = -(-tokens * min(topk, ranks) // 2)
        places = -(-ranks * plan.tokens * topk // 2)
        # one allocation; kernels write every word of it before they read it, except the words set here
        self.words: _I64 = np.empty(tables + returns + order + 2 * places, dtype=np.int64)
        self.address: int = self.words.ctypes.data
        at = self.address + 8 * tables
        self.words[NUMBER] = -1
        self.words[SENT_TOKENS] = tokens
        self.words[FORM] = form
        self.words[UNPACKED] = 0
        self.words[RETURNS] = at
        self.words[ORDER] = at + 8 * returns
        self.words[PLACES] = at + 8 * (returns + order)
        self.words[WEIGHTS] = at + 8 * (returns + order + places)
        self._ranks = ranks

    def table(self, index: int) -> _I64:
        """int64[ranks] view of one of the tables."""
        start = ROUTE_TABLES + index * self._ranks
        return self.words[start : start + self._ranks]
