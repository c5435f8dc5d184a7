"""A waiting loop alone, on a clock that the test moves. Imported only where Triton is the interpreter."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import triton
import triton.language as tl

from uccl_ep_serving.kernels.triton import wait, words
from uccl_ep_serving.kernels.triton.wait import GO_ON, end_spin
from uccl_ep_serving.kernels.triton.words import clock_ns, poke
from uccl_ep_serving.protocol import context as ctx


@triton.jit
def take_spins(context: tl.int64, out: tl.int64) -> None:
    """As every loop that waits, for something that never comes."""
    start = clock_ns()
    ending, checked = tl.full((), 0, tl.int32), start
    spins = tl.full((), 0, tl.int64)
    while ending == GO_ON:
        ending, checked = end_spin(context, start, checked)
        spins += 1
    poke(out, ending)
    poke(out + 8, spins)


class Ended(NamedTuple):
    """How a wait ended.

    Attributes:
        ending: GO_ON, TOO_LATE or RELEASED.
        spins: of the loop.
        reads: at the sticky error.
        nanoseconds: on the test's clock.
    """

    ending: int
    spins: int
    reads: int
    nanoseconds: int


def run(limit: int, step: int, fails_at: int) -> Ended:
    """A wait of at most ``limit`` ns in spins of ``step`` ns each; the sticky error is set at ``fails_at``."""
    error = np.zeros(ctx.ERROR_WORDS, dtype=np.int64)
    context = np.zeros(ctx.CONTEXT_WORDS, dtype=np.int64)
    context[ctx.ERROR], context[ctx.LIMIT] = error.ctypes.data, limit
    out = np.zeros(2, dtype=np.int64)
    now, reads = 0, 0
    look = wait.sticky_code

    def clock() -> int:
        nonlocal now
        now += step
        if now >= fails_at:
            error[ctx.ERROR_CODE] = ctx.FAILURE_PEER_LOST
        return now

    def counted(context: tl.tensor) -> tl.tensor:
        nonlocal reads
        reads += 1
        return look(context)

    for function in (clock, counted):
        function.__triton_builtin__ = True  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "_interpreter_clock", clock)
        patch.setattr(wait, "sticky_code", counted)
        take_spins[(1,)](context.ctypes.data, out.ctypes.data)
    ending, spins = out.tolist()
    return Ended(ending, spins, reads, now - step)
