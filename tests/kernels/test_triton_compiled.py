"""What Triton makes of the kernels for GPUs that need not be there: it compiles, and holds no trap."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kernels import compiled_traps
from tests.kernels.other_tritons import other_tritons

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GPUS = ("sm_90", "sm_100", "gfx942", "gfx950")
#: Directories that hold another Triton each, as ``scripts/test-triton`` gives them.
OTHERS = other_tritons()
#: Kernels, and in how many specializations an engine can ask for each. The quick tests compile one.
EVERYTHING = {
    "dispatch_send": 6,
    "dispatch_recv": 3,
    "combine_send": 1,
    "combine_recv": 2,
    "mark_tokens": 1,
    "open_rows": 2,
    "dispatch_rows": 4,
    "combine_rows": 2,
}
Found = dict[str, Any]


def start(target: str, path: str = "", kernels: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Compile all specializations of ``kernels``, or the usual one of each, for ``target``, with the Triton below
    ``path`` or the installed one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    places = (path, environment.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    return subprocess.Popen(
        [sys.executable, "-P", str(HERE / "compiled_kernels.py"), target, *kernels],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> list[Found]:
    """What was compiled, with the faults found."""
    with process:
        out, err = process.communicate()
    assert process.returncode == 0, err[-4000:]
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def check(found: list[Found], target: str, expected: dict[str, int]) -> None:
    """Everything was compiled for ``target``, without a fault; registers and spills stand in the test's output."""
    mine = [one for one in found if one["target"] == target]
    for one in mine:
        print(one)
    names = [one["kernel"] for one in mine]
    assert {name: names.count(name) for name in names} == expected
    assert [one for one in mine if one["faults"]] == []


def check_version(found: list[Found], path: str) -> None:
    """The Triton below ``path`` was taken, after whose version the directory is named; the installed one for ``""``."""
    version = Path(path).name if path else importlib.metadata.version("triton")
    assert {one["triton"] for one in found} == {version}


def test_every_kernel() -> None:
    check(finish(start("sm_90")), "sm_90", dict.fromkeys(EVERYTHING, 1))


@pytest.mark.triton
@pytest.mark.parametrize("kernel", EVERYTHING)
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("place", [pytest.param("", id="installed"), *OTHERS])
def test_every_specialization(place: str, target: str, kernel: str) -> None:
    found = finish(start(target, place, (kernel,)))
    check_version(found, place)
    check(found, target, {kernel: EVERYTHING[kernel]})


