"""How a rank stands, for who looks at it from outside: whether it goes on, what it does, and for whom it waits."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..control_plane.reports import Wait

if TYPE_CHECKING:
    from .watch import PlaneWatch

__all__ = ["STATES", "WELL", "WaitLog", "state_of"]

_log = logging.getLogger("uccl_ep_serving")

#: What :func:`state_of` says: it goes on; its windows are being built; the next operation begins in new ones; there are
#: lost ranks that it has not masked; an operation or a proxy has failed; it cannot go on; it takes part no more; it is
#: closed.
STATES = ("ok", "rebuilding", "stale", "lost", "failed", "broken", "evicted", "closed")
#: Those in which a rank goes on, or has ended in good order.
WELL = ("ok", "rebuilding", "stale", "closed")

#: The share of the deadline after which a wait is told in the log, and the least seconds.
_LONG, _LEAST = 0.1, 1.0


def state_of(watch: PlaneWatch) -> tuple[str, str]:
    """One of STATES, and why in words. Any thread."""
    liveness, plane = watch.liveness, watch.plane
    if watch.closed:
        return "closed", ""
    if liveness.stopped:
        return "evicted", liveness.stopped
    if why := watch.broken or watch.short:
        return "broken", why
    if lost := liveness.lost_unmasked:
        return "lost", "; ".join(f"rank {peer}: {liveness.how_gone(peer)}" for peer in lost)
    if plane is None or plane.space is None:
        return "rebuilding", watch.stale
    if plane.service is not None and (death := plane.service.death):
        return "failed", death
    if watch.stale:
        return "stale", watch.stale
    if plane.space.failed:
        return "failed", str(plane.space.failure(plane.space.phase))
    return "ok", ""


class WaitLog:
    """Samples of for whom one rank waits, twice a second or more often. They name a straggler: that one waits for
    nobody, and its own operations look fast.

    Args:
        rank: this one.

    Writer: the thread that reads the control connections. Readers: any.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._samples = 0
        self._by_peer: Counter[int] = Counter()
        #: The operation in which a wait was seen last, and that wait.
        self._last: tuple[tuple[int, int], Wait] | None = None
        #: The operation that waits, None while none does; since when (``time.monotonic()``); whether that was told.
        self._operation: tuple[int, int] | None = None
        self._since = 0.0
        self._told = False

    def sample(self, wait: Wait | None, operation: tuple[int, int], timeout: float) -> None:
        """Count for whom this rank waits now; a wait of a tenth of the deadline is told in the log, once.

        Args:
            operation: epoch and number of the latest.
            timeout: seconds of the deadline.
        """
        self._samples += 1
        if wait is None:
            self._operation = None
            return
        self._by_peer[wait.peer] += 1
        self._last = operation, wait
        now = time.monotonic()
        if operation != self._operation:
            self._operation, self._since, self._told = operation, now, False
        elif not self._told and now - self._since > max(_LONG * timeout, _LEAST):
            self._told = True
            counts = f", {wait.arrived} of {wait.expected} messages have come" if wait.arrived >= 0 else ""
            _log.warning(
                "rank %d has waited %.0f s for rank %d (%s%s). Next step: look at that rank, by `uccl-ep top` on its "
                "host and in its log",
                self._rank,
                now - self._since,
                wait.peer,
                wait.phase or "an operation",
                counts,
            )

    def last(self, operation: tuple[int, int]) -> Wait | None:
        """The latest wait that was seen in ``operation``, None for none."""
        return self._last[1] if self._last is not None and self._last[0] == operation else None

    def as_dict(self) -> dict[str, Any]:
        """Samples so far, and of these, by peer, those in which this rank waited for it; the seconds since the first of
        them in the operation that waits now, 0 while none does."""
        seconds = time.monotonic() - self._since if self._operation is not None else 0.0
        by_peer = {str(peer): count for peer, count in self._by_peer.copy().items()}
        return {"samples": self._samples, "by_peer": by_peer, "seconds": round(seconds, 3)}
