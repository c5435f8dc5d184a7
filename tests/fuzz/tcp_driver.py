"""Sends cases to the real data path over a socket, in chunks, and compares all of it with the model; compiled."""

from __future__ import annotations

import errno
import socket

from tests.fuzz import tcp_words as fuzz
from tests.fuzz.draw import below, one_in
from tests.fuzz.tcp_cases import make_case
from tests.fuzz.tcp_model import expect, ticket
from tests.fuzz.tcp_words import get, put
from uccl_ep_serving.native.atomics import copy, peek, peek32, poke
from uccl_ep_serving.native.calls import call3, call4
from uccl_ep_serving.native.jit import compiled, external
from uccl_ep_serving.proxy.transport import tcp_words as tcp
from uccl_ep_serving.proxy.transport.base import EVENT_BYTES

__all__ = ["run_cases"]

_EAGAIN = errno.EAGAIN
_UNIX = int(socket.AF_UNIX)
_KIND = int(socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
_SEND_FLAGS = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_SHUT_WR = int(socket.SHUT_WR)
#: A poll takes one receive of a connection; no stream needs so many.
_MOST_POLLS = 200
_CONTEXT_BYTES = 8 * tcp.CONTEXT_WORDS
_LINK_BYTES = 8 * tcp.LINK_WORDS
_PEER_BYTES = 8 * tcp.PEER_WORDS
_RANKS = 3

_socketpair = external("socketpair", "int32(int32, int32, int32, int64)")
_close = external("close", "int32(int32)")
_send = external("send", "int64(int32, int64, int64, int32)")
_shutdown = external("shutdown", "int32(int32, int32)")
_memcmp = external("memcmp", "int32(int64, int64, int64)")
_errno_location = external("__errno_location", "int64()")


@compiled
def _wrong(work: int, what: int, at: int) -> None:
    """Note what is wrong; the first of it counts."""
    if get(work, fuzz.WRONG) == 0:
        put(work, fuzz.WRONG, what)
        put(work, fuzz.WRONG_AT, at)


@compiled
def _link(work: int) -> int:
    return get(work, fuzz.NOW_LINKS) + get(work, fuzz.PEER) * _LINK_BYTES


@compiled
def _prepare(work: int) -> bool:
    """An endpoint as new, but for what has passed over the connection of the case; False without a socket."""
    context, fresh = get(work, fuzz.CONTEXT), get(work, fuzz.FRESH)
    copy(context, fresh, _CONTEXT_BYTES)
    copy(get(work, fuzz.NOW_LINKS), fresh + _CONTEXT_BYTES, _RANKS * _LINK_BYTES)
    copy(get(work, fuzz.NOW_PEERS), fresh + _CONTEXT_BYTES + _RANKS * _LINK_BYTES, _RANKS * _PEER_BYTES)
    poke(context + 8 * tcp.BELL, get(work, fuzz.BELL) if get(work, fuzz.MENDED) != 0 else -1)
    pair = get(work, fuzz.PAIR)
    if _socketpair(_UNIX, _KIND, 0, pair) != 0:
        _wrong(work, fuzz.NO_SOCKET, peek32(_errno_location()))
        return False
    link, acked, sent = _link(work), get(work, fuzz.ACKED), get(work, fuzz.SENT)
    poke(link + 8 * tcp.STATE, tcp.BROKEN)
    for word in (tcp.ACKED, tcp.SENT_FRAMES, tcp.POSTED):
        poke(link + 8 * word, acked)
    poke(link + 8 * tcp.IN_NUMBER, get(work, fuzz.NUMBER))
    status = call4(get(work, fuzz.TAKE_OVER), context, get(work, fuzz.PEER), peek32(pair + 4), acked)
    if status != 0:
        _wrong(work, fuzz.NO_SOCKET, -status)
        return False
    for number in range(acked, sent):
        frame = peek(link + 8 * tcp.QUEUE) + (number % tcp.QUEUE_SLOTS) * tcp.FRAME_SLOT_BYTES
        poke(frame + tcp.FRAME_WR_ID, ticket(number))
    for word in (tcp.SENT_FRAMES, tcp.POSTED, tcp.SEALED):
        poke(link + 8 * word, sent)
    return True


@compiled
def _poll_all(work: int) -> None:
    """Poll until the connection has no more to do, and keep the events."""
    context, events = get(work, fuzz.CONTEXT), get(work, fuzz.EVENTS)
    for _ in range(_MOST_POLLS):
        count = get(work, fuzz.EVENT_COUNT)
        room = fuzz.MOST_EVENTS - count
        found = call3(get(work, fuzz.POLL), context, events + count * EVENT_BYTES, min(room, 64))
        if found < 0:
            _wrong(work, fuzz.POLL_FAILED, found)
            return
        put(work, fuzz.EVENT_COUNT, count + found)
        idle = peek(context + 8 * tcp.READY_HEAD) == peek(context + 8 * tcp.READY_TAIL)
        if idle and peek(context + 8 * tcp.EVENTS_HEAD) == peek(context + 8 * tcp.EVENTS_TAIL):
            return
    _wrong(work, fuzz.NEVER_DONE, _MOST_POLLS)


@compiled
def _deliver(work: int) -> None:
    """Send the bytes in some chunks, of one byte or more, with polls between them."""
    rng, wire, nbytes, pair = (
        get(work, fuzz.RNG),
        get(work, fuzz.WIRE),
        get(work, fuzz.WIRE_BYTES),
        get(work, fuzz.PAIR),
    )
    ours = peek32(pair)
    longest = nbytes
    if one_in(rng, 4):
        longest = max(1 + below(rng, max(nbytes, 1)), nbytes // 16)
    elif nbytes < 512 and one_in(rng, 16):
        longest = 1 + below(rng, 32)
    at = 0
    while at < nbytes and get(work, fuzz.WRONG) == 0:
        part = min(1 + below(rng, longest) if longest < nbytes else longest, nbytes - at)
        taken = _send(ours, wire + at, part, _SEND_FLAGS)
        if taken > 0:
            at += taken
        elif peek32(_errno_location()) != _EAGAIN or peek(_link(work) + 8 * tcp.STATE) != tcp.UP:
            # the endpoint has shut it down, or reads no more
            break
        _poll_all(work)
    if get(work, fuzz.CLOSES) != 0:
        _shutdown(ours, _SHUT_WR)
        _poll_all(work)


@compiled
def _compare_events(work: int) -> None:
    count, expected = get(work, fuzz.EVENT_COUNT), get(work, fuzz.EXPECTED_COUNT)
    events, wanted = get(work, fuzz.EVENTS), get(work, fuzz.EXPECTED)
    for place in range(min(count, expected)):
        if _memcmp(events + place * EVENT_BYTES, wanted + place * EVENT_BYTES, EVENT_BYTES) != 0:
            _wrong(work, fuzz.EVENT_DIFFERS, place)
            return
    if count != expected:
        _wrong(work, fuzz.EVENTS_DIFFER, count)


@compiled
def _compare_others(work: int) -> None:
    """Nothing but what concerns the connection of the case has changed."""
    context, fresh, one = get(work, fuzz.CONTEXT), get(work, fuzz.FRESH), get(work, fuzz.PEER)
    for word in range(tcp.CONTEXT_WORDS):
        loose = peek(get(work, fuzz.LOOSE) + 8 * word) != 0
        if not loose and peek(context + 8 * word) != peek(fresh + 8 * word):
            _wrong(work, fuzz.CONTEXT_DIFFERS, word)
    links, peers = fresh + _CONTEXT_BYTES, fresh + _CONTEXT_BYTES + _RANKS * _LINK_BYTES
    for rank in range(_RANKS):
        link, peer = rank * _LINK_BYTES, rank * _PEER_BYTES
        if rank == one:
            continue
        if _memcmp(get(work, fuzz.NOW_LINKS) + link, links + link, _LINK_BYTES) != 0:
            _wrong(work, fuzz.OTHERS_DIFFER, rank)
        if _memcmp(get(work, fuzz.NOW_PEERS) + peer, peers + peer, _PEER_BYTES) != 0:
            _wrong(work, fuzz.OTHERS_DIFFER, rank)


@compiled
def _compare(work: int) -> None:
    """Hold all that can be seen against the model."""
    link = _link(work)
    _compare_events(work)
    around = get(work, fuzz.CANARY)
    window = get(work, fuzz.WINDOW) - around
    if _memcmp(window, get(work, fuzz.SHADOW), get(work, fuzz.WINDOW_BYTES) + 2 * around) != 0:
        _wrong(work, fuzz.WINDOW_DIFFERS, 0)
    if peek(link + 8 * tcp.STATE) != get(work, fuzz.END_STATE):
        _wrong(work, fuzz.STATE_DIFFERS, peek(link + 8 * tcp.STATE))
    if peek(link + 8 * tcp.IN_NUMBER) != get(work, fuzz.END_NUMBER):
        _wrong(work, fuzz.NUMBER_DIFFERS, peek(link + 8 * tcp.IN_NUMBER))
    if peek(link + 8 * tcp.ACKED) != get(work, fuzz.END_ACKED):
        _wrong(work, fuzz.ACKED_DIFFERS, peek(link + 8 * tcp.ACKED))
    for word in (tcp.SENT_FRAMES, tcp.POSTED, tcp.SEALED):
        if peek(link + 8 * word) != get(work, fuzz.SENT):
            _wrong(work, fuzz.POSTED_DIFFERS, word)
    peer = get(work, fuzz.NOW_PEERS) + get(work, fuzz.PEER) * _PEER_BYTES
    if peek(peer + 8 * tcp.STANDING) != get(work, fuzz.END_STANDING):
        _wrong(work, fuzz.STANDING_DIFFERS, peek(peer + 8 * tcp.STANDING))
    _compare_others(work)


@compiled
def _count(work: int) -> None:
    row = get(work, fuzz.COUNTS) + 8 * fuzz.COLUMNS * get(work, fuzz.KIND)
    poke(row, peek(row) + 1)
    poke(row + 8, peek(row + 8) + get(work, fuzz.REFUSED))
    poke(row + 16, peek(row + 16) + get(work, fuzz.FRAMES))
    poke(row + 24, peek(row + 24) + get(work, fuzz.JUDGED))


@compiled
def run_cases(work: int, first: int, count: int) -> int:
    """Run cases ``first`` to ``first + count`` - 1; how many were right: fewer than ``count`` where one was not."""
    for done in range(count):
        poke(get(work, fuzz.CASE), first + done)
        put(work, fuzz.WRONG, 0)
        put(work, fuzz.EVENT_COUNT, 0)
        make_case(work, first + done)
        expect(work)
        if not _prepare(work):
            return done
        _deliver(work)
        _compare(work)
        pair = get(work, fuzz.PAIR)
        _close(peek32(pair))
        _close(peek32(pair + 4))
        if get(work, fuzz.WRONG) != 0:
            return done
        _count(work)
    return count
