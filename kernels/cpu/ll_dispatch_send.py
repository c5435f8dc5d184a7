"""Low-latency dispatch, sending side: one message per destination rank, packed and published as each becomes
possible."""

from __future__ import annotations

from ...native.atomics import copy, peek, peek32, poke, poke32
from ...native.jit import compiled
from ...protocol.context import STATUS_OK, STATUS_PENDING
from ...protocol.message import FORM_REDUCED, HEADER_BYTES, LowLatencyHeader
from ...protocol.streams import LL_DISPATCH, NOTICE
from ..blocks.low_latency import (
    COMBINE_NUMBER,
    COUNTS,
    DIGEST,
    DISPATCH_NUMBER,
    DISPATCH_PACKED,
    DISPATCH_POSTED,
    DISPATCH_RECV,
    DISPATCH_SEND,
    DISPATCH_SEND_STEP,
    DISPATCH_SLOT,
    EXPERTS,
    FORM,
    META,
    NUMBER,
    ORDER,
    PAIRS,
    RETURN_BASE,
    ROW,
    SEEN_DISPATCH,
    SEND_BASE,
    STARTS,
    TOLD_DISPATCH,
    TOPK,
)
from .context import (
    channel_count,
    is_masked,
    own_rank,
    peer_window,
    rank_count,
    window_address,
)
from .ll_counts import hear, send_notice, spaces_free, tell
from .ll_message import (
    AT_CODING,
    AT_NUMBER,
    AT_PLAN,
    AT_RETURN_OFFSET,
    AT_ROWS,
    AT_TAG,
    has_completed,
    peer_word,
    post_message,
    route_word,
    streams_of,
)
from .wait import note_progress, turn_over

__all__ = ["MESSAGE_ALIGNMENT", "dispatch_send"]

#: Messages packed one after the other start on cache lines. A header of 64 bytes and the round-up (rows are multiples
#: of 16) stay within the 128 bytes per rank that the layout reserves.
MESSAGE_ALIGNMENT = 64

_DISPATCH_TAG = LowLatencyHeader.DISPATCH_TAG
_WEIGHTED = LowLatencyHeader.WEIGHTED


@compiled
def _place_messages(context: int, state: int, route: int, row_bytes: int) -> None:
    """Prefix sums over destinations: where messages are packed here, and where their answers will come back to."""
    send, back = 0, 0
    per_token = peek(state + 8 * META) + row_bytes
    widest = peek(state + 8 * ROW)
    rows_table = COUNTS if peek(route + 8 * FORM) == FORM_REDUCED else PAIRS
    for rank in range(rank_count(context)):
        poke(route_word(context, route, SEND_BASE, rank), send)
        poke(route_word(context, route, RETURN_BASE, rank), back)
        nbytes = HEADER_BYTES + peek(route_word(context, route, COUNTS, rank)) * per_token
        send += (nbytes + MESSAGE_ALIGNMENT - 1) // MESSAGE_ALIGNMENT * MESSAGE_ALIGNMENT
        # the experts' output may have another dtype than the tokens: space for the widest that was planned
        nbytes = HEADER_BYTES + peek(route_word(context, route, rows_table, rank)) * widest
        back += (nbytes + MESSAGE_ALIGNMENT - 1) // MESSAGE_ALIGNMENT * MESSAGE_ALIGNMENT


@compiled
def _pack(
    context: int,
    state: int,
    route: int,
    peer: int,
    message: int,
    rows: int,
    stride: int,
    payload: int,
    row_bytes: int,
    topk_idx: int,
    weights: int,
    coding: int,
) -> None:
    """Metas and rows for ``peer`` at address ``message``, and the header except for its number and counts."""
    topk, meta_size = peek(state + 8 * TOPK), peek(state + 8 * META)
    local_experts = peek(state + 8 * EXPERTS) // rank_count(context)
    lowest = peer * local_experts
    tokens = peek(route_word(context, route, COUNTS, peer))
    order = peek(route + 8 * ORDER) + 4 * peek(route_word(context, route, STARTS, peer))
    poke(message + AT_TAG, _DISPATCH_TAG)
    poke(message + AT_ROWS, tokens)
    poke(message + AT_CODING, coding | (_WEIGHTED if peek(route + 8 * FORM) == FORM_REDUCED else 0))
    poke(message + AT_PLAN, peek(state + 8 * DIGEST))
    poke(message + AT_RETURN_OFFSET, peek(route_word(context, route, RETURN_BASE, peer)))
    meta = message + HEADER_BYTES
    row = meta + tokens * meta_size
    for index in range(tokens):
        token = peek32(order + 4 * index)
        poke32(meta, token)
        for slot in range(topk):
            expert = peek(topk_idx + 8 * (token * topk + slot))
            here = lowest <= expert < lowest + local_experts
            poke32(meta + 4 + 4 * slot, expert if here else -1)
        if weights != 0:
            copy(meta + 4 + 4 * topk, weights + 4 * token * topk, 4 * topk)
        copy(row, rows + token * stride, payload)
        meta += meta_size
        row += row_bytes


