"""What outlives one low-latency operation: the counters of the present window, and whether ranks are still in step.

A window serves one plan. The first operation with other sizes, or after a rank was masked, moves all ranks to a new
one (``Runtime.rebuild``) in which every counter starts at 0; what belongs to the old one is refused by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..config import Settings
from ..errors import ConfigError, UcclEpError
from ..handles import LowLatencyHandle
from ..kernels.blocks.low_latency import StateBlock
from ..protocol.layout import LowLatencyPlan, WindowLayout
from .low_latency_arguments import check_ring, covers

__all__ = ["Receipt", "Session", "Space"]


class Space(Protocol):
    """What low-latency mode needs of a Runtime; see there."""

    rank: int
    ranks: int

    @property
    def epoch(self) -> int: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def layout(self) -> WindowLayout: ...
    @property
    def context(self) -> int: ...
    @property
    def progress(self) -> int: ...
    @property
    def record(self) -> Callable[..., None]: ...
    def check(self, phase: str) -> None: ...
    def wait(self, phase: str, step: Callable[[int], int]) -> None: ...
    def begin_operation(self) -> None: ...
    @property
    def stale(self) -> str: ...
    @property
    def rebuild_requested(self) -> bool: ...
    def rebuild(self, plan: LowLatencyPlan | None, objection: str = "") -> None: ...


class Session:
    """Low-latency state of one Buffer on one rank.

    Args:
        runtime: of the Buffer.
        on_change: called when a new window is taken into use.

    Attributes:
        epoch: of the window that ``state`` belongs to, -1 before the first.
    """

    def __init__(self, runtime: Space, on_change: Callable[[], None]) -> None:
        self.epoch = -1
        self._runtime = runtime
        self._on_change = on_change
        self._state: StateBlock | None = None
        self._interrupted = ""

    def check(self, phase: str, begins: bool = False) -> None:
        """Raise what is known to be wrong; ``begins``: the operation needs nothing that was sent before."""
        runtime = self._runtime
        runtime.check(phase)
        if runtime.stale:
            if not begins:
                raise ConfigError(
                    f"{phase}: {runtime.stale}, so what was sent before is void. Next step: go on with a dispatch on "
                    "every rank"
                )
        elif self._interrupted and self.epoch == runtime.epoch:
            raise UcclEpError(
                f"{phase}: an earlier {self._interrupted} was interrupted after part of it may have been sent, so "
                "ranks no longer agree on what comes next. Next step: mask the rank that is lost on every rank that "
                "is left, or close this Buffer and build the group again"
            )

    def adopt(self, plan: LowLatencyPlan) -> StateBlock:
        """State for ``plan``, laid out anew on all ranks when the window has no room for it."""
        runtime = self._runtime
        laid_out = None if runtime.stale else runtime.layout.low_latency
        if laid_out is None or not covers(laid_out, plan) or runtime.rebuild_requested:
            # what is wrong on this rank alone is told to the others, who would wait for it
            objection = ""
            try:
                self._check_idle(plan)
                check_ring(plan, runtime.settings)
            except ConfigError as error:
                objection = str(error)
            runtime.rebuild(plan, objection)
            laid_out = plan
        if self._state is None or self.epoch != runtime.epoch:
            self._state = StateBlock(laid_out, runtime.layout)
            self.epoch, self._interrupted = runtime.epoch, ""
            self._on_change()
        return self._state

    def _check_idle(self, plan: LowLatencyPlan) -> None:
        """Raise ConfigError when an operation that can still end would lose its window to ``plan``."""
        state, runtime = self._state, self._runtime
        if state is None or runtime.stale or self._interrupted or self.epoch != runtime.epoch:
            return
        if state.dispatches_in_flight or state.combines_in_flight:
            raise ConfigError(
                f"low-latency dispatch: {plan} needs another window layout than {state.plan}, and an operation is in "
                "flight: call its recv hook first"
            )

    def state_of(self, handle: object, owner: object, phase: str) -> StateBlock:
        """State that ``handle`` belongs to. Raises ConfigError when it is not ``owner``'s, or older than
        the window."""
        if not isinstance(handle, LowLatencyHandle) or handle.owner is not owner:
            raise ConfigError(f"{phase}: the handle must be what low-latency dispatch of the same Buffer returned")
        if self._state is None or handle.epoch != self._runtime.epoch:
            raise ConfigError(
                f"{phase}: the handle is older than the present window layout (another T, hidden, number of experts, "
                "top-k or dtype was dispatched since): combine before dispatching other shapes"
            )
        return self._state

    def send(self, phase: str, step: Callable[[int], int]) -> None:
        """Run a sending kernel to its end."""
        self._runtime.begin_operation()
        try:
            self._runtime.wait(phase, step)
        except BaseException:
            # some peers may have this message and others not: it can be neither repeated nor skipped
            self._interrupted = phase
            raise

    def receive(self, phase: str, epoch: int, step: Callable[[int], int]) -> None:
        """Run a receiving kernel to its end, for an operation that was sent in window ``epoch``."""
        self.check(phase)
        if epoch != self._runtime.epoch:
            raise ConfigError(f"{phase}: the window was laid out anew since this operation was sent")
        self._runtime.wait(phase, step)

    def finish(self, receipt: Receipt) -> None:
        """Receive an operation whose caller gets no hook."""
        try:
            receipt()
        except BaseException:
            # nobody can call it again, and its slot stays taken
            self._interrupted = receipt.phase
            raise


class Receipt:
    """Recv hook: the receiving half of an operation, which runs once. Calling it again does nothing.

    It can be called again after it raised. Once it has run it keeps nothing alive.

    Attributes:
        phase: words for messages.
    """

    def __init__(
        self,
        session: Session,
        phase: str,
        step: Callable[[int], int],
        done: Callable[[int], None],
        kept: tuple[torch.Tensor | None, ...],
    ) -> None:
        self.phase = phase
        self._pending: tuple[Any, ...] | None = (session, session.epoch, step, done, kept)

    def __call__(self) -> None:
        if self._pending is None:
            return
        session, epoch, step, done, _ = self._pending
        started = time.monotonic_ns()
        session.receive(self.phase, epoch, step)
        done(time.monotonic_ns() - started)
        self._pending = None
