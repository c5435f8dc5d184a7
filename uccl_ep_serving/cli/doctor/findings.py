"""What an examination of the machine finds: the vocabulary of ``uccl-ep doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Status"]


class Status(StrEnum):
    """How a finding bears on the verdict: only ``PROBLEM`` makes the package unusable here."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        value: what was found, in words.
        status: whether it stands in the way.
        next_step: what to do about it; empty when there is nothing to do.
    """

    name: str
    value: str
    status: Status = Status.OK
    next_step: str = ""
