"""Rows of other nodes inside a node: forwarded to its ranks by a dispatch, gathered and summed by a combine.

Dispatch, as in :mod:`..cpu.normal_forward`: rows are not sent a second time, each rank copies its own from the landing
slots of the forwarder. ``normal_node_step`` shows, reads back and says what is done with, in one program;
:func:`list_passed` finds this rank's rows among those of a step, by their marks, a program for each far rank; then many
programs copy (:func:`take_passed`).

Combine, as in :mod:`..cpu.normal_gather`: rows for a far rank lie in the staging of that far rank, in this rank's own
window; the forwarder reads them there, and sums in the order of the ranks of its node, in float32, rounded once. Which
rows a sum is made of follows from the marks that the dispatch has kept: :func:`count_marks` counts them once for a
combine, so that a forwarder knows of every batch how many rows each rank must have laid out, and where they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol import relay
from ...protocol.message import DTYPE_F32
from .blocks import (
    N_ARRIVED,
    N_CHUNKS_SENT,
    N_CONSUMED,
    N_EXPECTED,
    N_GRANT_CHUNK,
    N_GRANT_LEFT,
    N_GRANT_META,
    N_GRANT_ROW,
    N_GRANTED,
    N_META_LANDING,
    N_PACK_ROWS,
    N_PASS_READY,
    N_PASS_RECV,
    N_PASS_SEND,
    N_PASSED,
    N_RECV_FIRST,
    N_RECV_ROWS,
    N_RELAY_FIRST,
    N_ROW_LANDING,
    N_SCAN_END,
    N_SCANNED,
    N_SEND_FIRST,
    N_SEND_ROWS,
    N_SENT,
    N_SENT_CHUNKS,
    N_SHOWN,
    N_SLOT_ROWS,
    N_SLOT_STRIDE,
    N_VIEW_META,
    N_VIEW_ROW,
    N_VIEW_ROWS,
    N_VIEW_SLOT_ROWS,
    N_VIEW_STRIDE,
    S_SINK,
    W_BAD_PEER,
    W_CHUNK_BYTES,
    W_DEPTH,
    W_KEPT,
    W_LANDING_END,
    W_LEAST_CHUNK,
    W_META_BYTES,
    W_NODE_RANKS,
    W_NUMBER,
    W_OPEN,
    W_ROUNDS,
    W_ROW_BYTES,
    W_STAGING,
    W_STEP,
    W_STREAM,
    entry,
    get_each,
    phase_of,
    set_each,
)
from .context import channel_count, has_failed, is_live, own_rank, peer_window, relay_window, window_address
from .kernel import kernel
from .normal_nodes import (
    EVERYTHING,
    board_of,
    counts_at,
    forwarder,
    is_far,
    is_rail,
    kept_of,
    line_of,
    mark_bytes,
    refuse_of,
    ring_of,
    rows_at,
    slot_bytes,
    stamp_rows,
)
from .normal_rows import NodeTables, RowShape, RowTensors, add_rows, copy_rows, load_scales, pad, store_scales
from .normal_step import batch_chunks, first_unfinished, or_else, outside
from .quant import load_floats, store_floats
from .wait import refuse
from .words import acquire_each, any_of, floats, int32s, int64s, peek, poke, settle, uint8s

_ARRIVED, _ROWS = tl.constexpr(8 * relay.ARRIVED), tl.constexpr(8 * relay.ROWS)
_ROW, _META = tl.constexpr(8 * relay.ROW_OFFSET), tl.constexpr(8 * relay.META_OFFSET)
_SLOT_ROWS, _STRIDE = tl.constexpr(8 * relay.SLOT_ROWS), tl.constexpr(8 * relay.SLOT_STRIDE)
_TAKEN, _SHIFT = tl.constexpr(8 * relay.TAKEN), tl.constexpr(relay.STAMP_SHIFT)


@triton.jit
def is_done(context: tl.tensor, state: tl.tensor, peers: tl.tensor, far: tl.tensor) -> tl.tensor:
    """True for ``far`` ranks whose rows this rank has, and, as their forwarder, whose marks it has kept."""
    passed = get_each(context, state, N_PASSED, peers, far)
    scanned = get_each(context, state, N_SCANNED, peers, far)
    all_here = passed == get_each(context, state, N_PASS_RECV, peers, far)
    looked = scanned == get_each(context, state, N_RECV_ROWS, peers, far)
    # rule: a forwarder is done with a row only when it has kept its marks
    return all_here & (looked | (is_rail(context, state, peers) == 0))


@triton.jit
def say_taken(context: tl.tensor, state: tl.tensor, peers: tl.tensor, far: tl.tensor, BACKEND: tl.constexpr) -> None:
    """Move past what the step before has taken and tell the forwarders how far this rank is."""
    set_each(context, state, N_PASSED, peers, far, get_each(context, state, N_PASS_READY, peers, far))
    set_each(context, state, N_SCANNED, peers, far, get_each(context, state, N_SCAN_END, peers, far))
    settle(BACKEND)
    passed, scanned = get_each(context, state, N_PASSED, peers, far), get_each(context, state, N_SCANNED, peers, far)
    viewed = far & (get_each(context, state, N_VIEW_SLOT_ROWS, peers, far) > 0)
    rows, passing = (
        get_each(context, state, N_VIEW_ROWS, peers, viewed),
        get_each(context, state, N_PASS_RECV, peers, far),
    )
    # the source has marked fewer rows for this rank than it told of
    # rule: a source that marks fewer rows than it told of is named
    lost = viewed & (scanned == rows) & (passed < passing)
    if refuse(context, state, peers, lost, peek(state + W_STREAM), passed, passing, BACKEND) == 0:
        done = is_done(context, state, peers, far)
        via = forwarder(context, state, tl.where(far, peers, 0))
        node = peers // peek(state + W_NODE_RANKS)
        at = line_of(context, state, via, node, own_rank(context)) + _TAKEN
        stamp_rows(state, at, tl.where(done, EVERYTHING, scanned), far, BACKEND)


@triton.jit
def show(context: tl.tensor, state: tl.tensor, peers: tl.tensor, rail: tl.tensor, BACKEND: tl.constexpr) -> None:
    """As the forwarder: show on the progress boards what has arrived from the ``rail`` peers, in whole batches."""
    arrived, shown = get_each(context, state, N_ARRIVED, peers, rail), get_each(context, state, N_SHOWN, peers, rail)
    batch = arrived >= get_each(context, state, N_EXPECTED, peers, rail)
    chosen = rail & ((shown == 0) | (batch & (shown != arrived + 1)))
    if any_of(chosen) != 0:
        board = board_of(context, state, own_rank(context) + tl.zeros_like(peers), peers // peek(state + W_NODE_RANKS))
        # nobody follows these under an older stamp
        first = chosen & (shown == 0)
        tl.store(int64s(board + _ROWS), get_each(context, state, N_RECV_ROWS, peers, first), mask=first)
        tl.store(int64s(board + _ROW), get_each(context, state, N_ROW_LANDING, peers, first), mask=first)
        tl.store(int64s(board + _META), get_each(context, state, N_META_LANDING, peers, first), mask=first)
        tl.store(int64s(board + _SLOT_ROWS), get_each(context, state, N_SLOT_ROWS, peers, first), mask=first)
        tl.store(int64s(board + _STRIDE), get_each(context, state, N_SLOT_STRIDE, peers, first), mask=first)
        # rule: a forwarder shows only what has arrived
        rows = tl.where(batch, arrived, 0)
        settle(BACKEND)
        stamp_rows(state, board + _ARRIVED, rows, chosen, BACKEND)
        set_each(context, state, N_SHOWN, peers, chosen, rows + 1)


@triton.jit
def note_taken(context: tl.tensor, state: tl.tensor, peers: tl.tensor, rail: tl.tensor, BACKEND: tl.constexpr) -> None:
    """As the forwarder: move CONSUMED of the ``rail`` peers to where all ranks of the node are done."""
    size, me = peek(state + W_NODE_RANKS), own_rank(context)
    least = get_each(context, state, N_SHOWN, peers, rail) - 1
    own = me + tl.zeros_like(peers)
    for place in range(size):
        at = line_of(context, state, own, peers // size, place) + _TAKEN
        # rule: rows to be forwarded are overwritten only when their node is done with them
        least = tl.minimum(least, rows_at(state, at, rail, BACKEND))
    consumed = get_each(context, state, N_CONSUMED, peers, rail)
    set_each(context, state, N_CONSUMED, peers, rail, tl.maximum(consumed, least))


@triton.jit
def lagging(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, rail: tl.tensor, BACKEND: tl.constexpr
) -> tl.tensor:
    """As the forwarder: (the last rank of this node that keeps the ``rail`` peers from sending more or -1, rows that it
    is done with)."""
    size, me = peek(state + W_NODE_RANKS), own_rank(context)
    arrived, total = (
        get_each(context, state, N_ARRIVED, peers, rail),
        get_each(context, state, N_RECV_ROWS, peers, rail),
    )
    granted = get_each(context, state, N_GRANTED, peers, rail) * get_each(context, state, N_SLOT_ROWS, peers, rail)
    full = rail & (arrived < total) & (arrived >= granted)
    consumed = get_each(context, state, N_CONSUMED, peers, rail)
    found, done = tl.zeros_like(peers) - 1, tl.zeros_like(peers)
    for place in range(size):
        at = line_of(context, state, me + tl.zeros_like(peers), peers // size, place) + _TAKEN
        rows = rows_at(state, at, full, BACKEND)
        late = full & (rows <= consumed)
        found, done = tl.where(late, me // size * size + place, found), tl.where(late, rows, done)
    return found, done


@triton.jit
def _due(context: tl.tensor, state: tl.tensor, peers: tl.tensor, viewed: tl.tensor) -> tl.tensor:
    """Rows of the ``viewed`` far ranks that must have been shown for this step: the batches of all steps before it,
    counted as the forwarder expects them."""
    rows, slot_rows = (
        get_each(context, state, N_VIEW_ROWS, peers, viewed),
        tl.maximum(get_each(context, state, N_VIEW_SLOT_ROWS, peers, viewed), 1),
    )
    channels, row = channel_count(context), peek(state + W_ROW_BYTES)
    least = tl.maximum(peek(state + W_LEAST_CHUNK) // row, 1)
    most = peek(state + W_CHUNK_BYTES) // (row + peek(state + W_META_BYTES))
    chunk = tl.minimum(tl.maximum((rows + channels - 1) // channels, least), tl.minimum(most, slot_rows))
    mapped = peer_window(context, tl.where(viewed, peers, 0)) != 0
    batch = tl.where(mapped, slot_rows, tl.minimum(batch_chunks(state) * chunk, slot_rows))
    in_slot = (slot_rows + batch - 1) // batch
    steps = peek(state + W_STEP)
    shown = steps // in_slot * slot_rows + tl.minimum(steps % in_slot * batch, slot_rows)
    return tl.minimum(shown, rows)


@triton.jit
def view(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    far: tl.tensor,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Read the progress boards for the ``far`` ranks and decide what to read in this step: (1 when a claim was refused,
    True for ranks of which more must be shown first).

    Where rows lie is read once, when the progress board first speaks of this operation, and checked.
    """
    stream = peek(state + W_STREAM)
    going = far & (is_done(context, state, peers, far) == 0)
    via = forwarder(context, state, tl.where(going, peers, 0))
    board = board_of(context, state, via, peers // peek(state + W_NODE_RANKS))
    word = acquire_each(tl.where(going, board + _ARRIVED, state + S_SINK), BACKEND)
    # rule: what a progress board said in an earlier operation is not read
    current = going & ((word >> _SHIFT) == peek(state + W_NUMBER) + 1)
    # the lanes acquired for themselves: now for each other
    settle(BACKEND)
    fresh = current & (get_each(context, state, N_VIEW_SLOT_ROWS, peers, current) == 0)
    broken = tl.full((), 0, tl.int32)
    if any_of(fresh) != 0:
        rows = tl.load(int64s(board + _ROWS), mask=fresh, other=0)
        slot_rows = tl.load(int64s(board + _SLOT_ROWS), mask=fresh, other=0)
        stride = tl.load(int64s(board + _STRIDE), mask=fresh, other=0)
        row = tl.load(int64s(board + _ROW), mask=fresh, other=0)
        meta = tl.load(int64s(board + _META), mask=fresh, other=0)
        begin = peek(state + W_ROUNDS)
        room = peek(state + W_LANDING_END) - begin
        # the first claim that is wrong is refused, in one place: every copy of the code costs a second to compile
        bad, got, want = (rows < 0) | (rows > EVERYTHING), rows, tl.zeros_like(rows) + EVERYTHING
        most = tl.maximum(slot_bytes(context, state) // (peek(state + W_ROW_BYTES) + peek(state + W_META_BYTES)), 1)
        wrong = (slot_rows < 1) | (slot_rows > most) | (stride < 0) | (stride > room)
        bad, got, want = or_else(bad, got, want, wrong, slot_rows, most)
        # of numbers that large a product would overflow
        held = tl.where(wrong, 0, stride + slot_rows * peek(state + W_ROW_BYTES))
        bad, got, want = or_else(bad, got, want, outside(state, row, held), row, begin)
        held = tl.where(wrong, 0, stride + slot_rows * peek(state + W_META_BYTES))
        bad, got, want = or_else(bad, got, want, outside(state, meta, held), meta, begin)
        # rule: where a progress board says that rows lie is checked
        bad = fresh & bad
        broken = refuse_of(context, state, peers, bad, via, stream, got, want, BACKEND)
        if broken == 0:
            set_each(context, state, N_VIEW_ROWS, peers, fresh, rows)
            set_each(context, state, N_VIEW_ROW, peers, fresh, row)
            set_each(context, state, N_VIEW_META, peers, fresh, meta)
            set_each(context, state, N_VIEW_STRIDE, peers, fresh, stride)
            set_each(context, state, N_VIEW_SLOT_ROWS, peers, fresh, slot_rows)
    if broken == 0:
        arrived = tl.where(current, word & EVERYTHING, 0)
        rows = get_each(context, state, N_VIEW_ROWS, peers, current)
        scanned = get_each(context, state, N_SCANNED, peers, current)
        # no more than its two slots hold: neither is granted again before this rank is done with it
        # rule: a progress board shows no more rows than its two slots hold
        rows = tl.minimum(rows, scanned + 2 * get_each(context, state, N_VIEW_SLOT_ROWS, peers, current))
        # rule: a progress board shows no more rows than it tells of
        too_many = current & (arrived > rows)
        broken = refuse_of(context, state, peers, too_many, via, stream, arrived, rows, BACKEND)
        if broken == 0:
            set_each(context, state, N_SCAN_END, peers, current, tl.maximum(arrived, scanned))
    settle(BACKEND)
    end, due = get_each(context, state, N_SCAN_END, peers, current), _due(context, state, peers, current)
    begun = peek(state + W_STEP) > 0
    return broken, going & begun & ((current == 0) | (end < due))


@triton.jit
def list_far(
    context: tl.tensor,
    state: tl.tensor,
    far: tl.tensor,
    lists: tl.tensor,
    list_rows: tl.tensor,
    marks: tl.tensor,
    room: tl.tensor,
    USED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """:func:`list_passed` for one far rank."""
    scanned, end = peek(entry(context, state, N_SCANNED, far)), peek(entry(context, state, N_SCAN_END, far))
    passed = peek(entry(context, state, N_PASSED, far))
    left = peek(entry(context, state, N_PASS_RECV, far)) - passed
    # rule: a rank lists no more rows than its list holds
    left = tl.minimum(left, list_rows)
    if scanned < end:
        me, nbytes, meta = own_rank(context), mark_bytes(state), peek(state + W_META_BYTES)
        place = me % peek(state + W_NODE_RANKS)
        via = forwarder(context, state, far)
        slot_rows = peek(entry(context, state, N_VIEW_SLOT_ROWS, far))
        stride = peek(entry(context, state, N_VIEW_STRIDE, far))
        landed = relay_window(context, via) + peek(entry(context, state, N_VIEW_META, far)) + 4 * USED
        kept = peek(entry(context, state, N_RELAY_FIRST, far))
        keeps = (via == me) & (marks != 0)
        count = tl.full((), 0, tl.int64)
        for first in range(scanned, end, BLOCK):
            index = first + tl.arange(0, BLOCK).to(tl.int64)
            inside = index < end
            grant = index // slot_rows
            at = landed + (grant & 1) * stride + (index - grant * slot_rows) * meta
            mark = tl.load(uint8s(at + place // 8), mask=inside, other=0).to(tl.int64)
            one = (mark >> (place % 8)) & 1
            where = count + tl.cumsum(one, axis=0) - one
            # marks beyond what the source told of are found in the combine: see cpu.normal_forward.take_passed
            # rule: a rank takes no more rows than their source told of
            mine = (one != 0) & (where < left)
            tl.store(int32s(lists + 4 * (far * list_rows + where)), index.to(tl.int32), mask=mine)
            count += tl.sum(one, axis=0)
            if keeps:
                # rule: marks are kept only where the handle has room
                fits = inside & (kept + index < room)
                for byte in range(nbytes):
                    eight = tl.load(uint8s(at + byte), mask=fits, other=0)
                    tl.store(uint8s(marks + (kept + index) * nbytes + byte), eight, mask=fits)
        poke(entry(context, state, N_PASS_READY, far), passed + tl.minimum(count, left))


@kernel(do_not_specialize=["list_rows", "marks", "room"])
def list_passed(
    context: tl.int64,
    state: tl.int64,
    lists: tl.int64,
    list_rows: tl.int64,
    marks: tl.int64,
    room: tl.int64,
    USED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Find this rank's rows among those of each far rank's node that this step reads; grid (ranks,).

    Args:
        lists: int32[ranks, list_rows], written: indices of the rows, in the order of the progress board.
            Two landing slots of a forwarder hold no more than ``list_rows`` rows.
        marks: uint8[room, mark bytes], written by the forwarder in a first dispatch: for its combine; or 0.
        USED: words of a row's meta before the marks.
    """
    far = tl.program_id(0).to(tl.int64)
    if (has_failed(context) == 0) & (peek(state + W_OPEN) == 1):
        if is_live(context, far) & is_far(context, state, far):
            list_far(context, state, far, lists, list_rows.to(tl.int64), marks, room.to(tl.int64), USED, BLOCK)


@triton.jit
def take_passed(
    context: tl.tensor,
    state: tl.tensor,
    far: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    tensors: RowTensors,
    tables: NodeTables,
    shape: RowShape,
) -> None:
    """Bring this program's part of the listed rows of a far rank from its forwarder to the outputs."""
    begin, end = peek(entry(context, state, N_PASSED, far)), peek(entry(context, state, N_PASS_READY, far))
    if begin < end:
        size, meta = peek(state + W_NODE_RANKS), peek(state + W_META_BYTES)
        place = own_rank(context) % size
        window = relay_window(context, forwarder(context, state, far))
        row_at = window + peek(entry(context, state, N_VIEW_ROW, far))
        meta_at = window + peek(entry(context, state, N_VIEW_META, far))
        slot_rows = peek(entry(context, state, N_VIEW_SLOT_ROWS, far))
        stride = peek(entry(context, state, N_VIEW_STRIDE, far))
        base = peek(entry(context, state, N_RECV_FIRST, far)) + begin
        word, slot = tl.arange(0, shape.BLOCK)[None, :], tl.arange(0, shape.SLOTS)[None, :]
        for first in range(program * shape.ROWS, end - begin, programs * shape.ROWS):
            number = first + tl.arange(0, shape.ROWS).to(tl.int64)
            row = base + number
            inside = (number < end - begin) & (row < tensors.capacity)
            index = tl.load(int32s(tables.passes + 4 * (far * tables.pass_rows + number)), mask=inside, other=0).to(
                tl.int64
            )
            grant = index // slot_rows
            within = index - grant * slot_rows
            landed = row_at + (grant & 1) * stride + within * (4 * shape.WORDS)
            landed_meta = meta_at + (grant & 1) * stride + within * meta
            given = inside[:, None] & (slot < shape.TOPK)
            # before the rows, so that all of it is waited for once
            if shape.TOPK > 0:
                expert = tl.load(int32s(landed_meta[:, None] + 4 * slot), mask=given, other=-1).to(tl.int64)
                bits = tl.load(int32s(landed_meta[:, None] + 4 * (shape.TOPK + slot)), mask=given, other=0)
            if shape.SCALE_WORDS > 0:
                scales = load_scales(landed_meta + 8 * shape.TOPK, inside, shape)
            copy_rows(landed, tensors.out + row * (4 * shape.WORDS), inside, word, shape)
            if shape.TOPK > 0:
                # rule: expert ids of a row that is forwarded are its node's
                wrong = (expert < -1) | (expert >= size * tensors.local_experts)
                # the program that fails must be of one warp: the next step does
                blame = int64s(state + W_BAD_PEER + tl.zeros_like(expert))
                tl.store(blame, far + 1 + tl.zeros_like(expert), mask=wrong)
                expert -= place * tensors.local_experts
                mine = (expert >= 0) & (expert < tensors.local_experts) & (wrong == 0)
                at = row[:, None] * shape.TOPK + slot
                tl.store(int64s(tensors.out_idx + 8 * at), tl.where(mine, expert, -1), mask=given)
                tl.store(int32s(tensors.out_weights + 4 * at), tl.where(mine, bits, 0), mask=given)
            if shape.SCALE_WORDS > 0:
                store_scales(tensors.out_scales + 4 * row * shape.SCALE_WORDS, scales, inside, shape)


_F32 = tl.constexpr(DTYPE_F32)
#: Ranks of the node whose rows are loaded together.
_TOGETHER = tl.constexpr(2)
#: More rows than there are.
_EVERY = tl.constexpr(1 << 62)
_OFFERED, _FREED = tl.constexpr(8 * relay.OFFERED), tl.constexpr(8 * relay.FREED)


@kernel(do_not_specialize=["marks", "room", "counts"])
def count_marks(
    context: tl.int64,
    state: tl.int64,
    marks: tl.int64,
    room: tl.int64,
    counts: tl.int64,
    BLOCK: tl.constexpr,
) -> None:
    """Count, for each rank of this node and the rows forwarded from each other node, which of them it got; grid
    (ranks,): program r for the rows from the node of rank r, and the rank of this node with its place.

    Args:
        marks: uint8[room, mark bytes], as the dispatch kept them, rail peer after rail peer.
        counts: int32[room + nodes, ranks of a node], written: see :func:`.normal_nodes.counts_at`.
    """
    far, room = tl.program_id(0).to(tl.int64), room.to(tl.int64)
    if (has_failed(context) == 0) & (peek(state + W_OPEN) == 1):
        # the same of every program
        poke(state + W_KEPT, room)
        if is_far(context, state, far):
            size, nbytes = peek(state + W_NODE_RANKS), mark_bytes(state)
            rail, place = far // size * size + own_rank(context) % size, far % size
            rows, first = (
                peek(entry(context, state, N_SEND_ROWS, rail)),
                tl.minimum(peek(entry(context, state, N_RELAY_FIRST, rail)), room),
            )
            at = counts + 4 * ((first + rail // size) * size + place)
            tl.store(int32s(at), 0)
            count = tl.full((), 0, tl.int64)
            for begin in range(0, rows, BLOCK):
                index = begin + tl.arange(0, BLOCK).to(tl.int64)
                inside = (index < rows) & (first + index < room)
                mark = tl.load(uint8s(marks + (first + index) * nbytes + place // 8), mask=inside, other=0)
                one = (mark.to(tl.int64) >> (place % 8)) & 1
                after = count + tl.cumsum(one, axis=0)
                tl.store(int32s(at + 4 * (index + 1) * size), after.to(tl.int32), mask=inside)
                count += tl.sum(one, axis=0)


@triton.jit
def say_offered(context: tl.tensor, state: tl.tensor, peers: tl.tensor, far: tl.tensor, BACKEND: tl.constexpr) -> None:
    """Tell the forwarders of the ``far`` ranks what the step before has laid out for them."""
    laid = get_each(context, state, N_PASS_READY, peers, far)
    set_each(context, state, N_PASSED, peers, far, laid)
    via, me = forwarder(context, state, tl.where(far, peers, 0)), own_rank(context)
    at = line_of(context, state, via, peers // peek(state + W_NODE_RANKS), me) + _OFFERED
    stamp_rows(state, at, laid, far & (via != me), BACKEND)


@triton.jit
def say_freed(
    context: tl.tensor,
    state: tl.tensor,
    counts: tl.tensor,
    peers: tl.tensor,
    far: tl.tensor,
    BACKEND: tl.constexpr,
) -> None:
    """As the forwarder: tell the rank of this node with the place of each of the ``far`` ranks how many of its rows for
    that one's node are summed."""
    size, me = peek(state + W_NODE_RANKS), own_rank(context)
    inside = tl.where(far, peers, 0)
    rail, near = inside // size * size + me % size, forwarder(context, state, inside)
    # rule: rows are free only when their sums are sent
    sent = get_each(context, state, N_SENT, rail, far)
    freed = tl.load(int32s(counts_at(context, state, counts, rail, far, sent, inside % size)), mask=far, other=0)
    # rows that no sum needs, of a dispatch that received more than was promised, need no room
    _, kept = kept_of(context, state, rail, far)
    freed = tl.where(sent >= kept, EVERYTHING, freed.to(tl.int64))
    at = line_of(context, state, near, inside // size, me) + _FREED
    stamp_rows(state, at, freed, far & (near != me), BACKEND)


@triton.jit
def choose_laid_out(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, far: tl.tensor, BACKEND: tl.constexpr
) -> tl.tensor:
    """Decide what to lay out for the ``far`` ranks in this step. True for those whose forwarder should free more room
    first: half of the ring keeps it busy."""
    own = own_rank(context)
    via = forwarder(context, state, tl.where(far, peers, 0))
    others = far & (via != own)
    at = line_of(context, state, own + tl.zeros_like(peers), peers // peek(state + W_NODE_RANKS), via) + _FREED
    passed = get_each(context, state, N_PASSED, peers, others)
    total = get_each(context, state, N_PASS_SEND, peers, others)
    freed = rows_at(state, at, others, BACKEND)
    # rule: a forwarder has read no more than was laid out
    freed = tl.minimum(freed, passed)
    _, held = ring_of(state, peers, peers)
    # rule: rows laid out for a forwarder are overwritten only when it has read them
    ready = tl.minimum(total, freed + held)
    set_each(context, state, N_PASS_READY, peers, others, ready)
    # own rows are summed where the caller has them
    set_each(context, state, N_PASS_READY, peers, far & (via == own), get_each(context, state, N_PASS_SEND, peers, far))
    return others & (ready - passed < tl.minimum(total - passed, tl.maximum(held // 2, 1)))


@triton.jit
def lacking(
    context: tl.tensor,
    state: tl.tensor,
    counts: tl.tensor,
    peers: tl.tensor,
    rail: tl.tensor,
    rows: tl.tensor,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """(the last rank of this node that has not laid out its part of the next ``rows`` rows for the ``rail`` peers or
    -1, rows that it has laid out, rows that it must have)."""
    size, me = peek(state + W_NODE_RANKS), own_rank(context)
    end = get_each(context, state, N_SENT, peers, rail) + rows
    own = me + tl.zeros_like(peers)
    found, got, missing = tl.zeros_like(peers) - 1, tl.zeros_like(peers), tl.zeros_like(peers)
    for place in range(size):
        need = tl.load(
            int32s(counts_at(context, state, counts, tl.where(rail, peers, 0), rail, end, place)), mask=rail, other=0
        ).to(tl.int64)
        at = line_of(context, state, own, peers // size, place) + _OFFERED
        offered = rows_at(state, at, rail & (place != me % size), BACKEND)
        late = rail & (offered < need)
        found = tl.where(late, me // size * size + place, found)
        got, missing = tl.where(late, offered, got), tl.where(late, need, missing)
    return found, got, missing


@triton.jit
def batch_of(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, rail: tl.tensor, BACKEND: tl.constexpr
) -> tl.tensor:
    """Rows of the next batch for the ``rail`` peers: of what they have granted, 0 while the staging is not free."""
    left = get_each(context, state, N_GRANT_LEFT, peers, rail)
    wanted = rail & (left > 0) & (get_each(context, state, N_PACK_ROWS, peers, rail) == 0)
    chunk = tl.maximum(get_each(context, state, N_GRANT_CHUNK, peers, wanted), 1)
    rows = tl.where(wanted, tl.minimum(left, batch_chunks(state) * chunk), 0)
    chunks = (rows + chunk - 1) // chunk
    number = get_each(context, state, N_CHUNKS_SENT + phase_of(state), peers, wanted)
    over = tl.maximum(number + chunks - peek(state + W_DEPTH), 0)
    busy = first_unfinished(context, state, peers, wanted, peek(state + W_STREAM), over, BACKEND) >= 0
    return tl.where(busy, 0, rows)


@triton.jit
def choose_sums(
    context: tl.tensor,
    state: tl.tensor,
    counts: tl.tensor,
    peers: tl.tensor,
    rail: tl.tensor,
    BACKEND: tl.constexpr,
) -> None:
    """Decide what to sum for the ``rail`` peers: a batch of which all parts are laid out."""
    rows = batch_of(context, state, peers, rail, BACKEND)
    wanted = rows > 0
    if any_of(wanted) != 0:
        late, _, _ = lacking(context, state, counts, peers, wanted, rows, BACKEND)
        settle(BACKEND)
        # rule: a forwarder sums a token only when all of its rows are laid out
        whole = wanted & (late < 0)
        set_each(context, state, N_PACK_ROWS, peers, whole, rows)


@triton.jit
def lay_out(
    context: tl.tensor,
    state: tl.tensor,
    far: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    tensors: RowTensors,
    shape: RowShape,
) -> None:
    """This program's part of the rows for a far rank that its forwarder, another rank, sums."""
    begin, end = peek(entry(context, state, N_PASSED, far)), peek(entry(context, state, N_PASS_READY, far))
    if (begin < end) & (forwarder(context, state, far) != own_rank(context)):
        ring, held = ring_of(state, peer_window(context, own_rank(context)), far)
        meta, send_first = peek(state + W_META_BYTES), peek(entry(context, state, N_SEND_FIRST, far))
        word, slot = tl.arange(0, shape.BLOCK)[None, :], tl.arange(0, shape.SLOTS)[None, :]
        for first in range(begin + program * shape.ROWS, end, programs * shape.ROWS):
            index = first + tl.arange(0, shape.ROWS).to(tl.int64)
            row = send_first + index
            # of a dispatch that received more than was promised, the rest is not there
            inside = (index < end) & (row < tensors.tokens)
            at = index % held
            copy_rows(tensors.x + row * (4 * shape.WORDS), ring + at * (4 * shape.WORDS), inside, word, shape)
            if shape.TOPK > 0:
                given = inside[:, None] & (slot < shape.TOPK)
                bits = tl.load(int32s(tensors.weights + 4 * (row[:, None] * shape.TOPK + slot)), mask=given, other=0)
                target = ring + held * (4 * shape.WORDS) + at * meta
                tl.store(int32s(target[:, None] + 4 * slot), bits, mask=given)
                pad(target, inside, shape.TOPK, meta)


@triton.jit
def sum_laid_out(
    context: tl.tensor,
    state: tl.tensor,
    rail: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    tensors: RowTensors,
    counts: tl.tensor,
    shape: RowShape,
    HIDDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """This program's part of the batch for a rail peer: rows summed over this node, into its window or the staging."""
    rows = peek(entry(context, state, N_PACK_ROWS, rail))
    if rows > 0:
        width: tl.constexpr = 4 if DTYPE == _F32 else 2
        row_bytes: tl.constexpr = HIDDEN * width
        me, size = own_rank(context), peek(state + W_NODE_RANKS)
        meta, done = peek(state + W_META_BYTES), peek(entry(context, state, N_SENT, rail))
        window = peer_window(context, rail)
        row_at, meta_at = (
            peek(entry(context, state, N_GRANT_ROW, rail)),
            peek(entry(context, state, N_GRANT_META, rail)),
        )
        chunk = tl.maximum(peek(entry(context, state, N_GRANT_CHUNK, rail)), 1)
        depth, chunk_bytes = peek(state + W_DEPTH), peek(state + W_CHUNK_BYTES)
        sent_chunks = peek(entry(context, state, N_SENT_CHUNKS, rail))
        staging = window_address(context) + peek(state + W_STAGING) + rail * depth * chunk_bytes
        known, own_first = (
            peek(entry(context, state, N_PASS_SEND, rail)),
            peek(entry(context, state, N_SEND_FIRST, rail)),
        )
        relay_first, room = peek(entry(context, state, N_RELAY_FIRST, rail)), peek(state + W_KEPT)
        counted = counts + 4 * (relay_first + rail // size + done) * size
        # rows whose marks were not kept have no parts
        kept = room - relay_first - done
        near, most = me // size * size, tl.minimum(known, tensors.tokens - own_first)
        ring_at, held = ring_of(state, 0, rail)
        # of another size than what is copied, see ll_combine_send: rows that are laid out would change threads
        block: tl.constexpr = shape.BLOCK // 2
        value, slot = tl.arange(0, block)[None, :], tl.arange(0, shape.SLOTS)[None, :]
        for first in range(program * shape.ROWS, rows, programs * shape.ROWS):
            index = first + tl.arange(0, shape.ROWS).to(tl.int64)
            inside = index < rows
            # rule: rows whose marks were not kept are not summed
            counting = index < tl.minimum(rows, kept)
            at = index // chunk
            stage = staging + (sent_chunks + at) % depth * chunk_bytes
            within = index - at * chunk
            stage_meta = stage + tl.minimum(chunk, rows - at * chunk) * row_bytes + within * meta
            target = tl.where(window != 0, window + row_at + index * row_bytes, stage + within * row_bytes)
            target_meta = tl.where(window != 0, window + meta_at + index * meta, stage_meta)
            factors = tl.zeros([shape.ROWS, shape.SLOTS], tl.float32)
            for start in range(0, HIDDEN, block):
                column = start + value
                wanted = inside[:, None] & (column < HIDDEN)
                weighing = (slot < shape.TOPK) & (start == 0)
                total = tl.zeros([shape.ROWS, block], tl.float32)
                # rule: a sum of one row is that row
                found = tl.zeros([shape.ROWS], tl.int32)
                wrong = tl.zeros([shape.ROWS], tl.int32)
                for begin in range(0, size, _TOGETHER):
                    sources, metas, there, parts, weights = (), (), (), (), ()
                    for step in tl.static_range(_TOGETHER):
                        place = tl.minimum(size - 1, begin + step)
                        own = place == me % size
                        here_at = counted + 4 * (index * size + place)
                        part = tl.load(int32s(here_at), mask=counting, other=0).to(tl.int64)
                        until = tl.load(int32s(here_at + 4 * size), mask=counting, other=0).to(tl.int64)
                        marked = tl.where(size > begin + step, until - part, 0) > 0
                        # the source marked more rows for this rank than it told of
                        # rule: a forwarder sums no more of its own rows than their source told of
                        wrong += (marked & (part >= tl.where(own, known, _EVERY))).to(tl.int32)
                        here = marked & (part < tl.where(own, most, _EVERY))
                        ring = peer_window(context, near + place) + ring_at
                        source = tl.where(
                            own, tensors.x + (own_first + part) * row_bytes, ring + part % held * row_bytes
                        )
                        sources += (tl.where(here, source, tensors.x),)  # type: ignore[assignment]
                        if shape.TOPK > 0:
                            metas += (  # type: ignore[assignment]
                                tl.where(
                                    own,
                                    tensors.weights + (own_first + part) * (4 * shape.TOPK),
                                    ring + held * row_bytes + part % held * meta,
                                ),
                            )
                        there += (here,)  # type: ignore[assignment]
                    # as in quant.load_together: else the compiler waits for one row before it asks for the next
                    tl.debug_barrier()
                    for step in tl.static_range(_TOGETHER):
                        piece = load_floats(sources[step], column, there[step][:, None] & wanted, DTYPE)
                        parts += (piece,)  # type: ignore[assignment]
                        if shape.TOPK > 0:
                            given = there[step][:, None] & weighing
                            weight = tl.load(floats(metas[step][:, None] + 4 * slot), mask=given, other=0.0)
                            weights += (weight,)  # type: ignore[assignment]
                    tl.debug_barrier()
                    for step in tl.static_range(_TOGETHER):
                        total, found = add_rows(total, found, parts[step], there[step])
                        if shape.TOPK > 0:
                            factors += weights[step]
                blame = int64s(state + W_BAD_PEER + tl.zeros_like(index))
                tl.store(blame, rail + 1 + tl.zeros_like(index), mask=wrong > 0)
                store_floats(target, column, total, wanted, DTYPE, BACKEND)
            if shape.TOPK > 0:
                given = inside[:, None] & (slot < shape.TOPK)
                tl.store(floats(target_meta[:, None] + 4 * slot), factors, mask=given)
                pad(target_meta, inside, shape.TOPK, meta)
