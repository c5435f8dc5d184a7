"""The int64 blocks through which low-latency kernels work: counters that outlive a call, and one operation's routing.

Both are plain memory, so that a GPU implementation keeps them in device memory and a captured graph replays without
the host. Only the kernels of the rank that owns a block touch it; in brackets stands which of them write a word. A
ticket, one int64 per combine, is its message number: ``combine_send`` writes it and ``combine_recv`` reads it.
"""

from __future__ import annotations

import functools
from itertools import count

import numpy as np
import numpy.typing as npt

from ...protocol.layout import LowLatencyPlan, WindowLayout

_I64 = npt.NDArray[np.int64]

# A plan, at the head of ``ROUTE``: the sizes of this operation, whatever the others of the epoch have. [host, once]
_word = count(1)
TOKENS = next(_word)  # most tokens per rank, T
HIDDEN = next(_word)  # values per token, H
EXPERTS = next(_word)  # routed experts, E
TOPK = next(_word)  # experts per token, K
META = next(_word)  # bytes of a token's meta
FIRST_ROW = next(_word)  # bytes of a dispatch message before its first meta
ROW = next(_word)  # most bytes of a row
PLAN = next(_word)  # all of that in one word, as headers carry it

# ``STATE``, one per Buffer and epoch. Up to SCRATCH: [host, once]. Offsets are of regions in the window, steps are the
# bytes from parity 0 to parity 1 of a region. None of it depends on a plan: a slot is where it is for all of them.
_word = count()
DISPATCH_SLOT = next(_word)  # bytes of a dispatch receive slot
DISPATCH_RECV = next(_word)  # offset
DISPATCH_SEND = next(_word)  # offset
COMBINE_RECV = next(_word)  # offset
COMBINE_SEND = next(_word)  # offset
NOTICE_RECV = next(_word)  # offset
NOTICE_SEND = next(_word)  # offset
DISPATCH_SEND_STEP = next(_word)  # step
COMBINE_RECV_STEP = next(_word)  # step
SCRATCH = next(_word)  # address of SCRATCH_BYTES bytes for sums; kernels on a device have none
DISPATCH_NUMBER = next(_word)  # number of the next dispatch message [dispatch_send]
DISPATCH_READ = next(_word)  # dispatch messages before this number are unpacked [dispatch_recv]
# 1 = message DISPATCH_READ + 1 is unpacked although DISPATCH_READ is not: recv hooks called in the other order
DISPATCH_AHEAD = next(_word)  # [dispatch_recv]
COMBINE_NUMBER = next(_word)  # as for dispatch [combine_send]
COMBINE_READ = next(_word)  # [combine_recv]
COMBINE_AHEAD = next(_word)  # [combine_recv]

#: Word at which the tables per peer start; table i of them starts at word PEER_TABLES + i * ranks.
PEER_TABLES = 32
_table = count()
# dispatch messages packed for the peer; with POSTED, where a resumed send goes on
DISPATCH_PACKED = next(_table)  # [dispatch_send]
DISPATCH_POSTED = next(_table)  # pieces (one per channel) of dispatch messages published to the peer [dispatch_send]
COMBINE_PACKED = next(_table)  # as for dispatch [combine_send]
COMBINE_POSTED = next(_table)  # [combine_send]
RECV_ACK_DISPATCH = next(_table)  # own dispatch messages that the peer says it has unpacked [all]
RECV_ACK_COMBINE = next(_table)  # own combine messages whose space the peer says is free again [all]
SENT_ACK_DISPATCH = next(_table)  # the peer's dispatch messages that it was told are unpacked [sends]
SENT_ACK_COMBINE = next(_table)  # the peer's combine messages likewise [sends]
NOTICES_SENT = next(_table)  # notices sent to the peer [sends]
NOTICES_READ = next(_table)  # notices of the peer that have been read [sends]
# two, by parity: where the peer puts combine messages, from the start of that parity
COMBINE_BASE, _ = next(_table), next(_table)  # [combine_send]
_PEER_TABLE_COUNT = next(_table)

#: One block of a row in float32; sums run over blocks so that they stay in the first-level cache.
SCRATCH_BYTES = 4096

