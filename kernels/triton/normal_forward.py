"""A dispatch inside a node: the forwarder shows what has arrived from another node, every rank takes its own rows.

As in :mod:`..cpu.normal_forward`: rows are not sent a second time, each rank copies its own from the landing slots of
the forwarder. ``normal_node_advance`` shows, looks and says what is done with, in one program; :func:`list_passed`
finds this rank's rows among those of a turn, by their marks, a program for each far rank; then many programs copy
(:func:`take_passed`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol import relay
from .context import S_SINK, channel_count, has_failed, is_live, own_rank, peer_window
from .normal_advance import batch_chunks
from .normal_blocks import (
    N_ARRIVED,
    N_CONSUMED,
    N_EXPECTED,
    N_GRANTED,
    N_META_LANDING,
    N_PASS_READY,
    N_PASS_RECV,
    N_PASSED,
    N_RECV_FIRST,
    N_RECV_ROWS,
    N_RELAY_FIRST,
    N_ROW_LANDING,
    N_SCAN_END,
    N_SCANNED,
    N_SHOWN,
    N_SLOT_ROWS,
    N_SLOT_STRIDE,
    N_VIEW_META,
    N_VIEW_ROW,
    N_VIEW_ROWS,
    N_VIEW_SLOT_ROWS,
    N_VIEW_STRIDE,
    W_BAD_PEER,
    W_CHUNK_BYTES,
    W_LANDING_END,
    W_LEAST_CHUNK,
    W_META_BYTES,
    W_NODE_RANKS,
    W_NUMBER,
    W_OPEN,
    W_ROUNDS,
    W_ROW_BYTES,
    W_STREAM,
    W_TURN,
    entry,
    get_each,
    set_each,
)
from .normal_grants import or_else, outside
from .normal_nodes import (
    EVERYTHING,
    board_of,
    forwarder,
    is_far,
    is_rail,
    line_of,
    mark_bytes,
    refuse_of,
    rows_at,
    slot_bytes,
    stamp_rows,
)
from .normal_rows import copy_rows, load_scales, store_scales
from .normal_tensors import NodeTables, RowShape, RowTensors
from .wait import refuse
from .words import acquire_each, any_of, int32s, int64s, peek, poke, settle, uint8s

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
    """Move past what the turn before has taken and tell the forwarders how far this rank is."""
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
    """As the forwarder: show on the boards what has arrived from the ``rail`` peers, a whole batch at a time."""
    arrived, shown = get_each(context, state, N_ARRIVED, peers, rail), get_each(context, state, N_SHOWN, peers, rail)
    batch = arrived >= get_each(context, state, N_EXPECTED, peers, rail)
    chosen = rail & ((shown == 0) | (batch & (shown != arrived + 1)))
    if any_of(chosen, BACKEND) != 0:
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
        # rule: rows to be handed on are overwritten only when their node is done with them
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
    """Rows of the ``viewed`` far ranks that must have been shown for this turn: the batches of all turns before it,
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
    turns = peek(state + W_TURN)
    shown = turns // in_slot * slot_rows + tl.minimum(turns % in_slot * batch, slot_rows)
    return tl.minimum(shown, rows)


