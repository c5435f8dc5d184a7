"""Grants of a row exchange: a receiver says where the next rows of a peer may land, a sender takes that at its word.

Once the word is checked: what a grant names lies in the landing area, and in the order in which grants are given.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import GRANT_SLOTS, HEADER_BYTES, NormalGrant
from ...protocol.streams import NORMAL_GRANT
from .context import (
    own_rank,
    window_address,
)
from .normal_blocks import (
    N_CHUNK_ROWS,
    N_CHUNKS_SENT,
    N_CONSUMED,
    N_GRANT_CHUNK,
    N_GRANT_LEFT,
    N_GRANT_META,
    N_GRANT_ROW,
    N_GRANT_START,
    N_GRANTED,
    N_GRANTS,
    N_GRANTS_SENT,
    N_GRANTS_TAKEN,
    N_META_LANDING,
    N_RECV_ROWS,
    N_ROW_LANDING,
    N_SEND_ROWS,
    N_SENT,
    N_SENT_CHUNKS,
    N_SLOT_ROWS,
    N_SLOT_STRIDE,
    W_CHUNK_BYTES,
    W_GRANT_RECV,
    W_GRANT_SEND,
    W_LANDING_END,
    W_META_BYTES,
    W_NUMBER,
    W_ROUNDS,
    W_ROW_BYTES,
    W_STREAM,
    get_each,
    phase_of,
    set_each,
)
from .normal_wait import (
    arrived_each,
    completed_each,
    first_unfinished,
    message_at,
    send_message,
)
from .wait import refuse
from .words import any_of, int64s, peek, settle

_GRANT = tl.constexpr(NORMAL_GRANT)
_SLOTS, _HEADER = tl.constexpr(GRANT_SLOTS), tl.constexpr(HEADER_BYTES)
_TAG_VALUE = tl.constexpr(NormalGrant.TAG_VALUE)
_AT_NUMBER, _AT_ROUND = tl.constexpr(8 * NormalGrant.NUMBER), tl.constexpr(8 * NormalGrant.ROUND)
_AT_ROWS, _AT_ROW_OFFSET = tl.constexpr(8 * NormalGrant.ROWS), tl.constexpr(8 * NormalGrant.ROW_OFFSET)
_AT_META_OFFSET = tl.constexpr(8 * NormalGrant.META_OFFSET)
_AT_CHUNK_ROWS, _AT_REST = tl.constexpr(8 * NormalGrant.CHUNK_ROWS), tl.constexpr(8 * 7)


@triton.jit
def _due(context: tl.tensor, state: tl.tensor, peers: tl.tensor, live: tl.tensor) -> tl.tensor:
    """(True for ``live`` peers for whose next grant there is room, its number, rows that are left, rows of a grant)."""
    turn, slot_rows = (
        get_each(context, state, N_GRANTED, peers, live),
        get_each(context, state, N_SLOT_ROWS, peers, live),
    )
    first = turn * slot_rows
    left = get_each(context, state, N_RECV_ROWS, peers, live) - first
    consumed = get_each(context, state, N_CONSUMED, peers, live)
    # rule: a landing slot is granted again only when its rows are consumed
    due = live & (left > 0) & ((turn < 2) | (consumed >= first - slot_rows))
    return due, turn, left, slot_rows


@triton.jit
def is_owed(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, live: tl.tensor, BACKEND: tl.constexpr
) -> tl.tensor:
    """True for ``live`` peers to whom a grant is owed because the last write of its slot has not completed."""
    due, _, _, _ = _due(context, state, peers, live)
    given = get_each(context, state, N_GRANTS_SENT, peers, due)
    return due & (completed_each(context, state, peers, due, _GRANT, BACKEND) < given - _SLOTS + 1)


@triton.jit
def give_grants(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    start: tl.tensor,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Give the ``live`` peers their next grant where there is room. True for those to whom one is still owed."""
    due, turn, left, slot_rows = _due(context, state, peers, live)
    given = get_each(context, state, N_GRANTS_SENT, peers, live)
    # the peer has read the grant of four before, since rows of later ones have arrived; its write may still be repeated
    chosen = due & (completed_each(context, state, peers, due, _GRANT, BACKEND) >= given - _SLOTS + 1)
    if any_of(chosen, BACKEND) != 0:
        zero = tl.zeros_like(peers)
        slot = given % _SLOTS
        source = peek(state + W_GRANT_SEND) + (peers * _SLOTS + slot) * _HEADER
        target = peek(state + W_GRANT_RECV) + (own_rank(context) * _SLOTS + slot) * _HEADER
        at = message_at(context, peers, chosen, source, target)
        step = (turn & 1) * get_each(context, state, N_SLOT_STRIDE, peers, chosen)
        tl.store(int64s(at), zero + _TAG_VALUE, mask=chosen)
        tl.store(int64s(at + _AT_NUMBER), zero + peek(state + W_NUMBER), mask=chosen)
        tl.store(int64s(at + _AT_ROUND), turn, mask=chosen)
        tl.store(int64s(at + _AT_ROWS), tl.minimum(left, slot_rows), mask=chosen)
        row_at = get_each(context, state, N_ROW_LANDING, peers, chosen)
        tl.store(int64s(at + _AT_ROW_OFFSET), row_at + step, mask=chosen)
        meta_at = get_each(context, state, N_META_LANDING, peers, chosen)
        tl.store(int64s(at + _AT_META_OFFSET), meta_at + step, mask=chosen)
        tl.store(int64s(at + _AT_CHUNK_ROWS), get_each(context, state, N_CHUNK_ROWS, peers, chosen), mask=chosen)
        tl.store(int64s(at + _AT_REST), zero, mask=chosen)
        nbytes = zero + _HEADER
        if send_message(
            context, state, peers, chosen, _GRANT, source, target, nbytes, given + 1, start, LANES, BACKEND
        ):
            set_each(context, state, N_GRANTS_SENT, peers, chosen, given + 1)
            set_each(context, state, N_GRANTED, peers, chosen, turn + 1)
    return due & (chosen == 0)


