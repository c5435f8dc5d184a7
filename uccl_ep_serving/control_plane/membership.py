"""Who of a group takes part: ranks may be lost, may have left, may be masked by others or by this rank."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from .mesh import ControlMesh

__all__ = ["Membership"]

#: What a rank that said goodbye had sent before is waited for at most this many seconds.
_LAST_WORDS_SECONDS = 2.0


class Membership:
    """What the control connections know of the peers, without those that this rank has masked.

    Attributes:
        mask: int32[ranks], 1 = peer masked. Writer: :meth:`mask_out`, between operations. Readers: kernels of every
            epoch, the host.
    """

    def __init__(self, mesh: ControlMesh) -> None:
        self.mask: npt.NDArray[np.int32] = np.zeros(mesh.ranks, dtype=np.int32)
        self._mesh = mesh

    @property
    def masked(self) -> frozenset[int]:
        """Peers that this rank has masked."""
        return frozenset(int(peer) for peer in np.flatnonzero(self.mask))

    @property
    def any_absent(self) -> bool:
        """True when a peer may be lost, silent or accused: otherwise there is no need to ask which."""
        return self._mesh.absences.any_heard

    @property
    def lost(self) -> list[int]:
        """Peers whose connection closed without a goodbye, in the order in which that was seen."""
        return [peer for peer in self._mesh.absences.lost if not self.mask[peer]]

    @property
    def accused(self) -> list[int]:
        """Peers that ranks which take part have masked, and this one has not."""
        return self._mesh.absences.accused_by_others()

    def mask_out(self, peer: int) -> None:
        """Mask ``peer``, tell everybody, and number the steps of agreement anew."""
        self.mask[peer] = 1
        self._mesh.restart(self.masked)
        self._mesh.announce_mask(peer)

    def has_fallen_silent(self, peer: int) -> bool:
        """True when ``peer`` left or gave up so long ago that whatever it sent before has arrived."""
        quiet = self._mesh.absences.quiet_since(peer)
        return quiet is not None and not self.mask[peer] and time.monotonic() > quiet + _LAST_WORDS_SECONDS

    def check(self, phase: str) -> None:
        """Raise PeerLost when a peer is lost, has given up, or has been masked by another rank."""
        if self.lost or self.accused or self._mesh.absences.given_up():
            self._mesh.absences.raise_absent(phase, self.masked)

    def how_gone(self, peer: int) -> str:
        """In words how ``peer`` came to be absent, "" when its control connection tells nothing of that."""
        return self._mesh.absences.how_gone(peer)

    def check_all(self, phase: str, patience: float = 0.0) -> None:
        """Raise PeerLost when a peer is absent for any reason; ``patience``: seconds for the news to come."""
        self._mesh.absences.raise_absent(phase, self.masked, patience=patience)
