"""The steps of a row exchange between nodes: those of ``normal_step``, and what passes through forwarders.

Near ranks exchange rows as they always do, and so do rail peers, each row on behalf of a node. Besides, in step k

* of a dispatch, a rank says what it has taken in step k - 1, shows its node the batches of rail peers that have
  arrived, waits for what forwarders show, and lists its rows of it (``normal_relay``);
* of a combine, it says what it has laid out and summed in step k - 1, waits until every part of its next batch for a
  rail peer is laid out, and for room to lay out more (``normal_relay``). A batch is laid out in one step, summed in
  the next and published in the one after.

Batch k of a rail peer is shown in step k + 1 and taken there, so a dispatch needs no more steps than without nodes, and
the grant for batch k + 2 is given in step k + 2: nobody waits for more than what others publish when they begin the
same step. Of the rows that a combine lays out and sums that cannot be said, since a rank does not know which batches
its rows are in. So a step waits for these no longer than PATIENCE once it has something to move; with nothing to move,
for anything, up to the time limit. No rank waits for them while it could do something else, which is why a combine
ends.

The last kernel takes what steps are left, waits until all writes are over, and moves the counters on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import NormalNotify
from .blocks import (
    N_ARRIVED,
    N_CHUNK_ROWS,
    N_CONSUMED,
    N_EXPECTED,
    N_PACK_ROWS,
    N_PASS_READY,
    N_PASS_RECV,
    N_PASS_SEND,
    N_PASSED,
    N_READY,
    N_RECV_ROWS,
    N_SCAN_END,
    N_SCANNED,
    N_SEND_ROWS,
    N_SENT,
    N_SHOWN,
    N_SLOT_ROWS,
    N_VIEW_SLOT_ROWS,
    W_BAD_PEER,
    W_IN_HEAP,
    W_OPEN,
    W_STEP,
    W_STREAM,
    get_each,
    set_each,
)
from .context import has_failed, is_live, own_rank, peer_window, rank_count
from .kernel import kernel
from .normal_finish import close
from .normal_nodes import blame_of, forwarder, is_far, is_rail
from .normal_relay import (
    batch_of,
    choose_laid_out,
    choose_sums,
    is_done,
    lacking,
    lagging,
    lay_out,
    list_far,
    note_taken,
    say_freed,
    say_offered,
    say_taken,
    show,
    sum_laid_out,
    take_passed,
    view,
)
from .normal_rows import UNALIGNED_NODES, NodeTables, RowShape, RowTensors, pack, unpack
from .normal_step import (
    FAILED,
    MISSING,
    THERE,
    batch_chunks,
    blame_peer,
    choose_rows,
    give_grants,
    is_late,
    is_owed,
    is_stuck,
    note_arrivals,
    publish_batch,
    released,
    take_grants,
)
from .wait import FAILURE_PEER_TIMEOUT, FAILURE_PROTOCOL, GO_ON, TOO_LATE, end_spin, fail
from .words import any_of, clock_ns, peek, poke, settle, uniform


@triton.jit
def _expect(context: tl.tensor, state: tl.tensor, peers: tl.tensor, linked: tl.tensor, COMBINE: tl.constexpr) -> None:
    """Rows of the ``linked`` peers that the batch before must bring."""
    total = get_each(context, state, N_RECV_ROWS, peers, linked)
    before = get_each(context, state, N_EXPECTED, peers, linked)
    if COMBINE:
        # a step that went on without a rail peer does not ask it for two batches in the next one
        rail = is_rail(context, state, peers)
        before = tl.where(rail, tl.minimum(before, get_each(context, state, N_ARRIVED, peers, linked)), before)
    slot_rows = tl.maximum(get_each(context, state, N_SLOT_ROWS, peers, linked), 1)
    chunk = get_each(context, state, N_CHUNK_ROWS, peers, linked)
    end = tl.minimum((before // slot_rows + 1) * slot_rows, total)
    whole = peer_window(context, tl.where(linked, peers, 0)) != 0
    if COMBINE:
        whole = whole & (is_rail(context, state, peers) == 0)
    expected = tl.where(whole, end, tl.minimum(before + batch_chunks(state) * chunk, end))
    if COMBINE:
        # summed a step later than laid out
        early = is_rail(context, state, peers) & (peek(state + W_STEP) < 2)
        expected = tl.where(early, 0, expected)
    set_each(context, state, N_EXPECTED, peers, linked, expected)


@triton.jit
def _begin(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    start: tl.tensor,
    COMBINE: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Publish what the step before has packed, laid out and taken, and move every position past it."""
    far = live & is_far(context, state, peers)
    rail = far & is_rail(context, state, peers)
    near = live & (far == 0)
    if peek(state + W_STEP) > 0:
        publish_batch(context, state, peers, near | rail, start, LANES, BACKEND)
        mine = peers == own_rank(context)
        set_each(context, state, N_PACK_ROWS, peers, mine, tl.zeros_like(peers))
        unpacked = near
        if COMBINE:
            unpacked = near | rail
        set_each(context, state, N_CONSUMED, peers, unpacked, get_each(context, state, N_READY, peers, unpacked))
        _expect(context, state, peers, near | rail, COMBINE)
        settle(BACKEND)
    if COMBINE:
        say_offered(context, state, peers, far, BACKEND)
    else:
        say_taken(context, state, peers, far, BACKEND)
    settle(BACKEND)


