"""The messages that open a normal-mode operation: what each rank tells every rank, waits for, and checks."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ...protocol.message import CHANNEL_ROWS_BYTES, HEADER_BYTES, NormalNotify
from ...protocol.streams import NORMAL_CHANNELS, NORMAL_NOTIFY
from ..blocks import normal_device
from .blocks import S, W
from .context import arrived_address, completed_address, is_live, landing_window, peer_window, window_address
from .normal_pipes import COMBINE, EVERYTHING, Channel, node_of, over, rest
from .normal_progress import note_wrong
from .publish import put_batch, store_flags
from .wait import GO_ON, TOO_LATE, end_spin
from .words import acquire_each, any_of, int32s, int64s, peek, settle

#: A first dispatch, which tells what nobody knows yet.
DISPATCH = tl.constexpr(NormalNotify.OPERATION_DISPATCH)
NOTIFY = tl.constexpr(NORMAL_NOTIFY)
_TAG_VALUE, _HEADER = tl.constexpr(NormalNotify.TAG_VALUE), tl.constexpr(HEADER_BYTES)
_AT_NUMBER, _AT_CODING = tl.constexpr(8 * NormalNotify.NUMBER), tl.constexpr(8 * NormalNotify.CODING)
_AT_SHAPE = tl.constexpr(8 * NormalNotify.SHAPE)
_AT_ROW_BYTES, _AT_META_BYTES = tl.constexpr(8 * NormalNotify.ROW_BYTES), tl.constexpr(8 * NormalNotify.META_BYTES)
_AT_ROWS, _ROWS_BYTES = tl.constexpr(8 * NormalNotify.CHANNEL_ROWS), tl.constexpr(CHANNEL_ROWS_BYTES)
_CHANNELS = tl.constexpr(NORMAL_CHANNELS)
#: Where the host is told what peers of another shape said, and bytes for each.
PEER_INFO = tl.constexpr(8 * normal_device.INFO_WORDS)
PEER_INFO_BYTES = tl.constexpr(8 * normal_device.PEER_INFO_WORDS)
#: Tables of a route.
SEND, RECV = tl.constexpr(normal_device.ROUTE_SEND), tl.constexpr(normal_device.ROUTE_RECV)
RAIL_SEND, RAIL_RECV = tl.constexpr(normal_device.ROUTE_RAIL_SEND), tl.constexpr(normal_device.ROUTE_RAIL_RECV)
_MANY = tl.constexpr(1 << 60)


class Opening(NamedTuple):
    """What an operation is opened with; int64.

    Attributes:
        in_rank: uint8[tokens, ranks], which ranks a token of this rank goes to. tokens: of this rank.
        route: int64[ROUTE_TABLES, ranks, NORMAL_CHANNELS], written in a first dispatch.
        expert_counts: int32[experts] to tell and to add up, in a first dispatch; else 0.
        wrong: int64[1] that :func:`.routing.mark_tokens` has left; 0 where it has counted nothing.
        number: int64[1], number of the dispatch that the handle is of, written in a first one.
        info: what the host is told (``blocks.normal_device``), in its memory. ticket: of this call, stored there last.
        capacity: rows that were promised to be enough, 0 = no promise.
        digest, digest_step: of all sizes, which all ranks must share, and what it grows by with ``number``.
        coding, row_bytes, meta_bytes: of the rows. local_experts: experts of a rank.
        most_each: how often a token can choose an expert.
    """

    in_rank: tl.tensor
    tokens: tl.tensor
    route: tl.tensor
    expert_counts: tl.tensor
    wrong: tl.tensor
    number: tl.tensor
    info: tl.tensor
    ticket: tl.tensor
    capacity: tl.tensor
    digest: tl.tensor
    digest_step: tl.tensor
    coding: tl.tensor
    row_bytes: tl.tensor
    meta_bytes: tl.tensor
    local_experts: tl.tensor
    most_each: tl.tensor


@triton.jit
def route_at(one: Channel, route: tl.tensor, table: tl.constexpr, ranks: tl.tensor) -> tl.tensor:
    """Addresses of the ranks' rows in the channel, in a table of a route."""
    return route + 8 * ((table * one.ranks + ranks) * _CHANNELS + one.index)


@triton.jit
def route_of(one: Channel, route: tl.tensor, table: tl.constexpr, ranks: tl.tensor, chosen: tl.tensor) -> tl.tensor:
    return tl.load(int64s(route_at(one, route, table, ranks)), mask=chosen, other=0)


