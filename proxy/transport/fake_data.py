"""The fake network's data path: memory, adversary and the four C functions. See :mod:`.fake` for what it is.

Everything is under one lock per fabric, so a poll sees the writes of all ranks in some order, whoever drives it.
"""

from __future__ import annotations

from errno import ECONNRESET

from ...native.atomics import compare_exchange, copy, peek, poke, store64
from ...native.calls import sched_yield
from ...native.jit import compiled
from .base import ACCEPTED, ARRIVED, BUSY, DOWN, EVENT_BYTES, SENT, DataFunctions, put_event

# Fabric words (byte offsets). LOCK: 1 = taken (compare-and-exchange, release store). All others: under the lock.
# Probabilities are thresholds for 32 random bits.
(
    FABRIC_LOCK,
    FABRIC_RANKS,
    FABRIC_PROXIES,
    FABRIC_RANDOM,
    FABRIC_REORDER,
    FABRIC_DELAY,
    FABRIC_DUPLICATE,
    FABRIC_LINGER,
    FABRIC_BUSY,
    FABRIC_DROP,
    FABRIC_LOSE,
    FABRIC_KILL,
    FABRIC_KILL_AFTER,
    FABRIC_PROVES,
    FABRIC_DEPTH,
    FABRIC_WINDOWS,
    FABRIC_ALIVE,
    FABRIC_POSTED,
    FABRIC_TABLE,
    FABRIC_FLIGHTS,
    FABRIC_FREE,
    FABRIC_TOP,
) = range(0, 22 * 8, 8)
FABRIC_BYTES = 192

# Endpoint words. INBOX and OUTBOX: numbers of the writes to and from this endpoint, oldest first, depth x ranks each.
# BLOCKED: per source, the poll in which its later writes must wait. DROPPED, TOLD: per peer, 0 or 1. UNDER_WAY: per
# peer, writes to it that something still names. INJECTED: events. DROPPED_BY: per peer, 1 = it has dropped us.
(
    ENDPOINT_FABRIC,
    ENDPOINT_RANK,
    ENDPOINT_PROXY,
    ENDPOINT_INBOX,
    ENDPOINT_INBOX_COUNT,
    ENDPOINT_OUTBOX,
    ENDPOINT_OUTBOX_COUNT,
    ENDPOINT_BLOCKED,
    ENDPOINT_POLLS,
    ENDPOINT_DROPPED,
    ENDPOINT_TOLD,
    ENDPOINT_UNDER_WAY,
    ENDPOINT_INJECTED,
    ENDPOINT_INJECTED_COUNT,
    ENDPOINT_DROPPED_BY,
) = range(0, 15 * 8, 8)
ENDPOINT_BYTES = 128

# A write in flight. HOLDERS: lists that still name it; at 0 it is free, and SOURCE links the free ones.
(
    FLIGHT_CONTEXT,
    FLIGHT_SOURCE,
    FLIGHT_PEER,
    FLIGHT_LOCAL,
    FLIGHT_TARGET,
    FLIGHT_NBYTES,
    FLIGHT_IMM,
    FLIGHT_WR,
    FLIGHT_STAGE,
    FLIGHT_HOLDERS,
) = range(0, 10 * 8, 8)
FLIGHT_BYTES = 80
HALF, LANDED, SEEN, OVER, LOST = 1, 2, 4, 8, 16

INJECTED_LIMIT = 16


@compiled
def _lock(fabric: int) -> None:
    while not compare_exchange(fabric + FABRIC_LOCK, 0, 1):
        sched_yield()


@compiled
def _unlock(fabric: int) -> None:
    store64(fabric + FABRIC_LOCK, 0)


@compiled
def _chance(fabric: int, threshold: int) -> bool:
    """True with the probability that the word at ``fabric + threshold`` holds (xorshift64: Marsaglia 2003, 13-7-17)."""
    limit = peek(fabric + threshold)
    if limit == 0:
        return False
    x = peek(fabric + FABRIC_RANDOM)
    x ^= x << 13
    x ^= (x >> 7) & ((1 << 57) - 1)
    x ^= x << 17
    poke(fabric + FABRIC_RANDOM, x)
    return (x >> 16) & 0xFFFFFFFF < limit


