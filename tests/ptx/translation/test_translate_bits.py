"""Logic, shifts and fields against the loops by which PTX defines them, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ptx.translation.instructions import Instructions, assemble
from tests.ptx.translation.program import WIDTHS

Reference = Callable[[int, int, int, int], int]


def ones(bits: int) -> int:
    return (1 << bits) - 1


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def shifted_left(a: int, b: int, c: int, bits: int) -> int:
    return a << b if b < bits else 0


def shifted_right(a: int, b: int, c: int, bits: int) -> int:
    return a >> b


def shifted_right_signed(a: int, b: int, c: int, bits: int) -> int:
    return signed(a, bits) >> b


def extracted(a: int, b: int, c: int, bits: int, sign: bool) -> int:
    start, length = b & 255, c & 255
    top = a >> min(start + length - 1, bits - 1) & 1 if sign and length else 0
    fields = [a >> (start + i) & 1 if i < length and start + i < bits else top for i in range(bits)]
    return sum(one << i for i, one in enumerate(fields))


def inserted(a: int, b: int, c: int, bits: int) -> int:
    """Of a into itself inverted."""
    found, start, length = a ^ ones(bits), b & 255, c & 255
    for i in range(length):
        if start + i < bits:
            found = found & ~(1 << (start + i)) | (a >> i & 1) << (start + i)
    return found


def leading(a: int, bits: int, sign: bool, amount: bool) -> int:
    a = a ^ ones(bits) if sign and a >> (bits - 1) else a
    if not a:
        return ones(32)
    return bits - a.bit_length() if amount else a.bit_length() - 1


def permuted(a: int, b: int, c: int, bits: int) -> int:
    sources, found = (b << 32 | a).to_bytes(8, "little"), 0
    for i in range(4):
        nibble = c >> 4 * i & 15
        byte = sources[nibble & 7]
        found |= ((255 if byte >> 7 else 0) if nibble & 8 else byte) << 8 * i
    return found


def funnel(a: int, b: int, c: int, left: bool, wrap: bool) -> int:
    by = c & 31 if wrap else min(c, 32)
    both = b << 32 | a
    return both << by >> 32 if left else both >> by


def looked_up(table: int) -> Reference:
    def reference(a: int, b: int, c: int, bits: int) -> int:
        rows = [(a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(bits)]
        return sum((table >> row & 1) << i for i, row in enumerate(rows))

    return reference


def cases(bits: int) -> Iterator[tuple[str, str, Reference]]:
    """Instructions, the types of their result, and what they do with a, and b and c, which have 32 bits."""
    word = f"b{bits}"
    yield f"shl.b{bits} D, A, B", word, shifted_left
    for kind in "bu":
        yield f"shr.{kind}{bits} D, A, B", word, shifted_right
    yield f"shr.s{bits} D, A, B", word, shifted_right_signed
    yield f"not.b{bits} D, A", word, lambda a, b, c, bits: ~a
    yield f"and.b{bits} D, A, {ones(bits) // 3}", word, lambda a, b, c, bits: a & ones(bits) // 3
    yield f"or.b{bits} D, A, {ones(bits) // 5}", word, lambda a, b, c, bits: a | ones(bits) // 5
    yield f"xor.b{bits} D, A, -2", word, lambda a, b, c, bits: a ^ -2
    if bits == 16:
        return
    for kind in "us":
        sign = kind == "s"
        yield f"bfe.{kind}{bits} D, A, B, C", word, functools.partial(_extract, sign)
        yield f"bfind.{kind}{bits} D, A", "b32", functools.partial(_lead, sign, False)
        yield f"bfind.shiftamt.{kind}{bits} D, A", "b32", functools.partial(_lead, sign, True)
    yield f"not.b{bits} D, A; bfi.b{bits} D, A, D, B, C", word, inserted
    yield f"popc.b{bits} D, A", "b32", lambda a, b, c, bits: a.bit_count()
    yield f"clz.b{bits} D, A", "b32", lambda a, b, c, bits: bits - a.bit_length()
    yield f"brev.b{bits} D, A", word, lambda a, b, c, bits: int(f"{a:0{bits}b}"[::-1], 2)
    if bits == 32:
        yield "prmt.b32 D, A, B, C", word, permuted
        for left in (False, True):
            for wrap in (False, True):
                name = f"shf.{'l' if left else 'r'}.{'wrap' if wrap else 'clamp'}.b32 D, A, B, C"
                yield name, word, functools.partial(_funnel, left, wrap)
        for table in (0, 0x96, 0xE8, 0xCA, 0xFF, 0x2B):
            yield f"lop3.b32 D, A, B, C, {table}", word, looked_up(table)


def _extract(sign: bool, a: int, b: int, c: int, bits: int) -> int:
    return extracted(a, b, c, bits, sign)


def _lead(sign: bool, amount: bool, a: int, b: int, c: int, bits: int) -> int:
    return leading(a, bits, sign, amount)


def _funnel(left: bool, wrap: bool, a: int, b: int, c: int, bits: int) -> int:
    return funnel(a, b, c, left, wrap)


@functools.cache
def of(bits: int) -> list[tuple[Instructions, list[Reference]]]:
    """By type of the result the instructions, with their references."""
    found = []
    for kind in dict.fromkeys(kind for _, kind, _ in cases(bits)):
        mine = [(text, reference) for text, one, reference in cases(bits) if one == kind]
        inputs = [f"b{bits}", "b32", "b32"]
        found.append((Instructions([text for text, _ in mine], inputs, kind), [reference for _, reference in mine]))
    return found


def check(bits: int, inputs: list[tuple[int, int, int]]) -> None:
    columns = [np.array(column, np.uint64) for column in zip(*inputs, strict=True)]
    for instructions, references in of(bits):
        results = instructions.run(*columns)
        for text, reference, result in zip(instructions.texts, references, results, strict=True):
            for row, got in zip(inputs, result.tolist(), strict=True):
                assert got == reference(*row, bits) & ones(WIDTHS[instructions.result]), (text, row)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_corners(bits: int) -> None:
    """Distances and lengths around the width, and beyond the byte that some instructions take of them."""
    values = [0, 1, ones(bits), 1 << (bits - 1), ones(bits - 1), 0xA5C396E1D2B47780 & ones(bits), 0x80 << (bits - 8)]
    places = [0, 1, 5, bits // 2, bits - 1, bits, bits + 1, 2 * bits, 255, 256, 259, ones(32)]
    triples = [(a, b, places[(7 * i + 5 * j) % 12]) for i, a in enumerate(values) for j, b in enumerate(places)]
    check(bits, [*triples, *((a, b, c) for a in values[5:] for b in places for c in places)])


@pytest.mark.parametrize("bits", [16, 32, 64])
@settings(max_examples=10)
@given(data=st.data())
def test_numbers(bits: int, data: st.DataObject) -> None:
    near = st.integers(0, bits + 2) | st.integers(0, ones(32))
    check(bits, data.draw(st.lists(st.tuples(st.integers(0, ones(bits)), near, near), min_size=1, max_size=20)))


def test_predicates() -> None:
    texts = ["and.pred D, A, B", "or.pred D, A, B", "xor.pred D, A, B", "not.pred D, A", "mov.pred D, B"]
    instructions = Instructions(texts, ["pred", "pred"], "pred")
    assert assemble(instructions.text) == ""
    a, b = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    found = [result.tolist() for result in instructions.run(a, b)]
    assert found == [(a & b).tolist(), (a | b).tolist(), (a ^ b).tolist(), (1 - a).tolist(), b.tolist()]


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_it_is_ptx(bits: int) -> None:
    assert [assemble(instructions.text) for instructions, _ in of(bits)] == [""] * len(of(bits))
