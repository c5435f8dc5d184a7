"""Low-latency messages: how they are posted, whether they have arrived, and which have been read.

Message ``number`` of a phase is message ``number // 2`` of the streams of its parity. Its contiguous bytes are cut
into one piece per channel; a piece is one write and may be empty, so that every stream carries every message.

A slot may be written again once its reader has told the writer so. Every header carries the two counts; where no header
comes in time (a rank that would wait for a peer that waits for it) a notice does. What has arrived but not been
received yet (its recv hook was not called) is listened to as well: the peer counts on having told us.
"""

from __future__ import annotations

from ...native.atomics import load64, peek, peek32, poke, store64
from ...native.calls import monotonic_ns
from ...native.failure import set_failure
from ...native.jit import compiled, inlined
from ...protocol.context import FAILURE_PROTOCOL, STATUS_OK, STATUS_PENDING, STATUS_PROTOCOL
from ...protocol.message import CODING_MARK, HEADER_BYTES, NOTICE_SLOTS, LowLatencyHeader, Notice
from ...protocol.streams import LL_COMBINE, LL_DISPATCH, MAX_CHANNELS, NOTICE
from ..blocks import low_latency as block
from .context import (
    arrived_count,
    channel_count,
    completed_count,
    error_address,
    is_masked,
    own_rank,
    peer_window,
    rank_count,
    window_address,
)
from .publish import message_address, publish, put_write, store_flag
from .wait import end_spin, note_progress
from .words import get

#: Pieces start on cache lines, so that two channels never write to the same one.
PIECE_ALIGNMENT = 64
#: Messages packed one after the other start on cache lines. A header of 64 bytes and the round-up (rows are multiples
#: of 16) stay within the 128 bytes per rank that the layout reserves.
MESSAGE_ALIGNMENT = 64

# Byte offsets of the words of a header. Module constants, because Numba knows no class attributes.
AT_TAG = LowLatencyHeader.TAG * 8
AT_NUMBER = LowLatencyHeader.NUMBER * 8
AT_ROWS = LowLatencyHeader.ROWS * 8
AT_CODING = LowLatencyHeader.CODING * 8
AT_PLAN = LowLatencyHeader.PLAN * 8
AT_RETURN_OFFSET = LowLatencyHeader.RETURN_OFFSET * 8
AT_CONSUMED_DISPATCH = LowLatencyHeader.CONSUMED_DISPATCH * 8
AT_CONSUMED_COMBINE = LowLatencyHeader.CONSUMED_COMBINE * 8


@compiled
def peer_word(context: int, state: int, table: int, peer: int) -> int:
    """Address of a peer's entry in a table of the state block."""
    return state + 8 * (block.PEER_TABLES + table * rank_count(context) + peer)


@compiled
def route_word(context: int, route: int, table: int, rank: int) -> int:
    """Address of a rank's entry in a table of the route block."""
    return route + 8 * (block.ROUTE_TABLES + table * rank_count(context) + rank)


@inlined
def is_repeated(places: int, slot: int) -> bool:
    """Whether an earlier slot of a token has the same place, of the int32 places at ``places``: it names that expert
    twice."""
    found = False
    for earlier in range(slot):
        found |= peek32(places + 4 * earlier) == peek32(places + 4 * slot)
    return found


@compiled
def streams_of(phase: int, number: int) -> int:
    """Stream of channel 0 of message ``number``; channel c has the id c above it."""
    return phase + (number & 1) * MAX_CHANNELS


@compiled
def has_arrived(context: int, progress: int, peer: int, phase: int, number: int) -> bool:
    """True when all pieces of message ``number`` of ``peer`` are visible; else the first missing one is in
    ``progress``."""
    first, expected = streams_of(phase, number), number // 2 + 1
    for channel in range(channel_count(context)):
        count = arrived_count(context, peer, first + channel)
        # rule: a receive waits for every unmasked peer
        if count < expected:
            note_progress(progress, peer, first + channel, count, expected)
            return False
    return True


@compiled
def has_completed(context: int, progress: int, peer: int, phase: int, number: int) -> bool:
    """True when own message ``number`` to ``peer`` completed locally, hence is never repeated; True for number < 0."""
    if number < 0 or peer_window(context, peer) != 0:
        return True
    first, expected = streams_of(phase, number), number // 2 + 1
    for channel in range(channel_count(context)):
        count = completed_count(context, peer, first + channel)
        if count < expected:
            note_progress(progress, peer, first + channel, count, expected)
            return False
    return True


