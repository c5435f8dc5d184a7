"""The sending side of the row exchange: take a grant, send its rows in chunks, say when all writes are over.

A chunk is one message: its rows and, if there is any, its meta. To a mapped peer the kernel gathers straight to the
rows' final place; for a proxied one it packs the chunk into one of DEPTH slots of the staging, reused when the
write from it completed locally. Chunk q of a (peer, phase), counted over the Buffer's life, is message
``q // channels`` of the stream of channel ``q % channels``: both sides know every number without telling each other.
"""

from __future__ import annotations

from ...native.failure import set_failure
from ...native.jit import compiled
from ...protocol.context import FAILURE_PROTOCOL, STATUS_OK, STATUS_PENDING, STATUS_PROTOCOL
from ...protocol.message import GRANT_SLOTS, HEADER_BYTES, NormalGrant
from ...protocol.streams import NORMAL_GRANT, NORMAL_NOTIFY
from ..blocks import normal as block
from .context import (
    arrived_count,
    channel_count,
    completed_count,
    error_address,
    peer_window,
    window_address,
)
from .normal_rows import pack_meta, pack_rows
from .publish import publish, put_write, store_flag
from .words import MOVED, NOTHING, add, get, phase_of, put

_TAG = NormalGrant.TAG_VALUE
_AT_TAG, _AT_NUMBER, _AT_ROUND, _AT_ROWS = (
    NormalGrant.TAG,
    NormalGrant.NUMBER,
    NormalGrant.ROUND,
    NormalGrant.ROWS,
)
_AT_ROW_OFFSET, _AT_META_OFFSET, _AT_CHUNK_ROWS = (
    NormalGrant.ROW_OFFSET,
    NormalGrant.META_OFFSET,
    NormalGrant.CHUNK_ROWS,
)


@compiled
def sent_on(context: int, counts: int, operation: int, peer: int, stream: int) -> int:
    """Messages sent to ``peer`` on a stream of the operation's phase, over the Buffer's life."""
    stream0 = get(operation, block.PHASE)
    phase = phase_of(operation)
    total = get(counts + 8 * block.COUNT_WORDS * peer, block.CHUNKS_SENT + phase)
    return _share_of(context, total, stream - stream0)


@compiled
def _share_of(context: int, chunks: int, channel: int) -> int:
    """How many of the first ``chunks`` chunks travel on ``channel``."""
    channels = channel_count(context)
    return (chunks - channel + channels - 1) // channels if chunks > channel else 0


@compiled
def _refuse(context: int, peer: int, claimed: int, expected: int) -> int:
    set_failure(error_address(context), FAILURE_PROTOCOL, peer, NORMAL_GRANT, claimed, expected)
    return -STATUS_PROTOCOL


@compiled
def _lands_outside(operation: int, offset: int, nbytes: int) -> bool:
    """True when a claimed range is not in the area that grants may name (offsets are claims: no overflow here)."""
    start, end = get(operation, block.LANDING), get(operation, block.LANDING_END)
    return offset % 16 != 0 or offset < start or offset > end or nbytes > end - offset


@compiled
def _landing_is_quiet(context: int, operation: int, state: int, life: int, peer: int) -> bool:
    """True when no write of the grants before the current one can be repeated.

    The next grant names the landing slot of the grant before the current one. The receiver has read those rows, yet a
    NIC may repeat their writes until they complete here, and a repeat would fall on the rows that come next.
    """
    stream0 = get(operation, block.PHASE)
    phase = phase_of(operation)
    chunks = get(life, block.CHUNKS_SENT + phase) - get(state, block.SENT_CHUNKS) + get(state, block.GRANT_START)
    for channel in range(channel_count(context)):
        if completed_count(context, peer, stream0 + channel) < _share_of(context, chunks, channel):
            return False
    return True


