"""Bounded waits inside kernels, and how a kernel fails.

A wait ends when what it waits for is there, when the time limit of the kernel context is over, or when the sticky error
is set (a proxy died, the host saw a peer's connection close). However it fails, the verdict in device memory is set:
later kernels write and publish nothing; counts and sums are zero, ids -1, and rows of a normal dispatch not written.
The first failure is reported in host memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol import context as ctx
from .blocks import S
from .context import (
    arrived_address,
    channel_count,
    completed_address,
    peer_window,
    report_address,
    sticky_code,
    stream_of,
    verdict_address,
    wait_limit,
)
from .words import acquire_each, any_of, clock_ns, int64s, of_lane, poke, release_each, settle, uniform

FAILURE_PEER_TIMEOUT = tl.constexpr(ctx.FAILURE_PEER_TIMEOUT)
FAILURE_PROTOCOL = tl.constexpr(ctx.FAILURE_PROTOCOL)
FAILURE_RING_FULL = tl.constexpr(ctx.FAILURE_RING_FULL)
ERROR_CODE, ERROR_PEER = tl.constexpr(8 * ctx.ERROR_CODE), tl.constexpr(8 * ctx.ERROR_PEER)
ERROR_STREAM = tl.constexpr(8 * ctx.ERROR_STREAM)
ERROR_ARRIVED, ERROR_EXPECTED = tl.constexpr(8 * ctx.ERROR_ARRIVED), tl.constexpr(8 * ctx.ERROR_EXPECTED)
ERROR_IDS, ERROR_IDS_SHIFT = tl.constexpr(8 * ctx.ERROR_IDS), tl.constexpr(ctx.ERROR_IDS_SHIFT)
#: How a spin of a waiting loop ends: go on; the time is over; released by the sticky error. And how a wait for room in
#: a ring ends when the time is over.
GO_ON, TOO_LATE, RELEASED, STILL_FULL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)

#: Nanoseconds after which a waiting program reads the sticky error again. That lies in host memory, where proxies
#: set it, and a read over PCIe takes longer than a read of counts in device memory: it would hold up every spin.
CHECK_NS = tl.constexpr(20_000)

#: No peer: what :func:`first_of` finds where none is chosen.
NOBODY = tl.constexpr(1 << 30)


@triton.jit
def fail(
    context: tl.tensor,
    state: tl.tensor,
    code: tl.tensor,
    peer: tl.tensor,
    stream: tl.tensor,
    arrived: tl.tensor,
    expected: tl.tensor,
) -> None:
    """Set the verdict; the first to do so reports. ``code`` 0: released by a failure that the host knows already."""
    before = tl.atomic_xchg(int64s(verdict_address(context)), 1, sem="acq_rel", scope="gpu")
    if before == 0:
        if code != 0:
            report = report_address(context)
            poke(report + ERROR_PEER, peer)
            poke(report + ERROR_STREAM, stream)
            poke(report + ERROR_ARRIVED, arrived)
            poke(report + ERROR_EXPECTED, expected)
            settle()
            lane = tl.arange(0, 2)
            words = tl.zeros([2], tl.int64)
            release_each(words + report + ERROR_CODE, words + code, lane == 0, state + S.SINK)


@triton.jit
def report_id(context: tl.tensor, state: tl.tensor, position: tl.tensor, experts: tl.tensor) -> None:
    """Tell the host of an expert id out of range. Kernels take it for -1 and go on: what they send is right, and the
    other ranks count on this operation."""
    lane = tl.arange(0, 2)
    words = tl.zeros([2], tl.int64)
    told = ((position + 1) << ERROR_IDS_SHIFT) | experts
    release_each(words + report_address(context) + ERROR_IDS, words + told, lane == 0, state + S.SINK)


@triton.jit
def first_of(peers: tl.tensor, chosen: tl.tensor) -> tl.tensor:
    """Smallest of the ``chosen`` peers."""
    return tl.min(tl.where(chosen, peers, NOBODY).to(tl.int32), axis=0).to(tl.int64)


@triton.jit
def fail_at(
    context: tl.tensor,
    state: tl.tensor,
    code: tl.tensor,
    peers: tl.tensor,
    bad: tl.tensor,
    stream: tl.tensor,
    arrived: tl.tensor,
    expected: tl.tensor,
) -> None:
    """:func:`fail` with the smallest of the ``bad`` peers, which must not be empty. The rest are tensors like it."""
    peer = first_of(peers, bad)
    mine = peers == peer
    zero = tl.zeros_like(peers)
    fail(
        context,
        state,
        code,
        peer,
        of_lane(zero + stream, mine),
        of_lane(zero + arrived, mine),
        of_lane(zero + expected, mine),
    )


@triton.jit
def end_spin(context: tl.tensor, start: tl.tensor, checked: tl.tensor) -> tuple[tl.tensor, ...]:
    """End a spin of a waiting loop that began at ``start``.

    The sticky error ends a wait at most CHECK_NS and a spin after it is set.

    Args:
        checked: clock at the last read of the sticky error; ``start`` at first.

    Returns:
        (GO_ON, TOO_LATE or RELEASED, int32, the same everywhere; ``checked`` for the next spin).
    """
    now = clock_ns()
    late = now - start > wait_limit(context)
    # also when the time is over: the host may know whom to blame, where this program would guess
    # rule: a waiting kernel leaves memory of the host alone most of the time
    due = late | (now - checked > CHECK_NS)
    # every lane has read a clock of its own: what one finds counts for all, late being more than due
    found = uniform(due.to(tl.int32) + late.to(tl.int32))
    ending = tl.where(found == 2, TOO_LATE, GO_ON).to(tl.int32)
    # rule: a wait ends when the sticky error is set
    if found != 0:
        checked = now
        ending = tl.where(sticky_code(context) != 0, RELEASED, ending)
    return ending, checked


@triton.jit
def messages_arrived(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, live: tl.tensor, phase: tl.tensor, number: tl.tensor
) -> tuple[tl.tensor, ...]:
    """(least count over channels, its stream) of message ``number``'s streams from each of the ``live`` peers."""
    first = stream_of(phase, number)
    least = tl.full(peers.shape, 1 << 60, tl.int64)
    stream = tl.zeros(peers.shape, tl.int64) + first
    inside = tl.where(live, peers, 0)
    for channel in range(channel_count(context)):
        address = arrived_address(context, inside, first + channel)
        count = acquire_each(tl.where(live, address, state + S.SINK))
        stream = tl.where(count < least, first + channel, stream)
        least = tl.minimum(least, count)
    return least, stream


