"""What the doctor's checks yield, and what several of them ask."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from uccl_ep_serving.config import Settings
from uccl_ep_serving.errors import ConfigError

__all__ = ["Finding", "Status", "settings_or_defaults", "size"]


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


def settings_or_defaults() -> Settings:
    """The settings in force; the defaults where the environment is wrong, which the section "settings" reports."""
    try:
        return Settings.from_environment()
    except ConfigError:
        return Settings()


def size(count: float) -> str:
    """``count`` bytes, in words."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
