"""How turns of a channel begin and end, and how a kernel of normal mode ends."""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import W_BROKEN, W_ENDED, W_NOTICES, W_NUMBER, W_OPENED, W_RAN
from .context import has_failed_now, wait_limit
from .normal_pipes import Channel, advance, blame, count_messages, look, unfinished, waits_for_others
from .wait import GO_ON, TOO_LATE, end_spin
from .words import arrive_last, clock_ns, peek, poke, settle, uniform


@triton.jit
def is_open(one: Channel, NODES: tl.constexpr, PIPES: tl.constexpr, BACKEND: tl.constexpr) -> tl.tensor:
    """Look at the peers: 1 when rows may be moved, 0 after a failure, of whichever program."""
    broken = look(one, NODES, PIPES, BACKEND)
    if broken == 0:
        broken = has_failed_now(one.context, BACKEND).to(tl.int32)
    return 1 - broken


@triton.jit
def end_turn(
    one: Channel,
    moved: tl.tensor,
    left: tl.tensor,
    start: tl.tensor,
    checked: tl.tensor,
    NODES: tl.constexpr,
    PIPES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """After ``moved`` rows: (1 when there is another turn, else 0; when the present wait began, and when the sticky
    error was looked at last). ``left``: there is work of which no pipe knows."""
    settle(BACKEND)
    going = 1 - has_failed_now(one.context, BACKEND).to(tl.int32)
    if going != 0:
        advance(one, NODES, PIPES, BACKEND)
        going = unfinished(one, NODES, PIPES) | left
        if moved > 0:
            start = clock_ns(BACKEND)
            checked = start
        elif going != 0:
            ending, checked = end_spin(one.context, start, checked, BACKEND)
            if ending == TOO_LATE:
                if waits_for_others(one, NODES, PIPES) != 0:
                    # an eighth longer: the peer knows better for whom it waits, and tells
                    limit = wait_limit(one.context)
                    late = (clock_ns(BACKEND) - start > limit + limit // 8).to(tl.int32)
                    ending = tl.where(uniform(late, BACKEND) != 0, TOO_LATE, GO_ON)
            if ending != GO_ON:
                blame(one, ending, NODES, PIPES, BACKEND)
                going = tl.full((), 0, tl.int32)
    return going, start, checked


@triton.jit
def end_kernel(
    one: Channel, opening_only: tl.tensor, NODES: tl.constexpr, PIPES: tl.constexpr, BACKEND: tl.constexpr
) -> None:
    """Count this program as ended; the last one closes the operation. Of an opening alone only one whose ranks parted
    is closed."""
    state = one.state
    number = peek(state + W_NUMBER)
    opened = peek(state + W_OPENED) == number + 1
    if opening_only == 0:
        failed = has_failed_now(one.context, BACKEND)
        if opened & (failed == 0):
            count_messages(one, NODES, PIPES)
        if failed:
            poke(state + W_BROKEN, 1)
        if arrive_last(state + W_ENDED, 1, one.channels, BACKEND):
            ran = opened & (peek(state + W_BROKEN) == 0)
            poke(state + W_RAN, ran.to(tl.int64))
            poke(state + W_BROKEN, 0)
            poke(state + W_NUMBER, number + 1)
            poke(state + W_NOTICES, peek(state + W_NOTICES) + 1)
    elif opened == 0:
        poke(state + W_NUMBER, number + 1)
        poke(state + W_NOTICES, peek(state + W_NOTICES) + 1)
