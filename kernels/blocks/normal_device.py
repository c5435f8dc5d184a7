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
from . import low_latency_device

_word = count()
NUMBER = next(_word)  # number of the next operation (of the running one while it is open) [finish, open]
NOTICES = next(_word)  # messages sent to each peer on NORMAL_NOTIFY before that operation [finish, open]
NOTIFY_SEND = next(_word)  # offset of the notifies to send [host]
NOTIFY_RECV = next(_word)  # offset of the received notifies [host]
NOTIFY_STRIDE = next(_word)  # bytes between the notifies of two ranks [host]
GRANT_SEND = next(_word)  # offset of the grants to send [host]
GRANT_RECV = next(_word)  # offset of the received grants [host]
STAGING = next(_word)  # offset of the chunks packed for proxied peers: DEPTH of CHUNK_BYTES for each [host]
CHUNK_BYTES = next(_word)  # [host]
DEPTH = next(_word)  # [host]
ROUNDS = next(_word)  # offset of the landing area of rounds: two slots of ROUND_SLOT bytes per source [host]
ROUND_SLOT = next(_word)  # [host]
HEAP = next(_word)  # offset of the landing area of operations that fit as a whole [host]
HEAP_BYTES = next(_word)  # its bytes [host]
LANDING_END = next(_word)  # end of what grants may name; it begins at ROUNDS [host]
LEAST_CHUNK = next(_word)  # a chunk below so many bytes is not worth a channel of its own [host]
OPEN = next(_word)  # 1 = opened and not finished: the kernels that follow have something to do [open, finish]
IN_HEAP = next(_word)  # 1 = every row has its own place in HEAP, 0 = rounds [open]
BAD_PEER = next(_word)  # 1 + a peer whose meta names an expert that this rank has not; 0 = none [move_rows]
STEP = next(_word)  # steps begun [advance, finish]
ROW_BYTES = next(_word)  # of the operation [open]
META_BYTES = next(_word)  # of the operation [open]
STREAM = next(_word)  # of channel 0 [open]
RAN = next(_word)  # 1 = the operation opened last has been exchanged [open, finish]
NODE_RANKS = next(_word)  # ranks of a node when rows pass through forwarders, else 0 [open]
SINK = next(_word)  # takes stores that cannot be predicated [all]
BOARDS = next(_word)  # offset of the progress boards (``protocol.relay``) [host]
LINES = next(_word)  # offset of the progress lines [host]
# steps that the last kernel took of all dispatches, since the host had launched too few
MISSED_DISPATCH_STEPS = next(_word)  # [finish]
MISSED_COMBINE_STEPS = next(_word)  # of all combines [finish]
KEPT = next(_word)  # rows of rail peers whose marks the handle of the running combine has [count_marks]

# kernels of both modes share what waits and publishes
assert SINK == low_latency_device.SINK

#: Word at which the tables of int64[ranks] start.
STATE_WORDS = 32
TABLES = (
    # over the Buffer's life, by peer [advance, finish]
    "GRANTS_SENT",
    "GRANTS_TAKEN",
    "CHUNKS_SENT",  # two: chunk messages of dispatches, of combines
    "CHUNKS_SENT_COMBINE",
    "CHUNKS_TAKEN",  # two likewise
    "CHUNKS_TAKEN_COMBINE",
    # of the running operation [open, then advance and finish]
    "SEND_ROWS",  # rows for the peer
    "SEND_FIRST",  # combine: index in X of the first
    "RECV_ROWS",  # rows of the peer
    "RECV_FIRST",  # index of its first row in the outputs
    "ROW_LANDING",  # where its rows land
    "META_LANDING",  # where their meta lands
    "SLOT_ROWS",  # rows per grant
    "SLOT_STRIDE",  # bytes between two landing slots
    "CHUNK_ROWS",  # rows per chunk that it sends
    "GRANTED",  # grants given to it
    "GRANTS",  # grants taken from it
    "GRANT_LEFT",  # rows of the present one not yet sent
    "GRANT_ROW",  # where in its window the next row goes
    "GRANT_META",  # where its meta goes
    "GRANT_CHUNK",  # rows per chunk
    "GRANT_START",  # chunks sent before this grant was taken
    "SENT",  # rows sent
    "SENT_CHUNKS",  # chunks sent
    "PACK_ROWS",  # rows that this step packs
    "ARRIVED",  # rows that have arrived without a gap
    "EXPECTED",  # rows that must be here to go on
    "CONSUMED",  # rows unpacked
    "READY",  # rows that this step unpacks end here
    # and between nodes (``triton/normal_nodes``), by far rank where nothing else is said
    "PASS_SEND",  # rows for it, whoever carries them
    "PASS_RECV",  # rows of it likewise
    "PASSED",  # of these, unpacked, or laid out
    "PASS_READY",  # those of this step end here
    "RELAY_FIRST",  # rail peer: index of its first row in the marks that a dispatch keeps for its combine
    "SHOWN",  # rail peer: 1 + rows on its progress board
    "SCANNED",  # rows of its forwarder's progress board that were read
    "SCAN_END",  # those of this step end here
    "VIEW_ROWS",  # what that progress board says, checked, like the next four
    "VIEW_ROW",
    "VIEW_META",
    "VIEW_SLOT_ROWS",  # 0 = not yet read
    "VIEW_STRIDE",
)

