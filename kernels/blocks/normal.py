"""The three int64 blocks through which the host and the kernels of normal mode talk about one operation.

``COUNTS``     int64 [ranks, COUNT_WORDS], one per Buffer and window generation, zero at first: how many grants and
               chunk messages each peer was sent and has sent over the Buffer's life. Writer: kernels. It makes the
               number of every message known to both sides, so that "has it arrived" is one comparison.
``OPERATION``  int64 [OPERATION_WORDS], filled by the host before the first kernel of an operation.
``PEERS``      int64 [ranks, PEER_WORDS]: what belongs to one peer in this operation. Writer: kernels; ``prepare`` fills
               ABSENT to RECV_LIST, ``place`` RECV_FIRST to CHUNK_ROWS.

All are private to the rank (one thread at a time: relaxed access). Below, H = the host, before the first kernel;
P = the host, between the opening and the exchange; K = kernels. Addresses are of this process, offsets are in bytes in
a window. A word not named by an operation stays 0.

    operation word      writer  meaning
    KIND                H       NormalNotify.OPERATION_*
    NUMBER              H       number of the operation
    NOTICES             H       messages sent so far to each peer on NORMAL_NOTIFY, this operation's not counted
    PHASE               H       NORMAL_DISPATCH or NORMAL_COMBINE: stream of channel 0
    SHAPE               H       digest that all ranks must share
    CODING              H       word CODING of the notify
    TOKENS              H       dispatch: rows of X. Combine: rows of OUT
    HIDDEN              H       values per row
    ELEMENT             H       DTYPE_* of the rows
    TOPK                H       int32 ids and float32 weights per row of a dispatch; weights per row of a combine
    ROW_BYTES           H       bytes of a row
    META_BYTES          H       bytes of a row's meta, 0 = none
    SCALE_BYTES         H       bytes of scales in a row's meta
    LOCAL_EXPERTS       H       experts per rank
    X                   H       address of the rows to send
    TOPK_IDX            H       address of int64 [TOKENS, TOPK], or 0
    WEIGHTS             H       address of float32 [rows of X, TOPK], or 0
    SCALES              H       address of [TOKENS, SCALE_BYTES], or 0
    EXPERT_COUNTS_SENT  H       address of int32 [ranks x LOCAL_EXPERTS]: rows for each expert, told to its rank
    EXPERT_COUNTS       H       address of int64 [LOCAL_EXPERTS], K adds what the peers told
    OUT                 P       address of the rows returned to the caller
    OUT_IDX             P       address of int64 [rows, TOPK], or 0
    OUT_WEIGHTS         P       address of float32 [rows, TOPK], or 0
    OUT_SCALES          P       address of [rows, SCALE_BYTES], or 0
    IN_PLACE            P       1 = peers write OUT itself, 0 = rows are copied from the landing area
    BIAS_0, BIAS_1      P       addresses of [TOKENS, HIDDEN] added to a combine, or 0
    SCRATCH             H       address of max(SCRATCH_BYTES, META_BYTES) + 8 x (ranks + 2) bytes
    NOTIFY_SEND         H       offset of this parity's notifies to send
    NOTIFY_RECV         H       offset of this parity's received notifies
    NOTIFY_STRIDE       H       bytes between the notifies of two ranks
    GRANT_SEND          H       offset of the grants to send
    GRANT_RECV          H       offset of the received grants
    STAGING             H       offset of the chunks packed for proxied peers
    CHUNK_BYTES         H       bytes of a chunk there
    DEPTH               H       chunks per peer there
    LANDING             H       start and end of the area that grants of any rank may name
    LANDING_END         H
    FRONTIER            K       combine: tokens already summed
    STEPS               K       grows with every piece of progress; the host tells a slow operation from a stuck one
    LEAST_CHUNK_BYTES   H       a chunk below it is not worth a channel of its own
    ROUND_SLOT          H       bytes of a landing slot when rows are received in rounds
    MASKED              K       ranks that are left out (set by ``prepare``, like SENT_AWAY)
    SENT_AWAY           K       rows for other ranks
    DIFFERENT           K       peers that were given another SHAPE (set when all have spoken, like the next three)
    RECV_TOTAL          K       rows of the received tensor that some rank fills
    RECV_REMOTE         K       rows that come from other ranks
    META_ROOM           K       bytes for the meta of all of these, each rank's on a line of its own
    ROW_RANGE           P       offset of a range with room for every row, -1 = rounds
    META_RANGE          P       offset of a range of META_ROOM bytes, -1 = there is no meta or ROW_RANGE is -1
    STREAM_FROM         H       bytes that the ranks of a host may write in all before copies go past the caches
    STREAMED            K       1 = they do (set by ``place``)
    NODE_RANKS          H       ranks of a node when rows pass through forwarders (``protocol.relay``), else 0, as are
                                then the next six
    RANKS               H       EP ranks
    MARKS               H       address of bool [TOKENS, RANKS]: the token has an expert on the rank
    MARK_BYTES          H       bytes, after a dispatched row's scales, with a bit for each rank of its node
    RELAY_MARKS         P       address of [rows handed on, MARK_BYTES]: the ranks of this node that each went to (a
                                first dispatch writes them), by node of the source; or 0
    CURSORS             H       address of int64 [RANKS], K: combine, rows summed of a rank of this node for a node
    BOARDS              H       offset of the boards
    LINES               H       offset of the lines
    ROUTE               K       address of the route: int64 [ranks], rows that the dispatch sends to each rank; int64
                                [ranks], rows that it receives from each (``place`` writes them in a first dispatch);
                                int32, tokens for rank 0, then for rank 1, … (set by ``prepare``)

    peer word           writer  meaning
    ABSENT              K       1 = masked: nothing goes there, nothing comes
    SEND_ROWS           K       rows for the peer
    SEND_LIST           K       address of int32 [SEND_ROWS] indices into X, 0 = consecutive rows
    SEND_FIRST          K       index of the first row when consecutive
    RECV_ROWS           K       rows the peer has for this rank (a first dispatch learns it from the notify)
    RECV_LIST           K       combine: address of int32 [RECV_ROWS], token of each returning row, ascending
    RECV_FIRST          K       dispatch: index in OUT of the peer's first row
    ROW_LANDING         K       offset where the first granted row lands
    META_LANDING        K       offset where its meta lands
    SLOT_ROWS           K       rows per grant
    SLOT_STRIDE         K       bytes between the two landing slots
    CHUNK_ROWS          K       rows per chunk message; divides SLOT_ROWS, unless one grant holds everything
    NOTIFIED            K       1 = the notify to the peer is published
    TOLD                K       1 = the peer's notify has been taken
    TOLD_SHAPE          K       its words SHAPE, CODING, ROW_BYTES, META_BYTES, for the error when they differ
    TOLD_CODING         K
    TOLD_ROW_BYTES      K
    TOLD_META_BYTES     K
    GRANTS              K       grants taken from the peer in this operation
    GRANT_LEFT          K       rows of the current grant not yet sent
    GRANT_ROW           K       offset in the peer's window of the next row
    GRANT_META          K       offset of its meta
    GRANT_CHUNK         K       rows per chunk
    GRANT_START         K       chunks sent before the current grant was taken
    PACKED              K       PACKED_*: how far the chunk in the staging slot is (proxied peers)
    SENT                K       rows sent
    SENT_CHUNKS         K       chunks sent
    OVER                K       1 = the peer was told that the writes to it are over (dispatch)
    GRANTED             K       grants given to the peer in this operation
    ARRIVED_CHUNKS      K       chunks of the peer that have arrived without a gap
    ARRIVED_ROWS        K       the same in rows
    CONSUMED            K       rows unpacked or summed
    RAIL_LIST           K       address of int32 [RAIL_SEND], or [RAIL_RECV] of a combine: tokens with a place on the
                                node of the peer, a rank of another node with this rank's place in its own
    RAIL_SEND           K       rows for the peer to hand on, or to its tokens from all of this node (a combine)
    RAIL_RECV           K       rows that the peer has for this rank likewise (a first dispatch learns it)
    PASS_ROWS           K       rows between this rank and a rank of another node, whoever carries them
    PASSED              K       dispatch: of these, unpacked. Combine: laid out for the forwarder
    PASS_OVER           K       1 = the forwarder was told that this rank needs nothing more of it
    RELAY_FIRST         K       index in RELAY_MARKS of the peer's first row
    SHOWN               K       rows of the peer that its board shows, + 1; 0 = the board is of an earlier operation
    SCANNED             K       rows on the forwarder's board that this rank has looked at
    VIEW_ROWS           K       what the forwarder's board says, checked; VIEW_SLOT_ROWS = 0: not yet read
    VIEW_ROW_OFFSET     K
    VIEW_META_OFFSET    K
    VIEW_SLOT_ROWS      K
    VIEW_STRIDE         K
    FILLED              K       rows of the chunk in the staging slot that are summed
"""

