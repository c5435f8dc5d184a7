"""What is known about the versions of an engine: tables of ranges, and how to look one up."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Standing", "VersionRange", "look_up", "supported"]


class Standing(StrEnum):
    """How well a version of an engine is known to work."""

    SUPPORTED = "supported"  # the engine tests run on it
    READ = "read"  # its sources were read: every hook point is there; no test has served with it
    UNPROVEN = "unproven"  # nobody looked; as with any version, every hook is verified when the engine starts
    REFUSED = "refused"  # its sources were read: a hook point is missing


@dataclass(frozen=True)
class VersionRange:
    """Versions ``first <= version <= last`` (tuples of numbers) and what is known about them."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    standing: Standing
    reason: str


def look_up(version: str, table: Sequence[VersionRange]) -> tuple[Standing, str]:
    """Look a version up in ``table``.

    Args:
        version: as in the metadata, for example ``"0.5.23"`` or ``"0.5.24rc1"``; only the first three numbers count.
        table: ranges in any order.

    Returns:
        Standing and reason; versions that no range holds are unproven.
    """
    match = re.match(r"\d+(\.\d+)*", version)
    key = tuple(map(int, match.group().split(".")))[:3] if match else ()
    for known in table:
        if known.first <= key <= known.last:
            return known.standing, known.reason
    return Standing.UNPROVEN, "it is newer than this package"


def supported(table: Sequence[VersionRange]) -> Iterator[str]:
    """The supported versions of ``table``, as text."""
    for known in table:
        if known.standing is Standing.SUPPORTED:
            yield ".".join(map(str, known.first))
