"""What a launch costs the host, in microseconds: Python, Triton's launcher, and a driver that does nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from tests.support.cuda_driver.loaded import Driver

__all__ = ["microseconds"]


def microseconds(driver: Driver, call: Callable[[], object], times: int) -> float:
    """The median of ``call`` over ``times`` calls, after a tenth as many that nothing is taken of. The stub records
    nothing meanwhile."""
    driver.record(on=False)
    try:
        taken = []
        for turn in range(times + times // 10):
            started = time.perf_counter_ns()
            call()
            if turn >= times // 10:
                taken.append(time.perf_counter_ns() - started)
    finally:
        driver.record(on=True)
    return statistics.median(taken) / 1e3