from __future__ import annotations

#: Values summed at once: 4 KiB of float32 stays in the first-level cache with one tile of every source.
TILE = 1024
SCRATCH_BYTES = 4 * TILE

# COUNTS words: messages over the Buffer's life, by peer
GRANTS_SENT, GRANTS_TAKEN = 0, 1
#: + 0 for dispatch, + 1 for combine
CHUNKS_SENT, CHUNKS_TAKEN = 2, 4
COUNT_WORDS = 8

(
    KIND,
    NUMBER,
    NOTICES,
    PHASE,
    SHAPE,
    CODING,
    TOKENS,
    HIDDEN,
    ELEMENT,
    TOPK,
    ROW_BYTES,
    META_BYTES,
    SCALE_BYTES,
    LOCAL_EXPERTS,
    X,
    TOPK_IDX,
    WEIGHTS,
    SCALES,
    EXPERT_COUNTS_SENT,
    EXPERT_COUNTS,
    OUT,
    OUT_IDX,
    OUT_WEIGHTS,
    OUT_SCALES,
    IN_PLACE,
    BIAS_0,
    BIAS_1,
    SCRATCH,
    NOTIFY_SEND,
    NOTIFY_RECV,
    NOTIFY_STRIDE,
    GRANT_SEND,
    GRANT_RECV,
    STAGING,
    CHUNK_BYTES,
    DEPTH,
    LANDING,
    LANDING_END,
    FRONTIER,
    STEPS,
    LEAST_CHUNK_BYTES,
    ROUND_SLOT,
    MASKED,
    SENT_AWAY,
    DIFFERENT,
    RECV_TOTAL,
    RECV_REMOTE,
    META_ROOM,
    ROW_RANGE,
    META_RANGE,
    STREAM_FROM,
    STREAMED,
    NODE_RANKS,
    RANKS,
    MARKS,
    MARK_BYTES,
    RELAY_MARKS,
    CURSORS,
    BOARDS,
    LINES,
    ROUTE,
) = range(61)
OPERATION_WORDS = 64

