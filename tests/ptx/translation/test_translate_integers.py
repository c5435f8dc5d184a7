"""Arithmetic of integers against Python's, which has no width."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ptx.translation.instructions import Instructions, assemble
from tests.ptx.translation.program import WIDTHS

TYPES = ("u16", "s16", "u32", "s32", "u64", "s64")
#: By instruction what it does with numbers, in Python.
WHOLE: dict[str, Callable[..., int]] = {
    "add": lambda a, b, c: a + b,
    "sub": lambda a, b, c: a - b,
    "mul.lo": lambda a, b, c: a * b,
    "mad.lo": lambda a, b, c: a * b + c,
    "min": lambda a, b, c: min(a, b),
    "max": lambda a, b, c: max(a, b),
    "sad": lambda a, b, c: c + abs(a - b),
    # towards 0; by 0, which PTX leaves open: all ones, and the dividend
    "div": lambda a, b, c: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else -1,
    "rem": lambda a, b, c: abs(a) % abs(b) * (1 if a >= 0 else -1) if b else a,
}
SIGNED: dict[str, Callable[..., int]] = {"neg": lambda a, b, c: -a, "abs": lambda a, b, c: abs(a)}
OPERANDS = {"mad.lo": "A, B, C", "sad": "A, B, C", "neg": "A", "abs": "A"}


def value(bits: int, kind: str) -> int:
    """The number that ``bits`` are."""
    width = WIDTHS[kind]
    bits &= (1 << width) - 1
    return bits - (1 << width) if kind[0] == "s" and bits >> (width - 1) else bits


def corners(kind: str) -> list[int]:
    width = WIDTHS[kind]
    near = [0, 1, 2, 7, 1 << (width // 2), 1 << (width - 1), 1 << width]
    return sorted({(one + step) % (1 << width) for one in near for step in (-1, 0, 1)})


@functools.cache
def of(kind: str) -> list[Instructions]:
    """All instructions of a type: those with a result of its width, and the wide ones where there are some."""
    names = [*WHOLE, *(SIGNED if kind[0] == "s" else ())]
    texts = [f"{name}.{kind} D, {OPERANDS.get(name, 'A, B')}" for name in names]
    texts += [f"mul.hi.{kind} D, A, B", f"mad.hi.{kind} D, A, B, C"]
    if kind == "s32":
        texts += ["add.sat.s32 D, A, B", "sub.sat.s32 D, A, B", "max.relu.s32 D, A, B", "min.relu.s32 D, A, B"]
    found = [Instructions(texts, [kind] * 3, kind)]
    if WIDTHS[kind] < 64:
        twice = f"{kind[0]}{2 * WIDTHS[kind]}"
        texts = [f"mul.wide.{kind} D, A, B", f"mad.wide.{kind} D, A, B, C"]
        found.append(Instructions(texts, [kind, kind, twice], twice))
    return found


def check(kind: str, inputs: list[tuple[int, int, int]]) -> None:
    width = WIDTHS[kind]
    narrow, *wide = of(kind)
    columns = [np.array(column, np.uint64) for column in zip(*inputs, strict=True)]
    numbers = [tuple(value(one, kind) for one in row) for row in inputs]

    def compare(found: np.ndarray, name: str, expected: Callable[..., int], bits: int) -> None:
        for row, got in zip(numbers, found.tolist(), strict=True):
            assert got == expected(*row) & ((1 << bits) - 1), (name, kind, row)

    results = iter(narrow.run(*columns))
    for name, expected in (WHOLE | (SIGNED if kind[0] == "s" else {})).items():
        compare(next(results), name, expected, width)
    compare(next(results), "mul.hi", lambda a, b, c: a * b >> width, width)
    compare(next(results), "mad.hi", lambda a, b, c: (a * b >> width) + c, width)
    if kind == "s32":
        least, most = -(1 << 31), (1 << 31) - 1
        compare(next(results), "add.sat", lambda a, b, c: max(least, min(most, a + b)), width)
        compare(next(results), "sub.sat", lambda a, b, c: max(least, min(most, a - b)), width)
        compare(next(results), "max.relu", lambda a, b, c: max(a, b, 0), width)
        compare(next(results), "min.relu", lambda a, b, c: max(min(a, b), 0), width)
    if wide:
        third = np.array([row[2] % (1 << 64) for row in numbers], np.uint64)
        products = wide[0].run(columns[0], columns[1], third)
        compare(products[0], "mul.wide", lambda a, b, c: a * b, 2 * width)
        compare(products[1], "mad.wide", lambda a, b, c: a * b + c, 2 * width)


@pytest.mark.parametrize("kind", TYPES)
def test_corners(kind: str) -> None:
    some = corners(kind)
    check(kind, [(a, b, some[(3 * i + j) % len(some)]) for i, a in enumerate(some) for j, b in enumerate(some)])


@pytest.mark.parametrize("kind", TYPES)
@settings(max_examples=10)
@given(data=st.data())
def test_numbers(kind: str, data: st.DataObject) -> None:
    number = st.integers(0, (1 << WIDTHS[kind]) - 1)
    check(kind, data.draw(st.lists(st.tuples(number, number, number), min_size=1, max_size=20)))


@pytest.mark.parametrize("kind", TYPES)
def test_it_is_ptx(kind: str) -> None:
    assert [assemble(one.text) for one in of(kind)] == [""] * len(of(kind))
