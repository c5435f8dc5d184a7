"""Rows and their meta: packed for the peers, unpacked from where they landed, and summed, by many programs.

What is moved in a step stands in the state block (``normal_step``); programs share it row by row. A row goes straight
to its place in the window of a mapped peer, for a proxied one into the staging. Arrived rows are copied from the
landing area to the outputs: these are tensors of the caller's allocator, that no peer ever writes. Meta is laid out
as in :mod:`..cpu.normal_rows`: int32 local experts, float32 weights, scales (dispatch), float32 weights (combine),
zeros.

A token of a combine is the sum of the rows that its ranks have sent back, in ascending order of ranks, in float32,
rounded once: the same sum as in :mod:`..cpu.normal_receive`, bit by bit. Rows of several ranks are loaded before the
first is added: a program waits twice for all of them, for their places and for themselves, where one rank after the
other would be two waits each. So nothing in that part of the loop is a branch.

A kernel has each tensor as a parameter, since that is what a launch gives; inside, they travel together. A
:class:`RowShape` is passed where it is made: Triton makes values of constants that are assigned to a variable.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ...protocol.message import DTYPE_F32, NormalNotify
from .blocks import (
    N_CONSUMED,
    N_GRANT_CHUNK,
    N_GRANT_META,
    N_GRANT_ROW,
    N_META_LANDING,
    N_PACK_ROWS,
    N_READY,
    N_RECV_FIRST,
    N_ROW_LANDING,
    N_SEND_FIRST,
    N_SENT,
    N_SENT_CHUNKS,
    N_SLOT_ROWS,
    N_SLOT_STRIDE,
    W_BAD_PEER,
    W_CHUNK_BYTES,
    W_DEPTH,
    W_IN_HEAP,
    W_META_BYTES,
    W_NODE_RANKS,
    W_OPEN,
    W_RAN,
    W_STAGING,
    entry,
    entry_among,
)
from .context import (
    has_failed,
    landing_among,
    landing_table,
    landing_window,
    mask_address,
    own_rank,
    peer_window,
    rank_count,
    window_address,
)
from .kernel import kernel
from .normal_nodes import is_far, mark_bytes
from .quant import load_floats, load_together, store_floats
from .words import aligned, floats, int32s, int64s, peek, uint8s

#: Arguments that differ from call to call, or that a caller need not align: one compiled kernel for all of them.
UNALIGNED = [
    "lists",
    "tokens",
    "topk_idx",
    "weights",
    "scales",
    "out_idx",
    "out_weights",
    "out_scales",
    "capacity",
    "local_experts",
]
#: The same of kernels between nodes.
UNALIGNED_NODES = [*UNALIGNED, "in_rank", "passes", "pass_rows", "counts"]


class RowTensors(NamedTuple):
    """Addresses of the caller's tensors, and how much they hold; int64.

    Attributes:
        x: [tokens, WORDS x 4 bytes], rows of a dispatch; of a combine [received rows, …]. On a multiple of 16.
        lists: int32[ranks, tokens], tokens for each rank (dispatch).
        tokens: rows of x.
        topk_idx: int64[tokens, TOPK]. weights: float32, as many, or [received rows, TOPK]. scales: [tokens,
            SCALE_WORDS x 4 bytes].
        out: rows of ``capacity``, on a multiple of 16; likewise out_idx int64, out_weights float32, out_scales. In a
            combine: where rows are gathered that do not stay in the heap.
        local_experts: experts per rank.
    """

    x: tl.tensor
    lists: tl.tensor
    tokens: tl.tensor
    topk_idx: tl.tensor
    weights: tl.tensor
    scales: tl.tensor
    out: tl.tensor
    out_idx: tl.tensor
    out_weights: tl.tensor
    out_scales: tl.tensor
    capacity: tl.tensor
    local_experts: tl.tensor


class NodeTables(NamedTuple):
    """Addresses of what an exchange between nodes needs besides; int64.

    Attributes:
        in_rank: uint8[tokens, ranks], which ranks a token of a dispatch goes to.
        passes: int32[ranks, pass_rows], of :func:`.normal_relay.list_passed` (dispatch).
        counts: of :func:`.normal_relay.count_marks` (combine).
    """

    in_rank: tl.tensor
    passes: tl.tensor
    pass_rows: tl.tensor
    counts: tl.tensor


class RowShape(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        KIND: of the operation.
        WORDS: of 4 bytes in a row.
        TOPK, SCALE_WORDS: of a row; SLOTS, SCALES: rounded up to powers of two, at least 1.
        ROWS: moved together. BLOCK: words, or values that are summed, likewise.
    """

    KIND: tl.constexpr
    WORDS: tl.constexpr
    TOPK: tl.constexpr
    SLOTS: tl.constexpr
    SCALE_WORDS: tl.constexpr
    SCALES: tl.constexpr
    ROWS: tl.constexpr
    BLOCK: tl.constexpr


