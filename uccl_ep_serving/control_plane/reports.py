"""What ranks tell each other once something has failed: what each has seen, and the group that they want to go on with.

Standard data only. Nothing here decides: :mod:`.verdict` says who is lost, :mod:`.membership` when that is acted on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

__all__ = ["Note", "Promise", "Report", "Wait"]

#: Most bytes of words in a report: what a transport or a device said.
_MOST_WORDS = 2048
#: Most bytes of a note: a control frame has no more, and who sends a longer one breaks the formats.
_MOST_BYTES = 1 << 20


class Wait(NamedTuple):
    """For whom an operation of a rank waits, or has waited.

    Attributes:
        peer: the rank that it waits for.
        phase: the operation, in words.
        channel: on which it waits, -1 for no single one.
        arrived, expected: messages, or rows; -1 when it waits for something else.
    """

    peer: int
    phase: str = ""
    channel: int = -1
    arrived: int = -1
    expected: int = -1

    @property
    def counts(self) -> str:
        """What arrived, behind the phase; "" where it waits for something else."""
        return f": {self.arrived} messages or rows arrived, {self.expected} expected" if self.arrived >= 0 else ""


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one rank has seen since the present group was agreed on. It only grows.

    Attributes:
        version: of this report; a later one replaces an earlier one.
        dead: ranks whose process has ended, or that closed their Buffer, and everything they had sent was heard.
        gone: ranks whose process has ended, and what they sent last may be missing.
        down: ranks to which its connection failed while they may be alive, or that answer nothing.
        accused: ranks that sent what the formats forbid, or that the user has masked.
        failed: something of its own failed, in words; "" for nothing.
        gave_up: its operation reached its deadline.
        waits: for whom it waits, or waited for long; None for nobody.
        stood_still: it waits, but did not run for part of that time: that says nothing about others.
        causes: by rank, what a transport said of its loss, in words.
    """

    version: int = 0
    dead: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()
    down: frozenset[int] = frozenset()
    accused: frozenset[int] = frozenset()
    failed: str = ""
    gave_up: bool = False
    waits: Wait | None = None
    stood_still: bool = False
    causes: dict[int, str] = {}

    @property
    def says_something(self) -> bool:
        """Whether it names anybody."""
        return bool(self.dead or self.gone or self.down or self.accused or self.failed or self.gave_up)

    def grown(
        self,
        *,
        dead: Iterable[int] = (),
        gone: Iterable[int] = (),
        down: Iterable[int] = (),
        accused: Iterable[int] = (),
        failed: str = "",
        gave_up: bool = False,
        waits: Wait | None = None,
        causes: Mapping[int, str] | None = None,
    ) -> Report:
        """This report with more in it; the same one when that is nothing new. What it waits for is said once."""
        words = {peer: text[:_MOST_WORDS] for peer, text in (causes or {}).items() if text}
        more = replace(
            self,
            dead=self.dead.union(dead),
            gone=self.gone.union(gone),
            down=self.down.union(down),
            accused=self.accused.union(accused),
            failed=self.failed or failed[:_MOST_WORDS],
            gave_up=self.gave_up or gave_up,
            waits=self.waits or waits,
            causes={**words, **self.causes},
        )
        return self if more == self else replace(more, version=self.version + 1)

    def among(self, members: frozenset[int]) -> Report:
        """What of it concerns ``members``."""
        waits = self.waits if self.waits is not None and self.waits.peer in members else None
        return replace(
            self,
            dead=self.dead & members,
            gone=self.gone & members,
            down=self.down & members,
            accused=self.accused & members,
            gave_up=self.gave_up and waits is not None,
            waits=waits,
            causes={peer: words for peer, words in self.causes.items() if peer in members},
        )

    def standing(self, still: bool) -> Report:
        """The same of a rank that stood ``still`` while it waited, or did not."""
        return replace(self, stood_still=still)

    def settled(self) -> Report:
        """What of it matters in the next group: for whom it waited does not."""
        return replace(self, version=self.version + 1, gave_up=False, waits=None, stood_still=False)


class Promise(NamedTuple):
    """A group that ranks have promised to go on with.

    Attributes:
        number: of the group; of two promises the later one has the higher number.
        group: its members.
        by: those that have promised.
    """

    number: int
    group: frozenset[int]
    by: frozenset[int]


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that a rank says to another one of who goes on.

    Attributes:
        number: of the group that it belongs to; each agreed group has a higher one.
        members: that group.
        reports: by rank, reports that the receiver may lack, of this group.
        known: by rank, the version of each report that it has.
        proposal: the members that should go on, by the reports that it has; None while it has nothing to say.
        promises: that it has given or heard of.
    """

    number: int
    members: frozenset[int]
    reports: dict[int, Report] = {}
    known: dict[int, int] = {}
    proposal: frozenset[int] | None = None
    promises: tuple[Promise, ...] = ()

    def encode(self) -> bytes:
        """Payload of a control frame. Words, and nothing else, are shortened where those of many reports do not fit."""
        whole = msgspec.msgpack.encode(self)
        if len(whole) <= _MOST_BYTES:
            return whole
        texts = sum(1 + len(report.causes) for report in self.reports.values())
        most = max(_MOST_BYTES // 8 // texts, 1)  # characters, of four bytes at most: half is left for all else
        reports = {
            rank: replace(
                report,
                failed=report.failed[:most],
                causes={peer: words[:most] for peer, words in report.causes.items()},
            )
            for rank, report in self.reports.items()
        }
        return msgspec.msgpack.encode(replace(self, reports=reports))

    @classmethod
    def decode(cls, by: int, payload: bytes, ranks: int) -> Note:
        """The note of rank ``by``. Raises ValueError when it is none."""
        try:
            note = msgspec.msgpack.decode(payload, type=cls)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"rank {by} sent a malformed control frame: {error}") from error
        named = {*note.members, *note.reports, *note.known, *(note.proposal or ())}
        for promise in note.promises:
            named |= promise.group | promise.by
        for report in note.reports.values():
            named |= report.dead | report.gone | report.down | report.accused | report.causes.keys()
            named |= {report.waits.peer} if report.waits else set()
        if not note.members or note.proposal == frozenset() or min(named) < 0 or max(named) >= ranks:
            raise ValueError(f"rank {by} sent a malformed control frame: it names a rank that is none of {ranks}")
        return note
