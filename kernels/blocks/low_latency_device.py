"""The memory through which the Triton kernels work: a state block per window generation, a route block per dispatch.

Both are int64 tensors on the device and are told to kernels by their address. The words of ``STATE`` below
:data:`FIRST_OWN` are those of :mod:`.low_latency`. Only kernels of the rank that owns a block touch it after
the host has made it; the last column says which of them writes.

``STATE``:

    word  name             meaning                                                              writer
    24    ARRIVALS         programs of the running kernel that have arrived; 0 between kernels  all
    25    SINK             takes stores that cannot be predicated                               all
    26    FREE             own combine space: messages before this number may be sent again     combine kernels
    27    PARTS            most commands that a channel of one message needs                    host, once
    28    ROUTE_SENDS      where these arrays start in a route block, bytes; likewise the       host, once
    29    ROUTE_RETURNS    next four
    30    ROUTE_PLACES
    31    ROUTE_WEIGHTS
    32    ROUTE_BEFORE
    33    ROUTE_COUNTS
    48    tables of int64[ranks], in the order of STATE_TABLES:

    SEEN_DISPATCH    own dispatch messages that the peer says it has unpacked             send kernels, arrival
    SEEN_COMBINE     own combine messages whose space the peer says is free again         send kernels, arrival
    TOLD_DISPATCH    the peer's dispatch messages that it was told are unpacked           send kernels
    TOLD_COMBINE     the peer's combine messages likewise                                 send kernels
    NOTICES_SENT     notices sent to the peer                                             send kernels
    NOTICES_READ     notices of the peer that have been looked at                         send kernels
    COMBINE_BASE0    where the peer puts combine messages of parity 0, in that parity     combine_send
    COMBINE_BASE1    the same for parity 1                                                combine_send
    COMBINE_COME0    combine messages of parity 0 that have arrived from the peer         combine kernels
    COMBINE_COME1    the same for parity 1                                                combine kernels
    MESSAGE_AT       address of the message being packed for the peer                     first of two send kernels
    MESSAGE_FROM     its offset in this rank's window                                     first of two send kernels
    MESSAGE_TO       its offset in the peer's window                                      first of two send kernels
    MESSAGE_BYTES    its length                                                           first of two send kernels

``ROUTE``:

    word  name             meaning                                                              writer
    0     NUMBER           message number of the dispatch                                       route
    16    tables of int64[ranks], in the order of ROUTE_TABLES:

    COUNTS           tokens for the destination                                           route
    PAIRS            (token, slot) pairs for the destination                              route
    RETURN_BASE      where it puts its combine message, from the start of a parity        route
    RECEIVED         tokens received from the source                                      arrival of the dispatch
    RETURN_ROWS      rows to return to the source                                         count
    RETURN_TO        where the source wants them, from the start of a parity              arrival of the dispatch
    RETURN_FORM      FORM_* in which the source wants them                                arrival of the dispatch

and the arrays, with T = most tokens per rank, K = top-k, R = ranks, L = local experts:

    sends            int64 [T, K]: rank << 32 | row of its message, at the first slot of a rank; else -1     route
    returns          int64 [T, K]: as in :mod:`..cpu.routing`                                                route
    places           int32 [R, T, K]: expert << 16 | position among the source's rows of it; -1 = not here   count
    weights          float32 [R, T, K]: router weights that came with the tokens                             unpack
    before           int32 [R, T]: (token, slot) pairs of the source before this token                       count
    counts           int32 [R, L]: rows of the source for the expert                                         count
"""

from __future__ import annotations

import torch

from ...protocol.command import MAX_WRITE_BYTES
from ...protocol.layout import LowLatencyPlan, WindowLayout
from ...protocol.message import round_up
from .low_latency import StateBlock

#: Words of :mod:`.low_latency` that are taken over.
FIRST_OWN = 24
STATE_WORDS = 48
STATE_TABLE_NAMES = (
    "SEEN_DISPATCH",
    "SEEN_COMBINE",
    "TOLD_DISPATCH",
    "TOLD_COMBINE",
    "NOTICES_SENT",
    "NOTICES_READ",
    "COMBINE_BASE0",
    "COMBINE_BASE1",
    "COMBINE_COME0",
    "COMBINE_COME1",
    "MESSAGE_AT",
    "MESSAGE_FROM",
    "MESSAGE_TO",
    "MESSAGE_BYTES",
)
ARRIVALS, SINK, FREE, PARTS, ROUTE_SENDS, ROUTE_RETURNS, ROUTE_PLACES, ROUTE_WEIGHTS, ROUTE_BEFORE, ROUTE_COUNTS = (
    range(FIRST_OWN, FIRST_OWN + 10)
)

ROUTE_WORDS = 16
ROUTE_TABLE_NAMES = ("COUNTS", "PAIRS", "RETURN_BASE", "RECEIVED", "RETURN_ROWS", "RETURN_TO", "RETURN_FORM")


class DeviceState:
    """Owner of a ``STATE`` block on ``device``.

    Attributes:
        plan: what it was made for.
        words: the block, int64.
        address: what kernels get; valid while this object lives.
        route_bytes: bytes of a route block.
    """

    def __init__(self, plan: LowLatencyPlan, layout: WindowLayout, channels: int, device: torch.device) -> None:
        self.plan = plan
        ranks, tokens, topk = plan.ranks, plan.tokens, plan.topk
        words = torch.zeros(STATE_WORDS + len(STATE_TABLE_NAMES) * ranks, dtype=torch.int64)
        words[:FIRST_OWN] = torch.from_numpy(StateBlock(plan, layout).words[:FIRST_OWN])
        longest = max(plan.dispatch_slot, plan.combine_recv)
        words[PARTS] = max(1, -(-longest // (channels * MAX_WRITE_BYTES)))
        at = 8 * (ROUTE_WORDS + len(ROUTE_TABLE_NAMES) * ranks)
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
        self.route_bytes = at
        self.words = words.to(device)
        self.address: int = self.words.data_ptr()

    def new_route(self) -> torch.Tensor:
        """A route block for one dispatch; kernels write every word of it before they read it."""
        return torch.empty(self.route_bytes // 8, dtype=torch.int64, device=self.words.device)