_COMBINE = tl.constexpr(NormalNotify.OPERATION_COMBINE)


@triton.jit
def _of(context: tl.tensor, state: tl.tensor, table: tl.tensor, peer: tl.tensor) -> tl.tensor:
    """One peer's entry of a table."""
    return peek(entry(context, state, table, peer))


@triton.jit
def copy_rows(source: tl.tensor, target: tl.tensor, inside: tl.tensor, words: tl.tensor, shape: RowShape) -> None:
    """Rows of WORDS int32 from addresses ``source`` to addresses ``target``, both [rows] and multiples of 16."""
    for first in range(0, shape.WORDS, shape.BLOCK):
        word = first + words
        here = inside[:, None] & (word < shape.WORDS)
        part = tl.load(aligned(source, tl.int32)[:, None] + word, mask=here, other=0)
        tl.store(aligned(target, tl.int32)[:, None] + word, part, mask=here)


@triton.jit
def load_scales(addresses: tl.tensor, inside: tl.tensor, shape: RowShape) -> tl.tensor:
    """Words of the scales at ``addresses`` [rows]."""
    place = tl.arange(0, shape.SCALES)[None, :]
    return tl.load(int32s(addresses[:, None] + 4 * place), mask=inside[:, None] & (place < shape.SCALE_WORDS), other=0)


@triton.jit
def store_scales(addresses: tl.tensor, scales: tl.tensor, inside: tl.tensor, shape: RowShape) -> None:
    """Store them."""
    place = tl.arange(0, shape.SCALES)[None, :]
    tl.store(int32s(addresses[:, None] + 4 * place), scales, mask=inside[:, None] & (place < shape.SCALE_WORDS))


@triton.jit
def _meta_of(
    token: tl.tensor,
    inside: tl.tensor,
    first_expert: tl.tensor,
    experts: tl.tensor,
    tensors: RowTensors,
    shape: RowShape,
) -> tl.tensor:
    """(local experts or -1 as int64, bits of the weights or 0) of tokens for the rank whose experts begin there."""
    slot = tl.arange(0, shape.SLOTS)[None, :]
    given = inside[:, None] & (slot < shape.TOPK)
    at = token[:, None] * shape.TOPK + slot
    expert = tl.load(int64s(tensors.topk_idx + 8 * at), mask=given, other=-1) - first_expert
    here = given & (expert >= 0) & (expert < experts)
    # not only where it is wanted, which is known a wait later
    weight = tl.load(int32s(tensors.weights + 4 * at), mask=given, other=0)
    return tl.where(here, expert, -1), tl.where(here, weight, 0)


