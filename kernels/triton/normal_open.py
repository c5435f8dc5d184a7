"""Opening a normal-mode operation: every rank tells every rank what it is about to do and how many rows it has.

Nothing else moves before the notifies of all peers have arrived; ranks that were given different shapes all see so and
part without damage. Program 0 does it, decides where the rows of every rank go, and tells the host and the programs of
the other channels.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ...protocol.message import CHANNEL_ROWS_BYTES, HEADER_BYTES, MOST_ROWS, NormalNotify
from ...protocol.streams import MAX_CHANNELS, NORMAL_COMBINE, NORMAL_DISPATCH, NORMAL_NOTIFY
from ..blocks import normal_device
from .blocks import (
    I_DIFFERENT,
    I_OVERFLOW_ROWS,
    I_RELAYED,
    I_REMOTE_ROWS,
    I_SHAPE_MISMATCH,
    I_TICKET,
    I_TOTAL,
    N_ARRIVED,
    N_FIRST,
    N_FREED,
    N_IN_CHUNK,
    N_IN_RING,
    N_IN_ROWS,
    N_LANDING_ROWS,
    N_LIMIT,
    N_NEXT_SENT,
    N_NEXT_TAKEN,
    N_OUT_CHUNK,
    N_OUT_RING,
    N_OUT_ROWS,
    N_RECV_ROWS,
    N_SEND_ROWS,
    N_SENT,
    N_SHOWN,
    N_TAKEN,
    N_WRONG,
    N_WRONG_GOT,
    N_WRONG_STREAM,
    N_WRONG_WANT,
    S_SINK,
    W_NOTICES,
    W_NOTIFY_RECV,
    W_NOTIFY_SEND,
    W_NOTIFY_STRIDE,
    W_NUMBER,
    W_OPENED,
)
from .context import (
    arrived_address,
    completed_address,
    has_failed,
    is_live,
    landing_window,
    peer_window,
    sticky_code,
    wait_limit,
    window_address,
)
from .normal_pipes import (
    COMBINE,
    EVERYTHING,
    Channel,
    as_long,
    chunk_rows,
    entry,
    fail_by_notes,
    in_ring,
    is_pipe,
    node_of,
    note_wrong,
    on_channel,
    out_ring,
    over,
    peer_of,
    rest,
    set_each,
    whole,
)
from .publish import put_commands, store_flags
from .wait import FAILURE_PEER_TIMEOUT, FAILURE_PROTOCOL, GO_ON, RELEASED, TOO_LATE, end_spin, fail
from .words import (
    acquire,
    acquire_each,
    any_of,
    clock_ns,
    int32s,
    int64s,
    peek,
    poke,
    release_each,
    settle,
    uint8s,
    uniform,
)

_DISPATCH = tl.constexpr(NormalNotify.OPERATION_DISPATCH)
_NOTIFY = tl.constexpr(NORMAL_NOTIFY)
_DISPATCH_STREAM, _COMBINE_STREAM = tl.constexpr(NORMAL_DISPATCH), tl.constexpr(NORMAL_COMBINE)
_TAG_VALUE, _HEADER = tl.constexpr(NormalNotify.TAG_VALUE), tl.constexpr(HEADER_BYTES)
_AT_NUMBER, _AT_CODING = tl.constexpr(8 * NormalNotify.NUMBER), tl.constexpr(8 * NormalNotify.CODING)
_AT_SHAPE = tl.constexpr(8 * NormalNotify.SHAPE)
_AT_ROW_BYTES, _AT_META_BYTES = tl.constexpr(8 * NormalNotify.ROW_BYTES), tl.constexpr(8 * NormalNotify.META_BYTES)
_AT_ROWS, _ROWS_BYTES = tl.constexpr(8 * NormalNotify.CHANNEL_ROWS), tl.constexpr(CHANNEL_ROWS_BYTES)
_MAX_CHANNELS = tl.constexpr(MAX_CHANNELS)
#: More rows than any operation can have: indices are int32.
_MOST_ROWS = tl.constexpr(MOST_ROWS)
_PEER_INFO = tl.constexpr(8 * normal_device.INFO_WORDS)
_PEER_INFO_BYTES = tl.constexpr(8 * normal_device.PEER_INFO_WORDS)
_SEND, _RECV = tl.constexpr(normal_device.ROUTE_SEND), tl.constexpr(normal_device.ROUTE_RECV)
_RAIL_SEND, _RAIL_RECV = tl.constexpr(normal_device.ROUTE_RAIL_SEND), tl.constexpr(normal_device.ROUTE_RAIL_RECV)
_MANY = tl.constexpr(1 << 60)


class Opening(NamedTuple):
    """What an operation is opened with; int64.

    Attributes:
        in_rank: uint8[tokens, ranks], which ranks a token of this rank goes to. tokens: of this rank.
        route: int64[ROUTE_TABLES, ranks, MAX_CHANNELS], written in a first dispatch.
        expert_counts: int32[experts] to tell and to add up, in a first dispatch; else 0.
        number: int64[1], number of the dispatch that the handle is of, written in a first one.
        info: what the host is told (``blocks.normal_device``), in its memory. ticket: of this call, stored there last.
        capacity: rows that were promised to be enough, 0 = no promise.
        shape, shape_step: the digest that all ranks must share, and what it grows by with ``number``.
        coding, row_bytes, meta_bytes: of the rows. local_experts: experts of a rank.
        most_each: most experts of a rank that a token can choose.
    """

    in_rank: tl.tensor
    tokens: tl.tensor
    route: tl.tensor
    expert_counts: tl.tensor
    number: tl.tensor
    info: tl.tensor
    ticket: tl.tensor
    capacity: tl.tensor
    shape: tl.tensor
    shape_step: tl.tensor
    coding: tl.tensor
    row_bytes: tl.tensor
    meta_bytes: tl.tensor
    local_experts: tl.tensor
    most_each: tl.tensor


@triton.jit
def first_token(tokens: tl.tensor, channel: tl.tensor, channels: tl.tensor) -> tl.tensor:
    """The first token of a channel: each has as many consecutive ones, the last fewer."""
    each = (tokens + channels - 1) // channels
    return tl.minimum(channel * each, tokens)


@triton.jit
def route_at(one: Channel, route: tl.tensor, table: tl.constexpr, ranks: tl.tensor) -> tl.tensor:
    """Addresses of the ranks' rows in the channel, in a table of a route."""
    return route + 8 * ((table * one.ranks + ranks) * _MAX_CHANNELS + one.index)


