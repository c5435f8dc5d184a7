"""Whose fault it is that an operation failed: ranks tell each other whom they blame, and ask whom they wait for.

When one rank falls silent, another one waits for it, a third waits for that one, and whichever gives up first leaves
the others waiting for itself. So a rank whose operation fails says because of whom, and a rank whose deadline passes
asks the peer that it waited for. All of them then name the rank at the root, not the messenger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..errors import PeerError, PeerTimeout, UcclEpError
from .failures import Absences, Verdict
from .frames import ANSWER, GAVE_UP, QUESTION, Frame, send_frame
from .links import Link

__all__ = ["Blame"]

#: A peer whose process runs says within this time for whom it waits.
_ANSWER_SECONDS = 0.5


class Blame:
    """The verdicts of one rank, and its questions to others.

    Args:
        rank, ranks: of the group.
        absences: what this rank has heard so far.

    Attributes:
        links: connections by peer. Writer: the mesh, once connected.
        waits_for: for whom an operation of this rank waits at present; called from the reader thread.
    """

    def __init__(self, rank: int, ranks: int, absences: Absences) -> None:
        self.links: Mapping[int, Link] = {}
        self.waits_for: Callable[[], Verdict | None] = lambda: None
        self._rank = rank
        self._ranks = ranks
        self._absences = absences
        self._questions = 0
        #: By peer: number of the latest question that it answered, and the answer. Writer: the reader thread.
        self._answers: dict[int, tuple[int, Verdict | None]] = {}

    def note(self, link: Link, frame: Frame) -> None:
        """Take a frame of kind GAVE_UP, QUESTION or ANSWER. Raises ValueError when it is malformed."""
        if frame.kind == QUESTION:
            waits_for = self.waits_for()
            send_frame(link, ANSWER, frame.sequence, waits_for.encode() if waits_for is not None else b"")
            return
        verdict = Verdict.decode(link.peer, frame.payload, self._ranks) if frame.payload else None
        with self._absences.changed:
            if frame.kind == ANSWER:
                self._answers[link.peer] = (frame.sequence, verdict)
            elif verdict is not None:
                self._absences.verdicts[link.peer] = verdict
            self._absences.changed.notify_all()

    def give_up(self, error: PeerError) -> PeerError:
        """Find the rank at the root of ``error`` and tell every peer; returns the error that names it.

        For the failure of an operation: until this rank masks a peer, all its later ones fail because of the same one.
        Takes half a second when the silent peer answers nothing; else no more than a few round trips.
        """
        mine = self._absences.verdict_of(self._rank)
        if mine is not None:
            return error if mine.peer in (error.peer, self._rank) else mine.error(error, self._rank)
        root, note = self._root_of(error)
        if note:
            error.args = (f"{error}. {note}",)
        named = error if root is None else root.error(error, self._rank)
        if named.peer in self.links:
            verdict = Verdict.of(self._rank, named)
            with self._absences.changed:
                self._absences.verdicts[self._rank] = root or verdict
            for link in self.links.values():
                send_frame(link, GAVE_UP, body=verdict.encode())
        return named

    def fall(self, error: UcclEpError, phase: str) -> None:
        """Tell every peer, once, that an operation of this rank has failed for a reason of its own: a NIC, a thread."""
        if self._absences.verdict_of(self._rank) is not None:
            return
        verdict = Verdict(self._rank, self._rank, False, phase=phase, cause=str(error))
        with self._absences.changed:
            self._absences.verdicts[self._rank] = verdict
        for link in self.links.values():
            send_frame(link, GAVE_UP, body=verdict.encode())

    def _root_of(self, error: PeerError) -> tuple[Verdict | None, str]:
        """Go from the peer that ``error`` names to the one that it blames or waits for, and on from there.

        Returns:
            The verdict that names the root, None when ``error`` does; and what the silent peer said, for the message.
        """
        peer, note = error.peer, ""
        if peer not in self.links or peer in self._absences.masked:
            return None, note
        asking = isinstance(error, PeerTimeout)
        verdict = self._absences.verdict_of(peer) if asking else self._absences.news_of(peer)
        if asking and verdict is None:
            answered, verdict = self._ask(peer)
            if answered and verdict is None:
                note = f"Its process runs, and says that it waits for nobody: rank {peer} has not begun the operation"
            elif verdict is None:
                note = (
                    f"Rank {peer} answers nothing on its control connection either: its process is stopped, its host "
                    "is gone, or no packet gets through"
                )
        # By rank on the way, who named it. Where the way comes back to one of them (or to this rank), ranks wait for
        # each other, and the first of them on the way is named: it may have been late, and have only just begun.
        named_by: dict[int, Verdict | None] = {self._rank: None, peer: None}
        while verdict is not None and verdict.peer not in named_by:
            peer = verdict.peer
            named_by[peer] = verdict
            # a rank that has given up has asked already
            asking = asking and verdict.by not in self._absences.verdicts
            verdict = self._absences.verdict_of(peer) or (self._ask(peer)[1] if asking else None)
        if verdict is not None and verdict.by == verdict.peer:
            return verdict, note  # it has said itself what failed
        return named_by[peer if verdict is None else verdict.peer], note

    def _ask(self, peer: int) -> tuple[bool, Verdict | None]:
        """Whether ``peer`` answers, and for whom it waits or because of whom it has given up."""
        absences = self._absences
        self._questions += 1
        number = self._questions

        def answered() -> bool:
            return self._answers.get(peer, (0, None))[0] >= number

        send_frame(self.links[peer], QUESTION, number)
        with absences.changed:
            absences.changed.wait_for(lambda: answered() or peer in absences.absent(), _ANSWER_SECONDS)
            verdict = absences.verdict_of(peer)
            if answered():
                verdict = verdict or self._answers[peer][1]
            return answered(), verdict
