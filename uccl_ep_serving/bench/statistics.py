"""From samples to figures: medians, spreads, and ratios of what was measured in the same rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["all_ratios", "ratios", "summary"]


def summary(samples: Sequence[float]) -> dict[str, float]:
    """``median``, ``p10`` and ``p90`` (linear interpolation) of at least one sample. Raises ValueError for none."""
    if not samples:
        raise ValueError("no samples")
    p10, median, p90 = np.percentile(np.asarray(samples, dtype=np.float64), (10, 50, 90))
    return {"median": float(median), "p10": float(p10), "p90": float(p90)}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """How many times longer ``theirs`` took than ``ours``: a summary of the quotients round by round.

    Samples of one round were taken right after one another, so that load which comes and goes divides out.

    Raises:
        ValueError: the two were not measured in the same rounds.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} samples beside {len(theirs)}: not the same rounds")
    return summary([peer / own for own, peer in zip(ours, theirs, strict=True)])


def all_ratios(
    samples: Mapping[str, Mapping[str, Sequence[float]]], paths: Sequence[str]
) -> dict[str, dict[str, dict[str, Any]]]:
    """``[path][other subject][phase]``: :func:`ratios` for every phase that both have.

    Args:
        samples: by subject and phase, one sample per round.
        paths: the subjects that are ours.
    """
    return {
        path: {
            other: {phase: ratios(samples[path][phase], theirs[phase]) for phase in samples[path] if phase in theirs}
            for other, theirs in samples.items()
            if other not in paths
        }
        for path in paths
    }
