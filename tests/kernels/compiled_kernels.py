"""Compiles the low-latency kernels for GPUs that are not there, and finds the traps of Triton in what comes out.

``python compiled_kernels.py TARGET [KERNEL ...]`` prints one JSON object per kernel, with the faults found. It is a
process of its own because Triton must not be the interpreter here. PYTHONPATH chooses the version of Triton.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
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

PUBLISHING = {"pack_dispatch", "pack_combine"}
WAITING = {"route", "prepare_combine", "dispatch_arrival", "combine_arrival"}
COPYING = {"pack_dispatch", "unpack_rows", "pack_combine", "sum_rows"}


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
    """What Triton makes of a launch."""
    signature = {name: "constexpr" if name in launch.constants else "i64" for name in launch.kernel.arg_names}
    source = ASTSource(launch.kernel, signature=signature, constexprs=dict(launch.constants))
    return triton.compile(source, target=gpu, options={"num_warps": launch.warps, "enable_fp_fusion": launch.fused})


def _loops(text: str, label: str, branch: str) -> list[str]:
    """Bodies of loops: from a label to a later branch back to it."""
    places = {match.group(1): match.end() for match in re.finditer(label, text, re.MULTILINE)}
    return [
        text[places[match.group(1)] : match.start()]
        for match in re.finditer(branch, text)
        if places.get(match.group(1), len(text)) < match.start()
    ]


def cuda_faults(name: str, ptx: str) -> list[str]:
    """Traps of Triton in PTX."""
    faults = []
    releases = re.findall(r"st\.release[.\w]*", ptx)
    if any(".sys." not in one for one in releases):
        faults.append(f"a release that the host may not see: {set(releases)}")
    if name in PUBLISHING:
        if "st.release.sys.global.v2.b64" not in ptx:
            faults.append("a command is not one 16-byte store")
        counted = [match.start() for match in re.finditer(r"atom\.global\.(?:gpu\.)?(?:acq_rel|add)", ptx)]
        counted += [match.start() for match in re.finditer(r"atom\.[\w.]*acq_rel", ptx)]
        if not counted:
            faults.append("no arrival is counted")
        elif "bar.sync" not in ptx[: min(counted)] and "barrier.sync" not in ptx[: min(counted)]:
            faults.append("stores of other threads are not ordered before the arrival")
        first = ptx.find("st.release")
        last = ptx.rfind("st.global", 0, first)
        if "bar.sync" not in ptx[last:first]:
            faults.append("no barrier between the headers and the command")
    if name in WAITING:
        polls = _loops(ptx, r"^\$(L__BB\w+):", r"bra(?:\.uni)?\s+\$(L__BB\w+);")
        if not any("ld.acquire.sys.global.b64" in body and "globaltimer" in body for body in polls):
            faults.append("no loop polls with acquire and looks at the clock: the poll was hoisted")
    if name in COPYING and not re.search(r"st\.global\.v[24]\.b32", ptx):
        faults.append("stores are not vectorised")
    if name in COPYING and not re.search(r"ld\.global\.v[24]\.b32", ptx):
        faults.append("loads are not vectorised")
    return faults


def hip_faults(name: str, code: str) -> list[str]:
    """The same in AMDGCN."""
    faults = []
    if name in PUBLISHING:
        if not re.search(r"buffer_wbl2 sc0 sc1\s+s_waitcnt vmcnt\(0\)\s+global_store_dwordx2 [^\n]*sc0 sc1", code):
            faults.append("a command is stored without a write-back before it")
        if not re.search(r"s_waitcnt vmcnt\(0\)(?:(?!global_store)[\s\S])*?s_barrier", code):
            faults.append("a barrier does not wait for stores")
    if name in WAITING:
        polls = _loops(code, r"^\.?(L?BB\w+):", r"s_c?branch\w*\s+\.?(L?BB\w+)")
        if not any(re.search(r"global_load_dwordx2 [^\n]*sc0 sc1", body) and "s_memrealtime" in body for body in polls):
            faults.append("no loop polls past the caches and looks at the clock: the poll was hoisted")
        if "buffer_inv sc0 sc1" not in code:
            faults.append("no acquire")
    if name in COPYING and not re.search(r"(?:global|buffer)_store_dwordx[24]", code):
        faults.append("stores are not vectorised")
    if name in COPYING and not re.search(r"(?:global|buffer)_load_dwordx[24]", code):
        faults.append("loads are not vectorised")
    return faults


def resources(gpu: GPUTarget, result: Any) -> dict[str, int]:
    """Registers of a thread and bytes spilled."""
    if gpu.backend == "hip":
        code = result.asm["amdgcn"]
        return {
            "registers": int(re.findall(r"; NumVgprs: (\d+)", code)[0]),
            "spilled": int(re.findall(r"; ScratchSize: (\d+)", code)[0]),
        }
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as place:
        source = Path(place, "kernel.ptx")
        source.write_text(result.asm["ptx"])
        tool = get_ptxas(gpu.arch)
        architecture = f"sm_{gpu.arch}a" if gpu.arch >= 90 else f"sm_{gpu.arch}"
        done = subprocess.run(
            [getattr(tool, "path", tool), "-v", f"--gpu-name={architecture}", str(source), "-o", str(source) + ".o"],
            capture_output=True,
            text=True,
            check=True,
        )
    said = done.stdout + done.stderr
    return {
        "registers": int(re.findall(r"Used (\d+) registers", said)[0]),
        "spilled": sum(int(one) for one in re.findall(r"(\d+) bytes spill", said)),
    }


def main(target: str, names: list[str]) -> None:
    gpu, chosen = TARGETS[target]
    for launch in launches(chosen):
        name = launch.kernel.__name__
        if names and name not in names:
            continue
        result = compiled(launch, gpu)
        text = result.asm["ptx"] if gpu.backend == "cuda" else result.asm["amdgcn"]
        faults = cuda_faults(name, text) if gpu.backend == "cuda" else hip_faults(name, text)
        found = resources(gpu, result)
        # those that wait spend their time waiting
        if found["spilled"] and name in COPYING:
            faults.append(f"{found['spilled']} bytes of registers are spilled")
        print(json.dumps({"kernel": name, "triton": triton.__version__, "faults": faults, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
