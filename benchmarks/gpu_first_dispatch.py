"""Where the time of a first dispatch of normal mode goes: one whose size the host reads back. A part of gpu_normal.py.

An operation begins when the device is idle, so that nothing that the host does is hidden behind the one before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from benchmarks.gpu_frame import interpreted, kernel_times

#: Its kernels, in their order; the layout is counted already.
KERNELS = ("open_rows", "dispatch_rows")
#: What each step of the host ends with: the opening is launched, its reply is here, what moves rows is launched, the
#: device is done.
STEPS = ("opened", "replied", "moving", "done")
_WARM = 3


def measured(exchange: Any, dispatch: Callable[[], Any], calls: int) -> dict[str, Any]:
    """Microseconds of each step of the host in ``dispatch`` on one rank, and on a GPU of each kernel."""
    import torch

    from uccl_ep_serving.bench.statistics import summary
    from uccl_ep_serving.kernels.triton.kernel import PREFIX
    from uccl_ep_serving.modes.normal_gpu_session import NormalGpuSession

    def synchronise() -> None:
        if not interpreted():
            torch.cuda.synchronize()

    times: list[int] = []

    def noted(step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            result = step(*arguments, **options)
            times.append(time.perf_counter_ns())
            return result

        return timed

    samples: dict[str, list[float]] = {name: [] for name in STEPS}
    watched = {name: noted(getattr(NormalGpuSession, name)) for name in ("launch", "wait_reply")}
    with mock.patch.multiple(NormalGpuSession, **watched):
        for turn in range(_WARM + calls):
            synchronise()
            exchange.all_gather(b"")
            times[:] = [time.perf_counter_ns()]
            dispatch()
            synchronise()
            times.append(time.perf_counter_ns())
            for name, begun, ended in zip(STEPS, times[:-1], times[1:], strict=True):
                if turn >= _WARM:
                    samples[name].append((ended - begun) / 1e3)
    found: dict[str, Any] = {"host_us": {name: summary(taken) for name, taken in samples.items()}}
    if not interpreted():
        taken = kernel_times(dispatch, tuple(PREFIX + name for name in KERNELS))
        found["kernel_us"] = {name: taken[PREFIX + name] for name in KERNELS}
    return found