@triton.jit
def _route(one: Channel, route: tl.tensor, table: tl.constexpr, ranks: tl.tensor, chosen: tl.tensor) -> tl.tensor:
    return tl.load(int64s(route_at(one, route, table, ranks)), mask=chosen, other=0)


@triton.jit
def _count_tokens(
    one: Channel, opening: Opening, NODES: tl.constexpr, RANKS: tl.constexpr, TOKENS: tl.constexpr
) -> None:
    """Count the channel's tokens for each rank, and for each node that is reached over a rail."""
    begin = first_token(opening.tokens, one.index, one.channels)
    end = first_token(opening.tokens, one.index + 1, one.channels)
    ranks = tl.arange(0, RANKS).to(tl.int64)
    inside = ranks < one.ranks
    counts = tl.zeros([RANKS], tl.int64)
    for first in range(begin, end, TOKENS):
        token = first + tl.arange(0, TOKENS).to(tl.int64)
        here = (token < end)[:, None] & inside[None, :]
        marks = tl.load(uint8s(opening.in_rank + token[:, None] * one.ranks + ranks[None, :]), mask=here, other=0)
        counts += tl.sum((marks != 0).to(tl.int32), axis=0).to(tl.int64)
    tl.store(int64s(route_at(one, opening.route, _SEND, ranks)), counts, mask=inside)
    if NODES:
        for node in range(one.ranks // one.size):
            crossing = tl.full((), 0, tl.int64)
            if node != node_of(one):
                on_node = inside & (ranks // one.size == node)
                for first in range(begin, end, TOKENS):
                    token = first + tl.arange(0, TOKENS).to(tl.int64)
                    here = (token < end)[:, None] & on_node[None, :]
                    at = uint8s(opening.in_rank + token[:, None] * one.ranks + ranks[None, :])
                    # rule: a token crosses once to a node
                    marked = tl.max((tl.load(at, mask=here, other=0) != 0).to(tl.int32), axis=1)
                    crossing += tl.sum(marked, axis=0)
            poke(route_at(one, opening.route, _RAIL_SEND, node), crossing)


@triton.jit
def _wait_notifies(
    one: Channel,
    peers: tl.tensor,
    live: tl.tensor,
    needed: tl.tensor,
    start: tl.tensor,
    ARRIVAL: tl.constexpr,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Wait until ``needed`` notifies of every ``live`` peer have arrived (``ARRIVAL``), or are sent for good: how the
    last spin ended. Who is missing is noted."""
    ending, checked = tl.full((), 0, tl.int32), start
    present = tl.full((), 0, tl.int32)
    # only scalars live from spin to spin: the layout passes of Triton 3.6 and 3.8 fail on tensors
    while (present == 0) & (ending == GO_ON):
        count = _notifies(one.context, one.state, peers, live, ARRIVAL, BACKEND)
        # rule: normal mode: an operation opens only when every peer's notify has arrived
        present = tl.min((count >= needed).to(tl.int32), axis=0)
        if present == 0:
            ending, checked = end_spin(one.context, start, checked, BACKEND)
    # the threads acquired for themselves: now for each other
    settle(BACKEND)
    if ending == TOO_LATE:
        count = _notifies(one.context, one.state, peers, live, ARRIVAL, BACKEND)
        # whoever has come since the last look is not to blame, unless everybody has
        missing = live & (count < needed)
        missing = tl.where(any_of(missing) != 0, missing, live)
        note_wrong(one, peers, missing, peers, _NOTIFY, count, needed + tl.zeros_like(peers))
    return ending


@triton.jit
def _notifies(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    ARRIVAL: tl.constexpr,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Notifies of each peer that have arrived, or that completed; of mapped peers all complete."""
    inside = tl.where(live, peers, 0)
    if ARRIVAL:
        counted, at = live, arrived_address(context, inside, _NOTIFY)
    else:
        counted = live & (peer_window(context, inside) == 0)
        at = completed_address(context, inside, _NOTIFY)
    return tl.where(counted, acquire_each(tl.where(counted, at, state + S_SINK), BACKEND), _MANY)


@triton.jit
def _notify(
    one: Channel,
    opening: Opening,
    shape: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    start: tl.tensor,
    KIND: tl.constexpr,
    NODES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Write and publish the notify to the ``live`` peers. The peers have read the slot: they have opened the last
    operation since. A NIC may still repeat the slot's last write, which is waited for: how that ended."""
    context, state = one.context, one.state
    number, notices, me, ranks = peek(state + W_NUMBER), peek(state + W_NOTICES), one.me, one.ranks
    zero = tl.zeros_like(peers)
    ending = _wait_notifies(one, peers, live, notices - 1, start, False, BACKEND)
    if ending == GO_ON:
        stride = peek(state + W_NOTIFY_STRIDE)
        parity = (number & 1) * ranks * stride
        source = peek(state + W_NOTIFY_SEND) + parity + peers * stride
        target = peek(state + W_NOTIFY_RECV) + parity + me * stride + zero
        window = peer_window(context, tl.where(live, peers, 0))
        at = tl.where(window != 0, window + target, window_address(context) + source)
        tl.store(int64s(at), zero + _TAG_VALUE, mask=live)
        tl.store(int64s(at + _AT_NUMBER), zero + number, mask=live)
        tl.store(int64s(at + _AT_CODING), zero + opening.coding, mask=live)
        tl.store(int64s(at + _AT_SHAPE), zero + shape, mask=live)
        tl.store(int64s(at + _AT_ROW_BYTES), zero + opening.row_bytes, mask=live)
        tl.store(int64s(at + _AT_META_BYTES), zero + opening.meta_bytes, mask=live)
        for channel in range(one.channels):
            # what a dispatch sent comes back in its combine
            rows_at = opening.route + 8 * channel
            table: tl.constexpr = _RECV if KIND == COMBINE else _SEND
            rows = tl.load(int64s(rows_at + 8 * _MAX_CHANNELS * (table * ranks + peers)), mask=live, other=0)
            tl.store(int32s(at + _AT_ROWS + 4 * channel), rows.to(tl.int32), mask=live)
            if NODES:
                rail_table: tl.constexpr = _RAIL_RECV if KIND == COMBINE else _RAIL_SEND
                nodes = over(peers, one.size)
                rail = live & (nodes != node_of(one)) & (rest(peers, one.size) == rest(me, one.size))
                rows = tl.load(int64s(rows_at + 8 * _MAX_CHANNELS * (rail_table * ranks + nodes)), mask=rail, other=0)
                tl.store(int32s(at + _AT_ROWS + 4 * (_MAX_CHANNELS + channel)), rows.to(tl.int32), mask=live)
        nbytes = zero + (_HEADER + _ROWS_BYTES)
        if KIND == _DISPATCH:
            for expert in range(opening.local_experts):
                told = int32s(opening.expert_counts + 4 * (peers * opening.local_experts + expert))
                count = tl.load(told, mask=live, other=0)
                tl.store(int32s(at + _AT_ROWS + _ROWS_BYTES + 4 * expert), count, mask=live)
            nbytes += (4 * opening.local_experts + 15) // 16 * 16
        settle(BACKEND)
        mapped = live & (window != 0)
        store_flags(context, state, peers, mapped, _NOTIFY, notices + 1, BACKEND)
        streams, last = zero + _NOTIFY, tl.full((), 1, tl.int64)
        proxied = live & (window == 0)
        put_commands(context, state, peers, streams, proxied, source, target, nbytes, last, start, BACKEND)
    return ending


@triton.jit
def _take_notifies(
    one: Channel,
    opening: Opening,
    shape: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    KIND: tl.constexpr,
    NODES: tl.constexpr,
) -> tl.tensor:
    """After the notifies of the ``live`` peers have arrived: read and check them. Peers of another shape; -1 when one
    is refused, which is noted."""
    context, state, ranks = one.context, one.state, one.ranks
    number, stride = peek(state + W_NUMBER), peek(state + W_NOTIFY_STRIDE)
    at = landing_window(context, tl.where(live, peers, 0)) + peek(state + W_NOTIFY_RECV)
    at += ((number & 1) * ranks + peers) * stride
    tag = tl.load(int64s(at), mask=live, other=0)
    told_number = tl.load(int64s(at + _AT_NUMBER), mask=live, other=0)
    told_shape = tl.load(int64s(at + _AT_SHAPE), mask=live, other=0)
    bad = live & (told_number != number)
    got, want = told_number, tl.zeros_like(peers) + number
    wrong = live & (tag != _TAG_VALUE)
    bad, got, want = bad | wrong, tl.where(wrong, tag, got), tl.where(wrong, _TAG_VALUE, want)
    # rule: normal mode: ranks that were given other operations part before anything is sent
    other = live & (told_shape != shape)
    # for the error that the host raises
    told = opening.info + _PEER_INFO + peers * _PEER_INFO_BYTES
    tl.store(int64s(told), told_shape, mask=other)
    tl.store(int64s(told + 8), tl.load(int64s(at + _AT_CODING), mask=other, other=0), mask=other)
    tl.store(int64s(told + 16), tl.load(int64s(at + _AT_ROW_BYTES), mask=other, other=0), mask=other)
    tl.store(int64s(told + 24), tl.load(int64s(at + _AT_META_BYTES), mask=other, other=0), mask=other)
    same = live & (other == 0) & (bad == 0)
    for channel in range(one.channels):
        rows = tl.load(int32s(at + _AT_ROWS + 4 * channel), mask=same, other=0).to(tl.int64)
        known: tl.constexpr = _SEND if KIND == COMBINE else _RECV
        known_at = opening.route + 8 * (channel + _MAX_CHANNELS * (known * ranks + peers))
        wrong, least = _take_rows(same, rows, known_at, KIND)
        bad, got, want = bad | wrong, tl.where(wrong, rows, got), tl.where(wrong, least, want)
        if NODES:
            rail_at = int32s(at + _AT_ROWS + 4 * (_MAX_CHANNELS + channel))
            rail_rows = tl.load(rail_at, mask=same, other=0).to(tl.int64)
            nodes = over(peers, one.size)
            rail = same & (nodes != node_of(one)) & (rest(peers, one.size) == rest(one.me, one.size))
            rail_known: tl.constexpr = _RAIL_SEND if KIND == COMBINE else _RAIL_RECV
            known_at = opening.route + 8 * (channel + _MAX_CHANNELS * (rail_known * ranks + nodes))
            wrong, least = _take_rows(rail, rail_rows, known_at, KIND)
            # only rail peers tell of rows to be forwarded
            wrong = wrong | (same & (rail == 0) & (rail_rows != 0))
            bad, got, want = bad | wrong, tl.where(wrong, rail_rows, got), tl.where(wrong, least, want)
    different = tl.sum(other.to(tl.int32), axis=0)
    return tl.where(note_wrong(one, peers, bad, peers, _NOTIFY, got, want) != 0, -1, different)


@triton.jit
def _take_rows(chosen: tl.tensor, rows: tl.tensor, known_at: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Take over how many rows the ``chosen`` peers have, or hold it against what is known: (whose number is refused,
    what it should be)."""
    if KIND == _DISPATCH:
        tl.store(int64s(known_at), rows, mask=chosen)
        return chosen & (rows < 0), tl.zeros_like(rows) + _MOST_ROWS
    else:
        known = tl.load(int64s(known_at), mask=chosen, other=0)
        # rule: normal mode: rows are those of the handle
        wrong = chosen & (rows != known)
        return wrong, known


@triton.jit
def _count_experts(
    one: Channel, opening: Opening, told: tl.tensor, rows_of: tl.tensor, LANES: tl.constexpr
) -> tl.tensor:
    """Add up what all ranks have for each local expert, LANES experts at a time, into int64s at ``told``. 1 when a
    count is refused, which is noted, else 0.

    ``rows_of``: int64[ranks], rows of each rank.
    """
    broken = tl.full((), 0, tl.int32)
    context, state, me, ranks = one.context, one.state, one.me, one.ranks
    stride = peek(state + W_NOTIFY_STRIDE)
    base = peek(state + W_NOTIFY_RECV) + (peek(state + W_NUMBER) & 1) * ranks * stride + _AT_ROWS + _ROWS_BYTES
    for first in range(0, opening.local_experts, LANES):
        expert = first + tl.arange(0, LANES).to(tl.int64)
        inside = expert < opening.local_experts
        own = int32s(opening.expert_counts + 4 * (me * opening.local_experts + expert))
        total = tl.load(own, mask=inside, other=0).to(tl.int64)
        for step in range(1, ranks):
            peer = (me + step) % ranks
            zero = tl.zeros_like(expert)
            live = inside & is_live(context, zero + peer)
            at = landing_window(context, peer) + base + peer * stride
            count = tl.load(int32s(at + 4 * expert), mask=live, other=0).to(tl.int64)
            most = peek(rows_of + 8 * peer) * opening.most_each
            wrong = live & ((count < 0) | (count > most))
            # of several wrong ones any may be told
            broken |= note_wrong(one, zero + peer, wrong, zero + peer, _NOTIFY, count, most + zero)
            total += count
        tl.store(int64s(told + 8 * expert), total, mask=inside)
    return broken


@triton.jit
def _place(
    one: Channel, opening: Opening, table: tl.constexpr, ranks: tl.tensor, begin: tl.tensor, PIPES: tl.constexpr
) -> tl.tensor:
    """Say where the rows of every (rank, channel) of a route's ``table``, of ``ranks`` ranks or nodes, begin when all
    stand one behind the other, in FIRST from pipe ``begin`` on; how many there are in all."""
    total = tl.full((), 0, tl.int64)
    each: tl.constexpr = PIPES // _MAX_CHANNELS
    for first in range(0, ranks, each):
        index = tl.arange(0, PIPES).to(tl.int64)
        rank, channel = first + index // _MAX_CHANNELS, index % _MAX_CHANNELS
        inside = (rank < ranks) & (channel < one.channels)
        at = opening.route + 8 * ((table * one.ranks + rank) * _MAX_CHANNELS + channel)
        rows = tl.load(int64s(at), mask=inside, other=0)
        before = total + tl.cumsum(rows, axis=0) - rows
        set_each(on_channel(one, channel), N_FIRST, begin + rank, inside, before)
        total += tl.sum(rows, axis=0)
    return total


@triton.jit
def _set_pipes(one: Channel, opening: Opening, KIND: tl.constexpr, NODES: tl.constexpr, PIPES: tl.constexpr) -> None:
    """Set the channel's tables: how many rows go through each pipe, and where; nothing has moved yet."""
    pipes = tl.arange(0, PIPES).to(tl.int64)
    live, inside = is_pipe(one, pipes, NODES), pipes < one.ranks
    peers = tl.where(live, peer_of(one, pipes, NODES), 0)
    outgoing: tl.constexpr = _RECV if KIND == COMBINE else _SEND
    incoming: tl.constexpr = _SEND if KIND == COMBINE else _RECV
    send = _route(one, opening.route, outgoing, pipes, live & inside)
    receive = _route(one, opening.route, incoming, pipes, live & inside)
    if NODES:
        rail = live & (inside == 0)
        # a pipe about another node: how many of that one's rows are forwarded, or summed, here
        node = tl.where(inside, over(pipes, one.size), pipes - one.ranks)
        about = live & inside & (node != node_of(one))
        rail_send = _route(one, opening.route, _RAIL_SEND, node, live)
        rail_receive = _route(one, opening.route, _RAIL_RECV, node, live)
        unknown = tl.where(rail_receive > 0, EVERYTHING, 0)
        if KIND == COMBINE:
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
    set_each(one, N_IN_CHUNK, pipes, live, receive_chunk)
    set_each(one, N_OUT_CHUNK, pipes, live, send_chunk)
    set_each(one, N_LANDING_ROWS, pipes, live, landing)
    every = pipes < 2 * one.ranks
    set_each(one, N_SEND_ROWS, pipes, every, tl.where(live, send, 0))
    set_each(one, N_RECV_ROWS, pipes, every, tl.where(live, receive, 0))
    set_each(one, N_IN_RING, pipes, live, in_ring(one, pipes, peers))
    set_each(one, N_IN_ROWS, pipes, live, in_rows)
    set_each(one, N_OUT_RING, pipes, live, out_ring(one, pipes, peers, NODES))
    set_each(one, N_OUT_ROWS, pipes, live, out_rows)
    zero = tl.zeros_like(pipes)
    set_each(one, N_ARRIVED, pipes, every, zero)
    set_each(one, N_LIMIT, pipes, every, zero)
    set_each(one, N_SENT, pipes, every, zero)
    set_each(one, N_NEXT_SENT, pipes, every, zero)
    set_each(one, N_SHOWN, pipes, every, zero)
    set_each(one, N_TAKEN, pipes, every, zero)
    set_each(one, N_NEXT_TAKEN, pipes, every, zero)
    set_each(one, N_FREED, pipes, every, zero)
    stream = tl.where(one.phase == 0, _DISPATCH_STREAM, _COMBINE_STREAM) + one.index
    set_each(one, N_WRONG_STREAM, pipes, every, stream)
    set_each(one, N_WRONG_GOT, pipes, every, zero)
    set_each(one, N_WRONG_WANT, pipes, every, zero)


@triton.jit
def _settle_counts(
    one: Channel, opening: Opening, KIND: tl.constexpr, NODES: tl.constexpr, PIPES: tl.constexpr, BACKEND: tl.constexpr
) -> tl.tensor:
    """All notifies are here: tell the host how many rows there are, and say where they go. 1 when one is refused."""
    info, broken = opening.info, tl.full((), 0, tl.int32)
    ranks = tl.arange(0, PIPES).to(tl.int64)
    # rows of each rank, for a moment where tables of channel 0 stand afterwards
    first = on_channel(one, as_long(0))
    if KIND == _DISPATCH:
        came, away = tl.zeros_like(ranks), tl.zeros_like(ranks)
        for channel in range(one.channels):
            here = on_channel(one, as_long(channel))
            inside = ranks < one.ranks
            mine = inside & (ranks == one.me)
            own = _route(here, opening.route, _SEND, ranks, mine)
            tl.store(int64s(route_at(here, opening.route, _RECV, ranks)), own, mask=mine)
            # a rank that is masked tells nothing
            gone = inside & (is_live(one.context, ranks) == 0)
            tl.store(int64s(route_at(here, opening.route, _RECV, ranks)), tl.zeros_like(ranks), mask=gone)
            if NODES:
                poke(route_at(here, opening.route, _RAIL_RECV, node_of(one)), as_long(0))
        settle(BACKEND)
        for channel in range(one.channels):
            here = on_channel(one, as_long(channel))
            inside = ranks < one.ranks
            came += _route(here, opening.route, _RECV, ranks, inside)
            away += _route(here, opening.route, _SEND, ranks, inside & (ranks != one.me))
        set_each(first, N_ARRIVED, ranks, ranks < one.ranks, came)
        settle(BACKEND)
        counted = opening.info + _PEER_INFO + one.ranks * _PEER_INFO_BYTES
        broken = _count_experts(one, opening, counted, entry(first, N_ARRIVED, 0), PIPES)
        poke(info + I_REMOTE_ROWS, tl.sum(away, axis=0))
        poke(opening.number, peek(one.state + W_NUMBER))
        settle(BACKEND)
    total = _place(one, opening, _RECV, one.ranks, as_long(0), PIPES)
    if NODES:
        relayed = _place(one, opening, _RAIL_RECV, one.ranks // one.size, one.ranks, PIPES)
        poke(info + I_RELAYED, relayed)
    poke(info + I_TOTAL, total)
    # rule: normal mode: the host is told that more rows came than num_worst_tokens promised
    if (KIND == _DISPATCH) & (opening.capacity > 0):
        if total > opening.capacity:
            poke(info + I_OVERFLOW_ROWS, total)
    settle(BACKEND)
    for channel in range(one.channels):
        _set_pipes(on_channel(one, as_long(channel)), opening, KIND, NODES, PIPES)
    return broken


@triton.jit
def open_operation(
    one: Channel,
    opening: Opening,
    KIND: tl.constexpr,
    NODES: tl.constexpr,
    RANKS: tl.constexpr,
    TOKENS: tl.constexpr,
    PIPES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """Tell all peers, then wait for what all peers tell, and tell the host and the other programs."""
    context, state = one.context, one.state
    different, number = tl.full((), -1, tl.int32), peek(state + W_NUMBER)
    # of windows that are gone the verdict alone is left
    over = uniform(has_failed(context).to(tl.int32), BACKEND)
    if over == 0:
        over = released(context, state, BACKEND)
    if over == 0:
        start = clock_ns(BACKEND)
        shape = opening.shape
        if KIND == _DISPATCH:
            for channel in range(one.channels):
                _count_tokens(on_channel(one, as_long(channel)), opening, NODES, RANKS, TOKENS)
            settle(BACKEND)
        else:
            # in halves: the product need not fit
            of_handle = peek(opening.number) + 1
            low, high = opening.shape_step & 0xFFFF, opening.shape_step >> 16
            step = of_handle * low + (((of_handle * high) & 0x7FFFFFFFFFFF) << 16)
            shape = (shape + step) & 0x7FFFFFFFFFFFFFFF
        every = tl.arange(0, PIPES).to(tl.int64)
        for channel in range(one.channels):
            here = on_channel(one, as_long(channel))
            set_each(here, N_WRONG, every, every < 2 * one.ranks, tl.zeros_like(every))
        settle(BACKEND)
        ending = tl.full((), GO_ON, tl.int32)
        for first in range(0, one.ranks, PIPES):
            peers = first + tl.arange(0, PIPES).to(tl.int64)
            live = is_live(context, peers) & (peers != one.me)
            if ending == GO_ON:
                ending = _notify(one, opening, shape, peers, live, start, KIND, NODES, BACKEND)
        for first in range(0, one.ranks, PIPES):
            peers = first + tl.arange(0, PIPES).to(tl.int64)
            live = is_live(context, peers) & (peers != one.me)
            if ending == GO_ON:
                ending = _wait_notifies(one, peers, live, peek(state + W_NOTICES) + 1, start, True, BACKEND)
        different = tl.where(ending == GO_ON, 0, -1).to(tl.int32)
        for first in range(0, one.ranks, PIPES):
            peers = first + tl.arange(0, PIPES).to(tl.int64)
            live = is_live(context, peers) & (peers != one.me)
            if different >= 0:
                found = _take_notifies(one, opening, shape, peers, live, KIND, NODES)
                different = tl.where(found < 0, -1, different + found)
        settle(BACKEND)
        if different == 0:
            if _settle_counts(one, opening, KIND, NODES, PIPES, BACKEND) != 0:
                different = tl.full((), -1, tl.int32)
        if ending == RELEASED:
            fail(context, state, 0, -1, -1, 0, 0, BACKEND)
        elif different < 0:
            code = tl.where(ending == TOO_LATE, FAILURE_PEER_TIMEOUT, FAILURE_PROTOCOL)
            fail_by_notes(one, code, PIPES, BACKEND)
    if different > 0:
        poke(opening.info + I_SHAPE_MISMATCH, different.to(tl.int64))
    poke(opening.info + I_DIFFERENT, different.to(tl.int64))
    settle(BACKEND)
    lane = tl.arange(0, PIPES)
    words = tl.zeros([PIPES], tl.int64)
    sink = state + S_SINK
    release_each(words + opening.info + I_TICKET, words + opening.ticket, lane == 0, sink, BACKEND)
    opened = tl.where(different == 0, number + 1, -(number + 1))
    tl.atomic_xchg(int64s(state + W_OPENED), opened, sem="release", scope="gpu")
    settle(BACKEND)


@triton.jit
def released(context: tl.tensor, state: tl.tensor, BACKEND: tl.constexpr) -> tl.tensor:
    """1 when a proxy or the host has set the sticky error: the verdict is then set, and nothing may be published."""
    over = (sticky_code(context, BACKEND) != 0).to(tl.int32)
    if over != 0:
        fail(context, state, 0, -1, -1, 0, 0, BACKEND)
    return over


@triton.jit
def await_opened(one: Channel, BACKEND: tl.constexpr) -> tl.tensor:
    """Wait until program 0 has opened the operation: 1 when its rows may move, 0 when they may not.

    Program 0 has a limit of its own, twice which is waited here: for what it sends, and for what it receives.
    """
    number, start = peek(one.state + W_NUMBER), clock_ns(BACKEND)
    opened = acquire(one.state + W_OPENED, BACKEND)
    while (opened != number + 1) & (opened != -(number + 1)):
        opened = acquire(one.state + W_OPENED, BACKEND)
        late = (clock_ns(BACKEND) - start > 4 * wait_limit(one.context)).to(tl.int32)
        if uniform(late, BACKEND) != 0:
            fail(one.context, one.state, FAILURE_PEER_TIMEOUT, one.me, _NOTIFY, 0, 1, BACKEND)
            opened = -(number + 1)
    # each thread has acquired for itself: now for the others
    settle(BACKEND)
    return (opened == number + 1).to(tl.int32)
