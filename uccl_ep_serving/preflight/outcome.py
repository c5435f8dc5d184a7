"""What a check has found, as its ranks tell it to who has started them, who needs no torch for that."""

from __future__ import annotations

import msgspec

from .facts import Facts
from .job import Finding

__all__ = ["Line", "News", "Outcome"]


class Outcome(msgspec.Struct):
    """What all ranks have found.

    Attributes:
        findings: each once, in the order of parts and ranks.
        known: facts of each rank; empty where the ranks did not meet.
        routes: how each rank reaches each of the others as a job would; empty where they did not come so far.
    """

    findings: list[Finding]
    known: list[Facts] = []
    routes: list[dict[int, str]] = []

    @property
    def passed(self) -> bool:
        """Nothing stands in the way."""
        return not any(one.fault for one in self.findings)


class Line(msgspec.Struct, omit_defaults=True):
    """What a rank tells at a time to who has started it; one of these.

    Attributes:
        begins: the part that begins now.
        more: what has been found before it, and not been told yet.
        end: what has been found at all; the rank ends.
    """

    begins: str = ""
    more: Outcome | None = None
    end: Outcome | None = None


class News:
    """Tells of an outcome what is new since it was told last. A part begins for each pair of ranks, and each line would
    repeat what all pairs before have found. Its lists only grow, or are replaced."""

    def __init__(self) -> None:
        self._told = Outcome([])
        self._count = 0

    def of(self, outcome: Outcome) -> Outcome:
        """What is new in ``outcome``."""
        told = self._told
        if outcome.findings is not told.findings:
            # another list, which may hold what was told as well
            self._count = 0
        new = Outcome(
            outcome.findings[self._count :],
            [] if outcome.known is told.known else outcome.known,
            [] if outcome.routes is told.routes else outcome.routes,
        )
        self._count, self._told = len(outcome.findings), Outcome(outcome.findings, outcome.known, outcome.routes)
        return new
