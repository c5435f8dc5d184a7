"""Headers of the messages that ranks send each other: sequences of little-endian int64 words.

Every header starts with ``TAG`` (format version and message kind) so that a receiver can refuse what is not meant for
it. A receiver reads each word once, checks it, and uses that copy: the memory behind it is writable by the peer.

Low-latency dispatch message, contiguous in the slot of (parity, source rank):

    header (64 bytes) | rows of each local expert of the destination, int32 | (meta, row) x tokens

so that a row's place depends on no other one: it is written as soon as it is known where the message begins, and a
receiver that knows the counts of the sources can put it in its place before the others are there. The counts are
rounded up to 16 bytes (:func:`counts_bytes`).

``meta`` of a token (:func:`meta_bytes`): int32 token index at the source; int32 pairs of the message before it;
``topk`` int32 places, local expert << 16 | position among the message's rows of that expert, -1 for slots whose expert
does not live at this destination; then, when the header says so, ``topk`` float32 router weights (always reserved). A
token that names an expert twice has one row there, and both slots name its place. A row is the token's data followed by
its scales, rounded up to 16 bytes (:func:`row_bytes`).

Low-latency combine message, at the offset the dispatch header named (``RETURN_OFFSET``):

    header (64 bytes) | rows

in the order of the dispatch message: one row per token (``FORM_REDUCED``: weighted sum of its local experts) or one
per pair in slot order (``FORM_EXPANDED``).

A pair is a token and a top-k slot of it that lives there. Where ``topk`` exceeds the experts of a rank, the slots that
name one expert are one pair, so that a token has at most as many pairs there as the rank has experts.
"""

from __future__ import annotations

from .streams import NORMAL_CHANNELS

__all__ = [
    "CHANNEL_ROWS_BYTES",
    "CODING_MARK",
    "DTYPE_BF16",
    "DTYPE_F16",
    "DTYPE_F32",
    "DTYPE_FP8",
    "DTYPE_FP8_UE8M0",
    "FORMAT_VERSION",
    "FORM_EXPANDED",
    "FORM_REDUCED",
    "GRANT_SLOTS",
    "HEADER_BYTES",
    "HEADER_WORDS",
    "LEAST_CHUNK_BYTES",
    "META_LINE",
    "MOST_TOKENS",
    "NOTICE_SLOTS",
    "PAIRS_SHIFT",
    "PLACE_SHIFT",
    "SCALE_BLOCK",
    "STAMP_SHIFT",
    "LowLatencyHeader",
    "NormalGrant",
    "NormalNotify",
    "Notice",
    "coding_in_words",
    "counts_bytes",
    "element_bytes",
    "meta_bytes",
    "notify_bytes",
    "round_up",
    "row_bytes",
    "scale_bytes",
    "tag",
]

FORMAT_VERSION = 4
HEADER_WORDS = 8
HEADER_BYTES = HEADER_WORDS * 8
#: Values per scale in block-scaled FP8 (DeepEP: per-token groups of 128).
SCALE_BLOCK = 128
#: Rotating slots per peer; a slot is rewritten only after the previous use completed locally and the peer moved on.
NOTICE_SLOTS = 4
GRANT_SLOTS = 4
#: What a notify tells of each channel: rows for the receiver, and rows over the rail to it.
CHANNEL_ROWS_BYTES = 2 * 4 * NORMAL_CHANNELS
#: In normal mode each rank's meta lands from a multiple of so many bytes on: no two ranks write the same line.
META_LINE = 128
#: A chunk of normal mode below this size costs more in latency than it gains by being striped over channels.
LEAST_CHUNK_BYTES = 64 << 10
#: In a stamp: rows in so many lower bits, an operation's number above. What is left for the number lasts for 2**39
#: operations: years, at 3,500 a second (58 layers, 30 steps).
STAMP_SHIFT = 24
#: Tokens of a rank in a dispatch of normal mode, which no such number of rows exceeds.
MOST_TOKENS = (1 << STAMP_SHIFT) - 2

DTYPE_BF16 = 0
DTYPE_F16 = 1
DTYPE_F32 = 2
DTYPE_FP8 = 3  # e4m3, one float32 scale per 128 values
DTYPE_FP8_UE8M0 = 4  # e4m3, one power-of-two exponent byte per 128 values

#: In ROWS of a dispatch: rows in the lower half, their pairs above.
PAIRS_SHIFT = 32
#: In a place: position in the lower half, local expert above.
PLACE_SHIFT = 16

FORM_EXPANDED = 0
FORM_REDUCED = 1

_KIND_LL_DISPATCH, _KIND_LL_COMBINE, _KIND_NOTICE, _KIND_NOTIFY, _KIND_GRANT = 1, 2, 3, 4, 5


def tag(kind: int) -> int:
    """First word of a header of ``kind``: ASCII "UCEP", format version, kind."""
    return 0x5543_4550 << 24 | FORMAT_VERSION << 8 | kind


#: Or-ed to a CODING that is refused, to tell it from the other words that a sticky error may have.
CODING_MARK = 1 << 40
_DTYPES = {
    DTYPE_BF16: "bfloat16",
    DTYPE_F16: "float16",
    DTYPE_F32: "float32",
    DTYPE_FP8: "e4m3 with float32 scales",
    DTYPE_FP8_UE8M0: "e4m3 with UE8M0 scales",
}


