"""Compiles the Triton kernels for GPUs that are not there, and finds the traps of Triton in what comes out.

``python compiled_kernels.py TARGET [KERNEL ...]`` prints one JSON object per kernel and specialization, with the
faults found: of the kernels named, else one of each kernel. It is a process of its own because Triton must not be the
interpreter here. PYTHONPATH chooses the version of Triton.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from tests.kernels import compiled_traps
from tests.kernels.compiled_traps import COPYING, EXCHANGING, IN_FLIGHT, WAITING
from tests.kernels.divergence import divergences
from tests.ptx.translation.translate import unknown
from uccl_ep_serving.kernels.blocks.normal_device import NormalFormat
from uccl_ep_serving.kernels.triton.ahead import GPUS, compiling_for
from uccl_ep_serving.kernels.triton.kernel import PREFIX
from uccl_ep_serving.kernels.triton.launch import Launch
from uccl_ep_serving.kernels.triton.normal import TritonNormalKernels
from uccl_ep_serving.modes.ahead import CODINGS, low_latency_launches
from uccl_ep_serving.protocol.layout import LowLatencyPlan
from uccl_ep_serving.protocol.message import DTYPE_BF16, DTYPE_FP8, NormalNotify
from uccl_ep_serving.protocol.streams import NORMAL_CHANNELS

#: Bytes that a kernel which copies may spill.
_SPILLED = 16
#: Those of low latency, of one warp, keep a few addresses of outer loops in local memory: ptxas would not take more
#: registers than let 24 to 32 of their programs run on a multiprocessor.
_SPILLED_BY_A_WARP = 64
#: Those between nodes with Triton 3.6 and 3.8, of the addresses of eight rows that are sent or forwarded together.
_SPILLED_BETWEEN_NODES = 96


def normal_launches() -> list[Launch]:
    """Normal mode likewise: FP8 with scales and BF16 dispatches, cached ones, combines with weights and biases."""
    kernels, found = TritonNormalKernels(8), list[Launch]()
    for kind, dtype, row, meta, scale, topk in (
        (NormalNotify.OPERATION_DISPATCH, DTYPE_FP8, 7168, 288, 224, 8),
        (NormalNotify.OPERATION_CACHED_DISPATCH, DTYPE_BF16, 14336, 0, 0, 0),
        (NormalNotify.OPERATION_COMBINE, DTYPE_BF16, 14336, 32, 0, 8),
    ):
        form = NormalFormat(kind, dtype, row, meta, scale, topk, 32, 1 << 40, 1 << 40, 0, NORMAL_CHANNELS)
        found += kernels.ahead(form, 256, 2)
        # the marks of a row between nodes take 16 bytes more at most
        between = form._replace(meta_bytes=meta + 16 if kind != NormalNotify.OPERATION_COMBINE else meta, node_ranks=4)
        found += kernels.ahead(between, 256, 2)
    return found


def is_usual(launch: Launch) -> bool:
    """Of one specialization of each kernel: FP8 dispatches, rows that return summed, inside a node, not of a handle."""
    constants = launch.constants.get("SHAPE", {})
    usual = {"CODING": DTYPE_FP8, "REDUCED": True, "NODES": False}
    of_handle = constants.get("KIND", 0) == NormalNotify.OPERATION_CACHED_DISPATCH
    return not of_handle and all(constants.get(name, value) == value for name, value in usual.items())


def launches(names: frozenset[str]) -> list[Launch]:
    """DeepSeek-V3 on 8 ranks: kernels of ``names`` in every specialization that an engine can ask for, or without any
    each in its usual one."""
    found = [*low_latency_launches(LowLatencyPlan(8, 128, 7168, 256, 8, 2), tuple(CODINGS)), *normal_launches()]
    wanted = [one for one in found if (one.kernel.__name__ in names if names else is_usual(one))]
    unique = {(launch.kernel.__name__, tuple(launch.constants.items())): launch for launch in wanted}
    return list(unique.values())


def resources(gpu: GPUTarget, result: Any) -> dict[str, int]:
    """Registers of a thread, and bytes of its registers that are spilled."""
    if gpu.backend == "cuda":
        return compiled_traps.cubin_resources(result.asm["cubin"])
    code = result.asm["amdgcn"]
    return {
        "registers": max(map(int, re.findall(r"; NumVgprs: (\d+)", code))),
        # frames of calls lie in the same memory, and are none
        "spilled": 4 * sum(map(int, re.findall(r"\.vgpr_spill_count: +(\d+)", code))),
    }


def main(target: str, names: frozenset[str]) -> None:
    gpu = GPUS[target]
    with compiling_for(gpu):
        check_all(target, gpu, names)


def check_all(target: str, gpu: GPUTarget, names: frozenset[str]) -> None:
    for launch in launches(names):
        name = launch.kernel.__name__
        result = launch.build()
        text = result.asm["ptx"] if gpu.backend == "cuda" else result.asm["amdgcn"]
        find = compiled_traps.cuda_faults if gpu.backend == "cuda" else compiled_traps.hip_faults
        faults = find(name, text)
        faults += divergences(result.asm["llir"])
        if name in COPYING:
            faults += compiled_traps.exchanges_of_rows(result.asm["ttgir"])
        if gpu.backend == "cuda":
            faults += unknown(text)
        found = resources(gpu, result)
        if not result.metadata.name.startswith(PREFIX):
            faults.append(f"a profile would show it as {result.metadata.name}")
        # Triton 3.6 and 3.7 may put the barrier of a scalar atomic on one side of a branch: one warp does not mind, and
        # normal mode has none in a loop
        if name in WAITING - EXCHANGING and launch.variant.warps != 1:
            faults.append("a program that waits has several warps, of which some may hang at a barrier")
        # those that wait spend their time waiting
        allowed = _SPILLED_BY_A_WARP if name in COPYING & WAITING else _SPILLED
        if launch.constants.get("SHAPE", {}).get("NODES") and triton.__version__.startswith(("3.6.", "3.8.")):
            allowed = _SPILLED_BETWEEN_NODES
        if found["spilled"] > allowed and name in COPYING:
            faults.append(f"{found['spilled']} bytes of registers are spilled")
        if name in IN_FLIGHT:
            found["in_flight"] = 16 * launch.variant.warps * gpu.warp_size * compiled_traps.loads_at_once(text)
            if found["in_flight"] < IN_FLIGHT[name][gpu.backend == "hip"]:
                faults.append(f"only {found['in_flight']} bytes of rows are on their way to a program")
            if name in EXCHANGING and math.prod(launch.grid) != NORMAL_CHANNELS:
                faults.append(f"a grid of {launch.grid} for {NORMAL_CHANNELS} channels")
        said = {"target": target, "kernel": name, "triton": triton.__version__, "faults": faults, **found}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], frozenset(sys.argv[2:]))
