"""``fake``: an in-process transport with a seeded adversary, for tests of everything that stands above a transport.

It reorders, delays, repeats, loses and kills, within (or, where asked, beyond) what :mod:`.base` allows a transport to
do. Only the four C functions are its own: what runs on it is the production proxy. Driven from one thread it is
deterministic: the same seed gives the same run. It may also be driven by threads; one lock then orders the calls.

What a write goes through, each stage at a poll of its own: first half of the payload lands, all of it lands, its
immediate arrives (:data:`ARRIVED` at the receiver), it completes (``SENT`` at the sender; after it landed, before or
after it arrived). Until it completes the adversary may land it again, *with the bytes that the source holds then*, and
may repeat its immediate: so a sender that reuses a send slot too early corrupts data here as it would on a NIC.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from errno import ECONNRESET

import numpy as np

from ...errors import BootstrapError, ConfigError
from ...native.atomics import compare_exchange, copy, peek, poke, store64
from ...native.calls import sched_yield
from ...native.jit import c_function, compile_lock, compiled
from ..state import aligned_zeros
from .base import (
    ACCEPTED,
    ARRIVED,
    BUSY,
    DOWN,
    EVENT_BYTES,
    SENT,
    Capabilities,
    DataPath,
)

__all__ = ["Adversary", "FakeEndpoint", "FakeFabric"]


@dataclass(frozen=True, slots=True)
class Adversary:
    """What goes wrong. Probabilities are per write (drop, lose) or per write and poll (the others).

    Attributes:
        reorder: a write stays behind while those posted after it pass.
        delay: a write, and everything behind it from the same rank, waits for another poll.
        duplicate: an arrived write that has not completed yet is repeated: its payload or its immediate.
        linger: a write that has landed waits for another poll before its sender sees SENT.
        busy: a post is refused with BUSY.
        drop: a write is lost, and its sender is told by DOWN, as when a reliable connection has used up its retries.
        lose: a write is lost and nobody is told (no real transport may do so: waiting ends at the deadline).
        kill: rank that vanishes, -1 = none; see also :meth:`FakeFabric.kill`.
        kill_after: writes that it posts before that.
    """

    reorder: float = 0.0
    delay: float = 0.0
    duplicate: float = 0.0
    linger: float = 0.0
    busy: float = 0.0
    drop: float = 0.0
    lose: float = 0.0
    kill: int = -1
    kill_after: int = 0

    def __post_init__(self) -> None:
        for name in ("reorder", "delay", "duplicate", "linger", "busy", "drop", "lose"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} = {getattr(self, name)} is no probability")
        if max(self.reorder, self.delay, self.duplicate, self.linger, self.busy) == 1:
            raise ConfigError("reorder, delay, duplicate, linger or busy = 1 would let nothing through, ever")


# Fabric words (byte offsets). LOCK: 1 = taken (compare-and-exchange, release store). All others: under the lock.
# Probabilities are thresholds for 32 random bits.
(
    _LOCK,
    _RANKS,
    _PROXIES,
    _RANDOM,
    _REORDER,
    _DELAY,
    _DUPLICATE,
    _LINGER,
    _BUSY,
    _DROP,
    _LOSE,
    _KILL,
    _KILL_AFTER,
    _PROVES,
    _DEPTH,
    _WINDOWS,
    _ALIVE,
    _POSTED,
    _TABLE,
    _FLIGHTS,
    _FREE,
    _TOP,
) = range(0, 22 * 8, 8)
_FABRIC_BYTES = 192

# Endpoint words. INBOX and OUTBOX: numbers of the writes to and from this endpoint, oldest first, _DEPTH x RANKS each.
# BLOCKED: per source, the poll in which its later writes must wait. DROPPED, TOLD: per peer, 0 or 1. UNDER_WAY: per
# peer, writes to it that something still names. INJECTED: events.
(
    _E_FABRIC,
    _E_RANK,
    _E_PROXY,
    _E_INBOX,
    _E_INBOX_COUNT,
    _E_OUTBOX,
    _E_OUTBOX_COUNT,
    _E_BLOCKED,
    _E_POLLS,
    _E_DROPPED,
    _E_TOLD,
    _E_UNDER_WAY,
    _E_INJECTED,
    _E_INJECTED_COUNT,
) = range(0, 14 * 8, 8)
_ENDPOINT_BYTES = 128

# A write in flight. HOLDERS: lists that still name it; at 0 it is free, and SOURCE links the free ones.
(
    _F_CONTEXT,
    _F_SOURCE,
    _F_PEER,
    _F_LOCAL,
    _F_TARGET,
    _F_NBYTES,
    _F_IMM,
    _F_WR,
    _F_STAGE,
    _F_HOLDERS,
) = range(0, 10 * 8, 8)
_FLIGHT_BYTES = 80
_HALF, _LANDED, _SEEN, _OVER, _LOST = 1, 2, 4, 8, 16

_INJECTED_LIMIT = 16


@compiled
def _lock(fabric: int) -> None:
    while not compare_exchange(fabric + _LOCK, 0, 1):
        sched_yield()


@compiled
def _unlock(fabric: int) -> None:
    store64(fabric + _LOCK, 0)


@compiled
def _chance(fabric: int, threshold: int) -> bool:
    """True with the probability that the word at ``fabric + threshold`` holds (xorshift64: Marsaglia 2003, 13-7-17)."""
    limit = peek(fabric + threshold)
    if limit == 0:
        return False
    x = peek(fabric + _RANDOM)
    x ^= x << 13
    x ^= (x >> 7) & ((1 << 57) - 1)
    x ^= x << 17
    poke(fabric + _RANDOM, x)
    return (x >> 16) & 0xFFFFFFFF < limit


@compiled
def _alive(fabric: int, rank: int) -> bool:
    return peek(peek(fabric + _ALIVE) + rank * 8) == 1


@compiled
def _endpoint_of(fabric: int, rank: int, proxy: int) -> int:
    return peek(peek(fabric + _TABLE) + (rank * peek(fabric + _PROXIES) + proxy) * 8)


@compiled
def _flight(fabric: int, number: int) -> int:
    return peek(fabric + _FLIGHTS) + number * _FLIGHT_BYTES


@compiled
def _let_go(fabric: int, number: int) -> None:
    """One list less names the write; free it after the last."""
    flight = _flight(fabric, number)
    holders = peek(flight + _F_HOLDERS) - 1
    poke(flight + _F_HOLDERS, holders)
    if holders == 0:
        under_way = peek(peek(flight + _F_CONTEXT) + _E_UNDER_WAY) + peek(flight + _F_PEER) * 8
        poke(under_way, peek(under_way) - 1)
        poke(flight + _F_SOURCE, peek(fabric + _FREE))
        poke(fabric + _FREE, number + 1)


@compiled
def _event(events: int, count: int, kind: int, value: int, peer: int, status: int) -> int:
    """Store event ``count``; returns the new count."""
    event = events + count * EVENT_BYTES
    poke(event, kind)
    poke(event + 8, value)
    poke(event + 16, peer)
    poke(event + 24, status)
    return count + 1


@compiled
def _post_locked(
    fabric: int, context: int, peer: int, local: int, target: int, nbytes: int, imm: int, wr_id: int
) -> int:
    rank = peek(context + _E_RANK)
    other = _endpoint_of(fabric, peer, peek(context + _E_PROXY))
    under_way = peek(context + _E_UNDER_WAY) + peer * 8
    full = peek(under_way) >= peek(fabric + _DEPTH)
    if other == 0 or full or not _alive(fabric, rank) or _chance(fabric, _BUSY):
        return BUSY
    poke(under_way, peek(under_way) + 1)
    number = peek(fabric + _FREE) - 1
    if number >= 0:
        poke(fabric + _FREE, peek(_flight(fabric, number) + _F_SOURCE))
    else:
        number = peek(fabric + _TOP)
        poke(fabric + _TOP, number + 1)
    flight = _flight(fabric, number)
    poke(flight + _F_CONTEXT, context)
    poke(flight + _F_SOURCE, rank)
    poke(flight + _F_PEER, peer)
    poke(flight + _F_LOCAL, local)
    poke(flight + _F_TARGET, target)
    poke(flight + _F_NBYTES, nbytes)
    poke(flight + _F_IMM, imm)
    poke(flight + _F_WR, wr_id)
    poke(flight + _F_STAGE, 0)
    poke(flight + _F_HOLDERS, 1)
    count = peek(context + _E_OUTBOX_COUNT)
    poke(peek(context + _E_OUTBOX) + count * 8, number)
    poke(context + _E_OUTBOX_COUNT, count + 1)
    if _chance(fabric, _DROP) or not _alive(fabric, peer):
        poke(flight + _F_STAGE, _LOST)
    elif _chance(fabric, _LOSE):
        # Completed as far as the sender can tell, and never seen by the receiver.
        poke(flight + _F_STAGE, _LANDED | _SEEN)
    else:
        poke(flight + _F_HOLDERS, 2)
        count = peek(other + _E_INBOX_COUNT)
        poke(peek(other + _E_INBOX) + count * 8, number)
        poke(other + _E_INBOX_COUNT, count + 1)
    posted = peek(fabric + _POSTED) + rank * 8
    poke(posted, peek(posted) + 1)
    if rank == peek(fabric + _KILL) and peek(posted) >= peek(fabric + _KILL_AFTER):
        poke(peek(fabric + _ALIVE) + rank * 8, 0)
    return ACCEPTED


@compiled
def _post(context: int, peer: int, stream: int, local: int, target: int, nbytes: int, imm: int, wr_id: int) -> int:
    fabric = peek(context + _E_FABRIC)
    _lock(fabric)
    status = _post_locked(fabric, context, peer, local, target, nbytes, imm, wr_id)
    _unlock(fabric)
    return status


@compiled
def _land(fabric: int, flight: int, nbytes: int) -> None:
    window = peek(peek(fabric + _WINDOWS) + peek(flight + _F_PEER) * 8)
    copy(window + peek(flight + _F_TARGET), peek(flight + _F_LOCAL), nbytes)


@compiled
def _advance(fabric: int, context: int, number: int, events: int, count: int) -> int:
    """One poll's worth of progress of a write to this endpoint; returns the new number of events."""
    flight = _flight(fabric, number)
    source = peek(flight + _F_SOURCE)
    stage = peek(flight + _F_STAGE)
    nbytes = peek(flight + _F_NBYTES)
    blocked = peek(context + _E_BLOCKED) + source * 8
    polls = peek(context + _E_POLLS)
    if not stage & _SEEN:
        if peek(blocked) == polls:
            return count
        if _chance(fabric, _DELAY):
            poke(blocked, polls)
            return count
        if _chance(fabric, _REORDER):
            return count
        adverse = peek(fabric + _REORDER) != 0 or peek(fabric + _DELAY) != 0
        if not stage & _LANDED:
            if adverse and nbytes >= 32 and not stage & _HALF:
                _land(fabric, flight, nbytes // 2)
                stage |= _HALF
            else:
                _land(fabric, flight, nbytes)
                stage |= _LANDED
            poke(flight + _F_STAGE, stage)
            if adverse:
                if peek(fabric + _REORDER) == 0:
                    poke(blocked, polls)
                return count
    elif not _chance(fabric, _DUPLICATE):
        return count
    elif nbytes and _chance(fabric, _DUPLICATE):
        _land(fabric, flight, nbytes)
        return count
    poke(flight + _F_STAGE, stage | _SEEN)
    proven = source if peek(fabric + _PROVES) else -1
    return _event(events, count, ARRIVED, peek(flight + _F_IMM), proven, nbytes)


@compiled
def _poll_inbox(fabric: int, context: int, events: int, count: int, limit: int) -> int:
    inbox = peek(context + _E_INBOX)
    total = peek(context + _E_INBOX_COUNT)
    kept = 0
    for i in range(total):
        number = peek(inbox + i * 8)
        flight = _flight(fabric, number)
        source = peek(flight + _F_SOURCE)
        gone = peek(peek(context + _E_DROPPED) + source * 8) or peek(peek(context + _E_TOLD) + source * 8)
        # A dead rank sends nothing new; what had already landed may still be seen.
        if not _alive(fabric, source) and not peek(flight + _F_STAGE) & _LANDED:
            gone = 1
        stage = peek(flight + _F_STAGE)
        # Once its sender has seen SENT nothing of a write is repeated any more.
        if not gone and count < limit and not (stage & _SEEN and stage & _OVER):
            count = _advance(fabric, context, number, events, count)
            stage = peek(flight + _F_STAGE)
        repeatable = peek(fabric + _DUPLICATE) != 0 and not stage & _OVER
        if gone or (stage & _SEEN and not repeatable):
            _let_go(fabric, number)
        else:
            poke(inbox + kept * 8, number)
            kept += 1
    poke(context + _E_INBOX_COUNT, kept)
    return count


@compiled
def _poll_outbox(fabric: int, context: int, events: int, count: int, limit: int) -> int:
    outbox = peek(context + _E_OUTBOX)
    total = peek(context + _E_OUTBOX_COUNT)
    kept = 0
    for i in range(total):
        number = peek(outbox + i * 8)
        flight = _flight(fabric, number)
        peer = peek(flight + _F_PEER)
        stage = peek(flight + _F_STAGE)
        finished = peek(peek(context + _E_DROPPED) + peer * 8) != 0
        if not finished and count < limit:
            if stage & _LOST and not _chance(fabric, _DELAY):
                told = peek(context + _E_TOLD) + peer * 8
                if peek(told) == 0:
                    poke(told, 1)
                    count = _event(events, count, DOWN, 0, peer, ECONNRESET)
                finished = True
            elif stage & _LANDED and not stage & _LOST:
                # Held a while whenever repeats are on, or there would be no time for them.
                held = _chance(fabric, _LINGER) or _chance(fabric, _DELAY) or _chance(fabric, _DUPLICATE)
                if not held:
                    count = _event(events, count, SENT, peek(flight + _F_WR), peer, 0)
                    finished = True
        if finished:
            poke(flight + _F_STAGE, stage | _OVER)
            _let_go(fabric, number)
        else:
            poke(outbox + kept * 8, number)
            kept += 1
    poke(context + _E_OUTBOX_COUNT, kept)
    return count


@compiled
def _poll_locked(fabric: int, context: int, events: int, limit: int) -> int:
    rank = peek(context + _E_RANK)
    if not _alive(fabric, rank):
        return 0
    poke(context + _E_POLLS, peek(context + _E_POLLS) + 1)
    count = 0
    injected = peek(context + _E_INJECTED_COUNT)
    if injected and injected <= limit:
        copy(events, peek(context + _E_INJECTED), injected * EVENT_BYTES)
        poke(context + _E_INJECTED_COUNT, 0)
        count = injected
    for peer in range(peek(fabric + _RANKS)):
        told = peek(context + _E_TOLD) + peer * 8
        told_before = peek(told) or peek(peek(context + _E_DROPPED) + peer * 8)
        if peer != rank and not _alive(fabric, peer) and not told_before and count < limit:
            if _chance(fabric, _DELAY):
                continue
            poke(told, 1)
            count = _event(events, count, DOWN, 0, peer, ECONNRESET)
    count = _poll_inbox(fabric, context, events, count, limit)
    return _poll_outbox(fabric, context, events, count, limit)


@compiled
def _poll(context: int, events: int, limit: int) -> int:
    fabric = peek(context + _E_FABRIC)
    _lock(fabric)
    count = _poll_locked(fabric, context, events, limit)
    _unlock(fabric)
    return count


@compiled
def _flush(context: int) -> int:
    return 0


@compiled
def _drop(context: int, peer: int, reason: int) -> int:
    fabric = peek(context + _E_FABRIC)
    _lock(fabric)
    poke(peek(context + _E_DROPPED) + peer * 8, 1)
    # Nothing of the past may still read this rank's bytes for the peer.
    other = _endpoint_of(fabric, peer, peek(context + _E_PROXY))
    if other:
        rank = peek(context + _E_RANK)
        inbox = peek(other + _E_INBOX)
        kept = 0
        for i in range(peek(other + _E_INBOX_COUNT)):
            number = peek(inbox + i * 8)
            if peek(_flight(fabric, number) + _F_SOURCE) == rank:
                _let_go(fabric, number)
            else:
                poke(inbox + kept * 8, number)
                kept += 1
        poke(other + _E_INBOX_COUNT, kept)
    _unlock(fabric)
    return 0


@functools.cache
def _functions() -> tuple[int, int, int, int]:
    """Addresses of post, flush, poll and drop; compiled when the first endpoint asks, not on import."""
    with compile_lock():
        eight, three = "int64(" + ", ".join(["int64"] * 8) + ")", "int64(int64, int64, int64)"

        @c_function(eight)
        def post(
            context: int, peer: int, stream: int, local: int, target: int, nbytes: int, imm: int, wr_id: int
        ) -> int:
            return _post(context, peer, stream, local, target, nbytes, imm, wr_id)

        @c_function("int64(int64)")
        def flush(context: int) -> int:
            return _flush(context)

        @c_function(three)
        def poll(context: int, events: int, limit: int) -> int:
            return _poll(context, events, limit)

        @c_function(three)
        def drop(context: int, peer: int, reason: int) -> int:
            return _drop(context, peer, reason)

    # Kept for ever: their machine code must not be unloaded while a loop may call it.
    _KEEP.extend((post, flush, poll, drop))
    return post.address, flush.address, poll.address, drop.address


_KEEP: list[object] = []


class FakeFabric:
    """The network: windows, endpoints and the adversary of one group of ranks in this process.

    Args:
        ranks: EP ranks.
        window_bytes: length of every window.
        seed: of everything random.
        adversary: what goes wrong; nothing by default.
        proxies: endpoints per rank.
        depth: writes from one endpoint to one other under way, beyond which it is BUSY.
        proves_source: whether ARRIVED names the source rank (RC, TCP) or the immediate must be believed (SRD).
        max_write: longest single write, bytes.
    """

    def __init__(
        self,
        ranks: int,
        window_bytes: int,
        seed: int = 0,
        adversary: Adversary | None = None,
        *,
        proxies: int = 16,
        depth: int = 256,
        proves_source: bool = True,
        max_write: int = 256 << 20,
    ) -> None:
        self.ranks, self.window_bytes, self.proxies, self.depth = ranks, window_bytes, proxies, depth
        self.adversary = adversary = Adversary() if adversary is None else adversary
        self.capabilities = Capabilities(
            name="fake",
            ordered=adversary.reorder == 0,
            proves_source=proves_source,
            memory_kinds=("shared",),
            immediate_bits=32,
            max_write=max_write,
        )
        self._memory = aligned_zeros(_FABRIC_BYTES + ranks * 8)
        self._windows = np.zeros(ranks, np.int64)
        self._alive = np.ones(ranks, np.int64)
        self._table = np.zeros(ranks * proxies, np.int64)
        self._flights = aligned_zeros(ranks * ranks * proxies * depth * _FLIGHT_BYTES)
        self._endpoints: dict[tuple[int, int], FakeEndpoint] = {}
        words = self._memory.view(np.int64)
        self.address = int(self._memory.ctypes.data)
        mixed = (seed * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) % (1 << 63)
        for offset, value in {
            _RANKS: ranks,
            _PROXIES: proxies,
            _RANDOM: mixed or 1,
            _KILL: adversary.kill,
            _KILL_AFTER: adversary.kill_after,
            _PROVES: int(proves_source),
            _DEPTH: depth,
            _WINDOWS: self._windows.ctypes.data,
            _ALIVE: self._alive.ctypes.data,
            _POSTED: _FABRIC_BYTES,
            _TABLE: self._table.ctypes.data,
            _FLIGHTS: self._flights.ctypes.data,
            **{
                offset: round(probability * (1 << 32))
                for offset, probability in (
                    (_REORDER, adversary.reorder),
                    (_DELAY, adversary.delay),
                    (_DUPLICATE, adversary.duplicate),
                    (_LINGER, adversary.linger),
                    (_BUSY, adversary.busy),
                    (_DROP, adversary.drop),
                    (_LOSE, adversary.lose),
                )
            },
        }.items():
            words[offset // 8] = value
        words[_POSTED // 8] = self.address + _FABRIC_BYTES

    def register_window(self, rank: int, address: int) -> None:
        """Tell where the window of ``rank`` lies in this process."""
        self._windows[rank] = address

    def endpoint(self, rank: int, proxy: int = 0) -> FakeEndpoint:
        """The endpoint of (rank, proxy); the same object every time."""
        if not (0 <= rank < self.ranks and 0 <= proxy < self.proxies):
            raise ConfigError(f"no endpoint ({rank}, {proxy}) among {self.ranks} ranks x {self.proxies} proxies")
        if (rank, proxy) not in self._endpoints:
            self._endpoints[rank, proxy] = FakeEndpoint(self, rank, proxy)
        return self._endpoints[rank, proxy]

    def attach(self, rank: int, proxy: int, context: int) -> None:
        """Called by :meth:`FakeEndpoint.connect`: peers can reach (rank, proxy) from now on."""
        self._table[rank * self.proxies + proxy] = context

    def kill(self, rank: int) -> None:
        """``rank`` vanishes as by SIGKILL: it does nothing any more, and its peers see DOWN."""
        self._alive[rank] = 0

    def alive(self, rank: int) -> bool:
        """False once ``rank`` was killed."""
        return bool(self._alive[rank])


class FakeEndpoint:
    """One (rank, proxy) on a :class:`FakeFabric`; see :class:`.base.Endpoint`."""

    def __init__(self, fabric: FakeFabric, rank: int, proxy: int) -> None:
        self._fabric, self._rank, self._proxy = fabric, rank, proxy
        ranks, depth = fabric.ranks, fabric.depth
        self._inbox = np.zeros(depth * ranks, np.int64)
        self._outbox = np.zeros(depth * ranks, np.int64)
        self._per_peer = np.zeros((4, ranks), np.int64)
        self._injected = np.zeros((_INJECTED_LIMIT, EVENT_BYTES // 8), np.int64)
        self._memory = aligned_zeros(_ENDPOINT_BYTES)
        self._words = self._memory.view(np.int64)
        for offset, value in {
            _E_FABRIC: fabric.address,
            _E_RANK: rank,
            _E_PROXY: proxy,
            _E_INBOX: self._inbox.ctypes.data,
            _E_OUTBOX: self._outbox.ctypes.data,
            _E_BLOCKED: self._per_peer[0].ctypes.data,
            _E_DROPPED: self._per_peer[1].ctypes.data,
            _E_TOLD: self._per_peer[2].ctypes.data,
            _E_UNDER_WAY: self._per_peer[3].ctypes.data,
            _E_INJECTED: self._injected.ctypes.data,
        }.items():
            self._words[offset // 8] = value

    @property
    def capabilities(self) -> Capabilities:
        """What the fabric was made to offer."""
        return self._fabric.capabilities

    def address(self) -> bytes:
        """``b"fake:<rank>.<proxy>"``."""
        return f"fake:{self._rank}.{self._proxy}".encode()

    def connect(self, addresses: Sequence[bytes | None], deadline: float) -> None:
        """Become reachable. Raises BootstrapError when an address is not of this fabric's kind."""
        for peer, address in enumerate(addresses):
            if address is not None and address != f"fake:{peer}.{self._proxy}".encode():
                raise BootstrapError(f"rank {self._rank}: {address!r} is no fake address of rank {peer}")
        self._fabric.attach(self._rank, self._proxy, int(self._memory.ctypes.data))

    def data_path(self) -> DataPath:
        """Addresses for the proxy loop."""
        post, flush, poll, drop = _functions()
        return DataPath(int(self._memory.ctypes.data), post=post, flush=flush, poll=poll, drop=drop)

    def inject(self, kind: int, value: int, peer: int, status: int = 0) -> None:
        """Let the next poll return this event too: what a forging peer or a broken device would cause.

        Not synchronised: call it while the endpoint is not being polled by another thread.
        """
        count = int(self._words[_E_INJECTED_COUNT // 8])
        if count == _INJECTED_LIMIT:
            raise ConfigError(f"more than {_INJECTED_LIMIT} injected events are waiting")
        self._injected[count] = kind, value, peer, status
        self._words[_E_INJECTED_COUNT // 8] = count + 1

    def describe(self, peer: int) -> str:
        """``"fake (in process)"``."""
        return "fake (in process)"

    def close(self) -> None:
        """Unreachable from now on."""
        self._fabric.attach(self._rank, self._proxy, 0)
