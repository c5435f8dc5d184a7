"""Normal dispatch: a program for each channel sends the tokens of its channel, forwards and receives rows, in turns.

Nobody waits for another program of the same launch but for program 0, which opens the operation: channel c of a rank
needs only channel c of its peers, so that it does not matter how many programs run at a time. Rows of a peer are always
taken out of their pipes, whatever else waits: that is why a dispatch ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from .blocks import N, W
from .kernel import kernel
from .normal_notify import Opening
from .normal_open import await_opened, first_token, open_operation
from .normal_pipes import STEP, Channel, as_long, channel_of, entry, get, mark_stride, node_of, turn_marks
from .normal_rows import (
    Marks,
    RowShape,
    copy_rows,
    load_words,
    nth_pipe_of,
    nth_way,
    pad,
    pipes_of_tokens,
    plan_rows,
    row_address,
    settle_plan,
    store_words,
    ways_each,
)
from .normal_turns import GOING, begin_turn, end_kernel, end_turn, end_turns
from .words import aligned, clock_ns, int32s, int64s, poke, program_number, uint8s

#: With so many rows, the most that compiled code moves together, a second set of addresses would spill. Otherwise the
#: next addresses are loaded before these rows are stored.
_CROWDED = tl.constexpr(8)


@dataclass(frozen=True, kw_only=True, repr=False)
class DispatchShape(RowShape):
    """What :func:`dispatch_rows` is compiled for.

    Attributes:
        SCALE_WORDS: of a row; SCALES: rounded up to a power of two, at least 1.
    """

    SCALE_WORDS: int
    SCALES: int


class Tensors(NamedTuple):
    """Addresses of the caller's tensors, and how much they hold; int64.

    Attributes:
        x: [tokens, WORDS x 4 bytes], on a multiple of 16. in_rank: uint8[tokens, ranks]. tokens: of this rank.
        topk_idx: int64[tokens, TOPK]. weights: float32, as many. scales: [tokens, SCALE_WORDS x 4 bytes].
        out: rows of ``capacity``, on a multiple of 16; likewise out_idx int64, out_weights float32, out_scales.
        local_experts: experts per rank. meta: bytes of a row's.
        marks: uint8[kept, mark bytes], for which ranks of its node each row was that this rank forwards, written; 0
            where a handle has them. kept: rows that there is room for.
    """

    x: tl.tensor
    in_rank: tl.tensor
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
    meta: tl.tensor
    marks: tl.tensor
    kept: tl.tensor


class Rows(NamedTuple):
    """Rows of a plan that are sent together.

    Attributes:
        index: in the plan. inside: there is such a row. many: pipes that it passes. source: its address.
        expert, weight, scale: its meta, [rows, any]; 0 where rows have none.
    """

    index: tl.tensor
    inside: tl.tensor
    many: tl.tensor
    source: tl.tensor
    expert: tl.tensor
    weight: tl.tensor
    scale: tl.tensor


@triton.jit
def _store_meta(
    target: tl.tensor, here: tl.tensor, rows: Rows, first_expert: tl.tensor, experts: tl.tensor, shape: tl.constexpr
) -> None:
    """Meta of rows for ranks, or nodes, with ``experts`` experts from ``first_expert`` on, [rows, 1]; ids of others are
    -1."""
    if shape.TOPK > 0:
        local = rows.expert - first_expert
        local = tl.where((local >= 0) & (local < experts), local, -1)
        store_words(target, local.to(tl.int32), here, shape.TOPK, shape.SLOTS)
        bits = tl.where(local >= 0, rows.weight, 0)
        store_words(target + 4 * shape.TOPK, bits, here, shape.TOPK, shape.SLOTS)
    if shape.SCALE_WORDS > 0:
        store_words(target + 8 * shape.TOPK, rows.scale, here, shape.SCALE_WORDS, shape.SCALES)


@triton.jit
def _store_marks(
    one: Channel, tensors: Tensors, node: tl.tensor, token: tl.tensor, target: tl.tensor, here: tl.tensor
) -> tl.tensor:
    """A bit for each rank of ``node`` [rows] that gets the token, at ``target`` [rows]; how many words those are."""
    at = tensors.in_rank + token * one.ranks + node * one.size
    bit = tl.arange(0, 32)[None, :]
    words = (one.size + 31) // 32
    for word in range(words):
        place = 32 * word + bit
        wanted = here[:, None] & (place < one.size)
        marked = tl.load(uint8s(at[:, None] + place), mask=wanted, other=0) != 0
        bits = tl.sum(marked.to(tl.int32) << bit, axis=1)
        tl.store(int32s(target + 4 * word), bits, mask=here)
    return words


@triton.jit
def _spread(
    one: Channel,
    tensors: Tensors,
    rows: Rows,
    base: tl.tensor,
    token: tl.tensor,
    shape: tl.constexpr,
    RAILS: tl.constexpr,
) -> None:
    """Copy rows into all pipes that they pass, each loaded once, with their meta: ids count from the experts of rank
    ``base`` on. With RAILS some pipes are rails; the rows are tokens ``token``."""
    used: tl.constexpr = 2 * shape.TOPK + shape.SCALE_WORDS
    ahead: tl.constexpr = shape.ROWS != _CROWDED
    for first in range(0, shape.WORDS, shape.BLOCK):
        word = first + tl.arange(0, shape.BLOCK)[None, :]
        within = word < shape.WORDS
        _, target = nth_way(one, rows.index, rows.many, 0)
        part = tl.load(aligned(rows.source, tl.int32)[:, None] + word, mask=rows.inside[:, None] & within, other=0)
        for nth in range(tl.max(rows.many, axis=0)):
            here = nth < rows.many
            if ahead:
                # where they go next is on its way while they are stored here
                _, after = nth_way(one, rows.index, rows.many, nth + 1)
            tl.store(aligned(target, tl.int32)[:, None] + word, part, mask=here[:, None] & within)
            if first == 0:
                meta, near, pipe = target + 4 * shape.WORDS, here, nth_pipe_of(one, rows.index, here, nth)
                first_expert, experts = (pipe - base) * tensors.local_experts, tensors.local_experts
                if RAILS:
                    crossing = here & (pipe >= one.ranks)
                    near = here & (pipe < one.ranks)
                    node = tl.where(crossing, pipe - one.ranks, 0)
                    experts = tl.where(crossing, one.size, 1) * tensors.local_experts
                    first_expert = tl.where(crossing, node * experts, first_expert)
                    experts = experts[:, None]
                _store_meta(meta, here, rows, first_expert[:, None], experts, shape)
                pad(meta, near, used, tensors.meta)
                if RAILS:
                    marked = _store_marks(one, tensors, node, token, meta + 4 * used, crossing)
                    pad(meta, crossing, used + marked, tensors.meta)
            if not ahead:
                _, after = nth_way(one, rows.index, rows.many, nth + 1)
            target = after


@triton.jit
def _send(one: Channel, tensors: Tensors, token: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Put the next tokens from ``token`` on into the pipes of their ranks: how many were put."""
    end = first_token(tensors.tokens, one.index + 1, one.channels)
    pipes = pipes_of_tokens(one, shape)
    marks = Marks(tensors.in_rank + token * one.ranks, one.ranks, tensors.tokens)
    none = tl.full((), 0, tl.int64)
    rows = plan_rows(one, marks, none, pipes, tl.minimum(end - token, STEP), True, False, shape)
    for begin in range(0, rows, shape.ROWS):
        index = begin + tl.arange(0, shape.ROWS).to(tl.int64)
        inside = index < rows
        each = token + index
        many = ways_each(one, index, inside)
        expert, weight, scale = 0, 0, 0
        if shape.TOPK > 0:
            slot = tl.arange(0, shape.SLOTS)[None, :]
            at = int64s(tensors.topk_idx + 8 * (each[:, None] * shape.TOPK + slot))
            expert = tl.load(at, mask=inside[:, None] & (slot < shape.TOPK), other=-1)
            weight = load_words(tensors.weights + 4 * each * shape.TOPK, inside, shape.TOPK, shape.SLOTS)
        if shape.SCALE_WORDS > 0:
            scale = load_words(tensors.scales + 4 * each * shape.SCALE_WORDS, inside, shape.SCALE_WORDS, shape.SCALES)
        source = tensors.x + each * (4 * shape.WORDS)
        sent = Rows(index, inside, many, source, expert, weight, scale)
        _spread(one, tensors, sent, none, each, shape, shape.NODES)
    return rows


