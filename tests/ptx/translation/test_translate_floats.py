"""Floating-point arithmetic against fractions, rounded here, and against NumPy's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ptx.translation.instructions import Array, Instructions, assemble

NAN = 0x7FFFFFFF
#: Bits of zeros, subnormal numbers, what is next to them, ones, ties, the largest, infinity, quiet and other NaNs.
CORNERS = [
    *(0x00000000, 0x00000001, 0x00400000, 0x007FFFFF, 0x00800000, 0x00800001, 0x3F7FFFFF, 0x3F800000, 0x3F800001),
    *(0x3F000000, 0x40490FDB, 0x4B800000, 0x4B800001, 0x33800000, 0x5F3504F3, 0x1F800000, 0x7F7FFFFF, 0x7F800000),
    *(0x7FC00000, 0x7F800001),
]
CORNERS += [one | 1 << 31 for one in CORNERS]


def number(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


def rounded(value: Fraction, zero_sign: int = 0) -> int:
    """float32 bits of the nearest number, to even."""
    sign = zero_sign if value == 0 else int(value < 0)
    value = abs(value)
    if value == 0:
        return sign << 31
    exponent = max(math.frexp(float(value))[1] - 1 if value > Fraction(1, 1 << 160) else -149, -126)
    while value >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while exponent > -126 and value < Fraction(2) ** exponent:
        exponent -= 1
    units = value / Fraction(2) ** (exponent - 23)
    whole = round(units)  # to even
    bits = whole + ((exponent + 126) << 23) if whole >= 1 << 23 or exponent > -126 else whole
    return sign << 31 | min(bits, 0x7F800000)


def flushed(bits: int) -> int:
    return bits & 1 << 31 if not bits & 0x7F800000 else bits


def saturated(bits: int) -> int:
    value = number(bits)
    return 0 if math.isnan(value) or value <= 0 else min(bits, 0x3F800000)


@functools.cache
def arithmetic(name: str, a: int, b: int, c: int) -> int:
    """float32 bits of a result that is rounded once, by fractions where all numbers are finite."""
    x, y, z = number(a), number(b), number(c)
    if name == "fma":
        if all(map(math.isfinite, (x, y, z))):
            product, exact = Fraction(x) * Fraction(y), Fraction(x) * Fraction(y) + Fraction(z)
            negative = math.copysign(1, x) * math.copysign(1, y) < 0
            both = negative and math.copysign(1, z) < 0
            return rounded(exact, int(both and product == 0 and z == 0))
        with np.errstate(all="ignore"):
            return special(np.float64(x) * np.float64(y) + np.float64(z))
    exact_of = {"add": lambda: Fraction(x) + Fraction(y), "sub": lambda: Fraction(x) - Fraction(y)}
    exact_of |= {"mul": lambda: Fraction(x) * Fraction(y), "div": lambda: Fraction(x) / Fraction(y)}
    if math.isfinite(x) and math.isfinite(y) and not (name == "div" and y == 0):
        signs = {"add": (a & b) >> 31, "sub": (a & ~b) >> 31 & 1}.get(name, (a ^ b) >> 31)
        return rounded(exact_of[name](), signs)
    with np.errstate(all="ignore"):
        operate = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[name]
        return special(operate(np.float64(x), np.float64(y)))


def special(value: np.floating) -> int:
    """Bits of infinity or NaN."""
    return NAN if np.isnan(value) else int(np.float32(value).view(np.uint32))


def smaller(largest: bool, keeps_nan: bool, a: int, b: int) -> int:
    """min or max: of numbers, -0 less than +0; of a NaN and a number the number, or NaN."""
    known = [one for one in (a, b) if not math.isnan(number(one))]
    if not known or (keeps_nan and len(known) < 2):
        return NAN
    ordered = sorted(known, key=lambda one: (number(one), -(one >> 31)))
    return ordered[-1 if largest else 0]


Reference = Callable[[int, int, int], int]


def changed(name: str, ftz: bool, sat: bool) -> Reference:
    def reference(a: int, b: int, c: int) -> int:
        before = [flushed(one) if ftz else one for one in (a, b, c)]
        after = arithmetic(name, *before)
        after = flushed(after) if ftz else after
        return saturated(after) if sat else after

    return reference


def references() -> dict[str, Reference]:
    found: dict[str, Reference] = {}
    for name in ("add", "sub", "mul", "fma"):
        inputs = "D, A, B, C" if name == "fma" else "D, A, B"
        for rounding in (".rn",) if name == "fma" else ("", ".rn"):
            for ftz in (False, True):
                for sat in (False, True):
                    text = f"{name}{rounding}{'.ftz' * ftz}{'.sat' * sat}.f32 {inputs}"
                    found[text] = changed(name, ftz, sat)
    for how in ("rn", "full", "approx"):
        found[f"div.{how}.f32 D, A, B"] = changed("div", False, False)
        found[f"div.{how}.ftz.f32 D, A, B"] = changed("div", True, False)
    for which in ("min", "max"):
        found[f"{which}.f32 D, A, B"] = lambda a, b, c, which=which: smaller(which == "max", False, a, b)
        found[f"{which}.NaN.f32 D, A, B"] = lambda a, b, c, which=which: smaller(which == "max", True, a, b)
    found["abs.f32 D, A"] = lambda a, b, c: a & ~(1 << 31)
    found["neg.f32 D, A"] = lambda a, b, c: a ^ 1 << 31
    found["abs.ftz.f32 D, A"] = lambda a, b, c: flushed(a) & ~(1 << 31)
    found["neg.ftz.f32 D, A"] = lambda a, b, c: flushed(a) ^ 1 << 31
    return found


@functools.cache
def singles() -> Instructions:
    return Instructions(list(references()), ["f32"] * 3, "f32")


def check(inputs: list[tuple[int, int, int]]) -> None:
    results = singles().run(*(np.array(column, np.uint32) for column in zip(*inputs, strict=True)))
    for (text, reference), result in zip(references().items(), results, strict=True):
        for row, got in zip(inputs, result.tolist(), strict=True):
            assert got == reference(*row), (text, [hex(one) for one in row], hex(got))


def test_corners() -> None:
    some = CORNERS
    check([(a, b, some[(5 * i + 3 * j) % len(some)]) for i, a in enumerate(some) for j, b in enumerate(some[::5])])


@settings(max_examples=10)
@given(st.data())
def test_numbers(data: st.DataObject) -> None:
    """Any bits, and numbers near each other, which cancel and tie."""
    any_bits = st.integers(0, (1 << 32) - 1)
    near = st.integers(0x3F000000, 0x41000000) | st.integers(0xBF000000, 0xC1000000)
    row = st.tuples(any_bits, any_bits, any_bits) | st.tuples(near, near, near)
    check(data.draw(st.lists(row, min_size=1, max_size=8)))


def test_a_fused_product_is_not_rounded() -> None:
    """(1 + u)(1 - u) - 1 is -u * u, and 0 if the product were rounded."""
    a, b, c = 0x3F800001, 0x3F7FFFFE, 0xBF800000
    instructions = Instructions(["fma.rn.f32 D, A, B, C"], ["f32"] * 3, "f32")
    (found,) = instructions.run(np.array([a]), np.array([b]), np.array([c]))
    assert number(int(found[0])) == -(2.0**-46)


def test_pairs() -> None:
    """f32x2: each half by itself."""
    texts = ["add.rn.f32x2 D, A, B", "mul.rn.f32x2 D, A, B", "fma.rn.ftz.f32x2 D, A, B, C", "sub.rn.f32x2 D, A, B"]
    instructions = Instructions(texts, ["b64"] * 3, "b64")
    assert assemble(instructions.text) == ""
    some = CORNERS
    low = [(a, some[7 * i % len(some)], some[11 * i % len(some)]) for i, a in enumerate(some)]
    high = low[::-1]
    inputs = [
        np.array([h << 32 | one for h, one in zip(*pair, strict=True)], np.uint64)
        for pair in zip(zip(*high, strict=True), zip(*low, strict=True), strict=True)
    ]
    expected = [changed("add", False, False), changed("mul", False, False), changed("fma", True, False)]
    expected.append(changed("sub", False, False))
    for reference, result in zip(expected, instructions.run(*inputs), strict=True):
        for upper, lower, got in zip(high, low, result.tolist(), strict=True):
            assert (got >> 32, got & 0xFFFFFFFF) == (reference(*upper), reference(*lower))


def test_doubles() -> None:
    texts = {"add.rn.f64 D, A, B": np.add, "sub.f64 D, A, B": np.subtract, "mul.rn.f64 D, A, B": np.multiply}
    texts |= {"div.rn.f64 D, A, B": np.divide, "min.f64 D, A, B": np.fmin, "max.f64 D, A, B": np.fmax}
    instructions = Instructions([*texts, "neg.f64 D, A", "abs.f64 D, A"], ["f64", "f64"], "f64")
    assert assemble(instructions.text) == ""
    generator = np.random.default_rng(1)
    a, b = (generator.normal(size=200) * 10.0 ** generator.integers(-300, 300, 200) for _ in range(2))
    with np.errstate(all="ignore"):
        expected: list[Array] = [operate(a, b) for operate in texts.values()] + [-a, abs(a)]
    for want, got in zip(expected, instructions.run(a.view(np.uint64), b.view(np.uint64)), strict=True):
        assert got.tolist() == want.view(np.uint64).tolist()


APPROXIMATED: dict[str, tuple[Callable[[float], float], float]] = {
    "rcp.rn.f32": (lambda x: 1 / x, 2.0**-24),
    "sqrt.rn.f32": (math.sqrt, 2.0**-24),
    "rcp.approx.f32": (lambda x: 1 / x, 2.0**-23),
    "sqrt.approx.ftz.f32": (math.sqrt, 2.0**-22),
    "rsqrt.approx.f32": (lambda x: 1 / math.sqrt(x), 2.0**-22),
    "ex2.approx.f32": (lambda x: 2.0**x, 2.0**-22),
    "ex2.approx.ftz.f32": (lambda x: 2.0**x, 2.0**-22),
}


def test_functions() -> None:
    """Within the bounds that PTX gives, and exact where it says so; lg2 within 2**-22 near 1, where it is small."""
    instructions = Instructions([*(f"{name} D, A" for name in APPROXIMATED), "lg2.approx.f32 D, A"], ["f32"], "f32")
    assert assemble(instructions.text) == ""
    values = np.concatenate([np.float32(2.0) ** np.arange(-40, 40, dtype=np.float32), np.linspace(0.1, 99, 500)])
    values = values.astype(np.float32)
    *results, logarithm = (one.view(np.float32).tolist() for one in instructions.run(values.view(np.uint32)))
    for (name, (exact, bound)), result in zip(APPROXIMATED.items(), results, strict=True):
        for x, got in zip(values.tolist(), result, strict=True):
            if name.startswith("ex2") and x > 120:
                continue
            assert abs(got - exact(x)) <= bound * abs(exact(x)), (name, x)
    for x, got in zip(values.tolist(), logarithm, strict=True):
        assert abs(got - math.log2(x)) <= 2.0**-22 * max(1.0, abs(math.log2(x)))
    edges = np.array([0x7F800000, 0, 0x80000000, 0xFF800000, 0xBF800000], np.uint32)
    found = dict(zip([*APPROXIMATED, "lg2"], (one.tolist() for one in instructions.run(edges)), strict=True))
    assert found["rcp.approx.f32"] == [0, 0x7F800000, 0xFF800000, 0x80000000, 0xBF800000]
    assert found["sqrt.rn.f32"] == [0x7F800000, 0, 0x80000000, NAN, NAN]
    assert found["ex2.approx.f32"] == [0x7F800000, 0x3F800000, 0x3F800000, 0, 0x3F000000]
    assert found["lg2"] == [0x7F800000, 0xFF800000, 0xFF800000, NAN, NAN]


def test_it_is_ptx() -> None:
    # the reference of ptxas for the others stands beside them
    assert assemble(singles().text) == ""


@pytest.mark.parametrize(
    ("value", "bits"), [(Fraction(1, 3), 0x3EAAAAAB), (Fraction(1, 1 << 150), 0), (Fraction(3, 1 << 150), 2)]
)
def test_the_rounding_here(value: Fraction, bits: int) -> None:
    assert rounded(value) == bits


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_single_precision_with_halves(kind: str) -> None:
    """Of sm_100: the inputs of 16 bits are widened, and the result is rounded once."""
    texts = [f"add.rn.f32.{kind} D, A, C", f"sub.f32.{kind} D, A, C", f"fma.rn.f32.{kind} D, A, B, C"]
    tried = Instructions(texts, (kind, kind, "f32"), "f32")
    assert not assemble(tried.text)
    halves = np.arange(0, 1 << 16, 37, dtype=np.uint32)
    others = np.resize(np.array(CORNERS, np.uint32), len(halves))
    a, b = halves, halves[::-1]
    wide = [
        one.astype(np.uint16).view(np.float16).astype(np.float32) if kind == "f16" else (one << 16).view(np.float32)
        for one in (a, b)
    ]
    bits = [one.view(np.uint32).tolist() for one in wide]
    found = tried.run(a, b, others)
    for name, got in zip(("add", "sub", "fma"), found, strict=True):
        second = bits[1] if name == "fma" else others.tolist()
        want = [arithmetic(name, *one) for one in zip(bits[0], second, others.tolist(), strict=True)]
        assert got.tolist() == want
