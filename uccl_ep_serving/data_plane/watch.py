"""The present data plane of a rank: whether operations may go on in it, what stops its kernels, and who is to blame."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from ..control_plane.failures import LAST_MESSAGES_SECONDS
from ..control_plane.mesh import ControlMesh
from ..control_plane.reports import Wait
from ..control_plane.steps import CLOSE
from ..errors import PeerError, PeerLost, ProtocolError, ProxyDied, TransportError, UcclEpError, after_loss
from ..protocol import context as ctx
from ..protocol.layout import LowLatencyPlan
from .agreement import SETUP, read_proposal
from .calls import Calls
from .flight_recorder import FlightRecorder
from .kernel_space import KernelSpace
from .plane import DataPlane
from .standing import WaitLog, state_of

__all__ = ["PlaneWatch"]

_log = logging.getLogger("uccl_ep_serving")


class PlaneWatch:
    """Ties the control connections of one rank to its data plane.

    Args:
        mesh: its callbacks are taken over.
        settle: called when a peer asks for other windows before an operation that this rank has begun; with the words
            for it when operations of different shapes have met; with words and True when ranks are in different ones.

    Attributes:
        plane: the present data plane, None while there is none.
        epoch: its number.
        begun: operations that this rank has begun in it.
        plan: of the last of them, None for one of normal mode.
        stale: why the next operation must begin in another one, in words; empty when it need not.
        broken: why the ranks cannot go on together, in words; masking a lost rank mends that.
        interrupted: the operation of this epoch that has ended early on this rank, in words; empty while none has.
            Writer: the host, also when a new epoch begins.
        closed: no other data plane will be taken into use.
        group: number of the group that the present data plane was built for.
        liveness: who of the group takes part.
        waits: for whom this rank has waited.
        recorder: keeps what this rank knew when it could not go on; None where nobody asks for that. Writer: the host,
            before the first epoch.
        short: in words, that the system gives this rank no room; empty while it does. Writer: the thread that reads the
            control connections. Reader: the host.
    """

    def __init__(self, mesh: ControlMesh, settle: Callable[[str, bool], None]) -> None:
        self.plane: DataPlane | None = None
        self.epoch = 0
        self.begun = 0
        self.plan: LowLatencyPlan | None = None
        self.stale = ""
        self.broken = ""
        self.interrupted = ""
        self.closed = False
        self.group = 0
        self.short = ""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._rank = mesh.rank
        self._mesh = mesh
        self.liveness = mesh.liveness
        self._settle = settle
        self.waits = WaitLog(mesh.rank)
        self.recorder: FlightRecorder | None = None
        self._calls = Calls(mesh)
        #: By peer for which this rank was seen to wait while it closes its Buffer: since when.
        self._closes: dict[int, float] = {}
        mesh.on_part = self._on_part
        mesh.on_lost = self._on_lost
        mesh.on_goodbye = self._on_goodbye
        mesh.on_stopped = self._on_stopped
        mesh.on_shortage = self._on_shortage
        mesh.on_tick = self._on_tick
        mesh.liveness.waits_for = self._waits_for
        mesh.liveness.leaves = self._leaves
        mesh.liveness.on_trouble = self._on_trouble

    @property
    def last_words(self) -> bytes:
        """What this rank has begun, for those that it leaves."""
        return self._calls.words

    def begin(self, plan: LowLatencyPlan | None, combines: bool) -> None:
        """This rank begins an operation; ``plan``: of one of low latency, which ``combines`` or dispatches."""
        self.begun += 1
        self.plan = plan
        self._calls.begin(self.epoch, self.begun, plan is not None, combines)

    # -- what is in use -----------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise UcclEpError when the Buffer is closed, forked or broken. Any thread."""
        if self.closed:
            raise UcclEpError("this Buffer is closed")
        if self.forked:
            raise UcclEpError("this Buffer belongs to the parent process: build one in each process, after the fork")
        if broken := self.broken or self.short:
            raise UcclEpError(broken)

    @property
    def forked(self) -> bool:
        """True in a process that has forked off from the one that built the Buffer."""
        return os.getpid() != self._pid

    @property
    def present(self) -> DataPlane:
        """The data plane of the present epoch. Raises UcclEpError when the Buffer is closed or broken, and when there
        is none."""
        plane = self.plane
        if self.closed or self.broken or self.short or plane is None or plane.space is None:
            self.check_usable()
            raise UcclEpError(f"this rank has no window at present ({self.stale or 'it is being built'})")
        return plane

    def install(self, plane: DataPlane) -> bool:
        """Take ``plane`` into use; False when the Buffer was closed meanwhile."""
        with self._lock:
            if self.closed:
                return False
            self.plane = plane
        return True

    def shut(self) -> bool:
        """Take no other data plane into use; True for the first call."""
        with self._lock:
            first, self.closed = not self.closed, True
        return first

    # -- what the host asks -------------------------------------------------------------------------------------

    def check(self, phase: str = "operation") -> None:
        """Raise what is known to be wrong before an operation starts.

        Commands refused outside operations are named here, once, and never in the middle of an operation.
        """
        if self.liveness.stopped and not self.closed and not self.forked:
            try:
                self.liveness.check(phase)
            except UcclEpError as error:
                self.note(error)
                raise
        self.check_usable()
        try:
            if self.stale:
                # the old data plane has failed, which is why it is left; what counts is who will be in the new one
                self.liveness.check(phase)
                return
            space = self.present.space
            assert space is not None
            space.phase = phase
            self.look()
            if space.failed:
                raise space.failure(phase)
        except (PeerError, ProtocolError, TransportError, ProxyDied) as error:
            self.raise_named(error, phase)
        service = self.present.service
        assert service is not None
        service.check_commands()

    def look(self) -> None:
        """Before an operation and between slices of a wait: raise, or stop the kernels, for what the proxies, the
        control connections or other ranks' calls tell."""
        plane = self._plane()
        if plane is None or plane.space is None or plane.service is None:
            return
        if self.short:
            raise UcclEpError(self.short)
        space, service, liveness = plane.space, plane.service, self.liveness
        code, peer = space.failed_with
        if code != ctx.FAILURE_COMMAND and liveness.any_heard:
            if liveness.deciding:
                # what this rank itself has done wrong, or its NIC, is known here only
                service.check()
            liveness.check(space.phase)
            if liveness.has_fallen_silent(space.awaited):
                space.fail(ctx.FAILURE_PEER_LOST, space.awaited)
                code, peer = space.failed_with
        if code == ctx.FAILURE_COMMAND and not space.is_direct(peer):
            # a message that was not sent: the connection goes, so that the peer ends by name and not at its deadline
            service.forget(peer)
        elif code == ctx.FAILURE_PEER_LOST:
            self._raise_lost(space.phase, peer, service.loss_of(peer))
        elif code in (ctx.FAILURE_NONE, ctx.FAILURE_PROTOCOL, ctx.FAILURE_TRANSPORT, ctx.FAILURE_PROXY_DIED):
            # of what a peer sent, a device said, or a proxy died of, they know more than the sticky error
            service.check()
        waits = code == ctx.FAILURE_NONE and space.awaited not in (-1, self._rank)
        if code in (ctx.FAILURE_NONE, ctx.FAILURE_LAYOUT) and self._requested_before() is not None:
            self._settle("", False)
        elif (waits or code == ctx.FAILURE_LAYOUT) and (difference := self._calls.difference(self.epoch)[1]):
            self._settle(difference, True)
        elif waits:
            if self._closes_for_long(space.awaited):
                why = "waits for it in an operation while it closes its Buffer"
                error = self.liveness.accuse(space.awaited, why, space.phase)
                try:
                    if error is not None:
                        raise error
                finally:
                    del error  # this frame is in the traceback
        elif code == ctx.FAILURE_PROTOCOL and (mismatch := space.mismatch):
            # every rank meets it when it receives that operation: they can say together that it does not count
            self._settle(mismatch, False)

    def _raise_lost(self, phase: str, peer: int, cause: str) -> None:
        """Raise PeerLost with what the control connections and a transport (``cause``) know, if they know anything."""
        known = [words for words in (self.liveness.how_gone(peer), cause) if words]
        if known:
            raise PeerLost(
                f"{phase}, rank {self._rank}: rank {peer} is gone ({'; '.join(known)}). {after_loss(peer)}",
                peer=peer,
                phase=phase,
                cause=cause,
            )

    def raise_named(self, error: PeerError | ProtocolError | TransportError | ProxyDied, phase: str) -> NoReturn:
        """Raise ``error``, or what all ranks that go on have agreed on because of it."""
        named: UcclEpError
        if isinstance(error, PeerError):
            named = self.resolve_cause(error, self.group)
        elif isinstance(error, ProtocolError):
            named = self._accuse(error, phase)
        else:
            named = error
            plane = self._plane()
            if isinstance(error, ProxyDied) and plane is not None and plane.service is not None:
                death = plane.service.death
                error.args = (str(error) if death in str(error) else f"{error} ({death})",)
            self._report_local_failure(error)
        self.note(named)
        try:
            if named is error:
                raise error
            raise named from error
        finally:
            # This frame is in the traceback: a name for the error here would be a cycle, and keep windows mapped.
            del named, error

    def note(self, error: UcclEpError | None = None) -> None:
        """Have the flight recorder keep what this rank knows, where it cannot go on; ``error``: for what. Without one
        only what is agreed on counts: ranks may still settle what has failed."""
        if self.recorder is not None and (error is not None or state_of(self)[0] in ("lost", "broken", "evicted")):
            self.recorder.record(self.epoch, error)

    def resolve_cause(self, error: PeerError, group: int | None = None) -> UcclEpError:
        """What to raise in place of ``error``, with which an operation (of the group with number ``group``) has failed:
        it names the ranks that are lost, the same ones on every rank that goes on.

        This rank publishes nothing more in this epoch, so that it cannot seem to go on.
        """
        named = self.liveness.settle(error, group)
        self._stop_kernels(ctx.FAILURE_PEER_LOST, named.peer if isinstance(named, PeerError) else self._rank)
        if isinstance(named, PeerError) and named.peer != error.peer:
            _log.error("rank %d blames rank %d, not rank %d: %s", self._rank, named.peer, error.peer, named)
        return named

    def _accuse(self, error: ProtocolError, phase: str) -> UcclEpError:
        """What to raise for ``error``: a peer broke the formats, or this rank did."""
        if error.peer in (-1, self._rank):
            return error
        if error.own:
            self.liveness.fail(str(error))
            return error
        answer = self.liveness.accuse(error.peer, f"got what the formats forbid: {error}", phase)
        if isinstance(answer, PeerError) and error.peer in answer.peers:
            error.peers = answer.peers
            return error
        return answer or error

    def _report_local_failure(self, error: UcclEpError) -> None:
        """An operation failed for a reason of this rank's own; when it cannot go on, the peers are told."""
        space = self._space()
        if space is not None and space.failed:
            self.liveness.fail(str(error))

    def drop_peer(self, peer: int) -> None:
        """``peer`` was masked: nothing more is published in this epoch, whatever a kernel that is called again
        may think, and nothing is sent to that rank."""
        self._stop_kernels(ctx.FAILURE_PEER_LOST, peer)
        plane = self._plane()
        if plane is not None:
            plane.forget(peer)

    def drain(self, plane: DataPlane, deadline: float) -> bool:
        """Wait until what this rank has sent is out; False when something is still under way at ``deadline``.

        A device is waited for as long as its kernels wait for peers: at ``deadline`` they are released, and what they
        have not sent is lost.
        """

        def release() -> None:
            if plane.space is not None and plane.space.fail(ctx.FAILURE_CLOSED):
                _log.warning("rank %d leaves windows in which its kernels still wait: they end here", self._rank)

        with self._mesh.limit(deadline, release) if plane.finishes else contextlib.nullcontext():
            return plane.drain(deadline, self.liveness)

    # -- what the reader of the control connections hears -------------------------------------------------------

    def _on_lost(self, peer: int) -> None:
        if not self.liveness.mask[peer]:
            self._stop_kernels(ctx.FAILURE_PEER_LOST, peer)

    def _on_goodbye(self, peer: int) -> None:
        plane = self._plane()
        if plane is not None:
            plane.forget(peer)

    def _on_trouble(self) -> None:
        """Something has failed somewhere: what is under way is void on all ranks, whoever is lost."""
        self._stop_kernels(ctx.FAILURE_PEER_LOST, self._rank)

    def _on_stopped(self) -> None:
        self._stop_kernels(ctx.FAILURE_PEER_LOST, self._rank)

    def _on_shortage(self, why: str) -> None:
        """This rank has told the others that it cannot go on."""
        self.short = why
        self._stop_kernels(ctx.FAILURE_PEER_LOST, self._rank)

    def _on_part(self, peer: int) -> None:
        """Release kernels on a device that wait for a peer which wants something else. The host of this rank waits for
        none of them: it would hear of it only when they have reached their limit."""
        plane = self._plane()
        if plane is not None and plane.finishes and (other := self._requested_before()) is not None:
            # rule: low latency: the host releases kernels that wait for a peer which wants other windows
            self._stop_kernels(ctx.FAILURE_LAYOUT, other)

    def _on_tick(self) -> None:
        """Tell the peers which operations this rank has begun. Release kernels on a device that wait for messages of an
        operation which is none of the peer's, as :meth:`_on_part` does, or for a peer that has left. Look at the NICs.
        """
        self._calls.tell()
        self.note()
        plane, (other, _) = self._plane(), self._calls.difference(self.epoch)
        if plane is not None:
            plane.look_at_devices()
            if plane.space is not None:
                self.waits.sample(self._pending_wait, (self.epoch, self.begun), plane.space.timeout)
        if plane is None or not plane.finishes or plane.space is None or plane.space.failed:
            return
        if other != -1:
            # rule: control: the host releases kernels that wait for a peer which is in the other mode
            plane.space.fail(ctx.FAILURE_LAYOUT, other)
        for peer in list(self.liveness.departed):
            # What both have begun may be complete, and received later: an operation that the peer has not begun ends
            # never, and the host of a device does not know for whom that waits. Replayed graphs begin nothing.
            if self.liveness.has_fallen_silent(peer) and self.begun > self._calls.most_begun(peer, self.epoch):
                plane.space.fail(ctx.FAILURE_PEER_LOST, peer)

    @property
    def waits_for(self) -> Wait | None:
        """For whom a step or an operation of this rank waits at present, or waited when it failed."""
        space = self._space()
        failed = space is not None and space.failed
        return self._pending_wait or (self.waits.last((self.epoch, self.begun)) if failed else None)

    @property
    def _pending_wait(self) -> Wait | None:
        space = self._space()
        return self._mesh.steps.waits_for() or (space.pending_wait if space is not None else None)

    def _waits_for(self) -> tuple[Wait | None, bool]:
        """For whom the pending kernel, or a step of agreement, waits, and whether this rank stood still in that time.

        From whichever thread learns first that something has failed.
        """
        still, space = self._mesh.stood_still, self._space()
        return self._mesh.steps.waits_for() or (space.waits_for if space is not None else None), still

    def _leaves(self) -> str:
        """As the mesh says it, and after what."""
        words = self._mesh.leaves()
        return f"{words}, after {self.interrupted}" if words and self.interrupted else words

    # -- inside -------------------------------------------------------------------------------------------------

    def _plane(self) -> DataPlane | None:
        """The present data plane, None when there is none or the Buffer is closed."""
        return None if self.closed else self.plane

    def _space(self) -> KernelSpace | None:
        """That of the present data plane, None when there is none."""
        plane = self._plane()
        return None if plane is None else plane.space

    @property
    def is_awaited(self) -> bool:
        """Whether a peer asks for other windows, or to compile, and not after operations that this rank begins yet."""
        requested = self._mesh.steps.requested(SETUP)
        if not requested:
            return False
        return any(read_proposal(peer, payload).begun <= self.begun for peer, payload in requested.items())

    def _closes_for_long(self, peer: int) -> bool:
        """Whether ``peer``, for which this rank waits, closes its Buffer, and whatever it had sent before has
        arrived."""
        if peer not in self._mesh.steps.requested(CLOSE):
            return False
        now = time.monotonic()
        return now > self._closes.setdefault(peer, now) + LAST_MESSAGES_SECONDS

    def _requested_before(self) -> int | None:
        """A peer that asks for other windows before an operation that this rank has begun, or has noticed that ranks
        began different ones: that of this rank would never end."""
        for peer, payload in self._mesh.steps.requested(SETUP).items():
            theirs = read_proposal(peer, payload)
            if theirs.begun < self.begun or (theirs.apart and theirs.begun == self.begun):
                return peer
        return None

    def _stop_kernels(self, code: int, peer: int) -> None:
        """Set the sticky error of the present data plane, if there is one."""
        space = self._space()
        if space is not None:
            space.fail(code, peer)
