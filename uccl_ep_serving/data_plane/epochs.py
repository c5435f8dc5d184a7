"""The epochs of a Buffer: its present data plane, and how all ranks agree on the next one and build it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator

from ..config import Settings
from ..control_plane.bootstrap import Introduction
from ..control_plane.mesh import ControlMesh
from ..errors import REBUILD_GROUP, ConfigError, PeerError, UcclEpError
from ..protocol.layout import LowLatencyPlan, NormalPlan
from .agreement import SETUP, Outcome, Proposal, decide, read_proposal
from .build import PlaneBuilder
from .plane import DataPlane
from .watch import PlaneWatch

__all__ = ["Epochs"]

_log = logging.getLogger("uccl_ep_serving")


class Epochs:
    """The data planes of one rank, one after the other.

    Args:
        mesh: control connections, connected before :meth:`start`.
        settings: this rank's settings.
        normal: sizes of normal mode, equal on all ranks.

    Attributes:
        number: how often ranks have rebuilt their windows; message counters restart at 0 with each epoch.
        plane: the present data plane, None while there is none.
        begun: operations that this rank has begun in it.
        stale: why the next operation must begin with :meth:`rebuild`, in words; empty when it need not.
        broken: why the ranks cannot go on together, in words; masking a lost rank mends that.
        closed: no other data plane will be taken into use.
        all_direct, node_ranks: as in Runtime, of the last data plane while there is none.
        watch: what this rank does when it hears of a peer.
    """

    def __init__(self, mesh: ControlMesh, settings: Settings, normal: NormalPlan) -> None:
        self.number = 0
        self.plane: DataPlane | None = None
        self.begun = 0
        self.stale = ""
        self.broken = ""
        self.closed = False
        self.all_direct = False
        self.node_ranks = 1
        self.watch = PlaneWatch(mesh, lambda: None if self.closed else self.plane, lambda: self.begun, self._settle)
        self._mesh = mesh
        self._settings = settings
        self._normal = normal
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def start(self, introduction: Introduction) -> None:
        """Build the first data plane. Collective."""
        self._builder = PlaneBuilder(self._mesh, introduction, self._settings, self._normal)
        self._install(None)

    def check_usable(self) -> None:
        """Raise UcclEpError when the Buffer is closed, forked or broken."""
        if self.closed:
            raise UcclEpError("this Buffer is closed")
        if self.forked:
            raise UcclEpError("this Buffer belongs to the parent process: build one in each process, after the fork")
        if broken := self.broken or self.watch.evicted:
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
        if self.closed or self.broken or self.watch.evicted or plane is None or plane.space is None:
            self.check_usable()
            raise UcclEpError(f"this rank has no window at present ({self.stale or 'it is being built'})")
        return plane

    def rebuild(self, plan: LowLatencyPlan | None, objection: str) -> None:
        """Begin a new epoch on all ranks that are not masked, as Runtime says."""
        with self._breaking():
            outcome = self._agree(plan, objection)
            if not outcome.refusal:
                self._replace(plan, outcome.epoch)
        self._refuse(outcome)

    def leave_out(self, peer: int) -> None:
        """``peer`` was masked: the next operation begins a new epoch, without it."""
        self.stale = f"rank {peer} was masked"
        self.broken = ""
        self.watch.part_from(peer)

    def shut(self) -> bool:
        """Take no other data plane into use; True for the first call."""
        with self._lock:
            first, self.closed = not self.closed, True
        return first

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """After an error in here some ranks may have gone on and others not: there is no window, nor a step, that all
        of them share. Masking a lost rank mends that, since those that are left begin a new epoch then."""
        try:
            yield
        except BaseException as error:
            named = self.watch.resolve_cause(error) if isinstance(error, PeerError) else error
            what = f"rank {self._mesh.rank} could not rebuild its window: {type(named).__name__}: {named}".rstrip(": ")
            # an error that blames a peer says what to do: mask it
            self.broken = what if isinstance(named, PeerError) else f"{what}. {REBUILD_GROUP}"
            try:
                if named is error:
                    raise
                raise named from error
            finally:
                del named  # this frame is in the traceback: a cycle would keep windows mapped

    def _agree(self, plan: LowLatencyPlan | None, objection: str) -> Outcome:
        masked = self._mesh.liveness.masked
        mine = Proposal(plan, self.number, self.begun, tuple(sorted(masked)), objection)
        answers = self._mesh.steps.gather(SETUP, mine.encode(), timeout=self._settings.timeout)
        proposals = {rank: read_proposal(rank, payload) for rank, (payload, _) in enumerate(answers) if payload}
        return decide(self._mesh.ranks, self._normal, proposals)

    def _refuse(self, outcome: Outcome) -> None:
        if not outcome.refusal:
            return
        if outcome.torn:
            self.stale = self.stale or "the ranks began different operations"
        raise ConfigError(
            f"{SETUP}: {outcome.refusal}. The group stays usable"
            + (": what was sent before is void, go on with a dispatch on every rank" if self.stale else "")
        )

    def _settle(self, plane: DataPlane) -> None:
        """A peer waits for other windows, and this rank for an operation which that peer will never join: say so to
        the others, and raise what all of them come to."""
        with self._breaking():
            outcome = self._agree(plane.layout.low_latency, "")
        self._refuse(outcome)

    def _replace(self, plan: LowLatencyPlan | None, epoch: int) -> None:
        deadline = time.monotonic() + self._settings.connect_timeout
        old = self.plane
        if old is not None and not self.watch.drain(old, deadline):
            _log.warning("rank %d: writes to the old window are still under way after the deadline", self._mesh.rank)
        # Nobody may unmap or stop while another rank still writes to it.
        self._mesh.steps.gather("leaving the old window")
        self.plane = None
        if old is not None:
            old.close(deadline)
        self.number, self.begun = epoch, 0
        self._install(plan)
        self.stale = ""

    def _install(self, plan: LowLatencyPlan | None) -> None:
        plane = self._builder.build(plan, self.number, self.watch.look)
        with self._lock:
            taken = not self.closed
            if taken:
                self.plane = plane
                self.all_direct = not plane.kinds
                self.node_ranks = plane.node_ranks
        if not taken:
            plane.close(time.monotonic() + 1.0)
            raise UcclEpError("this Buffer was closed while it was being built")