@triton.jit
def _check_peers(
    context: tl.tensor,
    state: tl.tensor,
    counts: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    start: tl.tensor,
    COMBINE: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Do for the ``live`` peers what can be done now: (MISSING, THERE or FAILED; 1 when it is worth while to wait a
    little for more; 1 when rows can be moved)."""
    far = live & is_far(context, state, peers)
    rail = far & is_rail(context, state, peers)
    near = live & (far == 0)
    linked = near | rail
    settle(BACKEND)
    owed = any_of(give_grants(context, state, peers, linked, start, LANES, BACKEND))
    settle(BACKEND)
    found, ready = tl.full((), FAILED, tl.int32), tl.full((), 0, tl.int32)
    hopeful = tl.full((), 0, tl.int32)
    broken = take_grants(context, state, peers, linked, BACKEND)
    settle(BACKEND)
    wanting = tl.zeros_like(far)
    if broken == 0:
        note_arrivals(context, state, peers, linked, BACKEND)
        settle(BACKEND)
        if COMBINE:
            choose_rows(context, state, peers, near, BACKEND)
            choose_sums(context, state, counts, peers, rail, BACKEND)
            wanting = choose_laid_out(context, state, peers, far, BACKEND)
        else:
            choose_rows(context, state, peers, linked, BACKEND)
            show(context, state, peers, rail, BACKEND)
            settle(BACKEND)
            note_taken(context, state, peers, rail, BACKEND)
            broken, wanting = view(context, state, peers, far, BACKEND)
    settle(BACKEND)
    if broken == 0:
        arrived = get_each(context, state, N_ARRIVED, peers, linked)
        moves = (peers == own_rank(context)) | linked
        moves = moves & (get_each(context, state, N_PACK_ROWS, peers, moves) > 0)
        unpacks = near & (arrived > get_each(context, state, N_CONSUMED, peers, near))
        stuck = linked & is_stuck(context, state, peers, linked)
        if COMBINE:
            unpacks = linked & (arrived > get_each(context, state, N_CONSUMED, peers, linked))
            unpacks = unpacks & (peek(state + W_IN_HEAP) == 0)
            passed = get_each(context, state, N_PASSED, peers, far)
            others = far & (forwarder(context, state, tl.where(far, peers, 0)) != own_rank(context))
            passes = others & (get_each(context, state, N_PASS_READY, peers, far) > passed)
            # in the first step nothing is laid out yet
            stuck = stuck & ((rail == 0) | (peek(state + W_STEP) > 0))
        else:
            scanned = get_each(context, state, N_SCANNED, peers, far)
            passes = far & (get_each(context, state, N_SCAN_END, peers, far) > scanned)
        late = linked & is_late(context, state, peers, linked)
        if COMBINE:
            hopeful = any_of((rail & (late | stuck)) | wanting)
            missing = owed | any_of(near & (late | stuck))
        else:
            missing = owed | any_of(late | stuck | wanting)
        ready = any_of(moves | unpacks | passes)
        found = tl.where(missing != 0, MISSING, THERE)
        if uniform(has_failed(context).to(tl.int32), BACKEND) != 0:
            found = tl.full((), FAILED, tl.int32)
    return found, hopeful, ready


@triton.jit
def _blame_node(
    context: tl.tensor,
    state: tl.tensor,
    counts: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    code: tl.tensor,
    COMBINE: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Fail with a rank of this node that keeps rows of, or for, another node waiting; do nothing when none does."""
    stream, me = peek(state + W_STREAM), own_rank(context)
    far = live & is_far(context, state, peers)
    rail = far & is_rail(context, state, peers)
    via = forwarder(context, state, tl.where(far, peers, 0))
    # first what is likelier the root, then what remains; in one place, as in ``take_grants``
    if COMBINE:
        rows = batch_of(context, state, peers, rail, BACKEND)
        who, got, need = lacking(context, state, counts, peers, rail & (rows > 0), rows, BACKEND)
        passed = get_each(context, state, N_PASSED, peers, far)
        total = get_each(context, state, N_PASS_SEND, peers, far)
        others, named = far & (via != me) & (passed < total), via
    else:
        who, got = lagging(context, state, peers, rail, BACKEND)
        need = get_each(context, state, N_ARRIVED, peers, rail)
        passed = get_each(context, state, N_PASSED, peers, far)
        total = get_each(context, state, N_PASS_RECV, peers, far)
        ended = get_each(context, state, N_SCAN_END, peers, far) == get_each(context, state, N_SCANNED, peers, far)
        others = far & (via != me) & (passed < total) & ended
        # a forwarder whose progress board speaks of this operation has nothing more either
        named = tl.where(get_each(context, state, N_VIEW_SLOT_ROWS, peers, far) > 0, peers, via)
    if any_of(who >= 0) == 0:
        who, got, need = tl.where(others, named, -1), passed, total
    if any_of(who >= 0) != 0:
        blame_of(context, state, code, peers, who >= 0, who, stream, got, need, BACKEND)


@triton.jit
def _is_over(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, live: tl.tensor, COMBINE: tl.constexpr
) -> tl.tensor:
    """True for peers with which nothing is left to be moved."""
    far = live & is_far(context, state, peers)
    linked = live & ((far == 0) | is_rail(context, state, peers))
    sent = get_each(context, state, N_SENT, peers, linked) == get_each(context, state, N_SEND_ROWS, peers, linked)
    total = get_each(context, state, N_RECV_ROWS, peers, linked)
    consumed = get_each(context, state, N_CONSUMED, peers, linked) == total
    if COMBINE:
        passed = get_each(context, state, N_PASSED, peers, far) == get_each(context, state, N_PASS_SEND, peers, far)
    else:
        # a forwarder's slots are used again only in another operation, which all ranks open
        # rule: an exchange is over only when all of a rail peer's rows are shown
        shown = get_each(context, state, N_SHOWN, peers, linked) == total + 1
        consumed = tl.where(far, shown, consumed)
        passed = is_done(context, state, peers, far)
    return ((linked == 0) | (sent & consumed)) & ((far == 0) | passed)


@triton.jit
def run_node_step(
    context: tl.tensor,
    state: tl.tensor,
    counts: tl.tensor,
    COMBINE: tl.constexpr,
    PATIENCE: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> tl.tensor:
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
            _begin(context, state, peers, live, start, COMBINE, LANES, BACKEND)
        if COMBINE:
            # of all rail peers, wherever they stand among the lanes, is known what was sent
            for first in range(0, ranks, LANES):
                peers = first + tl.arange(0, LANES).to(tl.int64)
                far = is_live(context, peers) & is_far(context, state, peers)
                say_freed(context, state, counts, peers, far, BACKEND)
        settle(BACKEND)
        found = tl.full((), MISSING, tl.int32)
        ending, checked = tl.full((), 0, tl.int32), start
        waits = tl.full((), 1, tl.int32)
        if uniform(has_failed(context).to(tl.int32), BACKEND) != 0:
            found = tl.full((), FAILED, tl.int32)
        while (found != FAILED) & (waits != 0) & (ending == GO_ON):
            found = tl.full((), THERE, tl.int32)
            ready, hopeful = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
            for first in range(0, ranks, LANES):
                peers = first + tl.arange(0, LANES).to(tl.int64)
                live = is_live(context, peers) & (peers != me)
                if found != FAILED:
                    one, hopes, moves = _check_peers(
                        context, state, counts, peers, live, start, COMBINE, LANES, BACKEND
                    )
                    ready, hopeful = ready | moves, hopeful | hopes
                    found = tl.where(one == FAILED, one, tl.minimum(found, one))
            waits = (found == MISSING).to(tl.int32)
            if COMBINE:
                if (found == THERE) & (hopeful != 0):
                    tired = (ready != 0) & (clock_ns(BACKEND) - start > PATIENCE)
                    waits = 1 - uniform(tired.to(tl.int32), BACKEND)
            if waits != 0:
                ending, checked = end_spin(context, start, checked, BACKEND)
        if ending != GO_ON:
            _give_up(context, state, counts, ending, COMBINE, LANES, BACKEND)
        elif found != FAILED:
            poke(state + W_STEP, before + 1)
            settle(BACKEND)
            for first in range(0, ranks, LANES):
                peers = first + tl.arange(0, LANES).to(tl.int64)
                live = is_live(context, peers) & (peers != me)
                linked = live & ((is_far(context, state, peers) == 0) | is_rail(context, state, peers))
                arrived = get_each(context, state, N_ARRIVED, peers, linked)
                set_each(context, state, N_READY, peers, linked, arrived)
                if COMBINE:
                    if peek(state + W_IN_HEAP) != 0:
                        # the rows of a combine stay in the heap until they are summed
                        set_each(context, state, N_CONSUMED, peers, linked, arrived)
                own = (peers == me) & (get_each(context, state, N_PACK_ROWS, peers, peers == me) > 0)
                settle(BACKEND)
                going |= any_of((live & (_is_over(context, state, peers, live, COMBINE) == 0)) | own)
        settle(BACKEND)
    return going


@triton.jit
def _give_up(
    context: tl.tensor,
    state: tl.tensor,
    counts: tl.tensor,
    ending: tl.tensor,
    COMBINE: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Fail, naming a rank that is missing: one of this node first, since a far one may only wait for it."""
    ranks, me = rank_count(context), own_rank(context)
    code = tl.where(ending == TOO_LATE, FAILURE_PEER_TIMEOUT, 0)
    for step in range(0, ranks, LANES):
        first = (ranks - 1) // LANES * LANES - step
        peers = first + tl.arange(0, LANES).to(tl.int64)
        live = is_live(context, peers) & (peers != me)
        linked = live & ((is_far(context, state, peers) == 0) | is_rail(context, state, peers))
        _blame_node(context, state, counts, peers, live, code, COMBINE, BACKEND)
        late = linked & (is_late(context, state, peers, linked) | is_stuck(context, state, peers, linked))
        # rule: who keeps a grant waiting is searched for among all ranks
        late = late | is_owed(context, state, peers, linked, BACKEND)
        # the last check fails when no other has: what was missing has come meanwhile
        if (any_of(late) != 0) | (first == 0):
            blame_peer(context, state, peers, linked, code, BACKEND)


@kernel(do_not_specialize=["counts"])
def advance_nodes(
    context: tl.int64,
    state: tl.int64,
    counts: tl.int64,
    COMBINE: tl.constexpr,
    PATIENCE: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Begin a step; grid (1,), one warp. Does nothing once the exchange is over.

    Args:
        counts: of :func:`.normal_relay.count_marks`, in a combine.
        PATIENCE: nanoseconds that a step of a combine waits for more once it has something to move.
    """
    if (has_failed(context) == 0) & (peek(state + W_OPEN) == 1):
        if run_node_step(context, state, counts, COMBINE, PATIENCE, LANES, BACKEND) == 0:
            # rows are exchanged: what is left is to see all writes over
            poke(state + W_OPEN, 2)


_COMBINE = tl.constexpr(NormalNotify.OPERATION_COMBINE)


@triton.jit
def move_nodes(
    context: tl.tensor,
    state: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    tensors: RowTensors,
    tables: NodeTables,
    shape: RowShape,
    HIDDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Program ``program`` of ``programs``: its part of all rows of the step."""
    ranks, me = rank_count(context), own_rank(context)
    for step in range(0, ranks):
        # not all ranks write to the same peer first, nor all programs, when there are few rows for each
        peer = (me + step) % ranks
        part = (program + step * 7) % programs
        summed = False
        if shape.KIND == _COMBINE:
            summed = is_far(context, state, peer)
        if summed:
            if shape.KIND == _COMBINE:
                if is_rail(context, state, peer):
                    counts = tables.counts
                    sum_laid_out(context, state, peer, part, programs, tensors, counts, shape, HIDDEN, DTYPE, BACKEND)
                else:
                    lay_out(context, state, peer, part, programs, tensors, shape)
        else:
            pack(context, state, peer, part, programs, tensors, tables.in_rank, shape, True)
    if (shape.KIND != _COMBINE) | (peek(state + W_IN_HEAP) == 0):
        for step in range(1, ranks):
            peer = (me + step) % ranks
            part = (program + step * 7) % programs
            passed = False
            if shape.KIND != _COMBINE:
                passed = is_far(context, state, peer)
            if passed:
                if shape.KIND != _COMBINE:
                    take_passed(context, state, peer, part, programs, tensors, tables, shape)
            else:
                unpack(context, state, peer, part, programs, tensors, shape)


# any number of tokens with the same compiled code
@kernel(do_not_specialize=UNALIGNED_NODES)
def move_node_rows(
    context: tl.int64,
    state: tl.int64,
    x: tl.int64,
    lists: tl.int64,
    tokens: tl.int64,
    topk_idx: tl.int64,
    weights: tl.int64,
    scales: tl.int64,
    out: tl.int64,
    out_idx: tl.int64,
    out_weights: tl.int64,
    out_scales: tl.int64,
    capacity: tl.int64,
    local_experts: tl.int64,
    in_rank: tl.int64,
    passes: tl.int64,
    pass_rows: tl.int64,
    counts: tl.int64,
    KIND: tl.constexpr,
    HIDDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    WORDS: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Move what :func:`advance_nodes` has chosen; any grid of one dimension. Compile without fused
    multiply-add.

    Args:
        x ... local_experts: see :class:`.normal_rows.RowTensors`.
        in_rank ... counts: see :class:`.normal_rows.NodeTables`.
        KIND ... BLOCK: see :class:`.normal_rows.RowShape`.
        HIDDEN, DTYPE: values of a row that is summed, and what they are (combine).
    """
    tokens, capacity, local_experts = tokens.to(tl.int64), capacity.to(tl.int64), local_experts.to(tl.int64)
    tensors = RowTensors(
        x, lists, tokens, topk_idx, weights, scales, out, out_idx, out_weights, out_scales, capacity, local_experts
    )
    tables = NodeTables(in_rank, passes, pass_rows.to(tl.int64), counts)
    if (has_failed(context) == 0) & (peek(state + W_OPEN) == 1):
        program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
        move_nodes(
            context,
            state,
            program,
            programs,
            tensors,
            tables,
            RowShape(KIND, WORDS, TOPK, SLOTS, SCALE_WORDS, SCALES, ROWS, BLOCK),
            HIDDEN,
            DTYPE,
            BACKEND,
        )


@kernel(do_not_specialize=[*UNALIGNED_NODES, "marks", "room"])
def finish_nodes(
    context: tl.int64,
    state: tl.int64,
    x: tl.int64,
    lists: tl.int64,
    tokens: tl.int64,
    topk_idx: tl.int64,
    weights: tl.int64,
    scales: tl.int64,
    out: tl.int64,
    out_idx: tl.int64,
    out_weights: tl.int64,
    out_scales: tl.int64,
    capacity: tl.int64,
    local_experts: tl.int64,
    in_rank: tl.int64,
    passes: tl.int64,
    pass_rows: tl.int64,
    counts: tl.int64,
    marks: tl.int64,
    room: tl.int64,
    KIND: tl.constexpr,
    HIDDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    WORDS: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PATIENCE: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """End the exchange; grid (1,), one warp. Compile without fused multiply-add.

    Like :func:`.normal_finish.finish`: arguments of :func:`move_node_rows`, and ``marks`` and
    ``room`` of :func:`.normal_relay.list_passed`.
    """
    tokens, capacity, local_experts = tokens.to(tl.int64), capacity.to(tl.int64), local_experts.to(tl.int64)
    pass_rows, room = pass_rows.to(tl.int64), room.to(tl.int64)
    tensors = RowTensors(
        x, lists, tokens, topk_idx, weights, scales, out, out_idx, out_weights, out_scales, capacity, local_experts
    )
    tables = NodeTables(in_rank, passes, pass_rows, counts)
    if (has_failed(context) == 0) & (peek(state + W_OPEN) != 0):
        one = tl.full((), 1, tl.int64)
        going = (peek(state + W_OPEN) == 1).to(tl.int32)
        late = tl.full((), 0, tl.int64)
        # rule: the last kernel takes the steps that the host has not launched
        while going != 0:
            going = run_node_step(context, state, counts, KIND == _COMBINE, PATIENCE, LANES, BACKEND)
            late += going
            if going != 0:
                if KIND != _COMBINE:
                    for far in range(rank_count(context)):
                        if is_live(context, far) & is_far(context, state, far):
                            list_far(context, state, far, passes, pass_rows, marks, room, 2 * TOPK + SCALE_WORDS, LANES)
                    settle(BACKEND)
                move_nodes(
                    context,
                    state,
                    one - 1,
                    one,
                    tensors,
                    tables,
                    RowShape(KIND, WORDS, TOPK, SLOTS, SCALE_WORDS, SCALES, ROWS, BLOCK),
                    HIDDEN,
                    DTYPE,
                    BACKEND,
                )
                settle(BACKEND)
        if has_failed(context) == 0:
            close(context, state, late, KIND, LANES, BACKEND)