# ``ROUTE``, one per dispatch, part of the handle: a number, the plan, then these
NUMBER = 0  # message number of the dispatch [dispatch_send]
_word = count(PLAN + 1)
SENT_TOKENS = next(_word)  # tokens of this rank [host]
FORM = next(_word)  # FORM_* in which rows come back to this rank [host]
UNPACKED = next(_word)  # sources unpacked so far [dispatch_recv]
ORDER = next(_word)  # address of int32[tokens x min(K, R)]: tokens by destination [host]
RETURNS = next(_word)  # address of int64[tokens, K]: rank << 32 | row, or -1 (see cpu/routing.py) [host]
# address of int32[R, T, K]: row of recv_x (expert-major) that slot k of a source's i-th token went to, -1 = not here
PLACES = next(_word)  # [host]
WEIGHTS = next(_word)  # address of float32[R, T, K]: router weights that came with the tokens [host]

#: Word at which the tables per rank start; table i of them starts at word ROUTE_TABLES + i * ranks.
ROUTE_TABLES = 16
_table = count()
STARTS = next(_table)  # first entry of the destination's list in ORDER [route]
COUNTS = next(_table)  # tokens for the destination [route]
PAIRS = next(_table)  # (token, slot) pairs for the destination [route]
RETURN_BASE = next(_table)  # where the destination puts its combine message, in a parity [dispatch_send]
SEND_BASE = next(_table)  # where its dispatch message is packed, in a parity of the staging [dispatch_send]
RECEIVED = next(_table)  # tokens received from the source [dispatch_recv]
RETURN_ROWS = next(_table)  # rows to return to the source [dispatch_recv]
RETURN_TO = next(_table)  # where the source wants them, in a parity of its region [dispatch_recv]
RETURN_FORM = next(_table)  # FORM_* in which the source wants them [dispatch_recv]
TAKEN = next(_table)  # 1 = the source is unpacked: a resumed dispatch_recv goes on with the others [dispatch kernels]
COMBINE_STAGE = next(_table)  # where they are packed in the staging [combine_send]
_ROUTE_TABLE_COUNT = next(_table)


def plan_words(plan: LowLatencyPlan) -> dict[int, int]:
    """The words of ``plan`` in a route block."""
    return {
        TOKENS: plan.tokens,
        HIDDEN: plan.hidden,
        EXPERTS: plan.experts,
        TOPK: plan.topk,
        META: plan.meta,
        FIRST_ROW: plan.first_row,
        ROW: plan.row,
        PLAN: plan.word,
    }


def fixed_words(layout: WindowLayout) -> dict[int, int]:
    """The words of a ``STATE`` block that the window's layout decides, with their values."""
    room = layout.low_latency
    assert room is not None
    return {
        DISPATCH_SLOT: room.dispatch_slot,
        DISPATCH_RECV: layout.ll_dispatch_recv,
        DISPATCH_SEND: layout.ll_dispatch_send,
        COMBINE_RECV: layout.ll_combine_recv,
        COMBINE_SEND: layout.ll_combine_send,
        NOTICE_RECV: layout.notice_recv,
        NOTICE_SEND: layout.notice_send,
        DISPATCH_SEND_STEP: room.dispatch_send,
        COMBINE_RECV_STEP: room.combine_recv,
    }


class StateBlock:
    """Owner of a ``STATE`` block in host memory.

    Attributes:
        words: the block. Readers on the host: counters only, between kernels.
        address: what kernels get; valid while this object lives.
    """

    def __init__(self, layout: WindowLayout) -> None:
        self.words: _I64 = np.zeros(PEER_TABLES + _PEER_TABLE_COUNT * layout.ranks, dtype=np.int64)
        self._scratch: npt.NDArray[np.uint8] = np.zeros(SCRATCH_BYTES, dtype=np.uint8)
        self.address: int = self.words.ctypes.data
        for word, value in fixed_words(layout).items():
            self.words[word] = value
        self.words[SCRATCH] = self._scratch.ctypes.data


@functools.lru_cache(maxsize=256)
def _head(plan: LowLatencyPlan) -> _I64:
    """The first words of a route block that was not sent yet."""
    head: _I64 = np.zeros(ROUTE_TABLES, dtype=np.int64)
    head[NUMBER] = -1
    for word, value in plan_words(plan).items():
        head[word] = value
    return head


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
        self.words[:ROUTE_TABLES] = _head(plan)
        self.words[SENT_TOKENS] = tokens
        self.words[FORM] = form
        self.words[RETURNS] = at
        self.words[ORDER] = at + 8 * returns
        self.words[PLACES] = at + 8 * (returns + order)
        self.words[WEIGHTS] = at + 8 * (returns + order + places)
        self._ranks = ranks

    def table(self, index: int) -> _I64:
        """int64[ranks] view of one of the tables."""
        start = ROUTE_TABLES + index * self._ranks
        return self.words[start : start + self._ranks]
