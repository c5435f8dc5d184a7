"""The memory through which low-latency kernels on a device work: a state block per epoch, a plan block per plan, a
route block per dispatch.

All are int64 tensors on the device. Only kernels of the rank that owns a block touch it after the host has made it; in
brackets stands which of them write a word.
"""

from __future__ import annotations

from itertools import count

import torch

from ...protocol.command import MAX_WRITE_BYTES
from ...protocol.layout import LowLatencyPlan, WindowLayout
from ...protocol.message import round_up
from . import low_latency as host

# ``STATE``: the words of the host's block, then these, with SINK where normal mode has it
_word = count(24)
assert host.COMBINE_AHEAD < 24
ARRIVALS = next(_word)  # programs of the running kernel that have arrived; 0 between kernels [all]
SINK = next(_word)  # takes stores that cannot be predicated [all]
FREE = next(_word)  # own combine space: messages before this number may be sent again [combine kernels]
PARTS = next(_word)  # most commands that a channel of one message needs [host, once]

#: Word at which the tables of int64[ranks] start.
STATE_WORDS = 32
STATE_TABLES = (
    "RECV_ACK_DISPATCH",  # own dispatch messages that the peer says it has unpacked [sends, arrival]
    "RECV_ACK_COMBINE",  # own combine messages whose space the peer says is free again [sends, arrival]
    "SENT_ACK_DISPATCH",  # the peer's dispatch messages that it was told are unpacked [sends]
    "SENT_ACK_COMBINE",  # the peer's combine messages likewise [sends]
    "NOTICES_SENT",  # notices sent to the peer [sends]
    "NOTICES_READ",  # notices of the peer that have been read [sends]
    "COMBINE_BASE",  # where the peer puts combine messages of parity 0, in that parity [combine_send]
    "COMBINE_BASE_ODD",  # the same of parity 1
    "COMBINE_COME",  # combine messages of parity 0 that have arrived from the peer [combine kernels]
    "COMBINE_COME_ODD",  # the same of parity 1
    "MESSAGE_AT",  # address of the message being packed for the peer [first of two send kernels, like the next three]
    "MESSAGE_FROM",  # its offset in this rank's window
    "MESSAGE_TO",  # its offset in the peer's window
    "MESSAGE_BYTES",  # its length
)

# ``PLAN``, which nobody writes once it is there, so that captured graphs of any shape find theirs: the words of the
# host's plan, then where the arrays start in a route block, in bytes
_word = count(host.PLAN + 1)
ROUTE_SENDS = next(_word)  # int64 [T, K]: rank << 32 | row of its message, at the first slot of a rank; else -1 [route]
ROUTE_RETURNS = next(_word)  # int64 [T, K]: as in cpu/routing.py [route]
# int32 [R, T, K]: expert << 16 | position among the source's rows of it; -1 = not here [count]
ROUTE_PLACES = next(_word)
ROUTE_WEIGHTS = next(_word)  # float32 [R, T, K]: router weights that came with the tokens [unpack]
ROUTE_BEFORE = next(_word)  # int32 [R, T]: (token, slot) pairs of the source before this token [count]
ROUTE_COUNTS = next(_word)  # int32 [R, L]: rows of the source for the local expert [count]

# ``ROUTE``: the message number of the dispatch at word 0 and a copy of the plan [route], then tables of int64[ranks],
# then the arrays
ROUTE_WORDS = 16
ROUTE_TABLES = (
    "COUNTS",  # tokens for the destination [route]
    "PAIRS",  # (token, slot) pairs for the destination [route]
    "RETURN_BASE",  # where it puts its combine message, from the start of a parity [route]
    "RECEIVED",  # tokens received from the source [arrival of the dispatch]
    "RETURN_ROWS",  # rows to return to the source [count]
    "RETURN_TO",  # where the source wants them, from the start of a parity [arrival of the dispatch]
    "RETURN_FORM",  # FORM_* in which the source wants them [arrival of the dispatch]
)


class DeviceState:
    """Owner of a ``STATE`` block on ``device``.

    Attributes:
        words: the block, int64.
        address: what kernels get; valid while this object lives.
    """

    def __init__(self, layout: WindowLayout, channels: int, device: torch.device) -> None:
        words = torch.zeros(STATE_WORDS + len(STATE_TABLES) * layout.ranks, dtype=torch.int64)
        for word, value in host.fixed_words(layout).items():
            words[word] = value
        assert layout.low_latency is not None
        words[PARTS] = max(1, -(-layout.low_latency.longest_message // (channels * MAX_WRITE_BYTES)))
        self.words = words.to(device)
        self.address: int = self.words.data_ptr()


class DevicePlan:
    """Owner of a ``PLAN`` block on ``device``.

    Attributes:
        address: what kernels get; valid while this object lives.
    """

    def __init__(self, plan: LowLatencyPlan, device: torch.device) -> None:
        ranks, tokens, topk = plan.ranks, plan.tokens, plan.topk
        words = torch.zeros(ROUTE_WORDS, dtype=torch.int64)
        for word, value in host.plan_words(plan).items():
            words[word] = value
        at = 8 * (ROUTE_WORDS + len(ROUTE_TABLES) * ranks)
        for word, nbytes in (
            (ROUTE_SENDS, 8 * tokens * topk),
            (ROUTE_RETURNS, 8 * tokens * topk),
            (ROUTE_PLACES, 4 * ranks * tokens * topk),
            (ROUTE_WEIGHTS, 4 * ranks * tokens * topk),
            (ROUTE_BEFORE, 4 * ranks * tokens),
            (ROUTE_COUNTS, 4 * plan.experts),
        ):
            words[word] = at
            at += round_up(nbytes, 16)
        self._route_words = at // 8
        self._words = words.to(device)
        self.address: int = self._words.data_ptr()

    def new_route(self) -> torch.Tensor:
        """A route block for one dispatch; kernels write every word of it before they read it."""
        return torch.empty(self._route_words, dtype=torch.int64, device=self._words.device)
