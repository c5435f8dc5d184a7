"""How an operation on a device is launched: at once or in two halves with a recv hook, and at most two in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ..errors import ConfigError, UcclEpError
from ..handles import EventOverlap
from ..kernels.interface import KernelLaunch
from .streams import StreamOrder

__all__ = ["Hook", "InFlight", "launch"]

Hook = Callable[[], None]


class InFlight:
    """Operations of a phase that were launched and whose receive was not; the host's count, in launch order.

    A slot is used again by the operation after next, so that one must have been received.

    Args:
        phase: words for messages, "low-latency dispatch".
        words: what several of them are called.
    """

    def __init__(self, phase: str, words: str) -> None:
        self.phase = phase
        self._words = words
        self._next = 0
        self._open: set[int] = set()
        self._failed = ""

    @property
    def count(self) -> int:
        """Operations in flight."""
        return len(self._open)

    def check_room(self) -> None:
        """Raises ConfigError while the operation before last is in flight."""
        if any(number <= self._next - 2 for number in self._open):
            raise ConfigError(
                f"{self.phase}: {self.count} {self._words} are in flight and the one before last is not received: at "
                "most two at a time. Call its recv hook first"
            )

    def start(self) -> int:
        """A new operation's number."""
        self._open.add(self._next)
        self._next += 1
        return self._next - 1

    def end(self, number: int) -> None:
        """Its receive is launched."""
        self._open.discard(number)

    def give_up(self, number: int, error: BaseException, captured: bool) -> None:
        """The launch of the latest operation raised, so no hook will receive it.

        Args:
            captured: a graph was being captured, so nothing of it has run.
        """
        self._open.discard(number)
        self._next = number
        if not captured:
            self._failed = f"{self.phase} ({type(error).__name__}: {error})"

    def check_whole(self, phase: str) -> None:
        """Raises UcclEpError when an operation was given up after part of it may have run."""
        if self._failed:
            # some peers may have its message and others not: it can be neither repeated nor skipped
            raise UcclEpError(
                f"{phase}: an earlier {self._failed} was interrupted after part of it may have been sent, so ranks no "
                "longer agree on what comes next. Next step: close this Buffer on this rank and mask the rank on all "
                "others, or close it everywhere and build the group again"
            )

    def clear(self) -> None:
        """Counters start again with a epoch."""
        self._open.clear()
        self._next = 0
        self._failed = ""


def _all_of(launches: Iterable[KernelLaunch]) -> Callable[[], None]:
    def run() -> None:
        for one in launches:
            one.run()

    return run


def launch(
    order: StreamOrder,
    flight: InFlight,
    send: Sequence[KernelLaunch],
    receive: Sequence[KernelLaunch],
    used: Sequence[torch.Tensor],
    *,
    before_receive: Callable[[], None],
    received: Callable[[], None],
    async_finish: bool,
    return_recv_hook: bool,
) -> tuple[EventOverlap, Hook | None]:
    """Launch an operation, or its first half.

    Args:
        flight: of its phase.
        used: tensors that its kernels touch.
        before_receive: called by the hook before it launches; raises when the receive makes no sense any more.
        received: called once the receive is launched.
        async_finish: the current stream does not wait: the caller waits for the event.
        return_recv_hook: launch the first half only; the hook launches the second, once. It can be called again after
            it raised.

    Returns:
        The event of what was launched, and the hook or None.

    What the launch raises, it raises; ``flight.check_whole`` then refuses what comes later.
    """
    number = flight.start()
    try:
        if return_recv_hook:
            event = order.run(_all_of(send), used, own_stream=False, finish=True)
        else:
            event = order.run(_all_of([*send, *receive]), used, own_stream=True, finish=not async_finish)
    except BaseException as error:
        flight.give_up(number, error, order.capturing)
        raise
    if not return_recv_hook:
        flight.end(number)
        received()
        return event, None
    pending = True

    def hook() -> None:
        nonlocal pending
        if not pending:
            return
        before_receive()
        order.run(_all_of(receive), used, own_stream=False, finish=True)
        pending = False
        flight.end(number)
        received()

    return event, hook
