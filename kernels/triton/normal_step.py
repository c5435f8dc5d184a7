"""The steps of a row exchange: grants, publishing, and what is packed and unpacked next.

A step is :func:`advance` in one program of one warp, then ``normal_rows.move_rows`` in many. In step k every rank

* publishes the batch that it packed in step k - 1, and notes what it has unpacked since;
* gives every grant for which there is room, and takes those of its peers;
* waits until it has a grant for its next batch to each peer, and until batch k - 1 of each peer has arrived.

A batch is the rest of a grant to a mapped peer, and half of the staging's chunks to a proxied one; mapped or not looks
the same from both ends, so a receiver knows how long a batch is at least. Nobody waits for more than what peers publish
when they *begin* the same step, so that no two ranks wait for each other: the grant for batch k needs the rows of two
grants before, whose batches are at most number k - 2, and these were unpacked in step k - 1. Ranks that run
``kernels/cpu`` send and grant as soon as they can, which is never later.

A receiver says in a grant where the next rows of a peer may land, and a sender takes that at its word, once the word is
checked: what a grant names lies in the landing area, and in the order in which grants are given.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import GRANT_SLOTS, HEADER_BYTES, NormalGrant
from ...protocol.streams import NORMAL_COMBINE, NORMAL_GRANT
from .blocks import (
    N_ARRIVED,
    N_CHUNK_ROWS,
    N_CHUNKS_SENT,
    N_CHUNKS_TAKEN,
    N_CONSUMED,
    N_EXPECTED,
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
    N_PACK_ROWS,
    N_READY,
    N_RECV_ROWS,
    N_ROW_LANDING,
    N_SEND_ROWS,
    N_SENT,
    N_SENT_CHUNKS,
    N_SLOT_ROWS,
    N_SLOT_STRIDE,
    S_SINK,
    W_BAD_PEER,
    W_CHUNK_BYTES,
    W_DEPTH,
    W_GRANT_RECV,
    W_GRANT_SEND,
    W_IN_HEAP,
    W_LANDING_END,
    W_META_BYTES,
    W_NUMBER,
    W_OPEN,
    W_ROUNDS,
    W_ROW_BYTES,
    W_STAGING,
    W_STEP,
    W_STREAM,
    get_each,
    phase_of,
    set_each,
)
from .context import (
    arrived_address,
    channel_count,
    completed_address,
    has_failed,
    is_live,
    landing_window,
    own_rank,
    peer_window,
    rank_count,
    sticky_code,
    window_address,
)
from .kernel import kernel
from .publish import put_writes, store_flags, wait_room
from .wait import FAILURE_PEER_TIMEOUT, FAILURE_PROTOCOL, GO_ON, TOO_LATE, end_spin, fail, fail_at, refuse
from .words import acquire_each, any_of, clock_ns, int64s, peek, poke, settle, uniform

_MANY = tl.constexpr(1 << 60)


@triton.jit
def released(context: tl.tensor, state: tl.tensor, BACKEND: tl.constexpr) -> tl.tensor:
    """1 when a proxy or the host has set the sticky error: the verdict is then set, and nothing may be published."""
    over = (sticky_code(context, BACKEND) != 0).to(tl.int32)
    if over != 0:
        fail(context, state, 0, -1, -1, 0, 0, BACKEND)
    return over


@triton.jit
def arrived_each(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, live: tl.tensor, stream: tl.tensor, BACKEND: tl.constexpr
) -> tl.tensor:
    """Messages of ``stream`` that have arrived from each of the ``live`` peers."""
    address = arrived_address(context, tl.where(live, peers, 0), stream)
    return tl.where(live, acquire_each(tl.where(live, address, state + S_SINK), BACKEND), _MANY)


@triton.jit
def completed_each(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, live: tl.tensor, stream: tl.tensor, BACKEND: tl.constexpr
) -> tl.tensor:
    """Own messages of ``stream`` that completed locally; mapped peers count as complete."""
    inside = tl.where(live, peers, 0)
    proxied = live & (peer_window(context, inside) == 0)
    address = tl.where(proxied, completed_address(context, inside, stream), state + S_SINK)
    return tl.where(proxied, acquire_each(address, BACKEND), _MANY)


@triton.jit
def share_of(chunks: tl.tensor, channel: tl.tensor, channels: tl.tensor) -> tl.tensor:
    """How many of the first ``chunks`` chunks travel on ``channel``."""
    return tl.where(chunks > channel, (chunks - channel + channels - 1) // channels, 0)


@triton.jit
def chunks_arrived(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, live: tl.tensor, stream: tl.tensor, BACKEND: tl.constexpr
) -> tl.tensor:
    """Chunks that have arrived in order over the Buffer's life: the first missing one of each channel, the least."""
    channels = channel_count(context)
    least = tl.full(peers.shape, _MANY, tl.int64)
    for channel in range(channels):
        count = arrived_each(context, state, peers, live, stream + channel, BACKEND)
        least = tl.minimum(least, tl.where(live, count * channels + channel, _MANY))
    return least


