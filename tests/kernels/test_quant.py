"""FP8 rows and float32 sums against torch: every rounding case, every source dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from uccl_ep_serving.kernels.cpu.quant import accumulate, narrow, narrow_sum_of_two, quantise, widen
from uccl_ep_serving.oracle import dequantise_fp8, quantise_fp8, unpack_ue8m0
from uccl_ep_serving.protocol.message import (
    DTYPE_BF16,
    DTYPE_F16,
    DTYPE_F32,
    DTYPE_FP8,
    DTYPE_FP8_UE8M0,
    row_bytes,
)

CODES = {torch.bfloat16: DTYPE_BF16, torch.float16: DTYPE_F16, torch.float32: DTYPE_F32}


def quantised(x: torch.Tensor, code: int, round_scale: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, float32 scales) of the kernel."""
    tokens, hidden = x.shape
    stride = row_bytes(hidden, code)
    rows = torch.full((tokens, stride), 0xAA, dtype=torch.uint8)
    scratch = torch.empty(128)
    quantise(
        rows.data_ptr(),
        stride,
        x.data_ptr(),
        tokens,
        hidden,
        CODES[x.dtype],
        code,
        int(round_scale),
        scratch.data_ptr(),
    )
    values = rows[:, :hidden].contiguous().view(torch.float8_e4m3fn)
    if code == DTYPE_FP8:
        return values, rows[:, hidden : hidden + hidden // 32].contiguous().view(torch.float32)
    return values, unpack_ue8m0(rows[:, hidden : hidden + hidden // 128].contiguous().view(torch.int32))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("round_scale", [False, True])
@pytest.mark.parametrize("code", [DTYPE_FP8, DTYPE_FP8_UE8M0])
def test_against_torch(dtype: torch.dtype, round_scale: bool, code: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(64, 1024) * torch.exp(2 * torch.randn(64, 1))
    x[0] = 0
    x[1, :128] = 1e-6
    x[2, 5] = 448.0
    x = x.to(dtype)
    values, scales = quantised(x, code, round_scale)
    want_values, want_scales = quantise_fp8(x, round_scale or code == DTYPE_FP8_UE8M0)
    assert same(values, want_values)
    assert torch.equal(scales, want_scales)
    # e4m3 has three mantissa bits; below its smallest normal value the step is 2**-9 of the scale
    error = (dequantise_fp8(values, scales) - x.float()).abs()
    bound = x.float().abs() / 16 + scales.repeat_interleave(128, dim=1) * 2**-10
    assert (error <= bound * 1.0001).all()


def test_every_rounding_case_of_e4m3() -> None:
    """A block whose largest value is 448 has the scale 1: values then go through the conversion unscaled."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = codes[codes.isfinite()].unique()
    middles = (exact[1:] + exact[:-1]) / 2
    around = [exact, middles, *(torch.nextafter(middles, torch.full_like(middles, way)) for way in (-1e9, 1e9))]
    cases = torch.cat(around)
    blocks = torch.zeros(-(-len(cases) // 127), 128)
    blocks[:, 0] = 448.0
    flat = torch.zeros(blocks.shape[0] * 127)
    flat[: len(cases)] = cases
    blocks[:, 1:] = flat.view(-1, 127)
    values, scales = quantised(blocks, DTYPE_FP8)
    assert torch.equal(scales, torch.ones_like(scales))
    assert same(values, blocks.to(torch.float8_e4m3fn))


def test_not_finite_spoils_only_its_block() -> None:
    x = torch.ones(1, 384)
    x[0, 3], x[0, 200] = float("nan"), float("inf")
    values, scales = quantised(x, DTYPE_FP8)
    restored = dequantise_fp8(values, scales)
    assert restored[0, :128].isnan().all()
    assert restored[0, 200].isnan()
    assert torch.allclose(restored[0, 256:], torch.ones(128))


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("count", [1, 7, 64, 1000])
def test_widen_and_narrow(dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(count)
    x = (torch.randn(count) * torch.exp(5 * torch.randn(count))).to(dtype)
    wide = torch.empty(count)
    widen(wide.data_ptr(), x.data_ptr(), count, CODES[dtype])
    assert torch.equal(wide, x.float())
    fine = torch.randn(count) * torch.exp(5 * torch.randn(count))
    back = torch.empty(count, dtype=dtype)
    narrow(back.data_ptr(), fine.data_ptr(), count, CODES[dtype])
    assert torch.equal(back, fine.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_special_values(dtype: torch.dtype) -> None:
    """Ties, overflow, infinities, NaN whose payload is only in the low bits, subnormals."""
    bits = [0x7FC00000, 0x7F800001, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x00000001, 0x80000000]
    wide = torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))
    out = torch.empty(len(bits), dtype=dtype)
    narrow(out.data_ptr(), wide.data_ptr(), len(bits), CODES[dtype])
    want = wide.to(dtype)
    assert torch.equal(out.isnan(), want.isnan())
    kept = ~want.isnan()
    assert torch.equal(out[kept].view(torch.int16), want[kept].view(torch.int16))


@pytest.mark.parametrize("dtype", CODES)
def test_accumulate_rounds_product_and_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    total = torch.randn(500)
    rows = [torch.randn(500).to(dtype) for _ in range(4)]
    weights = torch.rand(4)
    want = total.clone()
    for row, weight in zip(rows, weights, strict=True):
        want = want + weight * row.float()
        accumulate(total.data_ptr(), row.data_ptr(), 500, CODES[dtype], np.float32(weight.item()))
    assert torch.equal(total, want)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sum_of_two_against_torch(dtype: torch.dtype, offset: int) -> None:
    """Every bfloat16 value beside drawn ones, and values whose sums are NaN, infinite, subnormal or halfway."""
    drawn = torch.randint(-(1 << 15), 1 << 15, (1 << 16,), generator=torch.manual_seed(0)).short()
    every = torch.arange(-(1 << 15), 1 << 15).short()
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 3e38, 1.0, 2**-8, 3 * 2**-9])
    left = torch.cat((every, special.repeat_interleave(11).bfloat16().view(torch.int16))).view(torch.bfloat16)
    right = torch.cat((drawn, special.repeat(11).bfloat16().view(torch.int16))).view(torch.bfloat16)
    # rows may start at any value of a tensor, not only at even ones
    count = len(left) // 2 * 2
    one, two = (torch.zeros(count + offset, dtype=dtype)[offset:].copy_(x[:count]) for x in (left, right))
    total = torch.zeros(count + offset, dtype=dtype)[offset:]
    narrow_sum_of_two(total.data_ptr(), one.data_ptr(), two.data_ptr(), count, CODES[dtype])
    expected = (one.float() + two.float()).to(dtype)
    nan = expected.isnan()
    assert nan.any()
    assert torch.equal(total.isnan(), nan)
    assert torch.equal(_bits(total[~nan]), _bits(expected[~nan]))


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)
