"""What is fuzzed: a subject runs numbered cases, each a function of its number alone."""

from __future__ import annotations

from typing import NamedTuple, Protocol

__all__ = ["Block", "Subject", "Wrong"]


class Block(NamedTuple):
    """What became of some cases.

    Attributes:
        rows: by kind: cases, cases that were refused, frames sent, frames that were judged.
        sampled: cases that the oracle in Python has looked at.
    """

    rows: dict[str, tuple[int, ...]]
    sampled: int


class Wrong(Exception):
    """A case did not end as it must.

    Attributes:
        case: its number.
    """

    def __init__(self, case: int, words: str) -> None:
        super().__init__(case, words)
        self.case = case
        self.words = words


class Subject(Protocol):
    """Something that parses what others send."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is done to its input."""

    def run(self, first: int, count: int) -> Block:
        """Run cases ``first`` to ``first + count`` - 1. Raises Wrong."""

    def close(self) -> None:
        """Let go of what it holds."""
