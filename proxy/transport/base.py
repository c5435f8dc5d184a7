"""The seam between a proxy and a transport.

Control path: an :class:`Endpoint` object in Python, one per proxy thread and transport, connected to all the peers it
serves. Data path: four C functions, called from the compiled proxy loop with the endpoint's context address; they never
block, never raise and never touch Python.

    post(context, peer, stream, local, target, nbytes, imm, wr_id) -> ACCEPTED | BUSY | negative status
        Start one one-sided write of ``nbytes`` bytes (0 allowed) from address ``local`` of this process to byte offset
        ``target`` of the peer's window, followed by the 32-bit immediate ``imm``. BUSY: no room now, nothing happened,
        ask again later. The source bytes stay untouched until the SENT event of ``wr_id``. The caller has checked that
        [local, local + nbytes) lies in its own window and that target + nbytes is within the window's length.
    flush(context) -> 0 | negative status
        Ring the doorbell: everything accepted is under way. Called once after each batch of posts.
    poll(context, events, limit) -> number of events | negative status
        Drive progress and store up to ``limit`` events of EVENT_BYTES bytes at address ``events``.
    drop(context, peer) -> 0
        The peer is lost or said goodbye: discard what is queued for it, complete nothing of it any more, ignore what
        still comes from it. A peer that still lives learns it by DOWN where ``tells_drop`` is declared.

An event is four int64: kind, value, peer, status.

    SENT      value = wr_id. Local completion: the source bytes may be reused, nothing of the write is repeated.
    ARRIVED   value = immediate. The payload of *this* write is visible. peer = the source rank that the connection
              proves, or -1 where the transport cannot prove it (the immediate's source is then used). status = bytes
              of the payload.
    DOWN      peer's connection closed or failed; value = bytes at least that are missing of a write that was cut off,
              0 = none is known; status = errno.
    FAULT     peer sent what the format forbids (a frame too long, an offset outside the window); value = what arrived,
              status = a FAULT_* | what was expected << FAULT_BITS. Nothing else of the peer follows.

A transport may deliver the writes of a peer in any order and may repeat an ARRIVED or a payload until its SENT; it must
not lose one without a DOWN or a negative status.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ...errors import BootstrapError, TransportError
from ...native.atomics import poke
from ...native.groups import Group, load
from ...native.jit import Compiled, compiled
from ...protocol.talks import NO_DESCRIPTORS

ACCEPTED = 0
BUSY = 1

#: While connections are made, lost peers are looked for this often.
LOOK_SECONDS = 0.05

SENT, ARRIVED, DOWN, FAULT = 1, 2, 3, 4
EVENT_BYTES = 32

FAULT_BAD_FRAME = 1
FAULT_OUTSIDE_WINDOW = 2
FAULT_WRONG_SOURCE = 3
FAULT_TOO_LONG = 4
FAULT_NUMBER = 5
FAULT_COUNT = 6
#: A FAULT_* fills the low bits of the status of a FAULT event.
FAULT_BITS = 4


@compiled
def put_event(events: int, index: int, kind: int, value: int, peer: int, status: int) -> None:
    """Store event ``index`` of the array at address ``events``: the one place that knows what an event looks like."""
    address = events + index * EVENT_BYTES
    poke(address, kind)
    poke(address + 8, value)
    poke(address + 16, peer)
    poke(address + 24, status)


class DataFunctions(Group):
    """The compiled data path of one transport.

    Args:
        transport: its name.
        post, flush, poll, drop: as the text above says.
        others: what is compiled with them.
    """

    def __init__(
        self,
        transport: str,
        post: Callable[[int, int, int, int, int, int, int, int], int],
        flush: Callable[[int], int],
        poll: Callable[[int, int, int], int],
        drop: Callable[[int, int], int],
        *others: Compiled[..., int],
    ) -> None:
        self._functions = compiled(post), compiled(flush), compiled(poll), compiled(drop)
        super().__init__(f"transport {transport}", *self._functions, *others)

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """Addresses of post, flush, poll and drop; compiles or loads them where nobody has."""
        load(self)
        post, flush, poll, drop = (function.address for function in self._functions)
        return post, flush, poll, drop


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport offers; layers above branch on these, never on its name.

    Attributes:
        name: "shm", "tcp", "fake", "roce", "efa".
        proves_source: ARRIVED names the source rank by the connection itself.
        max_write: most bytes of one write.
        bytes_in_flight: most bytes that one endpoint should have posted and not completed, so that its NIC and the
            network hold; 0 = as many as the settings allow.
        notices_silent_death: DOWN is reported for a peer that vanished while nothing was under way to it. Where not,
            the next write to it fails with DOWN; until then the control connections notice.
        in_sequence: each stream's writes arrive in order and once (one connection carries it): anything else is a
            fault of the peer. Transports that reorder or repeat say False.
        tells_drop: a peer that was dropped and lives sees DOWN, so that it ends by name and not at its deadline.
        reads_after_drop: what was under way to a peer that was dropped may be read from this window, and sent, all the
            same (one queue pair serves all peers). Where not, those bytes may be written as soon as drop() returns.
    """

    name: str
    proves_source: bool
    max_write: int
    bytes_in_flight: int = 0
    notices_silent_death: bool = True
    in_sequence: bool = False
    tells_drop: bool = False
    reads_after_drop: bool = False


