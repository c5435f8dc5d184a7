"""The three int64 blocks through which the host and the kernels of normal mode talk about one operation.

All are private to the rank (one thread at a time: relaxed access). Below, H = the host, before the first kernel;
P = the host, between the opening and the exchange; K = kernels. Addresses are of this process, offsets are in bytes in
a window. A word not named by an operation stays 0.
"""

from __future__ import annotations

from itertools import count

#: Values summed at once: 4 KiB of float32 stays in the first-level cache with one tile of every source.
TILE = 1024
SCRATCH_BYTES = 4 * TILE

# ``COUNTS``: int64 [ranks, COUNT_WORDS], one per Buffer and epoch, zero at first: how many grants and chunk messages
# each peer was sent and has sent over the Buffer's life [K]. It makes the number of every message known to both sides,
# so that "has it arrived" is one comparison.
GRANTS_SENT, GRANTS_TAKEN = 0, 1
#: + 0 for dispatch, + 1 for combine
CHUNKS_SENT, CHUNKS_TAKEN = 2, 4
COUNT_WORDS = 8

# ``OPERATION``: int64 [OPERATION_WORDS], filled by the host before the first kernel of an operation
_word = count()
KIND = next(_word)  # H: NormalNotify.OPERATION_*
NUMBER = next(_word)  # H: number of the operation
NOTICES = next(_word)  # H: messages sent so far to each peer on NORMAL_NOTIFY, this operation's not counted
PHASE = next(_word)  # H: NORMAL_DISPATCH or NORMAL_COMBINE: stream of channel 0
SHAPE = next(_word)  # H: digest that all ranks must share
CODING = next(_word)  # H: word CODING of the notify
TOKENS = next(_word)  # H: dispatch: rows of X. Combine: rows of OUT
HIDDEN = next(_word)  # H: values per row
ELEMENT = next(_word)  # H: DTYPE_* of the rows
TOPK = next(_word)  # H: int32 ids and float32 weights per row of a dispatch; weights per row of a combine
ROW_BYTES = next(_word)  # H: bytes of a row
META_BYTES = next(_word)  # H: bytes of a row's meta, 0 = none
SCALE_BYTES = next(_word)  # H: bytes of scales in a row's meta
LOCAL_EXPERTS = next(_word)  # H: experts per rank
X = next(_word)  # H: address of the rows to send
TOPK_IDX = next(_word)  # H: address of int64 [TOKENS, TOPK], or 0
WEIGHTS = next(_word)  # H: address of float32 [rows of X, TOPK], or 0
SCALES = next(_word)  # H: address of [TOKENS, SCALE_BYTES], or 0
EXPERT_COUNTS_SENT = next(_word)  # H: address of int32 [ranks x LOCAL_EXPERTS]: rows for each expert, for its rank
EXPERT_COUNTS = next(_word)  # H: address of int64 [LOCAL_EXPERTS], K adds what the notifies say
OUT = next(_word)  # P: address of the rows returned to the caller
OUT_IDX = next(_word)  # P: address of int64 [rows, TOPK], or 0
OUT_WEIGHTS = next(_word)  # P: address of float32 [rows, TOPK], or 0
OUT_SCALES = next(_word)  # P: address of [rows, SCALE_BYTES], or 0
IN_PLACE = next(_word)  # P: 1 = peers write OUT itself, 0 = rows are copied from the landing area
BIAS_0 = next(_word)  # P: address of [TOKENS, HIDDEN] added to a combine, or 0
BIAS_1 = next(_word)  # P: likewise
SCRATCH = next(_word)  # H: address of max(SCRATCH_BYTES, META_BYTES) + 8 x (ranks + 2) bytes
NOTIFY_SEND = next(_word)  # H: offset of this parity's notifies to send
NOTIFY_RECV = next(_word)  # H: offset of this parity's received notifies
NOTIFY_STRIDE = next(_word)  # H: bytes between the notifies of two ranks
GRANT_SEND = next(_word)  # H: offset of the grants to send
GRANT_RECV = next(_word)  # H: offset of the received grants
STAGING = next(_word)  # H: offset of the chunks packed for proxied peers
CHUNK_BYTES = next(_word)  # H: bytes of a chunk there
DEPTH = next(_word)  # H: chunks per peer there
LANDING = next(_word)  # H: start of the area that grants of any rank may name
LANDING_END = next(_word)  # H: its end
FRONTIER = next(_word)  # K: combine: tokens already summed
STEPS = next(_word)  # K: grows with every piece of progress; the host tells a slow operation from a stuck one
LEAST_CHUNK_BYTES = next(_word)  # H: a chunk below it is not worth a channel of its own
ROUND_SLOT = next(_word)  # H: bytes of a landing slot when rows are received in rounds
MASKED = next(_word)  # K: ranks that are left out (set by ``prepare``, like REMOTE_ROWS)
REMOTE_ROWS = next(_word)  # K: rows for other ranks
DIFFERENT = next(_word)  # K: peers that were given another SHAPE (set when all notifies are here, like the next three)
RECV_TOTAL = next(_word)  # K: rows of the received tensor that some rank fills
RECV_REMOTE = next(_word)  # K: rows that come from other ranks
META_ROOM = next(_word)  # K: bytes for the meta of all of these, each rank's on a line of its own
ROW_RANGE = next(_word)  # P: offset of a range with room for every row, -1 = rounds
META_RANGE = next(_word)  # P: offset of a range of META_ROOM bytes, -1 = there is no meta or ROW_RANGE is -1
STREAM_FROM = next(_word)  # H: bytes that the ranks of a host may write in all before copies go past the caches
STREAMED = next(_word)  # K: 1 = they do (set by ``place``)
# H: ranks of a node when rows pass through forwarders (``protocol.relay``), else 0, as are then the next six
NODE_RANKS = next(_word)
RANKS = next(_word)  # H: EP ranks
MARKS = next(_word)  # H: address of bool [TOKENS, RANKS]: the token has an expert on the rank
MARK_BYTES = next(_word)  # H: bytes, after a dispatched row's scales, with a bit for each rank of its node
# P: address of [rows forwarded, MARK_BYTES]: the ranks of this node that each went to (a first dispatch writes them),
# by node of the source; or 0
RELAY_MARKS = next(_word)
CURSORS = next(_word)  # H: address of int64 [RANKS], K: combine, rows summed of a rank of this node for a node
BOARDS = next(_word)  # H: offset of the progress boards
LINES = next(_word)  # H: offset of the progress lines
# K: address of the route: int64 [ranks], rows that the dispatch sends to each rank; int64 [ranks], rows that it
# receives from each (``place`` writes them in a first dispatch); int32, tokens for rank 0, then for rank 1, … (set by
# ``prepare``)
ROUTE = next(_word)
OPERATION_WORDS = 64

