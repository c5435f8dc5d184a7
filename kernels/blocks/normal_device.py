"""What the host and the normal-mode kernels on a device share, known without Triton: one block per epoch, in device
memory; the format of an operation and the tensors that it moves.

The block is an int64 tensor. Only kernels of the rank that owns it touch it after the host has made it; in brackets
stands which of them write a word. Operations of a Buffer never overlap, so what belongs to one operation has one place.
Offsets are in bytes in a window.
"""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

import torch

from ...protocol.layout import WindowLayout
from ...protocol.message import LEAST_CHUNK_BYTES
from ...protocol.pipe import STEP, pipe_count
from ...protocol.streams import NORMAL_CHANNELS
from . import low_latency_device

_word = count()
# number of the next operation (of the running one while it is open), and so of messages sent to each peer on
# NORMAL_NOTIFY before it [the last program]
NUMBER = next(_word)
NOTIFY_SEND = next(_word)  # offset of the notifies to send [host]
NOTIFY_RECV = next(_word)  # offset of the received notifies [host]
NOTIFY_STRIDE = next(_word)  # bytes between the notifies of two ranks [host]
STAGING = next(_word)  # offset of the rings of rows for proxied peers [host]
STAGING_BYTES = next(_word)  # [host]
LANDING = next(_word)  # offset of the rings that rows land in [host]
LANDING_BYTES = next(_word)  # [host]
CHUNK_BYTES = next(_word)  # most bytes of a message of rows [host]
LEAST_CHUNK = next(_word)  # a message below so many bytes costs more than it gains [host]
PIPE_WORDS = next(_word)  # offset of what mapped peers tell of their pipes (``protocol.pipe``) [host]
# how the running operation was opened: 1 + NUMBER when its rows may move, the negative when they may not
OPENED = next(_word)  # [the program that opens]
ENDED = next(_word)  # programs of the running kernel that have ended, or counted ids; 0 between kernels [all]
TICKETS = next(_word)  # programs of the running kernel that have a number; 0 between kernels [all, where they take one]

# kernels of both modes share what waits and publishes
SINK = low_latency_device.SINK  # takes stores that cannot be predicated [all]
assert next(_word) <= SINK

#: Word at which the tables of int64[channels, pipes] start: a channel belongs to the program of its number.
STATE_WORDS = 32
TABLES = (
    # over the Buffer's life, by proxied peer, of each phase's stream of the channel
    "MESSAGES_SENT",  # messages sent on NORMAL_DISPATCH
    "MESSAGES_SENT_COMBINE",
    "MESSAGES_TAKEN",  # messages that came
    "MESSAGES_TAKEN_COMBINE",
    # of the running operation: set by the program that opens it
    "SEND_ROWS",  # rows for the pipe; EVERYTHING where only their marks say how many
    "RECV_ROWS",  # rows of the pipe likewise
    "FIRST",  # by source rank: where its rows begin among the received ones; behind these by node: in the marks
    "IN_RING",  # address of the ring that rows land in
    "IN_ROWS",  # rows that it holds
    "IN_CHUNK",  # rows of a message of a proxied peer
    "OUT_RING",  # address of the ring that rows are put into: the peer's, or the staging
    "OUT_ROWS",  # rows that it holds
    "OUT_CHUNK",  # rows of a message to a proxied peer
    "LANDING_ROWS",  # rows that the ring holds in which those land
    # as it goes on: set by the channel's program
    "ARRIVED",  # rows that have arrived
    "LIMIT",  # rows that may have been put in
    "WRITTEN",  # of a proxied peer: messages of rows whose writes are over
    "SENT",  # rows put in
    "NEXT_SENT",  # these with those of the present turn
    "SHOWN",  # rows that the other end was told of; of a proxied peer, messages
    "TAKEN",  # rows taken out
    "NEXT_TAKEN",  # these with those of the present turn
    "FREED",  # rows taken out that the other end was told of; of a proxied peer, messages
    # why the operation cannot go on: 1 + the rank to blame, 0 = nothing is wrong; in what, and how many there were
    "WRONG",
    "WRONG_STREAM",
    "WRONG_GOT",
    "WRONG_WANT",
)