# What the opening tells the host, int64 words in host memory
_word = count()
INFO_TICKET = next(_word)  # the caller's ticket, stored last
INFO_DIFFERENT = next(_word)  # peers that were given another shape (-1: the opening failed)
INFO_TOTAL = next(_word)  # rows of the received tensor
INFO_MOST = next(_word)  # most rows to or from one other rank
INFO_REMOTE_ROWS = next(_word)  # rows for other ranks
# two that stay until the host has raised them
INFO_OVERFLOW_ROWS = next(_word)  # rows that came where fewer were promised
INFO_SHAPE_MISMATCH = next(_word)  # DIFFERENT where it was not 0
INFO_RELAYED = next(_word)  # rows that a first dispatch forwards
INFO_MISSED_DISPATCH_STEPS = next(_word)  # MISSED_DISPATCH_STEPS of the operations before it
INFO_MISSED_COMBINE_STEPS = next(_word)  # MISSED_COMBINE_STEPS likewise
INFO_WORDS = next(_word)  # how many these are
#: After these, by rank: SHAPE, CODING, ROW_BYTES, META_BYTES of a peer's notify, when its shape differs; then rows per
#: local expert.
PEER_INFO_WORDS = 4


class DeviceNormalState:
    """Owner of the block on ``device``.

    Attributes:
        words: the block, int64.
        address: what kernels get; valid while this object lives.
    """

    def __init__(self, layout: WindowLayout, device: torch.device) -> None:
        plan = layout.normal
        words = torch.zeros(STATE_WORDS + len(TABLES) * layout.ranks, dtype=torch.int64)
        for word, value in (
            (NOTIFY_SEND, layout.notify_send),
            (NOTIFY_RECV, layout.notify_recv),
            (NOTIFY_STRIDE, plan.notify),
            (GRANT_SEND, layout.grant_send),
            (GRANT_RECV, layout.grant_recv),
            (STAGING, layout.normal_send),
            (CHUNK_BYTES, plan.chunk),
            (DEPTH, plan.depth),
            (ROUNDS, layout.normal_rounds),
            (ROUND_SLOT, plan.round_slot),
            (HEAP, layout.normal_heap),
            (HEAP_BYTES, plan.heap),
            (LANDING_END, layout.normal_heap + plan.heap),
            (LEAST_CHUNK, LEAST_CHUNK_BYTES),
            (BOARDS, layout.relay_boards),
            (LINES, layout.relay_lines),
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


class NormalTensors(NamedTuple):
    """Addresses of what an exchange moves, 0 for what there is not; see ``triton/normal_rows.move_rows``."""

    x: int
    lists: int
    tokens: int
    topk_idx: int
    weights: int
    scales: int
    out: int
    out_idx: int
    out_weights: int
    out_scales: int
    capacity: int


class NodeTensors(NamedTuple):
    """Addresses and sizes of what an exchange between nodes needs besides, 0 for what there is not.

    Attributes:
        in_rank: uint8[tokens, ranks], which ranks a dispatched token goes to.
        passes, pass_rows: int32[ranks, pass_rows], scratch of a dispatch: rows of two landing slots for each rank.
        marks, room: uint8[room, mark bytes], for which ranks of its node each row was that this rank forwards.
        counts: int32[room + nodes, ranks of a node], scratch of a combine.
    """

    in_rank: int
    passes: int
    pass_rows: int
    marks: int
    room: int
    counts: int
