"""Whether one mode of a Buffer may go on: ready, stale, broken, in flight. The only place that says so, and what next.

An epoch is the time of one data plane: its windows, connections and counters. The ranks begin a new one together
(``Runtime.rebuild``) for sizes that the windows have no room for, or once a rank was masked. Each mode counts its
messages from 0 in it; what was sent before is void. Within one, low-latency operations may have any sizes that fit.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from ..data_plane.runtime import Runtime
from ..data_plane.turn import Turn, in_turn
from ..errors import AFTER_INTERRUPTION, ConfigError, UcclEpError
from ..handles import LowLatencyHandle
from ..protocol.layout import LowLatencyPlan

if TYPE_CHECKING:
    from ..gpu.context import GpuContext

__all__ = [
    "COMBINED_EARLY",
    "RECEIVE_FIRST",
    "RESERVE_FIRST",
    "Epoch",
    "InFlight",
    "Operation",
    "RecvHook",
    "check_interrupted",
]

_VOID = "so what was sent before is void. Next step: go on with a dispatch on every rank"
#: What the system raises, and torch, where a process has no memory or no descriptor left; a caller's timer may, too.
_FAILURES = (MemoryError, OSError, RuntimeError)
#: Which of them say so.
_SHORT = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EAGAIN)
_SHORT_WORDS = ("out of memory", "allocate memory", "not enough memory", "can't start new thread")
#: What an operation is told that needs another one to be received.
RECEIVE_FIRST = "Next step: call its recv hook first"
COMBINED_EARLY = (
    "the dispatch of this handle was not received, so that x is not made of its rows. Next step: call its recv hook, "
    "then compute x (where the hook was dropped, the rows are there now)"
)
#: What a captured operation is told that needs what cannot be captured.
RESERVE_FIRST = (
    "Next step: before the capture, call Buffer.reserve_low_latency on every rank for each shape of the model, or "
    "dispatch and combine once with the same shapes and dtypes"
)


class InFlight:
    """Operations of one kind that were sent and are not received yet, in the order of the calls.

    The count is the host's, on CPU and GPU alike: kernels know message numbers, not which hooks will still be called.
    A slot is used again by the operation after next, so that one must have been received.

    Args:
        kind: what several of them are called: "dispatches" or "combines".
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.combines = kind == "combines"
        self._next = 0
        self._open: set[int] = set()
        #: By number, the receipt of operations whose recv hook nobody can call any more, what is called after it, and
        #: the capture that they were sent in. Writer: whatever thread collects the hook.
        self._dropped: dict[int, tuple[Callable[[], object], Callable[[], object], int | None]] = {}

    @property
    def count(self) -> int:
        """Operations in flight."""
        return len(self._open)

    @property
    def has_room(self) -> bool:
        """False while the operation before last is in flight."""
        return not self._open or min(self._open) > self._next - 2

    def refusal(self, phase: str) -> ConfigError:
        """What to raise for one more where there is no room."""
        return ConfigError(
            f"{phase}: of the {self._kind} that were sent, the one before last is not received: at most two at a "
            f"time. {RECEIVE_FIRST}"
        )

    def start(self) -> int:
        """A new operation's number."""
        self._open.add(self._next)
        self._next += 1
        return self._next - 1

    def end(self, number: int) -> None:
        """Operation ``number`` was received."""
        self._open.discard(number)

    def drop(
        self, number: int, receive: Callable[[], object], received: Callable[[], object], capture: int | None
    ) -> None:
        """The recv hook of operation ``number``, sent in ``capture``, was collected before it was called. It would have
        called ``receive``, then ``received``."""
        if number in self._open:
            self._dropped[number] = receive, received, capture

    @property
    def has_dropped(self) -> bool:
        """Whether a recv hook is gone that would have received something."""
        return bool(self._dropped)

    def receive_dropped(self, capture: int | None) -> None:
        """Receive what hooks that are gone would have received: their slots are needed again. Raises what that does.

        Args:
            capture: that the next operation is part of, None for none. Another one, which is over without a receive,
                was given up: it has sent nothing.
        """
        while self._dropped:
            number = min(tuple(self._dropped))  # a copy: a hook may be collected in between
            receive, received, sent_in = self._dropped[number]
            if sent_in is None and capture is not None:
                raise ConfigError(
                    "low-latency mode: an operation before this capture has not been received, its recv hook was "
                    "dropped, and no graph can receive it. Next step: keep that hook, and call it before the capture"
                )
            if sent_in == capture:
                receive()
            # not before: a receive that was interrupted is made again, nobody else can
            try:
                if sent_in == capture:
                    received()
            finally:
                del self._dropped[number]
                self.end(number)

    def withdraw(self, number: int) -> None:
        """The latest operation, ``number``, was not sent: nobody will receive it."""
        self._open.discard(number)
        self._next = number

    def clear(self) -> None:
        """A new epoch begins."""
        self._open.clear()
        self._dropped.clear()
        self._next = 0


