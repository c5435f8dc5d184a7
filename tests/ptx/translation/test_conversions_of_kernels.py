"""The conversions of our kernels as Triton compiles them: every value of 16 bits, and more, against torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ptx.other_process import printed_by
from tests.ptx.translation.host_code import Kernel
from tests.ptx.translation.instructions import run_threads

pytestmark = [
    pytest.mark.triton,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


@pytest.fixture(scope="module")
def compiled() -> dict[str, str]:
    found: dict[str, str] = printed_by(Path(__file__).with_name("compiled_conversions.py"))
    return found


def values(dtype: torch.dtype) -> torch.Tensor:
    """All of bf16 and of fp16, and what lies on and around the middles between neighbours of ``dtype``."""
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    exact = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    exact = exact[exact.isfinite()].unique()
    middles = (exact[1:] + exact[:-1]) / 2
    around = [torch.nextafter(middles, torch.full_like(middles, way)) for way in (-1e9, 1e9)]
    found = torch.cat([*(patterns.view(one).float() for one in (torch.bfloat16, torch.float16)), middles, *around])
    return torch.cat([found, torch.zeros(-len(found) % 1024)])


@pytest.mark.parametrize(
    ("name", "dtype", "nan"), [("to_e4m3", torch.float8_e4m3fn, 0x7F), ("to_e4m3fnuz", torch.float8_e4m3fnuz, 0x80)]
)
def test_bit_by_bit(name: str, dtype: torch.dtype, nan: int, compiled: dict[str, str]) -> None:
    kernel = Kernel(compiled[name], weak=False)
    given = values(dtype)
    found = torch.zeros(len(given), dtype=torch.uint8)
    block = kernel.program.threads
    parameters = [given.data_ptr(), found.data_ptr(), 0, 0][: len(kernel.program.parameters)]
    _, events = run_threads(kernel, len(given) // 1024 * block, parameters, block=block)
    assert not events.any()
    most = torch.finfo(dtype).max
    expected = given.clamp(-most, most).to(dtype).view(torch.uint8).numpy()
    expected = np.where(given.isnan().numpy(), np.uint8(nan), expected)
    assert len(given) > 2 * 65536
    assert np.array_equal(found.numpy(), expected)