@compiled
def take_grant(context: int, counts: int, operation: int, peers: int, peer: int) -> int:
    """Take the next grant of ``peer`` when the one before is used up. Returns MOVED, NOTHING or minus a status."""
    state = peers + 8 * block.PEER_WORDS * peer
    left = get(state, block.SEND_ROWS) - get(state, block.SENT)
    if left == 0 or get(state, block.GRANT_LEFT) > 0:
        return NOTHING
    life = counts + 8 * block.COUNT_WORDS * peer
    taken = get(life, block.GRANTS_TAKEN)
    if arrived_count(context, peer, NORMAL_GRANT) <= taken:
        return NOTHING
    # rule: a grant is taken only when the writes of the one before last are over
    if not _landing_is_quiet(context, operation, state, life, peer):
        return NOTHING
    slot = get(operation, block.GRANT_RECV) + (peer * GRANT_SLOTS + taken % GRANT_SLOTS) * HEADER_BYTES
    at = window_address(context) + slot
    tag, number, grant, rows = get(at, _AT_TAG), get(at, _AT_NUMBER), get(at, _AT_ROUND), get(at, _AT_ROWS)
    row, meta, chunk = get(at, _AT_ROW_OFFSET), get(at, _AT_META_OFFSET), get(at, _AT_CHUNK_ROWS)
    row_bytes, meta_bytes = get(operation, block.ROW_BYTES), get(operation, block.META_BYTES)
    if tag != _TAG:
        return _refuse(context, peer, tag, _TAG)
    if number != get(operation, block.NUMBER):
        return _refuse(context, peer, number, get(operation, block.NUMBER))
    if grant != get(state, block.GRANTS):
        return _refuse(context, peer, grant, get(state, block.GRANTS))
    if rows < 1 or rows > left:
        return _refuse(context, peer, rows, left)
    most = get(operation, block.CHUNK_BYTES) // (row_bytes + meta_bytes)
    if chunk < 1 or chunk > most:
        return _refuse(context, peer, chunk, most)
    # rule: where a grant lets rows land is checked
    if _lands_outside(operation, row, rows * row_bytes):
        return _refuse(context, peer, row, get(operation, block.LANDING))
    if meta_bytes != 0 and _lands_outside(operation, meta, rows * meta_bytes):
        return _refuse(context, peer, meta, get(operation, block.LANDING))
    put(life, block.GRANTS_TAKEN, taken + 1)
    add(state, block.GRANTS, 1)
    put(state, block.GRANT_LEFT, rows)
    put(state, block.GRANT_ROW, row)
    put(state, block.GRANT_META, meta)
    put(state, block.GRANT_CHUNK, chunk)
    put(state, block.GRANT_START, get(state, block.SENT_CHUNKS))
    return MOVED


@compiled
def _chunk_sent(operation: int, state: int, life: int, phase: int, rows: int) -> int:
    """Move every position past a chunk that has been published."""
    add(state, block.GRANT_LEFT, -rows)
    add(state, block.GRANT_ROW, rows * get(operation, block.ROW_BYTES))
    add(state, block.GRANT_META, rows * get(operation, block.META_BYTES))
    add(state, block.SENT, rows)
    add(state, block.SENT_CHUNKS, 1)
    put(state, block.PACKED, block.PACKED_NOTHING)
    add(life, block.CHUNKS_SENT + phase, 1)
    return MOVED


@compiled
def _stage(operation: int, peer: int, chunk: int) -> int:
    """Offset of the staging slot of chunk ``chunk`` (counted in the operation, which starts with free slots)."""
    depth = get(operation, block.DEPTH)
    return get(operation, block.STAGING) + (peer * depth + chunk % depth) * get(operation, block.CHUNK_BYTES)


