"""Memory and compiled data path of ``shm``: a memcpy into a mapped window, one word in a mailbox, a look at pidfds.

The context and its records are private to the process and written by the proxy thread alone once it runs; what peers
can write is the mailbox (:mod:`uccl_ep_serving.protocol.mailbox`), and that is checked word by word. No function here
blocks, allocates or raises.
"""

from __future__ import annotations

import errno
import os

from ...native.atomics import copy, load64, peek, peek32, poke, store64
from ...native.calls import monotonic_ns
from ...native.jit import compiled, external
from ...protocol.command import MAX_WRITE_BYTES
from ...protocol.imm import IMM
from ...protocol.mailbox import SLOTS, SLOTS_OFFSET, TAIL, TAIL_CLOSED, WORD
from .base import (
    ACCEPTED,
    ARRIVED,
    BUSY,
    DOWN,
    FAULT,
    FAULT_BAD_FRAME,
    FAULT_BITS,
    FAULT_NUMBER,
    FAULT_TOO_LONG,
    FAULT_WRONG_SOURCE,
    SENT,
    DataFunctions,
    put_event,
)

# The context: int64 words, written by the constructor and then by the proxy thread alone.
RANKS = 0
WINDOW_BYTES = 1  # length of every window
PEERS = 2  # address of the peer records
DONE = 3  # address of the queue of SENT events, two words each: wr_id, peer
_DONE_HEAD = 4  # SENT events queued
_DONE_TAIL = 5  # SENT events delivered
_CURSOR = 6  # peer whose ring the next poll reads first, so that none is starved by a small limit
WATCH = 7  # epoll descriptor over the peers' pidfds, -1 = nobody is watched
_WATCH_POLLS = 8  # polls since the clock was last read
_WATCH_TIME = 9  # CLOCK_MONOTONIC ns of the next look at the pidfds
ENDED = 10  # address of room for ENDED_MAX epoll events
CONTEXT_WORDS = 16

# A peer record: one pair of cache lines.
STATE = 0
WINDOW = 1  # address of the peer's mapped window
OUT = 2  # address of our ring in the peer's mailbox
_OUT_HEAD = 3  # immediates put into it
_OUT_TAIL = 4  # immediates of them known to be taken
IN = 5  # address of the peer's ring in our mailbox
_IN_TAIL = 6  # immediates taken from it
_PROBLEM = 7  # status of the FAULT to report at the next poll, 0 = none
PIDFD = 8  # descriptor of the peer's process, -1 = not watched
_PROBLEM_VALUE = 9  # and its value
_REASON = 10  # errno of the DOWN that ends ENDING
PEER_WORDS = 16

_ABSENT, UP, _ENDING, CLOSED = 0, 1, 2, 3  # ENDING: the peer is gone, its last immediates are still delivered

DONE_SLOTS = 4096
ENDED_MAX = 16
_EPOLL_EVENT_BYTES = 12 if os.uname().machine == "x86_64" else 16
_EPOLL_DATA = _EPOLL_EVENT_BYTES - 8
# A look at the pidfds costs a system call (0.3 us), reading the clock 30 ns: neither belongs in every poll. A dead peer
# is noticed within 50 ms plus 32 polls.
_WATCH_EVERY_POLLS = 32
_WATCH_EVERY_NS = 50_000_000

_IMM_MASK = WORD["imm"].mask
_NBYTES_SHIFT = WORD["nbytes"].shift
_NBYTES_MASK = WORD["nbytes"].mask
_LAP_SHIFT = WORD["lap"].shift
_SOURCE_SHIFT = IMM["source"].shift
_ENOTCONN = errno.ENOTCONN
_EINVAL = errno.EINVAL
_ESRCH = errno.ESRCH
_ECONNRESET = errno.ECONNRESET

_epoll_wait = external("epoll_wait", "int32(int32, int64, int32, int32)")


