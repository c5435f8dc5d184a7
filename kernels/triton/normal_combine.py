"""Normal combine: a program for each channel sends back the rows of its channel, sums those of its node for other
nodes, and sums the rows of its own tokens, in turns.

A token of a combine is the sum of the rows that its ranks have sent back, in ascending order of ranks, in float32,
rounded once: the same sum as in :mod:`..cpu.normal_receive`, bit by bit. A row that crosses to another node is the sum
of the rows of a node, rounded once more. Rows of several ranks are loaded before the first is added.

Tokens are summed in their order, and each pipe brings its rows in that order. So the row that a sum waits for is the
next of its pipe, for which there is room; and nobody who waits for one peer keeps rows back from another. That is why a
combine ends, in rings of whatever size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from .blocks import N, W
from .context import has_failed_now
from .kernel import kernel
from .normal_notify import Opening
from .normal_open import await_opened, first_token, open_operation
from .normal_pipes import EVERYTHING, STEP, Channel, as_long, channel_of, entry, get, node_of
from .normal_rows import (
    Marks,
    RowShape,
    copy_rows,
    load_words,
    nth_way,
    pad,
    pipes_of_tokens,
    plan_rows,
    row_address,
    store_words,
    ways_each,
)
from .normal_turns import GOING, begin_turn, end_kernel, end_turn, end_turns
from .quant import load_floats, load_together, store_floats
from .words import clock_ns, floats, poke, program_number


class Tensors(NamedTuple):
    """Addresses of the caller's tensors, and how much they hold; int64.

    Attributes:
        x, weights: rows of this rank's experts, [received, HIDDEN] and float32[received, TOPK].
        in_rank: uint8[tokens, ranks]. tokens: of this rank.
        marks: uint8[kept, mark bytes], for which ranks of its node each row was that this rank forwarded.
        bias_0, bias_1: [tokens, HIDDEN]. out: [tokens, HIDDEN]. out_weights: float32[tokens, TOPK].
        meta: bytes of a row's.
    """

    x: tl.tensor
    weights: tl.tensor
    received: tl.tensor
    in_rank: tl.tensor
    tokens: tl.tensor
    marks: tl.tensor
    kept: tl.tensor
    bias_0: tl.tensor
    bias_1: tl.tensor
    out: tl.tensor
    out_weights: tl.tensor
    meta: tl.tensor


@dataclass(frozen=True, kw_only=True, repr=False)
class CombineShape(RowShape):
    """What :func:`combine_rows` is compiled for.

    Attributes:
        HIDDEN, DTYPE: of a row. BIASES: that are added. TOGETHER: pipes whose rows are loaded together.
        SUMMED_ROWS: summed together. SUMMED: values of each likewise.
    """

    HIDDEN: int
    DTYPE: int
    BIASES: int
    TOGETHER: int
    SUMMED_ROWS: int
    SUMMED: int


@triton.jit
def _give(one: Channel, tensors: Tensors, shape: tl.constexpr) -> tl.tensor:
    """Put rows into the pipes of their sources, of each as many as there is room for: how many."""
    moved = tl.full((), 0, tl.int64)
    for step in range(one.ranks):
        # not all ranks write to the same peer first
        pipe = (one.me + step) % one.ranks
        sent = get(one, N.SENT, pipe)
        rows = tl.minimum(tl.minimum(get(one, N.SEND_ROWS, pipe), get(one, N.LIMIT, pipe)) - sent, STEP)
        if rows > 0:
            ring, held, base = get(one, N.OUT_RING, pipe), get(one, N.OUT_ROWS, pipe), get(one, N.FIRST, pipe)
            for begin in range(0, rows, shape.ROWS):
                index = sent + begin + tl.arange(0, shape.ROWS).to(tl.int64)
                row, inside = base + index, index < sent + rows
                # of a dispatch that received more than was promised, the rest is not there
                there = inside & (row < tensors.received)
                target = row_address(ring, held, one.stride, index.to(tl.int32))
                if shape.TOPK > 0:
                    weight = load_words(tensors.weights + 4 * row * shape.TOPK, there, shape.TOPK, shape.SLOTS)
                copy_rows(tensors.x + row * (4 * shape.WORDS), target, inside, there, shape)
                if shape.TOPK > 0:
                    store_words(target + 4 * shape.WORDS, weight, inside, shape.TOPK, shape.SLOTS)
                    pad(target + 4 * shape.WORDS, inside, shape.TOPK, tensors.meta)
            poke(entry(one, N.NEXT_SENT, pipe), sent + rows)
            moved += rows
    return moved


@triton.jit
def _sum_values(one: Channel, index: tl.tensor, many: tl.tensor, column: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Sums [rows, values] of the rows ``index`` of this turn from ``many`` pipes each, -0 where those are none."""
    # a zero that changes nothing: adding a row to 0 would lose the sign of a zero
    # rule: a sum of one row is that row
    total = tl.full([index.shape[0], column.shape[1]], -0x80000000, tl.int32).to(tl.float32, bitcast=True)
    for begin in range(0, tl.max(many, axis=0), shape.TOGETHER):
        sources, there = (), ()
        for step in tl.static_range(shape.TOGETHER):
            here, source = nth_way(one, index, many, begin + step)
            sources += (source,)  # type: ignore[assignment]
            there += (here,)  # type: ignore[assignment]
        within = column < shape.HIDDEN
        parts = load_together(sources, there, column, within, shape.DTYPE, shape.TOGETHER, True)
        for step in tl.static_range(shape.TOGETHER):
            # rule: a node sums in float32 and rounds once
            total = total + parts[step]
    return total