@triton.jit
def _forward(one: Channel, tensors: Tensors, node: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Put rows that have come over the rail from ``node`` into the pipes of the ranks of this one: how many."""
    rail, used = one.ranks + node, 2 * shape.TOPK + shape.SCALE_WORDS
    taken = get(one, N.TAKEN, rail)
    rows = tl.minimum(get(one, N.ARRIVED, rail) - taken, STEP)
    ring, held = get(one, N.IN_RING, rail), get(one, N.IN_ROWS, rail)
    if rows > 0:
        # all threads have read the marks of the node before
        settle_plan()
        # what a peer may change is read once
        every = tl.arange(0, STEP).to(tl.int64)
        told = row_address(ring, held, one.stride, (taken + every).to(tl.int32)) + 4 * shape.WORDS + 4 * used
        nbytes, stride = (one.size + 7) // 8, mark_stride(one)
        for byte in range(nbytes):
            mark = tl.load(uint8s(told + byte), mask=every < rows, other=0)
            tl.store(uint8s(turn_marks(one) + every * stride + byte), mark)
        settle_plan()
        marks = Marks(turn_marks(one), stride, tl.full((), STEP, tl.int64))
        first = node * one.size
        rows = plan_rows(one, marks, first, one.size, rows, True, True, shape)
        if tensors.marks != 0:
            row = get(one, N.FIRST, rail) + taken + every
            there = (every < rows) & (row < tensors.kept)
            for byte in range(nbytes):
                mark = tl.load(uint8s(turn_marks(one) + every * stride + byte))
                tl.store(uint8s(tensors.marks + row * nbytes + byte), mark, mask=there)
        for begin in range(0, rows, shape.ROWS):
            index = begin + tl.arange(0, shape.ROWS).to(tl.int64)
            inside = index < rows
            many = ways_each(one, index, inside)
            source = row_address(ring, held, one.stride, (taken + index).to(tl.int32))
            meta = source + 4 * shape.WORDS
            expert, weight, scale = 0, 0, 0
            if shape.TOPK > 0:
                expert = load_words(meta, inside, shape.TOPK, shape.SLOTS).to(tl.int64)
                weight = load_words(meta + 4 * shape.TOPK, inside, shape.TOPK, shape.SLOTS)
            if shape.SCALE_WORDS > 0:
                scale = load_words(meta + 8 * shape.TOPK, inside, shape.SCALE_WORDS, shape.SCALES)
            sent = Rows(index, inside, many, source, expert, weight, scale)
            _spread(one, tensors, sent, first, index, shape, False)
        poke(entry(one, N.NEXT_TAKEN, rail), taken + rows)
    return rows


@triton.jit
def _receive(one: Channel, tensors: Tensors, shape: tl.constexpr) -> tl.tensor:
    """Take rows out of the pipes of all ranks, and bring them to the outputs: how many."""
    moved = tl.full((), 0, tl.int64)
    for step in range(one.ranks):
        pipe = (one.me + step) % one.ranks
        taken = get(one, N.TAKEN, pipe)
        rows = tl.minimum(get(one, N.ARRIVED, pipe) - taken, STEP)
        if rows > 0:
            ring, held, base = get(one, N.IN_RING, pipe), get(one, N.IN_ROWS, pipe), get(one, N.FIRST, pipe)
            for begin in range(0, rows, shape.ROWS):
                index = taken + begin + tl.arange(0, shape.ROWS).to(tl.int64)
                row = base + index
                # rows that were not promised are left where they landed
                inside = (index < taken + rows) & (row < tensors.capacity)
                source = row_address(ring, held, one.stride, index.to(tl.int32))
                meta = source + 4 * shape.WORDS
                if shape.TOPK > 0:
                    expert = load_words(meta, inside, shape.TOPK, shape.SLOTS)
                    weight = load_words(meta + 4 * shape.TOPK, inside, shape.TOPK, shape.SLOTS)
                if shape.SCALE_WORDS > 0:
                    scale = load_words(meta + 8 * shape.TOPK, inside, shape.SCALE_WORDS, shape.SCALES)
                copy_rows(source, tensors.out + row * (4 * shape.WORDS), inside, inside, shape)
                if shape.TOPK > 0:
                    slot = tl.arange(0, shape.SLOTS)[None, :]
                    wrong = (expert < -1) | (expert >= tensors.local_experts)
                    none = tl.zeros(wrong.shape, tl.int64)
                    tl.store(int64s(none + entry(one, N.WRONG, pipe)), none + (pipe + 1), mask=wrong)
                    known = tl.where(wrong, -1, expert).to(tl.int64)
                    at = int64s(tensors.out_idx + 8 * (row[:, None] * shape.TOPK + slot))
                    tl.store(at, known, mask=inside[:, None] & (slot < shape.TOPK))
                    store_words(tensors.out_weights + 4 * row * shape.TOPK, weight, inside, shape.TOPK, shape.SLOTS)
                if shape.SCALE_WORDS > 0:
                    target = tensors.out_scales + 4 * row * shape.SCALE_WORDS
                    store_words(target, scale, inside, shape.SCALE_WORDS, shape.SCALES)
            poke(entry(one, N.NEXT_TAKEN, pipe), taken + rows)
            moved += rows
    return moved


@triton.jit
def _exchange(one: Channel, tensors: Tensors, shape: tl.constexpr) -> None:
    """All turns of the channel."""
    token = first_token(tensors.tokens, one.index, one.channels)
    start = clock_ns()
    checked, found = start, tl.full((), GOING, tl.int32)
    while found == GOING:
        moved = tl.full((), 0, tl.int64)
        found = begin_turn(one, shape)
        if found == GOING:
            if token < first_token(tensors.tokens, one.index + 1, one.channels):
                sent = _send(one, tensors, token, shape)
                token += sent
                moved += sent
            if shape.NODES:
                for node in range(one.ranks // one.size):
                    if node != node_of(one):
                        moved += _forward(one, tensors, as_long(node), shape)
            moved += _receive(one, tensors, shape)
            found, start, checked = end_turn(one, moved, 0, start, checked, shape)
    end_turns(one, found, shape)


@kernel(aligned=["context", "state", "info", "row_bytes", "x", "out"])
def dispatch_rows(
    context: tl.int64,
    state: tl.int64,
    channels: tl.int64,
    node_ranks: tl.int64,
    is_open: tl.int64,
    in_rank: tl.int64,
    tokens: tl.int64,
    route: tl.int64,
    expert_counts: tl.int64,
    wrong: tl.int64,
    number: tl.int64,
    info: tl.int64,
    ticket: tl.int64,
    capacity: tl.int64,
    digest: tl.int64,
    digest_step: tl.int64,
    coding: tl.int64,
    row_bytes: tl.int64,
    meta_bytes: tl.int64,
    local_experts: tl.int64,
    most_each: tl.int64,
    x: tl.int64,
    topk_idx: tl.int64,
    weights: tl.int64,
    scales: tl.int64,
    out: tl.int64,
    out_idx: tl.int64,
    out_weights: tl.int64,
    out_scales: tl.int64,
    marks: tl.int64,
    kept: tl.int64,
    SHAPE: tl.constexpr,
) -> None:
    """Dispatch; grid (channels,). Addresses and sizes are those of :class:`.normal_notify.Opening` and
    :class:`Tensors`. They are arguments one by one: each program would first wait for a block of them in memory.

    Args:
        is_open: 0 = open and move, 1 = move what :func:`.normal_open.open_rows` has opened.
        capacity: rows of the outputs; where it is opened here: those promised to be enough, 0 = no promise.
        SHAPE: a :class:`DispatchShape`.
    """
    channels, node_ranks = channels.to(tl.int64), node_ranks.to(tl.int64)
    tokens, capacity, meta_bytes = tokens.to(tl.int64), capacity.to(tl.int64), meta_bytes.to(tl.int64)
    row_bytes, local_experts = row_bytes.to(tl.int64), local_experts.to(tl.int64)
    program = program_number(state + W.TICKETS, SHAPE.STARTS_IN_ORDER)
    stride = row_bytes + meta_bytes
    one = channel_of(context, state, program, channels, node_ranks, stride, SHAPE)
    if (program == 0) & (is_open == 0):
        opening = Opening(
            in_rank,
            tokens,
            route,
            expert_counts,
            wrong,
            number,
            info,
            ticket.to(tl.int64),
            capacity,
            digest.to(tl.int64),
            digest_step.to(tl.int64),
            coding.to(tl.int64),
            row_bytes,
            meta_bytes,
            local_experts,
            most_each.to(tl.int64),
        )
        open_operation(one, opening, SHAPE)
    tensors = Tensors(
        x,
        in_rank,
        tokens,
        topk_idx,
        weights,
        scales,
        out,
        out_idx,
        out_weights,
        out_scales,
        capacity,
        local_experts,
        meta_bytes,
        marks,
        kept.to(tl.int64),
    )
    if await_opened(one) != 0:
        _exchange(one, tensors, SHAPE)
    end_kernel(one, SHAPE)
