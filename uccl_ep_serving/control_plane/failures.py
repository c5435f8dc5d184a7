"""Who takes part, who has failed, and whom a rank holds responsible when an operation fails.

When one rank falls silent, another one waits for it, a third waits for that one, and whichever raises first leaves the
others waiting for itself. So a rank whose operation fails reports to all peers because of whom, and a rank whose
deadline passes asks the peer that it waits for. All of them then name the rank at the root, not the messenger.

Two functions decide whom this rank names, and nothing else does: :meth:`Liveness.culprit` from what was heard so far,
and :func:`trace_root`, which follows reports from the peer that an error names to the rank where they end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Set

import numpy as np
import numpy.typing as npt

from ..errors import PeerError, PeerLost, PeerTimeout, UcclEpError, after_loss
from .failure_report import FailureReport
from .frames import ANSWER, FAILED, QUESTION, Frame, send_frame
from .links import Link

__all__ = ["Liveness", "RootCause", "trace_root"]

#: A rank that leaves is often one that noticed the loss of another: this long the lost one is looked for.
_ROOT_SECONDS = 0.3
#: A peer whose process runs says within this time for whom it waits.
_ANSWER_SECONDS = 0.5
#: What a rank that said goodbye, or failed, had sent before is waited for at most this many seconds.
_LAST_MESSAGES_SECONDS = 2.0


class Liveness:
    """Who of a group takes part, as far as this rank has heard.

    Args:
        rank, ranks: of the group.

    Attributes:
        changed: held while anything here changes, and notified then.
        lost: peers whose connection closed without a goodbye, in the order in which that was seen.
        endings: of lost peers, why their connections ended, where that says more than that they did.
        departed: peers that said goodbye, and the ``time.monotonic()`` instant.
        masked_by: masked ranks, and the peers that masked them; this rank itself may be among the masked.
        reports: by rank, because of whom its present operation failed; for this rank, why it reported that.
            Writer of all of these: the thread that reads the control connections, and for the own report the caller
            of an operation. Readers: any.
        mask: int32[ranks], 1 = this rank has masked the peer. Writer: :meth:`mask_out`, between operations. Readers:
            kernels of every epoch, the host.
        masked: the same as a set. What masked peers say of others does not count.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.changed = threading.Condition()
        self.lost: list[int] = []
        self.endings: dict[int, str] = {}
        self.departed: dict[int, float] = {}
        self.masked_by: dict[int, list[int]] = {}
        self.reports: dict[int, FailureReport] = {}
        self.mask: npt.NDArray[np.int32] = np.zeros(ranks, dtype=np.int32)
        self.masked: frozenset[int] = frozenset()
        self._rank = rank
        self._others = frozenset(range(ranks)) - {rank}

    def mask_out(self, peer: int) -> None:
        """Mask ``peer``; the failure that this rank has reported is settled by that."""
        with self.changed:
            self.mask[peer] = 1
            self.masked |= {peer}
            self.reports.pop(self._rank, None)

    @property
    def present(self) -> frozenset[int]:
        """Other ranks that are not masked."""
        return self._others - self.masked

    # -- what is heard ------------------------------------------------------------------------------------------

    def note_lost(self, peer: int, ending: str) -> None:
        """The connection to ``peer`` closed without a goodbye."""
        with self.changed:
            if ending:
                self.endings[peer] = ending
            self.lost.append(peer)
            self.changed.notify_all()

    def note_departed(self, peer: int) -> None:
        """``peer`` said goodbye."""
        with self.changed:
            self.departed[peer] = time.monotonic()
            self.changed.notify_all()

    def note_masked(self, by: int, peer: int) -> None:
        """Rank ``by`` has masked ``peer``."""
        with self.changed:
            self.masked_by.setdefault(peer, []).append(by)
            self.changed.notify_all()

    @property
    def any_heard(self) -> bool:
        """True once anything was heard; cheap, for who asks before every operation."""
        return bool(self.lost or self.departed or self.masked_by or self.reports)

    @property
    def lost_unmasked(self) -> list[int]:
        """Lost peers that this rank has not masked, in the order in which they were lost."""
        return [peer for peer in list(self.lost) if peer not in self.masked]

    @property
    def masked_by_others(self) -> list[int]:
        """Peers that ranks which take part have masked, and this one has not."""
        masked = self.masked
        return [
            peer
            for peer, maskers in list(self.masked_by.items())
            if peer != self._rank and peer not in masked and not masked.issuperset(maskers)
        ]

    def report_of(self, peer: int) -> FailureReport | None:
        """Because of whom ``peer`` has failed, unless one of the two is masked."""
        report = self.reports.get(peer)
        return None if report is None or {peer, report.peer} & self.masked else report

    @property
    def failed(self) -> list[int]:
        """Peers whose operation has failed because of a rank that is not masked."""
        return [peer for peer in list(self.reports) if peer != self._rank and self.report_of(peer)]

    def has_fallen_silent(self, peer: int) -> bool:
        """True when ``peer`` left or failed so long ago that whatever it sent before has arrived."""
        report = self.report_of(peer)
        since = self.departed.get(peer) if report is None else report.heard
        return since is not None and peer not in self.masked and time.monotonic() > since + _LAST_MESSAGES_SECONDS

    @property
    def cut_off(self) -> frozenset[int]:
        """Peers that are lost, that others have masked, or that have masked this rank."""
        return frozenset({*self.lost, *self.masked_by_others, *self.masked_by.get(self._rank, ())} - {self._rank})

    @property
    def absent(self) -> frozenset[int]:
        """Peers that take part in no step any more."""
        return self.cut_off | self.departed.keys() | frozenset(self.failed)

    def blocking(self, expected: Set[int], received: Set[int]) -> frozenset[int]:
        """Peers because of which a step with ``expected`` may never end; none when all of them have been received."""
        missing = expected - received
        if not missing:
            return frozenset()
        # A peer that was lost after its own part keeps the others away all the same: they may have noticed before they
        # came here. One that said goodbye has seen the step to its end.
        return frozenset(missing & self.absent | expected & self.cut_off)

    def how_gone(self, peer: int) -> str:
        """In words how ``peer`` came to be absent, "" when nothing is known of that."""
        maskers = [masker for masker in list(self.masked_by.get(peer, ())) if masker not in self.masked]
        report = self.report_of(peer)
        if peer in self.lost:
            ending = self.endings.get(peer, "")
            return f"its control connection closed without a goodbye{ending and ': '}{ending}"
        if peer in self.masked_by.get(self._rank, ()):
            return "it has masked this rank"
        if maskers:
            return f"rank {maskers[0]} has masked it"
        if report is not None:
            cause = f" ({report.cause})" if report.cause else ""
            whom = "this rank" if report.peer == self._rank else f"rank {report.peer}"
            return f"it failed{cause}" if report.peer == peer else f"it has given up, because of {whom}{cause}"
        return "it closed its Buffer" if peer in self.departed else ""

    def wait_for_report(self, peer: int) -> FailureReport | None:
        """Because of whom ``peer``, of which something else says that it is gone, has failed; waits a moment for it to
        say so."""
        with self.changed:
            self.changed.wait_for(lambda: peer in self.absent, _ROOT_SECONDS)
            return self.report_of(peer)

    # -- deciding -----------------------------------------------------------------------------------------------

    def culprit(self, candidates: frozenset[int]) -> int:
        """The rank to hold responsible, from what was heard: a lost one before one that others have masked, that
        before one that has masked this rank, that before one that has failed because of another, and that before one
        that left in good order.

        Args:
            candidates: without masked ones; only of those that left in good order it matters who is among them.

        Returns:
            A rank, -1 when nobody who matters is absent.
        """
        ranked = [*self.lost, *self.masked_by_others, *sorted(self.cut_off), *self.failed]
        return next((peer for peer in ranked if peer not in self.masked), min(self.absent & candidates, default=-1))

    def raise_if_absent(self, phase: str, *, among: frozenset[int] | None = None, patience: float = 0.0) -> None:
        """Raise PeerLost naming the :meth:`culprit` when a peer that is not masked takes part no more.

        Args:
            phase: words for the message.
            among: only when one of these is absent; by default any.
            patience: seconds for which an absence that is not known yet is waited for.
        """
        with self.changed:
            candidates = self.present if among is None else among - self.masked
            self.changed.wait_for(lambda: self.absent & candidates, patience)
            if not self.absent & candidates:
                return
            self.changed.wait_for(lambda: (self.cut_off | {*self.failed}) - self.masked, _ROOT_SECONDS)
            peer = self.culprit(candidates)
            how = self.how_gone(peer)
        raise PeerLost(
            f"{phase}, rank {self._rank}: rank {peer} is gone ({how}). {after_loss(peer)}",
            peer=peer,
            phase=phase,
        )

    def check(self, phase: str) -> None:
        """Raise PeerLost when a peer is lost, has failed, or has been masked by another rank; who has left in good
        order may not be needed."""
        if self.lost_unmasked or self.masked_by_others or self.failed:
            self.raise_if_absent(phase)


