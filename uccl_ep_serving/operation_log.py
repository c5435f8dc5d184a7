"""What each operation moved and how long it took: counts, and percentiles over the latest calls."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["OPERATIONS", "OperationLog"]

OPERATIONS = ("ll_dispatch", "ll_combine", "normal_dispatch", "normal_combine")

#: Durations kept per operation for the percentiles; older ones are overwritten.
_KEPT = 8192


class OperationLog:
    """Counters per operation. One host thread records; any thread may take a snapshot."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {op: {"count": 0, "tokens": 0, "rows": 0} for op in OPERATIONS}
        self._total = dict.fromkeys(OPERATIONS, 0)
        self._durations: dict[str, npt.NDArray[np.int64]] = {op: np.zeros(_KEPT, dtype=np.int64) for op in OPERATIONS}

    def record(self, op: str, tokens: int, rows: int, nanoseconds: int, **extra: int) -> None:
        """Count one call of ``op``.

        Args:
            op: one of OPERATIONS.
            tokens: tokens of this rank that the call was about.
            rows: rows that this rank sent to other ranks.
            nanoseconds: time inside the call (send and recv part together).
            extra: further counts to add up, for example ``expert_rows`` or ``reduced``.
        """
        counts = self._counts[op]
        self._durations[op][counts["count"] % _KEPT] = nanoseconds
        self._total[op] += nanoseconds
        counts["count"] += 1
        counts["tokens"] += tokens
        counts["rows"] += rows
        for name, value in extra.items():
            counts[name] = counts.get(name, 0) + value

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Counts, ``total_us`` of all calls, ``p50_us`` and ``p99_us`` of the latest, by operation (microseconds)."""
        result: dict[str, dict[str, float]] = {}
        for op, counts in self._counts.items():
            kept = self._durations[op][: min(counts["count"], _KEPT)]
            p50, p99 = np.percentile(kept, (50, 99)) / 1000 if len(kept) else (0.0, 0.0)
            times = {"total_us": self._total[op] / 1000, "p50_us": float(p50), "p99_us": float(p99)}
            result[op] = {**counts, **{name: round(value, 1) for name, value in times.items()}}
        return result