@triton.jit
def wait_notifies(
    one: Channel, peers: tl.tensor, live: tl.tensor, needed: tl.tensor, start: tl.tensor, ARRIVAL: tl.constexpr
) -> tl.tensor:
    """Wait until ``needed`` notifies of every ``live`` peer have arrived (``ARRIVAL``), or are sent for good: how the
    last spin ended. Who is missing is noted."""
    ending, checked = tl.full((), 0, tl.int32), start
    present = tl.full((), 0, tl.int32)
    # only scalars live from spin to spin: the layout passes of Triton 3.6 and 3.8 fail on tensors
    while (present == 0) & (ending == GO_ON):
        count = _notifies(one.context, one.state, peers, live, ARRIVAL)
        # rule: normal mode: an operation opens only when every peer's notify has arrived
        present = tl.min((count >= needed).to(tl.int32), axis=0)
        if present == 0:
            ending, checked = end_spin(one.context, start, checked)
    # the threads acquired for themselves: now for each other
    settle()
    if ending == TOO_LATE:
        count = _notifies(one.context, one.state, peers, live, ARRIVAL)
        # whoever has come since the last look is not to blame, unless everybody has
        missing = live & (count < needed)
        missing = tl.where(any_of(missing) != 0, missing, live)
        note_wrong(one, peers, missing, peers, NOTIFY, count, needed + tl.zeros_like(peers))
    return ending


@triton.jit
def _notifies(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, live: tl.tensor, ARRIVAL: tl.constexpr
) -> tl.tensor:
    """Notifies of each peer that have arrived, or that completed; of mapped peers all complete."""
    inside = tl.where(live, peers, 0)
    if ARRIVAL:
        counted, at = live, arrived_address(context, inside, NOTIFY)
    else:
        counted = live & (peer_window(context, inside) == 0)
        at = completed_address(context, inside, NOTIFY)
    return tl.where(counted, acquire_each(tl.where(counted, at, state + S.SINK)), _MANY)