def trace_root(
    rank: int,
    peer: int,
    report: FailureReport | None,
    next_report: Callable[[FailureReport], FailureReport | None],
) -> FailureReport | None:
    """The report that names the rank at the root, None when that is ``peer`` itself.

    Args:
        rank: this one.
        peer: whom an error of this rank names.
        report: for whom ``peer`` waits or because of whom it has failed, None for nobody.
        next_report: the same of the peer that a report names.
    """
    # By rank on the way, who named it. Where the way comes back to one of them (or to this rank), ranks wait for each
    # other, and the first of them on the way is named: it may have been late, and have only just begun.
    named_by: dict[int, FailureReport | None] = {rank: None, peer: None}
    while report is not None and report.peer not in named_by:
        peer = report.peer
        named_by[peer] = report
        report = next_report(report)
    if report is not None and report.by == report.peer:
        return report  # it has said itself what failed
    return named_by[peer if report is None else report.peer]


class RootCause:
    """Finds out because of whom an operation of this rank failed, and tells the others.

    Args:
        rank, ranks: of the group.
        liveness: what this rank has heard so far.

    Attributes:
        links: connections by peer. Writer: the mesh, once connected.
        waits_for: for whom an operation of this rank waits at present; called from the reader thread.
    """

    def __init__(self, rank: int, ranks: int, liveness: Liveness) -> None:
        self.links: Mapping[int, Link] = {}
        self.waits_for: Callable[[], FailureReport | None] = lambda: None
        self._rank = rank
        self._ranks = ranks
        self._liveness = liveness
        self._questions = 0
        #: By peer: number of the latest question that it answered, and the answer. Writer: the reader thread.
        self._answers: dict[int, tuple[int, FailureReport | None]] = {}

    def take(self, link: Link, frame: Frame) -> None:
        """Take a frame of kind FAILED, QUESTION or ANSWER. Raises ValueError when it is malformed."""
        if frame.kind == QUESTION:
            waits_for = self.waits_for()
            send_frame(link, ANSWER, frame.sequence, waits_for.encode() if waits_for is not None else b"")
            return
        report = FailureReport.decode(link.peer, frame.payload, self._ranks) if frame.payload else None
        with self._liveness.changed:
            if frame.kind == ANSWER:
                self._answers[link.peer] = (frame.sequence, report)
            elif report is not None:
                self._liveness.reports[link.peer] = report
            self._liveness.changed.notify_all()

    def resolve_cause(self, error: PeerError) -> PeerError:
        """Find the rank at the root of ``error`` and report it to every peer; returns the error that names it.

        For the failure of an operation: until this rank masks a peer, all its later ones fail because of the same one.
        Takes half a second when the silent peer answers nothing; else no more than a few round trips.
        """
        reported = self._liveness.report_of(self._rank)
        if reported is not None:
            return error if reported.peer in (error.peer, self._rank) else reported.error(error, self._rank)
        root, note = self._find_root(error)
        if note:
            error.args = (f"{error}. {note}",)
        named = error if root is None else root.error(error, self._rank)
        if named.peer in self.links:
            report = FailureReport.of(self._rank, named)
            self._send_report(report, keep=root or report)
        return named

    def report_local_failure(self, error: UcclEpError, phase: str) -> None:
        """Tell every peer, once, that an operation of this rank has failed for a reason of its own: a NIC, a thread."""
        if self._liveness.report_of(self._rank) is None:
            report = FailureReport(self._rank, self._rank, False, phase=phase, cause=str(error))
            self._send_report(report, keep=report)

    def _send_report(self, report: FailureReport, keep: FailureReport) -> None:
        with self._liveness.changed:
            self._liveness.reports[self._rank] = keep
        for link in self.links.values():
            send_frame(link, FAILED, body=report.encode())

    def _find_root(self, error: PeerError) -> tuple[FailureReport | None, str]:
        """Ask and read reports from the peer that ``error`` names on.

        Returns:
            The report that names the root, None when ``error`` does; and what the silent peer said, for the message.
        """
        peer, note, liveness = error.peer, "", self._liveness
        if peer not in self.links or peer in liveness.masked:
            return None, note
        silent = isinstance(error, PeerTimeout)
        report = liveness.report_of(peer) if silent else liveness.wait_for_report(peer)
        if silent and report is None:
            answered, report = self._ask(peer)
            if answered and report is None:
                note = f"Its process runs, and says that it waits for nobody: rank {peer} has not begun the operation"
            elif report is None:
                note = (
                    f"Rank {peer} answers nothing on its control connection either: its process is stopped, its host "
                    "is gone, or no packet gets through"
                )

        def next_report(report: FailureReport) -> FailureReport | None:
            # who has failed has asked already; who was lost is asked nothing
            nonlocal silent
            silent = silent and report.by not in liveness.reports
            return liveness.report_of(report.peer) or (self._ask(report.peer)[1] if silent else None)

        return trace_root(self._rank, peer, report, next_report), note

    def _ask(self, peer: int) -> tuple[bool, FailureReport | None]:
        """Whether ``peer`` answers, and for whom it waits or because of whom it has failed."""
        liveness = self._liveness
        self._questions += 1
        number = self._questions

        def answered() -> bool:
            return self._answers.get(peer, (0, None))[0] >= number

        send_frame(self.links[peer], QUESTION, number)
        with liveness.changed:
            liveness.changed.wait_for(lambda: answered() or peer in liveness.absent, _ANSWER_SECONDS)
            report = liveness.report_of(peer)
            if answered():
                report = report or self._answers[peer][1]
            return answered(), report
