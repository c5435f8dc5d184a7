"""The process in which a subject runs: a crash of it is told from a wrong outcome, and has a case as well.

    python -m tests.fuzz.child SUBJECT FIRST COUNT PLACE

Runs COUNT cases from FIRST on, and prints a JSON line a block: the counts, and what the process holds. PLACE is a file
of eight bytes that holds the number of the case that runs.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from tests.fuzz.subject import Wrong
from tests.fuzz.subjects import SUBJECTS, make
from tests.soak.soak_samples import sample


def main(name: str, first: int, count: int, place: str) -> None:
    """Run the cases; ends after the first wrong one."""
    word = np.memmap(place, np.int64, "r+", shape=(1,))  # lives as long as the subject, which may know its address
    subject = make(name, word)
    block = SUBJECTS[name].block
    try:
        for begin in range(first, first + count, block):
            cases = min(block, first + count - begin)
            since, used = time.monotonic(), time.process_time()
            line: dict[str, object] = {"first": begin, "cases": cases}
            try:
                done = subject.run(begin, cases)
            except Wrong as wrong:
                print(json.dumps({**line, "wrong": wrong.case, "words": wrong.words}), flush=True)
                return
            held = sample(begin + cases)
            line |= {"rows": done.rows, "sampled": done.sampled, "seconds": time.monotonic() - since}
            line |= {"processor": time.process_time() - used}
            line |= {"held": [held.step, held.rss, held.threads, held.descriptors]}
            print(json.dumps(line), flush=True)
    finally:
        subject.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
