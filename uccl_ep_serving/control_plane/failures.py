"""Who takes part, who is lost, and what the host raises for it.

What goes wrong is seen by different threads of different ranks: a connection that closes, an operation that reaches its
deadline, a device that fails. All of it goes into :class:`.membership.Membership`, which comes to the same answer on
all ranks that go on. The thread that reads the control connections carries its messages; the host waits here for the
answer and raises it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Set

import numpy as np
import numpy.typing as npt

from ..errors import Evicted, PeerError, PeerLost, PeerTimeout, UcclEpError, after_eviction, after_loss, after_silence
from .membership import LIMIT_SECONDS, LostRank, Membership
from .reports import Note, Report, Wait

__all__ = ["LAST_MESSAGES_SECONDS", "Liveness"]

#: What a rank that closes its Buffer had sent before is waited for at most this many seconds.
LAST_MESSAGES_SECONDS = 2.0
#: An answer is there after this time even where the thread that reads gets no core for a while.
_MOST_SECONDS = 10 * LIMIT_SECONDS


class Liveness:
    """Who of a group takes part, as all ranks that go on have agreed.

    Args:
        rank, ranks: of the group.
        wake: has the thread that reads the control connections call :meth:`advance`.

    Attributes:
        changed: held while anything here changes, and notified then.
        number: of the agreed group.
        lost: ranks that are members of it no more, and why, in the order in which that was agreed on.
        stopped: why this rank takes part no more, in words; "" while it does.
        departed: peers that said goodbye, and the ``time.monotonic()`` instant.
            Writer of all of these: the thread that reads the control connections. Readers: any.
        mask: int32[ranks], 1 = this rank has masked the peer. Writer: :meth:`mask_out`, between operations. Readers:
            kernels of every epoch, the host.
        masked: the same as a set.
        waits_for: for whom this rank waits at present, and whether it stood still in that time.
        leaves: in words, that this rank closes its Buffer; "" while it does not.
        on_trouble: called once something has failed, by whichever thread learns of it first.
    """

    def __init__(self, rank: int, ranks: int, wake: Callable[[], None] = lambda: None) -> None:
        self.changed = threading.Condition()
        self.number = 0
        self.lost: dict[int, LostRank] = {}
        self.stopped = ""
        self.departed: dict[int, float] = {}
        self.mask: npt.NDArray[np.int32] = np.zeros(ranks, dtype=np.int32)
        self.masked: frozenset[int] = frozenset()
        self.waits_for: Callable[[], tuple[Wait | None, bool]] = lambda: (None, False)
        self.leaves: Callable[[], str] = str
        self.on_trouble: Callable[[], None] = lambda: None
        self._wake = wake
        self._rank = rank
        self._others = frozenset(range(ranks)) - {rank}
        self._membership = Membership(rank, ranks, self._begin)

    def _begin(self) -> Report:
        """Something has failed: what this rank can say of itself."""
        self.on_trouble()
        wait, stood_still = self.waits_for()
        return Report(dead=frozenset(self.departed), failed=self.leaves(), waits=wait, stood_still=stood_still)

    def mask_out(self, peer: int) -> None:
        """Mask ``peer``. One that is no lost rank becomes one by that, on every rank."""
        with self.changed:
            self.mask[peer] = 1
            self.masked |= {peer}
        self.observe(lambda report: report.grown(accused={peer}, causes={peer: "has masked it"}))

    @property
    def present(self) -> frozenset[int]:
        """Other ranks that are not masked."""
        return self._others - self.masked

    # -- what is seen and heard -----------------------------------------------------------------------------------

    def observe(self, grow: Callable[[Report], Report], number: int | None = None) -> None:
        """This rank has seen a failure; see :meth:`.Membership.observe`. Any thread."""
        with self.changed:
            self._membership.observe(grow, number)
        self._wake()

    def hear(self, by: int, payload: bytes) -> None:
        """Rank ``by`` says something of who goes on. Raises ValueError when it is malformed."""
        note = Note.decode(by, payload, len(self.mask))
        with self.changed:
            self._membership.hear(by, note)

    def note_departed(self, peer: int) -> None:
        """``peer`` said goodbye."""
        with self.changed:
            self.departed[peer] = time.monotonic()
            if self._membership.deciding:
                self._membership.observe(lambda report: report.grown(dead={peer}))
            self.changed.notify_all()

    @property
    def deciding(self) -> bool:
        """Whether something has failed and it is not agreed on yet who is lost."""
        membership = self._membership
        return membership.deciding or (membership.number, membership.stopped) != (self.number, self.stopped)

    def advance(self) -> list[tuple[int, bytes]]:
        """What is to be sent now, by peer, in this order; :meth:`publish` follows. For the thread that reads."""
        with self.changed:
            return [(peer, note.encode()) for peer, note in self._membership.advance(time.monotonic())]

    @property
    def has_to_say(self) -> bool:
        """Whether :meth:`advance` has to be called."""
        return self.deciding or self._membership.owes

    def end(self) -> None:
        """Nothing is carried any more: who waits for an answer has it."""
        with self.changed:
            self._membership.end("this Buffer was closed meanwhile")
            self.stopped = self._membership.stopped
            self.changed.notify_all()

    def publish(self) -> list[int]:
        """Let the host see what was agreed on; the ranks that are lost since the last call."""
        with self.changed:
            membership = self._membership
            news = [peer for peer in membership.lost if peer not in self.lost]
            self.lost.update((peer, membership.lost[peer]) for peer in news)
            self.number, self.stopped = membership.number, membership.stopped
            self.changed.notify_all()
            return news

    # -- what the host asks ---------------------------------------------------------------------------------------

    @property
    def any_heard(self) -> bool:
        """True once anything was heard; cheap, for who asks before every operation."""
        return bool(self.lost or self.departed or self.deciding or self.stopped)

    @property
    def lost_unmasked(self) -> list[int]:
        """Lost peers that this rank has not masked, in the order in which that was agreed on."""
        return [peer for peer in list(self.lost) if peer not in self.masked]

    @property
    def absent(self) -> frozenset[int]:
        """Peers that take part in nothing any more."""
        return frozenset({*self.lost, *self.departed})

    def has_fallen_silent(self, peer: int) -> bool:
        """True when ``peer`` left so long ago that whatever it sent before has arrived."""
        since = self.departed.get(peer)
        return since is not None and peer not in self.masked and time.monotonic() > since + LAST_MESSAGES_SECONDS

    def is_hopeless(self, missing: Set[int]) -> bool:
        """Whether a step for which the parts of ``missing`` are awaited will not end."""
        return bool(missing and (self.stopped or self.deciding or self.lost_unmasked or missing & self.departed.keys()))

    def how_gone(self, peer: int) -> str:
        """In words how ``peer`` came to be absent, "" when nothing is known of that."""
        if peer not in self.lost:
            return "it closed its Buffer" if peer in self.departed else ""
        return self._words(peer, self.lost[peer])

    def _words(self, peer: int, lost: LostRank) -> str:
        loss, by, report = lost
        rank = self._named(by)
        cause = lost.cause(peer)
        if loss is None:
            return f"{rank} goes on without it"
        if loss.rule == "ended" and peer in self.departed:
            return "it closed its Buffer"
        if loss.rule == "ended":
            return f"its process ended, as {rank} saw{cause and ': '}{cause}"
        if loss.rule == "failed":
            return f"it failed ({report.failed if report is not None else cause})"
        if loss.rule == "accused":
            return f"{rank} {cause}"
        if loss.rule == "unreachable":
            answers = (
                "nothing is answered there: one of the two is stopped, its host is gone, or no packet gets through"
            )
            if by == peer and report is not None:
                return f"it has no connection to {self._named(min(report.down))}: {cause or answers}"
            return f"{rank} has no connection to it: {cause or answers}"
        return f"it is silent, and has not begun the operation in which {rank} waits for it"

    def _named(self, rank: int) -> str:
        return "this rank" if rank == self._rank else f"rank {rank}"

    def check(self, phase: str) -> None:
        """Raise what was agreed on when a peer that is not masked is lost. Waits for it where something has failed.

        Raises:
            PeerLost, PeerTimeout: naming all lost ranks that are not masked. Evicted: this rank takes part no more.
        """
        if not (self.deciding or self.lost_unmasked or self.stopped):
            return
        error = self.answer(phase)
        try:
            if error is not None:
                raise error
        finally:
            del error  # this frame is in the traceback: a cycle would keep windows mapped

    def wait_for_news(self, seconds: float) -> None:
        """Wait until a failure is heard of, at most ``seconds``."""
        with self.changed:
            self.changed.wait_for(lambda: self.deciding or self.lost_unmasked or self.stopped or self.departed, seconds)

    def answer(self, phase: str) -> UcclEpError | None:
        """What was agreed on, as the exception to raise, None when nobody is lost; waits for it, bounded."""
        with self.changed:
            self.changed.wait_for(lambda: not self.deciding, _MOST_SECONDS)
            if self.stopped or self.deciding:
                return self._eviction(phase)
            return self._loss(phase) if self.lost_unmasked else None

    def _eviction(self, phase: str) -> Evicted:
        membership = self._membership
        why = self.stopped or f"the thread that reads its control connections has not run for {_MOST_SECONDS:g} s"
        if membership.own_loss is not None:
            why += f" ({self._words(self._rank, membership.own_loss)})"
        if (wait := membership.own_wait) is not None:
            why += f". It had waited for rank {wait.peer} in {wait.phase}{wait.counts}"
        text = f"{phase}, rank {self._rank}: this rank takes part no more: {why}. {after_eviction()}"
        return Evicted(text, by=membership.stopped_by)

    def _loss(self, phase: str) -> PeerError:
        lost = self.lost_unmasked
        peer = lost[0]
        loss, by, report = self.lost[peer]
        others = f"; and rank {', rank '.join(map(str, lost[1:]))}" if lost[1:] else ""
        where, how = f"{phase}, rank {self._rank}", self.how_gone(peer)
        wait = report.waits if report is not None else None
        channel = wait.channel if wait is not None and wait.peer == peer else -1
        cause = self.lost[peer].cause(peer)
        silent = loss is not None and loss.rule in ("silent", "unreachable") and not cause
        if silent and wait is not None and wait.peer == peer:
            return PeerTimeout(
                f"{where}: rank {peer} is silent ({how}; {self._named(by)} waits in {wait.phase}{wait.counts}{others})"
                f". Likely cause: rank {peer} has not made the same call, is stuck, or the network drops its traffic. "
                f"{after_silence(peer)}",
                peer=peer,
                peers=lost,
                phase=phase,
                channel=channel,
                arrived=wait.arrived,
                expected=wait.expected,
            )
        text = f"{where}: rank {peer} is gone ({how}{others}). {after_loss(peer)}"
        return PeerLost(text, peer=peer, peers=lost, phase=phase, channel=channel, cause=cause)

    # -- what the host has seen -----------------------------------------------------------------------------------

    def settle(self, error: PeerError, number: int | None = None) -> UcclEpError:
        """What to raise in place of ``error``, once all ranks that go on agree on who is lost.

        Args:
            error: what has ended an operation, or a step.
            number: of the group in which the operation began.
        """
        peer, phase = error.peer, error.phase or "operation"
        if peer in self.present and peer not in self.lost:
            self.observe(lambda report: _add(report, error, peer in self.departed), number)
        answer = self.answer(phase)
        if isinstance(answer, PeerTimeout) and isinstance(error, PeerTimeout) and answer.peer == peer:
            # its own words say more of what this rank waited for
            head, mark, tail = str(error).partition(" Likely cause:")
            if (how := self.how_gone(peer)) not in head:
                error.args = (f"{head.rstrip('.')} ({how}).{mark}{tail}",)
            error.peers = answer.peers
            return error
        return answer or error

    def fail(self, why: str) -> None:
        """An operation failed for a reason of this rank's own, a NIC or a thread: the others go on without it."""
        self.observe(lambda report: report.grown(failed=why))

    def accuse(self, peer: int, why: str, phase: str) -> UcclEpError | None:
        """``peer`` cannot take part, and ``why``, after "this rank"; what was agreed on then."""
        self.observe(lambda report: report.grown(accused={peer}, causes={peer: why}))
        return self.answer(phase)


def _add(report: Report, error: PeerError, departed: bool) -> Report:
    """``report`` with what ``error`` says."""
    if departed:
        return report.grown(dead={error.peer})
    if isinstance(error, PeerTimeout):
        wait = Wait(error.peer, error.phase, error.channel, error.arrived, error.expected)
        return report.grown(gave_up=True, waits=wait)
    cause = error.cause if isinstance(error, PeerLost) else ""
    return report.grown(down={error.peer}, causes={error.peer: cause})
