"""Opening a normal-mode operation: every rank tells every rank what it is about to do and how many rows it has.

Nothing else moves before the notifies of all peers have arrived; ranks that were given different shapes all see so and
part without damage. One program does it, decides where the rows of every rank go, and tells the host and the programs
of the other channels: program 0 of those that move rows, or the last of a launch that only opens.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from ...protocol.streams import NORMAL_CHANNELS, NORMAL_COMBINE, NORMAL_DISPATCH
from .blocks import INFO, N, S, W
from .context import has_failed, is_live, peer_window, rank_count, sticky_code, wait_limit
from .kernel import kernel
from .normal_notify import (
    DISPATCH,
    NOTIFY,
    PEER_INFO,
    PEER_INFO_BYTES,
    RAIL_RECV,
    RAIL_SEND,
    RECV,
    SEND,
    Opening,
    count_experts,
    route_at,
    route_of,
    send_notifies,
    take_notifies,
    wait_notifies,
)
from .normal_pipes import (
    COMBINE,
    EVERYTHING,
    Channel,
    ChannelShape,
    as_long,
    channel_of,
    chunk_rows,
    entry,
    in_ring,
    is_pipe,
    node_of,
    on_channel,
    out_ring,
    over,
    peer_of,
    set_each,
    whole,
)
from .normal_progress import fail_by_notes
from .routing import POSITIONS, mark_block
from .wait import (
    FAILURE_PEER_TIMEOUT,
    FAILURE_PROTOCOL,
    FAILURE_RING_FULL,
    GO_ON,
    RELEASED,
    STILL_FULL,
    TOO_LATE,
    fail,
    report_id,
)
from .words import acquire, arrive_last, clock_ns, enter, int64s, peek, poke, release_each, settle, uint8s, uniform

_DISPATCH_STREAM, _COMBINE_STREAM = tl.constexpr(NORMAL_DISPATCH), tl.constexpr(NORMAL_COMBINE)
_CHANNELS = tl.constexpr(NORMAL_CHANNELS)


@dataclass(frozen=True, kw_only=True, repr=False)
class OpenShape(ChannelShape):
    """What :func:`open_rows` is compiled for.

    Attributes:
        TOPK: ids of a token, 0 = it has none. BLOCK: tokens whose ids a program counts.
    """

    TOPK: int
    BLOCK: int


@triton.jit
def first_token(tokens: tl.tensor, channel: tl.tensor, channels: tl.tensor) -> tl.tensor:
    """The first token of a channel: each has as many consecutive ones, the last fewer."""
    each = (tokens + channels - 1) // channels
    return tl.minimum(channel * each, tokens)


@triton.jit
def _count_tokens(one: Channel, opening: Opening, shape: tl.constexpr) -> None:
    """Count the channel's tokens for each rank, and for each node that is reached over a rail."""
    begin = first_token(opening.tokens, one.index, one.channels)
    end = first_token(opening.tokens, one.index + 1, one.channels)
    ranks = tl.arange(0, shape.RANKS).to(tl.int64)
    inside = ranks < one.ranks
    counts = tl.zeros([shape.RANKS], tl.int64)
    for first in range(begin, end, shape.TOKENS):
        token = first + tl.arange(0, shape.TOKENS).to(tl.int64)
        here = (token < end)[:, None] & inside[None, :]
        marks = tl.load(uint8s(opening.in_rank + token[:, None] * one.ranks + ranks[None, :]), mask=here, other=0)
        counts += tl.sum((marks != 0).to(tl.int32), axis=0).to(tl.int64)
    tl.store(int64s(route_at(one, opening.route, SEND, ranks)), counts, mask=inside)
    if shape.NODES:
        for node in range(one.ranks // one.size):
            crossing = tl.full((), 0, tl.int64)
            if node != node_of(one):
                on_node = inside & (ranks // one.size == node)
                for first in range(begin, end, shape.TOKENS):
                    token = first + tl.arange(0, shape.TOKENS).to(tl.int64)
                    here = (token < end)[:, None] & on_node[None, :]
                    at = uint8s(opening.in_rank + token[:, None] * one.ranks + ranks[None, :])
                    # rule: a token crosses once to a node
                    marked = tl.max((tl.load(at, mask=here, other=0) != 0).to(tl.int32), axis=1)
                    crossing += tl.sum(marked, axis=0)
            poke(route_at(one, opening.route, RAIL_SEND, node), crossing)


@triton.jit
def _place(
    one: Channel, opening: Opening, table: tl.constexpr, ranks: tl.tensor, begin: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    """Say where the rows of every (rank, channel) of a route's ``table``, of ``ranks`` ranks or nodes, begin when all
    stand one behind the other, in FIRST from pipe ``begin`` on; how many there are in all."""
    total = tl.full((), 0, tl.int64)
    each: tl.constexpr = shape.PIPES // _CHANNELS
    for first in range(0, ranks, each):
        index = tl.arange(0, shape.PIPES)
        rank, channel = first + (index // _CHANNELS).to(tl.int64), (index % _CHANNELS).to(tl.int64)
        inside = (rank < tl.minimum(first + each, ranks)) & (channel < one.channels)
        at = opening.route + 8 * ((table * one.ranks + rank) * _CHANNELS + channel)
        rows = tl.load(int64s(at), mask=inside, other=0)
        before = total + tl.cumsum(rows, axis=0) - rows
        set_each(on_channel(one, channel), N.FIRST, begin + rank, inside, before)
        total += tl.sum(rows, axis=0)
    return total


@triton.jit
def _set_pipes(one: Channel, opening: Opening, shape: tl.constexpr) -> None:
    """Set the channel's tables: how many rows go through each pipe, and where; nothing has moved yet."""
    pipes = tl.arange(0, shape.PIPES).to(tl.int64)
    live, inside = is_pipe(one, pipes, shape), pipes < one.ranks
    peers = tl.where(live, peer_of(one, pipes, shape), 0)
    outgoing: tl.constexpr = RECV if shape.KIND == COMBINE else SEND
    incoming: tl.constexpr = SEND if shape.KIND == COMBINE else RECV
    send = route_of(one, opening.route, outgoing, pipes, live & inside)
    receive = route_of(one, opening.route, incoming, pipes, live & inside)
    if shape.NODES:
        rail = live & (inside == 0)
        # a pipe about another node: how many of that one's rows are forwarded, or summed, here
        node = tl.where(inside, over(pipes, one.size), pipes - one.ranks)
        about = live & inside & (node != node_of(one))
        rail_send = route_of(one, opening.route, RAIL_SEND, node, live)
        rail_receive = route_of(one, opening.route, RAIL_RECV, node, live)
        unknown = tl.where(rail_receive > 0, EVERYTHING, 0)
        if shape.KIND == COMBINE:
            send = tl.where(rail, rail_receive, send)
            receive = tl.where(rail, rail_send, tl.where(about, unknown, receive))
        else:
            send = tl.where(rail, rail_send, tl.where(about, unknown, send))
            receive = tl.where(rail, rail_receive, receive)
    window = peer_window(one.context, peers)
    send_chunk, receive_chunk = chunk_rows(one, send), chunk_rows(one, receive)
    landing = tl.where(window != 0, one.rows, whole(one.rows, send_chunk))
    out_rows = tl.where(window != 0, one.rows, whole(one.staged, send_chunk))
    in_rows = tl.where(window != 0, one.rows, whole(one.rows, receive_chunk))
    set_each(one, N.IN_CHUNK, pipes, live, receive_chunk)
    set_each(one, N.OUT_CHUNK, pipes, live, send_chunk)
    set_each(one, N.LANDING_ROWS, pipes, live, landing)
    every = pipes < 2 * one.ranks
    set_each(one, N.SEND_ROWS, pipes, every, tl.where(live, send, 0))
    set_each(one, N.RECV_ROWS, pipes, every, tl.where(live, receive, 0))
    set_each(one, N.IN_RING, pipes, live, in_ring(one, pipes, peers))
    set_each(one, N.IN_ROWS, pipes, live, in_rows)
    set_each(one, N.OUT_RING, pipes, live, out_ring(one, pipes, peers, shape))
    set_each(one, N.OUT_ROWS, pipes, live, out_rows)
    zero = tl.zeros_like(pipes)
    for table in tl.static_range(N.ARRIVED, N.FREED + 1):
        set_each(one, table, pipes, every, zero)
    stream = tl.where(one.phase == 0, _DISPATCH_STREAM, _COMBINE_STREAM) + one.index
    set_each(one, N.WRONG_STREAM, pipes, every, stream)
    set_each(one, N.WRONG_GOT, pipes, every, zero)
    set_each(one, N.WRONG_WANT, pipes, every, zero)


@triton.jit
def _settle_counts(one: Channel, opening: Opening, shape: tl.constexpr) -> tl.tensor:
    """All notifies are here: tell the host how many rows there are, and say where they go. 1 when one is refused."""
    info, broken = opening.info, tl.full((), 0, tl.int32)
    ranks = tl.arange(0, shape.PIPES).to(tl.int64)
    # rows of each rank, for a moment where tables of channel 0 stand afterwards
    first = on_channel(one, as_long(0))
    if shape.KIND == DISPATCH:
        came, away = tl.zeros_like(ranks), tl.zeros_like(ranks)
        for channel in range(one.channels):
            here = on_channel(one, as_long(channel))
            inside = ranks < one.ranks
            mine = inside & (ranks == one.me)
            own = route_of(here, opening.route, SEND, ranks, mine)
            tl.store(int64s(route_at(here, opening.route, RECV, ranks)), own, mask=mine)
            # a rank that is masked tells nothing
            gone = inside & (is_live(one.context, ranks) == 0)
            tl.store(int64s(route_at(here, opening.route, RECV, ranks)), tl.zeros_like(ranks), mask=gone)
            if shape.NODES:
                poke(route_at(here, opening.route, RAIL_RECV, node_of(one)), as_long(0))
        settle()
        for channel in range(one.channels):
            here = on_channel(one, as_long(channel))
            inside = ranks < one.ranks
            came += route_of(here, opening.route, RECV, ranks, inside)
            away += route_of(here, opening.route, SEND, ranks, inside & (ranks != one.me))
        set_each(first, N.ARRIVED, ranks, ranks < one.ranks, came)
        settle()
        counted = opening.info + PEER_INFO + one.ranks * PEER_INFO_BYTES
        broken = count_experts(one, opening, counted, entry(first, N.ARRIVED, 0), shape.PIPES)
        poke(info + INFO.REMOTE_ROWS, tl.sum(away, axis=0))
        poke(opening.number, peek(one.state + W.NUMBER))
        settle()
    total = _place(one, opening, RECV, one.ranks, as_long(0), shape)
    if shape.NODES:
        relayed = _place(one, opening, RAIL_RECV, one.ranks // one.size, one.ranks, shape)
        poke(info + INFO.RELAYED, relayed)
    poke(info + INFO.TOTAL, total)
    # rule: normal mode: the host is told that more rows came than num_worst_tokens promised
    if (shape.KIND == DISPATCH) & (opening.capacity > 0):
        if total > opening.capacity:
            poke(info + INFO.OVERFLOW_ROWS, total)
    settle()
    for channel in range(one.channels):
        _set_pipes(on_channel(one, as_long(channel)), opening, shape)
    return broken


@triton.jit(noinline=True)
def open_operation(one: Channel, opening: Opening, shape: tl.constexpr) -> None:
    """Tell all peers, then wait for what all peers tell, and tell the host and the other programs."""
    enter()
    context, state = one.context, one.state
    different, number = tl.full((), -1, tl.int32), peek(state + W.NUMBER)
    if shape.KIND == DISPATCH:
        # until the ranks agree: a combine of this handle agrees with nobody's
        poke(opening.number, -2 - one.me)
        # rule: normal mode: the host is told of an expert id out of range
        if opening.wrong != 0:
            wrong = peek(opening.wrong)
            if wrong != 0:
                report_id(context, state, wrong + POSITIONS, opening.local_experts * one.ranks)
    # of windows that are gone the verdict alone is left
    over = uniform(has_failed(context).to(tl.int32))
    if over == 0:
        over = released(context, state)
    if over == 0:
        start = clock_ns()
        digest = opening.digest
        if shape.KIND == DISPATCH:
            for channel in range(one.channels):
                _count_tokens(on_channel(one, as_long(channel)), opening, shape)
            settle()
        else:
            # in halves: the product need not fit
            of_handle = peek(opening.number) + 1
            low, high = opening.digest_step & 0xFFFF, opening.digest_step >> 16
            step = of_handle * low + (((of_handle * high) & 0x7FFFFFFFFFFF) << 16)
            digest = (digest + step) & 0x7FFFFFFFFFFFFFFF
        every = tl.arange(0, shape.PIPES).to(tl.int64)
        for channel in range(one.channels):
            here = on_channel(one, as_long(channel))
            set_each(here, N.WRONG, every, every < 2 * one.ranks, tl.zeros_like(every))
        settle()
        live = is_live(context, every) & (every != one.me)
        ending = send_notifies(one, opening, digest, every, live, start, shape)
        if ending == GO_ON:
            ending = wait_notifies(one, every, live, number + 1, start, True)
        if ending == GO_ON:
            different = take_notifies(one, opening, digest, every, live, shape)
        settle()
        if different == 0:
            if _settle_counts(one, opening, shape) != 0:
                different = tl.full((), -1, tl.int32)
        if ending == RELEASED:
            fail(context, state, 0, -1, -1, 0, 0)
        elif different < 0:
            code = tl.where(ending == TOO_LATE, FAILURE_PEER_TIMEOUT, FAILURE_PROTOCOL)
            fail_by_notes(one, tl.where(ending == STILL_FULL, FAILURE_RING_FULL, code), shape)
    lane = tl.arange(0, shape.PIPES)
    words = tl.zeros([shape.PIPES], tl.int64)
    sink = state + S.SINK
    if different > 0:
        # a host that waits for no ticket finds it: what it is about was settled when the notifies were taken
        release_each(words + opening.info + INFO.SHAPE_MISMATCH, words + opening.ticket, lane == 0, sink)
    poke(opening.info + INFO.DIFFERENT, different.to(tl.int64))
    settle()
    release_each(words + opening.info + INFO.TICKET, words + opening.ticket, lane == 0, sink)
    opened = tl.where(different == 0, number + 1, -(number + 1))
    tl.atomic_xchg(int64s(state + W.OPENED), opened, sem="release", scope="gpu")
    settle()


@triton.jit
def released(context: tl.tensor, state: tl.tensor) -> tl.tensor:
    """1 when a proxy or the host has set the sticky error: the verdict is then set, and nothing may be published."""
    over = (sticky_code(context) != 0).to(tl.int32)
    if over != 0:
        fail(context, state, 0, -1, -1, 0, 0)
    return over


@triton.jit
def await_opened(one: Channel) -> tl.tensor:
    """Wait until program 0 has opened the operation: 1 when its rows may move, 0 when they may not.

    Program 0 has a limit of its own, and tells even when that is over: twice as long is waited here.
    """
    number, start = peek(one.state + W.NUMBER), clock_ns()
    limit = 2 * wait_limit(one.context)
    opened = acquire(one.state + W.OPENED)
    while (opened != number + 1) & (opened != -(number + 1)):
        opened = acquire(one.state + W.OPENED)
        late = (clock_ns() - start > limit).to(tl.int32)
        if uniform(late) != 0:
            fail(one.context, one.state, FAILURE_PEER_TIMEOUT, one.me, NOTIFY, 0, 1)
            opened = -(number + 1)
    # each thread has acquired for itself: now for the others
    settle()
    return (opened == number + 1).to(tl.int32)


@kernel(aligned=["context", "state", "info", "row_bytes"])
def open_rows(
    context: tl.int64,
    state: tl.int64,
    channels: tl.int64,
    node_ranks: tl.int64,
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
    topk_idx: tl.int64,
    rank_counts: tl.int64,
    SHAPE: tl.constexpr,
) -> None:
    """Open an operation whose rows a later launch moves; grid (1,). Where ids are to be counted before, grid
    (ceil(tokens / BLOCK),): each program counts some, and the last to end opens. Where the ranks part nothing is left
    to do, and the operation is over.

    It takes the arguments that :func:`.normal_dispatch.dispatch_rows` begins with, without ``is_open``; then those that
    :func:`.routing.mark_tokens` has besides, 0 where nothing is counted. ``SHAPE`` is an :class:`OpenShape`.
    """
    tokens, local_experts = tokens.to(tl.int64), local_experts.to(tl.int64)
    last = tl.full((), 1, tl.int1)
    if SHAPE.TOPK > 0:
        if topk_idx != 0:
            ranks = rank_count(context)
            experts = local_experts * ranks
            mark_block(topk_idx, tokens, experts, ranks, rank_counts, expert_counts, in_rank, wrong, SHAPE)
            last = arrive_last(state + W.ENDED, 1, tl.num_programs(0))
    if last:
        channels, node_ranks = channels.to(tl.int64), node_ranks.to(tl.int64)
        row_bytes, meta_bytes = row_bytes.to(tl.int64), meta_bytes.to(tl.int64)
        first = tl.full((), 0, tl.int64)
        one = channel_of(context, state, first, channels, node_ranks, row_bytes + meta_bytes, SHAPE)
        opening = Opening(
            in_rank,
            tokens,
            route,
            expert_counts,
            wrong,
            number,
            info,
            ticket.to(tl.int64),
            capacity.to(tl.int64),
            digest.to(tl.int64),
            digest_step.to(tl.int64),
            coding.to(tl.int64),
            row_bytes,
            meta_bytes,
            local_experts,
            most_each.to(tl.int64),
        )
        open_operation(one, opening, SHAPE)
        before = peek(state + W.NUMBER)
        parted = peek(state + W.OPENED) != before + 1
        # every thread has read what one of them is about to overwrite
        settle()
        if parted:
            poke(state + W.NUMBER, before + 1)