@compiled
def _alive(fabric: int, rank: int) -> bool:
    return peek(peek(fabric + FABRIC_ALIVE) + rank * 8) == 1


@compiled
def _endpoint_of(fabric: int, rank: int, proxy: int) -> int:
    return peek(peek(fabric + FABRIC_TABLE) + (rank * peek(fabric + FABRIC_PROXIES) + proxy) * 8)


@compiled
def _flight(fabric: int, number: int) -> int:
    return peek(fabric + FABRIC_FLIGHTS) + number * FLIGHT_BYTES


@compiled
def _let_go(fabric: int, number: int) -> None:
    """One list less names the write; free it after the last."""
    flight = _flight(fabric, number)
    holders = peek(flight + FLIGHT_HOLDERS) - 1
    poke(flight + FLIGHT_HOLDERS, holders)
    if holders == 0:
        under_way = peek(peek(flight + FLIGHT_CONTEXT) + ENDPOINT_UNDER_WAY) + peek(flight + FLIGHT_PEER) * 8
        poke(under_way, peek(under_way) - 1)
        poke(flight + FLIGHT_SOURCE, peek(fabric + FABRIC_FREE))
        poke(fabric + FABRIC_FREE, number + 1)


@compiled
def _post_locked(
    fabric: int, context: int, peer: int, local: int, target: int, nbytes: int, imm: int, wr_id: int
) -> int:
    rank = peek(context + ENDPOINT_RANK)
    other = _endpoint_of(fabric, peer, peek(context + ENDPOINT_PROXY))
    under_way = peek(context + ENDPOINT_UNDER_WAY) + peer * 8
    full = peek(under_way) >= peek(fabric + FABRIC_DEPTH)
    if other == 0 or full or not _alive(fabric, rank) or _chance(fabric, FABRIC_BUSY):
        return BUSY
    poke(under_way, peek(under_way) + 1)
    number = peek(fabric + FABRIC_FREE) - 1
    if number >= 0:
        poke(fabric + FABRIC_FREE, peek(_flight(fabric, number) + FLIGHT_SOURCE))
    else:
        number = peek(fabric + FABRIC_TOP)
        poke(fabric + FABRIC_TOP, number + 1)
    flight = _flight(fabric, number)
    poke(flight + FLIGHT_CONTEXT, context)
    poke(flight + FLIGHT_SOURCE, rank)
    poke(flight + FLIGHT_PEER, peer)
    poke(flight + FLIGHT_LOCAL, local)
    poke(flight + FLIGHT_TARGET, target)
    poke(flight + FLIGHT_NBYTES, nbytes)
    poke(flight + FLIGHT_IMM, imm)
    poke(flight + FLIGHT_WR, wr_id)
    poke(flight + FLIGHT_STAGE, 0)
    poke(flight + FLIGHT_HOLDERS, 1)
    count = peek(context + ENDPOINT_OUTBOX_COUNT)
    poke(peek(context + ENDPOINT_OUTBOX) + count * 8, number)
    poke(context + ENDPOINT_OUTBOX_COUNT, count + 1)
    if _chance(fabric, FABRIC_DROP) or not _alive(fabric, peer):
        poke(flight + FLIGHT_STAGE, LOST)
    elif _chance(fabric, FABRIC_LOSE):
        # Completed as far as the sender can tell, and never seen by the receiver.
        poke(flight + FLIGHT_STAGE, LANDED | SEEN)
    else:
        poke(flight + FLIGHT_HOLDERS, 2)
        count = peek(other + ENDPOINT_INBOX_COUNT)
        poke(peek(other + ENDPOINT_INBOX) + count * 8, number)
        poke(other + ENDPOINT_INBOX_COUNT, count + 1)
    posted = peek(fabric + FABRIC_POSTED) + rank * 8
    poke(posted, peek(posted) + 1)
    if rank == peek(fabric + FABRIC_KILL) and peek(posted) >= peek(fabric + FABRIC_KILL_AFTER):
        poke(peek(fabric + FABRIC_ALIVE) + rank * 8, 0)
    return ACCEPTED


