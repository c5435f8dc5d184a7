"""Publishing: commands into the rings for proxied peers, message counts into the windows of mapped ones.

A command is 16 bytes in pinned host memory, on CUDA one store; the lap bit stands in both words, so that a proxy
never takes half of one. Heads, the last known tails and capacities live in device memory: nothing is read back over
PCIe unless a ring seems full; the head in the ring itself is a copy for the host, stored before the commands, so that
whoever sees a command taken sees that it was put. Kernels of a Buffer run one after the other and only one program of
each publishes, so heads need no atomics. Room is waited for before anything is packed (:func:`wait_room`): publishing
itself never waits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol.command import COMMAND_BYTES, HIGH, KIND_WRITE, LOW, MAX_WRITE_BYTES, UNIT
from ...protocol.ring import HEAD, SLOTS, TAIL
from .blocks import S_SINK
from .context import (
    channel_count,
    flag_address,
    head_address,
    peer_window,
    rank_count,
    ring_address,
    stream_of,
)
from .wait import FAILURE_RING_FULL, GO_ON, TOO_LATE, end_spin, fail
from .words import CUDA, HIP, acquire, int64s, peek, poke, release_each, settle

_SOURCE, _LENGTH = tl.constexpr(LOW["source"].shift), tl.constexpr(LOW["length"].shift)
_TARGET, _RANK = tl.constexpr(HIGH["target"].shift), tl.constexpr(HIGH["rank"].shift)
_STREAM, _LAST = tl.constexpr(HIGH["stream"].shift), tl.constexpr(HIGH["last"].shift)
_KIND = tl.constexpr(KIND_WRITE << HIGH["kind"].shift)
_UNIT, _COMMAND_BYTES = tl.constexpr(UNIT), tl.constexpr(COMMAND_BYTES)
_MAX_WRITE = tl.constexpr(MAX_WRITE_BYTES)
_HEAD, _TAIL, _SLOTS = tl.constexpr(HEAD), tl.constexpr(TAIL), tl.constexpr(SLOTS)
#: Pieces start on cache lines, so that two channels never write to the same one.
_PIECE = tl.constexpr(64)


@triton.jit
def _store_commands(
    slots: tl.tensor, low: tl.tensor, high: tl.tensor, chosen: tl.tensor, sink: tl.tensor, BACKEND: tl.constexpr
) -> None:
    """Both words of each ``chosen`` command, release at system scope."""
    if BACKEND == CUDA:
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
    elif BACKEND == HIP:
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
def put_writes(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    chosen: tl.tensor,
    stream: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    nbytes: tl.tensor,
    last: tl.tensor,
    BACKEND: tl.constexpr,
) -> None:
    """One write to each of the ``chosen`` peers into the ring that owns ``stream``.

    ``source`` and ``target`` are byte offsets in this rank's and the peer's window, ``nbytes`` 0 .. 256 MiB, all
    multiples of 16; ``last`` = 1 ends the message. The ring has room.
    """
    ring, head_at = ring_address(context, stream), head_address(context, stream)
    head, capacity = peek(head_at), peek(head_at + 16)
    take = chosen.to(tl.int64)
    index = head + tl.cumsum(take, axis=0) - take
    lap = ((index // capacity) + 1) & 1
    low = lap | ((source // _UNIT) << _SOURCE) | ((nbytes // _UNIT) << _LENGTH)
    high = lap | ((target // _UNIT) << _TARGET) | (peers << _RANK) | (stream << _STREAM)
    high = high | _KIND | (last.to(tl.int64) << _LAST)
    slots = ring + _SLOTS + (index % capacity) * _COMMAND_BYTES
    # every thread has read the head; and it is stored before any thread reads it again, or stores a command
    settle(BACKEND)
    after = head + tl.sum(take, axis=0)
    poke(head_at, after)
    poke(ring + _HEAD, after)
    settle(BACKEND)
    _store_commands(slots, low, high, chosen, state + S_SINK, BACKEND)


@triton.jit
def store_flags(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    chosen: tl.tensor,
    stream: tl.tensor,
    count: tl.tensor,
    BACKEND: tl.constexpr,
) -> None:
    """Tell the ``chosen`` mapped peers that ``count`` messages of ``stream`` lie in their windows."""
    inside = tl.where(chosen, peers, 0)
    counts = count + tl.zeros_like(peers)
    address = tl.where(chosen, flag_address(context, inside, stream), state + S_SINK)
    release_each(address, counts, chosen, state + S_SINK, BACKEND)


@triton.jit
def put_messages(
    context: tl.tensor,
    state: tl.tensor,
    peers: tl.tensor,
    live: tl.tensor,
    mapped: tl.tensor,
    phase: tl.tensor,
    number: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    nbytes: tl.tensor,
    parts: tl.tensor,
    BACKEND: tl.constexpr,
) -> None:
    """Publish a packed message to each of the ``live`` peers, one piece per channel; ``mapped`` ones have the bytes
    already and get the flags.

    A piece is one write and may be empty, so that every stream carries every message; more than 256 MiB of a piece are
    several commands (at most ``parts``), of which only the last ends the message.

    Twelve arguments: the fields of a message as lanes of tensors, for which Triton has no structure.
    """
    channels = channel_count(context)
    first = stream_of(phase, number)
    piece = (((nbytes + channels - 1) // channels + _PIECE - 1) // _PIECE) * _PIECE
    # first, since these peers wait for nothing else
    for channel in range(channels):
        store_flags(context, state, peers, live & mapped, first + channel, number // 2 + 1, BACKEND)
    proxied = live & (mapped == 0)
    # Where nobody is, the ring's head in host memory is left alone. Asked of the tables: who is live is known to each
    # thread for itself, and threads must not part here.
    inside = peers < rank_count(context)
    through = inside & (peer_window(context, tl.where(inside, peers, 0)) == 0)
    if tl.max(through.to(tl.int32), axis=0) != 0:
        for channel in range(channels):
            start = tl.minimum(channel * piece, nbytes)
            length = tl.minimum(piece, nbytes - start)
            # an empty write names the start of the message: the end may be the end of the window
            start = tl.where(length == 0, 0, start)
            for part in range(parts):
                done = part * _MAX_WRITE
                rest = length - done
                # also an empty piece is a write
                chosen = proxied & (rest >= tl.minimum(part, 1))
                put_writes(
                    context,
                    state,
                    peers,
                    chosen,
                    first + channel,
                    source + start + done,
                    target + start + done,
                    tl.where(chosen, tl.minimum(rest, _MAX_WRITE), 0),
                    rest <= _MAX_WRITE,
                    BACKEND,
                )


@triton.jit
def wait_room(
    context: tl.tensor,
    state: tl.tensor,
    stream: tl.tensor,
    commands: tl.tensor,
    start: tl.tensor,
    BACKEND: tl.constexpr,
) -> tl.tensor:
    """Wait until the ring that owns ``stream`` has room for ``commands`` more; for kernels of one warp. False after a
    failure."""
    ring, head_at = ring_address(context, stream), head_address(context, stream)
    head, tail, capacity = peek(head_at), peek(head_at + 8), peek(head_at + 16)
    ending, checked = tl.full((), 0, tl.int32), start
    if head + commands - tail > capacity:
        tail = acquire(ring + _TAIL, BACKEND)
        while (head + commands - tail > capacity) & (ending == GO_ON):
            ending, checked = end_spin(context, start, checked, BACKEND)
            tail = acquire(ring + _TAIL, BACKEND)
        # every thread has read the tail known before, and none reads it again before this one is stored
        settle(BACKEND)
        poke(head_at + 8, tail)
        settle(BACKEND)
        if ending != GO_ON:
            code = tl.where(ending == TOO_LATE, FAILURE_RING_FULL, 0)
            fail(context, state, code, -1, stream, tail, head + commands - capacity, BACKEND)
    return ending == GO_ON