def coding_in_words(word: int) -> str:
    """What a refused CODING says of rows, for messages; "" for one that nobody sends, and for any other word."""
    if word & ~0xFFFF_FFFF != CODING_MARK or word & 0xFF not in _DTYPES:
        return ""
    form = ", one for each rank" if word >> 8 & 0xFF == FORM_REDUCED else ""
    return f"rows of {_DTYPES[word & 0xFF]}{form}"


class LowLatencyHeader:
    """Word indices of a low-latency dispatch or combine header.

    Writer: the send kernel of the source. Reader: the recv kernel of the destination, after ``arrived`` covers it.
    """

    DISPATCH_TAG = tag(_KIND_LL_DISPATCH)
    COMBINE_TAG = tag(_KIND_LL_COMBINE)
    TAG = 0
    #: Message number of the phase, 0, 1, 2, …
    NUMBER = 1
    #: Dispatch: pairs << 32 | tokens. Combine: rows.
    ROWS = 2
    #: Dispatch: DTYPE_* of the rows. Combine: FORM_* << 8 | DTYPE_* of the rows.
    CODING = 3
    #: Sizes of the operation (`layout.PLAN`): both sides mean the same one.
    PLAN = 4
    #: Dispatch: byte offset in the *source's* window where this destination puts its combine message, rows follow the
    #: header there. Combine: 0.
    RETURN_OFFSET = 5
    #: Low-latency dispatch messages of the receiver of this header that the sender has finished reading.
    CONSUMED_DISPATCH = 6
    #: Combine messages likewise, counted only once all writes into that space are known to be over.
    CONSUMED_COMBINE = 7
    #: Dispatch only, or-ed into CODING: router weights are present, combine will return FORM_REDUCED.
    WEIGHTED = 1 << 16


class Notice:
    """Word indices of a notice: consumed counts that no header carried in time. 64 bytes."""

    TAG_VALUE = tag(_KIND_NOTICE)
    TAG = 0
    NUMBER = 1
    CONSUMED_DISPATCH = 6
    CONSUMED_COMBINE = 7


class NormalNotify:
    """Word indices of the message that opens a normal-mode operation; int32 tokens per local expert follow it.

    Writer: each rank to each rank. Reader: the receiver, before it grants anything.
    """

    TAG_VALUE = tag(_KIND_NOTIFY)
    TAG = 0
    #: Number of the operation, 0, 1, 2, … (dispatches and combines counted together).
    NUMBER = 1
    #: Rows the sender has for the receiver. GPUs say CHANNEL_ROWS instead.
    ROWS = 2
    #: OPERATION << 16 | DTYPE_* of the rows.
    CODING = 3
    #: Digest of all that both sides must mean alike: operation, dtype, hidden, topk, scales, experts, ranks of a node,
    #: channels, and which dispatch a handle is of.
    SHAPE = 4
    ROW_BYTES = 5
    META_BYTES = 6
    #: Rows the sender has for the receiver to forward or to sum inside its node; 0 when nodes play no part.
    RAIL_ROWS = 7
    #: Of GPUs instead of ROWS and RAIL_ROWS, behind the header: int32 [2, NORMAL_CHANNELS], both for each channel.
    CHANNEL_ROWS = HEADER_WORDS

    OPERATION_DISPATCH = 1
    OPERATION_CACHED_DISPATCH = 2
    OPERATION_COMBINE = 3


class NormalGrant:
    """Word indices of a grant: where in the receiver's window the next rows of a sender go. 64 bytes.

    Writer: the receiver of the rows. Reader: the sender of the rows.
    """

    TAG_VALUE = tag(_KIND_GRANT)
    TAG = 0
    #: Number of the operation.
    NUMBER = 1
    #: Number of the grant within the operation and peer, 0, 1, 2, …
    ROUND = 2
    #: Rows granted; the sender sends exactly as many.
    ROWS = 3
    #: Byte offset in the receiver's window of the first row; rows follow at their natural stride.
    ROW_OFFSET = 4
    #: Byte offset of the first row's meta; stride META_BYTES.
    META_OFFSET = 5
    #: Rows per chunk message. Chunk q, counted per peer and phase over the Buffer's life, is message q // channels of
    #: channel q % channels.
    CHUNK_ROWS = 6


def round_up(value: int, step: int) -> int:
    """``value`` rounded up to a multiple of ``step``."""
    return -(-value // step) * step


def element_bytes(dtype: int) -> int:
    """Bytes of one value of a DTYPE_* code."""
    return (2, 2, 4, 1, 1)[dtype]


def scale_bytes(hidden: int, dtype: int) -> int:
    """Bytes of one row's scales."""
    if dtype == DTYPE_FP8:
        return hidden // SCALE_BLOCK * 4
    return hidden // SCALE_BLOCK if dtype == DTYPE_FP8_UE8M0 else 0


def row_bytes(hidden: int, dtype: int) -> int:
    """Bytes of a low-latency row on the wire: data, then scales, rounded up to 16."""
    return round_up(hidden * element_bytes(dtype) + scale_bytes(hidden, dtype), 16)


def meta_bytes(topk: int) -> int:
    """Bytes of a token's meta in a low-latency dispatch message."""
    return round_up(8 + topk * 8, 16)


def counts_bytes(local_experts: int) -> int:
    """Bytes of the counts in a low-latency dispatch message to a rank of so many experts."""
    return round_up(local_experts * 4, 16)


def notify_bytes(local_experts: int) -> int:
    """Bytes of a normal-mode notify: header and one int32 count per expert of the receiver; those of GPUs have
    CHANNEL_ROWS_BYTES more."""
    return HEADER_BYTES + round_up(local_experts * 4, 16)