@triton.jit
def view(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    far: tl.tensor,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Look at the boards for the ``far`` ranks and decide what to look at in this turn: (1 when a claim was refused,
    True for ranks of which more must be shown first).

    Where rows lie is read once, when the board first speaks of this operation, and checked.
    """
    stream = peek(state + W_STREAM)
    going = far & (is_done(context, state, peers, far) == 0)
    via = forwarder(context, state, tl.where(going, peers, 0))
    board = board_of(context, state, via, peers // peek(state + W_NODE_RANKS))
    word = acquire_each(tl.where(going, board + _ARRIVED, state + S_SINK), BACKEND)
    # rule: what a board said in an earlier operation is not looked at
    current = going & ((word >> _SHIFT) == peek(state + W_NUMBER) + 1)
    # the lanes acquired for themselves: now for each other
    settle(BACKEND)
    fresh = current & (get_each(context, state, N_VIEW_SLOT_ROWS, peers, current) == 0)
    broken = tl.full((), 0, tl.int32)
    if any_of(fresh, BACKEND) != 0:
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
        # rule: where a board says that rows lie is checked
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
        # rule: a board shows no more rows than its two slots hold
        rows = tl.minimum(rows, scanned + 2 * get_each(context, state, N_VIEW_SLOT_ROWS, peers, current))
        # rule: a board shows no more rows than it tells of
        too_many = current & (arrived > rows)
        broken = refuse_of(context, state, peers, too_many, via, stream, arrived, rows, BACKEND)
        if broken == 0:
            set_each(context, state, N_SCAN_END, peers, current, tl.maximum(arrived, scanned))
    settle(BACKEND)
    end, due = get_each(context, state, N_SCAN_END, peers, current), _due(context, state, peers, current)
    begun = peek(state + W_TURN) > 0
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
        landed = peer_window(context, via) + peek(entry(context, state, N_VIEW_META, far)) + 4 * USED
        kept = peek(entry(context, state, N_RELAY_FIRST, far))
        keeps = (via == me) & (marks != 0)
        count = tl.full((), 0, tl.int64)
        for first in range(scanned, end, BLOCK):
            index = first + tl.arange(0, BLOCK).to(tl.int64)
            inside = index < end
            turn_of = index // slot_rows
            at = landed + (turn_of & 1) * stride + (index - turn_of * slot_rows) * meta
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


@triton.jit(do_not_specialize=["list_rows", "marks", "room"])
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
    """Find this rank's rows among those of each far rank's node that this turn looks at; grid (ranks,).

    Args:
        lists: int32[ranks, list_rows], written: indices of the rows, in the order of the board. Two landing slots of a
            forwarder hold no more than ``list_rows`` rows.
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
        window = peer_window(context, forwarder(context, state, far))
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
            turn_of = index // slot_rows
            within = index - turn_of * slot_rows
            landed = row_at + (turn_of & 1) * stride + within * (4 * shape.WORDS)
            landed_meta = meta_at + (turn_of & 1) * stride + within * meta
            given = inside[:, None] & (slot < shape.TOPK)
            # before the rows, so that all of it is waited for once
            if shape.TOPK > 0:
                expert = tl.load(int32s(landed_meta[:, None] + 4 * slot), mask=given, other=-1).to(tl.int64)
                bits = tl.load(int32s(landed_meta[:, None] + 4 * (shape.TOPK + slot)), mask=given, other=0)
            if shape.SCALE_WORDS > 0:
                scales = load_scales(landed_meta + 8 * shape.TOPK, inside, shape)
            copy_rows(landed, tensors.out + row * (4 * shape.WORDS), inside, word, shape)
            if shape.TOPK > 0:
                # rule: expert ids of a row that is handed on are its node's
                wrong = (expert < -1) | (expert >= size * tensors.local_experts)
                # the program that fails must be of one warp: the next turn does
                blame = int64s(state + W_BAD_PEER + tl.zeros_like(expert))
                tl.store(blame, far + 1 + tl.zeros_like(expert), mask=wrong)
                expert -= place * tensors.local_experts
                mine = (expert >= 0) & (expert < tensors.local_experts) & (wrong == 0)
                at = row[:, None] * shape.TOPK + slot
                tl.store(int64s(tensors.out_idx + 8 * at), tl.where(mine, expert, -1), mask=given)
                tl.store(int32s(tensors.out_weights + 4 * at), tl.where(mine, bits, 0), mask=given)
            if shape.SCALE_WORDS > 0:
                store_scales(tensors.out_scales + 4 * row * shape.SCALE_WORDS, scales, inside, shape)