@compiled
def _staging_is_free(context: int, progress: int, number: int) -> bool:
    """True when no proxied message that was packed in this parity's staging can be read again by a NIC."""
    for peer in range(rank_count(context)):
        if not is_masked(context, peer) and not has_completed(context, progress, peer, LL_DISPATCH, number - 2):
            return False
    return True


@compiled
def dispatch_send(
    context: int,
    state: int,
    route: int,
    progress: int,
    rows: int,
    stride: int,
    payload: int,
    row_bytes: int,
    topk_idx: int,
    weights: int,
    coding: int,
    slice_end_ns: int,
) -> int:
    """Send the next dispatch message to every rank. The route block has been filled by ``routing.route``.

    Args:
        rows: row of token t at ``rows + t * stride``, ``payload`` bytes that go out as rows of ``row_bytes`` bytes.
        topk_idx: int64[tokens, K], global expert ids.
        weights: float32[tokens, K], or 0 when the router weights are given at combine only.
        coding: DTYPE_* of the rows.

    Returns:
        STATUS_OK; STATUS_PENDING (progress block filled; call again, nothing is sent twice); STATUS_POISONED;
        STATUS_PROTOCOL.
    """
    ranks, me, channels = rank_count(context), own_rank(context), channel_count(context)
    number = peek(state + 8 * DISPATCH_NUMBER)
    parity = number & 1
    poke(route + 8 * NUMBER, number)
    _place_messages(context, state, route, row_bytes)
    staging = peek(state + 8 * DISPATCH_SEND) + parity * peek(state + 8 * DISPATCH_SEND_STEP)
    target = peek(state + 8 * DISPATCH_RECV) + (parity * ranks + me) * peek(state + 8 * DISPATCH_SLOT)
    per_token = peek(state + 8 * META) + row_bytes
    free = spaces_free(context, state, progress)
    turn = 0
    while True:
        missing = 0
        # rule: dispatch staging is packed again only when its last writes completed
        staging_free = _staging_is_free(context, progress, number)
        # Everyone starts with its right neighbour, so that not all ranks write to the same one at first.
        for step in range(1, ranks + 1):
            peer = (me + step) % ranks
            if is_masked(context, peer):
                continue
            packed = peer_word(context, state, DISPATCH_PACKED, peer)
            posted = peer_word(context, state, DISPATCH_POSTED, peer)
            mapped = peer_window(context, peer)
            source = staging + peek(route_word(context, route, SEND_BASE, peer))
            if peek(packed) != number + 1:
                seen = peer_word(context, state, SEEN_DISPATCH, peer)
                if peek(seen) < number - 1:
                    status = hear(context, state, progress, peer, peek(state + 8 * COMBINE_NUMBER))
                    if status != STATUS_OK:
                        return status
                # rule: a dispatch slot is written again only when the peer has read it
                if peek(seen) < number - 1 or (mapped == 0 and not staging_free):
                    missing += 1
                    if peek(peer_word(context, state, TOLD_DISPATCH, peer)) < number - 1 and peer != me:
                        status = send_notice(context, state, progress, peer, free)
                        if status != STATUS_OK and status != STATUS_PENDING:
                            return status
                    if peek(seen) < number - 1:
                        note_progress(progress, peer, NOTICE, peek(seen), number - 1)
                    else:
                        # again, for the progress block
                        staging_free = _staging_is_free(context, progress, number)
                    continue
                message = mapped + target if mapped != 0 else window_address(context) + source
                _pack(
                    context,
                    state,
                    route,
                    peer,
                    message,
                    rows,
                    stride,
                    payload,
                    row_bytes,
                    topk_idx,
                    weights,
                    coding,
                )
                poke(message + AT_NUMBER, number)
                tell(context, state, peer, message, free)
                poke(packed, number + 1)
                poke(posted, number * channels)
            elif peek(posted) == (number + 1) * channels:
                continue
            nbytes = HEADER_BYTES + peek(route_word(context, route, COUNTS, peer)) * per_token
            status = post_message(context, peer, LL_DISPATCH, number, posted, source, target, nbytes)
            if status == STATUS_PENDING:
                missing += 1
                note_progress(progress, peer, streams_of(LL_DISPATCH, number), number // 2, number // 2 + 1)
            elif status != STATUS_OK:
                return status
        if missing == 0:
            # rule: the send kernel counts its message
            poke(state + 8 * DISPATCH_NUMBER, number + 1)
            return STATUS_OK
        status = turn_over(context, turn, slice_end_ns)
        if status != STATUS_OK:
            return status
        turn += 1
