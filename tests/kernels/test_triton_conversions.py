"""Conversions of the Triton kernels, interpreted, against torch: every rounding case, bit by bit."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.support.interpreter_process import interpreted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def _cases(dtype: torch.dtype) -> torch.Tensor:
    """All values of an 8-bit float dtype, the middles between neighbours, and what lies next to those."""
    exact = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    exact = exact[exact.isfinite()].unique()
    middles = (exact[1:] + exact[:-1]) / 2
    around = [exact, middles, *(torch.nextafter(middles, torch.full_like(middles, way)) for way in (-1e9, 1e9))]
    values = torch.cat(around)
    return torch.cat([values, torch.zeros(-len(values) % 1024)])


def convert_everything() -> list[str]:
    """Names of the conversions that differ from torch's."""
    from tests.kernels import conversion_kernels

    wrong = []
    for name, kernel, dtype in (
        ("e4m3fn", conversion_kernels.to_e4m3, torch.float8_e4m3fn),
        ("e4m3fnuz", conversion_kernels.to_e4m3fnuz, torch.float8_e4m3fnuz),
    ):
        values = _cases(dtype)
        values[-1], values[-2] = float("nan"), 0.0
        codes = torch.empty(len(values), dtype=torch.uint8)
        kernel[(len(values) // 1024,)](values.data_ptr(), codes.data_ptr(), BLOCK=1024)
        if not torch.equal(codes, values.to(dtype).view(torch.uint8)):
            wrong.append(name)
    for dtype, code in ((torch.bfloat16, 0), (torch.float16, 1), (torch.float32, 2)):
        torch.manual_seed(3)
        fine = torch.randn(1024) * torch.exp(5 * torch.randn(1024))
        # halfway between two bf16 values, odd and even; infinity; NaN whose payload is only in the low bits
        bits = torch.tensor([0x3F808000, 0x3F818000, 0x7F800000, 0x7F7FFFFF, 0x7F800001], dtype=torch.int32)
        fine[:5] = bits.view(torch.float32)
        back = torch.empty(1024, dtype=dtype)
        again = torch.empty(1024)
        conversion_kernels.there_and_back[(1,)](
            fine.data_ptr(), back.data_ptr(), again.data_ptr(), DTYPE=code, BLOCK=1024
        )
        same = torch.equal(back.isnan(), fine.isnan()) and torch.equal(back.nan_to_num(), fine.to(dtype).nan_to_num())
        if not same or not torch.equal(again.nan_to_num(), fine.to(dtype).float().nan_to_num()):
            wrong.append(str(dtype))
    return wrong


def quantise_everything() -> list[tuple[bool, bool]]:
    """(round_scale, what differs) against the reference."""
    from tests.kernels import conversion_kernels
    from uccl_ep_serving.oracle import quantise_fp8

    torch.manual_seed(1)
    x = torch.randn(64, 1024) * torch.exp(2 * torch.randn(64, 1))
    x[0] = 0
    x[1, :128] = 1e-6
    x[2, 5] = 448.0
    wrong = []
    for round_scale in (False, True):
        codes = torch.empty(64, 1024, dtype=torch.uint8)
        scales = torch.empty(64, 8)
        conversion_kernels.quantise[(64,)](
            x.data_ptr(), codes.data_ptr(), scales.data_ptr(), GROUPS=8, ROUND=round_scale, FNUZ=False
        )
        want, want_scales = quantise_fp8(x, round_scale)
        if not torch.equal(codes, want.view(torch.uint8)) or not torch.equal(scales, want_scales):
            wrong.append((round_scale, torch.equal(scales, want_scales)))
    return wrong


def test_conversions_equal_torch() -> None:
    assert interpreted(convert_everything) == []


def test_quantisation_equals_the_reference() -> None:
    assert interpreted(quantise_everything) == []