@triton.jit
def _sum_weights(
    one: Channel, index: tl.tensor, many: tl.tensor, row_bytes: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    """Sums [rows, slots] of the weights that came with the rows."""
    slot = tl.arange(0, shape.SLOTS)[None, :]
    total = tl.zeros([index.shape[0], shape.SLOTS], tl.float32)
    for nth in range(tl.max(many, axis=0)):
        here, source = nth_way(one, index, many, nth)
        at = floats(source[:, None] + row_bytes + 4 * slot)
        total += tl.load(at, mask=here[:, None] & (slot < shape.TOPK), other=0.0)
    return total


@triton.jit
def _sum_rows(
    one: Channel,
    tensors: Tensors,
    index: tl.tensor,
    inside: tl.tensor,
    target: tl.tensor,
    weights: tl.tensor,
    token: tl.tensor,
    BIASES: tl.constexpr,
    shape: tl.constexpr,
) -> None:
    """Store the sums of the rows ``index`` of this turn at ``target``, and those of their weights at ``weights``, all
    [rows]; with the biases of ``token`` [rows]."""
    row_bytes: tl.constexpr = 4 * shape.WORDS
    many = ways_each(one, index, inside)
    for start in range(0, shape.HIDDEN, shape.SUMMED):
        column = start + tl.arange(0, shape.SUMMED)[None, :]
        wanted = inside[:, None] & (column < shape.HIDDEN)
        total = _sum_values(one, index, many, column, shape)
        if BIASES > 0:
            total += load_floats(tensors.bias_0 + token * row_bytes, column, wanted, shape.DTYPE)
        else:
            total = tl.where((many > 0)[:, None], total, 0.0)
        if BIASES > 1:
            total += load_floats(tensors.bias_1 + token * row_bytes, column, wanted, shape.DTYPE)
        store_floats(target, column, total, wanted, shape.DTYPE)
    if shape.TOPK > 0:
        slot = tl.arange(0, shape.SLOTS)[None, :]
        factors = _sum_weights(one, index, many, row_bytes, shape)
        tl.store(floats(weights[:, None] + 4 * slot), factors, mask=inside[:, None] & (slot < shape.TOPK))


@triton.jit
def _sum_own(one: Channel, tensors: Tensors, token: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Sum the next tokens from ``token`` on whose rows are all there: how many."""
    end = first_token(tensors.tokens, one.index + 1, one.channels)
    pipes = pipes_of_tokens(one, shape)
    marks = Marks(tensors.in_rank + token * one.ranks, one.ranks, tensors.tokens)
    none = tl.full((), 0, tl.int64)
    rows = plan_rows(one, marks, none, pipes, tl.minimum(end - token, STEP), False, False, shape)
    for begin in range(0, rows, shape.SUMMED_ROWS):
        index = begin + tl.arange(0, shape.SUMMED_ROWS).to(tl.int64)
        each = token + index
        target, weights = tensors.out + each * (4 * shape.WORDS), tensors.out_weights + 4 * each * shape.TOPK
        _sum_rows(one, tensors, index, index < rows, target, weights, each, shape.BIASES, shape)
    return rows


@triton.jit
def _sum_for(one: Channel, tensors: Tensors, node: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Sum rows of the ranks of this node for the rail peer on ``node``, in the order of its tokens: how many."""
    rail, first = one.ranks + node, node * one.size
    sent, total_rows = get(one, N.SENT, rail), get(one, N.SEND_ROWS, rail)
    rows = tl.minimum(tl.minimum(total_rows, get(one, N.LIMIT, rail)) - sent, STEP)
    if rows > 0:
        nbytes = (one.size + 7) // 8
        row = get(one, N.FIRST, rail) + sent
        # rule: rows whose marks were not kept are not summed
        marks = Marks(tensors.marks + row * nbytes, nbytes, tensors.kept - row)
        rows = plan_rows(one, marks, first, one.size, rows, False, True, shape)
        ring, held = get(one, N.OUT_RING, rail), get(one, N.OUT_ROWS, rail)
        for begin in range(0, rows, shape.SUMMED_ROWS):
            index = begin + tl.arange(0, shape.SUMMED_ROWS).to(tl.int64)
            target, inside = row_address(ring, held, one.stride, (sent + index).to(tl.int32)), index < rows
            meta = target + 4 * shape.WORDS
            _sum_rows(one, tensors, index, inside, target, meta, index, 0, shape)
            if shape.TOPK > 0:
                pad(meta, inside, shape.TOPK, tensors.meta)
        poke(entry(one, N.NEXT_SENT, rail), sent + rows)
        if sent + rows == total_rows:
            # rows that no sum needs, of a dispatch that received more than was promised, hold nobody up
            for place in range(one.size):
                poke(entry(one, N.NEXT_TAKEN, first + place), tl.full((), EVERYTHING, tl.int64))
    return rows


@triton.jit
def _clear(one: Channel, tensors: Tensors, shape: tl.constexpr) -> None:
    """Make the sums of the channel zero: the rows were not exchanged."""
    end = first_token(tensors.tokens, one.index + 1, one.channels)
    row_bytes: tl.constexpr = 4 * shape.WORDS
    for begin in range(first_token(tensors.tokens, one.index, one.channels), end, shape.SUMMED_ROWS):
        each = begin + tl.arange(0, shape.SUMMED_ROWS).to(tl.int64)
        inside = each < end
        for start in range(0, shape.HIDDEN, shape.SUMMED):
            column = start + tl.arange(0, shape.SUMMED)[None, :]
            wanted = inside[:, None] & (column < shape.HIDDEN)
            zero = tl.zeros([shape.SUMMED_ROWS, shape.SUMMED], tl.float32)
            store_floats(tensors.out + each * row_bytes, column, zero, wanted, shape.DTYPE)
        if shape.TOPK > 0:
            slot = tl.arange(0, shape.SLOTS)[None, :]
            at = floats(tensors.out_weights + 4 * (each[:, None] * shape.TOPK + slot))
            zero = tl.zeros([shape.SUMMED_ROWS, shape.SLOTS], tl.float32)
            tl.store(at, zero, mask=inside[:, None] & (slot < shape.TOPK))


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
            moved += _give(one, tensors, shape)
            if shape.NODES:
                for node in range(one.ranks // one.size):
                    if node != node_of(one):
                        moved += _sum_for(one, tensors, as_long(node), shape)
            if token < first_token(tensors.tokens, one.index + 1, one.channels):
                summed = _sum_own(one, tensors, token, shape)
                token += summed
                moved += summed
            left = (token < first_token(tensors.tokens, one.index + 1, one.channels)).to(tl.int32)
            found, start, checked = end_turn(one, moved, left, start, checked, shape)
    end_turns(one, found, shape)


@kernel(aligned=["context", "state", "info", "row_bytes", "x", "out"])
def combine_rows(
    context: tl.int64,
    state: tl.int64,
    channels: tl.int64,
    node_ranks: tl.int64,
    in_rank: tl.int64,
    tokens: tl.int64,
    route: tl.int64,
    number: tl.int64,
    info: tl.int64,
    ticket: tl.int64,
    digest: tl.int64,
    digest_step: tl.int64,
    coding: tl.int64,
    row_bytes: tl.int64,
    meta_bytes: tl.int64,
    x: tl.int64,
    received: tl.int64,
    weights: tl.int64,
    marks: tl.int64,
    kept: tl.int64,
    bias_0: tl.int64,
    bias_1: tl.int64,
    out: tl.int64,
    out_weights: tl.int64,
    SHAPE: tl.constexpr,
) -> None:
    """Combine; grid (channels,). Compile without fused multiply-add. Its arguments are those of
    :class:`.normal_notify.Opening` and :class:`Tensors`, ``SHAPE`` is a :class:`CombineShape`. A token without rows is
    zero, and where the rows were not exchanged every token is."""
    channels, node_ranks = channels.to(tl.int64), node_ranks.to(tl.int64)
    tokens, meta_bytes, row_bytes = tokens.to(tl.int64), meta_bytes.to(tl.int64), row_bytes.to(tl.int64)
    program = program_number(state + W.TICKETS, SHAPE.STARTS_IN_ORDER)
    one = channel_of(context, state, program, channels, node_ranks, row_bytes + meta_bytes, SHAPE)
    none = tl.full((), 0, tl.int64)
    if program == 0:
        opening = Opening(
            in_rank,
            tokens,
            route,
            none,
            none,
            number,
            info,
            ticket.to(tl.int64),
            none,
            digest.to(tl.int64),
            digest_step.to(tl.int64),
            coding.to(tl.int64),
            row_bytes,
            meta_bytes,
            none,
            none,
        )
        open_operation(one, opening, SHAPE)
    received, kept = received.to(tl.int64), kept.to(tl.int64)
    tensors = Tensors(x, weights, received, in_rank, tokens, marks, kept, bias_0, bias_1, out, out_weights, meta_bytes)
    opened = await_opened(one)
    if opened != 0:
        _exchange(one, tensors, SHAPE)
    if (opened == 0) | has_failed_now(context):
        _clear(one, tensors, SHAPE)
    end_kernel(one, SHAPE)
