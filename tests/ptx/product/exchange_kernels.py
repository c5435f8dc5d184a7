"""Rows from every rank to every rank by what all kernels of normal mode share: rows are copied, told of, waited for.

In one launch of one warp, as ``normal_finish.finish`` does it, or in one for each part, as the other kernels do.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from uccl_ep_serving.kernels.triton.context import is_live, landing_window, own_rank, rank_count
from uccl_ep_serving.kernels.triton.launch import Launch, Variant
from uccl_ep_serving.kernels.triton.normal_rows import RowShape, copy_rows
from uccl_ep_serving.kernels.triton.normal_step import message_at, send_message, wait_counts
from uccl_ep_serving.kernels.triton.words import clock_ns, settle
from uccl_ep_serving.protocol.layout import WindowLayout
from uccl_ep_serving.protocol.streams import NORMAL_DISPATCH, NORMAL_NOTIFY

_ROWS_STREAM, _READ_STREAM = tl.constexpr(NORMAL_DISPATCH), tl.constexpr(NORMAL_NOTIFY)
_CUDA, _LANES = tl.constexpr(1), tl.constexpr(32)
#: What a kernel does.
_PUT, _TELL, _TAKE, _TELL_READ, _WHOLE = (tl.constexpr(part) for part in range(5))
#: Rows for a peer, and their words of 4 bytes: not as many as a program moves at a time.
ROWS, WORDS = 7, 20
_ROW = tl.constexpr(4 * WORDS)
_COUNT = tl.constexpr(ROWS)
_BYTES = tl.constexpr(4 * ROWS * WORDS)
_WORDS = tl.constexpr(WORDS)


class Places(NamedTuple):
    """Offsets in every window: of the rows for the first peer, and from the first rank, each with the bytes to the next
    one's."""

    sent: int
    sent_step: int
    landed: int
    landed_step: int

    @classmethod
    def of(cls, layout: WindowLayout) -> Places:
        normal = layout.normal
        return cls(layout.normal_send, normal.depth * normal.chunk, layout.normal_rounds, 2 * normal.round_slot)


@triton.jit
def _copy(source: tl.tensor, target: tl.tensor, program: tl.tensor, programs: tl.tensor) -> None:
    """This program's share of a peer's rows."""
    for first in range(program * 2, _COUNT, programs * 2):
        index = first + tl.arange(0, 2).to(tl.int64)
        word = tl.arange(0, 16)[None, :]
        shape = RowShape(0, _WORDS, 0, 1, 0, 1, 2, 16)
        copy_rows(source + index * _ROW, target + index * _ROW, index < _COUNT, word, shape)


@triton.jit
def _put(
    context: tl.tensor,
    x: tl.tensor,
    sent: tl.tensor,
    sent_step: tl.tensor,
    landed: tl.tensor,
    landed_step: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
) -> None:
    """Rows of ``x`` [ranks, ROWS, WORDS] to where a peer reads them, or a proxy."""
    me = own_rank(context)
    for peer in range(rank_count(context)):
        if peer != me:
            at = message_at(context, peer, peer != me, sent + peer * sent_step, landed + me * landed_step)
            _copy(x + peer * _BYTES, at, program, programs)


@triton.jit
def _take(
    context: tl.tensor,
    out: tl.tensor,
    landed: tl.tensor,
    landed_step: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
) -> None:
    """Rows that have landed, to ``out`` [ranks, ROWS, WORDS]."""
    me = own_rank(context)
    for peer in range(rank_count(context)):
        if peer != me:
            at = landing_window(context, peer) + landed + peer * landed_step
            _copy(at, out + peer * _BYTES, program, programs)


@triton.jit
def _tell(
    context: tl.tensor,
    state: tl.tensor,
    stream: tl.constexpr,
    sent: tl.tensor,
    sent_step: tl.tensor,
    landed: tl.tensor,
    landed_step: tl.tensor,
    nbytes: tl.constexpr,
    number: tl.tensor,
) -> tl.tensor:
    """Message ``number`` of ``stream`` to every peer, and wait for theirs, and for the writes of it to be over."""
    start = clock_ns(_CUDA)
    me = own_rank(context)
    peers = tl.arange(0, _LANES).to(tl.int64)
    live = is_live(context, peers) & (peers != me)
    zero = tl.zeros_like(peers)
    source, target = zero + sent + peers * sent_step, zero + landed + me * landed_step
    which = tl.full((), stream, tl.int64)
    going = send_message(
        context, state, peers, live, which, source, target, zero + nbytes, zero + number, start, _LANES, _CUDA
    )
    if going:
        going = wait_counts(context, state, peers, live, which, zero + number, start, True, _CUDA)
    if going:
        going = wait_counts(context, state, peers, live, which, zero + number, start, False, _CUDA)
    return going


@triton.jit(do_not_specialize=["number"])
def exchange(
    context: tl.int64,
    state: tl.int64,
    x: tl.int64,
    out: tl.int64,
    sent: tl.int64,
    sent_step: tl.int64,
    landed: tl.int64,
    landed_step: tl.int64,
    number: tl.int64,
    PART: tl.constexpr,
) -> None:
    """One part of exchange ``number``, or all of it; one warp but for rows, which any programs share."""
    number = number.to(tl.int64)
    if PART == _PUT:
        _put(context, x, sent, sent_step, landed, landed_step, tl.program_id(0), tl.num_programs(0))
    elif PART == _TELL:
        _tell(context, state, _ROWS_STREAM, sent, sent_step, landed, landed_step, _BYTES, number)
    elif PART == _TAKE:
        _take(context, out, landed, landed_step, tl.program_id(0), tl.num_programs(0))
    elif PART == _TELL_READ:
        _tell(context, state, _READ_STREAM, sent, sent_step, landed, landed_step, 0, number)
    else:
        _put(context, x, sent, sent_step, landed, landed_step, 0, 1)
        settle(_CUDA)
        if _tell(context, state, _ROWS_STREAM, sent, sent_step, landed, landed_step, _BYTES, number):
            _take(context, out, landed, landed_step, 0, 1)
            settle(_CUDA)
            _tell(context, state, _READ_STREAM, sent, sent_step, landed, landed_step, 0, number)


def _part(number: tl.constexpr, warps: int = 1) -> Variant:
    return Variant(exchange, {"PART": number.value}, warps)


#: By name: kernels with their programs.
FORMS = {
    "one kernel": ((_part(_WHOLE), 1),),
    "a kernel each": ((_part(_PUT, 2), 2), (_part(_TELL), 1), (_part(_TAKE, 2), 2), (_part(_TELL_READ), 1)),
}


def launches(form: str, context: int, state: int, x: int, out: int, places: Places, number: int) -> list[Launch]:
    """Exchange ``number``, from 1: addresses as for the kernels."""
    arguments = (context, state, x, out, *places, number)
    return [Launch(kernel, (programs, 1, 1), arguments) for kernel, programs in FORMS[form]]