# What the opening tells the host, int64 words in host memory
_word = count()
INFO_TICKET = next(_word)  # the caller's ticket, stored last
INFO_DIFFERENT = next(_word)  # peers that were given another shape (-1: the opening failed)
INFO_TOTAL = next(_word)  # rows of the received tensor
INFO_REMOTE_ROWS = next(_word)  # rows for other ranks
# two that stay until the host has raised them
INFO_OVERFLOW_ROWS = next(_word)  # rows that came where fewer were promised
INFO_SHAPE_MISMATCH = next(_word)  # ticket of the operation in which the ranks parted
INFO_RELAYED = next(_word)  # rows that a first dispatch forwards
INFO_WORDS = next(_word)  # how many these are
#: After these, by rank: SHAPE, CODING, ROW_BYTES, META_BYTES of a peer's notify, when its shape differs; then rows per
#: local expert.
PEER_INFO_WORDS = 4

# What a handle keeps, int64[ROUTE_TABLES, ranks, NORMAL_CHANNELS] [what opens a first dispatch]
_word = count()
ROUTE_SEND = next(_word)  # rows for the rank
ROUTE_RECV = next(_word)  # rows of the rank
ROUTE_RAIL_SEND = next(_word)  # by node: rows over the rail
ROUTE_RAIL_RECV = next(_word)  # by node: rows that came over the rail
ROUTE_TABLES = next(_word)  # how many these are


def scratch_bytes(ranks: int) -> tuple[int, int]:
    """Bytes of a channel behind the tables: int64[STEP, 1 + 2 x ranks], how many pipes each row of a turn passes, and
    for each its address there and the pipe; and uint8[STEP, bytes of marks], the marks of those that are forwarded."""
    return 8 * STEP * (1 + 2 * ranks), STEP * (-(-ranks // 128) * 16)


class DeviceNormalState:
    """Owner of the block on ``device``.

    Attributes:
        words: the block, int64.
        address: what kernels get; valid while this object lives.
    """

    def __init__(self, layout: WindowLayout, device: torch.device) -> None:
        plan, ranks = layout.normal, layout.ranks
        tables = len(TABLES) * NORMAL_CHANNELS * pipe_count(ranks)
        scratch = NORMAL_CHANNELS * sum(scratch_bytes(ranks)) // 8
        words = torch.zeros(STATE_WORDS + tables + scratch, dtype=torch.int64, device="cpu")
        landing = layout["normal_rounds"], layout["normal_heap"]
        for word, value in (
            (NOTIFY_SEND, layout.notify_send),
            (NOTIFY_RECV, layout.notify_recv),
            (NOTIFY_STRIDE, plan.notify),
            (STAGING, layout.normal_send),
            (STAGING_BYTES, layout["normal_send"].nbytes),
            (LANDING, landing[0].offset),
            (LANDING_BYTES, landing[1].offset + landing[1].nbytes - landing[0].offset),
            (CHUNK_BYTES, plan.chunk),
            (LEAST_CHUNK, LEAST_CHUNK_BYTES),
            (PIPE_WORDS, layout.pipe_words),
        ):
            words[word] = value
        self.words = words.to(device)
        if device.type == "cpu":
            self.words = self.words.clone()
        self.address: int = self.words.data_ptr()


class NormalFormat(NamedTuple):
    """What all ranks agree on in a normal-mode operation on a device.

    Attributes:
        kind: NormalNotify.OPERATION_*.
        dtype: DTYPE_* of the rows.
        row_bytes, meta_bytes, scale_bytes: of a row.
        topk: ids and weights per row of a dispatch, weights per row of a combine.
        local_experts: experts per rank.
        shape: digest for the handle of a dispatch with number -1.
        shape_step: what it grows by with the number of that dispatch, modulo 2**63.
        node_ranks: ranks of a node when each row crosses once to a node, else 0.
        channels: that the rows are dealt to, 1 .. NORMAL_CHANNELS.
    """

    kind: int
    dtype: int
    row_bytes: int
    meta_bytes: int
    scale_bytes: int
    topk: int
    local_experts: int
    shape: int
    shape_step: int
    node_ranks: int = 0
    channels: int = 1


class NormalOpening(NamedTuple):
    """Addresses and sizes with which an operation is opened, 0 for what there is not; see
    ``triton/normal_notify.Opening``, and ``triton/routing.mark_tokens`` for ids that are to be counted before."""

    in_rank: int
    tokens: int
    route: int
    expert_counts: int
    number: int
    info: int
    ticket: int
    wrong: int = 0
    topk_idx: int = 0
    rank_counts: int = 0


class NormalTensors(NamedTuple):
    """Addresses of what an operation moves, 0 for what there is not; see the kernels of ``triton/normal_dispatch`` and
    ``triton/normal_combine``."""

    x: int
    topk_idx: int
    weights: int
    scales: int
    out: int
    out_idx: int
    out_weights: int
    out_scales: int
