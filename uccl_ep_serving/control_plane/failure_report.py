"""What ranks tell each other of a failure: for whom an operation waits, or because of whom it has failed."""

from __future__ import annotations

import struct
import time
from typing import NamedTuple

from ..errors import PeerError, PeerLost, PeerTimeout, after_loss, after_silence

__all__ = ["FailureReport"]

#: peer, silent, channel, arrived, expected, bytes of the phase, which follows; the cause is the rest
_REPORT = struct.Struct("<i?iqqH")
_MOST_PHASE, _MOST_CAUSE = 256, 2048


class FailureReport(NamedTuple):
    """For which peer an operation of a rank waits, or because of which one it has failed.

    Attributes:
        by: the rank whose operation it is.
        peer: the other one; ``by`` itself when something of its own failed, a NIC or a proxy thread.
        silent: nothing came of ``peer`` (PeerTimeout), rather than that it is gone (PeerLost).
        channel, arrived, expected: as in PeerTimeout.
        phase: the operation, in words.
        cause: what a transport said, in words; "" when it said nothing.
        heard: ``time.monotonic()`` instant at which this rank learned of it.
    """

    by: int
    peer: int
    silent: bool
    channel: int = -1
    arrived: int = -1
    expected: int = -1
    phase: str = ""
    cause: str = ""
    heard: float = 0.0

    @classmethod
    def of(cls, by: int, error: PeerError) -> FailureReport:
        """What ``error``, raised on rank ``by``, says."""
        arrived, expected = (error.arrived, error.expected) if isinstance(error, PeerTimeout) else (-1, -1)
        cause = error.cause if isinstance(error, PeerLost) else ""
        return cls(by, error.peer, isinstance(error, PeerTimeout), error.channel, arrived, expected, error.phase, cause)

    def encode(self) -> bytes:
        """Payload of a control frame; its sender is ``by``."""
        phase, cause = self.phase.encode()[:_MOST_PHASE], self.cause.encode()[:_MOST_CAUSE]
        head = _REPORT.pack(self.peer, self.silent, self.channel, self.arrived, self.expected, len(phase))
        return head + phase + cause

    @classmethod
    def decode(cls, by: int, payload: bytes, ranks: int) -> FailureReport:
        """The report of rank ``by``. Raises ValueError when it is none."""
        if not _REPORT.size <= len(payload) <= _REPORT.size + _MOST_PHASE + _MOST_CAUSE:
            raise ValueError(f"rank {by} sent a malformed control frame")
        peer, silent, channel, arrived, expected, length = _REPORT.unpack_from(payload)
        if not 0 <= peer < ranks or (peer == by and silent) or length > _MOST_PHASE:
            raise ValueError(f"rank {by} sent a malformed control frame")
        words = payload[_REPORT.size :]
        phase, cause = (part.decode(errors="replace") for part in (words[:length], words[length:]))
        return cls(by, peer, silent, channel, arrived, expected, phase, cause, time.monotonic())

    def error(self, error: PeerError, rank: int) -> PeerError:
        """What rank ``rank`` raises in place of ``error``, which names a rank that is not to blame."""
        where = f"{error.phase}, rank {rank}"
        phase = f" in {self.phase}" if self.phase else ""
        if not self.silent:
            cause = f" ({self.cause})" if self.cause else ""
            how = f"rank {self.by} lost it{phase}{cause} and has stopped for that reason"
            if self.by == self.peer:
                how = f"it failed{phase}{cause} and has stopped"
            return PeerLost(
                f"{where}: rank {self.peer} is gone: {how}. {after_loss(self.peer)}",
                peer=self.peer,
                phase=error.phase,
                channel=self.channel,
                cause=self.cause,
            )
        counts = f": {self.arrived} messages arrived, {self.expected} expected" if self.arrived >= 0 else ""
        return PeerTimeout(
            f"{where}: rank {self.peer} is silent: rank {self.by} waits for it or has given up{phase}{counts}. Likely "
            f"cause: rank {self.peer} has not made the same call, is stuck, or the network drops its traffic. "
            f"{after_silence(self.peer)}",
            peer=self.peer,
            phase=error.phase,
            channel=self.channel,
            arrived=self.arrived,
            expected=self.expected,
        )
