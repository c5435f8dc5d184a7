"""The memory that a kernel may access, as a table that compiled code looks into."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from pathlib import Path

import numpy as np

__all__ = ["PRELUDE", "Ranges", "process_ranges"]

#: Whether [at, at + size) lies in a range of the table: the one that was found last, or by bisection another one.
PRELUDE = """
define internal i1 @mapped(ptr %table, i64 %at, i64 %size) {
entry:
  %end = add i64 %at, %size
  %none = icmp eq ptr %table, null
  br i1 %none, label %yes, label %last
last:
  %from = load i64, ptr %table
  %upto.p = getelementptr i64, ptr %table, i64 1
  %upto = load i64, ptr %upto.p
  %after = icmp uge i64 %at, %from
  %before = icmp ule i64 %end, %upto
  %in = and i1 %after, %before
  br i1 %in, label %yes, label %search
search:
  %count.p = getelementptr i64, ptr %table, i64 2
  %count = load i64, ptr %count.p
  %ranges = getelementptr i64, ptr %table, i64 3
  br label %loop
loop:
  %low = phi i64 [ 0, %search ], [ %low.next, %try ]
  %high = phi i64 [ %count, %search ], [ %high.next, %try ]
  %more = icmp ult i64 %low, %high
  br i1 %more, label %try, label %found
try:
  %sum = add i64 %low, %high
  %middle = lshr i64 %sum, 1
  %m.p = getelementptr [2 x i64], ptr %ranges, i64 %middle
  %m = load i64, ptr %m.p
  %reached = icmp ule i64 %m, %at
  %behind = add i64 %middle, 1
  %low.next = select i1 %reached, i64 %behind, i64 %low
  %high.next = select i1 %reached, i64 %high, i64 %middle
  br label %loop
found:
  %any = icmp ne i64 %low, 0
  br i1 %any, label %hold, label %no
hold:
  %number = sub i64 %low, 1
  %s.p = getelementptr [2 x i64], ptr %ranges, i64 %number
  %s = load i64, ptr %s.p
  %e.p = getelementptr i64, ptr %s.p, i64 1
  %e = load i64, ptr %e.p
  %inside = icmp ule i64 %end, %e
  %forward = icmp ult i64 %at, %end
  %good = and i1 %inside, %forward
  br i1 %good, label %keep, label %no
keep:
  store i64 %s, ptr %table
  store i64 %e, ptr %upto.p
  br label %yes
yes:
  ret i1 true
no:
  ret i1 false
}
"""


class Ranges:
    """Ranges of addresses, [first, end) each; what touches is one range.

    Attributes:
        address: of the table, for the slot RANGES: the range that was found last, how many there are, and all of them
            in ascending order, uint64. It is there as long as this object.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        merged: list[list[int]] = []
        for first, end in sorted(ranges):
            if merged and first <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([first, end])
        self._starts = [first for first, _ in merged]
        self._ends = [end for _, end in merged]
        self._table = np.array([0, 0, len(merged), *(one for pair in merged for one in pair)], np.uint64)
        self.address: int = self._table.ctypes.data

    def holds(self, at: int, nbytes: int) -> bool:
        """Whether all of [at, at + nbytes) may be accessed."""
        place = bisect.bisect_right(self._starts, at) - 1
        return place >= 0 and at + nbytes <= self._ends[place]


def process_ranges() -> Ranges:
    """What this process has mapped for reading and writing."""
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    pairs = (words[0].split("-") for words in lines if words[1].startswith("rw"))
    return Ranges((int(first, 16), int(end, 16)) for first, end in pairs)
