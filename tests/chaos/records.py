"""What a trial leaves: the record of each rank, and what was found around them."""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Board", "Loss", "Outcome", "Record"]


@dataclass(frozen=True)
class Loss:
    """One error that ended an operation of a rank.

    Attributes:
        kind: its class. peer: that it names, -1 for none. peers: all that it names.
        at: ``time.monotonic()`` when it was raised.
    """

    kind: str
    peer: int
    peers: tuple[int, ...]
    message: str
    at: float


@dataclass
class Record:
    """How a rank fared.

    Attributes:
        end: "finished" (went on to the end of the trial), "left out" (the others went on without it, and told it so),
            "refused" (its Buffer was not built), "failed" (an error of ours that blames no other rank), "wrong" (data),
            "raised" (an error that is none of ours), "left" (as its fault asks), or of a rank that left no record
            "killed", "died" (by itself), "working" (did not end in time).
        losses: in order.
        masked: all ranks that it masked.
        good_at: ``time.monotonic()`` when the first operation after the last mask had ended, 0.0 without one.
        good: right operations after the last mask.
        words: what was wrong. left: what it still held once its Buffer was destroyed.
    """

    rank: int
    end: str = "working"
    losses: list[Loss] = field(default_factory=list)
    masked: frozenset[int] = frozenset()
    good_at: float = 0.0
    good: int = 0
    words: str = ""
    left: str = ""


@dataclass
class Outcome:
    """How a trial ended.

    Attributes:
        records: by rank.
        fault_at: ``time.monotonic()`` of the fault, 0.0 when it never came to it.
        last_at: of the last part of it: the second of two kills.
        strangers: connections of nobody that were tried.
        left: processes and shared memory that outlived the ranks, in words.
        log: the end of what the ranks have logged.
    """

    records: list[Record]
    fault_at: float = 0.0
    last_at: float = 0.0
    strangers: int = 0
    left: str = ""
    log: str = ""


_END, _FAULT, _LAST, _CLOSE, _RANKS = 0, 1, 2, 3, 4
_STAGE, _MASKED, _NUMBER, _WORDS = 0, 1, 2, 3


class Board:
    """Where ranks show how far they are, and read when to stop: words in memory that the processes share.

    Operations are numbered anew once ranks were masked. So they stop alike: before the operation of one number, with
    the same ranks masked. Each word has one writer: its rank, or the supervisor.
    """

    #: Of a rank: it opens its Buffer; it works; it has masked a rank and no operation has ended since; it has run all
    #: operations, and waits until the others have.
    STARTING, WORKING, REBUILDING, DONE = 0, 1, 2, 3

    def __init__(self, ranks: int) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        words = np.frombuffer(self._memory, dtype=np.int64)
        self._words = words[:_RANKS]
        self._rows = words[_RANKS : _RANKS + ranks * _WORDS].reshape(ranks, _WORDS)
        self._words[_END] = -1

    def show(self, rank: int, stage: int, masked: frozenset[int], number: int) -> None:
        """``rank`` is about to run operation ``number`` with ``masked`` left out."""
        self._rows[rank] = stage, _bits(masked), number

    def of(self, rank: int) -> tuple[int, frozenset[int], int]:
        """What ``rank`` has shown last: stage, masked, number."""
        stage, masked, number = self._rows[rank].tolist()
        return stage, frozenset(one for one in range(32) if masked >> one & 1), number

    def end(self, masked: frozenset[int], number: int) -> None:
        """Ranks that have ``masked`` left out stop before operation ``number``."""
        self._words[_END] = _bits(masked) << 32 | number

    def ends(self, masked: frozenset[int], number: int) -> bool:
        """Whether that is here."""
        return bool(self._words[_END] == _bits(masked) << 32 | number)

    def close(self) -> None:
        """All ranks are done: they may close their Buffers."""
        self._words[_CLOSE] = 1

    @property
    def closes(self) -> bool:
        """Whether they may."""
        return bool(self._words[_CLOSE])

    def strike(self) -> None:
        """The fault, or another part of it, is now."""
        self._words[_LAST] = time.monotonic_ns()
        self._words[_FAULT] = self._words[_FAULT] or self._words[_LAST]

    @property
    def struck(self) -> tuple[float, float]:
        """``time.monotonic()`` of the first and the last part of the fault, 0.0 before it."""
        return float(self._words[_FAULT]) / 1e9, float(self._words[_LAST]) / 1e9


def _bits(ranks: frozenset[int]) -> int:
    return sum(1 << rank for rank in ranks)