@triton.jit
def messages_completed(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, live: tl.tensor, phase: tl.tensor, number: tl.tensor
) -> tuple[tl.tensor, ...]:
    """The same for own messages that completed locally; mapped peers count as complete."""
    first = stream_of(phase, number)
    least = tl.full(peers.shape, 1 << 60, tl.int64)
    stream = tl.zeros(peers.shape, tl.int64) + first
    inside = tl.where(live, peers, 0)
    proxied = live & (peer_window(context, inside) == 0)
    for channel in range(channel_count(context)):
        address = completed_address(context, inside, first + channel)
        count = acquire_each(tl.where(proxied, address, state + S.SINK))
        stream = tl.where(proxied & (count < least), first + channel, stream)
        least = tl.where(proxied, tl.minimum(least, count), least)
    return least, stream


@triton.jit
def wait_messages(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    timed: tl.tensor,
    phase: tl.tensor,
    number: tl.tensor,
    waited: tl.tensor,
    start: tl.tensor,
    ARRIVAL: tl.constexpr,
) -> tl.tensor:
    """Wait until message ``number`` of every ``live`` peer has arrived (``ARRIVAL``) or completed locally.

    Args:
        peers: int64 tensor of peers, one per lane. timed: those whose waits this program tells.
        waited: address of int64[ranks] to which each timed peer's nanoseconds are added, or 0.
        start: clock at which the kernel's time began.

    Returns:
        True; False after :func:`fail`.
    """
    expected = number // 2 + 1
    ending, checked = tl.full((), 0, tl.int32), start
    present = tl.full((), 0, tl.int32)
    since = start
    if waited != 0:
        since = clock_ns()
    # only scalars live from spin to spin: the layout passes of Triton 3.6 and 3.8 fail on tensors
    while (present == 0) & (ending == GO_ON):
        if ARRIVAL:
            count, _ = messages_arrived(context, state, peers, live, phase, number)
        else:
            count, _ = messages_completed(context, state, peers, live, phase, number)
        # rule: low latency: a receive waits for every unmasked peer
        here = (count >= expected) | (live == 0)
        present = tl.min(here.to(tl.int32), axis=0)
        if present == 0:
            ending, checked = end_spin(context, start, checked)
        if waited != 0:
            now = clock_ns()
            slot = int64s(waited + 8 * tl.where(live, peers, 0))
            tl.store(slot, tl.load(slot, mask=timed, other=0) + (now - since), mask=timed & (here == 0))
            since = now
    # the lanes acquired for themselves: now for each other
    settle()
    if ending != GO_ON:
        if ARRIVAL:
            late, stream = messages_arrived(context, state, peers, live, phase, number)
        else:
            late, stream = messages_completed(context, state, peers, live, phase, number)
        # whoever has come since the last check is not to blame, unless everybody has
        missing = live & (late < expected)
        code = tl.where(ending == TOO_LATE, FAILURE_PEER_TIMEOUT, 0)
        if any_of(missing) == 0:
            missing = live
        fail_at(context, state, code, peers, missing, stream, late, expected)
    return ending == GO_ON
