"""What is fuzzed, by name, and how many cases of each make a run of 10,000,000."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tests.fuzz.completions import Completions
from tests.fuzz.control import ControlFrames
from tests.fuzz.handshakes import Handshakes
from tests.fuzz.mailboxes import Mailboxes
from tests.fuzz.subject import Subject
from tests.fuzz.tcp import TcpFrames

__all__ = ["SUBJECTS", "Plan", "make"]

Place = npt.NDArray[np.int64]


class Plan(NamedTuple):
    """One subject.

    Attributes:
        open: makes it; takes a word in which it says which case runs.
        share: cases among ten million.
        block: cases between two lines of progress.
    """

    open: Callable[[Place], Subject]
    share: int
    block: int


def _say(place: Place) -> Callable[[int], None]:
    def say(case: int) -> None:
        place[0] = case

    return say


SUBJECTS = {
    "tcp": Plan(lambda place: TcpFrames(place.ctypes.data, auth=False), 8_350_000, 50_000),
    "tcp-macs": Plan(lambda place: TcpFrames(place.ctypes.data, auth=True), 1_000_000, 20_000),
    "handshakes": Plan(lambda place: Handshakes(_say(place)), 200_000, 4_000),
    "control": Plan(lambda place: ControlFrames(_say(place)), 200_000, 4_000),
    "mailboxes": Plan(lambda place: Mailboxes(_say(place)), 150_000, 3_000),
    "efa": Plan(lambda place: Completions(_say(place), "efa"), 50_000, 2_000),
    "roce": Plan(lambda place: Completions(_say(place), "roce"), 50_000, 2_000),
}
assert sum(plan.share for plan in SUBJECTS.values()) == 10_000_000


def make(name: str, place: Place) -> Subject:
    """The subject of this name."""
    return SUBJECTS[name].open(place)
