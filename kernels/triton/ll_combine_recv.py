"""Low-latency combine, receiving: one kernel sums the rows that come back for each token, as soon as those are there.

The first R programs hear one rank each: they wait for its message and check what it claims. Each of the others sums
some values of some tokens once the ranks that have those tokens' experts are heard.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from ...protocol.message import DTYPE_F32, FORM_EXPANDED, FORM_REDUCED, LowLatencyHeader
from ...protocol.streams import LL_COMBINE
from .blocks import P, R, S, T, route_table, state_table
from .context import has_failed_now, is_live, landing_window, rank_count, stream_of
from .kernel import kernel
from .ll_counts import mark_read, one_lane
from .ll_message import AT_CODING, AT_ROWS, HEADER, LOW, MARK, check_header, read_header, word_of
from .programs import COMBINE_RECV, Message, MessageShape, await_ready, stamp_of, tell_ready
from .quant import load_together, store_floats
from .wait import FAILURE_PROTOCOL, fail, wait_messages
from .words import clock_ns, floats, int64s, peek, poke, program_number

_COMBINE, _TAG = tl.constexpr(LL_COMBINE), tl.constexpr(LowLatencyHeader.COMBINE_TAG)
_EXPANDED, _REDUCED, _F32 = tl.constexpr(FORM_EXPANDED), tl.constexpr(FORM_REDUCED), tl.constexpr(DTYPE_F32)


@dataclass(frozen=True, kw_only=True, repr=False)
class CombineRecvShape(MessageShape):
    """What :func:`combine_recv` is compiled for.

    Attributes:
        HIDDEN, DTYPE: of a token. REDUCED: rows come back summed.
        TOGETHER: slots whose rows are loaded together: a program waits once for their places and once for them.
    """

    HIDDEN: int
    DTYPE: int
    REDUCED: bool
    TOGETHER: int


@triton.jit
def _hear(one: Message, waited: tl.tensor, shape: tl.constexpr) -> None:
    """What one of the first programs does for its rank, whose rows must be those that this one was promised."""
    context, state, peer, number = one.context, one.state, one.peer, one.number
    start = clock_ns()
    stream = stream_of(_COMBINE, number)
    good = has_failed_now(context) == 0
    live = is_live(context, peer)
    if good & live:
        # what of this needs no message is on its way while that is
        region = peek(state + S.COMBINE_RECV) + (number & 1) * peek(state + S.COMBINE_RECV_STEP)
        header = landing_window(context, peer) + region + peek(route_table(one.route, R.RETURN_BASE, peer))
        due = peek(route_table(one.route, R.COUNTS if shape.REDUCED else R.PAIRS, peer))
        peers, mine = one_lane(peer)
        good = wait_messages(context, state, peers, mine, mine, _COMBINE, number, waited, start, True)
        if good:
            come_at = state_table(state, T.COMBINE_COME + (number & 1), peer)
            come = peek(come_at)
            # every thread has read what one of them is about to overwrite
            tl.debug_barrier()
            poke(come_at, tl.maximum(come, number // 2 + 1))
            words = read_header(header)
            told, rows = word_of(words, AT_CODING), word_of(words, AT_ROWS)
            got, expected = check_header(one, words, _TAG)
            coding: tl.constexpr = ((_REDUCED if shape.REDUCED else _EXPANDED) << 8) | shape.DTYPE
            if (got == expected) & (told != coding):
                got, expected = MARK | told & LOW, expected * 0 + (MARK | coding)
            if got == expected:
                got, expected = rows, due
            good = got == expected
            if good == 0:
                fail(context, state, FAILURE_PROTOCOL, peer, stream, got, expected)
    tell_ready(state, peer, stamp_of(COMBINE_RECV, number), good & live)


@kernel(aligned=["context", "state", "route", "ticket", "out"])
def combine_recv(
    context: tl.int64,
    state: tl.int64,
    route: tl.int64,
    ticket: tl.int64,
    weights: tl.int64,
    out: tl.int64,
    tokens: tl.int64,
    waited: tl.int64,
    SHAPE: tl.constexpr,
) -> None:
    """Receive the combine message of every rank, whose number is at ``ticket``, and sum; grid
    (R + ceil(tokens / ROWS) * ceil(HIDDEN / BLOCK),). Compile without fused multiply-add.

    Reduced form: plain float32 sum over ranks, ascending. Expanded form: weighted float32 sum over top-k slots in slot
    order. Rounded once; a token without experts is zero, and so is one whose rows do not come.

    Args:
        weights: float32[tokens, TOPK], used in the expanded form.
        out: [tokens, HIDDEN] of DTYPE, on a multiple of 16 bytes.
        waited: int64[R] to which the nanoseconds waited for each rank are added, or 0.
        SHAPE: a :class:`CombineRecvShape`.
    """
    tokens, waited = tokens.to(tl.int64), waited.to(tl.int64)
    ranks, number = rank_count(context), peek(ticket)
    mine = program_number(state + S.TICKETS, SHAPE.STARTS_IN_ORDER)
    one = Message(context, state, route, mine, number)
    if mine < ranks:
        _hear(one, waited, SHAPE)
        if mine == 0:
            # only later kernels tell others, which find all of this one done, or that it failed
            mark_read(state, S.COMBINE_READ, S.COMBINE_AHEAD, number)
    else:
        columns: tl.constexpr = (SHAPE.HIDDEN + SHAPE.BLOCK - 1) // SHAPE.BLOCK
        program = mine - ranks
        token = program // columns * SHAPE.ROWS + tl.arange(0, SHAPE.ROWS).to(tl.int64)
        value = program % columns * SHAPE.BLOCK + tl.arange(0, SHAPE.BLOCK)[None, :]
        _sum_rows(one, weights, out, token, tokens, value, SHAPE)


@triton.jit
def _sum_rows(
    one: Message,
    weights: tl.tensor,
    out: tl.tensor,
    token: tl.tensor,
    tokens: tl.tensor,
    value: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Sum values ``value`` [1, BLOCK] of tokens ``token`` [ROWS], from messages of this number. The other tensors are
    arguments of the kernel."""
    context, state, route, number = one.context, one.state, one.route, one.number
    width: tl.constexpr = 4 if shape.DTYPE == _F32 else 2
    returns = route + peek(route + P.ROUTE_RETURNS)
    slot = tl.arange(0, shape.SLOTS)[None, :]
    given = (token[:, None] < tokens) & (slot < shape.TOPK)
    entries = tl.load(int64s(returns + 8 * (token[:, None] * shape.TOPK + slot)), mask=given, other=-1)
    ranks = tl.where(entries >= 0, entries >> 32, 0)
    wanted = entries >= 0
    stamp, stream = stamp_of(COMBINE_RECV, number), stream_of(_COMBINE, number)
    _, ready = await_ready(context, state, ranks, wanted, stamp, stream)
    lacking = tl.max((wanted & (ready == 0)).to(tl.int32), axis=1)
    region = peek(state + S.COMBINE_RECV) + (number & 1) * peek(state + S.COMBINE_RECV_STEP) + HEADER
    wanted_values = ((token < tokens) & (lacking == 0))[:, None] & (value < shape.HIDDEN)
    total = tl.zeros([shape.ROWS, shape.BLOCK], tl.float32)
    for first in range(0, shape.TOPK, shape.TOGETHER):
        sources, there, factors = (), (), ()
        for step in tl.static_range(shape.TOGETHER):
            inside = (token < tokens) & (first + step < shape.TOPK)
            at = token * shape.TOPK + first + step
            entry = tl.load(int64s(returns + 8 * at), mask=inside, other=-1)
            rank = tl.where(entry >= 0, entry >> 32, 0)
            here = entry >= 0
            base = landing_window(context, rank) + region + peek(route_table(route, R.RETURN_BASE, rank))
            sources += (base + tl.where(here, entry & 0xFFFFFFFF, 0) * shape.ROW_BYTES,)  # type: ignore[assignment]
            there += (here,)  # type: ignore[assignment]
            if not shape.REDUCED:
                factor = tl.load(floats(weights + 4 * at), mask=here, other=0.0)
                factors += (factor,)  # type: ignore[assignment]
        parts = load_together(sources, there, value, wanted_values, shape.DTYPE, shape.TOGETHER)
        for step in tl.static_range(shape.TOGETHER):
            part = parts[step]
            if not shape.REDUCED:
                part = factors[step][:, None] * part
            # what is not there adds zero to a sum that is never -0
            total += part
    total = tl.where(lacking[:, None] != 0, 0.0, total)
    store_floats(
        out + token * (shape.HIDDEN * width),
        value,
        total,
        (token < tokens)[:, None] & (value < shape.HIDDEN),
        shape.DTYPE,
    )