@triton.jit
def send_notifies(
    one: Channel,
    opening: Opening,
    digest: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    start: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """Write and publish the notify to the ``live`` peers. The peers have read the slot: they have opened the last
    operation since. A NIC may still repeat the slot's last write, which is waited for: how that ended."""
    context, state = one.context, one.state
    number, me, ranks = peek(state + W.NUMBER), one.me, one.ranks
    zero = tl.zeros_like(peers)
    ending = wait_notifies(one, peers, live, number - 1, start, False)
    if ending == GO_ON:
        stride = peek(state + W.NOTIFY_STRIDE)
        parity = (number & 1) * ranks * stride
        source = peek(state + W.NOTIFY_SEND) + parity + peers * stride
        target = peek(state + W.NOTIFY_RECV) + parity + me * stride + zero
        window = peer_window(context, tl.where(live, peers, 0))
        at = tl.where(window != 0, window + target, window_address(context) + source)
        tl.store(int64s(at), zero + _TAG_VALUE, mask=live)
        tl.store(int64s(at + _AT_NUMBER), zero + number, mask=live)
        tl.store(int64s(at + _AT_CODING), zero + opening.coding, mask=live)
        tl.store(int64s(at + _AT_SHAPE), zero + digest, mask=live)
        tl.store(int64s(at + _AT_ROW_BYTES), zero + opening.row_bytes, mask=live)
        tl.store(int64s(at + _AT_META_BYTES), zero + opening.meta_bytes, mask=live)
        for channel in range(one.channels):
            # what a dispatch sent comes back in its combine
            rows_at = opening.route + 8 * channel
            table: tl.constexpr = RECV if shape.KIND == COMBINE else SEND
            rows = tl.load(int64s(rows_at + 8 * _CHANNELS * (table * ranks + peers)), mask=live, other=0)
            tl.store(int32s(at + _AT_ROWS + 4 * channel), rows.to(tl.int32), mask=live)
            if shape.NODES:
                rail_table: tl.constexpr = RAIL_RECV if shape.KIND == COMBINE else RAIL_SEND
                nodes = over(peers, one.size)
                rail = live & (nodes != node_of(one)) & (rest(peers, one.size) == rest(me, one.size))
                rows = tl.load(int64s(rows_at + 8 * _CHANNELS * (rail_table * ranks + nodes)), mask=rail, other=0)
                tl.store(int32s(at + _AT_ROWS + 4 * (_CHANNELS + channel)), rows.to(tl.int32), mask=live)
        nbytes = zero + (_HEADER + _ROWS_BYTES)
        if shape.KIND == DISPATCH:
            for expert in range(opening.local_experts):
                told = int32s(opening.expert_counts + 4 * (peers * opening.local_experts + expert))
                count = tl.load(told, mask=live, other=0)
                tl.store(int32s(at + _AT_ROWS + _ROWS_BYTES + 4 * expert), count, mask=live)
            nbytes += (4 * opening.local_experts + 15) // 16 * 16
        settle()
        mapped = live & (window != 0)
        store_flags(context, state, peers, mapped, NOTIFY, number + 1)
        proxied, stream = live & (window == 0), tl.full((), NOTIFY, tl.int64)
        ending, took, needed = put_batch(context, state, peers, stream, proxied, source, target, nbytes, start)
        note_wrong(one, peers, proxied & (zero + took < needed), me, NOTIFY, took, needed)
    return ending


@triton.jit
def take_notifies(
    one: Channel, opening: Opening, digest: tl.tensor, peers: tl.tensor, live: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    """After the notifies of the ``live`` peers have arrived: read and check them. Peers of another shape; -1 when one
    is refused, which is noted."""
    context, state, ranks = one.context, one.state, one.ranks
    number, stride = peek(state + W.NUMBER), peek(state + W.NOTIFY_STRIDE)
    at = landing_window(context, tl.where(live, peers, 0)) + peek(state + W.NOTIFY_RECV)
    at += ((number & 1) * ranks + peers) * stride
    tag = tl.load(int64s(at), mask=live, other=0)
    told_number = tl.load(int64s(at + _AT_NUMBER), mask=live, other=0)
    told_shape = tl.load(int64s(at + _AT_SHAPE), mask=live, other=0)
    bad = live & (told_number != number)
    got, want = told_number, tl.zeros_like(peers) + number
    wrong = live & (tag != _TAG_VALUE)
    bad, got, want = bad | wrong, tl.where(wrong, tag, got), tl.where(wrong, _TAG_VALUE, want)
    # rule: normal mode: ranks that were given other operations part before anything is sent
    other = live & (told_shape != digest)
    # for the error that the host raises
    told = opening.info + PEER_INFO + peers * PEER_INFO_BYTES
    tl.store(int64s(told), told_shape, mask=other)
    tl.store(int64s(told + 8), tl.load(int64s(at + _AT_CODING), mask=other, other=0), mask=other)
    tl.store(int64s(told + 16), tl.load(int64s(at + _AT_ROW_BYTES), mask=other, other=0), mask=other)
    tl.store(int64s(told + 24), tl.load(int64s(at + _AT_META_BYTES), mask=other, other=0), mask=other)
    same = live & (other == 0) & (bad == 0)
    for channel in range(one.channels):
        rows = tl.load(int32s(at + _AT_ROWS + 4 * channel), mask=same, other=0).to(tl.int64)
        known: tl.constexpr = SEND if shape.KIND == COMBINE else RECV
        known_at = opening.route + 8 * (channel + _CHANNELS * (known * ranks + peers))
        wrong, least = _take_rows(same, rows, known_at, shape)
        bad, got, want = bad | wrong, tl.where(wrong, rows, got), tl.where(wrong, least, want)
        if shape.NODES:
            rail_at = int32s(at + _AT_ROWS + 4 * (_CHANNELS + channel))
            rail_rows = tl.load(rail_at, mask=same, other=0).to(tl.int64)
            nodes = over(peers, one.size)
            rail = same & (nodes != node_of(one)) & (rest(peers, one.size) == rest(one.me, one.size))
            rail_known: tl.constexpr = RAIL_SEND if shape.KIND == COMBINE else RAIL_RECV
            known_at = opening.route + 8 * (channel + _CHANNELS * (rail_known * ranks + nodes))
            wrong, least = _take_rows(rail, rail_rows, known_at, shape)
            # only rail peers tell of rows to be forwarded
            wrong = wrong | (same & (rail == 0) & (rail_rows != 0))
            bad, got, want = bad | wrong, tl.where(wrong, rail_rows, got), tl.where(wrong, least, want)
    different = tl.sum(other.to(tl.int32), axis=0)
    return tl.where(note_wrong(one, peers, bad, peers, NOTIFY, got, want) != 0, -1, different)


@triton.jit
def _take_rows(chosen: tl.tensor, rows: tl.tensor, known_at: tl.tensor, shape: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Take over how many rows the ``chosen`` peers have, or hold it against what is known: (whose number is refused,
    what it should be)."""
    if shape.KIND == DISPATCH:
        tl.store(int64s(known_at), rows, mask=chosen)
        return chosen & ((rows < 0) | (rows >= EVERYTHING)), tl.zeros_like(rows) + EVERYTHING
    else:
        known = tl.load(int64s(known_at), mask=chosen, other=0)
        # rule: normal mode: rows are those of the handle
        wrong = chosen & (rows != known)
        return wrong, known


@triton.jit
def count_experts(
    one: Channel, opening: Opening, told: tl.tensor, rows_of: tl.tensor, LANES: tl.constexpr
) -> tl.tensor:
    """Add up what all ranks have for each local expert, LANES experts at a time, into int64s at ``told``. 1 when a
    count is refused, which is noted, else 0.

    ``rows_of``: int64[ranks], rows of each rank.
    """
    broken = tl.full((), 0, tl.int32)
    context, state, me, ranks = one.context, one.state, one.me, one.ranks
    stride = peek(state + W.NOTIFY_STRIDE)
    base = peek(state + W.NOTIFY_RECV) + (peek(state + W.NUMBER) & 1) * ranks * stride + _AT_ROWS + _ROWS_BYTES
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
            broken |= note_wrong(one, zero + peer, wrong, zero + peer, NOTIFY, count, most + zero)
            total += count
        tl.store(int64s(told + 8 * expert), total, mask=inside)
    return broken