@triton.jit
def first_unfinished(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    stream: tl.tensor,
    chunks: tl.tensor,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Lowest channel on which one of the peer's first ``chunks`` chunks has not completed locally, -1 when all have."""
    channels = channel_count(context)
    found = tl.full(peers.shape, -1, tl.int64)
    for channel in range(channels):
        count = completed_each(context, state, peers, live, stream + channel, BACKEND)
        open_here = live & (count < share_of(chunks, channel, channels))
        found = tl.where(open_here & (found < 0), channel, found)
    return found


@triton.jit
def wait_counts(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    stream: tl.tensor,
    needed: tl.tensor,
    start: tl.tensor,
    ARRIVAL: tl.constexpr,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Wait until ``needed`` messages of ``stream`` of every ``live`` peer have arrived (``ARRIVAL``) or completed.

    ``needed``: a tensor like ``peers``. Returns True; False after :func:`.wait.fail`.
    """
    ending, checked = tl.full((), 0, tl.int32), start
    present = tl.full((), 0, tl.int32)
    # only scalars live from spin to spin: the layout passes of Triton 3.6 and 3.8 fail on tensors
    while (present == 0) & (ending == GO_ON):
        if ARRIVAL:
            count = arrived_each(context, state, peers, live, stream, BACKEND)
        else:
            count = completed_each(context, state, peers, live, stream, BACKEND)
        # rule: normal mode: an operation opens only when every peer's notify has arrived
        here = count >= needed
        present = tl.min(here.to(tl.int32), axis=0)
        if present == 0:
            ending, checked = end_spin(context, start, checked, BACKEND)
    # the lanes acquired for themselves: now for each other
    settle(BACKEND)
    if ending != GO_ON:
        if ARRIVAL:
            late = arrived_each(context, state, peers, live, stream, BACKEND)
        else:
            late = completed_each(context, state, peers, live, stream, BACKEND)
        # whoever has come since the last check is not to blame, unless everybody has
        missing = live & (late < needed)
        code = tl.where(ending == TOO_LATE, FAILURE_PEER_TIMEOUT, 0)
        if any_of(missing) == 0:
            missing = live
        fail_at(context, state, code, peers, missing, stream, late, needed, BACKEND)
    return ending == GO_ON


@triton.jit
def message_at(
    context: tl.tensor, peers: tl.tensor, chosen: tl.tensor, source: tl.tensor, target: tl.tensor
) -> tl.tensor:
    """Where the bytes of a control message are written: at ``target`` in a mapped peer's window, else at ``source``."""
    mapped = peer_window(context, tl.where(chosen, peers, 0))
    return tl.where(mapped != 0, mapped + target, window_address(context) + source)


@triton.jit
def send_message(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    chosen: tl.tensor,
    stream: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    nbytes: tl.tensor,
    count: tl.tensor,
    start: tl.tensor,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Publish a message of one write, whose bytes stand at :func:`message_at`, to the ``chosen`` peers.

    ``source``, ``target``, ``nbytes`` and ``count`` (messages of the stream with this one) are tensors like ``peers``.
    Returns True; False after a failure.
    """
    going = wait_room(context, state, stream, LANES, start, BACKEND)
    settle(BACKEND)
    if going:
        mapped = chosen & (peer_window(context, tl.where(chosen, peers, 0)) != 0)
        store_flags(context, state, peers, mapped, stream, count, BACKEND)
        proxied = chosen & (mapped == 0)
        last = tl.full((), 1, tl.int64)
        put_writes(context, state, peers, proxied, stream, source, target, nbytes, last, BACKEND)
    return going


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
    grant, slot_rows = (
        get_each(context, state, N_GRANTED, peers, live),
        get_each(context, state, N_SLOT_ROWS, peers, live),
    )
    first = grant * slot_rows
    left = get_each(context, state, N_RECV_ROWS, peers, live) - first
    consumed = get_each(context, state, N_CONSUMED, peers, live)
    # rule: a landing slot is granted again only when its rows are consumed
    due = live & (left > 0) & ((grant < 2) | (consumed >= first - slot_rows))
    return due, grant, left, slot_rows


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
    due, grant, left, slot_rows = _due(context, state, peers, live)
    given = get_each(context, state, N_GRANTS_SENT, peers, live)
    # the peer has read the grant of four before, since rows of later ones have arrived; its write may still be repeated
    chosen = due & (completed_each(context, state, peers, due, _GRANT, BACKEND) >= given - _SLOTS + 1)
    if any_of(chosen) != 0:
        zero = tl.zeros_like(peers)
        slot = given % _SLOTS
        source = peek(state + W_GRANT_SEND) + (peers * _SLOTS + slot) * _HEADER
        target = peek(state + W_GRANT_RECV) + (own_rank(context) * _SLOTS + slot) * _HEADER
        at = message_at(context, peers, chosen, source, target)
        step = (grant & 1) * get_each(context, state, N_SLOT_STRIDE, peers, chosen)
        tl.store(int64s(at), zero + _TAG_VALUE, mask=chosen)
        tl.store(int64s(at + _AT_NUMBER), zero + peek(state + W_NUMBER), mask=chosen)
        tl.store(int64s(at + _AT_ROUND), grant, mask=chosen)
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
            set_each(context, state, N_GRANTED, peers, chosen, grant + 1)
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
    if any_of(here) != 0:
        # It names the landing slot of the grant before the last one, whose rows the receiver has read: a NIC must not
        # repeat their writes any more.
        sent = get_each(context, state, N_SENT_CHUNKS, peers, here)
        life = get_each(context, state, N_CHUNKS_SENT + phase_of(state), peers, here)
        chunks = life - sent + get_each(context, state, N_GRANT_START, peers, here)
        chunks = tl.where(get_each(context, state, N_GRANTS, peers, here) == 0, 0, chunks)
        here = here & (first_unfinished(context, state, peers, here, stream, chunks, BACKEND) < 0)
        settle(BACKEND)
        slot = peek(state + W_GRANT_RECV) + (tl.where(here, peers * _SLOTS + taken % _SLOTS, 0)) * _HEADER
        at = landing_window(context, tl.where(here, peers, 0)) + slot
        tag = tl.load(int64s(at), mask=here, other=0)
        number = tl.load(int64s(at + _AT_NUMBER), mask=here, other=0)
        round_number = tl.load(int64s(at + _AT_ROUND), mask=here, other=0)
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
        bad, got, want = or_else(bad, got, want, round_number != grants, round_number, grants)
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


_COMBINE = tl.constexpr(NORMAL_COMBINE)
#: What a check of some peers finds: somebody is missing, all is there, the kernel has failed.
MISSING, THERE, FAILED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def batch_chunks(state: tl.tensor) -> tl.tensor:
    """Chunks of a batch for a proxied peer: half of the staging is packed while the other half is on its way."""
    return tl.maximum(peek(state + W_DEPTH) // 2, 1)


@triton.jit
def publish_batch(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    start: tl.tensor,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Publish what the step before has packed for the ``live`` peers, and move every position past it."""
    row, meta, stream = peek(state + W_ROW_BYTES), peek(state + W_META_BYTES), peek(state + W_STREAM)
    channels, phase, depth = channel_count(context), phase_of(state), peek(state + W_DEPTH)
    rows = get_each(context, state, N_PACK_ROWS, peers, live)
    packed = rows > 0
    chunk = tl.maximum(get_each(context, state, N_GRANT_CHUNK, peers, packed), 1)
    chunks = (rows + chunk - 1) // chunk
    number = get_each(context, state, N_CHUNKS_SENT + phase, peers, packed)
    row_at = get_each(context, state, N_GRANT_ROW, peers, packed)
    meta_at = get_each(context, state, N_GRANT_META, peers, packed)
    before = get_each(context, state, N_SENT_CHUNKS, peers, packed)
    mapped = packed & (peer_window(context, tl.where(packed, peers, 0)) != 0)
    for channel in range(channels):
        # counts only grow: one flag stands for all chunks of the channel
        count = share_of(number + chunks, channel, channels)
        store_flags(context, state, peers, mapped & (count > 0), stream + channel, count, BACKEND)
    proxied = packed & (mapped == 0)
    last, parts = tl.full((), 1, tl.int64), 1 + (meta != 0).to(tl.int32)
    staging, chunk_bytes = peek(state + W_STAGING), peek(state + W_CHUNK_BYTES)
    for index in range(batch_chunks(state)):
        there = proxied & (index < chunks)
        rows_here = tl.minimum(chunk, rows - index * chunk)
        slot = staging + (peers * depth + (before + index) % depth) * chunk_bytes
        for channel in range(channels):
            chosen = there & ((number + index) % channels == channel)
            if any_of(chosen) != 0:
                if wait_room(context, state, stream + channel, 2 * LANES, start, BACKEND):
                    settle(BACKEND)
                    # rows, then their meta
                    for part in range(parts):
                        each = tl.where(part == 0, row, meta)
                        put_writes(
                            context,
                            state,
                            peers,
                            chosen,
                            stream + channel,
                            slot + rows_here * (row * part),
                            tl.where(part == 0, row_at, meta_at) + index * chunk * each,
                            rows_here * each,
                            tl.where(part == parts - 1, last, 0),
                            BACKEND,
                        )
    set_each(context, state, N_CHUNKS_SENT + phase, peers, packed, number + chunks)
    set_each(context, state, N_SENT_CHUNKS, peers, packed, before + chunks)
    set_each(context, state, N_GRANT_ROW, peers, packed, row_at + rows * row)
    set_each(context, state, N_GRANT_META, peers, packed, meta_at + rows * meta)
    left = get_each(context, state, N_GRANT_LEFT, peers, packed)
    set_each(context, state, N_GRANT_LEFT, peers, packed, left - rows)
    sent = get_each(context, state, N_SENT, peers, packed)
    set_each(context, state, N_SENT, peers, packed, sent + rows)
    set_each(context, state, N_PACK_ROWS, peers, packed, tl.zeros_like(rows))


@triton.jit
def _expect(context: tl.tensor, state: tl.tensor, peers: tl.tensor, live: tl.tensor) -> None:
    """Rows of the peers that the batch before must bring."""
    total = get_each(context, state, N_RECV_ROWS, peers, live)
    expected = get_each(context, state, N_EXPECTED, peers, live)
    slot_rows = tl.maximum(get_each(context, state, N_SLOT_ROWS, peers, live), 1)
    chunk = get_each(context, state, N_CHUNK_ROWS, peers, live)
    end = tl.minimum((expected // slot_rows + 1) * slot_rows, total)
    mapped = peer_window(context, tl.where(live, peers, 0)) != 0
    batch = tl.where(mapped, end, tl.minimum(expected + batch_chunks(state) * chunk, end))
    set_each(context, state, N_EXPECTED, peers, live, batch)


@triton.jit
def choose_rows(context: tl.tensor, state: tl.tensor, peers: tl.tensor, live: tl.tensor, BACKEND: tl.constexpr) -> None:
    """Decide what to pack for the ``live`` peers that have a grant and whose staging is free."""
    stream, depth = peek(state + W_STREAM), peek(state + W_DEPTH)
    left = get_each(context, state, N_GRANT_LEFT, peers, live)
    wanted = live & (left > 0) & (get_each(context, state, N_PACK_ROWS, peers, live) == 0)
    if any_of(wanted) != 0:
        mapped = wanted & (peer_window(context, tl.where(wanted, peers, 0)) != 0)
        proxied = wanted & (mapped == 0)
        chunk = get_each(context, state, N_GRANT_CHUNK, peers, wanted)
        rows = tl.where(mapped, left, tl.minimum(left, batch_chunks(state) * chunk))
        chunks = (rows + chunk - 1) // tl.maximum(chunk, 1)
        # the writes from the slots that are used again are over
        number = get_each(context, state, N_CHUNKS_SENT + phase_of(state), peers, proxied)
        over = tl.maximum(number + chunks - depth, 0)
        busy = first_unfinished(context, state, peers, proxied, stream, over, BACKEND) >= 0
        set_each(context, state, N_PACK_ROWS, peers, mapped | (proxied & (busy == 0)), rows)


@triton.jit
def note_arrivals(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, live: tl.tensor, BACKEND: tl.constexpr
) -> None:
    """Move ARRIVED of the ``live`` peers past every chunk that has arrived in order."""
    chunk = get_each(context, state, N_CHUNK_ROWS, peers, live)
    granted = get_each(context, state, N_GRANTED, peers, live) * get_each(context, state, N_SLOT_ROWS, peers, live)
    limit = tl.minimum(get_each(context, state, N_RECV_ROWS, peers, live), granted)
    wanted = live & (get_each(context, state, N_ARRIVED, peers, live) < limit)
    taken = get_each(context, state, N_CHUNKS_TAKEN + phase_of(state), peers, wanted)
    come = chunks_arrived(context, state, peers, wanted, peek(state + W_STREAM), BACKEND) - taken
    set_each(context, state, N_ARRIVED, peers, wanted, tl.minimum(tl.where(wanted, come, 0) * chunk, limit))


@triton.jit
def _check_peers(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    start: tl.tensor,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Do for the ``live`` peers what can be done now: MISSING, THERE or FAILED."""
    settle(BACKEND)
    owed = any_of(give_grants(context, state, peers, live, start, LANES, BACKEND))
    settle(BACKEND)
    found = tl.full((), FAILED, tl.int32)
    if take_grants(context, state, peers, live, BACKEND) == 0:
        settle(BACKEND)
        choose_rows(context, state, peers, live, BACKEND)
        note_arrivals(context, state, peers, live, BACKEND)
        settle(BACKEND)
        late = live & is_late(context, state, peers, live)
        stuck = live & is_stuck(context, state, peers, live)
        missing = owed | any_of(late | stuck)
        found = tl.where(missing != 0, MISSING, THERE)
        if uniform(has_failed(context).to(tl.int32), BACKEND) != 0:
            found = tl.full((), FAILED, tl.int32)
    return found


@triton.jit
def is_late(context: tl.tensor, state: tl.tensor, peers: tl.tensor, live: tl.tensor) -> tl.tensor:
    """True for peers whose batch has not arrived."""
    arrived = get_each(context, state, N_ARRIVED, peers, live)
    return arrived < get_each(context, state, N_EXPECTED, peers, live)


@triton.jit
def is_stuck(context: tl.tensor, state: tl.tensor, peers: tl.tensor, live: tl.tensor) -> tl.tensor:
    """True for peers to which the next batch cannot be packed yet."""
    left = get_each(context, state, N_SEND_ROWS, peers, live) - get_each(context, state, N_SENT, peers, live)
    return (left > 0) & (get_each(context, state, N_PACK_ROWS, peers, live) == 0)


@triton.jit
def blame_peer(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    code: tl.tensor,
    BACKEND: tl.constexpr,
) -> None:
    """Fail with a peer that is missing, and what of it: its rows, its grant, or the completion of own writes.

    Somebody, even when nobody is missing any more.
    """
    channels, stream, phase = channel_count(context), peek(state + W_STREAM), phase_of(state)
    late = live & is_late(context, state, peers, live)
    stuck = live & is_stuck(context, state, peers, live)
    ungranted = stuck & (get_each(context, state, N_GRANT_LEFT, peers, stuck) == 0)
    # the completion of a grant, unless something else is missing; in one place, as in take_grants
    owed = is_owed(context, state, peers, live, BACKEND)
    # rule: who keeps a grant waiting is named
    bad = tl.where(any_of(owed) != 0, owed, live)
    on = tl.zeros_like(peers) + _GRANT
    want = get_each(context, state, N_GRANTS_SENT, peers, live)
    # of a mapped peer nothing completes, nor is anything missing
    got = tl.minimum(completed_each(context, state, peers, live, _GRANT, BACKEND), want)
    if any_of(stuck) != 0:
        chunks = get_each(context, state, N_CHUNKS_SENT + phase, peers, stuck)
        channel = tl.maximum(first_unfinished(context, state, peers, stuck, stream, chunks, BACKEND), 0)
        bad, on = stuck, stream + channel
        got = completed_each(context, state, peers, stuck, stream + channel, BACKEND)
        want = share_of(chunks, channel, channels)
    if any_of(ungranted) != 0:
        bad, on = ungranted, tl.zeros_like(peers) + _GRANT
        got = arrived_each(context, state, peers, ungranted, _GRANT, BACKEND)
        want = get_each(context, state, N_GRANTS_TAKEN, peers, ungranted) + 1
    if any_of(late) != 0:
        come = chunks_arrived(context, state, peers, late, stream, BACKEND)
        bad, on = late, stream + tl.where(late, come % channels, 0)
        got = tl.where(late, come // channels, 0)
        want = got + 1
    fail_at(context, state, code, peers, bad, on, got, want, BACKEND)


@triton.jit
def run_step(context: tl.tensor, state: tl.tensor, LANES: tl.constexpr, BACKEND: tl.constexpr) -> tl.tensor:
    """A step as far as one program does it. 1 when rows are to be moved, 0 when the exchange is over or has failed."""
    ranks, me = rank_count(context), own_rank(context)
    start = clock_ns(BACKEND)
    before = peek(state + W_STEP)
    going = tl.full((), 0, tl.int32)
    if released(context, state, BACKEND) == 0:
        bad = peek(state + W_BAD_PEER)
        if bad != 0:
            fail(context, state, FAILURE_PROTOCOL, bad - 1, peek(state + W_STREAM), 0, 0, BACKEND)
        for first in range(0, ranks, LANES):
            peers = first + tl.arange(0, LANES).to(tl.int64)
            live = is_live(context, peers) & (peers != me)
            if before > 0:
                publish_batch(context, state, peers, live, start, LANES, BACKEND)
                mine = peers == me
                set_each(context, state, N_PACK_ROWS, peers, mine, tl.zeros_like(peers))
                set_each(context, state, N_CONSUMED, peers, live, get_each(context, state, N_READY, peers, live))
                _expect(context, state, peers, live)
        settle(BACKEND)
        found = tl.full((), MISSING, tl.int32)
        ending, checked = tl.full((), 0, tl.int32), start
        if uniform(has_failed(context).to(tl.int32), BACKEND) != 0:
            found = tl.full((), FAILED, tl.int32)
        while (found == MISSING) & (ending == GO_ON):
            found = tl.full((), THERE, tl.int32)
            for first in range(0, ranks, LANES):
                peers = first + tl.arange(0, LANES).to(tl.int64)
                live = is_live(context, peers) & (peers != me)
                if found != FAILED:
                    one = _check_peers(context, state, peers, live, start, LANES, BACKEND)
                    found = tl.where(one == FAILED, one, tl.minimum(found, one))
            if found == MISSING:
                ending, checked = end_spin(context, start, checked, BACKEND)
        if ending != GO_ON:
            code = tl.where(ending == TOO_LATE, FAILURE_PEER_TIMEOUT, 0)
            for step in range(0, ranks, LANES):
                first = (ranks - 1) // LANES * LANES - step
                peers = first + tl.arange(0, LANES).to(tl.int64)
                live = is_live(context, peers) & (peers != me)
                late = is_late(context, state, peers, live) | is_stuck(context, state, peers, live)
                late = late | is_owed(context, state, peers, live, BACKEND)
                # the last check fails when no other has: what was missing has come meanwhile
                if (any_of(live & late) != 0) | (first == 0):
                    blame_peer(context, state, peers, live, code, BACKEND)
        if found == THERE:
            poke(state + W_STEP, before + 1)
            for first in range(0, ranks, LANES):
                peers = first + tl.arange(0, LANES).to(tl.int64)
                live = is_live(context, peers) & (peers != me)
                arrived = get_each(context, state, N_ARRIVED, peers, live)
                set_each(context, state, N_READY, peers, live, arrived)
                if (peek(state + W_IN_HEAP) != 0) & (phase_of(state) == 1):
                    # the rows of a combine stay in the heap until they are summed
                    set_each(context, state, N_CONSUMED, peers, live, arrived)
                total = get_each(context, state, N_RECV_ROWS, peers, live)
                consumed = get_each(context, state, N_CONSUMED, peers, live)
                left = get_each(context, state, N_SEND_ROWS, peers, live) - get_each(
                    context, state, N_SENT, peers, live
                )
                own = (peers == me) & (get_each(context, state, N_PACK_ROWS, peers, peers == me) > 0)
                going |= any_of((live & ((left > 0) | (consumed < total))) | own)
        settle(BACKEND)
    return going


@kernel()
def advance(context: tl.int64, state: tl.int64, LANES: tl.constexpr, BACKEND: tl.constexpr) -> None:
    """Begin a step; grid (1,), one warp. Does nothing once the exchange is over."""
    if (has_failed(context) == 0) & (peek(state + W_OPEN) == 1):
        if run_step(context, state, LANES, BACKEND) == 0:
            # rows are exchanged: what is left is to see all writes over
            poke(state + W_OPEN, 2)
