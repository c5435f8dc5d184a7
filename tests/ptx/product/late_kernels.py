"""A program that waits for another one beyond the deadline."""

from __future__ import annotations

import triton
import triton.language as tl

from uccl_ep_serving.kernels.triton.context import verdict_address
from uccl_ep_serving.kernels.triton.programs import await_ready, tell_ready
from uccl_ep_serving.kernels.triton.words import acquire, int64s

__all__ = ["told_too_late"]

_PEER = tl.constexpr(1)


@triton.jit
def told_too_late(context: tl.int64, state: tl.int64, stamp: tl.int64, out: tl.int64, LANES: tl.constexpr) -> None:
    """Program 1 says that a peer is ready once program 0 has failed for want of it. Of each lane of program 0 ``out``
    int64[LANES] says whether it goes on."""
    lane = tl.arange(0, LANES).to(tl.int64)
    peers = tl.zeros_like(lane) + _PEER
    if tl.program_id(0) == 1:
        failed = tl.full((), 0, tl.int64)
        while failed == 0:
            failed = acquire(verdict_address(context))
        tell_ready(state, tl.full((), _PEER, tl.int64), stamp, stamp == stamp)
    else:
        _, ready = await_ready(context, state, peers, peers == _PEER, stamp, tl.full((), 8, tl.int64))
        tl.store(int64s(out + 8 * lane), ready.to(tl.int64))
