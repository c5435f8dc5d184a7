"""One rank of a check as a process: told its job on standard input, and what it finds goes to standard output."""

from __future__ import annotations

import os
import sys

import msgspec

from ..native.background import die_with_parent
from .job import Job
from .outcome import Line, News
from .rank import run

__all__: list[str] = []


def main() -> None:
    """A :class:`Line` of JSON for each part that begins, then one with all that has been found."""
    die_with_parent(os.getppid())
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    out, sys.stdout = sys.stdout.buffer, sys.stderr  # what libraries print is no part of it

    def tell(line: Line) -> None:
        out.write(msgspec.json.encode(line) + b"\n")
        out.flush()

    # all ranks find the same: the first tells of it
    news = News()
    outcome = run(job, lambda words, found: tell(Line(words, None if job.local else news.of(found))))
    tell(Line(end=outcome))


if __name__ == "__main__":
    main()
