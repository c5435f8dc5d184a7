"""The memory through which the Triton kernels of normal mode work: one block per window generation, in device memory.

An int64 tensor that is told to kernels by its address. Only kernels of the rank that owns it touch it after the host
has made it; operations of a Buffer never overlap, so what belongs to one operation has one place. Offsets are in bytes
in a window.

    word  name          meaning                                                                     writer
    0     NUMBER        number of the next operation (of the running one while it is open)          finish, open
    1     NOTICES       messages sent to each peer on NORMAL_NOTIFY before that operation           finish, open
    2     NOTIFY_SEND   notifies to send, and received; bytes between those of two ranks            host
    3     NOTIFY_RECV
    4     NOTIFY_STRIDE
    5     GRANT_SEND    grants to send, and received                                                host
    6     GRANT_RECV
    7     STAGING       chunks packed for proxied peers: DEPTH of CHUNK_BYTES for each              host
    8     CHUNK_BYTES
    9     DEPTH
    10    ROUNDS        landing area of rounds: two slots of ROUND_SLOT bytes per source            host
    11    ROUND_SLOT
    12    HEAP          landing area of operations that fit as a whole, and its bytes               host
    13    HEAP_BYTES
    14    LANDING_END   end of what grants may name; it begins at ROUNDS                            host
    15    LEAST_CHUNK   a chunk below so many bytes is not worth a channel of its own               host
    16    OPEN          1 = opened and not finished: the kernels that follow have something to do   open, finish
    17    IN_HEAP       1 = every row has its own place in HEAP, 0 = rounds                         open
    18    BAD_PEER      1 + a peer whose meta names an expert that this rank has not; 0 = none      move_rows
    19    TURN          turns begun                                                                 advance, finish
    20    ROW_BYTES     of the operation                                                            open
    21    META_BYTES
    22    STREAM        of channel 0
    23    RAN           1 = the operation opened last has been exchanged                              open, finish
    24    NODE_RANKS    ranks of a node when rows pass through forwarders, else 0                   open
    25    SINK          takes stores that cannot be predicated (same place as in :mod:`.blocks`)    all
    26    BOARDS        what ranks of a node tell each other (``protocol.relay``)                   host
    27    LINES
    28    LATE0         turns that the last kernel took of all dispatches, since the host had launched   finish
    29    LATE1         too few; of all combines
    30    KEPT          rows of rail peers whose marks the handle of the running combine has    count_marks
    32    tables of int64[ranks], in the order of TABLES:

    over the Buffer's life, by peer (writer: advance and finish):
    GRANTS_SENT, GRANTS_TAKEN         grants
    CHUNKS_SENT0, CHUNKS_SENT1        chunk messages of dispatches, of combines
    CHUNKS_TAKEN0, CHUNKS_TAKEN1

    of the running operation (writer: open, then advance and finish):
    SEND_ROWS      rows for the peer                           SEND_FIRST    combine: index in X of the first
    RECV_ROWS      rows of the peer                            RECV_FIRST    index of its first row in the outputs
    ROW_LANDING    where its rows land                         META_LANDING  where their meta lands
    SLOT_ROWS      rows per grant                              SLOT_STRIDE   bytes between two landing slots
    CHUNK_ROWS     rows per chunk that it sends                GRANTED       grants given to it
    GRANTS         grants taken from it                        GRANT_LEFT    rows of the present one not yet sent
    GRANT_ROW      where in its window the next row goes       GRANT_META    where its meta goes
    GRANT_CHUNK    rows per chunk                              GRANT_START   chunks sent before this grant was taken
    SENT           rows sent                                   SENT_CHUNKS   chunks sent
    PACK_ROWS      rows that this turn packs                   ARRIVED       rows that have arrived without a gap
    EXPECTED       rows that must be here to go on             CONSUMED      rows unpacked
    READY          rows that this turn unpacks end here

    and between nodes (see :mod:`.normal_nodes`), by far rank where nothing else is said:
    PASS_SEND      rows for it, whoever carries them           PASS_RECV     rows of it likewise
    PASSED         of these, unpacked, or laid out             PASS_READY    those of this turn end here
    RELAY_FIRST    rail peer: index of its first row in the marks that a dispatch keeps for its combine
    SHOWN          rail peer: 1 + rows on its board            SCANNED       rows of its forwarder's board looked at
    SCAN_END       those of this turn end here
    VIEW_ROWS, VIEW_ROW, VIEW_META, VIEW_SLOT_ROWS, VIEW_STRIDE   what that board says, checked; 0 rows = not yet read
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...protocol.layout import WindowLayout
from ...protocol.message import LEAST_CHUNK_BYTES
from ...protocol.streams import NORMAL_COMBINE
from ..blocks.low_latency_device import SINK
from .context import rank_count
from .words import int64s, peek

(
    NUMBER,
    NOTICES,
    NOTIFY_SEND,
    NOTIFY_RECV,
    NOTIFY_STRIDE,
    GRANT_SEND,
    GRANT_RECV,
    STAGING,
    CHUNK_BYTES,
    DEPTH,
    ROUNDS,
    ROUND_SLOT,
    HEAP,
    HEAP_BYTES,
    LANDING_END,
    LEAST_CHUNK,
    OPEN,
    IN_HEAP,
    BAD_PEER,
    TURN,
    ROW_BYTES,
    META_BYTES,
    STREAM,
    RAN,
    NODE_RANKS,
) = range(25)
BOARDS, LINES, LATE0, LATE1, KEPT = range(26, 31)
STATE_WORDS = 32
assert NODE_RANKS < SINK < BOARDS < KEPT < STATE_WORDS

TABLES = (
    "GRANTS_SENT",
    "GRANTS_TAKEN",
    "CHUNKS_SENT0",
    "CHUNKS_SENT1",
    "CHUNKS_TAKEN0",
    "CHUNKS_TAKEN1",
    "SEND_ROWS",
    "SEND_FIRST",
    "RECV_ROWS",
    "RECV_FIRST",
    "ROW_LANDING",
    "META_LANDING",
    "SLOT_ROWS",
    "SLOT_STRIDE",
    "CHUNK_ROWS",
    "GRANTED",
    "GRANTS",
    "GRANT_LEFT",
    "GRANT_ROW",
    "GRANT_META",
    "GRANT_CHUNK",
    "GRANT_START",
    "SENT",
    "SENT_CHUNKS",
    "PACK_ROWS",
    "ARRIVED",
    "EXPECTED",
    "CONSUMED",
    "READY",
    "PASS_SEND",
    "PASS_RECV",
    "PASSED",
    "PASS_READY",
    "RELAY_FIRST",
    "SHOWN",
    "SCANNED",
    "SCAN_END",
    "VIEW_ROWS",
    "VIEW_ROW",
    "VIEW_META",
    "VIEW_SLOT_ROWS",
    "VIEW_STRIDE",
)

#: What the opening tells the host, int64 words in host memory: the caller's ticket (stored last), peers that were given
#: another shape (-1: the opening failed), rows of the received tensor, most rows to or from one other rank, rows for
#: other ranks, IN_HEAP; two that stay until the host has raised them: rows that came where fewer were promised, and
#: DIFFERENT where it was not 0; rows that a first dispatch hands on; and LATE0 and LATE1 of the operations before it.
I_TICKET, I_DIFFERENT, I_TOTAL, I_MOST, I_AWAY, I_IN_HEAP, I_BEYOND, I_PARTED, I_RELAYED, I_LATE0, I_LATE1 = range(11)
INFO_WORDS = 11
#: After these, by rank: SHAPE, CODING, ROW_BYTES, META_BYTES that a peer told, when its shape differs; then rows per
#: local expert.
TOLD_WORDS = 4

_STATE_WORDS, _COMBINE_STREAM = tl.constexpr(STATE_WORDS), tl.constexpr(NORMAL_COMBINE)
W_NUMBER, W_NOTICES = tl.constexpr(8 * NUMBER), tl.constexpr(8 * NOTICES)
W_NOTIFY_SEND, W_NOTIFY_RECV = tl.constexpr(8 * NOTIFY_SEND), tl.constexpr(8 * NOTIFY_RECV)
W_NOTIFY_STRIDE = tl.constexpr(8 * NOTIFY_STRIDE)
W_GRANT_SEND, W_GRANT_RECV = tl.constexpr(8 * GRANT_SEND), tl.constexpr(8 * GRANT_RECV)
W_STAGING, W_CHUNK_BYTES, W_DEPTH = tl.constexpr(8 * STAGING), tl.constexpr(8 * CHUNK_BYTES), tl.constexpr(8 * DEPTH)
W_ROUNDS, W_ROUND_SLOT = tl.constexpr(8 * ROUNDS), tl.constexpr(8 * ROUND_SLOT)
W_HEAP, W_HEAP_BYTES = tl.constexpr(8 * HEAP), tl.constexpr(8 * HEAP_BYTES)
W_LANDING_END, W_LEAST_CHUNK = tl.constexpr(8 * LANDING_END), tl.constexpr(8 * LEAST_CHUNK)
W_OPEN, W_IN_HEAP, W_BAD_PEER = tl.constexpr(8 * OPEN), tl.constexpr(8 * IN_HEAP), tl.constexpr(8 * BAD_PEER)
W_TURN, W_STREAM, W_RAN = tl.constexpr(8 * TURN), tl.constexpr(8 * STREAM), tl.constexpr(8 * RAN)
W_LATE0, W_LATE1, W_KEPT = tl.constexpr(8 * LATE0), tl.constexpr(8 * LATE1), tl.constexpr(8 * KEPT)
W_ROW_BYTES, W_META_BYTES = tl.constexpr(8 * ROW_BYTES), tl.constexpr(8 * META_BYTES)
W_NODE_RANKS, W_BOARDS, W_LINES = tl.constexpr(8 * NODE_RANKS), tl.constexpr(8 * BOARDS), tl.constexpr(8 * LINES)


def _table(name: str) -> tl.constexpr:
    return tl.constexpr(TABLES.index(name))


N_GRANTS_SENT, N_GRANTS_TAKEN = _table("GRANTS_SENT"), _table("GRANTS_TAKEN")
#: + 1 in a combine
N_CHUNKS_SENT, N_CHUNKS_TAKEN = _table("CHUNKS_SENT0"), _table("CHUNKS_TAKEN0")
N_SEND_ROWS, N_SEND_FIRST = _table("SEND_ROWS"), _table("SEND_FIRST")
N_RECV_ROWS, N_RECV_FIRST = _table("RECV_ROWS"), _table("RECV_FIRST")
N_ROW_LANDING, N_META_LANDING = _table("ROW_LANDING"), _table("META_LANDING")
N_SLOT_ROWS, N_SLOT_STRIDE, N_CHUNK_ROWS = _table("SLOT_ROWS"), _table("SLOT_STRIDE"), _table("CHUNK_ROWS")
N_GRANTED, N_GRANTS, N_GRANT_LEFT = _table("GRANTED"), _table("GRANTS"), _table("GRANT_LEFT")
N_GRANT_ROW, N_GRANT_META = _table("GRANT_ROW"), _table("GRANT_META")
N_GRANT_CHUNK, N_GRANT_START = _table("GRANT_CHUNK"), _table("GRANT_START")
N_SENT, N_SENT_CHUNKS, N_PACK_ROWS = _table("SENT"), _table("SENT_CHUNKS"), _table("PACK_ROWS")
N_ARRIVED, N_EXPECTED, N_CONSUMED, N_READY = _table("ARRIVED"), _table("EXPECTED"), _table("CONSUMED"), _table("READY")
N_PASS_SEND, N_PASS_RECV = _table("PASS_SEND"), _table("PASS_RECV")
N_PASSED, N_PASS_READY = _table("PASSED"), _table("PASS_READY")
N_RELAY_FIRST, N_SHOWN = _table("RELAY_FIRST"), _table("SHOWN")
N_SCANNED, N_SCAN_END = _table("SCANNED"), _table("SCAN_END")
N_VIEW_ROWS, N_VIEW_ROW, N_VIEW_META = _table("VIEW_ROWS"), _table("VIEW_ROW"), _table("VIEW_META")
N_VIEW_SLOT_ROWS, N_VIEW_STRIDE = _table("VIEW_SLOT_ROWS"), _table("VIEW_STRIDE")


@triton.jit
def entry(context: tl.tensor, state: tl.tensor, table: tl.tensor, peers: tl.tensor) -> tl.tensor:
    """Addresses of the peers' entries in a table."""
    return entry_among(rank_count(context), state, table, peers)


@triton.jit
def entry_among(ranks: tl.tensor, state: tl.tensor, table: tl.tensor, peers: tl.tensor) -> tl.tensor:
    """The same, for a loop that knows how many ranks there are."""
    return state + 8 * (_STATE_WORDS + table * ranks + peers)


@triton.jit
def get_each(context: tl.tensor, state: tl.tensor, table: tl.tensor, peers: tl.tensor, chosen: tl.tensor) -> tl.tensor:
    """Entries of the ``chosen`` peers, 0 for the others."""
    return tl.load(int64s(entry(context, state, table, peers)), mask=chosen, other=0)


@triton.jit
def set_each(
    context: tl.tensor, state: tl.tensor, table: tl.tensor, peers: tl.tensor, chosen: tl.tensor, value: tl.tensor
) -> None:
    """Set the entries of the ``chosen`` peers."""
    tl.store(int64s(entry(context, state, table, peers)), tl.zeros_like(peers) + value, mask=chosen)


@triton.jit
def phase_of(state: tl.tensor) -> tl.tensor:
    """0 in a dispatch, 1 in a combine."""
    return (peek(state + W_STREAM) == _COMBINE_STREAM).to(tl.int64)


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