(
    ABSENT,
    SEND_ROWS,
    SEND_LIST,
    SEND_FIRST,
    RECV_ROWS,
    RECV_LIST,
    RECV_FIRST,
    ROW_LANDING,
    META_LANDING,
    SLOT_ROWS,
    SLOT_STRIDE,
    CHUNK_ROWS,
    NOTIFIED,
    TOLD,
    TOLD_SHAPE,
    TOLD_CODING,
    TOLD_ROW_BYTES,
    TOLD_META_BYTES,
    GRANTS,
    GRANT_LEFT,
    GRANT_ROW,
    GRANT_META,
    GRANT_CHUNK,
    GRANT_START,
    PACKED,
    SENT,
    SENT_CHUNKS,
    OVER,
    GRANTED,
    ARRIVED_CHUNKS,
    ARRIVED_ROWS,
    CONSUMED,
    RAIL_LIST,
    RAIL_SEND,
    RAIL_RECV,
    PASS_ROWS,
    PASSED,
    PASS_OVER,
    RELAY_FIRST,
    SHOWN,
    SCANNED,
    VIEW_ROWS,
    VIEW_ROW_OFFSET,
    VIEW_META_OFFSET,
    VIEW_SLOT_ROWS,
    VIEW_STRIDE,
    FILLED,
) = range(47)
PEER_WORDS = 48

PACKED_NOTHING, PACKED_ROWS_AND_META, PACKED_META = 0, 1, 2

#: What a layout is found to be: right, or what contradicts the ids (the last: the layout itself).
LAYOUT_RIGHT, LAYOUT_BAD_ID, LAYOUT_MARKS, LAYOUT_EXPERT_COUNTS, LAYOUT_RANK_COUNTS = range(5)
