"""Rows and their meta: packed for the peers and unpacked from where they landed, by many programs.

What is moved in a turn stands in the state block (``normal_advance``); programs share it row by row. A row goes
straight to its place in the window of a mapped peer, for a proxied one into the staging. Arrived rows are copied from
the landing area to the outputs: these are tensors of the caller's allocator, that no peer ever writes. Meta is laid out
as in :mod:`..cpu.normal_rows`: int32 local experts, float32 weights, scales (dispatch), float32 weights (combine),
zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.message import NormalNotify
from .context import has_failed, own_rank, peer_window, rank_count, window_address
from .normal_blocks import (
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
    W_STAGING,
    entry,
)
from .normal_nodes import is_far, mark_bytes
from .normal_tensors import UNALIGNED, RowShape, RowTensors
from .words import aligned, int32s, int64s, peek, uint8s

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
            # what goes with the rows is asked for before them: a program waits once for all of it
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
        row_at = window_address(context) + _of(context, state, N_ROW_LANDING, peer)
        meta_at = window_address(context) + _of(context, state, N_META_LANDING, peer)
        base = _of(context, state, N_RECV_FIRST, peer)
        word, slot = tl.arange(0, shape.BLOCK)[None, :], tl.arange(0, shape.SLOTS)[None, :]
        for first in range(begin + program * shape.ROWS, end, programs * shape.ROWS):
            index = first + tl.arange(0, shape.ROWS).to(tl.int64)
            turn_of = index // slot_rows
            within = index - turn_of * slot_rows
            landed = row_at + (turn_of & 1) * stride + within * (4 * shape.WORDS)
            landed_meta = meta_at + (turn_of & 1) * stride + within * meta
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
                    # the program that fails must be of one warp: the next turn does
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
    """Program ``program`` of ``programs``: its part of all rows of the turn."""
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
@triton.jit(do_not_specialize=UNALIGNED)
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
    """Pack and unpack what :func:`.normal_advance.advance` has chosen; any grid of one dimension.

    Args:
        x ... local_experts: see :class:`.normal_tensors.RowTensors`.
        KIND ... BLOCK: see :class:`.normal_tensors.RowShape`.
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
