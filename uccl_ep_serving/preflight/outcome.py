"""What a check has found, as its ranks tell it to who has started them, who needs no torch for that."""

from __future__ import annotations

import msgspec

from .facts import Facts
from .job import Finding

__all__ = ["Outcome"]


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
