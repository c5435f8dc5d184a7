"""Waiting for counts of one stream, and refusing what a peer claims; in programs of one warp, LANES peers at once."""

from __future__ import annotations

import triton
import triton.language as tl

from .context import (
    S_SINK,
    arrived_address,
    channel_count,
    completed_address,
    peer_window,
    sticky_code,
    window_address,
)
from .publish import put_writes, store_flags, wait_room
from .wait import FAILURE_PEER_TIMEOUT, GO_ON, TOO_LATE, fail, fail_at, turn_over
from .words import acquire_each, any_of, settle, uniform

_MANY = tl.constexpr(1 << 60)


@triton.jit
def released(context: tl.tensor, state: tl.tensor, BACKEND: tl.constexpr) -> tl.tensor:
    """1 when a proxy or the host has set the sticky error: the verdict is then set, and nothing may be published."""
    over = uniform((sticky_code(context, BACKEND) != 0).to(tl.int32), BACKEND)
    if over != 0:
        fail(context, state, 0, -1, -1, 0, 0, BACKEND)
    return over


@triton.jit
def arrived_each(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, live: tl.tensor, stream: tl.tensor, BACKEND: tl.constexpr
) -> tl.tensor:
    """Messages of ``stream`` that have arrived from each of the ``live`` peers."""
    address = arrived_address(context, tl.where(live, peers, 0), stream)
    return tl.where(live, acquire_each(tl.where(live, address, state + S_SINK), BACKEND), _MANY)


@triton.jit
def completed_each(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, live: tl.tensor, stream: tl.tensor, BACKEND: tl.constexpr
) -> tl.tensor:
    """Own messages of ``stream`` that completed locally; mapped peers count as complete."""
    inside = tl.where(live, peers, 0)
    proxied = live & (peer_window(context, inside) == 0)
    address = tl.where(proxied, completed_address(context, inside, stream), state + S_SINK)
    return tl.where(proxied, acquire_each(address, BACKEND), _MANY)


@triton.jit
def share_of(chunks: tl.tensor, channel: tl.tensor, channels: tl.tensor) -> tl.tensor:
    """How many of the first ``chunks`` chunks travel on ``channel``."""
    return tl.where(chunks > channel, (chunks - channel + channels - 1) // channels, 0)


@triton.jit
def chunks_arrived(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, live: tl.tensor, stream: tl.tensor, BACKEND: tl.constexpr
) -> tl.tensor:
    """Chunks that have arrived in order over the Buffer's life: the first missing one of each channel, the least."""
    channels = channel_count(context)
    least = tl.full(peers.shape, _MANY, tl.int64)
    for channel in range(channels):
        count = arrived_each(context, state, peers, live, stream + channel, BACKEND)
        least = tl.minimum(least, tl.where(live, count * channels + channel, _MANY))
    return least


@triton.jit
def first_unfinished(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    stream: tl.tensor,
    chunks: tl.tensor,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Lowest channel on which one of the peer's first ``chunks`` chunks has not completed locally, -1 when all have."""
    channels = channel_count(context)
    found = tl.full(peers.shape, -1, tl.int64)
    for channel in range(channels):
        count = completed_each(context, state, peers, live, stream + channel, BACKEND)
        open_here = live & (count < share_of(chunks, channel, channels))
        found = tl.where(open_here & (found < 0), channel, found)
    return found


@triton.jit
def wait_counts(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    stream: tl.tensor,
    needed: tl.tensor,
    start: tl.tensor,
    ARRIVAL: tl.constexpr,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Wait until ``needed`` messages of ``stream`` of every ``live`` peer have arrived (``ARRIVAL``) or completed.

    ``needed``: a tensor like ``peers``. Returns True; False after :func:`.wait.fail`.
    """
    ending, looked = tl.full((), 0, tl.int32), start
    present = tl.full((), 0, tl.int32)
    # only scalars live from turn to turn: the layout passes of Triton 3.6 and 3.8 fail on tensors
    while (present == 0) & (ending == GO_ON):
        if ARRIVAL:
            count = arrived_each(context, state, peers, live, stream, BACKEND)
        else:
            count = completed_each(context, state, peers, live, stream, BACKEND)
        # rule: normal mode: an operation opens only when every peer's notify has arrived
        here = count >= needed
        present = uniform(tl.min(here.to(tl.int32), axis=0), BACKEND)
        if present == 0:
            ending, looked = turn_over(context, start, looked, BACKEND)
    # the lanes acquired for themselves: now for each other
    settle(BACKEND)
    if ending != GO_ON:
        if ARRIVAL:
            late = arrived_each(context, state, peers, live, stream, BACKEND)
        else:
            late = completed_each(context, state, peers, live, stream, BACKEND)
        # whoever has come since the last look is not to blame, unless everybody has
        missing = live & (late < needed)
        code = tl.where(ending == TOO_LATE, FAILURE_PEER_TIMEOUT, 0)
        if any_of(missing, BACKEND) == 0:
            missing = live
        fail_at(context, state, code, peers, missing, stream, late, needed, BACKEND)
    return ending == GO_ON


@triton.jit
def message_at(
    context: tl.tensor, peers: tl.tensor, chosen: tl.tensor, source: tl.tensor, target: tl.tensor
) -> tl.tensor:
    """Where the bytes of a control message are written: at ``target`` in a mapped peer's window, else at ``source``."""
    mapped = peer_window(context, tl.where(chosen, peers, 0))
    return tl.where(mapped != 0, mapped + target, window_address(context) + source)


@triton.jit
def send_message(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    chosen: tl.tensor,
    stream: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    nbytes: tl.tensor,
    count: tl.tensor,
    start: tl.tensor,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Publish a message of one write, whose bytes stand at :func:`message_at`, to the ``chosen`` peers.

    ``source``, ``target``, ``nbytes`` and ``count`` (messages of the stream with this one) are tensors like ``peers``.
    Returns True; False after a failure.
    """
    going = wait_room(context, state, stream, LANES, start, BACKEND)
    settle(BACKEND)
    if going:
        mapped = chosen & (peer_window(context, tl.where(chosen, peers, 0)) != 0)
        store_flags(context, state, peers, mapped, stream, count, BACKEND)
        proxied = chosen & (mapped == 0)
        last = tl.full((), 1, tl.int64)
        put_writes(context, state, peers, proxied, stream, source, target, nbytes, last, BACKEND)
    return going