#: PTX and AMDGCN of kernels that publish, wait and copy as they should; and what becomes of them in each trap.
PTX = """
ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
st.global.v4.b32 [%rd2], {%r1, %r2, %r3, %r4};
bar.sync 0;
atom.global.gpu.acq_rel.add.u64 %rd3, [%rd4], 1;
st.global.b64 [%rd5], %rd6;
bar.sync 0;
st.release.sys.global.v2.b64 [%rd7], {%rd8, %rd9};
$L__BB0_1:
ld.acquire.sys.global.b64 %rd10, [%rd11];
mov.u64 %rd12, %globaltimer;
@%p1 bra $L__BB0_2;
@first ld.acquire.sys.global.b64 %rd13, [%rd14];
$L__BB0_2:
bra $L__BB0_1;
"""
AMDGCN = """
global_load_dwordx4 v[0:3], v[4:5], off
global_store_dwordx4 v[6:7], v[0:3], off
s_waitcnt vmcnt(0)
s_barrier
;;#ASMSTART
buffer_wbl2 sc0 sc1
s_waitcnt vmcnt(0)
global_store_dwordx2 v[8:9], v[10:11], off sc0 sc1
;;#ASMEND
.LBB0_1:
global_load_dwordx2 v[12:13], v[14:15], off sc0 sc1
s_waitcnt vmcnt(0)
buffer_inv sc0 sc1
s_memrealtime s[0:1]
s_cbranch_scc0 .LBB0_2
global_load_dwordx2 v[12:13], v[18:19], off sc0 sc1
.LBB0_2:
s_cbranch_scc1 .LBB0_1
"""
#: (kernel, what falls into the trap, what it becomes, words of the fault)
CUDA_TRAPS = [
    ("combine_send", "st.release.sys", "st.release.gpu", "the host may not see"),
    ("combine_send", ".v2.b64", ".b64", "not one 16-byte store"),
    ("combine_send", "bar.sync 0;\natom", "atom", "not ordered before the arrival"),
    ("combine_send", "bar.sync 0;\nst.release", "st.release", "no barrier between"),
    ("combine_send", "acq_rel.add", "relaxed.add", "no arrival is counted"),
    ("combine_send", "ld.acquire.sys.global.b64 %rd10, [%rd11];\n", "", "hoisted"),
    ("combine_send", "%rd12, %globaltimer", "%rd12, 0", "hoisted"),
    ("combine_send", "@%p1 bra $L__BB0_2;\n", "", "every spin"),
    ("combine_send", "$L__BB0_1:", "atom.global.acquire.gpu.add.u64 _, [%rd4], 0;\n$L__BB0_1:", "not used"),
    (
        "combine_send",
        "st.global.v4.b32 [%rd2], {%r1, %r2, %r3, %r4}",
        "st.global.b32 [%rd2], %r1",
        "stores are",
    ),
    ("combine_send", "ld.global.v4.b32 {%r1, %r2, %r3, %r4}", "ld.global.b32 %r1", "loads are not vec"),
    ("combine_send", "$L__BB0_1:", "mov.u32 %r1, 0xffffffffffff8000;\n$L__BB0_1:", "repeated in a register"),
]
HIP_TRAPS = [
    ("combine_send", "buffer_wbl2 sc0 sc1\n", "", "without a write-back"),
    ("combine_send", "v[10:11], off sc0 sc1", "v[10:11], off offset:8 sc0 sc1", "beyond the word"),
    ("combine_send", "off sc0 sc1\ns_waitcnt vmcnt(0)\nbuffer_inv", "off\ns_waitcnt vmcnt(0)\nbuffer_inv", "hoisted"),
    ("combine_send", "s_cbranch_scc0 .LBB0_2\n", "", "every spin"),
    ("combine_send", "buffer_inv sc0 sc1\n", "", "no acquire"),
    ("combine_send", "s_barrier", "s_barrier\nglobal_atomic_cmpswap v0, v[1:2], v[3:4], off", "compare-and-exchange"),
    ("combine_send", "global_store_dwordx4", "global_store_dword", "stores are"),
    ("combine_send", "global_load_dwordx4", "global_load_dword", "loads are not vec"),
]


@pytest.mark.parametrize(
    ("find", "text", "traps"),
    [(compiled_traps.cuda_faults, PTX, CUDA_TRAPS), (compiled_traps.hip_faults, AMDGCN, HIP_TRAPS)],
    ids=["cuda", "hip"],
)
def test_each_trap_is_found(
    find: Callable[[str, str], list[str]], text: str, traps: list[tuple[str, str, str, str]]
) -> None:
    for name, good, bad, words in traps:
        assert find(name, text) == []
        assert text.count(good) == 1, good
        faults = find(name, text.replace(good, bad))
        assert any(words in fault for fault in faults), (good, faults)


def test_loads_that_wait_for_each_other_are_counted_apart() -> None:
    load = "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];\n"
    for between in ("bar.sync 0;\n", "add.rn.f32 %f1, %f2, %f3;\n", "st.global.b32 [%rd2], %r1;\n"):
        assert compiled_traps.loads_at_once(".target sm_90\n" + 3 * load + between + 2 * load) == 3
    load = "global_load_dwordx4 v[0:3], v[4:5], off\n"
    for over in ("s_cbranch_execz", "s_cbranch_scc1"):
        text = 2 * (load + f"{over} .LBB0_1\n") + "s_waitcnt vmcnt(1)\n" + load
        assert compiled_traps.loads_at_once(text) == 2
    assert compiled_traps.loads_at_once(2 * (load + "s_branch .LBB0_1\n")) == 1


def test_rows_that_change_threads_are_found() -> None:
    kept = "%a = ttg.convert_layout %b : tensor<1x8xi64, #blocked> -> tensor<1x8xi64, #blocked1> loc(#loc1)\n"
    moved = "%c = ttg.convert_layout %d : tensor<4x1024xi32, #blocked1> -> tensor<4x1024xi32, #blocked> loc(#loc2)\n"
    assert compiled_traps.exchanges_of_rows(kept + moved) == ["4x1024 of i32 change threads"]
    assert compiled_traps.exchanges_of_rows(kept) == []
