"""The epochs of a Buffer: how all ranks agree on the next data plane, leave the present one and build it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator

from ..config import Settings
from ..control_plane.bootstrap import Introduction
from ..control_plane.mesh import ControlMesh
from ..errors import (
    REBUILD_GROUP,
    BootstrapError,
    ConfigError,
    Evicted,
    PeerError,
    ProtocolError,
    TransportError,
    UcclEpError,
    in_words,
)
from ..protocol.layout import LowLatencyPlan, LowLatencyRoom, NormalPlan
from ..proxy.stats import add_up
from .agreement import SETUP, Outcome, Proposal, decide, read_proposal
from .build import PlaneBuilder
from .compiling import compile_together, do_together
from .gpu_direct import Gpu
from .watch import PlaneWatch

__all__ = ["Epochs"]

_log = logging.getLogger("uccl_ep_serving")

#: Timeouts that ranks wait for each other before the first operation of a mode. An engine compiles and captures its own
#: model just before, minutes on a node with a cold cache and seconds on one with a warm one (vLLM's torch.compile).
FIRST_MEETING = 6
#: Names of the steps in which ranks wait for each other, and after which all use memory of their devices.
_MEETING, _SETTING_UP = "meeting before an operation", "setting up the GPUs' memory"


class Epochs:
    """The data planes of one rank, one after the other.

    Args:
        mesh: control connections, connected before :meth:`start`.
        settings: this rank's settings.
        normal: sizes of normal mode, equal on all ranks.
        gpu: whose tensors this rank may serve; None = it serves CPU tensors only.

    Attributes:
        number: how often ranks have rebuilt their windows; message counters restart at 0 with each epoch.
        all_direct, node_ranks, channels: as in Runtime, of the last data plane while there is none.
        ended: what the proxies of the data planes before have counted, added up.
        watch: of the present data plane.
    """

    def __init__(self, mesh: ControlMesh, settings: Settings, normal: NormalPlan, gpu: Gpu | None) -> None:
        self.number = 0
        self.all_direct = False
        self.node_ranks = 1
        self.channels = 0
        self.ended: dict[str, int] = {}
        self.watch = PlaneWatch(mesh, self._settle)
        self._mesh = mesh
        self._settings = settings
        self._normal = normal
        #: Of the last windows; it never shrinks.
        self._room: LowLatencyRoom | None = None
        self._gpu = gpu

    def start(self, introduction: Introduction) -> None:
        """Build the first data plane. Collective."""
        self._builder = PlaneBuilder(self._mesh, introduction, self._settings, self._normal, self._gpu)
        try:
            self._install(None)
        except BaseException as error:
            self.tell(error)
            raise

    def rebuild(self, plan: LowLatencyPlan | None, objection: str, compile: Callable[[], object]) -> None:
        """Begin a new epoch on all ranks that are not masked, as Runtime says."""
        with self._breaking():
            outcome = self._agree(plan, objection, first=plan is not None and self._room is None)
            if not outcome.refusal:
                outcome = dataclasses.replace(outcome, refusal=compile_together(self._mesh.steps, compile))
            if not outcome.refusal:
                self._replace(outcome)
        self._refuse(outcome)

    def compile_together(self, compile: Callable[[], object]) -> None:
        """Call ``compile`` on all ranks, which begin the same operation of normal mode, as Runtime says."""
        with self._breaking():
            outcome = _together(self._agree(None, "", first=True))
            if not outcome.refusal:
                outcome = dataclasses.replace(outcome, refusal=compile_together(self._mesh.steps, compile))
        self._refuse(outcome)

    @property
    def _patience(self) -> float:
        """Seconds that ranks wait for each other before the first operation of a mode."""
        return self._settings.timeout * FIRST_MEETING

    @contextlib.contextmanager
    def setting_up(self) -> Iterator[Callable[[Callable[[], object]], None]]:
        """Around steps in which all ranks make memory for the present epoch, as Runtime says."""
        with self._breaking(but=(ConfigError, TransportError)):
            yield self._finish_together

    def _finish_together(self, make: Callable[[], object]) -> None:
        # memory that not all ranks have made is neither used nor made twice in an epoch
        steps, what = self._mesh.steps, "set up its GPU's memory"
        refusal = do_together(steps, make, _SETTING_UP, what, self._patience)
        self._refuse(Outcome(refusal, True, self.number, self._room), "not all ranks could set up their GPU's memory")

    def meet(self) -> None:
        """Wait for the other ranks, as Runtime says."""
        with self._breaking():
            self._mesh.steps.gather(_MEETING, timeout=self._patience)

    def leave_out(self, peer: int) -> None:
        """``peer`` was masked: the next operation begins a new epoch, without it."""
        self.watch.stale = f"rank {peer} was masked"
        self.watch.broken = ""
        self.watch.drop_peer(peer)

    @contextlib.contextmanager
    def _breaking(self, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """After an error in here some ranks may have gone on and others not: there is no window, nor a step, that all
        of them share. Masking a lost rank mends that, since those that are left begin a new epoch then.

        Args:
            but: errors that every rank raises after the same step.
        """
        try:
            yield
        except Evicted as error:
            self.watch.note(error)
            raise
        except but:
            raise
        except BaseException as error:
            named = self.watch.resolve_cause(error) if isinstance(error, PeerError) else error
            what = f"rank {self._mesh.rank} could not rebuild its window: {type(named).__name__}: {named}".rstrip(": ")
            # an error that blames a peer says what to do: mask it
            self.watch.broken = what if isinstance(named, PeerError) else f"{what}. {REBUILD_GROUP}"
            self.tell(error)
            if isinstance(named, UcclEpError):
                self.watch.note(named)
            try:
                if named is error:
                    raise
                raise named from error
            finally:
                del named  # this frame is in the traceback: a cycle would keep windows mapped

    def tell(self, error: BaseException) -> None:
        """Have the others hear what is wrong with this rank alone: not at their deadline, nor only that it is gone.

        Not told is what blames a peer, or is raised by every rank alike; nor of a connection, which has two ends.
        """
        liveness = self._mesh.liveness
        if isinstance(error, (PeerError, ProtocolError, BootstrapError, ConfigError)) or self._builder.is_unconnected:
            return
        if liveness.present and not (self.watch.closed or liveness.stopped):
            liveness.fail(in_words(error))
            # a second or two: who leaves right after this has told them first
            liveness.answer(SETUP)

    def _agree(
        self,
        plan: LowLatencyPlan | None,
        objection: str,
        *,
        failed: bool = False,
        apart: bool = False,
        first: bool = False,
    ) -> Outcome:
        masked = tuple(sorted(self._mesh.liveness.masked))
        mine = Proposal(plan, self._room, self.number, self.watch.begun, masked, objection, failed, apart)
        patience = self._patience if first else self._settings.timeout
        answers = self._mesh.steps.gather(SETUP, mine.encode(), timeout=patience)
        proposals = {rank: read_proposal(rank, payload) for rank, (payload, _) in enumerate(answers) if payload}
        return decide(self._mesh.ranks, self._normal, proposals)

    def _refuse(self, outcome: Outcome, torn: str = "the ranks began different operations") -> None:
        """Raise ConfigError where there is a refusal; ``torn``: why nothing goes on in the present epoch, if so."""
        if not outcome.refusal:
            return
        if outcome.torn:
            self.watch.stale = self.watch.stale or torn
        raise ConfigError(
            f"{SETUP}: {outcome.refusal}. The group stays usable"
            + (": what was sent before is void, go on with a dispatch on every rank" if self.watch.stale else "")
        )

    def call_off(self, why: str) -> None:
        """Refuse the present operation on all ranks, as Runtime says."""
        self._settle(why, True)

    def _settle(self, mismatch: str, apart: bool) -> None:
        """A peer waits for other windows, and this rank for an operation which that peer will never join; or peers
        have sent one of another shape, or are in another one (``apart``). Say so to the others, and raise what all of
        them come to."""
        with self._breaking():
            outcome = _together(self._agree(self.watch.plan, mismatch, failed=bool(mismatch), apart=apart))
        self._refuse(outcome)

    def _replace(self, outcome: Outcome) -> None:
        deadline = time.monotonic() + self._settings.connect_timeout
        old = self.watch.plane
        if old is not None and not self.watch.drain(old, deadline):
            _log.warning("rank %d: writes to the old window are still under way after the deadline", self._mesh.rank)
        # Nobody may unmap or stop while another rank still writes to it.
        self._mesh.steps.gather("leaving the old window")
        self.watch.plane = None
        if old is not None:
            self.ended = add_up(self.ended, old.totals())
            old.close(deadline)
        self.number = self.watch.epoch = outcome.epoch
        self.watch.begun = 0
        self._install(outcome.room)
        self.watch.stale = self.watch.interrupted = ""

    def _install(self, room: LowLatencyRoom | None) -> None:
        self.watch.group = self._mesh.liveness.number
        try:
            plane = self._builder.build(room, self.number, self.watch)
        except MemoryError as error:
            raise TransportError(
                f"rank {self._mesh.rank} has no memory for its windows and proxies: {in_words(error)}. Next step: "
                "raise its limit on memory, or ask for smaller windows"
            ) from error
        if not self.watch.install(plane):
            plane.close(time.monotonic() + 1.0)
            raise UcclEpError("this Buffer was closed while it was being built")
        self._room = room
        self.all_direct = not plane.kinds
        self.node_ranks = plane.node_ranks
        self.channels = self._builder.channels.count


def _together(outcome: Outcome) -> Outcome:
    """``outcome`` for ranks that go on in the windows that are there: that takes the same operations behind them."""
    if outcome.torn and not outcome.refusal:
        words = "the ranks have begun different operations. Next step: make the same calls on every rank"
        return dataclasses.replace(outcome, refusal=words)
    return outcome
