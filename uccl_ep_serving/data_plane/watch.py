"""What a rank does when it hears of a peer: stop the kernels of the present data plane, and say who is to blame."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from ..control_plane.failure_report import FailureReport
from ..control_plane.mesh import ControlMesh
from ..errors import REBUILD_GROUP, PeerError, PeerLost, PeerTimeout, UcclEpError, after_loss
from ..protocol import context as ctx
from ..protocol.streams import channel_of
from .agreement import SETUP, read_proposal
from .plane import DataPlane

__all__ = ["PlaneWatch"]

_log = logging.getLogger("uccl_ep_serving")


class PlaneWatch:
    """Ties the control connections of one rank to its data plane.

    Args:
        mesh: its callbacks are taken over.
        plane: returns the present data plane, None when there is none or the Buffer is closed.
        begun: returns how many operations this rank has begun in it.
        settle: called when a peer asks for other windows before an operation that this rank has begun.

    Attributes:
        evicted: in words, that another rank has masked this one; empty while none has.
            Writer: the thread that reads the control connections. Reader: the host.
    """

    def __init__(
        self,
        mesh: ControlMesh,
        plane: Callable[[], DataPlane | None],
        begun: Callable[[], int],
        settle: Callable[[DataPlane], None],
    ) -> None:
        self.evicted = ""
        self._rank = mesh.rank
        self._mesh = mesh
        self._liveness = mesh.liveness
        self._plane = plane
        self._begun = begun
        self._settle = settle
        mesh.on_part = self._on_part
        mesh.on_lost = self._on_lost
        mesh.on_goodbye = self._on_goodbye
        mesh.on_masked = self._on_masked
        mesh.root_cause.waits_for = self._waits_for

    # -- what the host asks -------------------------------------------------------------------------------------

    def look(self) -> None:
        """Before an operation and between slices of a wait: raise, or stop the kernels, for what the proxies, the
        control connections or other ranks' calls tell."""
        plane = self._plane()
        if plane is None or plane.space is None or plane.service is None:
            return
        if self.evicted:
            raise UcclEpError(self.evicted)
        space, service, liveness = plane.space, plane.service, self._liveness
        if liveness.any_heard:
            for peer in liveness.lost_unmasked:
                space.fail(ctx.FAILURE_PEER_LOST, peer)
            if liveness.has_fallen_silent(space.awaited):
                space.fail(ctx.FAILURE_PEER_LOST, space.awaited)
            if liveness.masked_by_others:
                # rather than a timeout that blames a rank which waits for the masked one, too
                liveness.check(space.phase)
        code, peer = space.failed_with
        if code == ctx.FAILURE_COMMAND and not space.is_direct(peer):
            # a message that was not sent: the connection goes, so that the peer ends by name and not at its deadline
            service.forget(peer, code)
        elif code == ctx.FAILURE_PEER_LOST:
            self._raise_lost(space.phase, peer, service.loss_of(peer))
        elif code in (ctx.FAILURE_NONE, ctx.FAILURE_PROTOCOL, ctx.FAILURE_TRANSPORT):
            # of what a peer sent, or a device said, the proxies know more than the sticky error
            service.check()
        if code in (ctx.FAILURE_NONE, ctx.FAILURE_LAYOUT) and self._requested_before() is not None:
            self._settle(plane)

    def _raise_lost(self, phase: str, peer: int, cause: str) -> None:
        """Raise PeerLost with what the control connections and a transport (``cause``) know, if they know anything."""
        known = [words for words in (self._liveness.how_gone(peer), cause) if words]
        if known:
            raise PeerLost(
                f"{phase}, rank {self._rank}: rank {peer} is gone ({'; '.join(known)}). {after_loss(peer)}",
                peer=peer,
                phase=phase,
                cause=cause,
            )

    def resolve_cause(self, error: PeerError) -> PeerError:
        """What to raise in place of ``error``, with which an operation has failed: it names the rank at the root.

        The peers are told, and this rank publishes nothing more in this epoch, so that it cannot seem to go on.
        """
        named = self._mesh.root_cause.resolve_cause(error)
        self._stop_kernels(
            ctx.FAILURE_PEER_TIMEOUT if isinstance(named, PeerTimeout) else ctx.FAILURE_PEER_LOST, named.peer
        )
        if named is not error:
            _log.error("rank %d blames rank %d, not rank %d: %s", self._rank, named.peer, error.peer, named)
        return named

    def report_local_failure(self, error: UcclEpError, phase: str) -> None:
        """An operation failed for a reason of this rank's own; when it cannot go on, the peers are told."""
        plane = self._plane()
        if plane is not None and plane.space is not None and plane.space.failed:
            self._mesh.root_cause.report_local_failure(error, phase)

    def part_from(self, peer: int) -> None:
        """``peer`` was masked: nothing more is published in this epoch, whatever a kernel that is called again
        may think, and nothing is sent to that rank."""
        self._stop_kernels(ctx.FAILURE_PEER_LOST, peer)
        plane = self._plane()
        if plane is not None:
            plane.forget(peer, ctx.FAILURE_PEER_LOST)

    def drain(self, plane: DataPlane, deadline: float) -> bool:
        """Wait until what this rank has sent is out; False when something is still under way at ``deadline``.

        A device is waited for as long as its kernels wait for peers: at ``deadline`` they are released, and what they
        have not sent is lost.
        """

        def release() -> None:
            if plane.space is not None and plane.space.fail(ctx.FAILURE_CLOSED):
                _log.warning("rank %d leaves windows in which its kernels still wait: they end here", self._rank)

        with self._mesh.limit(deadline, release) if plane.finishes else contextlib.nullcontext():
            return plane.drain(deadline, self._liveness)

    # -- what the reader of the control connections hears -------------------------------------------------------

    def _on_lost(self, peer: int) -> None:
        if not self._liveness.mask[peer]:
            self._stop_kernels(ctx.FAILURE_PEER_LOST, peer)

    def _on_goodbye(self, peer: int) -> None:
        plane = self._plane()
        if plane is not None:
            plane.forget(peer, ctx.FAILURE_CLOSED)

    def _on_masked(self, by: int, peer: int) -> None:
        """Rank ``by`` has masked ``peer``: it takes part in nothing that ``peer`` is part of any more."""
        if self._liveness.mask[by]:
            return
        if peer == self._rank:
            self.evicted = f"rank {by} has masked this rank, which it takes for lost or silent. {REBUILD_GROUP}"
        if not self._liveness.mask[peer]:
            self._stop_kernels(ctx.FAILURE_PEER_LOST, by if peer == self._rank else peer)

    def _on_part(self, peer: int) -> None:
        """Release kernels on a device that wait for a peer which wants something else. The host of this rank waits for
        none of them: it would hear of it only when they have reached their limit."""
        plane = self._plane()
        if plane is not None and plane.finishes and (other := self._requested_before()) is not None:
            # rule: low latency: the host releases kernels that wait for a peer which wants other windows
            self._stop_kernels(ctx.FAILURE_LAYOUT, other)

    def _waits_for(self) -> FailureReport | None:
        """For whom the pending kernel, or a step of agreement, waits; called from the reader thread."""
        plane = self._plane()
        if plane is None or plane.space is None or plane.space.awaited in (-1, self._rank):
            return self._mesh.steps.waits_for()
        peer, stream, arrived, expected = plane.space.pending
        channel = channel_of(stream) if stream >= 0 else -1
        return FailureReport(self._rank, peer, True, channel, arrived, expected, plane.space.phase)

    # -- inside -------------------------------------------------------------------------------------------------

    def _requested_before(self) -> int | None:
        """A peer that asks for other windows before an operation that this rank has begun, which would never end."""
        for peer, payload in self._mesh.steps.requested(SETUP).items():
            if read_proposal(peer, payload).begun < self._begun():
                return peer
        return None

    def _stop_kernels(self, code: int, peer: int) -> None:
        """Set the sticky error of the present data plane, if there is one."""
        plane = self._plane()
        if plane is not None and plane.space is not None:
            plane.space.fail(code, peer)
