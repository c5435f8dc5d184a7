"""CUDA C compiled for GPUs that need not be there: it compiles, is kept, and what is wrong is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from uccl_ep_serving.errors import ConfigError
from uccl_ep_serving.kernels.cuda import nvrtc
from uccl_ep_serving.kernels.cuda.nvrtc import GPUS, Binary, compiled, headers

try:
    nvrtc.version()
except ConfigError as reason:
    pytest.skip(f"NVRTC: {reason}", allow_module_level=True)

#: Takes everything from the headers, so that nothing in them is never compiled.
EVERYTHING = """
#include "bulk.cuh"
#include "words.cuh"

extern "C" __global__ void __launch_bounds__(32) everything(word* at) {
    extern __shared__ __align__(128) word row[];
    __shared__ mbarrier full;
    if (!is_elected()) {
        return;
    }
    make_mbarrier(&full, 2);
    fence_mbarriers();
    if (load_acquire_sys(at) + load_acquire_gpu(at + 1) == 7) {
        return;
    }
    fence_global();
    arrive(&full);
    arrive_expect(&full, 64);
    bulk_load(row, at + 2, 64, &full);
    wait_phase(&full, 0);
    row[0] += NUMBER;
    fence_shared();
    bulk_store(at + 10, row, 64);
    commit();
    wait_read<1>();
    wait_stores<0>();
    const word next = reinterpret_cast<word>(at + 22);
    poke(next, peek(next + 8) + *global<word>(next + 16) + add_gpu(at + 20, 2) + exchange_gpu(at + 21, 3) + clock_ns());
    store_release_sys(at, 1);
}
"""


@pytest.mark.parametrize("gpu", GPUS)
def test_all_of_the_headers(gpu: str) -> None:
    found = compiled(EVERYTHING, "everything.cu", gpu, {"NUMBER": 5})
    assert f".target {gpu}\n" in found.ptx
    assert found.cubin.startswith(b"\x7fELF")
    # nothing spills, and the lines of the source are told
    assert ".local" not in found.ptx
    assert re.search(r'\.file\s+\d+\s+".*bulk\.cuh"', found.ptx)


def test_every_function_is_in_it_and_every_instruction_is_in_one() -> None:
    text = "\n".join(headers()[name] for name in ("bulk.cuh", "words.cuh"))
    functions = re.findall(r"__forceinline__ \w+ (\w+)\(", text)
    assert len(functions) > 15
    for one in functions:
        called = re.search(rf"\b{one}[(<]", EVERYTHING) or one in ("shared_address", "phase_is_over")
        assert called, f"{one} is compiled by no test"
    instructions = re.findall(r'"((?!selp)[a-z]\w*\.[\w.:]+)[ ;]', text)
    assert len(set(instructions)) == len(instructions) > 15


def test_code_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UCCL_EP_CACHE_DIR", str(tmp_path))
    first = compiled(EVERYTHING, "everything.cu", "sm_90", {"NUMBER": 5})
    number: list[int] = []

    def compile_again(*_: object) -> Binary:
        number.append(1)
        return first

    monkeypatch.setattr(nvrtc, "_compile", compile_again)
    assert compiled(EVERYTHING, "everything.cu", "sm_90", {"NUMBER": 5}) == first
    assert not number
    for other in (
        {"gpu": "sm_100"},
        {"constants": {"NUMBER": 6}},
        {"text": EVERYTHING + "\n"},
        {"name": "other.cu"},
        {"included": {**headers(), "words.cuh": headers()["words.cuh"] + "\n"}},
    ):
        compiled(**{"text": EVERYTHING, "name": "everything.cu", "gpu": "sm_90", "constants": {"NUMBER": 5}} | other)  # type: ignore[arg-type]
    assert len(number) == 5


def test_what_is_refused_is_told_by_its_line() -> None:
    with pytest.raises(ConfigError, match=r"refuses wrong\.cu with .*sm_90[\s\S]*wrong\.cu\(2\): error"):
        compiled("\nwrong", "wrong.cu", "sm_90")
    with pytest.raises(ConfigError, match="sm_11"):
        compiled(EVERYTHING, "everything.cu", "sm_11", {"NUMBER": 5})


def test_bulk_copies_are_not_for_older_gpus() -> None:
    with pytest.raises(ConfigError, match="sm_90 or higher"):
        compiled(EVERYTHING, "everything.cu", "sm_80", {"NUMBER": 5})


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_libraries", lambda: iter(()))
    monkeypatch.setattr(nvrtc.ctypes.util, "find_library", lambda name: None)
    with pytest.raises(ConfigError, match="pip install nvidia-cuda-nvrtc"):
        nvrtc._nvrtc.__wrapped__()
