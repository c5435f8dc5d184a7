"""``python launched_later.py GPU ahead|launch``: compiles two kernels for a GPU that is not there, or launches them.

A launch goes all its way through Triton, whose own driver says what the GPU is, with a stub for the GPU's library:
nothing runs. Prints a JSON list, for each kernel whether its code was in Triton's cache.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import triton

from uccl_ep_serving.kernels.triton.ahead import GPUS, compiling_for, keep
from uccl_ep_serving.kernels.triton.launch import Launch
from uccl_ep_serving.kernels.triton.low_latency import TritonLowLatencyKernels
from uccl_ep_serving.kernels.triton.normal import TritonNormalKernels
from uccl_ep_serving.modes.ahead import launches
from uccl_ep_serving.protocol.layout import LowLatencyPlan
from uccl_ep_serving.protocol.message import DTYPE_BF16

PLAN = LowLatencyPlan(8, 128, 7168, 256, 8, 2)
#: That take little to compile.
NAMES = ("dispatch_recv", "mark_tokens")


def later() -> list[Launch]:
    """The same kernels as an operation launches them: with other addresses and numbers."""
    at = 0x7F0000000000
    low_latency, normal = TritonLowLatencyKernels(PLAN), TritonNormalKernels(PLAN.ranks)
    found = low_latency.dispatch_recv(at, at + 512, at + 1024, DTYPE_BF16, at, 0, at, at, at, at + 4, 0, True)
    found += normal.mark(at + 8, 128, PLAN.topk, PLAN.experts, at + 4, at + 8, at + 512, at + 1024)
    return [one for one in found if one.kernel.__name__ in NAMES]


def stub_driver(name: str) -> Any:
    """Triton's own driver for a GPU, whose library is a stub."""
    gpu = GPUS[name]
    properties = {"max_shared_mem": 1 << 20, "arch": f"{gpu.arch}:sramecc+:xnack-", "warpSize": gpu.warp_size}
    driver = object.__new__(triton.backends.backends["nvidia" if gpu.backend == "cuda" else "amd"].driver)
    driver.utils = SimpleNamespace(
        get_device_properties=lambda _: properties,
        load_binary=lambda *_: (1, 1, 32, 0, 1024),
        unload_module=lambda _: None,
    )
    driver.get_current_device = lambda: 0
    driver.get_current_stream = lambda _: 0
    if gpu.backend == "cuda":
        driver.get_device_capability = lambda _: divmod(gpu.arch, 10)
    driver.launcher_cls = lambda *_: lambda *_: None
    return driver


def main(name: str, action: str) -> None:
    hits: list[bool] = []
    if action == "ahead":
        with compiling_for(GPUS[name]):
            found = [one for one in launches(PLAN, ("bf16",), 0) if one.kernel.__name__ in NAMES]
            hits = [keep(one)[1] for one in found]
            # as two launches that compile to the same code
            assert all(keep(one)[1] for one in found)
    else:
        triton.runtime.driver.set_active(stub_driver(name))
        triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
        for one in later():
            one.run()
    print(json.dumps(hits))


if __name__ == "__main__":
    main(*sys.argv[1:])
