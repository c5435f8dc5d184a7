"""What a check has found, as its ranks tell it to who has started them, who needs no torch for that."""

from __future__ import annotations

import msgspec

from .facts import Facts
from .job import Finding

__all__ = ["Line", "Outcome"]


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
        so_far: what has been found before it.
        end: what has been found at all; the rank ends.
    """

    begins: str = ""
    so_far: Outcome | None = None
    end: Outcome | None = None