@compiled
def staging_is_free(context: int, progress: int, phase: int, number: int) -> bool:
    """True when no proxied message ``number`` of the phase, to whomever it went, can be read again by a NIC."""
    for peer in range(rank_count(context)):
        if not is_masked(context, peer) and not has_completed(context, progress, peer, phase, number):
            return False
    return True


@compiled
def wait_message(
    context: int, progress: int, peer: int, phase: int, number: int, waited: int, slice_end_ns: int
) -> int:
    """Wait for message ``number`` of ``peer``: STATUS_OK, STATUS_PENDING or STATUS_POISONED.

    ``waited``: address of int64[ranks] to which the nanoseconds are added at the peer's place, or 0.
    """
    spin, status = 0, STATUS_OK
    start = monotonic_ns() if waited != 0 else 0
    while status == STATUS_OK and not has_arrived(context, progress, peer, phase, number):
        status = end_spin(context, spin, slice_end_ns)
        spin += 1
    if waited != 0:
        poke(waited + 8 * peer, peek(waited + 8 * peer) + monotonic_ns() - start)
    return status


@compiled
def post_message(
    context: int, peer: int, phase: int, number: int, posted: int, source: int, target: int, nbytes: int
) -> int:
    """Publish a packed message of ``nbytes`` bytes to ``peer``, one piece per channel.

    Args:
        posted: address of the count of pieces published to the peer in this phase; a resumed call goes on there.
        source, target: window offsets of the message here and there. A mapped peer has the bytes already.

    Returns:
        STATUS_OK, STATUS_PENDING when a ring is full, or STATUS_POISONED.
    """
    channels = channel_count(context)
    first = streams_of(phase, number)
    piece = ((nbytes + channels - 1) // channels + PIECE_ALIGNMENT - 1) // PIECE_ALIGNMENT * PIECE_ALIGNMENT
    direct = peer_window(context, peer) != 0
    while True:
        channel = peek(posted) - number * channels
        if channel >= channels:
            return STATUS_OK
        if direct:
            status = store_flag(context, peer, first + channel, number // 2 + 1)
        else:
            start = min(channel * piece, nbytes)
            length = min(piece, nbytes - start)
            if length == 0:
                # an empty write names the start of the message: the end may be the end of the window
                start = 0
            status = put_write(context, peer, first + channel, source + start, target + start, length, 1)
        if status != STATUS_OK:
            return status
        poke(posted, number * channels + channel + 1)


@compiled
def refuse(context: int, peer: int, stream: int, got: int, expected: int) -> int:
    """Set the sticky error: ``peer`` claims something the formats forbid. Returns STATUS_PROTOCOL."""
    set_failure(error_address(context), FAILURE_PROTOCOL, peer, stream, got, expected)
    return STATUS_PROTOCOL


@compiled
def refuse_coding(context: int, peer: int, stream: int, got: int, expected: int) -> int:
    """The same for a CODING, which is marked as one: it is told in words."""
    return refuse(context, peer, stream, CODING_MARK | got & 0xFFFFFFFF, CODING_MARK | expected)


@compiled
def check_origin(context: int, route: int, peer: int, stream: int, header: int, tag: int, number: int) -> int:
    """STATUS_OK when ``header`` is of message ``number`` of ``peer``, of this kind and the route's plan; else
    STATUS_PROTOCOL.

    Each word is read once: the peer could change it.
    """
    word = peek(header + AT_TAG)
    if word != tag:
        return refuse(context, peer, stream, word, tag)
    word = peek(header + AT_PLAN)
    # rule: a message of another shape is refused
    if word != get(route, block.PLAN):
        return refuse(context, peer, stream, word, get(route, block.PLAN))
    word = peek(header + AT_NUMBER)
    # rule: the number in a header is checked
    if word != number:
        return refuse(context, peer, stream, word, number)
    return STATUS_OK


_DISPATCH_TAG = LowLatencyHeader.DISPATCH_TAG
_COMBINE_TAG = LowLatencyHeader.COMBINE_TAG
_NOTICE_TAG = Notice.TAG * 8
_NOTICE_NUMBER = Notice.NUMBER * 8
_NOTICE_TAG_VALUE = Notice.TAG_VALUE
assert (Notice.CONSUMED_DISPATCH * 8, Notice.CONSUMED_COMBINE * 8) == (AT_CONSUMED_DISPATCH, AT_CONSUMED_COMBINE)


@compiled
def mark_read(state: int, read: int, ahead: int, number: int) -> None:
    """Message ``number`` is unpacked; ``read`` and ``ahead`` are the words of its phase. The hooks of two may come
    swapped."""
    count = peek(state + 8 * read)
    if number == count:
        poke(state + 8 * read, count + 1 + peek(state + 8 * ahead))
        poke(state + 8 * ahead, 0)
    elif number == count + 1:
        poke(state + 8 * ahead, 1)


@compiled
def spaces_free(context: int, state: int, progress: int) -> int:
    """Combine messages of each peer whose space here is free again.

    Combine space is shared out anew each time, so a late repetition of one peer's write could hit the rows of another.
    A peer sends combine n only after its combine n - 1 completed locally: when its message n has arrived, nothing of
    n - 1 can be repeated. So a message counts once it is read and every peer's next one has arrived.
    Fills the progress block with the peer that holds the count back.
    """
    free = get(state, block.COMBINE_READ)
    for peer in range(rank_count(context)):
        if is_masked(context, peer):
            continue
        for parity in range(2):
            for channel in range(channel_count(context)):
                stream = LL_COMBINE + parity * MAX_CHANNELS + channel
                count = arrived_count(context, peer, stream)
                # messages parity, parity + 2, …: those before 2 * count + parity have arrived
                # rule: combine space is free only when every peer's next combine has arrived
                if 2 * count + parity - 1 < free:
                    free = 2 * count + parity - 1
                    note_progress(progress, peer, stream, count, count + 1)
    return max(free, 0)


@compiled
def take_acks(context: int, state: int, peer: int, stream: int, dispatched: int, combined: int) -> int:
    """Note the counts that ``peer`` claims in a message of ``stream``: STATUS_OK, or STATUS_PROTOCOL when they cannot
    be."""
    sent = peek(peer_word(context, state, block.DISPATCH_PACKED, peer))
    # rule: counts that a peer claims are checked
    if dispatched < 0 or dispatched > sent:
        return refuse(context, peer, stream, dispatched, sent)
    sent = peek(peer_word(context, state, block.COMBINE_PACKED, peer))
    if combined < 0 or combined > sent:
        return refuse(context, peer, stream, combined, sent)
    recv_ack = peer_word(context, state, block.RECV_ACK_DISPATCH, peer)
    poke(recv_ack, max(peek(recv_ack), dispatched))
    recv_ack = peer_word(context, state, block.RECV_ACK_COMBINE, peer)
    poke(recv_ack, max(peek(recv_ack), combined))
    return STATUS_OK


@compiled
def _listen(context: int, state: int, peer: int, stream: int, header: int, tag: int, number: int) -> int:
    # a header that is not the expected one is refused when its message is received
    if peek(header + AT_TAG) != tag or peek(header + AT_NUMBER) != number:
        return STATUS_OK
    dispatched, combined = peek(header + AT_CONSUMED_DISPATCH), peek(header + AT_CONSUMED_COMBINE)
    return take_acks(context, state, peer, stream, dispatched, combined)


@compiled
def read_acks(context: int, state: int, progress: int, peer: int, combines: int) -> int:
    """Take in everything that ``peer`` has told: notices, and headers of messages that have arrived and are not read.

    ``combines``: combine messages before this number have a known place (COMBINE_BASE*). Returns STATUS_OK or
    STATUS_PROTOCOL.
    """
    if peer == own_rank(context):
        poke(peer_word(context, state, block.RECV_ACK_DISPATCH, peer), get(state, block.DISPATCH_READ))
        poke(peer_word(context, state, block.RECV_ACK_COMBINE, peer), spaces_free(context, state, progress))
        return STATUS_OK
    window = window_address(context)
    read = peer_word(context, state, block.NOTICES_READ, peer)
    notices = arrived_count(context, peer, NOTICE)
    if notices > peek(read):
        # The newest says all. A newer one may be landing on it: each word is whole, and counts only grow.
        slot = peer * NOTICE_SLOTS + (notices - 1) % NOTICE_SLOTS
        notice = window + get(state, block.NOTICE_RECV) + slot * HEADER_BYTES
        tag = peek(notice + _NOTICE_TAG)
        if tag != _NOTICE_TAG_VALUE:
            return refuse(context, peer, NOTICE, tag, _NOTICE_TAG_VALUE)
        # acquire: a count of a newer notice, whose arrival was not read, allows its space to be written as well
        dispatched, combined = load64(notice + AT_CONSUMED_DISPATCH), load64(notice + AT_CONSUMED_COMBINE)
        status = take_acks(context, state, peer, NOTICE, dispatched, combined)
        if status != STATUS_OK:
            return status
        poke(read, notices)
    first = get(state, block.DISPATCH_READ)
    for number in range(first, get(state, block.DISPATCH_NUMBER) + 1):
        if number == first + 1 and get(state, block.DISPATCH_AHEAD):
            continue
        if has_arrived(context, progress, peer, LL_DISPATCH, number):
            slot = (number & 1) * rank_count(context) + peer
            header = window + get(state, block.DISPATCH_RECV) + slot * get(state, block.DISPATCH_SLOT)
            stream = streams_of(LL_DISPATCH, number)
            status = _listen(context, state, peer, stream, header, _DISPATCH_TAG, number)
            if status != STATUS_OK:
                return status
    first = get(state, block.COMBINE_READ)
    for number in range(first, combines):
        if number == first + 1 and get(state, block.COMBINE_AHEAD):
            continue
        if has_arrived(context, progress, peer, LL_COMBINE, number):
            header = window + get(state, block.COMBINE_RECV) + (number & 1) * get(state, block.COMBINE_RECV_STEP)
            header += peek(peer_word(context, state, block.COMBINE_BASE + (number & 1), peer))
            stream = streams_of(LL_COMBINE, number)
            status = _listen(context, state, peer, stream, header, _COMBINE_TAG, number)
            if status != STATUS_OK:
                return status
    return STATUS_OK


@compiled
def write_acks(context: int, state: int, peer: int, header: int, free: int) -> None:
    """Write both counts into a header (or notice) for ``peer`` and remember having told them."""
    read = get(state, block.DISPATCH_READ)
    # release: in a mapped window the peer may see a count before the flag, and write at once what was read here
    store64(header + AT_CONSUMED_DISPATCH, read)
    store64(header + AT_CONSUMED_COMBINE, free)
    poke(peer_word(context, state, block.SENT_ACK_DISPATCH, peer), read)
    poke(peer_word(context, state, block.SENT_ACK_COMBINE, peer), free)


@compiled
def send_notice(context: int, state: int, progress: int, peer: int, free: int) -> int:
    """Tell ``peer`` both counts now: STATUS_OK, STATUS_PENDING (its notice slot or the ring is busy) or
    STATUS_POISONED."""
    sent = peer_word(context, state, block.NOTICES_SENT, peer)
    number = peek(sent)
    done = completed_count(context, peer, NOTICE)
    # rule: a notice slot is written again only when its last write completed
    if done < number - NOTICE_SLOTS + 1:
        note_progress(progress, peer, NOTICE, done, number - NOTICE_SLOTS + 1)
        return STATUS_PENDING
    slot = number % NOTICE_SLOTS
    source = get(state, block.NOTICE_SEND) + (peer * NOTICE_SLOTS + slot) * HEADER_BYTES
    target = get(state, block.NOTICE_RECV) + (own_rank(context) * NOTICE_SLOTS + slot) * HEADER_BYTES
    notice = message_address(context, peer, source, target)
    poke(notice + _NOTICE_TAG, _NOTICE_TAG_VALUE)
    poke(notice + _NOTICE_NUMBER, number)
    write_acks(context, state, peer, notice, free)
    status = publish(context, peer, NOTICE, source, target, HEADER_BYTES, number + 1)
    if status == STATUS_OK:
        poke(sent, number + 1)
    else:
        # not told after all: the next attempt must come here again
        poke(peer_word(context, state, block.SENT_ACK_DISPATCH, peer), -1)
        poke(peer_word(context, state, block.SENT_ACK_COMBINE, peer), -1)
    return status
