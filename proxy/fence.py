"""A fence: what a proxy calls once for every batch with arrivals, before kernels are told of them.

NICs write into the memory of some GPUs without an order that their kernels could rely on. The driver has a call that
makes such writes visible; a proxy makes it through the addresses of two C functions, without the interpreter. A
transport may have a fence of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..native.atomics import peek
from ..native.calls import call1_int, call3_int
from ..native.jit import compiled

__all__ = ["DriverFlush", "fence_block", "flush_by_driver"]

#: Words of a fence; the first is the address of the C function ``int64 fence(int64 block)``, which returns 0 or what
#: went wrong.
CALL, SELECT, CONTEXT, FLUSH, TARGET, SCOPE = range(0, 48, 8)


class DriverFlush(NamedTuple):
    """The driver's flush of NICs' writes into a GPU.

    Attributes:
        select: address of ``int f(context)``, which makes a context of the driver the calling thread's.
        context: that context.
        flush: address of ``int f(int target, int scope)``.
        target, scope: its arguments.
    """

    select: int
    context: int
    flush: int
    target: int
    scope: int


@compiled
def flush_by_driver(fence: int) -> int:
    """A fence: 0, or what the driver returned."""
    status = call1_int(peek(fence + SELECT), peek(fence + CONTEXT))
    if status != 0:
        return status
    # the third argument is left alone
    return call3_int(peek(fence + FLUSH), peek(fence + TARGET), peek(fence + SCOPE), 0)


def fence_block(flush: DriverFlush) -> NDArray[np.int64]:
    """The words of a fence over ``flush``."""
    return np.array([flush_by_driver.address, *flush], np.int64)
