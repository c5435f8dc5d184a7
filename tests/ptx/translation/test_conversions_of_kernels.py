"""The conversions of our kernels as Triton compiles them against torch: every value of 16 bits, and as many of 32."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ptx.machine.machine import Machine
from tests.ptx.memory.sequential import Sequential
from tests.ptx.other_process import printed_by
from tests.ptx.translation.host_code import Kernel
from tests.ptx.translation.instructions import run_threads
from tests.support.ll_cases import Case
from tests.support.ll_cases import quantised as expected_of

pytestmark = [
    pytest.mark.triton,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
FORMATS = {False: torch.float8_e4m3fn, True: torch.float8_e4m3fnuz}
#: What the scale of a block is made of where its values are smaller.
FLOOR = 1e-4
#: Blocks of 128 values of a program of ``quantise``.
GROUPS = 4


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    found: dict[str, Any] = printed_by(Path(__file__).with_name("compiled_conversions.py"))
    return found


def middles(dtype: torch.dtype) -> torch.Tensor:
    """Those between neighbours of ``dtype``, ascending."""
    exact = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    exact = exact[exact.isfinite()].unique()
    return (exact[1:] + exact[:-1]) / 2


def values(dtype: torch.dtype) -> torch.Tensor:
    """All of bf16 and of fp16, of float32 one between each two neighbours in bf16, and what lies on and around the
    middles between neighbours of ``dtype``."""
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    wide = ((patterns.int() << 16) + 0x9E37).view(torch.float32)
    between = middles(dtype)
    around = [torch.nextafter(between, torch.full_like(between, way)) for way in (-1e9, 1e9)]
    narrow = (patterns.view(one).float() for one in (torch.bfloat16, torch.float16))
    found = torch.cat([*narrow, wide, between, *around])
    return torch.cat([found, torch.zeros(-len(found) % 1024)])


@pytest.mark.parametrize(
    ("name", "dtype", "nan"), [("to_e4m3", torch.float8_e4m3fn, 0x7F), ("to_e4m3fnuz", torch.float8_e4m3fnuz, 0x80)]
)
def test_bit_by_bit(name: str, dtype: torch.dtype, nan: int, compiled: dict[str, Any]) -> None:
    kernel = Kernel(compiled[name]["ptx"], weak=False)
    given = values(dtype)
    found = torch.zeros(len(given), dtype=torch.uint8)
    block = kernel.program.threads
    parameters = [given.data_ptr(), found.data_ptr(), 0, 0][: len(kernel.program.parameters)]
    _, events = run_threads(kernel, len(given) // 1024 * block, parameters, block=block)
    assert not events.any()
    most = torch.finfo(dtype).max
    expected = given.clamp(-most, most).to(dtype).view(torch.uint8).numpy()
    expected = np.where(given.isnan().numpy(), np.uint8(nan), expected)
    assert len(given) > 3 * 65536
    assert np.array_equal(found.numpy(), expected)


def largest_values(most: float) -> torch.Tensor:
    """Of blocks: every exponent, with the fractions at which a rounded scale changes and their neighbours on both
    sides; and nothing, less than the floor and just more, the largest number and infinity."""
    changes = torch.tensor([1.0, most]).view(torch.int32) & 0x7FFFFF
    fractions = (changes[:, None] + torch.arange(-2, 3)).flatten() & 0x7FFFFF
    exponents = torch.arange(int(torch.tensor(FLOOR).view(torch.int32)) >> 23, 255)
    every = (exponents[:, None] << 23) + fractions
    others = torch.tensor([0.0, 1e-42, 1e-6, FLOOR, FLOOR * (1 + 2**-22), torch.finfo(torch.float32).max, torch.inf])
    return torch.cat([every.flatten().to(torch.int32).view(torch.float32), others])


def blocks(dtype: torch.dtype) -> torch.Tensor:
    """Rows of 128 values: the largest, and what its scale makes of the middles between neighbours of ``dtype`` and of
    what lies next to them, a third each, another third in the next row."""
    most = torch.finfo(dtype).max
    first = largest_values(most)[:, None]
    scale = torch.exp2(torch.log2(first.clamp(min=FLOOR).double() / most).ceil()).float()
    rest = middles(dtype)
    rest = rest[rest > 0][-127:] * scale
    away = (torch.arange(rest.shape[1]) + torch.arange(len(rest))[:, None]) % 3 - 1
    beside = torch.nextafter(rest, torch.where(away < 0, 0.0, torch.inf))
    rest = torch.where(away == 0, rest, beside)
    # in every second row negative
    rows = torch.cat([first, rest.minimum(first), torch.zeros(len(first), 127 - rest.shape[1])], dim=1)
    rows[1::2].neg_()
    return torch.cat([rows, torch.zeros(-len(rows) % GROUPS, 128)])


def quantised(kernel: Kernel, shared: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 bits like ``x``, and the scales of its rows."""
    codes, scales = torch.zeros(x.shape, dtype=torch.uint8), torch.zeros(len(x))
    machine = Machine(1, Sequential())
    for name, tensor in (("x", x), ("codes", codes), ("scales", scales)):
        machine.memory.register(name, tensor.data_ptr(), tensor.nbytes)
    arguments = [x.data_ptr(), codes.data_ptr(), scales.data_ptr()]
    machine.launch_later(0, kernel, (len(x) // GROUPS,), arguments, shared)
    machine.run()
    return codes, scales


@pytest.mark.parametrize("fnuz", [False, True], ids=["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("rounded", [False, True], ids=["scales", "ue8m0"])
def test_blocks_with_every_scale(rounded: bool, fnuz: bool, compiled: dict[str, Any]) -> None:
    """FP8 values and scales, those of UE8M0 among them, which pack_dispatch takes the exponents of."""
    found = compiled[f"quantise {rounded} {fnuz}"]
    kernel, dtype = Kernel(found["ptx"], weak=False), FORMATS[fnuz]
    x = blocks(dtype)
    codes, scales = quantised(kernel, found["shared"], x)
    want, want_scales = expected_of(Case(fnuz=fnuz, round_scale=rounded), x)
    assert torch.equal(scales, want_scales.flatten())
    # torch keeps the sign of 0 times infinity
    want_codes = torch.where(want.isnan(), 0x80 if fnuz else 0x7F, want.view(torch.uint8))
    assert torch.equal(codes, want_codes)
    if rounded:
        bits = scales.view(torch.int32)
        assert not (bits & 0x7FFFFF).any()
        assert torch.equal((bits >> 23).to(torch.uint8), scales.to(torch.float8_e8m0fnu).view(torch.uint8))
        assert len(scales.unique()) > 140


@pytest.mark.parametrize("fnuz", [False, True], ids=["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("rounded", [False, True], ids=["scales", "ue8m0"])
def test_a_nan_spoils_its_block_and_nothing_else(rounded: bool, fnuz: bool, compiled: dict[str, Any]) -> None:
    found = compiled[f"quantise {rounded} {fnuz}"]
    x = torch.ones(GROUPS, 128)
    x[1, 77] = torch.nan
    codes, scales = quantised(Kernel(found["ptx"], weak=False), found["shared"], x)
    assert scales.isnan().tolist() == [False, True, False, False]
    assert (codes[1] == (0x80 if fnuz else 0x7F)).all()
    assert not codes[[0, 2, 3]].view(FORMATS[fnuz]).isnan().any()
    # as NaN in UE8M0
    assert int(scales.view(torch.int32)[1]) >> 23 == 0xFF
