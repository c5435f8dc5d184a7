"""cvt against Python's integers, NumPy and torch: all values of 16 bits and less, and what lies between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.ptx.translation.instructions import Array, Instructions, assemble, kernel_text
from tests.ptx.translation.operands import PtxError
from tests.ptx.translation.program import WIDTHS, parse
from tests.ptx.translation.translate import translate

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
EVERY_HALF = np.arange(1 << 16, dtype=np.uint16)


def number(bits: int, kind: str) -> int:
    width = WIDTHS[kind]
    bits &= (1 << width) - 1
    return bits - (1 << width) if kind[0] == "s" and bits >> (width - 1) else bits


def range_of(kind: str) -> tuple[int, int]:
    width = WIDTHS[kind]
    return (-(1 << (width - 1)), (1 << (width - 1)) - 1) if kind[0] == "s" else (0, (1 << width) - 1)


def container(kind: str) -> str:
    """The smallest register that holds it."""
    return f"{kind[0]}{max(16, WIDTHS[kind])}"


def narrower(to: str, of: str) -> bool:
    """Whether saturation can change anything: PTX has it nowhere else."""
    least, most = range_of(to)
    return least > range_of(of)[0] or most < range_of(of)[1]


@pytest.mark.parametrize("of", INTEGERS)
def test_integers(of: str) -> None:
    """A wider register is filled with the sign of a signed type, and read without its upper bits."""
    texts = {f"cvt{sat}.{to}.{of} D, A": to for to in INTEGERS for sat in ("", ".sat") if not sat or narrower(to, of)}
    near = [1 << shift for shift in (0, 7, 8, 15, 16, 31, 32, 63)]
    values = sorted({(sign * one + step) % (1 << 64) for one in near for step in (-1, 0, 1) for sign in (1, -1)})
    instructions = Instructions(list(texts), ["b64"], "b64")
    assert assemble(instructions.text) == ""
    for (text, to), result in zip(texts.items(), instructions.run(np.array(values, np.uint64)), strict=True):
        least, most = range_of(to)
        for bits, got in zip(values, result.tolist(), strict=True):
            value = number(bits, of)
            value = max(least, min(most, value)) if ".sat" in text else number(value, to)
            assert got == value & ((1 << 64) - 1), (text, hex(bits))


def test_no_saturation_where_every_value_fits() -> None:
    for to in INTEGERS:
        for of in INTEGERS:
            text = kernel_text(f".reg .b64 %a, %d; mov.u64 %a, 1; cvt.sat.{to}.{of} %d, %a;")
            if not narrower(to, of):
                with pytest.raises(PtxError, match=r"unknown modifier \.sat"):
                    translate(parse(text), weak=False)


ROUNDINGS: dict[str, Callable[[float], int]] = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


@pytest.mark.parametrize("to", INTEGERS)
def test_floats_to_integers(to: str) -> None:
    """Ties to even; too large ones become the nearest number there is, NaN becomes 0."""
    texts = {f"cvt.{rounding}.{to}.f32 D, A": rounding for rounding in ROUNDINGS}
    instructions = Instructions(list(texts), ["f32"], "b64")
    assert assemble(instructions.text) == ""
    near = [0.0, 0.5, 1.5, 2.5, 0.49999997, 127.5, 128.0, 255.5, 32767.5, 65535.5, 2.0**31, 2.0**32, 2.0**63, 2.0**64]
    values = np.array([*near, *(-one for one in near), 1e-40, 3.3e9, 1e30, -1e30, math.inf, -math.inf], np.float32)
    least, most = range_of(to)
    for (text, rounding), result in zip(texts.items(), instructions.run(values.view(np.uint32)), strict=True):
        for value, got in zip(values.tolist(), result.tolist(), strict=True):
            whole = ROUNDINGS[rounding](value) if math.isfinite(value) else int(math.copysign(1 << 70, value))
            expected = max(least, min(most, whole)) & ((1 << 64) - 1)
            assert got == expected, (text, value)
    nan = np.array([0x7FC00000, 0xFFC00001, 0x7F800001], np.uint32)
    assert [result.tolist() for result in instructions.run(nan)] == [[0, 0, 0]] * 4


@pytest.mark.parametrize("of", INTEGERS)
def test_integers_to_floats(of: str) -> None:
    """To nearest even, once."""
    values = [(1 << shift) + step for shift in (0, 7, 15, 24, 25, 31, 53, 54, 63) for step in (-3, -1, 0, 1, 2, 3)]
    bits = np.array([value % (1 << 64) for value in values], np.uint64)
    for to, form in (("f32", np.float32), ("f64", np.float64)):
        instructions = Instructions([f"cvt.rn.{to}.{of} D, A"], [container(of)], to)
        assert assemble(instructions.text) == ""
        (result,) = instructions.run(bits)
        for one, got in zip(bits.tolist(), result.view(form).tolist(), strict=True):
            value = number(one, of)
            # Python's floats are doubles, correctly rounded; a float32 is the nearest of those around it
            around = [
                form(value),
                np.nextafter(form(value), form(math.inf)),
                np.nextafter(form(value), form(-math.inf)),
            ]
            best = min(around, key=lambda one: (abs(Fraction(float(one)) - value), one.view(f"u{form().nbytes}") & 1))
            assert got == float(best), (value, to)


def test_integral_floats() -> None:
    texts = {f"cvt.{rounding}.f32.f32 D, A": rounding for rounding in ROUNDINGS}
    instructions = Instructions([*texts, "cvt.rni.ftz.f32.f32 D, A"], ["f32"], "f32")
    assert assemble(instructions.text) == ""
    values = np.array([0.5, 1.5, -0.5, -1.5, 2.5, 1e-40, -1e-40, 8388609.0, 1e30, -2.7, 3.2], np.float32)
    *results, flushed = (one.view(np.float32).tolist() for one in instructions.run(values.view(np.uint32)))
    for rounding, result in zip(texts.values(), results, strict=True):
        assert result == [float(ROUNDINGS[rounding](one)) for one in values.tolist()]
    assert flushed == results[0]
    assert math.copysign(1, results[1][2]) == -1


def between(dtype: torch.dtype) -> Array:
    """float32 bits of all finite values of a format of 16 bits or less, the middles between neighbours, what lies next
    to those, infinity and NaN."""
    bits = EVERY_HALF if dtype.itemsize == 2 else EVERY_HALF[:256].astype(np.uint8)
    exact = torch.from_numpy(bits.astype(f"i{dtype.itemsize}")).view(dtype).float()
    exact = exact[exact.isfinite()].unique()
    middles = (exact[1:].double() + exact[:-1].double()).div(2).float()
    around = [torch.nextafter(middles, torch.full_like(middles, way)) for way in (-math.inf, math.inf)]
    largest = exact.max() * torch.tensor([1.01, 1.04, 1.1, 2.0, math.inf])
    values = torch.cat([exact, -exact, middles, *around, largest, -largest])
    special = np.array([0x80000000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 1, 0x80000001], np.uint32)
    return np.concatenate([values.numpy().view(np.uint32), special])


def as_torch(bits: Array, dtype: torch.dtype, nan: int, saturated: bool) -> Array:
    """What torch makes of float32 bits; NaN is the one that GPUs make."""
    values = torch.from_numpy(bits.view(np.float32))
    most = torch.finfo(dtype).max
    kept = values.clamp(-most, most) if saturated else values
    integers = torch.int16 if dtype.itemsize == 2 else torch.uint8
    found = kept.to(dtype).view(integers).numpy().view(f"u{dtype.itemsize}")
    return np.where(values.isnan().numpy(), np.array(nan, found.dtype), found)


@pytest.mark.parametrize(("name", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_halves(name: str, dtype: torch.dtype) -> None:
    bits = between(dtype)
    expected = as_torch(bits, dtype, 0x7FFF, saturated=False)
    single = Instructions([f"cvt.rn.{name}.f32 D, A"], ["f32"], "b16")
    pairs = Instructions([f"cvt.rn.{name}x2.f32 D, A, B", f"cvt.rn.relu.{name}x2.f32 D, A, B"], ["f32"] * 2, "b32")
    assert [assemble(one.text) for one in (single, pairs)] == ["", ""]
    (found,) = single.run(bits)
    assert np.array_equal(found, expected)
    both, positive = pairs.run(bits, bits[::-1])
    assert np.array_equal(both, expected.astype(np.uint32) << 16 | expected[::-1])
    kept = np.where((expected >> 15) == 1, 0, expected).astype(np.uint32)
    assert np.array_equal(positive, kept << 16 | kept[::-1])


@pytest.mark.parametrize(("name", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_halves_back(name: str, dtype: torch.dtype) -> None:
    instructions = Instructions([f"cvt.f32.{name} D, A"], ["b16"], "f32")
    assert assemble(instructions.text) == ""
    (found,) = instructions.run(EVERY_HALF)
    values = torch.from_numpy(EVERY_HALF.view(np.int16)).view(dtype).float()
    expected = np.where(values.isnan().numpy(), np.uint32(0x7FFFFFFF), values.numpy().view(np.uint32))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_bytes(name: str, dtype: torch.dtype) -> None:
    """All values that 16 bits have, and what lies around the middles between those of the format."""
    halves = [torch.from_numpy(EVERY_HALF.view(np.int16)).view(one).float() for one in (torch.float16, torch.bfloat16)]
    bits = np.concatenate([*(one.numpy().view(np.uint32) for one in halves), between(dtype)])
    expected = as_torch(bits, dtype, 0x7F, saturated=True)
    texts = [f"cvt.rn.satfinite.{name}x2.f32 D, A, B", f"cvt.rn.satfinite.relu.{name}x2.f32 D, A, B"]
    instructions = Instructions(texts, ["f32", "f32"], "b16")
    assert assemble(instructions.text) == ""
    both, positive = instructions.run(bits, bits[::-1])
    assert np.array_equal(both, expected.astype(np.uint16) << 8 | expected[::-1])
    kept = np.where((expected >> 7) == 1, 0, expected).astype(np.uint16)
    assert np.array_equal(positive, kept << 8 | kept[::-1])


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_bytes_back(name: str, dtype: torch.dtype) -> None:
    texts = [f"cvt.rn.f16x2.{name}x2 D, A", f"cvt.rn.relu.f16x2.{name}x2 D, A"]
    instructions = Instructions(texts, ["b16"], "b32")
    assert assemble(instructions.text) == ""
    both, positive = instructions.run(EVERY_HALF)
    values = torch.arange(256, dtype=torch.uint8).view(dtype).half()
    table = np.where(values.isnan().numpy(), np.uint16(0x7FFF), values.numpy().view(np.uint16)).astype(np.uint32)
    assert np.array_equal(both, table[EVERY_HALF >> 8] << 16 | table[EVERY_HALF & 255])
    table = np.where(table >> 15 == 1, 0, table)
    assert np.array_equal(positive, table[EVERY_HALF >> 8] << 16 | table[EVERY_HALF & 255])