def _post(context: int, peer: int, stream: int, local: int, target: int, nbytes: int, imm: int, wr_id: int) -> int:
    record = peek(context + 8 * PEERS) + peer * 8 * PEER_WORDS
    state = peek(record + 8 * STATE)
    if state not in (UP, _ENDING):
        return -_ENOTCONN
    if nbytes < 0 or nbytes > MAX_WRITE_BYTES or target < 0 or target > peek(context + 8 * WINDOW_BYTES) - nbytes:
        return -_EINVAL
    queued = peek(context + 8 * _DONE_HEAD)
    if queued - peek(context + 8 * _DONE_TAIL) >= DONE_SLOTS:
        return BUSY
    head = peek(record + 8 * _OUT_HEAD)
    ring = peek(record + 8 * OUT)
    if head - peek(record + 8 * _OUT_TAIL) >= SLOTS:
        tail = load64(ring + TAIL)
        if tail == TAIL_CLOSED:
            # the peer has dropped this rank: the next look says so
            return BUSY
        # rule: mailbox: a tail lies between what was known and what was put in
        if tail > head or tail < peek(record + 8 * _OUT_TAIL):
            poke(record + 8 * _PROBLEM_VALUE, tail)
            poke(record + 8 * _PROBLEM, FAULT_NUMBER | head << FAULT_BITS)
            return BUSY
        poke(record + 8 * _OUT_TAIL, tail)
        if head - tail >= SLOTS:
            return BUSY
    if nbytes > 0:
        copy(peek(record + 8 * WINDOW) + target, local, nbytes)
    lap = ((head // SLOTS) + 1) & 1
    # Release: the payload is in place before the receiver can see the immediate.
    word = (imm & _IMM_MASK) | (nbytes << _NBYTES_SHIFT) | (lap << _LAP_SHIFT)
    store64(ring + SLOTS_OFFSET + (head % SLOTS) * 8, word)
    poke(record + 8 * _OUT_HEAD, head + 1)
    done = peek(context + 8 * DONE) + (queued % DONE_SLOTS) * 16
    poke(done, wr_id)
    poke(done + 8, peer)
    poke(context + 8 * _DONE_HEAD, queued + 1)
    return ACCEPTED


def _flush(context: int) -> int:
    return 0


@compiled
def _deliver_sent(context: int, events: int, limit: int) -> int:
    """SENT events of peers that were not dropped; returns how many."""
    peers, queue = peek(context + 8 * PEERS), peek(context + 8 * DONE)
    head, tail = peek(context + 8 * _DONE_HEAD), peek(context + 8 * _DONE_TAIL)
    count = 0
    while tail < head and count < limit:
        done = queue + (tail % DONE_SLOTS) * 16
        peer = peek(done + 8)
        tail += 1
        if peek(peers + peer * 8 * PEER_WORDS + 8 * STATE) != CLOSED:
            put_event(events, count, SENT, peek(done), peer, 0)
            count += 1
    poke(context + 8 * _DONE_TAIL, tail)
    return count


@compiled
def _end(record: int, reason: int) -> None:
    """The peer is gone: what it has put into its ring is still delivered, then DOWN with ``reason``."""
    if peek(record + 8 * STATE) == UP:
        poke(record + 8 * STATE, _ENDING)
        poke(record + 8 * _REASON, reason)


@compiled
def _watch(context: int) -> None:
    """Mark peers that have dropped this rank, or whose process has ended."""
    watch = peek(context + 8 * WATCH)
    polls = peek(context + 8 * _WATCH_POLLS) + 1
    if polls < _WATCH_EVERY_POLLS:
        poke(context + 8 * _WATCH_POLLS, polls)
        return
    poke(context + 8 * _WATCH_POLLS, 0)
    now = monotonic_ns()
    if now < peek(context + 8 * _WATCH_TIME):
        return
    poke(context + 8 * _WATCH_TIME, now + _WATCH_EVERY_NS)
    for peer in range(peek(context + 8 * RANKS)):
        record = peek(context + 8 * PEERS) + peer * 8 * PEER_WORDS
        if peek(record + 8 * STATE) == UP and load64(peek(record + 8 * OUT) + TAIL) == TAIL_CLOSED:
            _end(record, _ECONNRESET)
    if watch < 0:
        return
    ended = peek(context + 8 * ENDED)
    count = _epoll_wait(watch, ended, ENDED_MAX, 0)
    for index in range(count):
        # Registered one-shot: each process is told once.
        pidfd = peek32(ended + index * _EPOLL_EVENT_BYTES + _EPOLL_DATA)
        for peer in range(peek(context + 8 * RANKS)):
            record = peek(context + 8 * PEERS) + peer * 8 * PEER_WORDS
            if peek(record + 8 * PIDFD) == pidfd:
                _end(record, _ESRCH)


@compiled
def _receive(record: int, peer: int, events: int, count: int, limit: int) -> int:
    """Take immediates of one peer until its ring is empty or ``limit`` events are stored; returns the new count."""
    problem = peek(record + 8 * _PROBLEM)
    if problem != 0 and count < limit:
        poke(record + 8 * STATE, CLOSED)
        put_event(events, count, FAULT, peek(record + 8 * _PROBLEM_VALUE), peer, problem)
        return count + 1
    ending = peek(record + 8 * STATE) == _ENDING
    ring = peek(record + 8 * IN)
    before = peek(record + 8 * _IN_TAIL)
    taken = before
    while count < limit:
        # Read once: the peer could change the word between a check and its use.
        word = load64(ring + SLOTS_OFFSET + (taken % SLOTS) * 8)
        lap = ((taken // SLOTS) + 1) & 1
        if (word >> _LAP_SHIFT) & 1 != lap:
            if ending:
                poke(record + 8 * STATE, CLOSED)
                put_event(events, count, DOWN, 0, peer, peek(record + 8 * _REASON))
                count += 1
            break
        imm = word & _IMM_MASK
        nbytes = (word >> _NBYTES_SHIFT) & _NBYTES_MASK
        status, value = 0, word
        # rule: mailbox: a word holds nothing else
        if word >> (_LAP_SHIFT + 1) != 0:
            status = FAULT_BAD_FRAME
        # rule: mailbox: bytes are bounded
        elif nbytes > MAX_WRITE_BYTES:
            status, value = FAULT_TOO_LONG | MAX_WRITE_BYTES << FAULT_BITS, nbytes
        # rule: mailbox: an immediate is of the source of its ring
        elif imm >> _SOURCE_SHIFT != peer:
            status, value = FAULT_WRONG_SOURCE | peer << FAULT_BITS, imm
        if status != 0:
            poke(record + 8 * STATE, CLOSED)
            put_event(events, count, FAULT, value, peer, status)
            count += 1
            break
        put_event(events, count, ARRIVED, imm, peer, nbytes)
        count += 1
        taken += 1
    if taken != before:
        poke(record + 8 * _IN_TAIL, taken)
        store64(ring + TAIL, taken)
    return count


def _poll(context: int, events: int, limit: int) -> int:
    _watch(context)
    # Half of the room at most, so that a burst of own posts does not hold back what arrives.
    count = _deliver_sent(context, events, (limit + 1) // 2)
    ranks, peers = peek(context + 8 * RANKS), peek(context + 8 * PEERS)
    cursor = peek(context + 8 * _CURSOR)
    for step in range(ranks):
        if count >= limit:
            break
        peer = cursor + step
        if peer >= ranks:
            peer -= ranks
        record = peers + peer * 8 * PEER_WORDS
        state = peek(record + 8 * STATE)
        if state in (UP, _ENDING):
            count = _receive(record, peer, events, count, limit)
            if count >= limit:
                poke(context + 8 * _CURSOR, (peer + 1) % ranks)
    return count


def _drop(context: int, peer: int) -> int:
    record = peek(context + 8 * PEERS) + peer * 8 * PEER_WORDS
    poke(record + 8 * STATE, CLOSED)
    ring = peek(record + 8 * IN)
    if ring != 0:
        # The peer may well live and wait for this rank: its next look at its ring tells it.
        store64(ring + TAIL, TAIL_CLOSED)
    return 0


FUNCTIONS = DataFunctions("shm", _post, _flush, _poll, _drop)
