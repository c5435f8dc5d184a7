"""What a process holds (memory, threads, descriptors) over time, and whether that is flat."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Sample", "growth", "not_flat", "sample", "summary"]

#: Beside the figures, for whoever reads only them.
WORDS = (
    "rss must not grow from the second quarter of the samples to the last (medians, all samples); the first quarter "
    "fills caches and touches pages, and a single sample holds what its case happens to hold"
)

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Sample:
    """One look at a process, after ``step`` layers or cases."""

    step: int
    rss: int  # bytes resident
    threads: int
    descriptors: int


def sample(step: int) -> Sample:
    """Look at this process."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    # listing /proc/self/fd opens one descriptor, which is gone when the list is there
    return Sample(step, resident, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")) - 1)


def growth(samples: Sequence[Sample]) -> int:
    """Bytes by which the resident memory of the last quarter exceeds that of the second (medians).

    The first quarter is left out: caches fill and pages are touched for the first time there.
    """
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    return int(statistics.median(one.rss for one in late) - statistics.median(one.rss for one in early))


def not_flat(samples: Sequence[Sample], rss_limit: int) -> list[str]:
    """What grew, in words; empty when nothing did.

    Args:
        samples: taken at equal points of the work, at least eight.
        rss_limit: bytes that resident memory may grow by (:func:`growth`). Threads and descriptors may not change at
            all after the first quarter.
    """
    if len(samples) < 8:
        raise ValueError(f"{len(samples)} samples say nothing about growth: eight at least")
    found = []
    if (grown := growth(samples)) > rss_limit:
        found.append(f"resident memory grew by {grown / 2**20:.1f} MiB, more than {rss_limit / 2**20:.1f}")
    steady = samples[len(samples) // 4 :]
    for name in ("threads", "descriptors"):
        seen = {getattr(one, name) for one in steady}
        if len(seen) > 1:
            found.append(f"{name} went from {getattr(steady[0], name)} to {getattr(steady[-1], name)}, seen {seen}")
    return found


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """For the record: what was held, what growth is, and the samples, thinned to at most 50.

    The first and last sample are single looks, which scatter by tens of MiB; what may not grow is the difference of
    medians that :func:`growth` takes.
    """
    thinned = samples[:: max(1, -(-len(samples) // 50))]
    return {
        "rss_mib_first_sample": round(samples[0].rss / 2**20, 1),
        "rss_mib_last_sample": round(samples[-1].rss / 2**20, 1),
        "rss_mib_median_of_last_quarter_less_that_of_second": (
            round(growth(samples) / 2**20, 2) if len(samples) >= 8 else None
        ),
        "words": WORDS,
        "threads": sorted({one.threads for one in samples[len(samples) // 4 :]}),
        "descriptors": sorted({one.descriptors for one in samples[len(samples) // 4 :]}),
        "samples": [asdict(one) for one in thinned],
    }
