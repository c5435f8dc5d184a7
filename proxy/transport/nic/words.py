"""The memory that the compiled data paths of both NIC transports share, and the rule which rail a stream takes.

A *rail* is one NIC of an endpoint: rail i of one rank talks to rail i of another; each host has an order of its own
(see :mod:`uccl_ep_serving.data_plane.rails`). A *link* is what leads to one peer over one rail. There is one context
per endpoint and a record per rail, peer and link; words are indices into int64 arrays. :mod:`.efa_words` and
:mod:`.roce_words` add the words of one transport behind these.

All of it is private to the process: written by the endpoint before the proxy thread starts, then by that thread alone.
Only the words of a window in device memory come later, before the first command that names an offset in it is in a
ring.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ....native.atomics import peek
from ....native.jit import compiled, inlined
from ....protocol.streams import STREAMS, channel_of
from ..verbs.abi import WC
from ..verbs.codes import STATUS_ERRNO
from .window import KeyTable

# --- context ----------------------------------------------------------------------------------------------------------
WINDOW = 0  # address of this rank's window
DEVICE_WINDOW = 1  # the word behind WINDOW: address of the part of it that is device memory
WINDOW_BYTES = 2  # length of every window
SPLIT = 3  # offsets below it lie in device memory, at both ends; 0 = none does
RANK = 4
RANKS = 5
RAIL_COUNT = 6
RAILS = 7  # address of the rail records
PEERS = 8  # address of the peer records
LINKS = 9  # address of the link records
STRIPES = 10  # address of the stripe of each stream
CURSOR = 11  # rail whose completions the next poll takes first
COMPLETIONS = 12  # address of COMPLETION_BATCH ibv_wc
ERRNOS = 13  # address of the errno that a DOWN carries, by completion status
BROKEN_RAIL = 14  # 1 + the rail that is of no use any more, 0 = none. Loop stores, host reads later
BROKEN_STATUS = 15  # status of the work request that failed, or what a call returned (negative)
BROKEN_VENDOR = 16  # the NIC's own code of that work request
OWN_CONTEXT = 17  # here begin the words of one transport
CONTEXT_WORDS = 48

# --- a rail -----------------------------------------------------------------------------------------------------------
CQ = 0  # address of the ibv_cq, 0 = closed
POLL_CQ = 1  # addresses of the provider's functions
POST_RECV = 2
OWN_RAIL = 3
RAIL_WORDS = 24

# --- a peer -----------------------------------------------------------------------------------------------------------
STATE = 0
TARGET = 1  # address of its window in its process
DEVICE_TARGET = 2  # the word behind TARGET: address of the part of it that is device memory
COMMON_RAILS = 3  # rails that both ends have
LOST_STATUS = 4  # completion status that ended it, -errno for a call that did
LOST_VENDOR = 5  # the NIC's own code of that completion
OWN_PEER = 6
PEER_WORDS = 12

ABSENT, UP = 0, 1  # a transport adds states of its own

# --- a link: the keys of both windows in host memory, then those of their parts in device memory ----------------------
HOST_KEYS, DEVICE_KEYS = 0, 4
# of each: offset >> SHIFT is the chunk of the own window, as its NIC knows it; KEYS the address of int64[chunks], that
# NIC's keys; the same of the peer's window, as the NIC at the other end knows it
SHIFT, KEYS, TARGET_SHIFT, TARGET_KEYS = range(4)
OWN_LINK = 8

#: Completions taken from a rail at once.
COMPLETION_BATCH = 64
#: Completion statuses told apart; higher ones count as the last.
STATUSES = 32

Words = npt.NDArray[np.int64]


def stripe_table(proxies: int) -> Words:
    """int64[256]: by stream id, the number of its channel among those of the same proxy."""
    return np.array([channel_of(stream) // proxies for stream in range(STREAMS)], np.int64)


@inlined
def rail_of(stripe: int, one: int, other: int, rails: int) -> int:
    """The rail of a stream between ranks ``one`` and ``other``, in whichever direction: both ends follow this rule
    without talking.

    Channels of a peer are spread over the rails, and so are peers: with one channel, a rank that writes to many peers
    still keeps all its NICs busy. Credits take the rail of the stream they credit.

    Args:
        stripe: of the stream, from :func:`stripe_table`.
        one, other: EP ranks of the two ends.
        rails: that both ranks have, the smaller number of the two.
    """
    return (stripe + one + other) % rails


@inlined
def rail_of_stream(context: int, peer: int, stream: int, rails: int) -> int:
    """The rail of ``stream`` to or from ``peer``, of ``rails`` that both ends have."""
    return rail_of(peek(peek(context + 8 * STRIPES) + 8 * stream), peek(context + 8 * RANK), peer, rails)


@inlined
def rail_record(context: int, index: int) -> int:
    """Address of rail ``index``."""
    return peek(context + 8 * RAILS) + index * (8 * RAIL_WORDS)


@inlined
def peer_record(context: int, rank: int) -> int:
    """Address of the record of peer ``rank``."""
    return peek(context + 8 * PEERS) + rank * (8 * PEER_WORDS)


@inlined
def own_key(link: int, kind: int, offset: int) -> int:
    """The NIC's key of the chunk of the own window in which ``offset`` lies; ``kind``: 0 = host memory, 1 = device.

    A write lies whole in the chunk in which it starts, at either end: chunks overlap (:mod:`.window`).
    """
    place = link + 8 * DEVICE_KEYS * kind
    return peek(peek(place + 8 * KEYS) + 8 * (offset >> peek(place + 8 * SHIFT)))


@inlined
def target_key(link: int, kind: int, offset: int) -> int:
    """The same of the peer's window, for the NIC at the other end."""
    place = link + 8 * DEVICE_KEYS * kind
    return peek(peek(place + 8 * TARGET_KEYS) + 8 * (offset >> peek(place + 8 * TARGET_SHIFT)))


