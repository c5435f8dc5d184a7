"""How the survivors of a failure agree on one group, without a coordinator: a machine of messages and time alone.

Each rank tells the others what it has seen (:class:`.reports.Report`). From that it computes who should go on
(:func:`.verdict.find_lost`) and proposes that group. Once all members of a group propose the same one, each *promises*
to go on with it, and once all have promised, it is agreed on. Groups carry rising numbers, and each one is a part of
the last: so all ranks see the same groups in the same order, and none acts on another one.

That stays true when ranks die, or connections fail, between any two of these messages, because

* a rank that has promised a group remembers it, tells it in whatever it says next, and goes on in another group only
  where that is a majority of the group it promised, too (Lotem, Keidar and Dolev, PODC 1997: what is not known to have
  failed counts as if it had succeeded);
* a promise goes first to the ranks that it leaves out. So whoever has heard all that a dead rank said, and no promise,
  knows that nobody counts on one: that is why the dead need not be counted as members;
* a rank that no group is agreed on with in time stops, and says so.

Nothing here waits, sends or looks at a clock: the caller hands in what was heard and the time, and takes what is to be
sent. All of it belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from .reports import Note, Promise, Report, Wait
from .verdict import Loss, find_lost, may_go_on

__all__ = ["ANSWER_SECONDS", "LIMIT_SECONDS", "LostRank", "Membership"]

#: A rank whose process runs answers within this time: the thread that reads its connections does nothing else.
ANSWER_SECONDS = 0.4
#: A rank that no group is agreed on with for this long stops.
LIMIT_SECONDS = 1.0
#: While nothing is agreed on, every rank says something this often.
_REPEAT_SECONDS = 0.1
#: A report that its own rank cannot bring is passed on after this time, and after the second any that a peer lacks.
_RELAY_SECONDS, _RELAY_ALL_SECONDS = 0.02, 0.3
#: A connection that is down may be what is seen first of something else: that is waited for before it costs a rank.
_GRACE_SECONDS = 0.1
#: Longest step of the clock that counts: a rank that stood still itself waits again before it says anything of others.
_MOST_STEP_SECONDS = 0.05


class LostRank(NamedTuple):
    """Why a rank is a member no more.

    Attributes:
        loss: as all ranks that decided it see it; None where this rank was only told.
        by: the rank that saw it, or that told.
        report: of ``by``, if there is one.
    """

    loss: Loss | None
    by: int
    report: Report | None

    def cause(self, peer: int) -> str:
        """What the rank that saw it says of the loss of ``peer``, "" for nothing."""
        if self.report is None:
            return ""
        if self.loss is not None and self.loss.rule == "unreachable" and self.by == peer:
            return self.report.causes.get(min(self.report.down), "")
        return self.report.causes.get(peer, "")


class _News(NamedTuple):
    """What a rank has to say that nobody else can: its group, its report and proposal, the groups that it promised."""

    number: int
    report: Report | None
    proposal: frozenset[int] | None
    promised: tuple[tuple[int, frozenset[int]], ...]


class Membership:
    """One rank's part in it.

    Args:
        rank, ranks: of the group.
        begin: called when this rank first hears that something has failed, once for each group: who has left, whether
            this rank is about to, and for whom it waits.

    Attributes:
        number, members: of the agreed group.
        lost: ranks that are members no more, in the order in which that was agreed on.
        stopped: why this rank takes part no more, in words; "" while it does.
        stopped_by: the rank that said so, -1 when this rank stopped by itself.
        own_loss: why the others take this rank for lost, as far as it has heard.
    """

    def __init__(self, rank: int, ranks: int, begin: Callable[[], Report] = Report) -> None:
        self.number = 0
        self.members = frozenset(range(ranks))
        self.lost: dict[int, LostRank] = {}
        self.stopped = ""
        self.stopped_by = -1
        self.own_loss: LostRank | None = None
        self._rank = rank
        self._begin = begin
        #: What this rank has seen of the present members, whether it was told already or not.
        self._own = Report()
        #: By rank, what was said since something failed in the present group; empty while nothing has. Who is lost by
        #: that; None where it is to be found again.
        self._reports: dict[int, Report] = {}
        self._found: dict[int, Loss] | None = None
        #: By peer, what it said last in the present group.
        self._notes: dict[int, Note] = {}
        self._proposals: dict[int, frozenset[int]] = {}
        #: What peers have to hear of this rank: by peer, what it was told last, and of others' reports which version.
        self._news = _News(0, None, None, ())
        self._told: dict[int, _News] = {}
        self._relayed: dict[tuple[int, int], int] = {}
        #: When it is looked again whether something is to be repeated or passed on.
        self._due = 0.0
        #: Every group that was proposed, once: of hundreds of ranks, groups are compared by identity.
        self._groups: dict[frozenset[int], frozenset[int]] = {}
        #: By number and group, who has promised to go on with it, as far as this rank has heard.
        self._promises: dict[tuple[int, frozenset[int]], frozenset[int]] = {}
        #: By group that this rank has promised, why the others are left out. One that hears of the promise first closes
        #: its Buffer, which is no cause of it.
        self._reasons: dict[frozenset[int], dict[int, LostRank]] = {}
        #: Who is to be told of the present group: those that were members before, or that speak of an older one.
        self._behind: set[int] = set()
        #: Time in which this rank ran; when something failed; when each peer was heard, and told something, last.
        self._now = self._clock = self._since = 0.0
        self._heard: dict[int, float] = {}
        self._said: dict[int, float] = {}

    @property
    def deciding(self) -> bool:
        """Whether something has failed and no group is agreed on yet: :meth:`advance` has to be called often."""
        return bool(self._reports) and not self.stopped

    @property
    def owes(self) -> bool:
        """Whether somebody speaks of an older group: :meth:`advance` tells it of this one."""
        return bool(self._behind) and not self.stopped

    def end(self, why: str) -> None:
        """Take part no more, and say nothing."""
        self.stopped = self.stopped or why

    # -- what is seen and heard -----------------------------------------------------------------------------------

    def observe(self, grow: Callable[[Report], Report], number: int | None = None) -> None:
        """This rank has seen something: ``grow`` adds it to its report.

        Args:
            number: of the group in which it was seen, where what goes wrong in an older one says nothing of this one.
        """
        if number is not None and number != self.number:
            return
        seen = grow(self._own).among(self.members - {self._rank})
        if self.stopped or seen == self._own:
            return
        self._own = seen
        if self._own.says_something:
            self._join()

    def hear(self, by: int, note: Note) -> None:
        """Rank ``by`` says ``note``."""
        if self.stopped:
            return
        if note.number > self.number and not self._follow(by, note):
            return
        if note.number < self.number:
            self._behind.add(by)
            return
        for number, group, given in note.promises:
            if number > self.number:
                self._promises[number, group] = self._promises.get((number, group), frozenset()) | given
        if by not in self.members:
            return
        self._heard[by] = self._now
        self._notes[by] = note
        if note.proposal is not None:
            self._proposals[by] = self._groups.setdefault(note.proposal, note.proposal)
        for rank, report in note.reports.items():
            if rank != self._rank and report.version > self._version(rank):
                self._reports[rank] = report
                self._found = None
        if self._reports:
            self._join()

    def _version(self, rank: int) -> int:
        report = self._reports.get(rank)
        return -1 if report is None else report.version

    def _join(self) -> None:
        """Say what this rank has seen, and from the first time on for whom it waits."""
        if self._rank not in self._reports:
            begun = self._begin()
            grown = self._own.grown(dead=begun.dead, waits=begun.waits, failed=begun.failed)
            self._own = grown.among(self.members - {self._rank})
            self._own = self._own.standing(begun.stood_still)
            self._since = self._now
            self._heard = dict.fromkeys(self.members, self._now)
        if self._reports.get(self._rank) is not self._own:
            self._reports[self._rank] = self._own
            self._found = None

    # -- deciding -------------------------------------------------------------------------------------------------

    def advance(self, clock: float) -> list[tuple[int, Note]]:
        """Come to what follows by ``clock`` seconds of any monotonic clock; what is to be sent, in this order."""
        self._now += min(max(clock - self._clock, 0.0), _MOST_STEP_SECONDS)
        self._clock = clock
        while self.deciding and self._decide():
            pass
        return list(self._outgoing())

    def _decide(self) -> bool:
        """One step; True when another one may follow from it."""
        lost = self._lost()
        proposal = self._proposal(lost)
        mute = {
            peer
            for peer in proposal - self._own.down - {self._rank}
            if self._now - self._heard.get(peer, self._since) > ANSWER_SECONDS
        }
        if mute:
            self.observe(lambda report: report.grown(down=mute))
            return True
        for (number, group), given in list(self._promises.items()):
            if group <= given and self._rank in group:
                self._agree(number, group, lost)
                return True
        early = self._now - self._since < _GRACE_SECONDS
        if not (early and any(loss.rule == "unreachable" for loss in lost.values())) and self._promise(proposal):
            self._reasons.setdefault(proposal, {peer: self._lost_rank(loss) for peer, loss in lost.items()})
            return True
        if self._now - self._since > LIMIT_SECONDS:
            self._stop(proposal)
        return False

    def _lost(self) -> dict[int, Loss]:
        if self._found is None:
            self._found = find_lost(self.members, self._reports)
        return self._found

    def _proposal(self, lost: dict[int, Loss]) -> frozenset[int]:
        proposal = self.members.difference(lost)
        return self._groups.setdefault(proposal, proposal)

    def _promise(self, proposal: frozenset[int]) -> bool:
        """Promise to go on with ``proposal`` when all of it propose it and nobody can come to another group."""
        if self._rank not in proposal or proposal == self.members:
            return False
        if any(self._proposals.get(peer) is not proposal for peer in proposal if peer != self._rank):
            return False
        if not may_go_on(self.members, proposal, *self._ended()):
            return False
        if not all(self._is_settled(group, given, proposal) for (_, group), given in self._promises.items()):
            return False
        # one number for all that promise it, above those of all other groups
        others = max((number for number, group in self._promises if group != proposal), default=self.number)
        same = max((number for number, group in self._promises if group == proposal), default=0)
        promise = max(others + 1, same), proposal
        given = self._promises.get(promise, frozenset())
        self._promises[promise] = given | {self._rank}
        return self._rank not in given

    def _is_settled(self, group: frozenset[int], given: frozenset[int], proposal: frozenset[int]) -> bool:
        """Whether ``proposal`` contradicts nothing that may come of ``group``, which ``given`` have promised."""
        if group & proposal - given:
            return True  # one that goes on in ``proposal`` has not promised it, and will not
        dead, gone = self._ended()
        return group <= dead | gone or (proposal <= group and may_go_on(group, proposal, dead, gone))

    def _ended(self) -> tuple[frozenset[int], frozenset[int]]:
        """Ranks that act no more: those whose promises are all known, and those whose last ones may not be.

        A rank that says that it failed promises nothing after that.
        """
        failed = (rank for rank, report in self._reports.items() if report.failed)
        dead = frozenset(failed).union(*(report.dead for report in self._reports.values()))
        return dead, frozenset().union(*(report.gone for report in self._reports.values()))

    def _agree(self, number: int, group: frozenset[int], lost: dict[int, Loss]) -> None:
        """``group`` goes on, under ``number``."""
        for peer in sorted(self.members - group):
            self.lost[peer] = self._reason(peer, group, lost) or LostRank(None, -1, None)
        self._begin_group(number, group)

    def _reason(self, peer: int, group: frozenset[int], lost: dict[int, Loss]) -> LostRank | None:
        """Why ``peer`` is no part of ``group``; None where this rank was only told."""
        known = self._reasons.get(group, {}).get(peer)
        # a connection that is down without a cause may be what was seen first of its end
        if known is not None and (known.loss != Loss("unreachable", known.by) or known.cause(peer)):
            return known
        return self._lost_rank(lost[peer]) if peer in lost else None

    def _lost_rank(self, loss: Loss) -> LostRank:
        return LostRank(loss, loss.by, self._reports.get(loss.by))

    def _follow(self, by: int, note: Note) -> bool:
        """Rank ``by`` belongs to a later group; False when this rank does not."""
        if self._rank not in note.members:
            loss = self._lost().get(self._rank)
            if loss is not None:
                self.own_loss = self._lost_rank(loss)
            self.stopped = f"ranks {sorted(note.members)} have gone on without it"
            self.stopped_by = by
            return False
        lost = self._lost()
        for peer in sorted(self.members - note.members):
            told = LostRank(None, by, note.reports.get(by))
            self.lost[peer] = self._reason(peer, note.members, lost) or told
        self._begin_group(note.number, note.members)
        return True

    def _begin_group(self, number: int, group: frozenset[int]) -> None:
        self._behind |= self.members - {self._rank}
        self.number, self.members = number, group
        self._reports, self._notes, self._proposals, self._heard = {}, {}, {}, {}
        self._groups, self._told, self._relayed, self._found = {}, {}, {}, None
        self._promises = {one: given for one, given in self._promises.items() if one[0] > number}
        left = {group for _, group in self._promises}
        self._reasons = {group: reasons for group, reasons in self._reasons.items() if group in left}
        self._own = self._own.settled().among(group - {self._rank})
        if self._own.says_something:
            self._join()

    @property
    def own_wait(self) -> Wait | None:
        """For whom this rank waits, or waited when something failed; None for nobody."""
        return self._own.waits

    def _stop(self, proposal: frozenset[int]) -> None:
        """No group was agreed on in time."""
        if self._own.failed:
            self.stopped = f"it failed ({self._own.failed})"
            return
        quiet = sorted(peer for peer in proposal - {self._rank} if peer not in self._notes)
        known = f"{quiet} answer nothing" if quiet else f"{sorted(proposal)} would go on by what it has heard"
        self.stopped = (
            f"no group to go on with was agreed on within {LIMIT_SECONDS:g} s: of ranks {sorted(self.members)}, {known}"
            ". Ranks go on only where they are more than half of those that may be alive, or half with the lowest"
        )
        self._own = self._own.grown(failed=self.stopped)
        self._reports[self._rank], self._found = self._own, None

    # -- what is said ---------------------------------------------------------------------------------------------

    def _outgoing(self) -> Iterator[tuple[int, Note]]:
        """What each peer is to be told now. Those that a promise, or the group that it made, leaves out come first.

        Told at once is what this rank alone can say, and what others cannot say themselves; all else with what is
        repeated. Of hundreds of ranks each would tell all others of every promise that it hears, and of every report.
        """
        speaking = bool(self._reports)
        lost = self._lost() if speaking else {}
        proposal = (self._proposal(lost) if lost else None) or None
        given = tuple(promise for promise, by in self._promises.items() if self._rank in by)
        news = _News(self.number, self._own if speaking else None, proposal, given)
        if news != self._news:
            self._news = news
        elif not self._behind and self._now < self._due:
            return
        self._due = self._now + _RELAY_SECONDS
        ended = {peer for peer, loss in lost.items() if loss.rule == "ended"}
        relay = speaking and self._now - self._since > _RELAY_SECONDS
        cut_off = self._cut_off(ended) if relay else {}
        everybody = self._reports.keys() if self._now - self._since > _RELAY_ALL_SECONDS else cut_off.keys()
        promises = tuple(Promise(*promise, by) for promise, by in self._promises.items())
        known = {rank: report.version for rank, report in self._reports.items()}
        peers = self.members - {self._rank} if speaking else frozenset()
        for peer in sorted(peers | self._behind, key=lambda peer: (peer in (proposal or self.members), peer)):
            if peer in ended:
                continue
            late = self._now - self._said.get(peer, self._now) > _REPEAT_SECONDS
            others = everybody if late else [rank for rank in cut_off if peer in cut_off[rank]]
            reports = self._lacking(peer, others)
            told = late or peer in self._behind or self._told.get(peer) is not self._news
            if told or any(self._relayed.get((peer, rank), -1) < report.version for rank, report in reports.items()):
                self._told[peer], self._said[peer] = self._news, self._now
                self._relayed |= {(peer, rank): report.version for rank, report in reports.items()}
                reports |= self._lacking(peer, self._reports.keys() & {self._rank})
                yield peer, Note(self.number, self.members, reports, known, proposal, promises)
        self._behind.clear()

    def _cut_off(self, ended: set[int]) -> dict[int, frozenset[int]]:
        """By rank, to whom it cannot bring its own report: it has ended, or the connection between the two is down."""
        found = dict.fromkeys(self._reports.keys() & ended, self.members)
        for rank, report in self._reports.items():
            if report.down:
                found[rank] = found.get(rank, frozenset()) | report.down
                for peer in report.down & self._reports.keys():
                    found[peer] = found.get(peer, frozenset()) | {rank}
        found.pop(self._rank, None)
        return found

    def _lacking(self, peer: int, ranks: Iterable[int]) -> dict[int, Report]:
        """Those of the reports of ``ranks`` that ``peer`` has not said that it has."""
        said = self._notes[peer].known if peer in self._notes else {}
        return {
            rank: self._reports[rank]
            for rank in ranks
            if rank != peer and self._reports[rank].version > said.get(rank, -1)
        }