@compiled
def chunk_address(context: int, counts: int, operation: int, peers: int, peer: int) -> tuple[int, int]:
    """Where the rows and the meta of the next chunk for ``peer``, of which rows are granted, are to be written.

    In the window of a mapped peer, else in the staging; (0, 0) while the slot's last write may be read or repeated.
    """
    state = peers + 8 * block.PEER_WORDS * peer
    window = peer_window(context, peer)
    if window != 0:
        return window + get(state, block.GRANT_ROW), window + get(state, block.GRANT_META)
    life = counts + 8 * block.COUNT_WORDS * peer
    stream0, channels = get(operation, block.PHASE), channel_count(context)
    chunk, depth = get(state, block.SENT_CHUNKS), get(operation, block.DEPTH)
    earlier = get(life, block.CHUNKS_SENT + phase_of(operation)) - depth
    # rule: chunk staging is packed again only when its last write completed
    if chunk >= depth and (completed_count(context, peer, stream0 + earlier % channels) < earlier // channels + 1):
        return 0, 0
    rows = min(get(state, block.GRANT_LEFT), get(state, block.GRANT_CHUNK))
    at = window_address(context) + _stage(operation, peer, chunk)
    return at, at + rows * get(operation, block.ROW_BYTES)


@compiled
def publish_chunk(context: int, counts: int, operation: int, peers: int, peer: int) -> int:
    """Publish the chunk that was packed at :func:`chunk_address`. Returns MOVED, NOTHING or minus a status."""
    state = peers + 8 * block.PEER_WORDS * peer
    life = counts + 8 * block.COUNT_WORDS * peer
    phase, channels = phase_of(operation), channel_count(context)
    number = get(life, block.CHUNKS_SENT + phase)
    stream = get(operation, block.PHASE) + number % channels
    rows = min(get(state, block.GRANT_LEFT), get(state, block.GRANT_CHUNK))
    if peer_window(context, peer) != 0:
        status = store_flag(context, peer, stream, number // channels + 1)
        if status != STATUS_OK:
            return -status
        return _chunk_sent(operation, state, life, phase, rows)
    row_bytes, meta_bytes = rows * get(operation, block.ROW_BYTES), rows * get(operation, block.META_BYTES)
    slot = _stage(operation, peer, get(state, block.SENT_CHUNKS))
    if get(state, block.PACKED) == block.PACKED_ROWS_AND_META:
        target = get(state, block.GRANT_ROW)
        status = put_write(context, peer, stream, slot, target, row_bytes, 1 if meta_bytes == 0 else 0)
        if status != STATUS_OK:
            return NOTHING if status == STATUS_PENDING else -status
        put(state, block.PACKED, block.PACKED_META)
    if meta_bytes != 0:
        target = get(state, block.GRANT_META)
        status = put_write(context, peer, stream, slot + row_bytes, target, meta_bytes, 1)
        if status != STATUS_OK:
            return NOTHING if status == STATUS_PENDING else -status
    return _chunk_sent(operation, state, life, phase, rows)


@compiled
def send_chunk(context: int, counts: int, operation: int, peers: int, peer: int) -> int:
    """Send the next chunk of what ``peer`` has granted. Returns MOVED, NOTHING or minus a status."""
    state = peers + 8 * block.PEER_WORDS * peer
    left = get(state, block.GRANT_LEFT)
    if left == 0:
        return NOTHING
    if get(state, block.PACKED) == block.PACKED_NOTHING:
        at, at_meta = chunk_address(context, counts, operation, peers, peer)
        if at == 0:
            return NOTHING
        rows, first = min(left, get(state, block.GRANT_CHUNK)), get(state, block.SENT)
        # the proxy reads the staging next
        streamed = peer_window(context, peer) != 0 and get(operation, block.STREAMED) != 0
        pack_rows(operation, state, first, rows, at, streamed)
        if get(operation, block.META_BYTES) != 0:
            pack_meta(context, operation, state, peer, first, rows, at_meta)
        put(state, block.PACKED, block.PACKED_ROWS_AND_META)
    return publish_chunk(context, counts, operation, peers, peer)


@compiled
def chunks_over(context: int, counts: int, operation: int, peer: int) -> int:
    """-1 when all chunks sent to ``peer`` completed locally, else a stream on which one did not."""
    first = get(operation, block.PHASE)
    for stream in range(first, first + channel_count(context)):
        if completed_count(context, peer, stream) < sent_on(context, counts, operation, peer, stream):
            return stream
    return -1


@compiled
def say_over(context: int, counts: int, operation: int, peers: int, peer: int) -> int:
    """After the last chunk of a dispatch: tell ``peer`` that no write of ours to it can happen any more.

    A NIC may repeat a write until it completes locally. The receiver hands the memory of an in-place dispatch to its
    caller, who may overwrite it, so it must know. A message without payload, the second of the operation on
    NORMAL_NOTIFY. Returns MOVED, NOTHING or minus a status.
    """
    state = peers + 8 * block.PEER_WORDS * peer
    if get(state, block.OVER) != 0 or get(state, block.SENT) < get(state, block.SEND_ROWS):
        return NOTHING
    # rule: a dispatch says that its writes are over only when they completed
    if chunks_over(context, counts, operation, peer) >= 0:
        return NOTHING
    status = publish(context, peer, NORMAL_NOTIFY, 0, 0, 0, get(operation, block.NOTICES) + 2)
    if status != STATUS_OK:
        return NOTHING if status == STATUS_PENDING else -status
    put(state, block.OVER, 1)
    return MOVED
