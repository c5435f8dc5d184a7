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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import BootstrapError, ConfigError
from ..state import aligned_zeros
from . import fake_data as data
from .base import EVENT_BYTES, Capabilities, DataPath
from .fake_data import FUNCTIONS


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
        in_sequence: declare that every stream keeps its order and repeats nothing (and let the proxies insist on it).
        reads_after_drop: declare that what was under way to a dropped peer may still be read.
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
        in_sequence: bool = False,
        reads_after_drop: bool = False,
    ) -> None:
        self.ranks, self.window_bytes, self.proxies, self.depth = ranks, window_bytes, proxies, depth
        self.adversary = adversary = Adversary() if adversary is None else adversary
        self.capabilities = Capabilities(
            name="fake",
            proves_source=proves_source,
            max_write=max_write,
            in_sequence=in_sequence,
            tells_drop=True,
            reads_after_drop=reads_after_drop,
        )
        self._memory = aligned_zeros(data.FABRIC_BYTES + ranks * 8)
        self._windows = np.zeros(ranks, np.int64)
        self._alive = np.ones(ranks, np.int64)
        self._table = np.zeros(ranks * proxies, np.int64)
        self._flights = aligned_zeros(ranks * ranks * proxies * depth * data.FLIGHT_BYTES)
        self._endpoints: dict[tuple[int, int], FakeEndpoint] = {}
        words = self._memory.view(np.int64)
        self.address = int(self._memory.ctypes.data)
        mixed = (seed * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) % (1 << 63)
        for offset, value in {
            data.FABRIC_RANKS: ranks,
            data.FABRIC_PROXIES: proxies,
            data.FABRIC_RANDOM: mixed or 1,
            data.FABRIC_KILL: adversary.kill,
            data.FABRIC_KILL_AFTER: adversary.kill_after,
            data.FABRIC_PROVES: int(proves_source),
            data.FABRIC_DEPTH: depth,
            data.FABRIC_WINDOWS: self._windows.ctypes.data,
            data.FABRIC_ALIVE: self._alive.ctypes.data,
            data.FABRIC_POSTED: data.FABRIC_BYTES,
            data.FABRIC_TABLE: self._table.ctypes.data,
            data.FABRIC_FLIGHTS: self._flights.ctypes.data,
            **{
                offset: round(probability * (1 << 32))
                for offset, probability in (
                    (data.FABRIC_REORDER, adversary.reorder),
                    (data.FABRIC_DELAY, adversary.delay),
                    (data.FABRIC_DUPLICATE, adversary.duplicate),
                    (data.FABRIC_LINGER, adversary.linger),
                    (data.FABRIC_BUSY, adversary.busy),
                    (data.FABRIC_DROP, adversary.drop),
                    (data.FABRIC_LOSE, adversary.lose),
                )
            },
        }.items():
            words[offset // 8] = value
        words[data.FABRIC_POSTED // 8] = self.address + data.FABRIC_BYTES

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

    def _flying(self) -> NDArray[np.int64]:
        """[writes, words] of all that were ever under way, those that are over included."""
        flights = self._flights.view(np.int64).reshape(-1, data.FLIGHT_BYTES // 8)
        return flights[: int(self._memory.view(np.int64)[data.FABRIC_TOP // 8])]

    def sources(self) -> set[tuple[int, int, int]]:
        """(number, address, bytes) of every write under way: until its sender sees SENT that memory may be read."""
        flights = self._flying()
        over = flights[:, data.FLIGHT_STAGE // 8] & (data.OVER | data.LOST) != 0
        numbers = np.flatnonzero((flights[:, data.FLIGHT_HOLDERS // 8] > 0) & ~over)
        return {
            (int(number), int(flights[number, data.FLIGHT_LOCAL // 8]), int(flights[number, data.FLIGHT_NBYTES // 8]))
            for number in numbers
        }

    def hold(self, wanted: Callable[[int], bool], back: bool) -> None:
        """Keep SENT ``back`` of writes that have arrived and whose bytes are ``wanted``, or let it come."""
        for flight in self._flying():
            stage = int(flight[data.FLIGHT_STAGE // 8])
            if stage & data.SEEN and not stage & data.OVER and wanted(int(flight[data.FLIGHT_NBYTES // 8])):
                flight[data.FLIGHT_STAGE // 8] = stage & ~data.LANDED if back else stage | data.LANDED

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
        self._per_peer = np.zeros((5, ranks), np.int64)
        self._injected = np.zeros((data.INJECTED_LIMIT, EVENT_BYTES // 8), np.int64)
        self._memory = aligned_zeros(data.ENDPOINT_BYTES)
        self._words = self._memory.view(np.int64)
        for offset, value in {
            data.ENDPOINT_FABRIC: fabric.address,
            data.ENDPOINT_RANK: rank,
            data.ENDPOINT_PROXY: proxy,
            data.ENDPOINT_INBOX: self._inbox.ctypes.data,
            data.ENDPOINT_OUTBOX: self._outbox.ctypes.data,
            data.ENDPOINT_BLOCKED: self._per_peer[0].ctypes.data,
            data.ENDPOINT_DROPPED: self._per_peer[1].ctypes.data,
            data.ENDPOINT_TOLD: self._per_peer[2].ctypes.data,
            data.ENDPOINT_UNDER_WAY: self._per_peer[3].ctypes.data,
            data.ENDPOINT_DROPPED_BY: self._per_peer[4].ctypes.data,
            data.ENDPOINT_INJECTED: self._injected.ctypes.data,
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
        post, flush, poll, drop = FUNCTIONS.addresses
        return DataPath(int(self._memory.ctypes.data), post=post, flush=flush, poll=poll, drop=drop)

    def inject(self, kind: int, value: int, peer: int, status: int = 0) -> None:
        """Let the next poll return this event too: what a forging peer or a broken device would cause.

        Not synchronised: call it while the endpoint is not being polled by another thread.
        """
        count = int(self._words[data.ENDPOINT_INJECTED_COUNT // 8])
        if count == data.INJECTED_LIMIT:
            raise ConfigError(f"more than {data.INJECTED_LIMIT} injected events are waiting")
        self._injected[count] = kind, value, peer, status
        self._words[data.ENDPOINT_INJECTED_COUNT // 8] = count + 1

    def describe(self, peer: int) -> str:
        """``"fake (in process)"``."""
        return "fake (in process)"

    def close(self) -> None:
        """Unreachable from now on."""
        self._fabric.attach(self._rank, self._proxy, 0)
