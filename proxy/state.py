"""The memory of one proxy (:mod:`.words` says what is in it), and the host's access to its control words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..config import Settings
from ..errors import ConfigError
from ..native.atomics import fetch_add, load64, store64
from ..native.jit import compiled
from ..native.pages import own_pages
from ..protocol.command import COMMAND_BYTES, MAX_RANKS, MAX_WINDOW_BYTES, UNIT
from ..protocol.ring import CAPACITY, SLOTS, ring_bytes
from ..protocol.streams import STREAMS, exists, proxy_of
from . import words
from .transport.base import EVENT_BYTES, Capabilities, Endpoint

Words = NDArray[np.int64]


def aligned_zeros(nbytes: int, alignment: int = 64) -> NDArray[np.uint8]:
    """Zeroed bytes at an aligned address; pages are committed when they are first touched."""
    raw = np.zeros(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]


def _check_capacity(rank: int, ranks: int, route: Sequence[int], endpoints: int, window_bytes: int) -> None:
    """Raise ConfigError when the formats cannot hold the group or its window."""
    if not 1 <= ranks <= MAX_RANKS or not 0 <= rank < ranks:
        raise ConfigError(f"rank {rank} of {ranks}: up to {MAX_RANKS} ranks are possible")
    if len(route) != ranks or any(not -1 <= k < endpoints for k in route) or route[rank] != -1:
        raise ConfigError(f"route {list(route)} must name one of {endpoints} endpoints, or -1, per rank")
    if not 0 < window_bytes <= MAX_WINDOW_BYTES:
        raise ConfigError(f"a window of {window_bytes} bytes: 1..{MAX_WINDOW_BYTES} are possible")


def _caps(capabilities: Sequence[Capabilities], settings: Settings) -> dict[int, int]:
    """Header words QUANTUM, BYTE_CAP and PEER_BYTE_CAP: what is asked for, as far as the transports can.

    A NIC's own limit leaves room for four of the longest writes, so that small ones pass between them.

    Raises:
        ConfigError: a transport writes less than a unit at once.
    """
    limits = [c.bytes_in_flight for c in capabilities if c.bytes_in_flight]
    quantum = min([settings.quantum, *(c.max_write for c in capabilities), *(n // 4 for n in limits)]) // UNIT * UNIT
    if quantum <= 0:
        raise ConfigError(f"a transport that writes fewer than {UNIT} bytes at once cannot be used")
    return {
        words.QUANTUM: quantum,
        words.BYTE_CAP: min([settings.bytes_in_flight, *limits]),
        words.PEER_BYTE_CAP: min([settings.peer_bytes_in_flight, *(n // 2 for n in limits)]),
    }


class ProxyState:
    """Memory of one proxy, filled in and ready for the loop.

    Args:
        settings: sizes and caps, and which streams a proxy owns.
        rank, ranks: EP rank of this process and number of EP ranks.
        proxy: index of this proxy.
        window, window_bytes: this rank's window.
        error: address of the sticky error.
        endpoints: connected.
        route: per peer, index into ``endpoints``, or -1 when the peer is not reached through a proxy.
        spin: nanoseconds that an idle loop keeps its core.

    Raises:
        ConfigError: a value is outside the capacity of the formats.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        rank: int,
        ranks: int,
        proxy: int,
        window: int,
        window_bytes: int,
        error: int,
        endpoints: Sequence[Endpoint],
        route: Sequence[int],
        spin: int = 0,
    ) -> None:
        _check_capacity(rank, ranks, route, len(endpoints), window_bytes)
        caps = _caps([endpoint.capabilities for endpoint in endpoints], settings)
        ring_slots = settings.ring_slots
        self.rank, self.ranks, self.proxy = rank, ranks, proxy
        streams = ranks * STREAMS
        # what kernels of a device reach
        self._ring = own_pages(ring_bytes(ring_slots))
        self._header = aligned_zeros(words.HEADER_BYTES)
        self._send = aligned_zeros(streams * words.SEND_ENTRY)
        self._receive = aligned_zeros(streams * words.RECEIVE_ENTRY)
        self._peers = aligned_zeros(ranks * words.PEER_ENTRY)
        self._endpoints = aligned_zeros(max(1, len(endpoints)) * words.ENDPOINT_ENTRY)
        self._owned = aligned_zeros(STREAMS * 8)
        self._arrived = own_pages(streams * 8)
        self._completed = own_pages(streams * 8)
        self._pool = aligned_zeros(ranks * words.DESTINATION_QUOTA * words.NODE_BYTES)
        self._events = aligned_zeros(words.EVENT_LIMIT * EVENT_BYTES)
        self._counters = aligned_zeros(len(words.COUNTER_NAMES) * 8)
        self._latency = aligned_zeros(STREAMS * words.LATENCY_BUCKETS * 8)
        self._family: Words | None = None

        #: Address that the compiled loop takes.
        self.address = int(self._header.ctypes.data)
        #: Address of the command ring.
        self.ring = int(self._ring.ctypes.data)
        #: Views for Python: header words; [peer, word]; [peer, stream, word]; counts as the kernels see them.
        self.header: Words = self._header.view(np.int64)
        #: The header again, for what the host reads before every operation: a word takes it a third of the time here.
        self.glance = self._header.data.cast("q")
        self.peers: Words = self._peers.view(np.int64).reshape(ranks, -1)
        self.send: Words = self._send.view(np.int64).reshape(ranks, STREAMS, -1)
        self.receive: Words = self._receive.view(np.int64).reshape(ranks, STREAMS, -1)
        self.arrived: Words = self._arrived.view(np.int64).reshape(ranks, STREAMS)
        self.completed: Words = self._completed.view(np.int64).reshape(ranks, STREAMS)
        self.counters: Words = self._counters.view(np.int64)
        self.latency: Words = self._latency.view(np.int64).reshape(STREAMS, -1)

        self._ring.view(np.int64)[CAPACITY // 8] = ring_slots
        self._owned.view(np.int64)[:] = [
            exists(stream) and proxy_of(stream, settings.proxies) == proxy for stream in range(STREAMS)
        ]
        self._connect(endpoints, route)
        self._fill_header(
            {
                words.RANK: rank,
                words.RANKS: ranks,
                words.WINDOW: window,
                words.WINDOW_BYTES: window_bytes,
                words.ERROR: error,
                words.RING_MASK: ring_slots - 1,
                words.RING_SHIFT: ring_slots.bit_length() - 1,
                words.ENDPOINT_COUNT: len(endpoints),
                words.WRITE_CAP: settings.writes_in_flight,
                words.QUOTA: words.DESTINATION_QUOTA,
                words.DIE_AFTER: settings.fault_proxy_after if proxy == 0 else 0,
                words.SPIN: spin,
                words.PROXY: proxy,
                words.PROXIES: 1,
                **caps,
            }
        )
        assert SLOTS + ring_slots * COMMAND_BYTES == self._ring.nbytes

    def _connect(self, endpoints: Sequence[Endpoint], route: Sequence[int]) -> None:
        """Enter the endpoints, and which of them reaches each peer."""
        endpoint_words = self._endpoints.view(np.int64).reshape(-1, words.ENDPOINT_ENTRY // 8)
        for entry, endpoint in zip(endpoint_words, endpoints, strict=False):
            path = endpoint.data_path()
            entry[:5] = path.context, path.post, path.flush, path.poll, path.drop
        for peer, k in enumerate(route):
            if k >= 0:
                self.peers[peer, words.PEER_STATE // 8] = words.UP
                self.peers[peer, words.PEER_ENDPOINT // 8] = self._endpoints.ctypes.data + k * words.ENDPOINT_ENTRY
                offered = endpoints[k].capabilities
                self.peers[peer, words.PEER_EXACT // 8] = int(offered.in_sequence)
                self.peers[peer, words.PEER_READS // 8] = int(offered.reads_after_drop)

    def _fill_header(self, configuration: Mapping[int, int]) -> None:
        """Enter ``configuration``, by byte offset, and where the tables are."""
        tables = {
            words.RING: self.ring,
            words.SEND: self._send.ctypes.data,
            words.RECEIVE: self._receive.ctypes.data,
            words.PEERS: self._peers.ctypes.data,
            words.ENDPOINTS: self._endpoints.ctypes.data,
            words.OWNED: self._owned.ctypes.data,
            words.ARRIVED: self._arrived.ctypes.data,
            words.COMPLETED: self._completed.ctypes.data,
            words.POOL: self._pool.ctypes.data,
            words.EVENTS: self._events.ctypes.data,
            words.COUNTERS: self._counters.ctypes.data,
            words.LATENCY: self._latency.ctypes.data,
        }
        for offset, value in {**tables, **configuration}.items():
            self.header[offset // 8] = value

    @staticmethod
    def join(states: Sequence[ProxyState]) -> None:
        """Make the proxies of a rank known to each other, so that they watch and wake one another while idle.

        Call before any of them runs.
        """
        # the wakeup word on a line of its own, then the rings
        family = aligned_zeros(64 + 8 * len(states)).view(np.int64)
        for state in states:
            family[8 + state.proxy] = state.ring
            state.header[words.PROXIES // 8] = len(states)
            state.header[words.WAKEUP // 8] = family.ctypes.data
            state.header[words.RINGS // 8] = family.ctypes.data + 64
            state._family = family

    def use_fence(self, index: int, fence: int) -> None:
        """Have arrivals over endpoint ``index`` wait for the fence at this address."""
        self._endpoints.view(np.int64)[(index * words.ENDPOINT_ENTRY + words.EP_FENCE) // 8] = fence

    def word(self, offset: int) -> int:
        """Header word at byte ``offset``."""
        return int(self.header[offset // 8])

    def arrived_address(self, peer: int, stream: int) -> int:
        """Address of the int64 count of messages of (peer, stream) that have arrived without a gap."""
        return int(self._arrived.ctypes.data) + (peer * STREAMS + stream) * 8

    def completed_address(self, peer: int, stream: int) -> int:
        """Address of the int64 count of own messages to (peer, stream) that have completed locally without a gap."""
        return int(self._completed.ctypes.data) + (peer * STREAMS + stream) * 8


# Compiled, because Python's own stores promise no memory order.


@compiled
def acknowledge(state: int, refused: int) -> None:
    """The first ``refused`` refused commands have been named."""
    store64(state + words.NAMED, refused)


@compiled
def request_stop(state: int) -> None:
    """Ask the loop to return. It does so at its next iteration."""
    store64(state + words.STOP, 1)


@compiled
def request_forget(state: int, peer: int) -> None:
    """Ask the loop to drop ``peer``; from now on nothing that happens to this peer is an error."""
    store64(load64(state + words.PEERS) + peer * words.PEER_ENTRY + words.PEER_REQUEST, 1)
    fetch_add(state + words.REQUESTS, 1)
