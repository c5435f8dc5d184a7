"""The memory through which low-latency kernels on a device work: a state block per epoch, a plan block per plan, a
route block per dispatch.

All are int64 tensors on the device. Only kernels of the rank that owns a block touch it after the host has made it; in
brackets stands which of them write a word.
"""

from __future__ import annotations

from itertools import count

import torch

from ...protocol.command import MAX_WRITE_BYTES
from ...protocol.layout import MAX_EXPERTS, LowLatencyPlan, WindowLayout
from ...protocol.message import round_up
from . import low_latency as host

# ``STATE``: the words of the host's block, then these, with SINK where normal mode has it
_word = count(24)
assert host.COMBINE_AHEAD < 24
# peers that the running kernel is done with; 0 between kernels [all but combine_recv]
ARRIVALS = next(_word)
SINK = next(_word)  # takes stores that cannot be predicated [all]
TICKETS = next(_word)  # programs of the running kernel that have a number; 0 between kernels [all, where they take one]
PARTS = next(_word)  # most commands that a channel of one message needs [host, once]
# rows, pairs and destinations that have their place among the messages of the running dispatch, in bit fields; 0
# between kernels [dispatch_send]
PLACED = next(_word)

STATE_WORDS = 32
#: Word at which int32[MAX_EXPERTS] starts: tokens that name the expert in the running dispatch; 0 between kernels,
#: unless one of a peer could not be published [dispatch_send].
STATE_EXPERTS = STATE_WORDS
#: Word at which int64[ranks, tables] starts, by peer: what stands where follows from constants alone. By table it would
#: follow from the number of ranks, and kernels spent a tenth of their time on loading that (H200).
STATE_PEERS = STATE_EXPERTS + MAX_EXPERTS // 2
STATE_TABLES = (
    "RECV_ACK_DISPATCH",  # own dispatch messages that the peer says it has unpacked [sends and receives]
    "RECV_ACK_COMBINE",  # own combine messages whose space the peer says is free again [sends and receives]
    "SENT_ACK_DISPATCH",  # the peer's dispatch messages that it was told are unpacked [sends]
    "SENT_ACK_COMBINE",  # the peer's combine messages likewise [sends]
    "NOTICES_SENT",  # notices sent to the peer [sends]
    "NOTICES_READ",  # notices of the peer that have been read [sends]
    "COMBINE_BASE",  # where the peer puts combine messages of parity 0, in that parity [combine_send]
    "COMBINE_BASE_ODD",  # the same of parity 1
    "COMBINE_COME",  # combine messages of parity 0 that have arrived from the peer [combine_recv]
    "COMBINE_COME_ODD",  # the same of parity 1
    "MESSAGE_AT",  # address of the message being packed for the peer [sends, like the next three]
    "MESSAGE_FROM",  # its offset in this rank's window
    "MESSAGE_TO",  # its offset in the peer's window
    "MESSAGE_BYTES",  # its length
    # What the program that serves a peer in the running kernel tells the others: the kernel's stamp once they may work
    # for that peer, its negative when they must not. Release and acquire at the device's scope. [all]
    "READY",
    "FINISHED",  # work done for the peer in the running kernel; 0 between kernels [all but combine_recv]
)


def state_word(table: str, peer: int) -> int:
    """The word of ``peer`` in a table of the state block."""
    return STATE_PEERS + peer * len(STATE_TABLES) + STATE_TABLES.index(table)


# ``PLAN``, which nobody writes once it is there, so that captured graphs of any shape find theirs: the words of the
# host's plan, then where the arrays start in a route block, in bytes
_word = count(host.PLAN + 1)
ROUTE_RETURNS = next(_word)  # int64 [T, K]: as in cpu/routing.py [dispatch_send, like the next]
# int64 [R, T]: of the destination's rows, and in the upper half of its pairs, those of earlier tokens
ROUTE_EARLIER = next(_word)
# int32 [R, T, K]: the places of a source's metas, -1 = not here [dispatch_recv]
ROUTE_PLACES = next(_word)
ROUTE_WEIGHTS = next(_word)  # float32 [R, T, K]: router weights that came with the tokens [dispatch_recv]
ROUTE_BEFORE = next(_word)  # int32 [R, T]: (token, slot) pairs of the source before this token [dispatch_recv]
# int32 [L]: rows that sources have placed for the local expert [dispatch_send: 0, dispatch_recv]
ROUTE_FILLED = next(_word)
LOCAL = next(_word)  # experts of a rank, L

# ``ROUTE``: the message number of the dispatch at word 0 and a copy of the plan [dispatch_send], then then
# int64[ranks, tables], then the arrays
ROUTE_WORDS = 16
ROUTE_TABLES = (
    "COUNTS",  # tokens for the destination [dispatch_send, like the next two]
    "PAIRS",  # (token, slot) pairs for the destination
    "RETURN_BASE",  # where it puts its combine message, from the start of a parity
    "RECEIVED",  # tokens received from the source [dispatch_recv, like the next three]
    "RETURN_ROWS",  # rows to return to the source
    "RETURN_TO",  # where the source wants them, from the start of a parity
    "RETURN_FORM",  # FORM_* in which the source wants them
)


class DeviceState:
    """Owner of a ``STATE`` block on ``device``.

    Attributes:
        words: the block, int64.
        address: what kernels get; valid while this object lives.
    """

    def __init__(self, layout: WindowLayout, channels: int, device: torch.device) -> None:
        words = torch.zeros(STATE_PEERS + layout.ranks * len(STATE_TABLES), dtype=torch.int64, device="cpu")
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
        words = torch.zeros(ROUTE_WORDS, dtype=torch.int64, device="cpu")
        for word, value in host.plan_words(plan).items():
            words[word] = value
        words[LOCAL] = plan.local_experts
        at = 8 * (ROUTE_WORDS + len(ROUTE_TABLES) * ranks)
        for word, nbytes in (
            (ROUTE_RETURNS, 8 * tokens * topk),
            (ROUTE_EARLIER, 8 * ranks * tokens),
            (ROUTE_PLACES, 4 * ranks * tokens * topk),
            (ROUTE_WEIGHTS, 4 * ranks * tokens * topk),
            (ROUTE_BEFORE, 4 * ranks * tokens),
            (ROUTE_FILLED, 4 * plan.local_experts),
        ):
            words[word] = at
            at += round_up(nbytes, 16)
        self._route_words = at // 8
        self._words = words.to(device)
        self.address: int = self._words.data_ptr()

    def new_route(self) -> torch.Tensor:
        """A route block for one dispatch; kernels write every word of it before they read it."""
        return torch.empty(self._route_words, dtype=torch.int64, device=self._words.device)