class Operation:
    """Around everything that sends an operation: whatever ends it early leaves the ranks apart.

    Attributes:
        void: nothing of it counts: all ranks refused it alike.
    """

    __slots__ = ("_epoch", "_flight", "_number", "_phase", "void")

    def __init__(self, epoch: Epoch, phase: str, flight: InFlight | None) -> None:
        self._epoch, self._phase, self._flight = epoch, phase, flight
        self._number = 0
        self.void = False

    def __enter__(self) -> Operation:
        if self._flight is not None:
            self._number = self._flight.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if self._flight is not None:
            self._flight.withdraw(self._number)
        if not self.void:
            self._epoch.interrupt(self._phase, error)
            if isinstance(error, _FAILURES):
                self._epoch.call_off(self._phase, error)

    def received(self) -> None:
        """It has been received."""
        if self._flight is not None:
            self._flight.end(self._number)

    def drop(self, receive: Callable[[], object], received: Callable[[], object], capture: int | None) -> None:
        """Nobody will receive it by its hook; ``receive`` does, then ``received`` is called. They keep alive what is
        used."""
        if self._flight is not None:
            self._flight.drop(self._number, receive, received, capture)


class RecvHook:
    """The receiving half of an operation, for the caller to call: runs once, calling it again does nothing.

    It can be called again after ``receive`` raised. Once it has run it keeps nothing alive. Where it is dropped without
    a call, the next operation of the mode (of a capture: the next in that capture) receives first, into the tensors
    that this one returned.

    Args:
        operation: what was sent in the present epoch.
        receive: receives it.
        received: called after that, with the nanoseconds that it took.
        kept: what ``receive`` uses by address.
        capture: it was sent in, None for none: there it must be received.
    """

    __slots__ = ("_capture", "_epoch", "_number", "_operation", "_pending", "_phase")

    def __init__(
        self,
        epoch: Epoch,
        operation: Operation,
        phase: str,
        receive: Callable[[], object],
        received: Callable[[int], None],
        kept: object = None,
        capture: int | None = None,
    ) -> None:
        self._epoch, self._number = epoch, epoch.number
        self._operation, self._capture = operation, capture
        self._phase = phase
        self._pending: tuple[Callable[[], object], Callable[[int], None], object] | None = receive, received, kept

    @property
    def _turn(self) -> Turn:
        return self._epoch.turn

    def __del__(self) -> None:
        # whatever collects it is no place to wait for peers
        pending = self._pending
        if pending is not None and self._number == self._epoch.number:
            # all of it: what is called after receiving keeps memory that the kernels are given by address, too
            self._operation.drop(lambda: pending[0](), lambda: pending[1](0), self._capture)

    @in_turn
    def __call__(self) -> None:
        if self._pending is None:
            return
        receive, received, _ = self._pending
        self._epoch.check(self._phase)
        self._epoch.check_number(self._phase, self._number, "this operation")
        try:
            capture = self._epoch.capture
        except RuntimeError as error:
            # a device that has failed: what comes next shall name this
            self._epoch.interrupt(self._phase, error)
            raise
        if capture != self._capture:
            sent, step = ("was not captured", "before the capture begins")
            if self._capture is not None:
                sent, step = ("was captured in a graph", "in that capture")
            raise ConfigError(
                f"{self._phase}: the operation {sent}, and its receive would not be there. Next step: call the recv "
                f"hook {step}"
            )
        started = time.monotonic_ns()
        receive()
        self._pending = None
        self._operation.received()
        received(time.monotonic_ns() - started)


