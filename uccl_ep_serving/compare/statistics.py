"""Whether one of two is faster: paired samples of several starts, an interval, and when a direction may be claimed.

Two samples are a pair when they were taken right after one another, in the same round of the same start: load that
comes and goes divides out of their quotient. What is left differs in two ways: between rounds, where noise lasts longer
than one round, and between starts, where memory, ports and threads land elsewhere and stay there.

The interval is the wider of two. A bootstrap resamples starts, and in each start blocks of rounds. It cannot see more
between few starts than those starts show: of three it hardly ever leaves their range, and equals would be told apart
whenever three coins fall alike, one time in four. Student's interval of the starts' medians allows for that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["CANNOT_TELL", "LEVEL", "Comparison", "compare_paired"]

#: Of the interval, in percent.
LEVEL = 95
_RESAMPLES = 2000
#: Two-sided 95 % points of Student's distribution, by degrees of freedom from 1; the last holds for more.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
#: Of an interval that includes 1 and is wide.
CANNOT_TELL = "cannot tell"
#: An interval that reaches further than this in percent does not say that two are alike.
_ALIKE_PERCENT = 10.0
#: Below this a difference is told with a decimal.
_FINE_PERCENT = 3.0

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What samples say about ``a`` beside ``b``.

    Attributes:
        ratio: a / b, the geometric mean of the starts' medians. low, high: its 95 % interval.
        by_start: the median of a / b of each start.
        higher_is_better: the samples are rates, not times.
    """

    ratio: float
    low: float
    high: float
    by_start: tuple[float, ...]
    higher_is_better: bool = False

    @property
    def direction(self) -> str:
        """ "faster" or "slower", said of ``a``, where the interval excludes 1; else ""."""
        if self.low <= 1 <= self.high:
            return ""
        return "faster" if (self.ratio > 1) == self.higher_is_better else "slower"

    @property
    def words(self) -> str:
        """The verdict on ``a`` in words, which say of what the percentage is one."""
        percent = [100 * (one - 1) for one in (self.low, self.high)]
        if not self.direction:
            interval = f"({percent[0]:+.0f} .. {percent[1]:+.0f} %)"
            if max(abs(one) for one in percent) > _ALIKE_PERCENT:
                return f"{CANNOT_TELL} {interval}"
            return f"no difference seen {interval}"
        unit = "rate" if self.higher_is_better else "time"
        if self.low > 2:
            return f"{self.direction}: {_plain(self.ratio)} x the {unit} ({_plain(self.low)} .. {_plain(self.high)})"
        ends = sorted(abs(one) for one in percent)
        words = ("lower", "higher") if self.higher_is_better else ("less", "more")
        size = abs(100 * (self.ratio - 1))
        digits = 0 if size >= _FINE_PERCENT else 1
        interval = f"({ends[0]:.{digits}f} .. {ends[1]:.{digits}f} %)"
        return f"{self.direction}: {size:.{digits}f} % {words[self.ratio > 1]} {unit} {interval}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as they stand in a result."""
        return {
            "ratio": self.ratio,
            "low": self.low,
            "high": self.high,
            "by_start": list(self.by_start),
            "direction": self.direction,
            "words": self.words,
        }


def _plain(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def compare_paired(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], *, higher_is_better: bool = False, seed: int = 0
) -> Comparison:
    """Compare ``a`` with ``b``: one sequence per start, one positive sample per round, those of one round a pair.

    Starts may have different numbers of rounds, down to one. The same samples give the same answer.

    Args:
        higher_is_better: the samples are rates (tokens per second), not times.
        seed: of the bootstrap.

    Raises:
        ValueError: fewer than two starts, an empty one, samples that are no pairs or not positive and finite.
    """
    if len(a) != len(b) or any(len(one) != len(other) for one, other in zip(a, b, strict=False)):
        raise ValueError("the samples are no pairs: both need the same starts and rounds")
    if len(a) < 2:
        raise ValueError(f"{len(a)} starts: how starts differ shows from two on")
    starts = [_log_ratios(one, other) for one, other in zip(a, b, strict=True)]
    medians = np.array([np.median(one) for one in starts])
    centre = float(medians.mean())
    low, high = _bootstrap(starts, np.random.default_rng(seed))
    student = _STUDENT[min(len(starts) - 1, len(_STUDENT)) - 1]
    reach = student * float(medians.std(ddof=1)) / math.sqrt(len(starts))
    return Comparison(
        ratio=math.exp(centre),
        low=math.exp(min(low, centre - reach)),
        high=math.exp(max(high, centre + reach)),
        by_start=tuple(float(one) for one in np.exp(medians)),
        higher_is_better=higher_is_better,
    )


def _log_ratios(a: Sequence[float], b: Sequence[float]) -> _Floats:
    both = np.asarray([a, b], dtype=np.float64)
    if not both.size or not (np.isfinite(both).all() and (both > 0).all()):
        raise ValueError("a start without samples, or a sample that is not positive and finite")
    quotients: _Floats = np.log(both[0]) - np.log(both[1])
    return quotients


def _bootstrap(starts: Sequence[_Floats], generator: np.random.Generator) -> tuple[float, float]:
    """The interval of the mean over resampled starts of the median over resampled blocks of rounds."""
    # [start, resample]: what each start would have said with other rounds
    medians = np.stack([_resampled_medians(one, generator) for one in starts])
    chosen = generator.integers(len(starts), size=(len(starts), _RESAMPLES))
    means = np.take_along_axis(medians, chosen, axis=0).mean(axis=0)
    tail = (100 - LEVEL) / 2
    low, high = np.percentile(means, (tail, 100 - tail))
    return float(low), float(high)


def _resampled_medians(rounds: _Floats, generator: np.random.Generator) -> _Floats:
    """[resample]: medians of rounds resampled in blocks that wrap around, so that noise which lasts stays together."""
    count = len(rounds)
    length = max(round(math.sqrt(count)), 1)
    blocks = -(-count // length)
    first = generator.integers(count, size=(_RESAMPLES, blocks, 1))
    index = ((first + np.arange(length)) % count).reshape(_RESAMPLES, -1)[:, :count]
    medians: _Floats = np.median(rounds[index], axis=1)
    return medians
