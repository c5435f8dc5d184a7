"""How turns of a channel begin and end, and how a kernel of normal mode ends.

What stands between moves is called (``noinline``), as the opening is: a pass of Triton's (TritonGPUCoalesce) takes time
with the third power of a function's length, 15 of the 17 s that a dispatch between nodes took to compile as one, and
addresses of moves need not stay in registers meanwhile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import W
from .context import has_failed_now, wait_limit
from .normal_pipes import Channel
from .normal_progress import advance, blame, count_messages, fail_by_notes, look, unfinished, waits_for_others
from .wait import FAILURE_PEER_TIMEOUT, FAILURE_PROTOCOL, FAILURE_RING_FULL, GO_ON, STILL_FULL, TOO_LATE, end_spin, fail
from .words import arrive_last, clock_ns, enter, peek, poke, settle, uniform

#: Why a program leaves its loop: all is done; a peer claimed what it must not; one is missing; a proxy takes nothing;
#: the host, or another program, has said so.
GOING, DONE, CLAIMED, LATE, FULL, OVER = (tl.constexpr(value) for value in range(6))


@triton.jit(noinline=True)
def begin_turn(one: Channel, shape: tl.constexpr) -> tl.tensor:
    """Look at the peers: GOING when rows may be moved."""
    enter()
    found = tl.where(look(one, shape) != 0, CLAIMED, GOING)
    return tl.where(has_failed_now(one.context), OVER, found)


@triton.jit(noinline=True)
def end_turn(
    one: Channel, moved: tl.tensor, left: tl.tensor, start: tl.tensor, checked: tl.tensor, shape: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """After ``moved`` rows: (GOING when there is another turn; when the present wait began, and when the sticky error
    was looked at last). ``left``: there is work of which no pipe knows."""
    # also what enter() does
    settle()
    found = tl.full((), GOING, tl.int32)
    ending = advance(one, shape)
    if ending != GO_ON:
        found = tl.where(ending == STILL_FULL, FULL, OVER)
    elif (unfinished(one, shape) | left) == 0:
        found = tl.full((), DONE, tl.int32)
    elif moved > 0:
        start = clock_ns()
        checked = start
    else:
        ending, checked = end_spin(one.context, start, checked)
        if ending == TOO_LATE:
            if waits_for_others(one, shape) != 0:
                # an eighth longer: the peer knows better for whom it waits, and tells
                limit = wait_limit(one.context)
                late = (clock_ns() - start > limit + limit // 8).to(tl.int32)
                ending = tl.where(uniform(late) != 0, TOO_LATE, GO_ON)
        found = tl.where(ending == TOO_LATE, LATE, tl.where(ending == GO_ON, GOING, OVER))
    return found, start, checked


@triton.jit(noinline=True)
def end_turns(one: Channel, found: tl.tensor, shape: tl.constexpr) -> None:
    """After the last turn: fail, unless all is right."""
    enter()
    if found == LATE:
        blame(one, shape)
    if found == OVER:
        fail(one.context, one.state, 0, -1, -1, 0, 0)
    else:
        # also when all is done: nobody has checked yet what the rows that were taken out last claim
        code = tl.where(found == LATE, FAILURE_PEER_TIMEOUT, FAILURE_PROTOCOL)
        fail_by_notes(one, tl.where(found == FULL, FAILURE_RING_FULL, code), shape)


@triton.jit(noinline=True)
def end_kernel(one: Channel, shape: tl.constexpr) -> None:
    """Count this program as ended; the last one closes the operation."""
    enter()
    number = peek(one.state + W.NUMBER)
    opened = peek(one.state + W.OPENED) == number + 1
    if opened & (has_failed_now(one.context) == 0):
        count_messages(one, shape)
    last = arrive_last(one.state + W.ENDED, 1, one.channels)
    # every thread has read what one of them is about to overwrite
    settle()
    if last:
        poke(one.state + W.NUMBER, number + 1)