@triton.jit
def pack(
    context: tl.tensor,
    state: tl.tensor,
    peer: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    tensors: RowTensors,
    in_rank: tl.tensor,
    shape: RowShape,
    NODES: tl.constexpr,
) -> None:
    """Pack this program's part of the batch for ``peer``, or of this rank's own rows: these go to the outputs.

    With ``NODES`` a row of a dispatch for a far peer has the ids that the peer's node counts for its experts, and
    behind its scales the marks of the ranks of that node that ``in_rank``, uint8[tokens, ranks], says get it.
    """
    rows = _of(context, state, N_PACK_ROWS, peer)
    if rows > 0:
        meta = peek(state + W_META_BYTES)
        own = peer == own_rank(context)
        done = _of(context, state, N_SENT, peer)
        window = peer_window(context, peer)
        row_at, meta_at = _of(context, state, N_GRANT_ROW, peer), _of(context, state, N_GRANT_META, peer)
        chunk = tl.maximum(_of(context, state, N_GRANT_CHUNK, peer), 1)
        depth, chunk_bytes = peek(state + W_DEPTH), peek(state + W_CHUNK_BYTES)
        sent_chunks = _of(context, state, N_SENT_CHUNKS, peer)
        staging = window_address(context) + peek(state + W_STAGING) + peer * depth * chunk_bytes
        send_first = _of(context, state, N_SEND_FIRST, peer)
        base = _of(context, state, N_RECV_FIRST, peer)
        word, slot = tl.arange(0, shape.BLOCK)[None, :], tl.arange(0, shape.SLOTS)[None, :]
        first_expert, experts = peer * tensors.local_experts, tensors.local_experts
        if NODES:
            if is_far(context, state, peer):
                size = peek(state + W_NODE_RANKS)
                first_expert, experts = peer // size * size * tensors.local_experts, size * tensors.local_experts
        if shape.KIND != _COMBINE:
            listed = tensors.lists + 4 * (peer * tensors.tokens + done)
        for first in range(program * shape.ROWS, rows, programs * shape.ROWS):
            index = first + tl.arange(0, shape.ROWS).to(tl.int64)
            inside = index < rows
            if shape.KIND == _COMBINE:
                token = send_first + done + index
                # of a dispatch that received more than was promised, the rest is not there
                inside = inside & (token < tensors.tokens)
            else:
                token = tl.load(int32s(listed + 4 * index), mask=inside, other=0).to(tl.int64)
            at = index // chunk
            stage = staging + (sent_chunks + at) % depth * chunk_bytes
            within = index - at * chunk
            stage_meta = stage + tl.minimum(chunk, rows - at * chunk) * (4 * shape.WORDS) + within * meta
            target = tl.where(
                window != 0, window + row_at + index * (4 * shape.WORDS), stage + within * (4 * shape.WORDS)
            )
            target_meta = tl.where(window != 0, window + meta_at + index * meta, stage_meta)
            if own:
                inside = inside & (base + index < tensors.capacity)
                target = tensors.out + (base + index) * (4 * shape.WORDS)
            # what goes with the rows is loaded before them: a program waits once for all of it
            if shape.KIND == _COMBINE:
                if shape.TOPK > 0:
                    bits = tl.load(
                        int32s(tensors.weights + 4 * (token[:, None] * shape.TOPK + slot)),
                        mask=inside[:, None] & (slot < shape.TOPK),
                        other=0,
                    )
            else:
                if shape.TOPK > 0:
                    expert, bits = _meta_of(token, inside, first_expert, experts, tensors, shape)
                if shape.SCALE_WORDS > 0:
                    scales = load_scales(tensors.scales + 4 * token * shape.SCALE_WORDS, inside, shape)
            copy_rows(tensors.x + token * (4 * shape.WORDS), target, inside, word, shape)
            if shape.KIND == _COMBINE:
                if shape.TOPK > 0:
                    there = inside[:, None] & (4 * slot < meta)
                    tl.store(int32s(target_meta[:, None] + 4 * slot), bits, mask=there)
                    _pad(target_meta, inside, shape.SLOTS, meta)
            else:
                if shape.TOPK > 0:
                    given = inside[:, None] & (slot < shape.TOPK)
                    if own:
                        row = (base + index)[:, None] * shape.TOPK + slot
                        tl.store(int64s(tensors.out_idx + 8 * row), expert, mask=given)
                        tl.store(int32s(tensors.out_weights + 4 * row), bits, mask=given)
                    else:
                        tl.store(int32s(target_meta[:, None] + 4 * slot), expert.to(tl.int32), mask=given)
                        tl.store(int32s(target_meta[:, None] + 4 * (shape.TOPK + slot)), bits, mask=given)
                if shape.SCALE_WORDS > 0:
                    at_scales = target_meta + 8 * shape.TOPK
                    if own:
                        at_scales = tensors.out_scales + 4 * (base + index) * shape.SCALE_WORDS
                    store_scales(at_scales, scales, inside, shape)
                if NODES:
                    if own == 0:
                        _mark(
                            context,
                            state,
                            peer,
                            token,
                            target_meta,
                            inside,
                            in_rank,
                            2 * shape.TOPK + shape.SCALE_WORDS,
                        )
                elif (shape.TOPK > 0) | (shape.SCALE_WORDS > 0):
                    if own == 0:
                        _pad(target_meta, inside, 2 * shape.TOPK + shape.SCALE_WORDS, meta)