# ``PEERS``: int64 [ranks, PEER_WORDS]: what belongs to one peer in this operation; ``prepare`` fills ABSENT to
# RECV_LIST, ``place`` RECV_FIRST to CHUNK_ROWS
_word = count()
ABSENT = next(_word)  # K: 1 = masked: nothing goes there, nothing comes
SEND_ROWS = next(_word)  # K: rows for the peer
SEND_LIST = next(_word)  # K: address of int32 [SEND_ROWS] indices into X, 0 = consecutive rows
SEND_FIRST = next(_word)  # K: index of the first row when consecutive
RECV_ROWS = next(_word)  # K: rows the peer has for this rank (a first dispatch learns it from the notify)
RECV_LIST = next(_word)  # K: combine: address of int32 [RECV_ROWS], token of each returning row, ascending
RECV_FIRST = next(_word)  # K: dispatch: index in OUT of the peer's first row
ROW_LANDING = next(_word)  # K: offset where the first granted row lands
META_LANDING = next(_word)  # K: offset where its meta lands
SLOT_ROWS = next(_word)  # K: rows per grant
SLOT_STRIDE = next(_word)  # K: bytes between the two landing slots
CHUNK_ROWS = next(_word)  # K: rows per chunk message; divides SLOT_ROWS, unless one grant holds everything
NOTIFIED = next(_word)  # K: 1 = the notify to the peer is published
PEER_NOTIFIED = next(_word)  # K: 1 = the notify of the peer is read
PEER_SHAPE = next(_word)  # K: word SHAPE of that, kept for the error when it differs
PEER_CODING = next(_word)  # K: likewise
PEER_ROW_BYTES = next(_word)  # K: likewise
PEER_META_BYTES = next(_word)  # K: likewise
GRANTS = next(_word)  # K: grants taken from the peer in this operation
GRANT_LEFT = next(_word)  # K: rows of the current grant not yet sent
GRANT_ROW = next(_word)  # K: offset in the peer's window of the next row
GRANT_META = next(_word)  # K: offset of its meta
GRANT_CHUNK = next(_word)  # K: rows per chunk
GRANT_START = next(_word)  # K: chunks sent before the current grant was taken
PACKED = next(_word)  # K: PACKED_*: how far the chunk in the staging slot is (proxied peers)
SENT = next(_word)  # K: rows sent
SENT_CHUNKS = next(_word)  # K: chunks sent
OVER = next(_word)  # K: 1 = the peer was told that the writes to it are over (dispatch)
GRANTED = next(_word)  # K: grants given to the peer in this operation
ARRIVED_CHUNKS = next(_word)  # K: chunks of the peer that have arrived without a gap
ARRIVED_ROWS = next(_word)  # K: the same in rows
CONSUMED = next(_word)  # K: rows unpacked or summed
# K: address of int32 [RAIL_SEND], or [RAIL_RECV] of a combine: tokens with a place on the node of the peer, a rank of
# another node with this rank's place in its own
RAIL_LIST = next(_word)
RAIL_SEND = next(_word)  # K: rows for the peer to forward, or to its tokens from all of this node (a combine)
RAIL_RECV = next(_word)  # K: rows that the peer has for this rank likewise (a first dispatch learns it)
PASS_ROWS = next(_word)  # K: rows between this rank and a rank of another node, whoever carries them
PASSED = next(_word)  # K: dispatch: of these, unpacked. Combine: laid out for the forwarder
PASS_OVER = next(_word)  # K: 1 = the forwarder was told that this rank needs nothing more of it
RELAY_FIRST = next(_word)  # K: index in RELAY_MARKS of the peer's first row
SHOWN = next(
    _word
)  # K: rows of the peer that its progress board shows, + 1; 0 = the progress board is of an earlier operation
SCANNED = next(_word)  # K: rows on the forwarder's progress board that this rank has read
VIEW_ROWS = next(_word)  # K: what the forwarder's progress board says, checked; VIEW_SLOT_ROWS = 0: not yet read
VIEW_ROW_OFFSET = next(_word)  # K
VIEW_META_OFFSET = next(_word)  # K
VIEW_SLOT_ROWS = next(_word)  # K
VIEW_STRIDE = next(_word)  # K
FILLED = next(_word)  # K: rows of the chunk in the staging slot that are summed
PEER_WORDS = 48

PACKED_NOTHING, PACKED_ROWS_AND_META, PACKED_META = 0, 1, 2

#: What a layout is found to be: right, or what contradicts the ids (the last: the layout itself).
LAYOUT_RIGHT, LAYOUT_BAD_ID, LAYOUT_MARKS, LAYOUT_EXPERT_COUNTS, LAYOUT_RANK_COUNTS = range(5)
