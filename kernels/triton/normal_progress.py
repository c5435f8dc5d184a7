"""How far the pipes of a channel are: what peers tell, what they are told, whom to blame.

A program takes turns. In each it looks how far its peers are (:func:`look`), moves what can be moved, and tells them
(:func:`advance`). Positions change at the end of a turn only. A count that others change is stored first, and read
again behind a barrier.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol import pipe
from ...protocol.streams import NORMAL_CHANNELS, NORMAL_COMBINE, NORMAL_DISPATCH
from .blocks import N, S, W
from .context import arrived_address, completed_address, landing_window, peer_window
from .normal_pipes import (
    EVERYTHING,
    Channel,
    get_each,
    is_pipe,
    node_of,
    other_end,
    out_offset,
    over,
    peer_of,
    rest,
    set_each,
    staging_offset,
)
from .publish import put_batch
from .wait import GO_ON, fail_at
from .words import acquire_each, any_of, clock_ns, peek, release_each, settle

_CHANNELS = tl.constexpr(NORMAL_CHANNELS)
_DISPATCH_STREAM, _COMBINE_STREAM = tl.constexpr(NORMAL_DISPATCH), tl.constexpr(NORMAL_COMBINE)
_WORD_ARRIVED, _WORD_FREED = tl.constexpr(pipe.ARRIVED), tl.constexpr(pipe.FREED)


@triton.jit
def _streams(one: Channel) -> tuple[tl.tensor, ...]:
    """(stream of this phase's rows, stream on which is told what is read; the tables of both: 0 or 1)."""
    rows = tl.where(one.phase == 0, _DISPATCH_STREAM, _COMBINE_STREAM) + one.index
    told = tl.where(one.phase == 0, _COMBINE_STREAM, _DISPATCH_STREAM) + one.index
    return rows, told, one.phase, 1 - one.phase


@triton.jit
def _word_of(one: Channel, word: tl.constexpr, pipes: tl.tensor) -> tl.tensor:
    """Offsets of words of pipes in a window."""
    return peek(one.state + W.PIPE_WORDS) + 8 * ((word * _CHANNELS + one.index) * (2 * one.ranks) + pipes)


@triton.jit
def _stamped(one: Channel, words: tl.tensor) -> tl.tensor:
    """Rows that stamped ``words`` tell of: none where an earlier operation wrote them."""
    return tl.where(words >= one.stamp, words - one.stamp, 0)


@triton.jit
def _told_rows(rows: tl.tensor, chunk: tl.tensor, ring: tl.tensor) -> tuple[tl.tensor, ...]:
    """(Rows that a message on what is read stands for, how many such messages a proxied pipe of ``rows`` rows needs):
    half a ring each, until the rest fits."""
    each = tl.maximum(over(ring, chunk) >> 1, 1) * chunk
    return each, over(tl.maximum(rows - ring, 0) + each - 1, each)


@triton.jit
def look(one: Channel, shape: tl.constexpr) -> tl.tensor:
    """Note how far all peers are; a barrier stands behind it. 1 when one claimed what it must not, else 0."""
    pipes = tl.arange(0, shape.PIPES).to(tl.int64)
    live = is_pipe(one, pipes, shape)
    peers = tl.where(live, peer_of(one, pipes, shape), 0)
    window = peer_window(one.context, peers)
    mapped, proxied = live & (window != 0), live & (window == 0)
    stream, told, table, told_table = _streams(one)
    sink = tl.zeros_like(pipes) + one.state + S.SINK
    own = landing_window(one.context, peers)
    send, receive = get_each(one, N.SEND_ROWS, pipes, live), get_each(one, N.RECV_ROWS, pipes, live)
    sent, taken = get_each(one, N.SENT, pipes, live), get_each(one, N.TAKEN, pipes, live)

    at = tl.where(proxied, arrived_address(one.context, peers, stream), own + _word_of(one, _WORD_ARRIVED, pipes))
    count = acquire_each(tl.where(live, at, sink))
    messages = count - get_each(one, N.MESSAGES_TAKEN + table, pipes, proxied)
    came = tl.minimum(tl.maximum(messages, 0) * get_each(one, N.IN_CHUNK, pipes, proxied), receive)
    arrived = tl.where(proxied, came, tl.where(mapped, _stamped(one, count), 0))
    set_each(one, N.ARRIVED, pipes, live, arrived)

    at = tl.where(proxied, arrived_address(one.context, peers, told), own + _word_of(one, _WORD_FREED, pipes))
    count = acquire_each(tl.where(live, at, sink))
    at = tl.where(proxied, completed_address(one.context, peers, stream), sink)
    done = acquire_each(at) - get_each(one, N.MESSAGES_SENT + table, pipes, proxied)
    freed = _stamped(one, count)
    out_rows = get_each(one, N.OUT_ROWS, pipes, live)
    chunk, ring = get_each(one, N.OUT_CHUNK, pipes, proxied), get_each(one, N.LANDING_ROWS, pipes, proxied)
    each, needed = _told_rows(send, tl.maximum(chunk, 1), ring)
    messages = count - get_each(one, N.MESSAGES_TAKEN + told_table, pipes, proxied)
    landing = ring + tl.minimum(tl.maximum(messages, 0), needed) * each
    # a NIC may repeat a write until that is over: only then others follow in its place, in the staging and at the peer
    staging = done * chunk + tl.minimum(out_rows, ring)
    set_each(one, N.WRITTEN, pipes, proxied, done)
    limit = tl.where(mapped, tl.minimum(freed, sent) + out_rows, tl.minimum(landing, staging))
    set_each(one, N.LIMIT, pipes, live, limit)

    # rule: normal mode: a peer tells of no more rows than it has, and of none that do not fit
    most = tl.minimum(receive, taken + get_each(one, N.IN_ROWS, pipes, live))
    blamed = tl.where((one.phase == 0) & (pipes < one.ranks), pipes, peers)
    broken = note_wrong(one, pipes, mapped & (arrived > most), blamed, stream, arrived, most)
    # rule: normal mode: a peer has read no more rows than there were
    wrong = mapped & (freed > sent) & (freed != EVERYTHING)
    broken |= note_wrong(one, pipes, wrong, peers, told, freed, sent)
    broken |= any_of(get_each(one, N.WRONG, pipes, live) != 0)
    settle()
    return broken


@triton.jit
def note_wrong(
    one: Channel,
    pipes: tl.tensor,
    bad: tl.tensor,
    blamed: tl.tensor,
    stream: tl.tensor,
    got: tl.tensor,
    want: tl.tensor,
) -> tl.tensor:
    """Note for :func:`fail_by_notes` whom to blame for ``bad`` pipes; 1 when there are any, else 0.

    A program fails at one place, once it has left its loop: the compiler would repeat what that takes at each place,
    and Triton 3.6 and 3.7 put a barrier of it where not all warps of AMD's get in a loop.
    """
    set_each(one, N.WRONG, pipes, bad, blamed + 1)
    set_each(one, N.WRONG_STREAM, pipes, bad, stream)
    set_each(one, N.WRONG_GOT, pipes, bad, got)
    set_each(one, N.WRONG_WANT, pipes, bad, want)
    return any_of(bad)


@triton.jit
def fail_by_notes(one: Channel, code: tl.tensor, shape: tl.constexpr) -> None:
    """Fail with the first rank that is to blame, unless there is none: somebody else has failed then."""
    settle()
    pipes = tl.arange(0, shape.PIPES).to(tl.int64)
    inside = pipes < 2 * one.ranks
    blamed = get_each(one, N.WRONG, pipes, inside)
    bad = blamed != 0
    if any_of(bad) != 0:
        on = get_each(one, N.WRONG_STREAM, pipes, bad)
        got, want = get_each(one, N.WRONG_GOT, pipes, bad), get_each(one, N.WRONG_WANT, pipes, bad)
        fail_at(one.context, one.state, code, blamed - 1, bad, on, got, want)


@triton.jit
def advance(one: Channel, shape: tl.constexpr) -> tl.tensor:
    """End a turn: positions move on and peers are told. Barriers stand before it and behind it. GO_ON, or how the wait
    for a proxy ended that has taken too little; that is noted."""
    pipes = tl.arange(0, shape.PIPES).to(tl.int64)
    live = is_pipe(one, pipes, shape)
    peers = tl.where(live, peer_of(one, pipes, shape), 0)
    window = peer_window(one.context, peers)
    mapped, proxied = live & (window != 0), live & (window == 0)
    stream, told, _, _ = _streams(one)
    sink = one.state + S.SINK
    end = other_end(one, pipes, shape)
    sent, taken = get_each(one, N.NEXT_SENT, pipes, live), get_each(one, N.NEXT_TAKEN, pipes, live)
    shown, freed = get_each(one, N.SHOWN, pipes, live), get_each(one, N.FREED, pipes, live)
    send, receive = get_each(one, N.SEND_ROWS, pipes, live), get_each(one, N.RECV_ROWS, pipes, live)
    in_rows = get_each(one, N.IN_ROWS, pipes, live)
    set_each(one, N.SENT, pipes, live, sent)
    set_each(one, N.TAKEN, pipes, live, taken)

    more = mapped & (sent > shown)
    release_each(window + _word_of(one, _WORD_ARRIVED, end), one.stamp + sent, more, sink)
    # half a ring at a time: the peer goes on with the other half
    free = mapped & (taken > freed) & (receive > in_rows) & (2 * (taken - freed) >= in_rows)
    release_each(window + _word_of(one, _WORD_FREED, end), one.stamp + taken, free, sink)

    chunk = tl.maximum(get_each(one, N.OUT_CHUNK, pipes, proxied), 1)
    messages = over(tl.where(sent == send, sent + chunk - 1, sent), chunk)
    due = tl.where(proxied, messages - shown, 0)
    each, needed = _told_rows(receive, tl.maximum(get_each(one, N.IN_CHUNK, pipes, proxied), 1), in_rows)
    due_told = tl.where(proxied, tl.minimum(over(taken, each), needed) - freed, 0)
    ring = tl.maximum(get_each(one, N.LANDING_ROWS, pipes, proxied), 1)
    staged = tl.maximum(get_each(one, N.OUT_ROWS, pipes, proxied), 1)
    source, target = staging_offset(one, pipes, shape), out_offset(one, pipes, shape)
    rows, others = tl.max(due, axis=0), tl.max(due_told, axis=0)
    start, ending = clock_ns(), tl.full((), GO_ON, tl.int32)
    for step in range(rows + others):
        if ending == GO_ON:
            # messages of rows, then those that only tell
            first = (shown + step) * chunk
            size = tl.minimum(chunk, sent - first) * one.stride
            moving = step < rows
            chosen = tl.where(moving, due > step, due_told > step - rows)
            where = tl.where(moving, source + rest(first, staged) * one.stride, 0)
            there = tl.where(moving, target + rest(first, ring) * one.stride, 0)
            size = tl.where(moving, size, 0)
            on = tl.where(moving, stream, told)
            ending, took, wanted = put_batch(one.context, one.state, peers, on, chosen, where, there, size, start)
            full = chosen & (tl.zeros_like(pipes) + took < wanted)
            note_wrong(one, pipes, full, one.me, on, took, wanted)
    set_each(one, N.SHOWN, pipes, live, tl.where(more, sent, shown + due))
    set_each(one, N.FREED, pipes, live, tl.where(free, taken, freed + due_told))
    settle()
    return ending


@triton.jit
def unfinished(one: Channel, shape: tl.constexpr) -> tl.tensor:
    """1 while rows are missing or are not sent, the same in every thread."""
    pipes = tl.arange(0, shape.PIPES).to(tl.int64)
    late, stuck = _late_and_stuck(one, pipes, shape)
    return any_of(late | stuck | _unwritten(one, pipes, shape))


@triton.jit
def _late_and_stuck(one: Channel, pipes: tl.tensor, shape: tl.constexpr) -> tuple[tl.tensor, ...]:
    """(Pipes of which rows are missing; those to which rows are left.) Where nobody knows how many there are, other
    pipes wait for them."""
    live = is_pipe(one, pipes, shape)
    send, receive = get_each(one, N.SEND_ROWS, pipes, live), get_each(one, N.RECV_ROWS, pipes, live)
    late = live & (receive != EVERYTHING) & (get_each(one, N.TAKEN, pipes, live) < receive)
    return late, live & (send != EVERYTHING) & (get_each(one, N.SENT, pipes, live) < send)


@triton.jit
def _unwritten(one: Channel, pipes: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Pipes with writes under way. An operation ends after them: the next one puts other rows into the same bytes, here
    and at the peer."""
    live = is_pipe(one, pipes, shape)
    peers = tl.where(live, peer_of(one, pipes, shape), 0)
    proxied = live & (peer_window(one.context, peers) == 0)
    shown, written = get_each(one, N.SHOWN, pipes, proxied), get_each(one, N.WRITTEN, pipes, proxied)
    return proxied & (written < shown)


@triton.jit
def waits_for_others(one: Channel, shape: tl.constexpr) -> tl.tensor:
    """1 when this rank waits only for peers that must wait for others before: for rows that they forward, or sum."""
    if shape.NODES:
        pipes = tl.arange(0, shape.PIPES).to(tl.int64)
        late, stuck = _late_and_stuck(one, pipes, shape)
        passed = tl.where(pipes < one.ranks, 1 - one.phase, one.phase) != 0
        passed = passed & ((pipes >= one.ranks) | (over(pipes, one.size) != node_of(one)))
        return 1 - any_of((late | stuck) & (passed == 0) & (peer_of(one, pipes, shape) != one.me))
    else:
        return tl.full((), 0, tl.int32)


@triton.jit
def blame(one: Channel, shape: tl.constexpr) -> None:
    """Note a peer that is missing: whose rows have not come, who has not read those that it has, or to whom writes are
    not over."""
    pipes = tl.arange(0, shape.PIPES).to(tl.int64)
    live = is_pipe(one, pipes, shape)
    peers = tl.where(live, peer_of(one, pipes, shape), 0)
    late, stuck = _late_and_stuck(one, pipes, shape)
    arrived, receive = get_each(one, N.ARRIVED, pipes, live), get_each(one, N.RECV_ROWS, pipes, live)
    sent, limit = get_each(one, N.SENT, pipes, live), get_each(one, N.LIMIT, pipes, live)
    taken = get_each(one, N.TAKEN, pipes, live)
    stream, told, _, _ = _streams(one)
    # a pipe to this rank itself waits for another one
    other = live & (peers != one.me)
    stuck = stuck & other & (sent >= limit)
    late = late & other & (arrived < receive)
    if shape.NODES:
        # of rows that are summed for another node nobody knows whose comes next: whoever has none there may be missing,
        # unless the rail takes no sum
        rail = one.ranks + over(tl.where(pipes < one.ranks, pipes, 0), one.size)
        open_rail = get_each(one, N.SENT, rail, live) < get_each(one, N.LIMIT, rail, live)
        late |= other & (receive == EVERYTHING) & (taken == arrived) & (pipes < one.ranks) & open_rail
    # rows that have not come, unless all have; then rows for which there is no room; then writes
    of_late, of_stuck = any_of(late), any_of(stuck)
    bad = tl.where(of_late != 0, late, tl.where(of_stuck != 0, stuck, _unwritten(one, pipes, shape)))
    bad = tl.where(any_of(bad) != 0, bad, live)
    # of a pipe that nobody knows the end of, at least one row more
    want = tl.where(receive == EVERYTHING, arrived + 1, receive)
    shown, written = get_each(one, N.SHOWN, pipes, live), get_each(one, N.WRITTEN, pipes, live)
    got = tl.where(of_late != 0, arrived, tl.where(of_stuck != 0, limit, written))
    want = tl.where(of_late != 0, want, tl.where(of_stuck != 0, sent + 1, shown))
    note_wrong(one, pipes, bad, peers, tl.where((of_late == 0) & (of_stuck != 0), told, stream), got, want)


@triton.jit
def count_messages(one: Channel, shape: tl.constexpr) -> None:
    """After the last turn: the messages of this operation, for those that follow."""
    pipes = tl.arange(0, shape.PIPES).to(tl.int64)
    live = is_pipe(one, pipes, shape)
    peers = tl.where(live, peer_of(one, pipes, shape), 0)
    proxied = live & (peer_window(one.context, peers) == 0)
    _, _, table, told_table = _streams(one)
    send, receive = get_each(one, N.SEND_ROWS, pipes, proxied), get_each(one, N.RECV_ROWS, pipes, proxied)
    chunk = tl.maximum(get_each(one, N.OUT_CHUNK, pipes, proxied), 1)
    received = tl.maximum(get_each(one, N.IN_CHUNK, pipes, proxied), 1)
    _, coming = _told_rows(send, chunk, get_each(one, N.LANDING_ROWS, pipes, proxied))
    _add(one, N.MESSAGES_SENT + table, pipes, proxied, over(send + chunk - 1, chunk))
    _add(one, N.MESSAGES_SENT + told_table, pipes, proxied, get_each(one, N.FREED, pipes, proxied))
    _add(one, N.MESSAGES_TAKEN + table, pipes, proxied, over(receive + received - 1, received))
    _add(one, N.MESSAGES_TAKEN + told_table, pipes, proxied, coming)


@triton.jit
def _add(one: Channel, table: tl.tensor, pipes: tl.tensor, chosen: tl.tensor, more: tl.tensor) -> None:
    set_each(one, table, pipes, chosen, get_each(one, table, pipes, chosen) + more)