@triton.jit
def outside(state: tl.tensor, offset: tl.tensor, nbytes: tl.tensor) -> tl.tensor:
    """True when a claimed range is not in the area that grants may name (offsets are claims: no overflow here)."""
    begin, end = peek(state + W_ROUNDS), peek(state + W_LANDING_END)
    return (offset % 16 != 0) | (offset < begin) | (offset > end) | (nbytes > end - offset)


@triton.jit
def or_else(
    bad: tl.tensor, got: tl.tensor, want: tl.tensor, wrong: tl.tensor, claim: tl.tensor, expected: tl.tensor
) -> tl.tensor:
    """``bad`` claims with what was got and wanted, and where they are right those that are ``wrong``."""
    return bad | wrong, tl.where(bad, got, claim), tl.where(bad, want, expected)


@triton.jit
def take_grants(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, live: tl.tensor, BACKEND: tl.constexpr
) -> tl.tensor:
    """Take the next grant of the ``live`` peers that have given one; 1 when a claim was refused."""
    row, meta, stream = peek(state + W_ROW_BYTES), peek(state + W_META_BYTES), peek(state + W_STREAM)
    left = get_each(context, state, N_SEND_ROWS, peers, live) - get_each(context, state, N_SENT, peers, live)
    wanted = live & (left > 0) & (get_each(context, state, N_GRANT_LEFT, peers, live) == 0)
    taken = get_each(context, state, N_GRANTS_TAKEN, peers, wanted)
    here = wanted & (arrived_each(context, state, peers, wanted, _GRANT, BACKEND) > taken)
    broken = tl.full((), 0, tl.int32)
    if any_of(here, BACKEND) != 0:
        # It names the landing slot of the grant before the last one, whose rows the receiver has read: a NIC must not
        # repeat their writes any more.
        sent = get_each(context, state, N_SENT_CHUNKS, peers, here)
        life = get_each(context, state, N_CHUNKS_SENT + phase_of(state), peers, here)
        chunks = life - sent + get_each(context, state, N_GRANT_START, peers, here)
        chunks = tl.where(get_each(context, state, N_GRANTS, peers, here) == 0, 0, chunks)
        here = here & (first_unfinished(context, state, peers, here, stream, chunks, BACKEND) < 0)
        settle(BACKEND)
        slot = peek(state + W_GRANT_RECV) + (tl.where(here, peers * _SLOTS + taken % _SLOTS, 0)) * _HEADER
        at = window_address(context) + slot
        tag = tl.load(int64s(at), mask=here, other=0)
        number = tl.load(int64s(at + _AT_NUMBER), mask=here, other=0)
        turn = tl.load(int64s(at + _AT_ROUND), mask=here, other=0)
        rows = tl.load(int64s(at + _AT_ROWS), mask=here, other=0)
        row_at = tl.load(int64s(at + _AT_ROW_OFFSET), mask=here, other=0)
        meta_at = tl.load(int64s(at + _AT_META_OFFSET), mask=here, other=0)
        chunk = tl.load(int64s(at + _AT_CHUNK_ROWS), mask=here, other=0)
        grants = get_each(context, state, N_GRANTS, peers, here)
        most = peek(state + W_CHUNK_BYTES) // (row + meta)
        begin = peek(state + W_ROUNDS)
        expected = peek(state + W_NUMBER)
        # the first claim that is wrong is refused, in one place: every copy of the code costs a second to compile
        bad, got, want = tag != _TAG_VALUE, tag, tl.zeros_like(tag) + _TAG_VALUE
        bad, got, want = or_else(bad, got, want, number != expected, number, expected)
        bad, got, want = or_else(bad, got, want, turn != grants, turn, grants)
        bad, got, want = or_else(bad, got, want, (rows < 1) | (rows > left), rows, left)
        bad, got, want = or_else(bad, got, want, (chunk < 1) | (chunk > most), chunk, most)
        bad, got, want = or_else(bad, got, want, outside(state, row_at, rows * row), row_at, begin)
        elsewhere = (meta != 0) & outside(state, meta_at, rows * meta)
        bad, got, want = or_else(bad, got, want, elsewhere, meta_at, begin)
        broken = refuse(context, state, peers, here & bad, _GRANT, got, want, BACKEND)
        if broken == 0:
            set_each(context, state, N_GRANTS_TAKEN, peers, here, taken + 1)
            set_each(context, state, N_GRANTS, peers, here, grants + 1)
            set_each(context, state, N_GRANT_LEFT, peers, here, rows)
            set_each(context, state, N_GRANT_ROW, peers, here, row_at)
            set_each(context, state, N_GRANT_META, peers, here, meta_at)
            set_each(context, state, N_GRANT_CHUNK, peers, here, chunk)
            set_each(context, state, N_GRANT_START, peers, here, sent)
    return broken