def _post(context: int, peer: int, stream: int, local: int, target: int, nbytes: int, imm: int, wr_id: int) -> int:
    fabric = peek(context + ENDPOINT_FABRIC)
    _lock(fabric)
    status = _post_locked(fabric, context, peer, local, target, nbytes, imm, wr_id)
    _unlock(fabric)
    return status


@compiled
def _land(fabric: int, flight: int, nbytes: int) -> None:
    window = peek(peek(fabric + FABRIC_WINDOWS) + peek(flight + FLIGHT_PEER) * 8)
    copy(window + peek(flight + FLIGHT_TARGET), peek(flight + FLIGHT_LOCAL), nbytes)


@compiled
def _advance(fabric: int, context: int, number: int, events: int, count: int) -> int:
    """One poll's worth of progress of a write to this endpoint; returns the new number of events."""
    flight = _flight(fabric, number)
    source = peek(flight + FLIGHT_SOURCE)
    stage = peek(flight + FLIGHT_STAGE)
    nbytes = peek(flight + FLIGHT_NBYTES)
    blocked = peek(context + ENDPOINT_BLOCKED) + source * 8
    polls = peek(context + ENDPOINT_POLLS)
    if not stage & SEEN:
        if peek(blocked) == polls:
            return count
        if _chance(fabric, FABRIC_DELAY):
            poke(blocked, polls)
            return count
        if _chance(fabric, FABRIC_REORDER):
            return count
        adverse = peek(fabric + FABRIC_REORDER) != 0 or peek(fabric + FABRIC_DELAY) != 0
        if not stage & LANDED:
            if adverse and nbytes >= 32 and not stage & HALF:
                _land(fabric, flight, nbytes // 2)
                stage |= HALF
            else:
                _land(fabric, flight, nbytes)
                stage |= LANDED
            poke(flight + FLIGHT_STAGE, stage)
            if adverse:
                if peek(fabric + FABRIC_REORDER) == 0:
                    poke(blocked, polls)
                return count
    elif not _chance(fabric, FABRIC_DUPLICATE):
        return count
    elif nbytes and _chance(fabric, FABRIC_DUPLICATE):
        _land(fabric, flight, nbytes)
        return count
    poke(flight + FLIGHT_STAGE, stage | SEEN)
    proven = source if peek(fabric + FABRIC_PROVES) else -1
    put_event(events, count, ARRIVED, peek(flight + FLIGHT_IMM), proven, nbytes)
    return count + 1


@compiled
def _poll_inbox(fabric: int, context: int, events: int, count: int, limit: int) -> int:
    inbox = peek(context + ENDPOINT_INBOX)
    total = peek(context + ENDPOINT_INBOX_COUNT)
    kept = 0
    for i in range(total):
        number = peek(inbox + i * 8)
        flight = _flight(fabric, number)
        source = peek(flight + FLIGHT_SOURCE)
        gone = peek(peek(context + ENDPOINT_DROPPED) + source * 8) or peek(peek(context + ENDPOINT_TOLD) + source * 8)
        # A dead rank sends nothing new; what had already landed may still be seen.
        if not _alive(fabric, source) and not peek(flight + FLIGHT_STAGE) & LANDED:
            gone = 1
        stage = peek(flight + FLIGHT_STAGE)
        # Once its sender has seen SENT nothing of a write is repeated any more.
        if not gone and count < limit and not (stage & SEEN and stage & OVER):
            count = _advance(fabric, context, number, events, count)
            stage = peek(flight + FLIGHT_STAGE)
        repeatable = peek(fabric + FABRIC_DUPLICATE) != 0 and not stage & OVER
        if gone or (stage & SEEN and not repeatable):
            _let_go(fabric, number)
        else:
            poke(inbox + kept * 8, number)
            kept += 1
    poke(context + ENDPOINT_INBOX_COUNT, kept)
    return count


@compiled
def _poll_outbox(fabric: int, context: int, events: int, count: int, limit: int) -> int:
    outbox = peek(context + ENDPOINT_OUTBOX)
    total = peek(context + ENDPOINT_OUTBOX_COUNT)
    kept = 0
    for i in range(total):
        number = peek(outbox + i * 8)
        flight = _flight(fabric, number)
        peer = peek(flight + FLIGHT_PEER)
        stage = peek(flight + FLIGHT_STAGE)
        finished = peek(peek(context + ENDPOINT_DROPPED) + peer * 8) != 0
        if not finished and count < limit:
            if stage & LOST and not _chance(fabric, FABRIC_DELAY):
                told = peek(context + ENDPOINT_TOLD) + peer * 8
                if peek(told) == 0:
                    poke(told, 1)
                    put_event(events, count, DOWN, 0, peer, ECONNRESET)
                    count += 1
                finished = True
            elif stage & LANDED and not stage & LOST:
                # Held a while whenever repeats are on, or there would be no time for them.
                held = (
                    _chance(fabric, FABRIC_LINGER) or _chance(fabric, FABRIC_DELAY) or _chance(fabric, FABRIC_DUPLICATE)
                )
                if not held:
                    put_event(events, count, SENT, peek(flight + FLIGHT_WR), peer, 0)
                    count += 1
                    finished = True
        if finished:
            poke(flight + FLIGHT_STAGE, stage | OVER)
            _let_go(fabric, number)
        else:
            poke(outbox + kept * 8, number)
            kept += 1
    poke(context + ENDPOINT_OUTBOX_COUNT, kept)
    return count


@compiled
def _poll_locked(fabric: int, context: int, events: int, limit: int) -> int:
    rank = peek(context + ENDPOINT_RANK)
    if not _alive(fabric, rank):
        return 0
    poke(context + ENDPOINT_POLLS, peek(context + ENDPOINT_POLLS) + 1)
    count = 0
    injected = peek(context + ENDPOINT_INJECTED_COUNT)
    if injected and injected <= limit:
        copy(events, peek(context + ENDPOINT_INJECTED), injected * EVENT_BYTES)
        poke(context + ENDPOINT_INJECTED_COUNT, 0)
        count = injected
    for peer in range(peek(fabric + FABRIC_RANKS)):
        told = peek(context + ENDPOINT_TOLD) + peer * 8
        told_before = peek(told) or peek(peek(context + ENDPOINT_DROPPED) + peer * 8)
        gone = not _alive(fabric, peer) or peek(peek(context + ENDPOINT_DROPPED_BY) + peer * 8)
        if peer != rank and gone and not told_before and count < limit:
            if _chance(fabric, FABRIC_DELAY):
                continue
            poke(told, 1)
            put_event(events, count, DOWN, 0, peer, ECONNRESET)
            count += 1
    count = _poll_inbox(fabric, context, events, count, limit)
    return _poll_outbox(fabric, context, events, count, limit)


def _poll(context: int, events: int, limit: int) -> int:
    fabric = peek(context + ENDPOINT_FABRIC)
    _lock(fabric)
    count = _poll_locked(fabric, context, events, limit)
    _unlock(fabric)
    return count


def _flush(context: int) -> int:
    return 0


def _drop(context: int, peer: int) -> int:
    fabric = peek(context + ENDPOINT_FABRIC)
    _lock(fabric)
    poke(peek(context + ENDPOINT_DROPPED) + peer * 8, 1)
    # Nothing of the past may still read this rank's bytes for the peer.
    other = _endpoint_of(fabric, peer, peek(context + ENDPOINT_PROXY))
    if other:
        rank = peek(context + ENDPOINT_RANK)
        poke(peek(other + ENDPOINT_DROPPED_BY) + rank * 8, 1)
        inbox = peek(other + ENDPOINT_INBOX)
        kept = 0
        for i in range(peek(other + ENDPOINT_INBOX_COUNT)):
            number = peek(inbox + i * 8)
            if peek(_flight(fabric, number) + FLIGHT_SOURCE) == rank:
                _let_go(fabric, number)
            else:
                poke(inbox + kept * 8, number)
                kept += 1
        poke(other + ENDPOINT_INBOX_COUNT, kept)
    _unlock(fabric)
    return 0


FUNCTIONS = DataFunctions("fake", _post, _flush, _poll, _drop)