class Epoch:
    """The epoch that the counters of one mode of a Buffer belong to.

    Args:
        runtime: of the Buffer.
        flights: what low-latency mode has in flight.
        gpu: where kernels run, None for CPU tensors. What they report is raised here.

    Attributes:
        number: of the epoch, -1 before the first operation.
    """

    def __init__(self, runtime: Runtime, flights: tuple[InFlight, ...] = (), gpu: GpuContext | None = None) -> None:
        self.number = -1
        self._runtime = runtime
        self._flights = flights
        self._gpu = gpu
        #: Whether all ranks have compiled what their first operation in these windows launches. Where a rank is lost on
        #: the way to that, some of the others know and some do not: they ask each other again in the next epoch.
        self.has_compiled = False
        #: What the windows have room for, these and all later ones: room never shrinks.
        self._fitting: set[LowLatencyPlan] = set()

    @property
    def turn(self) -> Turn:
        """Of the Buffer."""
        return self._runtime.turn

    @property
    def present(self) -> bool:
        """True when the counters belong to the windows that are there, and operations may go on in them."""
        return self.number == self._runtime.epoch and not self._runtime.stale

    @property
    def capturing(self) -> bool:
        """True while the current stream captures a graph."""
        return self._gpu is not None and self._gpu.order.capturing

    @property
    def capture(self) -> int | None:
        """Number of the capture that the current stream takes part in, None for none."""
        return None if self._gpu is None else self._gpu.order.capture

    def check(self, phase: str, begins: bool = False) -> None:
        """Raise what is known to be wrong before an operation; ``begins``: it needs nothing that was sent before."""
        runtime, gpu = self._runtime, self._gpu
        if gpu is not None:
            gpu.take_report()
        runtime.check(phase)
        if gpu is not None:
            gpu.check_ids(phase)
        check_interrupted(phase, runtime)
        if runtime.stale and not begins:
            raise ConfigError(f"{phase}: {runtime.stale}, {_VOID}")

    def receive_dropped(self) -> None:
        """Receive what was sent in this epoch and whose recv hooks are gone. Raises what receiving does."""
        if self.present and not self._runtime.interrupted:
            for flight in self._flights:
                if flight.has_dropped:
                    flight.receive_dropped(self.capture)

    def check_number(self, phase: str, number: int, what: str) -> None:
        """Raise ConfigError unless ``what`` was sent in the present epoch."""
        if number != self._runtime.epoch:
            raise ConfigError(
                f"{phase}: the windows were rebuilt since {what} was sent (for a low-latency shape that they had no "
                f"room for, or because a rank was masked), {_VOID}"
            )

    def check_handle(self, phase: str, handle: object, owner: object) -> None:
        """Raise ConfigError unless a low-latency dispatch of ``owner`` returned ``handle`` in the present epoch."""
        if not isinstance(handle, LowLatencyHandle) or handle.owner is not owner:
            raise ConfigError(f"{phase}: the handle must be what low-latency dispatch of the same Buffer returned")
        self.check_number(phase, handle.epoch, "the dispatch of this handle")

    def make_room(
        self,
        phase: str,
        plan: LowLatencyPlan,
        check: Callable[[], None],
        compile: Callable[[], object],
        *,
        ahead: bool = False,
    ) -> None:
        """Have windows with room for ``plan``, rebuilt on all ranks where these have none.

        Args:
            check: raises ConfigError when this rank cannot serve ``plan``.
            compile: compiles what its operations need, on all ranks once they agree.
            ahead: no operation begins yet. Where there is room nothing is done, which no rank counts: one that asks for
                other windows meanwhile may be further on in the same calls.

        Raises:
            ConfigError: a rank cannot serve or compile it, captures a graph or has an operation in flight; on every
                rank, and the group stays usable.
        """
        runtime = self._runtime
        if plan in self._fitting and not runtime.stale and (ahead or not runtime.rebuild_requested):
            return
        room = None if runtime.stale else runtime.layout.low_latency
        # what is wrong on this rank alone is told to the others, who would wait for it
        objection = ""
        try:
            check()
            why = runtime.stale or f"the windows have no room for {plan}"
            if room is not None and room.holds(plan):
                if ahead or not runtime.rebuild_requested:
                    self._fitting.add(plan)
                    return
                why = "another rank asks for other windows"
            if self.capturing:
                raise ConfigError(f"{phase}: {why}, and a graph is being captured. {RESERVE_FIRST}")
            if self.present and not runtime.interrupted and any(flight.count for flight in self._flights):
                raise ConfigError(f"{phase}: {why}, and an operation is in flight. {RECEIVE_FIRST}")
        except ConfigError as error:
            objection = str(error)
        runtime.rebuild(plan, objection, compile)
        self._fitting.add(plan)

    def enter(self) -> bool:
        """Begin in the windows that are there; True when they are new to this mode: every counter restarts."""
        if self.number == self._runtime.epoch:
            return False
        self.number = self._runtime.epoch
        self.has_compiled = False
        for flight in self._flights:
            flight.clear()
        return True

    def compile_together(self, compile: Callable[[], object]) -> None:
        """``compile`` on all ranks, before their first operation in these windows; see ``Runtime.compile_together``."""
        self._runtime.compile_together(compile)
        self.has_compiled = True

    def operation(self, phase: str, flight: InFlight | None = None, plan: LowLatencyPlan | None = None) -> Operation:
        """What goes around sending an operation, which counts as begun; ``plan``: of one of low latency."""
        self._runtime.begin_operation(plan, flight is not None and flight.combines)
        return Operation(self, phase, flight)

    def call_off(self, phase: str, error: Exception) -> None:
        """An error of the system's, or of the caller's own, has ended an operation that the other ranks wait in: all of
        them refuse it at once, and go on in a new epoch. On this rank the caller's own error goes on.

        Nothing for an ``error`` of ours, which the others know of, and where kernels run on a device, whose hosts are
        not told before the deadline.

        Raises:
            ConfigError: on every rank; here where the process has run short of something. PeerError: a rank did not
                take part.
        """
        if isinstance(error, UcclEpError) or self._gpu is not None:
            return
        short = _is_shortage(error)
        step = "leave this process more memory and descriptors, or give it fewer tokens at once"
        try:
            self._runtime.call_off(
                f"{phase} ended with {type(error).__name__}: {str(error).partition(chr(10))[0]}. Next step: "
                f"{step if short else 'read the log of that rank: the error is none of this package'}"
            )
        except ConfigError as refusal:
            if short:
                raise refusal from error
        except UcclEpError as refusal:
            raise refusal from error

    def interrupt(self, phase: str, error: BaseException) -> None:
        """``error`` has ended an operation: some peers may have its message and others not, so that it can be neither
        repeated nor skipped. Of what is captured, nothing has run."""
        captured = False
        # a device that has failed answers this with its failure, and then nothing of a capture is of use
        with contextlib.suppress(RuntimeError):
            captured = self.capturing
        if not captured:
            self._runtime.interrupt(f"{phase} ({type(error).__name__}: {error}".rstrip(": ") + ")")


def check_interrupted(phase: str, runtime: Runtime) -> None:
    """Raise UcclEpError where an operation of this epoch, of whichever mode, has ended early on this rank; no more once
    the next one must begin in another epoch."""
    if runtime.interrupted and not runtime.stale:
        raise UcclEpError(
            f"{phase}: an earlier {runtime.interrupted} was interrupted after part of it may have been sent, so the "
            f"ranks no longer agree on what comes next. {AFTER_INTERRUPTION}"
        )


def _is_shortage(error: Exception) -> bool:
    """Whether the process has no memory, descriptor or thread left."""
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        return error.errno in _SHORT
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _SHORT_WORDS)