@dataclass(frozen=True, slots=True)
class DataPath:
    """Addresses of an endpoint's context and of its four C functions."""

    context: int
    post: int
    flush: int
    poll: int
    drop: int


class ConnectMonitor:
    """Looks after the peers while an endpoint that waits for none of them makes its connections.

    Each connection is a call into the kernel, which may take a second where a route is missing: with many peers that
    adds up, and one of them may die meanwhile.

    Args:
        watch: raises when a peer will never come; called :data:`LOOK_SECONDS` apart at most.
    """

    def __init__(self, watch: Callable[[], None] = lambda: None) -> None:
        self._watch = watch
        self._next = 0.0

    def look(self) -> None:
        """Between two connections. Raises whatever ``watch`` raises."""
        now = time.monotonic()
        if now >= self._next:
            self._watch()
            self._next = now + LOOK_SECONDS

    def before(self, deadline: float, doing: str) -> None:
        """The same, and BootstrapError when ``deadline``, a ``time.monotonic()`` instant, is over."""
        self.look()
        if time.monotonic() >= deadline:
            raise BootstrapError(
                f"{doing}: the time for connecting is over. Likely cause: the NIC finds no route to its peers, each "
                "attempt takes a second; check the routes and GIDs (uccl-ep doctor), or raise UCCL_EP_CONNECT_TIMEOUT"
            )


@runtime_checkable
class DeviceReach(Protocol):
    """An endpoint whose NIC can also reach a window in device memory.

    The first bytes of the windows of all ranks then lie there instead of at their offsets in host memory.
    """

    def offer_device(self, start: int, nbytes: int, export: Callable[[int, int], tuple[int, int]]) -> bytes:
        """Register this rank's device memory [start, start + nbytes): what peers need to write it.

        ``export`` makes a dma-buf of a range (address, bytes): a descriptor, which is taken over, and the offset at
        which the range starts in it. Raises TransportError when the NIC takes the memory in no way.
        """

    def accept_device(self, offers: Sequence[bytes | None]) -> None:
        """Use device memory for the first bytes of all windows from now on; called while nothing is under way.

        ``offers``: of the peers, by rank. Raises BootstrapError naming a peer whose offer does not fit.
        """

    @property
    def fence(self) -> int:
        """Address of a fence (``proxy.fence``) of its own that arrivals in device memory wait for, 0 = none; valid from
        ``offer_device`` to ``release_device``."""

    def device_way(self) -> str:
        """How the NICs reach this rank's device memory, in words, once it is offered."""

    def release_host(self) -> None:
        """Let go of this rank's window in host memory: every write of this epoch lies in device memory, at both ends.
        Never raises."""

    def release_device(self) -> None:
        """Let go of the device memory, which is about to be freed. The proxy thread has stopped. Never raises."""


@runtime_checkable
class Watchful(Protocol):
    """An endpoint that must know when all of its peers are connected."""

    def established(self) -> None:
        """Every peer has returned from ``connect``: from now on a peer that does not answer is lost."""


@runtime_checkable
class Reconnecting(Protocol):
    """An endpoint whose connections are made again when they break."""

    @property
    def reconnections(self) -> int:
        """How many were, while it was open; for any thread."""


@runtime_checkable
class Diagnosed(Protocol):
    """An endpoint that can tell which of its devices failed, once a function of its data path has."""

    def look(self) -> None:
        """Make the data path fail where a device has reported that it does nothing more: its completion queue may just
        stay empty. Asks the devices; waits for nothing. For any thread, while the endpoint is open."""

    def diagnosis(self) -> str:
        """The device that failed and what it said, in words; "" while none has."""


class Endpoint(Protocol):
    """Control path of one transport for one proxy thread."""

    @property
    def capabilities(self) -> Capabilities:
        """What this transport offers."""

    def address(self) -> bytes:
        """What peers need to connect to this endpoint; opaque, exchanged by the bootstrap."""

    def connect(self, addresses: Sequence[bytes | None], deadline: float) -> None:
        """Connect to every peer whose entry is not None (``addresses`` is indexed by rank, own entry None).

        ``deadline`` is a ``time.monotonic()`` instant. Raises BootstrapError or TransportError naming the peer.
        """

    def data_path(self) -> DataPath:
        """Addresses for the proxy loop; valid from ``connect`` to ``close``."""

    def describe(self, peer: int) -> str:
        """Words for the log: how ``peer`` is reached."""

    def close(self) -> None:
        """Release everything. Call only after the proxy thread has stopped. Never raises, may be called twice."""


def refused(what: str, error: OSError, device: str, less: str = "") -> TransportError:
    """The error to raise when the operating system refuses a transport with ``error``: what to do about it.

    Args:
        what: who wanted what.
        device: the interface or kind of transport it was for.
        less: how to need fewer descriptors, for the case that none is left.
    """
    hint = ""
    if error.errno in NO_DESCRIPTORS:
        hint = f". Next step: raise the limit on open files (ulimit -n){less}"
    elif error.errno == errno.ENOSPC:  # of epoll_ctl: see epoll(7)
        hint = ". Next step: raise fs.epoll.max_user_watches"
    return TransportError(f"{what}: {error.strerror or error}{hint}", device=device, errno=error.errno or 0)
