"""How the programs of one low-latency kernel work together.

The first programs of a kernel serve one peer each: they do all that is said to it and heard from it, and wait for it.
The others move rows. Each of those waits until the program that serves a peer says that its rows may be moved. Whoever
ends the last piece of work for some peers, be it a row or a header, goes on with what follows for those.

A program waits for one with a lower number only. Programs start in the order of their numbers, so that one that is
waited for runs, or is over: where a device does not promise that, they take their numbers as they start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from .blocks import S, T, state_table
from .context import wait_limit
from .kernel import Shape
from .wait import FAILURE_PEER_TIMEOUT, fail
from .words import DEVICE, acquire_each, arrive_last, clock_ns, int64s, peek, poke, settle, uniform

#: No stamp, and nothing that READY holds.
_NEVER = tl.constexpr(-(1 << 62))
#: Kernels, as stamps tell them apart.
DISPATCH_SEND, DISPATCH_RECV = tl.constexpr(0), tl.constexpr(1)
COMBINE_SEND, COMBINE_RECV = tl.constexpr(2), tl.constexpr(3)


@dataclass(frozen=True, kw_only=True, repr=False)
class MessageShape(Shape):
    """What each kernel of low latency is compiled for.

    Attributes:
        ROW_BYTES: of a row on the wire. TOPK: slots of a token; SLOTS: rounded up to a power of two.
        ROWS, BLOCK: rows, and values or words of each, that a program has at a time; BLOCK is a power of two.
        STARTS_IN_ORDER: programs start in the order of their numbers.
        ONCE: a token has more slots than a rank has experts: slots that name one expert are one pair.
    """

    ROW_BYTES: int
    TOPK: int
    SLOTS: int
    ROWS: int
    BLOCK: int
    STARTS_IN_ORDER: bool
    ONCE: bool


class Message(NamedTuple):
    """A message of low latency, as programs know it that pack it, wait for it or unpack it; int64 scalars.

    Attributes:
        context, state, route: addresses of the blocks. peer: who gets it, or sends it. number: in its phase.
    """

    context: tl.tensor
    state: tl.tensor
    route: tl.tensor
    peer: tl.tensor
    number: tl.tensor


@triton.jit
def stamp_of(KERNEL: tl.constexpr, number: tl.tensor) -> tl.tensor:
    """What READY holds while message ``number`` is moved by this kernel. No other kernel of the epoch has used it: a
    send counts also a message that it could not publish."""
    return ((number << 2) | KERNEL) + 1


@triton.jit
def tell_ready(state: tl.tensor, peer: tl.tensor, stamp: tl.tensor, good: tl.tensor) -> None:
    """Tell the other programs that they may work for ``peer``, or that they must not; they see all that this one
    did."""
    settle()
    told = tl.where(good, stamp, -stamp)
    tl.atomic_xchg(int64s(state_table(state, T.READY, peer)), told, sem="release", scope="gpu")


@triton.jit
def _ready_words(state: tl.tensor, peers: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    at = state_table(state, T.READY, tl.where(wanted, peers, 0))
    return acquire_each(tl.where(wanted, at, state + S.SINK), DEVICE)


@triton.jit
def _any_lacks(words: tl.tensor, wanted: tl.tensor, stamp: tl.tensor) -> tl.tensor:
    lacks = wanted & (words != stamp) & (words != -stamp)
    return uniform(tl.max(tl.ravel(lacks.to(tl.int32)), axis=0))


@triton.jit
def await_ready(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, wanted: tl.tensor, stamp: tl.tensor, stream: tl.tensor
) -> tuple[tl.tensor, ...]:
    """Wait until each of the ``wanted`` peers is ready or refused. Two masks like ``peers``, of any shape: which have
    answered, and which are ready. After a failure of this wait none is ready.

    The program waited for has a limit of its own. Twice as long is waited here.
    """
    lacks = _any_lacks(_ready_words(state, peers, wanted), wanted, stamp)
    believed = stamp
    if lacks != 0:
        start, limit = clock_ns(), 2 * wait_limit(context)
        while lacks != 0:
            lacks = _any_lacks(_ready_words(state, peers, wanted), wanted, stamp)
            late = (clock_ns() - start > limit).to(tl.int32)
            if uniform(late) != 0:
                words = _ready_words(state, peers, wanted)
                lacking = wanted & (words != stamp) & (words != -stamp)
                peer = tl.max(tl.ravel(tl.where(lacking, peers, -1).to(tl.int32)), axis=0).to(tl.int64)
                messages = ((stamp - 1) >> 2) // 2 + 1
                fail(context, state, FAILURE_PEER_TIMEOUT, peer, stream, messages - 1, messages)
                # what is told from now on some lanes may see and others not
                believed = tl.full((), _NEVER, tl.int64)
                lacks = 0
    # each thread acquired for itself: behind this barrier all see what any of them saw
    settle()
    words = _ready_words(state, peers, wanted)
    return wanted & ((words == stamp) | (words == -stamp)), wanted & (words == believed)


@triton.jit
def finish(state: tl.tensor, peers: tl.tensor, chosen: tl.tensor) -> tl.tensor:
    """Count one more piece of work as done for each of the ``chosen`` peers: how many were done before. :func:`settle`
    comes before it, and before what the last one does."""
    at = int64s(state_table(state, T.FINISHED, tl.where(chosen, peers, 0)))
    return tl.atomic_add(at, tl.full(peers.shape, 1, tl.int64), mask=chosen, sem="acq_rel", scope="gpu")


@triton.jit
def finish_one(state: tl.tensor, peer: tl.tensor) -> tl.tensor:
    """The same for one peer."""
    at = int64s(state_table(state, T.FINISHED, peer))
    return tl.atomic_add(at, 1, sem="acq_rel", scope="gpu")


@triton.jit
def may_publish(state: tl.tensor, peer: tl.tensor, stamp: tl.tensor) -> tl.tensor:
    """After all work for ``peer``: whether it was ready, so that all of it was done."""
    return peek(state_table(state, T.READY, peer)) == stamp


@triton.jit
def last_peer(state: tl.tensor, peer: tl.tensor, ranks: tl.tensor) -> tl.tensor:
    """``peer`` is done with: True for the last of ``ranks`` peers."""
    poke(state_table(state, T.FINISHED, peer), 0)
    return arrive_last(state + S.ARRIVALS, 1, ranks)


@triton.jit
def last_peers(state: tl.tensor, peers: tl.tensor, chosen: tl.tensor, ranks: tl.tensor) -> tl.tensor:
    """The ``chosen`` peers are done with: True where they are the last of ``ranks`` peers."""
    tl.store(int64s(state_table(state, T.FINISHED, peers)), tl.zeros_like(peers), mask=chosen)
    return arrive_last(state + S.ARRIVALS, tl.sum(chosen.to(tl.int32), axis=0), ranks)