@inlined
def swapped(word: int) -> int:
    """The 32 bits in the other byte order: immediates are big-endian to the verbs interface."""
    return ((word & 0xFF) << 24) | ((word & 0xFF00) << 8) | ((word >> 8) & 0xFF00) | ((word >> 24) & 0xFF)


@compiled
def errno_of(context: int, status: int) -> int:
    """The errno that a DOWN carries for a completion status."""
    return peek(peek(context + 8 * ERRNOS) + 8 * min(status, STATUSES - 1))


class Memory:
    """Allocates and holds all of it for one endpoint; freed with the object.

    Args:
        rank, ranks, proxies: of the group.
        rails: NICs of the endpoint.
        links: link records, of ``link_words`` words each.
        window, window_bytes: this rank's window.
    """

    def __init__(
        self,
        *,
        rank: int,
        ranks: int,
        proxies: int,
        rails: int,
        links: int,
        link_words: int,
        window: int,
        window_bytes: int,
    ) -> None:
        self.context: Words = np.zeros(CONTEXT_WORDS, np.int64)
        self.rails: Words = np.zeros((rails, RAIL_WORDS), np.int64)
        self.peers: Words = np.zeros((ranks, PEER_WORDS), np.int64)
        self.links: Words = np.zeros((links, link_words), np.int64)
        self._stripes = stripe_table(proxies)
        self._completions = np.zeros(COMPLETION_BATCH * WC.nbytes // 8, np.int64)
        self._errnos = np.array([STATUS_ERRNO.get(status, errno.ECONNRESET) for status in range(STATUSES)], np.int64)
        self._key_tables: dict[tuple[int, ...], Words] = {}
        self.fill(
            self.context,
            {
                WINDOW: window,
                WINDOW_BYTES: window_bytes,
                RANK: rank,
                RANKS: ranks,
                RAIL_COUNT: rails,
                RAILS: self.rails.ctypes.data,
                PEERS: self.peers.ctypes.data,
                LINKS: self.links.ctypes.data,
                STRIPES: self._stripes.ctypes.data,
                COMPLETIONS: self._completions.ctypes.data,
                ERRNOS: self._errnos.ctypes.data,
            },
        )

    @staticmethod
    def fill(record: Words, values: Mapping[int, int]) -> None:
        """Store ``values`` by word."""
        for word, value in values.items():
            record[word] = value

    @property
    def address(self) -> int:
        """Address of the context."""
        return int(self.context.ctypes.data)

    def use_keys(self, links: Sequence[int], first: int, own: KeyTable, there: KeyTable) -> None:
        """Tell ``links`` the keys of the memory at both ends; ``first`` is HOST_KEYS or DEVICE_KEYS."""
        place = (own.shift, self._table(own), there.shift, self._table(there))
        for link in links:
            self.links[link, first : first + len(place)] = place

    def _table(self, keys: KeyTable) -> int:
        """Address of the keys, which live as long as this object."""
        # an empty write may stand at the very end of the window, where a chunk more would begin
        kept = self._key_tables.setdefault(keys.keys, np.array([*keys.keys, keys.keys[-1]], np.int64))
        return int(kept.ctypes.data)
