"""Compiles the low-latency kernels for GPUs that are not there, and finds the traps of Triton in what comes out.

``python compiled_kernels.py TARGET ...`` prints one JSON object per kernel and specialization, with the faults found.
It is a process of its own because Triton must not be the interpreter here. PYTHONPATH chooses the version of Triton.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import compiled_traps
import triton
from compiled_traps import COPYING, WAITING
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from uccl_ep_serving.kernels.triton.launch import Launch, Target
from uccl_ep_serving.kernels.triton.low_latency import TritonLowLatencyKernels
from uccl_ep_serving.protocol.layout import LowLatencyPlan
from uccl_ep_serving.protocol.message import DTYPE_BF16, DTYPE_FP8, DTYPE_FP8_UE8M0

TARGETS = {
    "sm_90": (GPUTarget("cuda", 90, 32), Target(1, 32)),
    "sm_100": (GPUTarget("cuda", 100, 32), Target(1, 32)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), Target(2, 64, fnuz=True)),
    "gfx950": (GPUTarget("hip", "gfx950", 64), Target(2, 64)),
}


def launches(target: Target) -> list[Launch]:
    """Every kernel in every specialization that an engine can ask for: DeepSeek-V3 on 8 ranks."""
    kernels = TritonLowLatencyKernels(LowLatencyPlan(8, 128, 7168, 256, 8, 2), target)
    at = 1 << 40
    found: list[Launch] = []
    for coding in (DTYPE_BF16, DTYPE_FP8, DTYPE_FP8_UE8M0):
        for reduced in (False, True):
            found += kernels.dispatch_send(at, at, at, at, at, at, 128, DTYPE_BF16, coding, False, reduced)
        found += kernels.dispatch_recv(at, at, at, coding, at, at, at, at, at, at, at)
    found += kernels.combine_send(at, at, at, at, at, at, DTYPE_BF16)
    for reduced in (False, True):
        found += kernels.combine_recv(at, at, at, at, at, at, 128, DTYPE_BF16, reduced, at)
    unique = {(launch.kernel.__name__, tuple(launch.constants.items())): launch for launch in found}
    return list(unique.values())


def compiled(launch: Launch, gpu: GPUTarget) -> Any:
    """What Triton makes of a launch, told what a launch tells it: which arguments are multiples of 16."""
    signature = {name: "constexpr" if name in launch.constants else "i64" for name in launch.kernel.arg_names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, (parameter, value) in enumerate(zip(launch.kernel.params, launch.arguments, strict=False))
        if not parameter.do_not_specialize and value % 16 == 0
    }
    source = ASTSource(launch.kernel, signature=signature, constexprs=dict(launch.constants), attrs=attributes)
    return triton.compile(source, target=gpu, options={"num_warps": launch.warps, "enable_fp_fusion": launch.fused})


def resources(gpu: GPUTarget, result: Any) -> dict[str, int]:
    """Registers of a thread, and bytes of its registers that are spilled."""
    if gpu.backend == "cuda":
        return compiled_traps.cubin_resources(result.asm["cubin"])
    code = result.asm["amdgcn"]
    return {
        "registers": int(re.findall(r"; NumVgprs: (\d+)", code)[0]),
        "spilled": int(re.findall(r"; ScratchSize: (\d+)", code)[0]),
    }


def main(target: str) -> None:
    gpu, chosen = TARGETS[target]
    for launch in launches(chosen):
        name = launch.kernel.__name__
        result = compiled(launch, gpu)
        text = result.asm["ptx"] if gpu.backend == "cuda" else result.asm["amdgcn"]
        find = compiled_traps.cuda_faults if gpu.backend == "cuda" else compiled_traps.hip_faults
        faults = find(name, text)
        faults += [f"threads may part at: {line}" for line in compiled_traps.volatile_branches(result.asm["ttir"])]
        found = resources(gpu, result)
        # Triton 3.6 and 3.7 may put the barrier of a scalar atomic on one side of a branch: one warp does not mind
        if name in WAITING and launch.warps != 1:
            faults.append("a program that waits has several warps, of which some may hang at a barrier")
        # those that wait spend their time waiting
        if found["spilled"] and name in COPYING:
            faults.append(f"{found['spilled']} bytes of registers are spilled")
        said = {"target": target, "kernel": name, "triton": triton.__version__, "faults": faults, **found}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    for one in sys.argv[1:]:
        main(one)
