"""Publishing: commands into the rings for proxied peers, message counts into the windows of mapped ones.

A command is 16 bytes in pinned host memory, on CUDA one store; the lap bit stands in both words, so that a proxy
never takes half of one. Heads, the last known tails and capacities live in device memory: nothing is read back over
PCIe unless a ring seems full, and nothing but commands is written. Kernels of a Buffer run one after the other, but
several programs of one publish, and take slots by atomic additions: in low latency one for each command, into several
rings at once (:func:`put_commands`); in normal mode one for the commands of a step, into one ring (:func:`put_batch`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.command import COMMAND_BYTES, HIGH, KIND_WRITE, LOW, UNIT
from ...protocol.ring import SLOTS, TAIL
from .blocks import S
from .context import flag_address, head_address, ring_address
from .target import CUDA, HIP, backend
from .wait import FAILURE_RING_FULL, GO_ON, STILL_FULL, TOO_LATE, end_spin, fail, first_of
from .words import acquire, acquire_each, any_of, int64s, of_lane, peek, release_each, settle

_SOURCE, _LENGTH = tl.constexpr(LOW["source"].shift), tl.constexpr(LOW["length"].shift)
_TARGET, _RANK = tl.constexpr(HIGH["target"].shift), tl.constexpr(HIGH["rank"].shift)
_STREAM, _LAST = tl.constexpr(HIGH["stream"].shift), tl.constexpr(HIGH["last"].shift)
_KIND = tl.constexpr(KIND_WRITE << HIGH["kind"].shift)
_UNIT, _COMMAND_BYTES = tl.constexpr(UNIT), tl.constexpr(COMMAND_BYTES)
_TAIL, _SLOTS = tl.constexpr(TAIL), tl.constexpr(SLOTS)


@triton.jit
def _store_commands(slots: tl.tensor, low: tl.tensor, high: tl.tensor, chosen: tl.tensor, sink: tl.tensor) -> None:
    """Both words of each ``chosen`` command, release at system scope."""
    if backend() == CUDA:
        tl.inline_asm_elementwise(
            """{
            .reg .pred take;
            setp.ne.b32 take, $4, 0;
            @take st.release.sys.global.v2.b64 [$1], {$2, $3};
            mov.b32 $0, 0;
            }""",
            "=r,l,l,l,r,~{memory}",
            [slots, low, high, chosen.to(tl.int32)],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    elif backend() == HIP:
        # an exchange would be a read-modify-write over PCIe: two stores past the caches after a write-back do the same
        tl.inline_asm_elementwise(
            """buffer_wbl2 sc0 sc1
            s_waitcnt vmcnt(0)
            global_store_dwordx2 $2, $4, off sc0 sc1
            global_store_dwordx2 $1, $3, off sc0 sc1
            v_mov_b32 $0, 0""",
            "=&v,v,v,v,v,~{memory}",
            # each word has an address of its own: the sink is one word, and what follows it is somebody's
            [tl.where(chosen, slots, sink), tl.where(chosen, slots + 8, sink), low, high],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(int64s(slots), low, mask=chosen)
        tl.atomic_xchg(int64s(slots + 8), high, mask=chosen, sem="release", scope="sys")


@triton.jit
def _command_words(
    index: tl.tensor,
    capacity: tl.tensor,
    peer: tl.tensor,
    stream: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    nbytes: tl.tensor,
    last: tl.tensor,
) -> tuple[tl.tensor, ...]:
    """Both words of the commands number ``index`` of rings of ``capacity`` slots.

    ``source`` and ``target`` are byte offsets in this rank's and the peer's window, ``nbytes`` 0 .. 256 MiB, all
    multiples of 16; ``last`` = 1 ends the message.
    """
    lap = ((index & capacity) == 0).to(tl.int64)
    low = lap | ((source // _UNIT) << _SOURCE) | ((nbytes // _UNIT) << _LENGTH)
    high = lap | ((target // _UNIT) << _TARGET) | (peer << _RANK) | (stream << _STREAM)
    return low, high | _KIND | (last << _LAST)


@triton.jit
def store_flags(
    context: tl.tensor, state: tl.tensor, peers: tl.tensor, chosen: tl.tensor, stream: tl.tensor, count: tl.tensor
) -> None:
    """Tell the ``chosen`` mapped peers that ``count`` messages of ``stream`` lie in their windows."""
    inside = tl.where(chosen, peers, 0)
    counts = count + tl.zeros_like(peers)
    address = tl.where(chosen, flag_address(context, inside, stream), state + S.SINK)
    release_each(address, counts, chosen, state + S.SINK)


@triton.jit
def put_commands(
    context: tl.tensor,
    state: tl.tensor,
    peer: tl.tensor,
    streams: tl.tensor,
    chosen: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    nbytes: tl.tensor,
    last: tl.tensor,
    start: tl.tensor,
) -> None:
    """One write to ``peer`` into each ring that owns one of the ``chosen`` ``streams``, where several programs of a
    kernel put some: each takes the next slots, and waits until the proxies have read what they held. A kernel puts no
    more into a ring than that holds, messages and notices (:meth:`..low_latency.TritonLowLatencyKernels.check`): so
    what stands in a slot that a program waits for was put by an earlier kernel, not by a program that waits as well.

    The fields of a command are those of :func:`_command_words`, one a lane.
    """
    inside = tl.where(chosen, streams, 0)
    ring, head_at = ring_address(context, inside), head_address(context, inside)
    capacity = peek(head_at + 16)
    none = tl.zeros_like(inside)
    index = tl.atomic_add(int64s(head_at), none + 1, mask=chosen, sem="relaxed", scope="gpu")
    # acquired by whoever noted it: what the slot held was read before
    tail = tl.atomic_max(int64s(head_at + 8), none, mask=chosen, sem="acq_rel", scope="gpu")
    ending, checked = tl.full((), 0, tl.int32), start
    if any_of(chosen & (index - tail >= capacity)) != 0:
        tails = tl.where(chosen, ring + _TAIL, state + S.SINK)
        lacks = any_of(chosen & (index - acquire_each(tails) >= capacity))
        # only scalars live from spin to spin, see wait.wait_messages
        while (lacks != 0) & (ending == GO_ON):
            ending, checked = end_spin(context, start, checked)
            lacks = any_of(chosen & (index - acquire_each(tails) >= capacity))
        tail = acquire_each(tails)
        settle()
        tl.atomic_max(int64s(head_at + 8), tail, mask=chosen, sem="acq_rel", scope="gpu")
        if ending != GO_ON:
            code = tl.where(ending == TOO_LATE, FAILURE_RING_FULL, 0)
            bad = chosen & (index - tail >= capacity)
            # whose ring has room since the last look is not to blame, unless all have
            if any_of(bad) == 0:
                bad = chosen
            full = first_of(streams, bad)
            named = chosen & (streams == full)
            arrived = of_lane(tail, named)
            expected = of_lane(index + 1 - capacity, named)
            fail(context, state, code, -1, full, arrived, expected)
    if ending == GO_ON:
        low, high = _command_words(index, capacity, peer, streams, source, target, nbytes, last)
        # what the atomics have acquired: for the thread that stores
        settle()
        slot = ring + _SLOTS + (index & (capacity - 1)) * _COMMAND_BYTES
        _store_commands(slot, low, high, chosen, state + S.SINK)


@triton.jit
def put_batch(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    stream: tl.tensor,
    chosen: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    nbytes: tl.tensor,
    start: tl.tensor,
) -> tuple[tl.tensor, ...]:
    """A message of one write to each of the ``chosen`` peers, into the ring that owns ``stream`` and has a slot for
    each of them.

    Slots of a batch follow each other. So who waits for room waits for batches that were taken before, never for one
    that waits for it, however many programs put some at a time.

    Args:
        start: clock at which the time began that the proxies have.

    Returns:
        (GO_ON when the commands are put, else STILL_FULL or RELEASED; how many the proxy has taken; how many it had to
        take.)
    """
    ring, head_at = ring_address(context, stream), head_address(context, stream)
    capacity = peek(head_at + 16)
    take = chosen.to(tl.int64)
    many = tl.sum(take, axis=0)
    first = tl.atomic_add(int64s(head_at), many, sem="relaxed", scope="gpu")
    needed = first + many - capacity
    # acquired by whoever noted it: what the slots held was read before
    tail = tl.atomic_max(int64s(head_at + 8), tl.full((), 0, tl.int64), sem="acq_rel", scope="gpu")
    ending, checked = tl.full((), 0, tl.int32), start
    if tail < needed:
        tail = acquire(ring + _TAIL)
        while (tail < needed) & (ending == GO_ON):
            ending, checked = end_spin(context, start, checked)
            tail = acquire(ring + _TAIL)
        settle()
        tl.atomic_max(int64s(head_at + 8), tail, sem="acq_rel", scope="gpu")
    if ending == GO_ON:
        index = first + tl.cumsum(take, axis=0) - take
        last = tl.full((), 1, tl.int64)
        low, high = _command_words(index, capacity, peers, stream, source, target, nbytes, last)
        # what the atomics have acquired: for the threads that store
        settle()
        slot = ring + _SLOTS + (index & (capacity - 1)) * _COMMAND_BYTES
        _store_commands(slot, low, high, chosen, state + S.SINK)
    return tl.where(ending == TOO_LATE, STILL_FULL, ending), tail, needed
