"""Every failure has a name, and its message says what to do next.

Exception
└── UcclEpError                anything this package raises on purpose
    ├── ConfigError            a setting, a shape, a dtype or an id is wrong; nothing has moved, the group stays usable
    ├── BootstrapError         ranks could not find, trust or agree with each other
    ├── ProtocolError          a peer (or a corrupted wire) claimed something that the formats forbid
    ├── TransportError         a NIC, a socket or a shared segment failed (device, errno, completion status)
    ├── ProxyDied              a proxy thread of this rank ended before it was told to
    ├── Evicted                the other ranks have gone on without this one, or none can be sure of the others
    └── PeerError              peers are to blame, the same ones on every rank that goes on
        ├── PeerTimeout        the peer is silent: the deadline passed (phase, what arrived, what was expected)
        └── PeerLost           the peer is gone: its process died or its connection closed
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "AFTER_INTERRUPTION",
    "REBUILD_GROUP",
    "BootstrapError",
    "ConfigError",
    "Evicted",
    "PeerError",
    "PeerLost",
    "PeerTimeout",
    "ProtocolError",
    "ProxyDied",
    "TransportError",
    "UcclEpError",
    "after_eviction",
    "after_loss",
    "after_silence",
    "in_words",
]


class UcclEpError(Exception):
    """Root of the tree. Catch this to catch everything that the package raises on purpose."""


class ConfigError(UcclEpError, ValueError):
    """A setting, shape, dtype, id or token count was refused before anything moved.

    GPUs refuse no expert id: a wrong one counts as -1, and is told once the dispatch is under way.
    """


class BootstrapError(UcclEpError, RuntimeError):
    """Ranks could not reach, authenticate or agree with each other while a group was being built."""


class ProtocolError(UcclEpError, RuntimeError):
    """A header, immediate, frame, command or offset breaks the formats in ``uccl_ep_serving.protocol``.

    Attributes:
        peer: EP rank at the other end of it, -1 when it concerns no peer. A peer that broke the formats was dropped
            as if it were lost, and can be masked.
        peers: all ranks that are lost with it, ascending; the ranks that go on have agreed on them.
        channel: channel on which it was noticed, -1 when no single one.
        own: this rank itself broke them, in what it was about to send to the peer.
    """

    def __init__(self, message: str, *, peer: int = -1, channel: int = -1, own: bool = False) -> None:
        super().__init__(message)
        self.peer = peer
        self.peers: tuple[int, ...] = (peer,) if peer >= 0 else ()
        self.channel = channel
        self.own = own


class TransportError(UcclEpError, RuntimeError):
    """A transport operation failed.

    Attributes:
        device: NIC, interface or segment the operation ran on.
        errno: operating-system error number, 0 when there is none.
        status: completion status of the transport, 0 when there is none.
    """

    def __init__(self, message: str, *, device: str = "", errno: int = 0, status: int = 0) -> None:
        super().__init__(message)
        self.device = device
        self.errno = errno
        self.status = status


class ProxyDied(UcclEpError, RuntimeError):
    """A proxy thread of this rank ended without being asked to; the buffer must be closed."""


class Evicted(UcclEpError, RuntimeError):
    """This rank takes part no more: the others have gone on without it, or it cannot know that they have not.

    Attributes:
        by: EP rank that said so, -1 when this rank stopped by itself.
    """

    def __init__(self, message: str, *, by: int = -1) -> None:
        super().__init__(message)
        self.by = by


class PeerError(UcclEpError, RuntimeError):
    """Peers are to blame. Once an operation has failed, every rank that goes on names the same ones.

    Attributes:
        peer: EP rank of the peer at the root.
        peers: all lost ranks that this rank has not masked, ascending: what to mask to go on.
        phase: operation that noticed, for example ``"low-latency dispatch recv"``.
        channel: channel on which it was noticed, -1 when no single one.
    """

    def __init__(
        self, message: str, *, peer: int, peers: Iterable[int] = (), phase: str = "", channel: int = -1
    ) -> None:
        super().__init__(message)
        self.peer = peer
        self.peers = tuple(sorted(peers)) or (peer,)
        self.phase = phase
        self.channel = channel


class PeerTimeout(PeerError, TimeoutError):
    """The deadline passed while waiting for a peer that still seems to be alive.

    Attributes:
        arrived: messages of the stream, or in normal mode on a GPU rows, that had arrived without a gap.
        expected: messages or rows that the waiting operation needs.
    """

    def __init__(
        self,
        message: str,
        *,
        peer: int,
        peers: Iterable[int] = (),
        phase: str = "",
        channel: int = -1,
        arrived: int = -1,
        expected: int = -1,
    ) -> None:
        super().__init__(message, peer=peer, peers=peers, phase=phase, channel=channel)
        self.arrived = arrived
        self.expected = expected


class PeerLost(PeerError, ConnectionError):
    """A peer's process died, or its connection closed without a goodbye.

    Attributes:
        cause: what the transport to it said (NIC, completion status, usual cause), "" when it said nothing.
    """

    def __init__(
        self,
        message: str,
        *,
        peer: int,
        peers: Iterable[int] = (),
        phase: str = "",
        channel: int = -1,
        cause: str = "",
    ) -> None:
        super().__init__(message, peer=peer, peers=peers, phase=phase, channel=channel)
        self.cause = cause


#: What to do when the ranks cannot go on together, and masking none of them would mend that.
REBUILD_GROUP = "Next step: close this Buffer on all ranks and build the group again"

_WITHOUT_IT = "mask it on every rank that is left, or close this Buffer on all of them and build the group again"


#: What to do when an operation ended on a rank after part of it may have been sent.
AFTER_INTERRUPTION = f"Next step: find the rank that is lost or was interrupted; then {_WITHOUT_IT}"


def after_eviction() -> str:
    """What to do when a rank takes part no more."""
    return "Next step: read the other ranks' logs, close this Buffer on all ranks and build the group again"


def after_loss(peer: int) -> str:
    """What to do when rank ``peer`` is gone, in the same words wherever that is noticed."""
    return f"Next step: read rank {peer}'s log; then {_WITHOUT_IT}"


def after_silence(peer: int) -> str:
    """What to do when rank ``peer`` is silent, likewise."""
    return f"Next step: compare what rank {peer} called last with the other ranks' calls; then {_WITHOUT_IT}"


def in_words(error: BaseException) -> str:
    """``error`` for the other ranks: of one that is none of ours the type says the most, and its text may be empty."""
    return str(error) if isinstance(error, UcclEpError) else f"{type(error).__name__}: {error}".rstrip(": ")
