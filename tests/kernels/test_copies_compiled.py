"""What NVRTC makes of the kernels of bulk copies for GPUs that need not be there."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.support.nvrtc import needs_nvrtc

pytestmark = [
    needs_nvrtc,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
normal = pytest.importorskip("uccl_ep_serving.kernels.cuda.normal", reason="needs Triton")

from tests.kernels.compiled_traps import cubin_resources  # noqa: E402
from uccl_ep_serving.kernels.blocks.normal_device import NormalFormat, NormalOpening, NormalTensors  # noqa: E402
from uccl_ep_serving.kernels.cuda import nvrtc  # noqa: E402
from uccl_ep_serving.kernels.triton.target import Target  # noqa: E402
from uccl_ep_serving.protocol.message import DTYPE_BF16, DTYPE_F32, DTYPE_FP8, NormalNotify  # noqa: E402

#: Registers of a multiprocessor, bytes that a block can have in shared memory, with 1 KiB that the driver takes.
REGISTERS, SHARED = 65536, 227 << 10
#: kind, dtype, bytes of a row, its meta and its scales, top-k: of DeepSeek-V3, and of rows that end in a short piece.
FORMATS = {
    "fp8": (NormalNotify.OPERATION_DISPATCH, DTYPE_FP8, 7168, 288, 224, 8),
    "cached": (NormalNotify.OPERATION_CACHED_DISPATCH, DTYPE_BF16, 14336, 0, 0, 0),
    "combine": (NormalNotify.OPERATION_COMBINE, DTYPE_BF16, 14336, 32, 0, 8),
    "float32": (NormalNotify.OPERATION_COMBINE, DTYPE_F32, 10256, 0, 0, 0),
    "widest": (NormalNotify.OPERATION_CACHED_DISPATCH, DTYPE_BF16, 9216, 0, 0, 0),
    "short": (NormalNotify.OPERATION_DISPATCH, DTYPE_BF16, 272, 32, 0, 2),
}


def code_of(name: str, ranks: int) -> normal.CopyCode:
    """A kernel of :data:`FORMATS` for so many ranks."""
    kind, dtype, row, meta, scale, topk = FORMATS[name]
    kernels = normal.CopyNormalKernels(ranks, Target(1, 32))
    form = NormalFormat(kind, dtype, row, meta, scale, topk, 32, 0, 0, 0, 16)
    opening, tensors = NormalOpening(16, 1, 16, 16, 16, 16, 1), NormalTensors(*[16] * 8)
    if kind == NormalNotify.OPERATION_COMBINE:
        return kernels.combine(16, 16, form, opening, tensors, 1, 16, 1, (16, 16))[-1].code
    return kernels.dispatch(16, 16, form, opening, tensors, 1, 16, 1, True)[-1].code


@pytest.mark.parametrize(
    ("gpu", "ranks"),
    [
        pytest.param(gpu, ranks, marks=[] if (gpu, ranks) == ("sm_90", 8) else pytest.mark.triton)
        for gpu in nvrtc.GPUS
        for ranks in (2, 8, 256)
    ],
)
@pytest.mark.parametrize("name", FORMATS)
def test_a_block_fits_a_multiprocessor_and_spills_nothing(gpu: str, name: str, ranks: int) -> None:
    code = code_of(name, ranks)
    binary = code.compiled(gpu)
    found = cubin_resources(binary.cubin)
    assert found["spilled"] == 0
    assert found["registers"] * code.threads <= REGISTERS
    fixed = sum(int(size) for size in re.findall(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]", binary.ptx))
    assert code.shared + fixed <= SHARED


@pytest.mark.parametrize("name", FORMATS)
def test_no_access_leaves_open_where_its_memory_is(name: str) -> None:
    """A generic access looks at each address whether it is shared memory."""
    text = code_of(name, 8).compiled("sm_90").ptx
    assert re.findall(r"^\s+(?:@%p\d+ )?(?:ld|st)\.(?:v\d\.)?[usfb]\d+ .*", text, re.M) == []