@triton.jit
def _pad(target: tl.tensor, inside: tl.tensor, used: tl.tensor, meta: tl.tensor) -> None:
    """Zeros after the ``used`` words of a meta, fewer than four."""
    place = used + tl.arange(0, 4)[None, :]
    zero = tl.zeros([target.shape[0], 4], tl.int32)
    tl.store(int32s(target[:, None] + 4 * place), zero, mask=inside[:, None] & (4 * place < meta))


@triton.jit
def pad(target: tl.tensor, inside: tl.tensor, used: tl.tensor, meta: tl.tensor) -> None:
    """Zeros after the ``used`` words of a meta, however many."""
    zero = tl.zeros([target.shape[0]], tl.int32)
    for word in range(used, meta // 4):
        tl.store(int32s(target + 4 * word), zero, mask=inside)


@triton.jit
def _mark(
    context: tl.tensor,
    state: tl.tensor,
    peer: tl.tensor,
    token: tl.tensor,
    target: tl.tensor,
    inside: tl.tensor,
    in_rank: tl.tensor,
    USED: tl.constexpr,
) -> None:
    """After the USED words of the metas for ``peer``: a bit for each rank of its node that gets the row, where that is
    another node; then zeros."""
    used = tl.full((), USED, tl.int64)
    if is_far(context, state, peer):
        ranks, size = rank_count(context), peek(state + W_NODE_RANKS)
        marks = in_rank + token * ranks + peer // size * size
        bit = tl.arange(0, 32)[None, :]
        for word in range((mark_bytes(state) + 3) // 4):
            place = 32 * word + bit
            wanted = inside[:, None] & (place < size)
            marked = tl.load(uint8s(marks[:, None] + place), mask=wanted, other=0) != 0
            bits = tl.sum(marked.to(tl.int32) << bit, axis=1)
            tl.store(int32s(target + 4 * (USED + word)), bits, mask=inside)
        used += (mark_bytes(state) + 3) // 4
    pad(target, inside, used, peek(state + W_META_BYTES))


@triton.jit
def unpack(
    context: tl.tensor,
    state: tl.tensor,
    peer: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    tensors: RowTensors,
    shape: RowShape,
) -> None:
    """Bring this program's part of the rows that have arrived from ``peer`` to the outputs; those of a combine in
    rounds to ``out`` and ``out_weights``, by peer and row."""
    begin, end = _of(context, state, N_CONSUMED, peer), _of(context, state, N_READY, peer)
    if begin < end:
        meta = peek(state + W_META_BYTES)
        slot_rows = tl.maximum(_of(context, state, N_SLOT_ROWS, peer), 1)
        stride = _of(context, state, N_SLOT_STRIDE, peer)
        window = landing_window(context, peer)
        row_at = window + _of(context, state, N_ROW_LANDING, peer)
        meta_at = window + _of(context, state, N_META_LANDING, peer)
        base = _of(context, state, N_RECV_FIRST, peer)
        word, slot = tl.arange(0, shape.BLOCK)[None, :], tl.arange(0, shape.SLOTS)[None, :]
        for first in range(begin + program * shape.ROWS, end, programs * shape.ROWS):
            index = first + tl.arange(0, shape.ROWS).to(tl.int64)
            grant = index // slot_rows
            within = index - grant * slot_rows
            landed = row_at + (grant & 1) * stride + within * (4 * shape.WORDS)
            landed_meta = meta_at + (grant & 1) * stride + within * meta
            row = base + index
            inside = (index < end) & (row < tensors.capacity)
            given = inside[:, None] & (slot < shape.TOPK)
            # before the rows, as in pack
            if shape.TOPK > 0:
                if shape.KIND == _COMBINE:
                    bits = tl.load(int32s(landed_meta[:, None] + 4 * slot), mask=given, other=0)
                else:
                    expert = tl.load(int32s(landed_meta[:, None] + 4 * slot), mask=given, other=-1).to(tl.int64)
                    bits = tl.load(int32s(landed_meta[:, None] + 4 * (shape.TOPK + slot)), mask=given, other=0)
            if shape.SCALE_WORDS > 0:
                scales = load_scales(landed_meta + 8 * shape.TOPK, inside, shape)
            copy_rows(landed, tensors.out + row * (4 * shape.WORDS), inside, word, shape)
            if shape.TOPK > 0:
                place = row[:, None] * shape.TOPK + slot
                if shape.KIND != _COMBINE:
                    wrong = (expert < -1) | (expert >= tensors.local_experts)
                    # the program that fails must be of one warp: the next step does
                    blame = int64s(state + W_BAD_PEER + tl.zeros_like(expert))
                    tl.store(blame, peer + 1 + tl.zeros_like(expert), mask=wrong)
                    tl.store(int64s(tensors.out_idx + 8 * place), tl.where(wrong, -1, expert), mask=given)
                tl.store(int32s(tensors.out_weights + 4 * place), bits, mask=given)
            if shape.SCALE_WORDS > 0:
                store_scales(tensors.out_scales + 4 * row * shape.SCALE_WORDS, scales, inside, shape)


@triton.jit
def move(
    context: tl.tensor, state: tl.tensor, program: tl.tensor, programs: tl.tensor, tensors: RowTensors, shape: RowShape
) -> None:
    """Program ``program`` of ``programs``: its part of all rows of the step."""
    ranks, me = rank_count(context), own_rank(context)
    for step in range(0, ranks):
        # not all ranks write to the same peer first, nor all programs, when there are few rows for each
        peer = (me + step) % ranks
        part = (program + step * 7) % programs
        pack(context, state, peer, part, programs, tensors, 0, shape, False)
    if (shape.KIND != _COMBINE) | (peek(state + W_IN_HEAP) == 0):
        for step in range(1, ranks):
            peer = (me + step) % ranks
            part = (program + step * 7) % programs
            unpack(context, state, peer, part, programs, tensors, shape)


# any number of tokens with the same compiled code
@kernel(do_not_specialize=UNALIGNED)
def move_rows(
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
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Pack and unpack what :func:`.normal_step.advance` has chosen; any grid of one dimension.

    Args:
        x ... local_experts: see :class:`RowTensors`.
        KIND ... BLOCK: see :class:`RowShape`.
    """
    tokens, capacity, local_experts = tokens.to(tl.int64), capacity.to(tl.int64), local_experts.to(tl.int64)
    tensors = RowTensors(
        x, lists, tokens, topk_idx, weights, scales, out, out_idx, out_weights, out_scales, capacity, local_experts
    )
    if (has_failed(context) == 0) & (peek(state + W_OPEN) == 1):
        program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
        move(
            context,
            state,
            program,
            programs,
            tensors,
            RowShape(KIND, WORDS, TOPK, SLOTS, SCALE_WORDS, SCALES, ROWS, BLOCK),
        )


@triton.jit
def add_rows(total: tl.tensor, found: tl.tensor, part: tl.tensor, here: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Add values ``part`` [rows, columns] of the rows that are ``here`` [rows], without a branch.

    Returns:
        ``total`` [rows, columns] and ``found`` [rows], how many rows were added, with them.
    """
    # rule: a node sums in float32 and rounds once
    added = total + part
    # the first row is taken as it is: adding it to zero would lose the sign of a zero
    total = tl.where(here[:, None], tl.where((found > 0)[:, None], added, part), total)
    return total, found + here.to(tl.int32)


_F32 = tl.constexpr(DTYPE_F32)
#: More rows than there are.
_EVERY = tl.constexpr(1 << 62)


class _Combined(NamedTuple):
    """What all programs of a sum read first, scalars.

    Attributes:
        ranks, me: of the group. received: rows of this rank's experts.
        places: see :func:`reduce_rows`. masked: see :func:`.block_access.mask_address`.
        in_heap: rows of other ranks are summed where they landed. landings: see :func:`.context.landing_table`.
        meta: bytes of a row's.
    """

    ranks: tl.tensor
    me: tl.tensor
    received: tl.tensor
    places: tl.tensor
    masked: tl.tensor
    in_heap: tl.tensor
    landings: tl.tensor
    meta: tl.tensor


@triton.jit
def _combined(state: tl.tensor, combined: _Combined, table: tl.constexpr, rank: tl.tensor) -> tl.tensor:
    """One rank's entry of a table."""
    return peek(entry_among(combined.ranks, state, table, rank))


@triton.jit
def _row_of(
    state: tl.tensor, combined: _Combined, index: tl.tensor, token: tl.tensor, inside: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(rank, row of each ``token`` [rows] among those of that rank, True where there is one). Nothing is there beyond
    the last rank."""
    rank = tl.minimum(combined.ranks - 1, index)
    # of a rank that was lost since the dispatch nothing has come
    live = (combined.ranks > index) & (tl.load(int32s(combined.masked + 4 * rank)) == 0)
    place = tl.load(int32s(combined.places + 4 * (token * combined.ranks + rank))).to(tl.int64)
    place = tl.where(live, place, -1)
    # of a dispatch that received more than was promised, the rest is not there
    own = rank == combined.me
    row = place + tl.where(own, _combined(state, combined, N_SEND_FIRST, rank), 0)
    here = inside & (place >= 0) & (row < tl.where(own, combined.received, _EVERY))
    return rank, tl.where(here, row, 0), here


@triton.jit
def _sum_values(
    state: tl.tensor,
    combined: _Combined,
    x: tl.tensor,
    gathered: tl.tensor,
    token: tl.tensor,
    inside: tl.tensor,
    value: tl.tensor,
    wanted: tl.tensor,
    HIDDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    TOGETHER: tl.constexpr,
    BACKEND: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(sums [rows, values] of the rows of each ``token``, how many rows those were)."""
    row_bytes: tl.constexpr = HIDDEN * (4 if DTYPE == _F32 else 2)
    total = tl.zeros(wanted.shape, tl.float32)
    found = tl.zeros(token.shape, tl.int32)
    for begin in range(0, combined.ranks, TOGETHER):
        sources, there = (), ()
        for step in tl.static_range(TOGETHER):
            rank, row, here = _row_of(state, combined, begin + step, token, inside)
            landed = landing_among(combined.landings, rank) + _combined(state, combined, N_ROW_LANDING, rank)
            kept = gathered + _combined(state, combined, N_RECV_FIRST, rank) * row_bytes
            source = tl.where(rank == combined.me, x, tl.where(combined.in_heap, landed, kept))
            sources += (source + row * row_bytes,)  # type: ignore[assignment]
            there += (here,)  # type: ignore[assignment]
        parts = load_together(sources, there, value, wanted, DTYPE, TOGETHER, BACKEND)
        for step in tl.static_range(TOGETHER):
            total, found = add_rows(total, found, parts[step], there[step])
    return total, found


@triton.jit
def _sum_weights(
    state: tl.tensor,
    combined: _Combined,
    weights: tl.tensor,
    gathered_weights: tl.tensor,
    token: tl.tensor,
    inside: tl.tensor,
    slot: tl.tensor,
    TOPK: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> tl.tensor:
    """Sums [rows, slots] of the weights that came with the rows of each ``token``."""
    total = tl.zeros([token.shape[0], slot.shape[1]], tl.float32)
    for begin in range(0, combined.ranks, TOGETHER):
        for step in tl.static_range(TOGETHER):
            rank, row, here = _row_of(state, combined, begin + step, token, inside)
            landed = landing_among(combined.landings, rank) + _combined(state, combined, N_META_LANDING, rank)
            kept = gathered_weights + _combined(state, combined, N_RECV_FIRST, rank) * (4 * TOPK)
            own = rank == combined.me
            source = tl.where(own, weights, tl.where(combined.in_heap, landed, kept))
            source += row * tl.where(combined.in_heap & (own == 0), combined.meta, 4 * TOPK)
            total += tl.load(floats(source[:, None] + 4 * slot), mask=here[:, None] & (slot < TOPK), other=0.0)
    return total


# any number of tokens with the same compiled code
@kernel(
    do_not_specialize=[
        "received",
        "weights",
        "places",
        "tokens",
        "gathered",
        "gathered_weights",
        "bias_0",
        "bias_1",
        "out_weights",
    ]
)
def reduce_rows(
    context: tl.int64,
    state: tl.int64,
    x: tl.int64,
    received: tl.int64,
    weights: tl.int64,
    places: tl.int64,
    tokens: tl.int64,
    gathered: tl.int64,
    gathered_weights: tl.int64,
    bias_0: tl.int64,
    bias_1: tl.int64,
    out: tl.int64,
    out_weights: tl.int64,
    HIDDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    BIASES: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Sum the rows of a combine that is over; any grid (programs, ceil(HIDDEN / BLOCK)), with a column more for the
    weights where TOPK is not 0. Compile without fused multiply-add. A token without rows is zero, and where the rows
    were not exchanged every token is.

    Args:
        x, weights: rows of this rank's experts, [received, HIDDEN] of DTYPE and float32[received, TOPK].
        places: int32[tokens, ranks], place of the token in the list of the rank, or -1.
        gathered, gathered_weights: rows of the other ranks, where they did not stay in the heap.
        bias_0, bias_1: [tokens, HIDDEN], BIASES of them are added.
        out: [tokens, HIDDEN] of DTYPE. out_weights: float32[tokens, TOPK].
        TOGETHER: ranks whose rows are loaded together. ROWS: tokens likewise; BLOCK: values of a row.
    """
    tokens, ranks = tokens.to(tl.int64), rank_count(context)
    row_bytes: tl.constexpr = HIDDEN * (4 if DTYPE == _F32 else 2)
    ran = (has_failed(context) == 0) & (peek(state + W_RAN) != 0)
    in_heap, meta, landings = peek(state + W_IN_HEAP) != 0, peek(state + W_META_BYTES), landing_table(context)
    me, masked = own_rank(context), mask_address(context)
    combined = _Combined(ranks, me, received.to(tl.int64), places, masked, in_heap, landings, meta)
    column = tl.program_id(1)
    value, slot = column * BLOCK + tl.arange(0, BLOCK)[None, :], tl.arange(0, SLOTS)[None, :]
    for first in range(tl.program_id(0).to(tl.int64) * ROWS, tokens, tl.num_programs(0).to(tl.int64) * ROWS):
        index = first + tl.arange(0, ROWS).to(tl.int64)
        inside, token = index < tokens, tl.minimum(index, tokens - 1)
        if column * BLOCK < HIDDEN:
            wanted = inside[:, None] & (value < HIDDEN)
            total = tl.zeros([ROWS, BLOCK], tl.float32)
            if ran:
                total, found = _sum_values(
                    state, combined, x, gathered, token, inside, value, wanted, HIDDEN, DTYPE, TOGETHER, BACKEND
                )
                if BIASES > 0:
                    part = load_floats(bias_0 + token * row_bytes, value, wanted, DTYPE)
                    total = tl.where((found > 0)[:, None], total + part, part)
                if BIASES > 1:
                    total += load_floats(bias_1 + token * row_bytes, value, wanted, DTYPE)
            store_floats(out + token * row_bytes, value, total, wanted, DTYPE, BACKEND)
        elif TOPK > 0:
            factors = tl.zeros([ROWS, SLOTS], tl.float32)
            if ran:
                factors = _sum_weights(state, combined, weights, gathered_weights, token, inside, slot, TOPK, TOGETHER)
            given = inside[:, None] & (slot < TOPK)
            tl.store(floats(out_weights + 4 * (token[:, None] * TOPK + slot)), factors, mask=given)
