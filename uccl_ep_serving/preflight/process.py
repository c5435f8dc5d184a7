"""One rank of a check as a process: told its job on standard input, and what it finds goes to standard output."""

from __future__ import annotations

import os
import sys

import msgspec

from ..bench.launch import die_with_parent
from .job import Job
from .rank import run

__all__: list[str] = []


def main() -> None:
    """Lines of JSON: words for whoever waits, then the outcome."""
    die_with_parent(os.getppid())
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    out, sys.stdout = sys.stdout.buffer, sys.stderr  # what libraries print is no part of it

    def say(words: object) -> None:
        out.write(msgspec.json.encode(words) + b"\n")
        out.flush()

    say(run(job, say))


if __name__ == "__main__":
    main()
